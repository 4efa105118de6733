//! Which layers a pipeline rank holds.

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

#[cfg(test)]
mod tests {
    use super::*;

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
