//! `generate` of transformers on one card: load, the prompt in one pass, then token by token.
//!
//! Every pass is a program of its own, because sizes grow with the cache. Up to [`ALL_STEPS`] tokens every step is
//! simulated, exactly. Beyond, the first and the last steps are, and between them a step now and then whose cache has grown by
//! as much as the skipped ones would have made it: peaks of the first and last steps are exact, what fragmentation the
//! skipped copies leave behind is approximated.

mod assisted;
pub(super) mod batch;
mod cards;
pub(super) mod choose;
mod loaded;
mod pipeline;
pub mod placement;
pub(super) mod within;

use std::rc::Rc;
use std::sync::Arc;

use super::depth::{self, Beside};
use super::device::Device;
use super::fold;
use super::log::{Category, Event, Log, SharedLog};
use super::lower::cache::Store;
use super::phase::Work;
use super::repeat::{Start, StepRange, Tape};
use super::stored;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::model::op::{CacheKind, Input, Op};
use crate::model::{Inputs, Model, Program, Step, Task};
use crate::plan::{CacheImplementation, Choice, Fault, InferPlan, PlanError};
use assisted::Helper;
use batch::Batch;
use loaded::Loaded;

/// Up to so many decoding steps are all simulated.
pub const ALL_STEPS: u64 = 512;
/// Steps at the start and at the end that are simulated in any case.
const EDGE_STEPS: u64 = 16;

/// Runs `generate` (or one forward pass, twice, without new tokens) and returns the prompt's program and what happened.
pub fn simulate(model: &Model, plan: &InferPlan) -> Result<(Arc<Program>, Log, Vec<String>), PlanError> {
    plan.check_on(model)?;
    refuse(model, plan)?;
    let uncached;
    let plan = if keeps_no_cache(model.config()) && plan.new_tokens > 0 {
        uncached = InferPlan { cache: CacheImplementation::None, ..plan.clone() };
        &uncached
    } else {
        plan
    };
    let found = stored::in_inference(model, plan.quantization.as_ref(), &plan.gpu)?;
    let quantised;
    let plan = match found.bitsandbytes() {
        Some(quantization) => {
            quantised = InferPlan { quantization: Some(quantization), ..plan.clone() };
            &quantised
        }
        None => plan,
    };
    let mut torch = new_torch(plan);
    let decoder = plan.new_tokens > 0 && beside_encoder(model);
    let prompt = if decoder { plan.decoder_inputs(0) } else { plan.inputs(plan.batch.seq_len, 0) };
    let program = model.shared_program(prompt)?;
    if matches!(plan.cache, CacheImplementation::Quantized(_)) && program.steps.iter().any(needs_width) {
        // `QuantizedCache` raises a ValueError for any other kind of layer.
        let what =
            "a quantised cache of a model with layers other than full attention, which transformers refuses too,";
        return Err(Fault::unsupported("cache", what).or_set("cache", "dynamic").into());
    }
    let mut notes = found.notes.clone();
    let helper = plan.assistant.as_ref().map(|assistant| Helper::new(plan, assistant)).transpose()?;
    if plan.draft().is_some() {
        assisted::refuse(model, &program)?;
    }
    let dealt = match &plan.device_map {
        Some(_) if found.stored().is_some() => {
            return Err(Fault::unsupported("device_map", "a quantised checkpoint over a device map")
                .or_drop("device_map")
                .into());
        }
        Some(map) => Some(Rc::new(cards::deal(&program, plan, map, &mut notes)?)),
        None => None,
    };
    let mut weights = match model.is_pipeline() {
        true => Loaded::pipeline(&mut torch, &program, plan),
        false => Loaded::load(&mut torch, &program, plan, found.stored()),
    };
    if let Some(dealt) = dealt {
        cards::settle(&mut torch, &program, &weights, &dealt, &mut notes);
        weights.dealt = Some(dealt);
    }
    let assistant = helper.as_ref().map(|helper| Ok::<_, PlanError>((helper, helper.load(&mut torch)?))).transpose()?;
    notes.extend(helper.iter().flat_map(|helper| helper.notes.iter().cloned()));
    let mut run = Run::new(torch, weights, &program, plan);
    match plan.draft() {
        Some(draft) => {
            notes.push(assisted::note(draft, plan.accepted));
            run.assisted(model, &program, assistant)?;
        }
        None if plan.new_tokens > 0 && plan.beams == 1 && model.config()["use_mtp"] == true => {
            notes.push(
                "the config asks for drafts by the model's own MTP layers (use_mtp): this is plain decoding".into(),
            );
            run.generate(model, &program)?;
        }
        None if model.is_pipeline() => run.pipeline(model, &program),
        None if plan.new_tokens == 0 => run.forward_twice(&program),
        None => run.generate(model, &program)?,
    }
    Ok((program, run.finish()?, notes))
}

