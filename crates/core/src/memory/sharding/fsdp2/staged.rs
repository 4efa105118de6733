//! `fully_shard` around a stage of a pipeline: gradients wait whole until all micro-batches are through.
//!
//! Source: torch/distributed/pipelining/{stage,schedules}.py of torch 2.11.

use super::{FullyShard, State};
use crate::memory::engine::{Engine, Staged};
use crate::memory::log::Stream;
use crate::memory::torch::Torch;

impl FullyShard {
    /// All units in the order of `modules()`: the root first.
    fn in_order(&self) -> impl Iterator<Item = usize> {
        let root = self.modules.root();
        std::iter::once(root).chain(0..root)
    }
}

impl Staged for FullyShard {
    fn be_stage(&self, place: u8) {
        // Every root makes streams of its own.
        if let Some(first) = place.checked_sub(1).and_then(|before| before.checked_mul(3)) {
            self.streams.set([0, 1, 2].map(|role| Stream::OfStage(first.saturating_add(role))));
        }
    }

    fn before_stage(&self, torch: &mut Torch) {
        self.pre_forward(torch, self.modules.root());
    }

    fn begin_backward(&self) {
        self.reduces.set(false);
        self.reshards.set(false);
    }

    fn after_stage_backward(&self, torch: &mut Torch) {
        for at in self.in_order() {
            if self.units[at].state.get() != State::PostBackward {
                self.post_backward(torch, at);
            }
            self.units[at].state.set(State::Idle);
        }
    }

    fn reduce(&self, torch: &mut Torch) {
        self.reduces.set(true);
        self.reshards.set(true);
        for at in self.in_order() {
            self.post_backward(torch, at);
        }
        let last = self.last_reduction.take().filter(|_| self.lingers);
        self.after_backward(torch);
        *self.last_reduction.borrow_mut() = last;
    }

    fn gather_all(&self, torch: &mut Torch) {
        // Asked for without a hook, a gather runs on the stream of whoever asks.
        self.in_order().for_each(|at| self.unshard_on(torch, &self.units[at], Stream::Default));
    }

    fn wait_for_all(&self, torch: &mut Torch) {
        self.in_order().for_each(|at| self.wait_for_unshard(torch, &self.units[at]));
    }

    fn scatter_all(&self) {
        self.units.iter().for_each(|unit| self.reshard(unit));
    }
}
