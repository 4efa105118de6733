//! Attention over a sequence that is split over cards: keys and values go round, partial results are merged in fp32.
//!
//! Follows torch/distributed/tensor/experimental/_context_parallel/_attention.py of torch 2.11, name by name: what a variable
//! of that Python holds on to is memory.

use super::Torch;
use super::attention::Kernel;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::saved::Costly;
use crate::memory::tensor::{Strides, Tensor};
use crate::model::Shape;
use crate::plan::parallel::Rotate;

/// The dimension that is split.
const SEQUENCE: i64 = 2;

/// This card's place among those that share a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// How many there are.
    pub ranks: u64,
    /// Which one it is.
    pub rank: u64,
    /// How keys and values go round.
    pub rotate: Rotate,
    /// Whether every card has a chunk of the beginning and one of the end.
    pub balanced: bool,
}

/// What a round computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::memory) enum Round {
    /// All the card has.
    Whole,
    /// The first half of keys and values.
    FirstKeys,
    /// The second half of queries.
    SecondQueries,
    /// Nothing: all of it lies in the future.
    Nothing,
}

impl Ring {
    pub(in crate::memory) fn round(&self, index: u64) -> Round {
        match (index, self.balanced) {
            (0, _) => Round::Whole,
            (index, true) if index <= self.rank => Round::FirstKeys,
            (_, true) => Round::SecondQueries,
            // Those before this card are seen, those after it are not.
            (index, false) if index <= self.rank => Round::Whole,
            _ => Round::Nothing,
        }
    }
}

/// Where keys and values are while they go round.
#[derive(Debug, Default)]
struct Rotater {
    buffer: Option<Tensor>,
}

impl Rotater {
    /// Sends on what was joined.
    fn send(&mut self, torch: &mut Torch, ring: Ring, joined: &Tensor) {
        let elements = joined.elements();
        match ring.rotate {
            Rotate::Allgather if self.buffer.is_some() => {}
            Rotate::Allgather => {
                let all = Shape::from([elements.saturating_mul(ring.ranks)]);
                self.buffer = Some(torch.fresh("all_gather_into_tensor", all, joined.dtype));
            }
            Rotate::Alltoall => {
                self.buffer = Some(torch.fresh("all_to_all_single", Shape::from([elements]), joined.dtype));
            }
        }
    }

    /// What came, as a tensor of given sizes.
    fn received(&self, shape: Shape) -> Option<Tensor> {
        self.buffer.clone().map(|buffer| buffer.with_shape(shape))
    }
}

/// The results so far, in fp32.
#[derive(Debug, Default)]
struct Merger {
    output: Option<Tensor>,
    statistic: Option<Tensor>,
}

impl Torch {
    fn half(x: &Tensor) -> Tensor {
        let strides = x.strides;
        x.clone().with_layout(x.shape.with(SEQUENCE, x.shape.size(SEQUENCE) / 2), strides)
    }

    fn wide(&mut self, x: &Tensor) -> Tensor {
        if x.dtype == DType::F32 { x.clone() } else { self.fresh_like("_to_copy", x, DType::F32) }
    }

    fn narrowed(&mut self, x: Tensor, dtype: DType) -> Tensor {
        if x.dtype == dtype { x } else { self.fresh_like("_to_copy", &x, dtype) }
    }