/// What is not modelled, by name.
fn refuse(model: &Model, plan: &InferPlan) -> Result<(), PlanError> {
    let refused = |path: &str, what: &str, set: &str| Err(Fault::unsupported(path, what).or_set(path, set).into());
    match model.task() {
        Task::SpeechSeq2Seq if plan.new_tokens > 0 && plan.beams > 1 => {
            let what = "beams of a speech model, which retries at other temperatures,";
            Err(Fault::unsupported("beams", what).or_set("beams", 1).into())
        }
        Task::SpeechSeq2Seq if plan.new_tokens > 0 && plan.choice == Choice::Sample => {
            refused("choice", "sampling of a speech model, which retries at other temperatures,", "greedy")
        }
        _ if plan.cache == CacheImplementation::Offloaded && (plan.beams > 1 || beside_encoder(model)) => {
            refused("cache", "beams or an encoder-decoder over an offloaded cache", "dynamic")
        }
        _ if matches!(plan.cache, CacheImplementation::Quantized(_))
            && (plan.beams > 1 || beside_encoder(model) || plan.new_tokens == 0) =>
        {
            refused("cache", "a quantised cache with beams, beside an encoder or in a plain forward pass", "dynamic")
        }
        task if !task.generates() && plan.new_tokens > 0 => {
            let what = "generate of a model without a decoder";
            Err(Fault::unsupported("new_tokens", what).or_set("new_tokens", 0).into())
        }
        _ => Ok(()),
    }
}

/// Whether the config says `use_cache: false`, whose word `generate` takes (MPT); where it says nothing, its decoder's config does
/// (LLaVA-NeXT 34B; `GenerationConfig.from_model_config`).
fn keeps_no_cache(config: &serde_json::Value) -> bool {
    config["use_cache"].as_bool().or(config["text_config"]["use_cache"].as_bool()) == Some(false)
}

/// Whether a decoder generates beside an encoder.
fn beside_encoder(model: &Model) -> bool {
    model.task().encodes()
}

/// Layers that keep something else than keys and values of all positions.
fn needs_width(step: &Step) -> bool {
    matches!(step, Step::Run { op: Op::Cache(update), .. } if update.kind != CacheKind::Full)
}

/// The passes over one token that are simulated, by how many tokens are cached before each.
pub(super) fn steps(prompt: u64, count: u64) -> impl Iterator<Item = u64> {
    sampled(count, ALL_STEPS, EDGE_STEPS).into_iter().map(move |step| prompt.saturating_add(step))
}

/// Which of `count` steps are simulated: all of them up to `all`, else `edge` at either end and some between.
fn sampled(count: u64, all: u64, edge: u64) -> Vec<u64> {
    if count <= all {
        return (0..count).collect();
    }
    let stride = (count - 2 * edge).div_ceil(all - 2 * edge).max(1);
    let middle = (edge..count - edge).step_by(usize::try_from(stride).unwrap_or(usize::MAX));
    (0..edge).chain(middle).chain(count - edge..count).collect()
}

