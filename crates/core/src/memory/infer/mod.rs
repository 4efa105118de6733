//! `generate` of transformers on one card: load, the prompt in one pass, then token by token.
//!
//! Every pass is a program of its own, because sizes grow with the cache. Up to [`ALL_STEPS`] tokens every step is
//! simulated, exactly. Beyond, the first and the last steps are, and between them a step now and then whose cache has grown by
//! as much as the skipped ones would have made it: peaks of the first and last steps are exact, what fragmentation the
//! skipped copies leave behind is approximated.

mod choose;

use std::collections::BTreeMap;
use std::rc::Rc;

use super::adapters;
use super::device::Device;
use super::log::{Category, Event, Log};
use super::lower::cache::Store;
use super::lower::{Runner, Settings, Wrapped};
use super::stored;
use super::tensor::Tensor;
use super::torch::Torch;
use super::torch::quantised::QuantisedWeight;
use super::torch::stored::{StoredKernel, StoredWeight};
use crate::dtype::DType;
use crate::model::op::{CacheKind, Input, Op, ParameterId, ValueId};
use crate::model::{Model, Program, Shape, Step, Task};
use crate::plan::{CacheImplementation, Choice, InferPlan, Kernels, PlanError};
use crate::source::quantization as source;

/// Up to so many decoding steps are all simulated.
pub const ALL_STEPS: u64 = 512;
/// Steps at the start and at the end that are simulated in any case.
const EDGE_STEPS: u64 = 16;

/// Runs `generate` (or one forward pass, twice, without new tokens) and returns the prompt's program and what happened.
pub fn simulate(model: &Model, plan: &InferPlan) -> Result<(Rc<Program>, Log, Vec<String>), PlanError> {
    plan.check()?;
    refuse(model, plan)?;
    let uncached;
    let plan = if model.config()["use_cache"] == false && plan.new_tokens > 0 {
        // `generate` takes the config's word (MPT).
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
    let mut torch = Torch::new(Device::of(&plan.gpu));
    torch.grad_enabled = false;
    torch.training = false;
    let decoder = plan.new_tokens > 0 && beside_encoder(model);
    let prompt = if decoder { plan.decoder_inputs(0) } else { plan.inputs(plan.batch.seq_len, 0) };
    let program = Rc::new(model.program(prompt)?);
    if matches!(plan.cache, CacheImplementation::Quantized(_)) && program.steps.iter().any(needs_width) {
        // `QuantizedCache` raises a ValueError for any other kind of layer.
        let what = "a quantised cache of a model with layers other than full attention".into();
        return Err(PlanError::Unsupported { what, hint: "transformers refuses it too; use a dynamic cache".into() });
    }
    let mut run = Run::load(torch, Rc::clone(&program), plan, found.stored());
    if plan.new_tokens == 0 {
        run.forward_twice(&program);
    } else {
        run.generate(model, &program)?;
    }
    Ok((program, run.finish(), found.notes))
}

/// What is not modelled, by name.
fn refuse(model: &Model, plan: &InferPlan) -> Result<(), PlanError> {
    let refused = |what: &str, hint: &str| Err(PlanError::Unsupported { what: what.into(), hint: hint.into() });
    match model.task() {
        Task::SpeechSeq2Seq if plan.new_tokens > 0 && (plan.beams > 1 || plan.choice == Choice::Sample) => {
            refused("beams and sampling of a speech model, which retries at other temperatures", "use greedy decoding")
        }
        _ if plan.cache == CacheImplementation::Offloaded && (plan.beams > 1 || beside_encoder(model)) => {
            refused("beams or an encoder-decoder over an offloaded cache", "use one beam and a cache on the card")
        }
        _ if matches!(plan.cache, CacheImplementation::Quantized(_))
            && (plan.beams > 1 || beside_encoder(model) || plan.new_tokens == 0) =>
        {
            refused("a quantised cache with beams, beside an encoder or in a plain forward pass", "use a dynamic cache")
        }
        Task::MaskedLm | Task::Base | Task::ImageClassification | Task::SequenceClassification | Task::Ctc
            if plan.new_tokens > 0 =>
        {
            refused("generate of a model without a decoder", "simulate a forward pass (0 new tokens)")
        }
        _ => Ok(()),
    }
}

/// Whether a decoder generates beside an encoder.
fn beside_encoder(model: &Model) -> bool {
    matches!(model.task(), Task::Seq2SeqLm | Task::SpeechSeq2Seq)
}

/// Layers that keep something else than keys and values of all positions.
fn needs_width(step: &Step) -> bool {
    matches!(step, Step::Run { op: Op::Cache(update), .. } if update.kind != CacheKind::Full)
}

/// The passes over one token that are simulated, by how many tokens are cached before each.
fn steps(prompt: u64, count: u64) -> Vec<u64> {
    if count <= ALL_STEPS {
        return (0..count).map(|step| prompt.saturating_add(step)).collect();
    }
    let stride = (count - 2 * EDGE_STEPS).div_ceil(ALL_STEPS - 2 * EDGE_STEPS).max(1);
    let middle = (EDGE_STEPS..count - EDGE_STEPS).step_by(usize::try_from(stride).unwrap_or(usize::MAX));
    let all = (0..EDGE_STEPS).chain(middle).chain(count - EDGE_STEPS..count);
    all.map(|step| prompt.saturating_add(step)).collect()
}

/// A run under way.
struct Run<'a> {
    torch: Torch,
    plan: &'a InferPlan,
    settings: Settings,
    parameters: BTreeMap<String, Tensor>,
    quantised: BTreeMap<String, QuantisedWeight>,
    stored: BTreeMap<String, StoredWeight>,
    /// Buffers, and what `generate` keeps to itself.
    kept: Vec<Tensor>,
    batch: Batch,
    store: Option<Rc<Store>>,
}

