//! What a pipeline rank does in which order: the one place that turns a schedule into actions.
//!
//! Sources: torch/distributed/pipelining/schedules.py of torch 2.11; megatron/core/pipeline_parallel/schedules.py; for
//! zero-bubble schedules deepspeed_zbh1_schedule.py of Megatron-DeepSpeed (4efb479d) and "Zero Bubble Pipeline Parallelism"
//! (Qi et al. 2023), section 2.

use std::collections::{BTreeMap, VecDeque};

use crate::plan::PlanError;
use crate::plan::parallel::Schedule;
use crate::plan::parallel::megatron::PipelineSchedule;

/// One thing that a rank does. Its stages are its chunks, counted from 0 in the order of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A micro-batch goes forward through a chunk.
    Forward {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        micro: u64,
    },
    /// It goes back.
    Backward {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        micro: u64,
    },
    /// It goes back, and its gradients of weights wait.
    BackwardOfInputs {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        micro: u64,
    },
    /// The gradients of weights that waited longest.
    Weights {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        micro: u64,
    },
    /// A chunk's parameters are gathered.
    Gather(usize),
    /// They are let go.
    Scatter(usize),
    /// A chunk's gradients are reduced.
    Reduce(usize),
}

impl Action {
    /// The chunk it is for.
    pub fn chunk(self) -> usize {
        match self {
            Self::Forward { chunk, .. }
            | Self::Backward { chunk, .. }
            | Self::BackwardOfInputs { chunk, .. }
            | Self::Weights { chunk, .. }
            | Self::Gather(chunk)
            | Self::Scatter(chunk)
            | Self::Reduce(chunk) => chunk,
        }
    }
}

/// A rank of a pipeline, and what goes through it in a step.
#[derive(Debug, Clone, Copy)]
pub struct PipelineRank {
    /// Which one.
    pub rank: u64,
    /// Of how many.
    pub ranks: u64,
    /// Stages of each.
    pub chunks: u64,
    /// Micro-batches of a step.
    pub micro_batches: u64,
}

impl PipelineRank {
    /// A step of `torch.distributed.pipelining`, with when parameters are gathered and gradients reduced.
    pub fn torch(self, schedule: Schedule) -> Result<Vec<Action>, PlanError> {
        match schedule {
            Schedule::Gpipe => Ok(reduced_at_the_end(self.alternating(self.micro_batches, 1))),
            Schedule::OneForwardOneBackward => Ok(reduced_at_the_end(self.one_by_one())),
            Schedule::LoopedBfs => Ok(with_parameters(&self.breadth_first(), self.micro_batches)),
            Schedule::Interleaved => {
                let rounds = (self.micro_batches / self.ranks).max(1);
                let group = (self.micro_batches / rounds).max(1);
                let warm_up = (self.chunks - 1) * group + 2 * self.behind();
                Ok(with_parameters(&self.alternating(warm_up, group), self.micro_batches))
            }
            Schedule::InterleavedZeroBubble | Schedule::ZbvZeroBubble => Err(PlanError::Internal {
                what: format!("the schedule {}, which no check of the plan refused", schedule.name()),
            }),
        }
    }

    /// A step of Megatron-Core; interleaved where a rank has several chunks.
    pub fn megatron(self, schedule: PipelineSchedule) -> Vec<Action> {
        match schedule {
            PipelineSchedule::OneForwardOneBackward if self.chunks == 1 => self.one_by_one(),
            // As many as there are ranks all go forward before any goes back.
            PipelineSchedule::OneForwardOneBackward if self.micro_batches == self.ranks => {
                self.alternating(self.micro_batches * self.chunks, self.ranks)
            }
            PipelineSchedule::OneForwardOneBackward => {
                self.alternating(2 * self.behind() + (self.chunks - 1) * self.ranks, self.ranks)
            }
            PipelineSchedule::ZeroBubbleH1 => self.zero_bubble(1),
            PipelineSchedule::ZeroBubbleH2 => self.zero_bubble(2),
        }
    }

    /// One forward, one backward on a single chunk, after a warm-up that fills the pipeline.
    pub fn one_by_one(self) -> Vec<Action> {
        self.alternating(self.behind(), 1)
    }

    /// How many ranks come after this one.
    fn behind(self) -> u64 {
        (self.ranks - 1).saturating_sub(self.rank)
    }

