//! Drafted tokens, checked by the model in one pass: `_assisted_decoding` of transformers/generation/utils.py, with the
//! drafts of generation/candidate_generator.py.
//!
//! The assistant is a second model on the card, with a cache of its own that lives from round to round. The first check
//! takes the prompt along. What a check left behind (its logits, twice in fp32, and the assistant's) is alive until the
//! next one has replaced it. How many drafted tokens are accepted depends on data: the plan says which end is assumed.

use std::sync::Arc;

use super::batch::{Batch, longer};
use super::choose;
use super::loaded::Loaded;
use super::{Run, growing, sampled};
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::lower::cache::Store;
use crate::memory::phase::Work;
use crate::memory::stored;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{CacheKind, Op};
use crate::model::{Model, Program, Shape, Step, Task};
use crate::plan::{Accepted, Assistant, CacheImplementation, Choice, Draft, Fault, InferPlan, PlanError};

/// Passes that are simulated at most, over all rounds.
const ALL_PASSES: u64 = 1024;
/// Rounds at the start and at the end that are simulated in any case.
const EDGE_ROUNDS: u64 = 4;

/// A model that drafts, and the plan it runs by.
pub(super) struct Helper {
    model: Model,
    plan: InferPlan,
    pub(super) notes: Vec<String>,
}

impl Helper {
    /// The assistant of a plan.
    pub(super) fn new(plan: &InferPlan, assistant: &Assistant) -> Result<Self, PlanError> {
        if assistant.config.is_null() {
            let expected = "a model whose config is known, or its config is under {assistant.config}";
            return Err(Fault::value("assistant.model", &assistant.model, expected).into());
        }
        let model = Model::new(assistant.config.clone(), None)?;
        let own = InferPlan {
            weights: assistant.weights,
            quantization: None,
            assistant: None,
            prompt_lookup: None,
            ..plan.clone()
        };
        let found = stored::in_inference(&model, None, &plan.gpu)?;
        let own = InferPlan { quantization: found.bitsandbytes(), ..own };
        refuse(&model, &model.program(own.inputs(own.batch.seq_len, 0))?)?;
        Ok(Self { model, plan: own, notes: found.notes })
    }

    /// Its parameters and buffers onto the card.
    pub(super) fn load(&self, torch: &mut Torch) -> Result<Loaded, PlanError> {
        let program = self.model.program(self.plan.inputs(self.plan.batch.seq_len, 0))?;
        let found = stored::in_inference(&self.model, None, &self.plan.gpu)?;
        Ok(Loaded::load(torch, &program, &self.plan, found.stored()))
    }
}

/// What cannot take part in assisted decoding.
pub(super) fn refuse(model: &Model, program: &Program) -> Result<(), PlanError> {
    let refused = |what: &str| {
        let what = format!("assisted or prompt-lookup decoding of {what}");
        Err(Fault::unsupported("assistant", what).or_drop("assistant").or_drop("prompt_lookup").into())
    };
    let keeps_state = |step: &Step| matches!(step, Step::Run { op: Op::Cache(update), .. } if matches!(update.kind, CacheKind::State { .. }));
    match model.task() {
        _ if program.steps.iter().any(keeps_state) => {
            refused("a model with a state instead of a cache, which cannot forget rejected tokens,")
        }
        Task::CausalLm => Ok(()),
        _ => refused("anything but a decoder"),
    }
}

/// What a report says about drafts.
pub(super) fn note(draft: Draft<'_>, accepted: Accepted) -> String {
    let drafts = match draft {
        Draft::Assistant(assistant) => {
            format!("the assistant drafts {} tokens a round (it never stops for want of confidence)", assistant.tokens)
        }
        Draft::PromptLookup(tokens) => format!("every lookup finds a draft of {tokens} tokens"),
    };
    let accepted = match accepted {
        Accepted::All => "all of them are accepted",
        Accepted::None => "none of them is accepted",
    };
    format!("{drafts} and {accepted}: real runs lie between, the prompt's pass is the same")
}

/// What the loop's variables hold from one round to the next.
#[derive(Default)]
struct Held {
    candidate_scores: Option<Tensor>,
    outputs: Vec<Tensor>,
    new_logits: Option<Tensor>,
    next_token_logits: Option<Tensor>,
    probabilities: Option<Tensor>,
}

