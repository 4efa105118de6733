//! Layers that keep only what comes in.

use std::rc::Rc;

use super::Runner;
use super::nested::Kept;
use super::variables::{Frames, Variables};
use crate::memory::autograd::Frame;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, ValueId};
use crate::model::{ModuleKind, Step};

impl Runner {
    pub(super) fn is_checkpointed(&self, torch: &Torch, module: ModuleId) -> bool {
        self.settings.checkpointing
            && torch.grad_enabled
            && torch.recording.is_none()
            && torch.recomputing.is_none()
            && self.kind(module) == ModuleKind::Layer
            && self.is_nth(module)
    }

    /// Of every `n` layers the last one is recomputed, as torchtitan counts them.
    pub(super) fn is_nth(&self, module: ModuleId) -> bool {
        let every = self.wrapped.checkpoints.every as usize;
        let before = &self.program.modules[..module.0 as usize];
        every <= 1 || (before.iter().filter(|m| m.kind == ModuleKind::Layer).count() + 1).is_multiple_of(every)
    }

    /// Runs a layer keeping only what comes in; backward runs it again when it first needs something from inside.
    pub(super) fn checkpoint(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: std::ops::Range<usize>) {
        let on_host = torch.saves_on_host.is_some();
        let captured: Vec<Kept> =
            self.captured(frames, &range).into_iter().map(|(id, x)| Kept::new(torch, id, x, on_host)).collect();
        let frame = Frame::new(self.wrapped.checkpoints.selective);
        torch.recording = Some(Rc::clone(&frame));
        self.run_layer(torch, frames, range.clone());
        torch.recording = None;
        frames.held.clear();
        let given = std::mem::take(&mut frames.given);
        let runner = Rc::clone(self);
        let again = move |torch: &mut Torch| {
            // Checkpoints inside this one live as long as it does, and what they were given with them.
            let _given = &given;
            let mut frames = Frames::new(Variables::of(&runner.program, &range));
            for kept in &captured {
                frames.values[kept.value] = Some(kept.tensor(torch));
            }
            let outer = std::mem::replace(&mut torch.autocast, runner.settings.autocast);
            let mark = torch.graph_mark();
            runner.recomputed(torch, &range);
            runner.run_layer(torch, &mut frames, range.clone());
            torch.drop_graph(mark);
            torch.cast_cache.clear();
            torch.autocast = outer;
        };
        *frame.run.borrow_mut() = Some(Rc::new(again));
    }

    /// The values from outside that a range of steps reads.
    pub(super) fn captured(&self, frames: &Frames, range: &std::ops::Range<usize>) -> Vec<(ValueId, Tensor)> {
        let mut captured: Vec<(ValueId, Tensor)> = Vec::new();
        for step in &self.program.steps[range.clone()] {
            let Step::Run { inputs, .. } = step else { continue };
            for value in inputs {
                if let Some(tensor) = &frames.values[*value]
                    && !captured.iter().any(|(known, _)| known == value)
                {
                    captured.push((*value, tensor.clone()));
                }
            }
        }
        captured
    }
}
