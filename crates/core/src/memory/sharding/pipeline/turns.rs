//! Turns of a pipeline, a micro-batch forward and one back: once they are alike, those that are left are written down, not run.
//!
//! Behind the warm-up every turn does the same to the storages of a micro-batch one further. So when two turns in a row wrote the
//! same down and nothing of an older one is left, what is in flight takes the names of the last micro-batches, and the step goes
//! on with those.

use super::Stage;
use crate::memory::effort::Effort;
use crate::memory::fold;
use crate::memory::log::{HostPart, Storage, StorageId, Watch};
use crate::memory::repeat::{self, Start};
use crate::memory::schedule::Action;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan::parallel::Schedule;

/// The turns of one step.
pub(super) struct Turns {
    /// Micro-batches in flight between turns.
    in_flight: usize,
    micro: usize,
    moments: Vec<Moment>,
    watch: Watch,
}

/// When a turn begins.
struct Moment {
    start: Start,
    effort: Effort,
    graph: usize,
    on_host: Vec<HostPart>,
}

impl Turns {
    /// Of a step that begins now, where one forward follows one backward.
    pub(super) fn of(schedule: Schedule, actions: &[Action], micro: u64) -> Option<Self> {
        let forward = actions.iter().take_while(|action| matches!(action, Action::Forward { .. })).count();
        let (in_flight, micro) = (forward.checked_sub(1)?, usize::try_from(micro).ok()?);
        let worth = schedule == Schedule::OneForwardOneBackward && fold::is_allowed() && micro > Self::run(in_flight);
        worth.then(|| Self { in_flight, micro, moments: Vec::new(), watch: Watch::begin() })
    }

    /// Micro-batches that go forward before turns can be known to be alike: the first turn makes gradients, what goes back in the
    /// two that are compared went forward behind it, and so did the one before, of which nothing may be left.
    fn run(in_flight: usize) -> usize {
        2 * in_flight + 3
    }

    /// Before the action at a place: how many turns are written down in place of those that would follow.
    pub(super) fn skip(&mut self, torch: &mut Torch, stage: &mut Stage, at: usize) -> usize {
        let Some(behind) = at.checked_sub(self.in_flight).filter(|behind| behind.is_multiple_of(2)) else { return 0 };
        // The micro-batch that goes forward in this turn.
        let turn = self.in_flight + behind / 2;
        if turn >= self.micro {
            return 0;
        }
        let (graph, on_host) = (torch.graph_mark(), torch.log.borrow().host_parts.clone());
        self.moments.push(Moment { start: Start::now(&torch.log.borrow()), effort: torch.effort, graph, on_host });
        if turn < Self::run(self.in_flight) || !self.are_alike(torch, stage, turn) {
            return 0;
        }
        let [last, now] = [turn - 1, turn].map(|turn| self.start(turn));
        let (made, left) = (now.storage() - last.storage(), self.micro - turn);
        repeat::since(&mut torch.log.borrow_mut(), last, left as u32);
        torch.log.borrow_mut().folded += left;
        let once = torch.effort.since(&self.moment(turn - 1).effort);
        torch.effort = torch.effort.and(&once.times(left as u64, 1));
        let further = |by: usize| move |id: StorageId| StorageId(id.0 + by as u32 * made);
        let oldest = self.start((turn - self.in_flight).min(turn - 1)).storage();
        let kept = losses(stage);
        let moves = |life: StorageId| life.0 >= oldest && !kept.contains(&life);
        for (life, storage) in self.watch.end().into_iter().filter(|(life, _)| moves(*life)) {
            if let Some(storage) = storage.upgrade().filter(|storage| storage.is_in(&torch.log)) {
                storage.rename(life, further(left)(life));
            }
        }
        if let Some(loss) = stage.losses.get(turn - 1).and_then(Option::as_ref).map(Tensor::detached) {
            let id = loss.storage.id();
            for by in 1..=left {
                let storage = Storage::known(&torch.log, further(by)(id));
                stage.losses[turn - 1 + by] = Some(Tensor { storage, ..loss.clone() });
            }
        }
        for micro in (turn - self.in_flight..turn).rev() {
            stage.outputs.swap(micro, micro + left);
            if !stage.received.is_empty() {
                stage.received.swap(micro, micro + left);
            }
        }
        left
    }

    /// Whether the last two turns are alike, and leave nothing behind but losses.
    fn are_alike(&self, torch: &Torch, stage: &Stage, turn: usize) -> bool {
        let (log, kept) = (torch.log.borrow(), losses(stage));
        let (before, now) = (self.moment(turn - 2), self.moment(turn));
        let [old, flying, one, other] =
            [turn - 2 - self.in_flight, turn - self.in_flight, turn - 2, turn - 1].map(|turn| self.start(turn));
        let mut lengths = (turn - 2 - self.in_flight..turn).map(|turn| self.start(turn).before(self.start(turn + 1)));
        let length = other.before(now.start);
        lengths.all(|known| known == length)
            && before.graph == now.graph
            && before.on_host == now.on_host
            && (stage.loss.is_none() || self.in_flight == 0)
            && repeat::are_alike(&log, [one, other])
            && repeat::are_gone(&log, [old, if self.in_flight > 0 { flying } else { other }], |id| kept.contains(&id))
    }

    fn moment(&self, turn: usize) -> &Moment {
        &self.moments[turn - self.in_flight]
    }

    fn start(&self, turn: usize) -> Start {
        self.moment(turn).start
    }
}

/// Losses are held to the end of a step.
fn losses(stage: &Stage) -> Vec<StorageId> {
    stage.losses.iter().flatten().map(|loss| loss.storage.id()).collect()
}
