//! A model on the card, ready to run on batches of any size.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use super::load::{self, Batch, Beside};
use super::lower::head::HeadLoss;
use super::lower::hooks::Hooks;
use super::lower::liger::Liger;
use super::lower::{Runner, Settings, Wrapped};
use super::tensor::Tensor;
use super::torch::Torch;
use crate::model::{Inputs, Program};
use crate::plan::job::Sizes;
use crate::plan::liger::LigerPatch;
use crate::plan::{AttentionKind, LossKind, PlanError, TrainPlan};

/// The program of a model for what goes in.
pub(super) type Programs<'a> = dyn Fn(Inputs) -> Result<Arc<Program>, PlanError> + 'a;

/// What was loaded, and how it runs.
pub(super) struct Ready<'a> {
    pub(super) programs: &'a Programs<'a>,
    pub(super) plan: &'a TrainPlan,
    pub(super) parameters: Vec<Tensor>,
    pub(super) wrapped: Wrapped,
    pub(super) liger: Option<LigerPatch>,
    pub(super) settings: Settings,
    pub(super) hooks: Option<Rc<dyn Hooks>>,
    pub(super) known: BTreeMap<Sizes, Arc<Program>>,
}

/// A batch on the card, and what runs on it.
pub(super) struct Loaded {
    pub(super) runner: Rc<Runner>,
    beside: Vec<Tensor>,
    masked: bool,
}

impl Loaded {
    /// The mask that came with it.
    pub(super) fn mask(&self) -> Option<Tensor> {
        self.beside.first().filter(|_| self.masked).cloned()
    }
}

impl Ready<'_> {
    /// The same sizes, as far as memory knows the difference: only flash attention counts tokens and samples, and only
    /// TRL's head leaves out what the loss does not count.
    pub(super) fn alike(&self, mut sizes: Sizes) -> Sizes {
        if matches!(self.plan.attention, AttentionKind::Sdpa | AttentionKind::Eager) {
            if sizes.padded() {
                sizes.real = sizes.samples * sizes.longest - 1;
            }
            // Ends take four bytes each, in blocks of 512.
            sizes.documents = sizes.documents.map(|many| if many < 128 { many.min(2) } else { many / 128 * 128 });
        }
        if self.plan.loss.kind != LossKind::TrlFused {
            sizes.counted = 0;
        }
        sizes
    }

    /// A batch of these sizes, copied to the card.
    pub(super) fn batch(&mut self, torch: &mut Torch, sizes: Sizes) -> Result<Loaded, PlanError> {
        let batch = sizes.of(&self.plan.batch);
        let program = match self.known.get(&sizes) {
            Some(program) => Arc::clone(program),
            None => {
                let program = (self.programs)(batch.training_inputs())?;
                self.known.insert(sizes, Arc::clone(&program));
                program
            }
        };
        let beside = Beside { mask: batch.mask || batch.padded, documents: sizes.documents };
        let Batch { inputs, beside } = load::batch_of(torch, &program, self.plan.weights, beside);
        let settings = Settings {
            padded: batch.padded,
            mask: batch.mask || batch.padded,
            real_tokens: batch.real_tokens,
            counted: Some(sizes.counted),
            documents: sizes.documents,
            // The Trainer evaluates the model that it compiled a wrapper of (`_wrap_model(self.model, training=False)`).
            compile: self.settings.compile.filter(|compile| torch.grad_enabled || compile.by_layer()),
            ..self.settings
        };
        let wrapped = Wrapped { loss: HeadLoss::new(&program, self.plan.loss), ..self.adapted(&program) };
        let masked = batch.mask || batch.padded;
        let runner = Runner::with(program, self.parameters.clone(), inputs, settings, Rc::new(wrapped), None);
        Ok(Loaded { runner: Rc::new(runner.hooked(self.hooks.clone())), beside, masked })
    }

    /// What stands in the place of modules in a program.
    pub(super) fn adapted(&self, program: &Program) -> Wrapped {
        let skips = self.plan.job.evaluation.as_ref().is_some_and(|how| how.skip_logits);
        let liger = self.liger.map(|patch| Liger::new(program, patch).skipping_logits(skips));
        Wrapped { liger, loss: None, ..self.wrapped.clone() }
    }
}