impl Run<'_> {
    /// The loop. `helper` drafts; without one, drafts are looked up.
    pub(super) fn assisted(
        &mut self,
        model: &Model,
        prompt: &Arc<Program>,
        helper: Option<(&Helper, Loaded)>,
    ) -> Result<(), PlanError> {
        let plan = self.plan;
        let Some(draft) = plan.draft() else { return Ok(()) };
        self.phase(Work::Generate);
        let store = Store::new(CacheImplementation::Dynamic, 0, growing(prompt));
        store.batch_experts(false);
        self.model.store = Some(store);
        self.batch.prepare(&mut self.torch, prompt, plan, false);
        // The assistant begins with the model's own mask and positions, and makes them longer for itself.
        let mut drafting = helper.map(|(helper, loaded)| Drafting { helper, loaded, batch: self.batch.shared() });
        let mut held = Held::default();
        let rounds = draft.rounds(plan.batch.seq_len, plan.new_tokens, plan.accepted);
        let count = u64::try_from(rounds.clone().count()).unwrap_or(u64::MAX);
        let chosen = sampled(count, (ALL_PASSES / (draft.tokens() + 1)).max(2 * EDGE_ROUNDS + 1), EDGE_ROUNDS);
        let mut chosen = chosen.into_iter().peekable();
        for (index, (length, drafted)) in (0..).zip(rounds) {
            if chosen.next_if_eq(&index).is_none() {
                continue;
            }
            self.batch.grow_to(length);
            let candidates = match (&mut drafting, draft) {
                _ if drafted == 0 => self.batch.ids.clone(),
                (Some(drafting), _) => {
                    let (ids, scores) =
                        drafting.draft(&mut self.torch, &self.batch.ids, length, drafted, index == 0)?;
                    held.candidate_scores = Some(scores);
                    ids
                }
                (None, Draft::PromptLookup(_) | Draft::Assistant(_)) => self.look_up(model, drafted),
            };
            let inputs = plan.checking_inputs(length, drafted, index == 0);
            let past = inputs.past;
            let program = Arc::new(model.program(inputs)?);
            let batch = self.batch.with_candidates(&mut self.torch, candidates, drafted);
            let outputs = self.model.pass(&mut self.torch, &batch, &program, past);
            held.outputs = outputs;
            self.check_draft(&mut held, drafted);
            drop(batch);
        }
        self.model.store = None;
        drop(held);
        let assistant = drafting.map(|drafting| Loaded { store: None, ..drafting.loaded });
        self.torch.log.borrow_mut().end_phase();
        // The caller still has it.
        drop(assistant);
        Ok(())
    }

    /// The model's own choice at every drafted position, and the tokens that both agree on.
    fn check_draft(&mut self, held: &mut Held, drafted: u64) {
        let Some(logits) = held.outputs.first() else { return };
        let (plan, vocabulary) = (self.plan, logits.shape.last());
        let before = self.torch.log.borrow_mut().set_category(Category::Logits);
        let torch = &mut self.torch;
        let shape = Shape::from([1, drafted.saturating_add(1), vocabulary]);
        held.new_logits = Some(torch.fresh("_to_copy", shape, DType::F32));
        held.next_token_logits = Some(torch.fresh("clone", shape, DType::F32));
        let one = torch.phantom(Shape::from([1, vocabulary]), DType::F32);
        let mut length = self.batch.ids.shape.size(1);
        let end = plan.batch.seq_len.saturating_add(plan.new_tokens);
        for _ in 0..=drafted {
            drop(choose::process(torch, plan, &one, length < end));
            length = length.saturating_add(1);
        }
        match (plan.choice, &held.candidate_scores) {
            (Choice::Greedy, _) => drop(torch.fresh("argmax", Shape::from([drafted + 1]), DType::I64)),
            (Choice::Sample, Some(scores)) if drafted > 0 => speculate(torch, scores.shape, shape),
            (Choice::Sample, _) => {
                held.probabilities = Some(torch.fresh("_softmax", shape, DType::F32));
                drop(torch.scratch("multinomial", shape.elements().saturating_mul(4)));
            }
        }
        torch.log.borrow_mut().set_category(before);
        let kept = if plan.accepted == Accepted::All { drafted } else { 0 };
        self.batch.accept(&mut self.torch, kept.saturating_add(1));
    }

    /// Windows of the prompt are compared with its end; what follows a match is the draft, if the processors allow it.
    fn look_up(&mut self, model: &Model, drafted: u64) -> Tensor {
        let (torch, length) = (&mut self.torch, self.batch.ids.shape.size(1));
        let equal = torch.fresh("eq", Shape::from([1, length.saturating_sub(1), 2]), DType::Bool);
        let matches = torch.fresh("all", Shape::from([1, length.saturating_sub(1)]), DType::Bool);
        drop(equal);
        let text = Some(&model.config()["text_config"]).filter(|text| text.is_object()).unwrap_or(model.config());
        let vocabulary = text["vocab_size"].as_u64().unwrap_or(0);
        let allowed = torch.fresh("ones", Shape::from([1, vocabulary]), DType::F32);
        let mut processed = None;
        let end = self.plan.batch.seq_len.saturating_add(self.plan.new_tokens);
        for more in 0..drafted {
            processed = choose::process(torch, self.plan, &allowed, length.saturating_add(more) < end).or(processed);
        }
        let ids = longer(torch, &self.batch.ids, drafted);
        drop((matches, allowed, processed));
        ids
    }
}

