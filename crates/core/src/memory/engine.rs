//! What the training loop asks of an engine: the one trait that all of them implement.
//!
//! Loading, the passes over micro-batches and the step are the loop's ([`super::train`]); an engine wraps what was loaded, does
//! its part at the ends of passes and around modules, and says what the optimizer steps on. An option of the plan that the loop
//! honours is so honoured under every engine.

use std::rc::Rc;

use super::adapters::Loaded;
use super::lower::hooks::Hooks;
use super::optimizer::{Optimizer, Trained};
use super::tensor::Tensor;
use super::torch::Torch;
use crate::plan;

/// An engine around a model.
pub(in crate::memory) trait Engine {
    /// What the optimizer steps on: the parameters, or this card's part of them.
    fn trained(&self) -> &[Trained];

    /// What runs around modules.
    fn hooks(self: Rc<Self>) -> Option<Rc<dyn Hooks>> {
        None
    }

    /// Once the optimizer is there.
    fn prepare(&self, _torch: &mut Torch, _optimizer: &mut Optimizer, _plan: plan::Optimizer) {}

    /// A micro-batch begins; `last`: whether a step follows it.
    fn begin(&self, _last: bool) {}

    /// Before its forward pass; `syncs`: whether gradients are reduced after it.
    fn before_forward(&self, _torch: &mut Torch, _syncs: bool) {}

    /// After the forward pass, with what it returns.
    fn after_forward(&self, _torch: &mut Torch, _outputs: &[Tensor]) {}

    /// After the backward pass.
    fn after_backward(&self, _torch: &mut Torch) {}

    /// A checkpoint is written; `full`: whole matrices, gathered from all cards. What of them lands on the host.
    fn save(&self, _torch: &mut Torch, _full: bool) -> u64 {
        0
    }

    /// Whether parameters are gathered for a pass: a task then tells it of every pass of the policy, an evaluation of its own.
    fn gathers(&self) -> bool {
        false
    }

    /// Before the model inside the wrapper generates; whether all of it is gathered, and modules are left alone.
    fn before_generation(&self, _torch: &mut Torch) -> bool {
        false
    }

    /// After that.
    fn after_generation(&self, _torch: &mut Torch) {}

    /// Whether its step clips gradients and lets go of them too.
    fn steps_alone(&self) -> bool {
        false
    }

    /// One step.
    fn step(&self, torch: &mut Torch, optimizer: &mut Optimizer) {
        optimizer.step(torch, self.trained());
    }

    /// Whether every later step allocates what the first did, less what that left behind.
    fn repeats(&self) -> bool {
        false
    }
}

/// What an engine does around a stage of a pipeline.
pub(in crate::memory) trait Staged: Engine {
    /// Which of a rank's stages it is.
    fn be_stage(&self, place: u8);
    /// Before a micro-batch goes forward.
    fn before_stage(&self, torch: &mut Torch);
    /// Before one goes back: nothing is reduced, and what is gathered stays.
    fn begin_backward(&self);
    /// After one went back.
    fn after_stage_backward(&self, torch: &mut Torch);
    /// After the last: gradients are reduced.
    fn reduce(&self, torch: &mut Torch);
    /// Begins to gather all there is.
    fn gather_all(&self, torch: &mut Torch);
    /// Waits for that.
    fn wait_for_all(&self, torch: &mut Torch);
    /// Lets go of all that is gathered.
    fn scatter_all(&self);
}

/// No engine: one card, or cards that share nothing but what tensor parallel does in modules.
pub(in crate::memory) struct Alone {
    trained: Vec<Trained>,
}

impl Alone {
    /// Around a model.
    pub(in crate::memory) fn around(mut loaded: Loaded) -> (Loaded, Rc<Self>) {
        let trained = std::mem::take(&mut loaded.trained);
        (loaded, Rc::new(Self { trained }))
    }
}

impl Engine for Alone {
    fn trained(&self) -> &[Trained] {
        &self.trained
    }

    fn repeats(&self) -> bool {
        true
    }
}

impl Staged for Alone {
    fn be_stage(&self, _place: u8) {}

    fn before_stage(&self, _torch: &mut Torch) {}

    fn begin_backward(&self) {}

    fn after_stage_backward(&self, _torch: &mut Torch) {}

    fn reduce(&self, _torch: &mut Torch) {}

    fn gather_all(&self, _torch: &mut Torch) {}

    fn wait_for_all(&self, _torch: &mut Torch) {}

    fn scatter_all(&self) {}
}