/// A run under way.
struct Run<'a> {
    torch: Torch,
    plan: &'a InferPlan,
    model: Loaded,
    batch: Batch,
}

impl<'a> Run<'a> {
    /// The batch beside a model that is on the card.
    fn new(mut torch: Torch, model: Loaded, program: &Program, plan: &'a InferPlan) -> Self {
        let batch = Batch::new(&mut torch, program, plan);
        torch.log.borrow_mut().events.push(Event::EmptyCache);
        Self { torch, plan, model, batch }
    }

    /// One pass.
    fn pass(&mut self, program: &Arc<Program>, past: u64) -> Vec<Tensor> {
        self.model.pass(&mut self.torch, &self.batch, program, past)
    }

    /// `model(**batch)` twice: the first pass makes workspaces, the second is what all later ones are.
    fn forward_twice(&mut self, program: &Arc<Program>) {
        for work in [Work::FirstPass, Work::SecondPass] {
            self.phase(work);
            self.model.store = (self.plan.cache != CacheImplementation::None)
                .then(|| Store::new(self.plan.cache, 0, growing(program)));
            let outputs = self.pass(program, 0);
            self.torch.log.borrow_mut().end_phase();
            drop(outputs);
        }
    }

    fn generate(&mut self, model: &Model, prompt: &Arc<Program>) -> Result<(), PlanError> {
        let plan = self.plan;
        self.begin(model, prompt);
        let first = first_tokens(model, plan);
        let tokens = plan.stop_after.unwrap_or(plan.new_tokens).min(plan.new_tokens);
        let pasts: Vec<u64> = steps(first, tokens.saturating_sub(1)).collect();
        // Layers on several cards are not alike.
        let mut few = match pasts.len() > ENOUGH && plan.device_map.is_none() {
            true => Few::beside(model, plan)?,
            false => Beside::default(),
        };
        // Beams copy the cache in another order after each token, which is no layer's doing.
        let mut tape = Tape::new(plan.beams == 1);
        for (done, past) in pasts.iter().enumerate() {
            let Self { torch, model: loaded, batch, .. } = self;
            tape.part_or(torch, (*past, 0, pasts.len() - done), &mut few, |torch| {
                token(torch, (loaded, batch), (model, plan), *past)
            })?;
        }
        let Self { torch, model: loaded, batch, .. } = self;
        tape.apart(torch, |_| {
            loaded.store = None;
            batch.next.clear();
            Ok(())
        })?;
        torch.log.borrow_mut().end_phase();
        // The caller's batch goes before the model; what of it grew is known by other names.
        tape.apart(torch, |torch| {
            batch.let_go(torch);
            Ok(())
        })
    }

    /// The pass over the prompt, and the token that it leads to.
    fn begin(&mut self, model: &Model, prompt: &Arc<Program>) {
        let (plan, decoder) = (self.plan, beside_encoder(model));
        self.phase(Work::Generate);
        let room = first_tokens(model, plan).saturating_add(plan.new_tokens).saturating_sub(1);
        let store = Store::new(plan.cache, room, growing(prompt));
        store.batch_experts(plan.beams == 1);
        self.model.store = Some(store);
        self.batch.prepare(&mut self.torch, prompt, plan, decoder);
        let mut outputs = self.pass(prompt, 0);
        if decoder {
            let states = outputs.drain(1.min(outputs.len())..);
            self.batch.media.extend(states.map(|states| (Input::Encoded, states)));
        }
        choose_next(&mut self.torch, (&self.model, &mut self.batch), plan, outputs);
    }

    fn phase(&self, work: Work) {
        self.torch.log.borrow_mut().phase(work.into());
    }

    fn finish(self) -> Result<Log, PlanError> {
        let Self { torch, model, batch, .. } = self;
        torch.finish((batch, model))
    }
}

/// So many passes are worth a shallow model beside the whole.
const ENOUGH: usize = 8;

/// The same run of a model of few layers.
struct Few<'a> {
    model: Model,
    run: Run<'a>,
}