    /// `warm_up` go forward, then forward and backward take turns, then the rest goes back. Micro-batches go in groups from
    /// chunk to chunk.
    fn alternating(self, warm_up: u64, group: u64) -> Vec<Action> {
        let total = self.chunks * self.micro_batches;
        let warm_up = warm_up.min(total);
        let place = |turn: u64| (turn / group % self.chunks, turn / (group * self.chunks) * group + turn % group);
        let mut actions = Vec::new();
        for turn in 0..total + warm_up {
            if turn < total {
                let (chunk, micro) = place(turn);
                actions.push(Action::Forward { chunk: chunk as usize, micro });
            }
            if turn >= warm_up {
                let (chunk, micro) = place(turn - warm_up);
                actions.push(Action::Backward { chunk: (self.chunks - 1 - chunk) as usize, micro });
            }
        }
        actions
    }

    /// Every chunk for all micro-batches before the next; back in the opposite order.
    fn breadth_first(self) -> Vec<Action> {
        let all = (0..self.chunks as usize).flat_map(|chunk| (0..self.micro_batches).map(move |micro| (chunk, micro)));
        let forward = all.clone().map(|(chunk, micro)| Action::Forward { chunk, micro });
        let mut back: Vec<Action> = all.map(|(chunk, micro)| Action::Backward { chunk, micro }).collect();
        back.reverse();
        forward.chain(back).collect()
    }

    /// Gradients of weights wait for the end of the step, where they fill what would be a bubble; the first rank lets none wait.
    /// `depth` 2 starts twice as many micro-batches.
    fn zero_bubble(self, depth: u64) -> Vec<Action> {
        let (warm_up, wait) = ((depth * self.behind()).min(self.micro_batches), depth * self.rank);
        let mut actions: Vec<Action> = (0..warm_up).map(|micro| Action::Forward { chunk: 0, micro }).collect();
        let mut waiting = VecDeque::new();
        for micro in 0..self.micro_batches {
            let ahead = warm_up + micro;
            let goes_forward = ahead < self.micro_batches;
            if goes_forward {
                actions.push(Action::Forward { chunk: 0, micro: ahead });
            }
            let fills = goes_forward && micro < wait;
            // Once nothing is left to go forward, inputs' gradients go on before weights are looked at.
            if !fills && (wait == 0 || ahead + 1 < self.micro_batches) {
                actions.push(Action::Backward { chunk: 0, micro });
                continue;
            }
            actions.push(Action::BackwardOfInputs { chunk: 0, micro });
            waiting.push_back(micro);
            if !fills {
                actions.extend(waiting.pop_front().map(|micro| Action::Weights { chunk: 0, micro }));
            }
        }
        actions.extend(waiting.into_iter().map(|micro| Action::Weights { chunk: 0, micro }));
        actions
    }
}

/// Schedules of one stage a rank gather by hooks, and reduce when all is done.
fn reduced_at_the_end(mut actions: Vec<Action>) -> Vec<Action> {
    actions.push(Action::Reduce(0));
    actions
}

