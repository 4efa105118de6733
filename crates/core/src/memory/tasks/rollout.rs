//! `generate` inside a training run: the policy as it is, in training mode, under accelerate's autocast, with a cache of its own.

use std::rc::Rc;

use super::player::{Given, Player};
use super::{At, in_phase, numbers, without_graph};
use crate::memory::infer::batch::Batch;
use crate::memory::infer::choose::Choosing;
use crate::memory::infer::{growing, steps};
use crate::memory::log::{Category, Event};
use crate::memory::lower::cache::Store;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan::{self, CacheImplementation, Choice, InferPlan, PlanError, TrainPlan};

/// What is generated: so many sequences of a prompt and new tokens.
#[derive(Clone, Copy)]
pub(super) struct Rollout {
    pub(super) rows: u64,
    pub(super) prompt: u64,
    pub(super) tokens: u64,
    /// Whether prompts are padded.
    pub(super) padded: bool,
}

/// Runs it as a phase; returns all token ids.
pub(super) fn generate(
    torch: &mut Torch,
    player: &mut Player,
    (plan, at): (&TrainPlan, At),
    what: Rollout,
) -> Result<Tensor, PlanError> {
    if let Some(vllm) = &plan.objective.vllm {
        return Ok(in_phase(torch, at, Work::Generate, |torch| {
            if vllm.enable_sleep_mode {
                torch.log.borrow_mut().events.push(Event::EmptyCache);
            }
            numbers(torch, what.rows, what.prompt.saturating_add(what.tokens))
        }));
    }
    // accelerate's autocast is around the adapters' model; `generate` calls the one inside.
    let (autocast, widens) = (player.settings.autocast, player.widens);
    if plan.adapter.is_some() {
        (player.settings.autocast, player.widens) = (None, false);
    }
    let run = |torch: &mut Torch| without_graph(torch, |torch| run(torch, player, plan, what));
    let made = in_phase(torch, at, Work::Generate, run);
    (player.settings.autocast, player.widens) = (autocast, widens);
    made
}

fn run(torch: &mut Torch, player: &mut Player, plan: &TrainPlan, what: Rollout) -> Result<Tensor, PlanError> {
    let objective = &plan.objective;
    let how = InferPlan {
        batch: plan::Batch {
            batch_size: what.rows,
            seq_len: what.prompt,
            padded: what.padded,
            ..plan::Batch::default()
        },
        new_tokens: what.tokens,
        weights: plan.weights,
        attention: plan.attention,
        choice: Choice::Sample,
        forced_length: objective.forced_length,
        gpu: plan.gpu.clone(),
        ..InferPlan::default()
    };
    let choosing = Choosing {
        temperature: objective.temperature.is_some_and(|value| value != 1.0),
        // GRPOConfig.top_k and its like: 0, all of them.
        likeliest: objective.top_k.filter(|count| *count > 0),
        ..Choosing::of(&how)
    };
    let prompt = (player.programs)(how.inputs(what.prompt, 0))?;
    let mut batch = Batch::new(torch, &prompt, &how);
    let room = what.prompt.saturating_add(what.tokens).saturating_sub(1);
    let store = Store::new(CacheImplementation::Dynamic, room, growing(&prompt));
    batch.prepare(torch, &prompt, &how, false);
    let mut passes = Passes { player, store, padded: what.padded, choosing };
    passes.one(torch, &mut batch, &prompt, 0);
    for past in steps(what.prompt, what.tokens.saturating_sub(1)) {
        let program = (passes.player.programs)(how.inputs(1, past))?;
        batch.grow_to(past.saturating_add(1));
        passes.one(torch, &mut batch, &program, past);
    }
    batch.next.clear();
    Ok(batch.ids)
}

struct Passes<'a, 'b> {
    player: &'a mut Player<'b>,
    store: Rc<Store>,
    padded: bool,
    choosing: Choosing,
}

impl Passes<'_, '_> {
    /// A pass, and the token it leads to.
    fn one(&mut self, torch: &mut Torch, batch: &mut Batch, program: &Rc<crate::model::Program>, past: u64) {
        let ids = batch.ids.clone();
        let mask = batch.mask.clone().unwrap_or_else(|| ids.clone());
        let given = Given { ids: &ids, mask: &mask, labels: None, padded: self.padded };
        let outputs = self.player.cached_pass(torch, program, (&given, &self.store), past);
        drop((ids, mask));
        let Some(logits) = outputs.into_iter().next() else { return };
        batch.update(torch);
        let choosing = &self.choosing;
        let logits = torch.in_category(Category::Logits, |torch| batch.next.choose(torch, logits, choosing));
        batch.append(torch);
        drop(logits);
    }
}