/// The tensors of the batch that grow with every token.
struct Batch {
    ids: Tensor,
    mask: Option<Tensor>,
    positions: Option<Tensor>,
    media: Vec<(Input, Tensor)>,
    /// The mask of an encoder's tokens.
    encoder: Option<Tensor>,
    next: choose::Next,
}

impl<'a> Run<'a> {
    /// Parameters, buffers and the batch onto the card.
    fn load(
        mut torch: Torch,
        program: Rc<Program>,
        plan: &'a InferPlan,
        base: Option<(&source::Quantization, StoredKernel)>,
    ) -> Self {
        let ((mut loaded, untied), stored) = torch.in_category(Category::Weights, |torch| match base {
            Some(base) => {
                let (loaded, stored) = stored::load(torch, &program, plan.weights, base);
                ((loaded, Vec::new()), stored)
            }
            None => (adapters::dense(torch, &program, plan.weights, plan.quantization.as_ref()), BTreeMap::new()),
        });
        let kept = torch.in_category(Category::Buffers, |torch| {
            let dtype = |model_type: bool, own| if model_type { plan.weights } else { own };
            let make = |buffer: &crate::model::op::Buffer| {
                torch.fresh("buffer", buffer.shape, dtype(buffer.model_type, buffer.dtype))
            };
            program.buffers.iter().map(make).collect()
        });
        drop(untied);
        let by_name = |id: ParameterId| program.parameters[id.0 as usize].name.clone();
        let quantised = plan.quantization.as_ref().map_or_else(BTreeMap::new, |scheme| {
            torch.in_category(Category::Weights, |torch| {
                adapters::quantise_linears(torch, &program, plan.weights, scheme, &mut loaded)
            })
        });
        let quantised = quantised.into_iter().map(|(id, weight)| (by_name(id), weight)).collect();
        let stored = stored.into_iter().map(|(id, weight)| (by_name(id), weight)).collect();
        let names = program.parameters.iter().map(|parameter| parameter.name.clone());
        let parameters = names.zip(loaded).collect();
        let batch = Batch::new(&mut torch, &program, plan);
        torch.log.borrow_mut().events.push(Event::EmptyCache);
        let settings = Settings {
            attention: plan.attention,
            checkpointing: false,
            kernels: Kernels::Transformers,
            autocast: None,
            weights: plan.weights,
            mask: true,
            padded: plan.batch.padded,
            real_tokens: None,
            save_on_cpu: false,
        };
        Self { torch, plan, settings, parameters, quantised, stored, kept, batch, store: None }
    }

    /// One pass.
    fn pass(&mut self, program: &Rc<Program>, past: u64) -> Vec<Tensor> {
        if let Some(store) = &self.store {
            store.begin(past);
        }
        let missing = |torch: &mut Torch, shape| torch.phantom(shape, self.plan.weights);
        let parameters = program
            .parameters
            .iter()
            .map(|p| self.parameters.get(&p.name).cloned().unwrap_or_else(|| missing(&mut self.torch, p.shape)))
            .collect();
        let inputs = self.batch.bind(&mut self.torch, program);
        let ids = || (0..).map(ParameterId).zip(&program.parameters);
        let quantised = ids().filter_map(|(id, p)| Some((id, self.quantised.get(&p.name)?.clone()))).collect();
        let stored = ids().filter_map(|(id, p)| Some((id, self.stored.get(&p.name)?.clone()))).collect();
        let wrapped = Rc::new(Wrapped { quantised, stored, ..Wrapped::default() });
        let cache = self.store.as_ref().map(Rc::clone);
        let runner = Runner::with(Rc::clone(program), parameters, inputs, self.settings, wrapped, cache);
        runner.forward(&mut self.torch)
    }

