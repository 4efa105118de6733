//! Which layers a pipeline rank holds, and in which order it runs micro-batches through them.
//!
//! Source: megatron/core/pipeline_parallel/schedules.py.

use std::ops::Range;

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