    /// `F.scaled_dot_product_attention` inside `context_parallel`.
    pub(super) fn ring_attention(
        &mut self,
        ring: Ring,
        kernel: Kernel,
        [query, key, value]: [&Tensor; 3],
        dropout: bool,
    ) -> Tensor {
        let inputs = [query, key, value];
        let records = self.records(&inputs);
        let mut saved: Vec<Saved> =
            if records { inputs.iter().map(|t| Saved::new(self, t)).collect() } else { Vec::new() };
        let plain = inputs.map(Tensor::detached);
        let [output, statistic, seed, offset] = self.costly(Costly::Attention, |torch| {
            let (output, statistic, seeds) = torch.ring_forward(ring, kernel, &plain, dropout);
            let [seed, offset] = seeds.unwrap_or_else(|| [statistic.clone(), statistic.clone()]);
            [output, statistic, seed, offset]
        });
        let layouts = plain.map(|t| (t.shape, t.strides, t.dtype));
        if !records {
            return output;
        }
        saved.extend([&output, &statistic, &seed, &offset].map(|t| Saved::new(self, t)));
        drop((statistic, seed, offset));
        self.attach(output, &inputs, move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let gradients = torch.ring_backward(ring, kernel, layouts, gradient);
            drop(kept);
            gradients.map(Some).into_iter().collect()
        })
    }

    fn ring_forward(
        &mut self,
        ring: Ring,
        kernel: Kernel,
        [query, key, value]: &[Tensor; 3],
        dropout: bool,
    ) -> (Tensor, Tensor, Option<[Tensor; 2]>) {
        let (mut key, mut value) = (self.contiguous(key), self.contiguous(value));
        let joined_shape = Shape::from([key.elements().saturating_add(value.elements())]);
        let mut merger = Merger::default();
        let mut rotater = Rotater::default();
        let mut last: Option<(Tensor, Tensor, Option<[Tensor; 2]>)> = None;
        // What the round before computed on is bound until the next is chosen.
        let mut bound: Option<[Tensor; 2]> = None;
        for index in 0..ring.ranks {
            if index > 0 {
                key = rotater.received(key.shape).unwrap_or(key);
                value = rotater.received(value.shape).unwrap_or(value);
            }
            if index + 1 < ring.ranks {
                let joined = self.fresh("cat", joined_shape, key.dtype);
                rotater.send(self, ring, &joined);
            }
            let round = ring.round(index);
            let (rows, keys, values) = match round {
                Round::Nothing => continue,
                Round::Whole => (query.clone(), key.clone(), value.clone()),
                Round::FirstKeys => (query.clone(), Self::half(&key), Self::half(&value)),
                Round::SecondQueries => (Self::half(query), key.clone(), value.clone()),
            };
            bound = Some([keys.clone(), values.clone()]);
            let results = self.attention_kernel(kernel, [&rows, &keys, &values], dropout, true);
            let (output, statistic, _) = last.insert(results);
            let (output, statistic) = (output.clone(), statistic.clone());
            self.merge(&mut merger, output, statistic, round == Round::SecondQueries);
        }
        drop(bound);
        let Some((output, statistic, seeds)) = last else { unreachable!("the first round always computes") };
        let dtype = output.dtype;
        let merged = merger.output.as_ref().map_or(output, |wide| self.narrowed(wide.clone(), dtype));
        (merged, merger.statistic.take().unwrap_or(statistic), seeds)
    }

    /// `_SDPAMerger.step`.
    fn merge(&mut self, merger: &mut Merger, output: Tensor, statistic: Tensor, partial: bool) {
        let wide = self.wide(&output);
        let rows = if statistic.shape.rank() == 3 {
            let shape = statistic.shape.inserted(-1, 1);
            statistic.with_shape(shape)
        } else {
            statistic
        };
        let (Some(before), Some(rows_before)) = (&merger.output, &merger.statistic) else {
            (merger.output, merger.statistic) = (Some(wide), Some(rows));
            return;
        };
        let (old, old_rows) = match partial {
            true => (Self::half(before), Self::half(rows_before)),
            false => (before.clone(), rows_before.clone()),
        };
        let mut weight = self.pointwise("sub", &[&rows, &old_rows], DType::F32);
        weight = self.pointwise("sigmoid", &[&weight], DType::F32);
        let difference = self.pointwise("sub", &[&old, &wide], DType::F32);
        let share = self.pointwise("mul", &[&weight, &difference], DType::F32);
        drop((weight, difference));
        let sum = self.pointwise("sub", &[&old, &share], DType::F32);
        drop((share, old));
        let mut change = self.pointwise("sub", &[&old_rows, &rows], DType::F32);
        change = self.pointwise("log_sigmoid_forward", &[&change], DType::F32);
        let sum_rows = self.pointwise("sub", &[&old_rows, &change], DType::F32);
        drop((change, old_rows));
        if !partial {
            (merger.output, merger.statistic) = (Some(sum), Some(sum_rows));
            return;
        }
        let (shape, shape_rows) = (before.shape, rows_before.shape);
        merger.statistic = Some(self.fresh("cat", shape_rows, DType::F32));
        merger.output = Some(self.fresh("cat", shape, DType::F32));
    }

    /// What a kernel's backward makes for these inputs.
    fn kernel_backward(&mut self, kernel: Kernel, [query, key, value]: [&Tensor; 3]) -> [Tensor; 3] {
        self.attention_gradients(query.dtype, [query.shape, key.shape, value.shape]);
        let gradients =
            [query, key, value].map(|like| self.fresh_like("scaled_dot_product_attention_backward", like, like.dtype));
        self.attention_backward_scratch(kernel, &query.shape, &key.shape, value.shape.last(), query.dtype);
        gradients
    }

    fn ring_backward(
        &mut self,
        ring: Ring,
        kernel: Kernel,
        layouts: [(Shape, Strides, DType); 3],
        gradient: Tensor,
    ) -> [Tensor; 3] {
        let dtype = gradient.dtype;
        // Only the sizes of the inputs are needed; those kept for backward are held by the caller.
        let [query, key, value] =
            layouts.map(|(shape, strides, dtype)| self.phantom(shape, dtype).with_layout(shape, strides));
        let mut for_query = self.fresh_like("zeros_like", &query, DType::F32);
        let mut for_key = self.fresh_like("zeros_like", &key, DType::F32);
        let mut for_value = self.fresh_like("zeros_like", &value, DType::F32);
        let (mut key, mut value) = (self.contiguous(&key), self.contiguous(&value));
        let joined_shape = Shape::from([key.elements().saturating_add(value.elements())]);
        let (mut rotater, mut gradients) = (Rotater::default(), Rotater::default());
        let onwards = Ring { rotate: Rotate::Alltoall, ..ring };
        // Names that stay bound until they are bound again.
        let (mut sent, mut sent_gradients, mut rows) = (None, None, None);
        let mut parts: [Option<Tensor>; 3] = [None, None, None];
        let mut bound: Option<[Tensor; 2]> = None;
        for index in 0..ring.ranks {
            if index > 0 {
                key = rotater.received(key.shape).unwrap_or(key);
                value = rotater.received(value.shape).unwrap_or(value);
            }
            if index + 1 < ring.ranks {
                let joined = self.fresh("cat", joined_shape, key.dtype);
                rotater.send(self, ring, sent.insert(joined));
            }
            let round = ring.round(index);
            match round {
                Round::Nothing => {
                    for (part, like) in parts.iter_mut().zip([&query, &key, &value]) {
                        *part = Some(self.fresh_like("zeros_like", like, DType::F32));
                    }
                }
                _ => {
                    let (of_query, keys, values) = match round {
                        Round::FirstKeys => (query.clone(), Self::half(&key), Self::half(&value)),
                        Round::SecondQueries => (Self::half(&query), key.clone(), value.clone()),
                        _ => (query.clone(), key.clone(), value.clone()),
                    };
                    if round == Round::SecondQueries {
                        let shape =
                            Shape::from([query.shape.size(0), query.shape.size(1), of_query.shape.size(SEQUENCE)]);
                        rows = Some(self.fresh("clone", shape, DType::F32));
                    }
                    bound = Some([keys.clone(), values.clone()]);
                    parts = self.kernel_backward(kernel, [&of_query, &keys, &values]).map(Some);
                }
            }
            if index > 0 {
                sent_gradients = gradients.buffer.clone();
                for_key = gradients.received(for_key.shape).unwrap_or(for_key);
                for_value = gradients.received(for_value.shape).unwrap_or(for_value);
                if round == Round::FirstKeys {
                    for_key = self.fresh("cat", for_key.shape, DType::F32);
                    for_value = self.fresh("cat", for_value.shape, DType::F32);
                }
            }
            let flat = [&for_key, &for_value].map(|part| self.contiguous(part));
            let joined = self.fresh("cat", joined_shape, DType::F32);
            drop(flat);
            gradients.send(self, onwards, sent_gradients.insert(joined));
            if round == Round::SecondQueries {
                for_query = self.fresh("cat", for_query.shape, DType::F32);
            }
        }
        let for_query = self.narrowed(for_query, dtype);
        let received = gradients.buffer.clone();
        let both = received.map(|received| self.narrowed(received, dtype));
        let keys = both.clone().map_or_else(|| for_key.clone(), |both| both.with_shape(key.shape));
        let values = both.map_or_else(|| for_value.clone(), |both| both.with_shape(value.shape));
        drop((sent, sent_gradients, parts, rows, bound, for_key, for_value, gradient));
        [for_query, Tensor { viewed: true, ..keys }, Tensor { viewed: true, ..values }]
    }
}
