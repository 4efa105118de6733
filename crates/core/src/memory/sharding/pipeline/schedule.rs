//! What a pipeline rank does in which order.
//!
//! Source: torch/distributed/pipelining/schedules.py of torch 2.11.

use std::collections::BTreeMap;

use crate::plan::parallel::{Pipeline, Schedule};

/// One thing that a rank does, with the stage it does it for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// A micro-batch goes forward.
    Forward(u64, u64),
    /// A micro-batch goes back.
    Backward(u64, u64),
    /// A stage's parameters are gathered.
    Gather(u64),
    /// They are let go.
    Scatter(u64),
    /// A stage's gradients are reduced.
    Reduce(u64),
}

impl Action {
    /// The stage whose parameters it computes with.
    fn computes(self) -> Option<u64> {
        match self {
            Self::Forward(stage, _) | Self::Backward(stage, _) => Some(stage),
            _ => None,
        }
    }
}

/// The actions of a rank in a step of `micro` micro-batches.
pub(super) fn actions(pipeline: &Pipeline, rank: u64, pp: u64, micro: u64) -> Vec<Action> {
    let per_rank = pipeline.per_rank();
    match pipeline.schedule {
        Schedule::Gpipe => {
            let forward = (0..micro).map(|index| Action::Forward(rank, index));
            let back = (0..micro).map(|index| Action::Backward(rank, index));
            forward.chain(back).chain([Action::Reduce(rank)]).collect()
        }
        Schedule::OneForwardOneBackward => one_by_one(rank, pp, micro),
        Schedule::LoopedBfs => {
            let stages: Vec<u64> = (0..per_rank).map(|chunk| chunk * pp + rank).collect();
            let forward = stages.iter().flat_map(|&stage| (0..micro).map(move |index| Action::Forward(stage, index)));
            let back = stages
                .iter()
                .rev()
                .flat_map(|&stage| (0..micro).rev().map(move |index| Action::Backward(stage, index)));
            with_parameters(forward.chain(back).collect(), micro)
        }
        // The other two are refused before.
        Schedule::Interleaved | Schedule::InterleavedZeroBubble | Schedule::ZbvZeroBubble => {
            with_parameters(interleaved(rank, pp, per_rank, micro), micro)
        }
    }
}

/// `Schedule1F1B`.
fn one_by_one(rank: u64, pp: u64, micro: u64) -> Vec<Action> {
    let warmup = micro.min(pp - rank);
    let mut actions: Vec<Action> = (0..warmup).map(|index| Action::Forward(rank, index)).collect();
    let (mut forward, mut back) = (warmup, 0);
    while back < micro {
        actions.push(Action::Backward(rank, back));
        back += 1;
        if forward < micro {
            actions.push(Action::Forward(rank, forward));
            forward += 1;
        }
    }
    actions.push(Action::Reduce(rank));
    actions
}

/// `ScheduleInterleaved1F1B`.
fn interleaved(rank: u64, pp: u64, per_rank: u64, micro: u64) -> Vec<Action> {
    let rounds = (micro / pp).max(1);
    let in_round = (micro / rounds).max(1);
    let all = per_rank * micro;
    let warmup = ((per_rank - 1) * in_round + 2 * (pp - 1 - rank)).min(all);
    let mut next: BTreeMap<(bool, u64), u64> = BTreeMap::new();
    let mut take = |forward: bool, stage: u64| {
        let index = next.entry((forward, stage)).or_default();
        *index += 1;
        *index - 1
    };
    let forward_stage = |step: u64| (step / in_round) % per_rank * pp + rank;
    let back_stage = |step: u64| (per_rank - 1 - ((step - warmup) / in_round) % per_rank) * pp + rank;
    let mut actions = Vec::new();
    for step in 0..all + warmup {
        if step < all {
            let stage = forward_stage(step);
            actions.push(Action::Forward(stage, take(true, stage)));
        }
        if step >= warmup {
            let stage = back_stage(step);
            actions.push(Action::Backward(stage, take(false, stage)));
        }
    }
    actions
}

/// `_add_unshard_reshard` and `_add_reduce_grad`: a few stages ahead are gathered, gradients are reduced after a stage's last.
fn with_parameters(computed: Vec<Action>, micro: u64) -> Vec<Action> {
    const MOST: usize = 3;
    let mut gathered: Vec<u64> = Vec::new();
    let mut backs: BTreeMap<u64, u64> = BTreeMap::new();
    let mut actions = Vec::new();
    for (at, &action) in computed.iter().enumerate() {
        let mut wanted: Vec<u64> = Vec::new();
        for stage in computed[at..].iter().filter_map(|action| action.computes()) {
            if !wanted.contains(&stage) {
                wanted.push(stage);
            }
            if wanted.len() == MOST {
                break;
            }
        }
        gathered.sort_unstable();
        for &stage in gathered.iter().filter(|stage| !wanted.contains(stage)) {
            actions.push(Action::Scatter(stage));
        }
        gathered.retain(|stage| wanted.contains(stage));
        for stage in wanted {
            if !gathered.contains(&stage) {
                actions.push(Action::Gather(stage));
                gathered.push(stage);
            }
        }
        actions.push(action);
        if let Action::Backward(stage, _) = action {
            let count = backs.entry(stage).or_default();
            *count += 1;
            if *count == micro {
                actions.push(Action::Reduce(stage));
            }
        }
    }
    actions.extend(gathered.into_iter().map(Action::Scatter));
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(schedule: Schedule, rank: u64, pp: u64, micro: u64) -> Vec<Action> {
        actions(&Pipeline { schedule, ..Pipeline::default() }, rank, pp, micro)
    }

    #[test]
    fn every_micro_batch_goes_there_and_back_once() {
        for schedule in [Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::LoopedBfs] {
            for (rank, pp, micro) in [(0, 2, 4), (1, 2, 4), (0, 4, 4), (3, 4, 8), (1, 4, 2), (1, 3, 9)] {
                let list = of(schedule, rank, pp, micro);
                let stages = if schedule.is_single() { 1 } else { 2 };
                let count = |wanted: fn(&Action) -> bool| list.iter().filter(|action| wanted(action)).count() as u64;
                assert_eq!(
                    count(|a| matches!(a, Action::Forward(..))),
                    stages * micro,
                    "{schedule:?} {rank} {pp} {micro}"
                );
                assert_eq!(count(|a| matches!(a, Action::Backward(..))), stages * micro);
                assert_eq!(count(|a| matches!(a, Action::Reduce(_))), stages);
                for (at, action) in list.iter().enumerate() {
                    if let Action::Backward(stage, index) = action {
                        assert!(list[..at].contains(&Action::Forward(*stage, *index)), "{list:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn fewer_are_in_flight_towards_the_end_of_the_pipeline() {
        let in_flight = |rank| {
            let mut most: i64 = 0;
            of(Schedule::OneForwardOneBackward, rank, 4, 8).iter().fold(0i64, |now, action| {
                let now = match action {
                    Action::Forward(..) => now + 1,
                    Action::Backward(..) => now - 1,
                    _ => now,
                };
                most = most.max(now);
                now
            });
            most
        };
        assert_eq!([in_flight(0), in_flight(1), in_flight(3)], [4, 3, 1]);
    }
}