    /// `model(**batch)` twice: the first pass makes workspaces, the second is what all later ones are.
    fn forward_twice(&mut self, program: &Rc<Program>) {
        for name in ["forward", "forward2"] {
            self.phase(name);
            self.store = (self.plan.cache != CacheImplementation::None)
                .then(|| Store::new(self.plan.cache, 0, growing(program)));
            let outputs = self.pass(program, 0);
            self.torch.log.borrow_mut().end_phase();
            drop(outputs);
        }
    }

    fn generate(&mut self, model: &Model, prompt: &Rc<Program>) -> Result<(), PlanError> {
        let plan = self.plan;
        let decoder = beside_encoder(model);
        // The decoder beside an encoder begins with one token of its own.
        let first = if decoder { 1 } else { plan.batch.seq_len };
        self.phase("generate");
        let room = first.saturating_add(plan.new_tokens).saturating_sub(1);
        self.store = Some(Store::new(plan.cache, room, growing(prompt)));
        self.batch.prepare(&mut self.torch, prompt, plan, decoder);
        let mut outputs = self.pass(prompt, 0);
        if decoder {
            let states = outputs.drain(1.min(outputs.len())..);
            self.batch.media.extend(states.map(|states| (Input::Encoded, states)));
        }
        self.choose(outputs);
        let tokens = plan.stop_after.unwrap_or(plan.new_tokens).min(plan.new_tokens);
        for past in steps(first, tokens.saturating_sub(1)) {
            let inputs = match plan.cache {
                _ if decoder => plan.decoder_inputs(past),
                CacheImplementation::None => plan.inputs(past.saturating_add(1), 0),
                _ => plan.inputs(1, past),
            };
            let cached = inputs.past;
            let program = Rc::new(model.program(inputs)?);
            self.batch.grow_to(past.saturating_add(1));
            let outputs = self.pass(&program, cached);
            self.choose(outputs);
        }
        self.store = None;
        self.batch.next.clear();
        self.torch.log.borrow_mut().end_phase();
        Ok(())
    }

    fn choose(&mut self, outputs: Vec<Tensor>) {
        let Some(logits) = outputs.into_iter().next() else { return };
        self.batch.update(&mut self.torch);
        let before = self.torch.log.borrow_mut().set_category(Category::Logits);
        self.batch.next.choose(&mut self.torch, &logits, self.plan);
        self.torch.log.borrow_mut().set_category(before);
        self.batch.append(&mut self.torch);
        if let (true, Some(store)) = (self.plan.beams > 1, &self.store) {
            store.reorder(&mut self.torch);
        }
        drop(logits);
    }

    fn phase(&self, name: &str) {
        self.torch.log.borrow_mut().phase(name.to_owned());
    }

    fn finish(self) -> Log {
        let log = Rc::clone(&self.torch.log);
        let Self { torch, parameters, quantised, stored, kept, batch, store, .. } = self;
        drop((store, batch, kept, quantised, stored, parameters, torch));
        Rc::try_unwrap(log).map(std::cell::RefCell::into_inner).unwrap_or_default()
    }
}

impl Batch {
    /// What `loaded` holds: ids, the mask where one is given, images and audio.
    fn new(torch: &mut Torch, program: &Program, plan: &InferPlan) -> Self {
        torch.in_category(Category::Batch, |torch| {
            let shape = Shape::from([plan.batch.batch_size, plan.batch.seq_len]);
            let mut media = Vec::new();
            for (kind, shape) in inputs_of(program) {
                let dtype = match kind {
                    Input::Pixels | Input::Audio => plan.weights,
                    Input::Other(dtype) => dtype,
                    _ => continue,
                };
                media.push((kind, torch.fresh("batch", shape, dtype)));
            }
            let ids = torch.fresh("batch", shape, DType::I64);
            let given = plan.new_tokens > 0 || plan.batch.mask;
            let mask = given.then(|| torch.fresh("batch", shape, DType::I64));
            Self { ids, mask, positions: None, media, encoder: None, next: choose::Next::default() }
        })
    }

