//! A model on the card that takes part in a task, ready for passes of any size.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::dtype::DType;
use crate::memory::adapters::{self, Loaded, Made};
use crate::memory::engine::Engine;
use crate::memory::loading::{self, Names};
use crate::memory::log::{Category, StorageInfo};
use crate::memory::lower::cache::Store;
use crate::memory::lower::head::{Head, HeadLoss, Scores};
use crate::memory::lower::hooks::Hooks;
use crate::memory::lower::liger::Liger;
use crate::memory::lower::{Runner, Settings, Wrapped};
use crate::memory::ready::Programs;
use crate::memory::sharding::Spread;
use crate::memory::tasks::WholeLogits;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Input, Op};
use crate::model::{Inputs, Program, Step};
use crate::plan::liger::LigerPatch;
use crate::plan::{Batch, PlanError, TrainPlan};

/// Parameters, what stands in their place, and how they run.
pub(in crate::memory) struct Player<'a> {
    pub(in crate::memory) programs: Rc<Programs<'a>>,
    pub(in crate::memory) parameters: Vec<Tensor>,
    pub(in crate::memory) wrapped: Wrapped,
    pub(in crate::memory) liger: Option<LigerPatch>,
    pub(in crate::memory) settings: Settings,
    pub(in crate::memory) hooks: Option<Rc<dyn Hooks>>,
    /// An engine that gathers parameters for every pass, and whether gradients are reduced after this micro-batch.
    pub(in crate::memory) engine: Option<(Rc<dyn Engine>, bool)>,
    /// Whether accelerate wraps its forward pass in autocast, and so widens what it returns (`convert_outputs_to_fp32`).
    pub(in crate::memory) widens: bool,
    /// Whether adapters are switched off (`disable_adapter`).
    pub(in crate::memory) adapters_off: bool,
    /// How log-probabilities are taken where TRL has no fused head yet.
    pub(in crate::memory) whole: Option<WholeLogits>,
    pub(in crate::memory) known: BTreeMap<(u64, u64, bool, bool), Arc<Program>>,
}

/// A batch on the card.
pub(super) struct Given<'a> {
    pub(super) ids: &'a Tensor,
    pub(super) mask: &'a Tensor,
    pub(super) labels: Option<&'a Tensor>,
    /// Whether the mask masks anything.
    pub(super) padded: bool,
}

/// What a pass ends with.
#[derive(Clone, Copy)]
pub(super) enum End {
    /// TRL's fused head.
    Scores(Scores),
    /// What goes into the head.
    Hidden,
    /// The model's own output: logits, or hidden states where it has no head.
    Logits,
}

impl<'a> Player<'a> {
    /// The program of the plan's own batch.
    pub(super) fn first_program(&self, plan: &TrainPlan) -> Result<Arc<Program>, PlanError> {
        (self.programs)(plan.batch.training_inputs())
    }

