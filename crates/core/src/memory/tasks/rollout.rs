//! `generate` inside a training run: the policy as it is, in training mode, under accelerate's autocast, with a cache of its own.

use std::cell::RefCell;
use std::rc::Rc;

use super::player::{Given, Player};
use super::{At, in_phase, numbers, without_graph};
use crate::memory::infer::batch::Batch;
use crate::memory::infer::choose::Choosing;
use crate::memory::infer::within::Within;
use crate::memory::log::Event;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan::{self, CacheImplementation, Checkpointing, Choice, InferPlan, PlanError, TaskKind, TrainPlan};

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
    let run = |torch: &mut Torch| without_graph(torch, |torch| unwrapped(torch, player, plan, what));
    let made = in_phase(torch, at, Work::Generate, run);
    (player.settings.autocast, player.widens) = (autocast, widens);
    made
}

/// trl.experimental generates without a cache where layers are recomputed (`use_cache` of online_dpo and gkd).
fn cache(plan: &TrainPlan) -> CacheImplementation {
    let experimental = matches!(plan.objective.kind, TaskKind::OnlineDpo | TaskKind::Gkd);
    match experimental && plan.checkpointing == Checkpointing::Full {
        true => CacheImplementation::None,
        false => CacheImplementation::Dynamic,
    }
}

/// `unwrap_model_for_generation`.
fn unwrapped(torch: &mut Torch, player: &mut Player, plan: &TrainPlan, what: Rollout) -> Result<Tensor, PlanError> {
    let engine = player.engine.clone();
    if !engine.as_ref().is_some_and(|(engine, _)| engine.before_generation(torch)) {
        return run(torch, player, plan, what, None);
    }
    let hooks = player.hooks.take();
    player.engine = None;
    let made = run(torch, player, plan, what, None);
    engine.iter().for_each(|(engine, _)| engine.after_generation(torch));
    (player.hooks, player.engine) = (hooks, engine);
    made
}

/// The same without a trainer's wrapper, with `output_scores`: all token ids, and what was sampled from.
pub(super) fn scored(
    torch: &mut Torch,
    player: &mut Player,
    plan: &TrainPlan,
    what: Rollout,
) -> Result<(Tensor, Vec<Tensor>), PlanError> {
    let scores = RefCell::default();
    let ids = without_graph(torch, |torch| run(torch, player, plan, what, Some(&scores)))?;
    Ok((ids, scores.into_inner()))
}

fn run(
    torch: &mut Torch,
    player: &mut Player,
    plan: &TrainPlan,
    what: Rollout,
    scores: Option<&RefCell<Vec<Tensor>>>,
) -> Result<Tensor, PlanError> {
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
        cache: cache(plan),
        forced_length: objective.forced_length,
        gpu: plan.gpu.clone(),
        ..InferPlan::default()
    };
    let choosing = Choosing {
        // PPOTrainer adds a little to it, so that it is never 1.
        temperature: objective.kind == TaskKind::Ppo || objective.temperature.is_some_and(|value| value != 1.0),
        // GRPOConfig.top_k and its like: 0, all of them.
        likeliest: objective.top_k.filter(|count| *count > 0),
        ..Choosing::of(&how)
    };
    let programs = Rc::clone(&player.programs);
    let within = Within { programs: &*programs, how: &how, choosing, decoder: false, scores };
    let prompt = within.prompt()?;
    let batch = Batch::new(torch, &prompt, &how);
    within.run(torch, batch, &prompt, &mut |torch, batch, program, (store, past)| {
        let ids = batch.ids.clone();
        let mask = batch.mask.clone().unwrap_or_else(|| ids.clone());
        let given = Given { ids: &ids, mask: &mask, labels: None, padded: what.padded };
        player.cached_pass(torch, program, (&given, store), past)
    })
}