    /// What `generate` makes before the first pass: special tokens, positions counted over the mask, beams.
    fn prepare(&mut self, torch: &mut Torch, program: &Program, plan: &InferPlan, decoder: bool) {
        torch.in_category(Category::Batch, |torch| {
            let audio = self.media.iter().position(|(kind, _)| *kind == Input::Audio);
            if let (true, Some(at)) = (decoder, audio) {
                // Whisper cuts sound in segments and joins those of the batch; the caller holds the whole.
                let whole = &self.media[at].1;
                let segments = torch.fresh("cat", whole.shape, whole.dtype);
                self.media.insert(0, (Input::Audio, segments));
            }
            if decoder {
                // The mask is the encoder's and does not grow.
                self.encoder = self.mask.take();
                let start = Shape::from([plan.batch.batch_size, 1]);
                self.media
                    .push((Input::Tokens, std::mem::replace(&mut self.ids, torch.fresh("full", start, DType::I64))));
            }
            let uses_positions = program
                .steps
                .iter()
                .any(|step| matches!(step, Step::Run { op: Op::RotaryTable(_) | Op::Input(Input::Positions), .. }));
            if uses_positions {
                let counted = torch.fresh("cumsum", self.ids.shape, DType::I64);
                let shifted = torch.fresh("sub", self.ids.shape, DType::I64);
                drop(counted);
                let empty = torch.fresh("eq", self.ids.shape, DType::Bool);
                self.positions = Some(torch.fresh("masked_fill", self.ids.shape, DType::I64));
                drop((shifted, empty));
            }
            if plan.beams > 1 {
                let grown = std::iter::once(&mut self.ids).chain(&mut self.mask).chain(&mut self.positions);
                for tensor in grown.chain(&mut self.encoder) {
                    let shape = tensor.shape.with(0, plan.sequences());
                    *tensor = torch.fresh("repeat_interleave", shape, DType::I64);
                }
            }
        });
    }

    /// The tensors that a program's inputs are; token ids are a dense copy of the newest.
    fn bind(&self, torch: &mut Torch, program: &Program) -> Vec<(ValueId, Tensor)> {
        let mut bound = Vec::new();
        torch.in_category(Category::Batch, |torch| {
            for step in &program.steps {
                let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
                let shape = program.values[outputs[0].0 as usize];
                let tensor = match kind {
                    Input::Tokens | Input::DecoderTokens => torch.fresh("clone", shape, DType::I64),
                    Input::Mask => self
                        .mask
                        .clone()
                        .or_else(|| self.encoder.clone())
                        .unwrap_or_else(|| torch.phantom(shape, DType::I64)),
                    Input::Positions => torch.phantom(shape, DType::I64),
                    kind => {
                        let known = self.media.iter().find(|(known, tensor)| known == kind && tensor.shape == shape);
                        known.map_or_else(|| torch.phantom(shape, DType::I64), |(_, tensor)| tensor.clone())
                    }
                };
                let strides = tensor.strides;
                bound.push((outputs[0], tensor.with_layout(shape, strides)));
            }
        });
        bound
    }

    /// Positions and mask for one token more.
    fn update(&mut self, torch: &mut Torch) {
        torch.in_category(Category::Batch, |torch| {
            for tensor in self.positions.iter_mut().chain(&mut self.mask) {
                *tensor = longer(torch, tensor);
            }
        });
    }

    /// The chosen tokens joined to the ids.
    fn append(&mut self, torch: &mut Torch) {
        self.ids = torch.in_category(Category::Batch, |torch| longer(torch, &self.ids));
    }

    /// Steps that were skipped have made the ids longer.
    fn grow_to(&mut self, length: u64) {
        for tensor in std::iter::once(&mut self.ids).chain(&mut self.mask).chain(&mut self.positions) {
            tensor.shape = tensor.shape.with(1, length);
        }
    }
}

/// Layers whose cache grows.
fn growing(program: &Program) -> usize {
    let grows = |step: &&Step| match step {
        Step::Run { op: Op::Cache(update), .. } => !matches!(update.kind, CacheKind::State { .. }),
        _ => false,
    };
    program.steps.iter().filter(grows).count()
}

fn longer(torch: &mut Torch, tensor: &Tensor) -> Tensor {
    let shape = tensor.shape.with(1, tensor.shape.size(1).saturating_add(1));
    torch.fresh("cat", shape, tensor.dtype)
}

fn inputs_of(program: &Program) -> impl Iterator<Item = (Input, Shape)> {
    program.steps.iter().filter_map(|step| match step {
        Step::Run { op: Op::Input(kind), outputs, .. } => Some((*kind, program.values[outputs[0].0 as usize])),
        _ => None,
    })
}