/// `_speculative_sampling`: both models' probabilities, and the rest from which a rejected token is drawn again.
fn speculate(torch: &mut Torch, assistant: Shape, own: Shape) {
    let one = Shape::from([1, own.last()]);
    let theirs = torch.fresh("_softmax", assistant, DType::F32);
    let ours = torch.fresh("_softmax", own, DType::F32);
    let difference = torch.fresh("sub", one, DType::F32);
    let rest = torch.fresh("clamp", one, DType::F32);
    drop(difference);
    drop(torch.scratch("multinomial", one.elements().saturating_mul(4)));
    drop((rest, ours, theirs));
}

/// The assistant at work.
struct Drafting<'a> {
    helper: &'a Helper,
    loaded: Loaded,
    /// Its own mask and positions.
    batch: Batch,
}

impl Drafting<'_> {
    /// `generate` of the assistant: the drafted ids after the others, and the scores of each, stacked.
    fn draft(
        &mut self,
        torch: &mut Torch,
        ids: &Tensor,
        length: u64,
        drafted: u64,
        first: bool,
    ) -> Result<(Tensor, Tensor), PlanError> {
        let plan = &self.helper.plan;
        if !first {
            self.batch.reach(torch, length);
        }
        let mut inner = self.batch.shared();
        inner.ids = ids.clone();
        let mut scores: Vec<Tensor> = Vec::new();
        for step in 0..drafted {
            // What was accepted last and the token that the model added are new to its cache.
            let (new, past) = match (step, first) {
                (0, true) => (length, 0),
                (0, false) => (2, length.saturating_sub(2)),
                _ => (1, length.saturating_add(step).saturating_sub(1)),
            };
            let program = Arc::new(self.helper.model.program(plan.inputs(new, past))?);
            let layers = growing(&program);
            let new_store = || Store::new(CacheImplementation::Dynamic, 0, layers);
            self.loaded.store.get_or_insert_with(new_store).batch_experts(step > 0);
            let known = torch.log.borrow().storages.len();
            let outputs = self.loaded.pass(torch, &inner, &program, past);
            // Its modules are not those of the model that a report names.
            torch.log.borrow_mut().storages.iter_mut().skip(known).for_each(|storage| storage.module = 0);
            let Some(logits) = outputs.into_iter().next() else { continue };
            inner.update(torch);
            let one = Shape::from([1, logits.shape.last()]);
            let before = torch.log.borrow_mut().set_category(Category::Logits);
            let logits = inner.next.choose(torch, logits, &choose::Choosing::of(plan));
            scores.extend(inner.next.scores());
            // How sure it is of the token decides whether it goes on.
            drop(torch.fresh("_softmax", one, DType::F32));
            torch.log.borrow_mut().set_category(before);
            inner.append(torch);
            drop(logits);
        }
        let ids = inner.ids.clone();
        drop(inner);
        let vocabulary = scores.first().map_or(0, |scores| scores.shape.last());
        let before = torch.log.borrow_mut().set_category(Category::Logits);
        let stacked = torch.fresh("stack", Shape::from([1, drafted, vocabulary]), DType::F32);
        torch.log.borrow_mut().set_category(before);
        Ok((ids, stacked))
    }
}
