//! Which layers a pipeline rank holds, and in which order it runs micro-batches through them.
//!
//! Sources: megatron/core/pipeline_parallel/schedules.py; for zero-bubble schedules deepspeed_zbh1_schedule.py of
//! Megatron-DeepSpeed (4efb479d) and "Zero Bubble Pipeline Parallelism" (Qi et al. 2023), section 2.

use std::ops::Range;

use crate::plan::parallel::megatron::PipelineSchedule;

/// A run of layers that goes forward and backward as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Its layers.
    pub layers: Range<usize>,
    /// Whether the embedding belongs to it.
    pub first: bool,
    /// Whether the output layer and the loss belong to it.
    pub last: bool,
}

/// The chunks of a stage, of all chunks in the order of the model: one, or as many as the pipeline is interleaved.
pub fn of_stage(lengths: &[u64], stage: usize, stages: usize) -> Vec<Chunk> {
    let mut start = 0;
    let mut list = Vec::new();
    for (index, length) in lengths.iter().enumerate() {
        let end = start + *length as usize;
        if index % stages.max(1) == stage {
            list.push(Chunk { layers: start..end, first: index == 0, last: index + 1 == lengths.len() });
        }
        start = end;
    }
    list
}

/// One turn of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// A micro-batch goes forward through a chunk.
    Forward(usize),
    /// The oldest one goes backward through it.
    Backward(usize),
    /// The same, and its weight gradients wait.
    BackwardOfInputs(usize),
    /// The weight gradients that wait longest.
    Weights,
}

/// The turns of one step of a stage under a schedule.
pub fn turns(schedule: PipelineSchedule, stage: u64, stages: u64, interleaved: u64, micro_batches: u64) -> Vec<Turn> {
    match schedule {
        PipelineSchedule::OneForwardOneBackward => self::schedule(stage, stages, interleaved, micro_batches),
        PipelineSchedule::ZeroBubbleH1 => zero_bubble(stages - stage - 1, stage, micro_batches),
        PipelineSchedule::ZeroBubbleH2 => zero_bubble(2 * (stages - stage - 1), 2 * stage, micro_batches),
    }
}

/// `warm_up` micro-batches go forward first, and weight gradients of `behind` micro-batches wait for the end of the step, where
/// they fill what would be a bubble. The first stage lets none wait.
fn zero_bubble(warm_up: u64, behind: u64, micro_batches: u64) -> Vec<Turn> {
    let mut turns = vec![Turn::Forward(0); warm_up.min(micro_batches) as usize];
    let (mut forward, mut backward, mut weights) = (warm_up.min(micro_batches), 0, 0);
    while forward < micro_batches && backward < behind {
        turns.extend([Turn::Forward(0), Turn::BackwardOfInputs(0)]);
        (forward, backward) = (forward + 1, backward + 1);
    }
    while backward < micro_batches {
        let goes_forward = forward < micro_batches;
        if goes_forward {
            turns.push(Turn::Forward(0));
            forward += 1;
        }
        (backward, weights) = (backward + 1, weights + 1);
        // Once nothing is left to go forward, inputs' gradients go on before weights are looked at.
        match behind == 0 || (goes_forward && forward < micro_batches) {
            true => turns.push(Turn::Backward(0)),
            false => turns.extend([Turn::BackwardOfInputs(0), Turn::Weights]),
        }
    }
    turns.extend((weights..micro_batches).map(|_| Turn::Weights));
    turns
}

/// The turns of one step of a stage: all forward and backward alternately after a warm-up, which fills the pipeline.
pub fn schedule(stage: u64, stages: u64, interleaved: u64, micro_batches: u64) -> Vec<Turn> {
    let total = micro_batches * interleaved;
    let warm_up = if interleaved == 1 {
        stages - stage - 1
    } else if micro_batches == stages {
        total
    } else {
        (stages - stage - 1) * 2 + (interleaved - 1) * stages
    }
    .min(total);
    let chunk = |index: u64, forward: bool| {
        let turn = index % (stages * interleaved) / stages;
        (if forward || interleaved == 1 { turn } else { interleaved - 1 - turn }) as usize
    };
    let chunk = |index: u64, forward: bool| if interleaved == 1 { 0 } else { chunk(index, forward) };
    let mut turns: Vec<Turn> = (0..warm_up).map(|index| Turn::Forward(chunk(index, true))).collect();
    for index in warm_up..total {
        turns.push(Turn::Forward(chunk(index, true)));
        turns.push(Turn::Backward(chunk(index - warm_up, false)));
    }
    turns.extend((total - warm_up..total).map(|index| Turn::Backward(chunk(index, false))));
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most_in_flight(turns: &[Turn]) -> i64 {
        let (mut now, mut most) = (0, 0);
        for turn in turns {
            now += if matches!(turn, Turn::Forward(_)) { 1 } else { -1 };
            most = most.max(now);
        }
        most
    }

    #[test]
    fn earlier_stages_hold_more_micro_batches() {
        for stage in 0..4 {
            let turns = schedule(stage, 4, 1, 16);
            assert_eq!(turns.len(), 32);
            assert_eq!(most_in_flight(&turns), 4 - stage as i64);
        }
        assert_eq!(most_in_flight(&schedule(0, 4, 1, 2)), 2);
    }

    /// What is in flight, counted with weight gradients that wait; and all work is done.
    #[test]
    fn zero_bubble_schedules_hold_what_the_paper_says() {
        for (schedule, most) in [(PipelineSchedule::ZeroBubbleH1, 4), (PipelineSchedule::ZeroBubbleH2, 7)] {
            for stage in 0..4 {
                let turns = turns(schedule, stage, 4, 1, 16);
                let (mut now, mut highest) = (0i64, 0);
                for turn in &turns {
                    now += match turn {
                        Turn::Forward(_) => 1,
                        Turn::Backward(_) | Turn::Weights => -1,
                        Turn::BackwardOfInputs(_) => 0,
                    };
                    highest = highest.max(now);
                }
                assert_eq!((now, highest), (0, most), "{schedule:?} stage {stage}");
                let waits = turns.iter().filter(|turn| matches!(turn, Turn::BackwardOfInputs(_))).count();
                assert_eq!(waits, turns.iter().filter(|turn| **turn == Turn::Weights).count());
                assert_eq!(turns.iter().filter(|turn| **turn == Turn::Forward(0)).count(), 16);
            }
        }
    }

    #[test]
    fn interleaving_adds_chunks_in_flight() {
        let turns = schedule(0, 4, 2, 8);
        assert_eq!(most_in_flight(&turns), 3 * 2 + 4 + 1);
        assert_eq!(turns.iter().filter(|turn| **turn == Turn::Backward(0)).count(), 8);
    }

    #[test]
    fn chunks_cover_all_layers_once() {
        let chunks: Vec<Chunk> = (0..4).flat_map(|stage| of_stage(&[3, 2, 2, 1, 2, 2, 2, 2], stage, 4)).collect();
        let mut covered: Vec<usize> = chunks.iter().flat_map(|chunk| chunk.layers.clone()).collect();
        covered.sort_unstable();
        assert_eq!(covered, (0..16).collect::<Vec<_>>());
        assert_eq!(chunks.iter().filter(|chunk| chunk.first).count(), 1);
        assert_eq!(chunks.iter().filter(|chunk| chunk.last).count(), 1);
    }
}