/// `_add_unshard_reshard` and `_add_reduce_grad`: a few stages ahead are gathered, gradients are reduced after a stage's last.
fn with_parameters(computed: &[Action], micro_batches: u64) -> Vec<Action> {
    const MOST: usize = 3;
    let mut gathered: Vec<usize> = Vec::new();
    let mut backs: BTreeMap<usize, u64> = BTreeMap::new();
    let mut actions = Vec::new();
    for (at, &action) in computed.iter().enumerate() {
        let mut wanted: Vec<usize> = Vec::new();
        for chunk in computed[at..].iter().map(|action| action.chunk()) {
            if !wanted.contains(&chunk) {
                wanted.push(chunk);
            }
            if wanted.len() == MOST {
                break;
            }
        }
        gathered.sort_unstable();
        actions.extend(gathered.iter().filter(|chunk| !wanted.contains(chunk)).map(|&chunk| Action::Scatter(chunk)));
        gathered.retain(|chunk| wanted.contains(chunk));
        for chunk in wanted {
            if !gathered.contains(&chunk) {
                actions.push(Action::Gather(chunk));
                gathered.push(chunk);
            }
        }
        actions.push(action);
        if let Action::Backward { chunk, .. } = action {
            let count = backs.entry(chunk).or_default();
            *count += 1;
            if *count == micro_batches {
                actions.push(Action::Reduce(chunk));
            }
        }
    }
    actions.extend(gathered.into_iter().map(Action::Scatter));
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u64, ranks: u64, chunks: u64, micro_batches: u64) -> PipelineRank {
        PipelineRank { rank, ranks, chunks, micro_batches }
    }

    /// The most micro-batches that are held at once; all are through at the end.
    fn most_in_flight(actions: &[Action]) -> i64 {
        let (mut now, mut most) = (0i64, 0);
        for action in actions {
            now += match action {
                Action::Forward { .. } => 1,
                Action::Backward { .. } | Action::Weights { .. } => -1,
                _ => 0,
            };
            most = most.max(now);
        }
        assert_eq!(now, 0, "{actions:?}");
        most
    }

    /// Every micro-batch goes through every chunk there and back once, in this order, and what waits is not forgotten.
    fn assert_complete(actions: &[Action], chunks: u64, micro_batches: u64) {
        for (chunk, micro) in (0..chunks as usize).flat_map(|chunk| (0..micro_batches).map(move |micro| (chunk, micro)))
        {
            let at = |wanted: Action| {
                let mut places = actions.iter().enumerate().filter(|(_, action)| **action == wanted).map(|(at, _)| at);
                let first = places.next();
                assert_eq!(places.next(), None, "{wanted:?} twice in {actions:?}");
                first
            };
            let forward = at(Action::Forward { chunk, micro });
            let back = at(Action::Backward { chunk, micro });
            let (inputs, weights) =
                (at(Action::BackwardOfInputs { chunk, micro }), at(Action::Weights { chunk, micro }));
            assert!(forward.is_some() && forward < back.or(inputs), "{chunk} {micro} in {actions:?}");
            assert!(back.is_some() != inputs.is_some() && inputs.is_some() == weights.is_some() && inputs <= weights);
        }
    }

    const PLACES: [(u64, u64, u64); 6] = [(0, 2, 4), (1, 2, 4), (0, 4, 4), (3, 4, 8), (1, 4, 2), (1, 3, 9)];

    #[test]
    fn every_micro_batch_goes_there_and_back_once() {
        for schedule in [Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::LoopedBfs] {
            for (at, ranks, micro) in PLACES {
                let chunks = if schedule.is_single() { 1 } else { 2 };
                let actions = rank(at, ranks, chunks, micro).torch(schedule).unwrap();
                assert_complete(&actions, chunks, micro);
                let reduced = actions.iter().filter(|action| matches!(action, Action::Reduce(_))).count() as u64;
                assert_eq!(reduced, chunks, "{schedule:?} {at} {ranks} {micro}");
            }
        }
        for (at, ranks, micro) in PLACES {
            for schedule in [
                PipelineSchedule::OneForwardOneBackward,
                PipelineSchedule::ZeroBubbleH1,
                PipelineSchedule::ZeroBubbleH2,
            ] {
                assert_complete(&rank(at, ranks, 1, micro).megatron(schedule), 1, micro);
            }
            let interleaved = rank(at, ranks, 3, micro.next_multiple_of(ranks));
            let actions = interleaved.megatron(PipelineSchedule::OneForwardOneBackward);
            assert_complete(&actions, 3, interleaved.micro_batches);
        }
    }

    #[test]
    fn earlier_ranks_hold_more_micro_batches() {
        for at in 0..4 {
            assert_eq!(most_in_flight(&rank(at, 4, 1, 16).one_by_one()), 4 - at as i64);
        }
        assert_eq!(most_in_flight(&rank(0, 4, 1, 2).one_by_one()), 2);
        let interleaved = |micro| rank(0, 4, 2, micro).megatron(PipelineSchedule::OneForwardOneBackward);
        assert_eq!(most_in_flight(&interleaved(8)), 3 * 2 + 4 + 1);
        assert_eq!(most_in_flight(&interleaved(4)), 8);
    }

    /// Counted with gradients of weights that wait.
    #[test]
    fn zero_bubble_schedules_hold_what_the_paper_says() {
        for (schedule, most) in [(PipelineSchedule::ZeroBubbleH1, 4), (PipelineSchedule::ZeroBubbleH2, 7)] {
            for at in 0..4 {
                assert_eq!(most_in_flight(&rank(at, 4, 1, 16).megatron(schedule)), most, "{schedule:?} rank {at}");
            }
        }
    }

    #[test]
    fn a_schedule_that_is_not_modelled_is_no_other_one() {
        assert!(matches!(rank(0, 2, 2, 4).torch(Schedule::ZbvZeroBubble), Err(PlanError::Internal { .. })));
    }
}