    /// The same model once more, frozen, with weights of its own.
    pub(super) fn copy_of(&self, torch: &mut Torch, program: &Program, what: Category, plan: &TrainPlan) -> Player<'a> {
        let weights = plan.weights;
        let settings = Settings { checkpointing: false, weights, buffers: weights, ..self.settings };
        let programs = Rc::clone(&self.programs);
        let copy = match plan.job.loads_straight() {
            // By its path, as the policy was (`create_model_from_path`).
            true => {
                let load =
                    |torch: &mut Torch| loading::from_pretrained(torch, program, weights, None, Names::default());
                let (parameters, _) = torch.in_category(what, load);
                Self::around(torch, program, parameters, (programs, settings))
            }
            false => Self::frozen(torch, program, (programs, settings), what),
        };
        // Liger exchanges norms and MLPs of the model it is given, and the function that rotates for all.
        let liger = self.liger.map(|patch| LigerPatch { norms: &[], glu: false, ..patch });
        Player { liger, whole: self.whole, ..copy }
    }

    /// Spread over cards as TRL spreads a model that is not trained.
    pub(super) fn beside(self, torch: &mut Torch, program: &Program, (plan, spread): (&TrainPlan, Spread)) -> Self {
        let Player { parameters, mut settings, .. } = self;
        let first = torch.log.borrow().storages.len();
        let what = parameters
            .first()
            .map_or(Category::Reference, |one| torch.log.borrow().storages[one.storage.id().0 as usize].category);
        let parameters = parameters.into_iter().map(|tensor| tensor.detached()).collect();
        let loaded = Loaded { parameters, trained: Vec::new(), wrapped: Wrapped::default() };
        let (loaded, engine) = spread.wrap_beside(torch, program, plan, loaded);
        let weights = |info: &&mut StorageInfo| info.category == Category::Weights;
        torch.log.borrow_mut().storages[first..].iter_mut().filter(weights).for_each(|info| info.category = what);
        if engine.is_some() {
            spread.set_types(plan, &mut settings);
        }
        let hooks = engine.as_ref().and_then(|engine| Rc::clone(engine).hooks());
        Player { parameters: loaded.parameters, settings, hooks, engine: engine.map(|engine| (engine, true)), ..self }
    }

    /// A frozen model.
    pub(super) fn frozen(
        torch: &mut Torch,
        program: &Program,
        (programs, settings): (Rc<Programs<'a>>, Settings),
        what: Category,
    ) -> Player<'a> {
        let (parameters, untied) =
            torch.in_category(what, |torch| adapters::dense(torch, program, Made::here(settings.weights), None));
        let made = Self::around(torch, program, parameters, (programs, settings));
        drop(untied);
        made
    }

    fn around(
        torch: &mut Torch,
        program: &Program,
        parameters: Vec<Tensor>,
        (programs, settings): (Rc<Programs<'a>>, Settings),
    ) -> Player<'a> {
        // TRL runs it without a graph but leaves its parameters trainable, so autocast keeps its casts of them through a pass.
        let mut parameters: Vec<Tensor> = parameters.into_iter().map(|tensor| torch.leaf(tensor).0).collect();
        parameters.extend(adapters::buffers(torch, program, settings.weights));
        Player {
            programs,
            parameters,
            wrapped: Wrapped::default(),
            liger: None,
            settings: Settings { checkpointing: false, ..settings },
            hooks: None,
            engine: None,
            widens: settings.autocast.is_some(),
            adapters_off: false,
            whole: None,
            known: BTreeMap::new(),
        }
    }

    /// One pass over a batch.
    pub(super) fn pass(&mut self, torch: &mut Torch, given: &Given, end: End) -> Result<Vec<Tensor>, PlanError> {
        match (end, self.whole) {
            (End::Scores(wanted), Some(whole)) => whole.scores(torch, self, given, wanted),
            _ => self.outputs(torch, given, end, None),
        }
    }

    /// Logits of all positions, or of so many last ones.
    pub(super) fn logits(&mut self, torch: &mut Torch, given: &Given, last: Option<u64>) -> Result<Tensor, PlanError> {
        Ok(self.outputs(torch, given, End::Logits, last)?.swap_remove(0))
    }

    fn outputs(
        &mut self,
        torch: &mut Torch,
        given: &Given,
        end: End,
        last: Option<u64>,
    ) -> Result<Vec<Tensor>, PlanError> {
        let (rows, seq) = (given.ids.shape.size(0), given.ids.shape.size(1));
        let labels = matches!(end, End::Scores(_) | End::Hidden);
        let key = (rows, seq, given.padded, labels);
        let program = match self.known.get(&key) {
            Some(program) => Arc::clone(program),
            None => {
                let batch =
                    Batch { batch_size: rows, seq_len: seq, mask: true, padded: given.padded, ..Batch::default() };
                let program = (self.programs)(Inputs { labels, last_logits: last, ..batch.training_inputs() })?;
                self.known.insert(key, Arc::clone(&program));
                program
            }
        };
        let settings = Settings { padded: given.padded, mask: true, real_tokens: None, ..self.settings };
        let runner = self.runner(torch, &program, (given, end), settings, None);
        let mut outputs = self.gathered(torch, |torch| runner.forward(torch));
        if self.widens && matches!(end, End::Logits) {
            // A cache is no tensor, and is passed over.
            let tensors = if self.settings.fills_cache { 1 } else { outputs.len() };
            torch.in_category(Category::Logits, |torch| {
                outputs.iter_mut().take(tensors).filter(|output| output.dtype.size() == 2).for_each(|output| {
                    *output = torch.cast(output, DType::F32);
                });
            });
        }
        Ok(outputs)
    }

    /// A pass through the wrapper of an engine that gathers parameters for it.
    fn gathered(&self, torch: &mut Torch, pass: impl FnOnce(&mut Torch) -> Vec<Tensor>) -> Vec<Tensor> {
        let Some((engine, syncs)) = &self.engine else { return pass(torch) };
        engine.before_forward(torch, *syncs);
        let outputs = pass(torch);
        engine.after_forward(torch, &outputs);
        outputs
    }

    /// What goes into the output head, and its matrix.
    pub(super) fn hidden(&mut self, torch: &mut Torch, given: &Given) -> Result<(Tensor, Tensor), PlanError> {
        let hidden = self.pass(torch, given, End::Hidden)?.swap_remove(0);
        let head = self.known.values().find_map(|program| Head::find(program).weight);
        let head = head.map(|id| self.parameters[id.0 as usize].clone()).unwrap_or_else(|| hidden.clone());
        Ok((hidden, head))
    }

    /// A pass that goes on from a cache.
    pub(super) fn cached_pass(
        &self,
        torch: &mut Torch,
        program: &Arc<Program>,
        (given, store): (&Given, &Rc<Store>),
        past: u64,
    ) -> Vec<Tensor> {
        store.begin(past);
        let settings =
            Settings { checkpointing: false, padded: given.padded, mask: true, real_tokens: None, ..self.settings };
        let runner = self.runner(torch, program, (given, End::Logits), settings, Some(Rc::clone(store)));
        let outputs = self.gathered(torch, |torch| runner.forward(torch));
        match self.widens {
            true => torch.in_category(Category::Logits, |torch| {
                outputs.iter().map(|output| torch.cast(output, DType::F32)).collect()
            }),
            false => outputs,
        }
    }

    fn runner(
        &self,
        torch: &mut Torch,
        program: &Arc<Program>,
        (given, end): (&Given, End),
        settings: Settings,
        store: Option<Rc<Store>>,
    ) -> Rc<Runner> {
        let mut inputs = Vec::new();
        for step in &program.steps {
            let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
            let shape = program.values[outputs[0].0 as usize];
            let tensor = match kind {
                Input::Tokens if store.is_some() => {
                    torch.in_category(Category::Batch, |torch| torch.fresh("clone", shape, DType::I64))
                }
                Input::Tokens => given.ids.clone(),
                Input::Mask => given.mask.clone(),
                Input::Labels => given.labels.cloned().unwrap_or_else(|| torch.phantom(shape, DType::I64)),
                Input::Other(dtype) => torch.phantom(shape, *dtype),
                _ => torch.phantom(shape, DType::I64),
            };
            let strides = tensor.strides;
            inputs.push((outputs[0], tensor.with_layout(shape, strides)));
        }
        let mut wrapped = Wrapped {
            liger: self.liger.map(|patch| Liger::new(program, patch)),
            loss: match end {
                End::Scores(scores) => Some(HeadLoss::scoring(program, scores)),
                End::Hidden => Some(HeadLoss::passing(program)),
                End::Logits => None,
            },
            ..self.wrapped.clone()
        };
        if self.adapters_off {
            wrapped.lora.clear();
            wrapped.lora_parameters.clear();
            wrapped.scales.clear();
        }
        let store = store.filter(|store| store.keeps());
        let runner =
            Runner::with(Arc::clone(program), self.parameters.clone(), inputs, settings, Rc::new(wrapped), store);
        Rc::new(runner.hooked(self.hooks.clone()))
    }
}