impl<'a> Few<'a> {
    /// Loads it beside the whole and runs its prompt, where layers do the same for every token.
    fn beside(whole: &Model, plan: &'a InferPlan) -> Result<Beside<Self>, PlanError> {
        let found = stored::in_inference(whole, plan.quantization.as_ref(), &plan.gpu)?;
        if plan.beams > 1 || beside_encoder(whole) || !fold::is_allowed() {
            return Ok(Beside::default());
        }
        let inputs = decoding_inputs(whole, plan, first_tokens(whole, plan));
        let deep = Arc::new(whole.program(inputs.clone())?);
        let Some(model) = depth::shallow(whole, &deep) else { return Ok(Beside::default()) };
        let prompt = Arc::new(model.program(plan.inputs(plan.batch.seq_len, 0))?);
        let program = Arc::new(model.program(inputs)?);
        let mut torch = new_torch(plan);
        let weights = Loaded::load(&mut torch, &prompt, plan, found.stored());
        let mut run = Run::new(torch, weights, &prompt, plan);
        run.begin(&model, &prompt);
        Ok(Beside::of(Self { model, run }, deep, program))
    }
}

impl depth::Few<u64> for Few<'_> {
    fn step(&mut self, past: &u64) -> Result<StepRange, PlanError> {
        let Self { model, run } = self;
        let start = Start::now(&run.torch.log.borrow());
        token(&mut run.torch, (&run.model, &mut run.batch), (model, run.plan), *past)?;
        Ok(start.until(&run.torch.log.borrow()))
    }

    fn log(&self) -> &SharedLog {
        &self.run.torch.log
    }
}

/// Tokens that the first pass takes: the decoder beside an encoder begins with one of its own.
fn first_tokens(model: &Model, plan: &InferPlan) -> u64 {
    if beside_encoder(model) { 1 } else { plan.batch.seq_len }
}

/// What a pass over one token more is given.
fn decoding_inputs(model: &Model, plan: &InferPlan, past: u64) -> Inputs {
    match plan.cache {
        _ if beside_encoder(model) => plan.decoder_inputs(past),
        CacheImplementation::None => plan.inputs(past.saturating_add(1), 0),
        _ => plan.inputs(1, past),
    }
}

/// One token more.
fn token(
    torch: &mut Torch,
    (loaded, batch): (&Loaded, &mut Batch),
    (model, plan): (&Model, &InferPlan),
    past: u64,
) -> Result<(), PlanError> {
    let inputs = decoding_inputs(model, plan, past);
    let cached = inputs.past;
    let program = Arc::new(crate::work::passing(|| model.program(inputs))?);
    batch.grow_to(past.saturating_add(1));
    let outputs = loaded.pass(torch, batch, &program, cached);
    choose_next(torch, (loaded, batch), plan, outputs);
    Ok(())
}

/// The token that a pass leads to.
fn choose_next(torch: &mut Torch, (loaded, batch): (&Loaded, &mut Batch), plan: &InferPlan, outputs: Vec<Tensor>) {
    let Some(logits) = outputs.into_iter().next() else { return };
    batch.update(torch);
    let before = torch.log.borrow_mut().set_category(Category::Logits);
    let logits = batch.next.choose(torch, logits, &choose::Choosing::of(plan));
    torch.log.borrow_mut().set_category(before);
    batch.append(torch);
    if let (true, Some(store)) = (plan.beams > 1, &loaded.store) {
        store.reorder(torch);
    }
    drop(logits);
}

fn new_torch(plan: &InferPlan) -> Torch {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    torch.grad_enabled = false;
    torch.training = false;
    torch
}

/// Layers whose cache grows.
pub(super) fn growing(program: &Program) -> usize {
    let grows = |step: &&Step| match step {
        Step::Run { op: Op::Cache(update), .. } => !matches!(update.kind, CacheKind::State { .. }),
        _ => false,
    };
    program.steps.iter().filter(grows).count()
}
