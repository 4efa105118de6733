//! The gated delta rule as flash-linear-attention 0.6 runs it for transformers 5.17: `chunk_gated_delta_rule`
//! (fla/ops/gated_delta_rule/chunk.py, chunk_fwd.py, wy_fast.py, fla/ops/common/chunk_delta_h.py, chunk_o.py,
//! fla/modules/norm/l2norm.py) and `fused_recurrent_gated_delta_rule` (fused_recurrent.py).

use smallvec::smallvec;

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::{Gradients, Saved};
use crate::memory::tensor::Tensor;
use crate::model::Shape;

const NAME: &str = "chunk_gated_delta_rule";

/// Positions that are computed together.
const CHUNK: u64 = 64;

/// What a kernel before backward leaves: keys and values corrected inside each chunk, states at the starts of chunks, and
/// values corrected by them.
struct Recurrence {
    keys: Tensor,
    _values: Tensor,
    states: Tensor,
    last: Option<Tensor>,
    new_values: Tensor,
}

impl Torch {
    /// `ChunkGatedDeltaRuleFunction`: the output and, where it is asked for, the last state. Inputs are query, key, value, decay
    /// and update rate; `input_guard` copies those that do not lie densely.
    pub fn chunked_rule(&mut self, inputs: [&Tensor; 5], keeps: bool) -> Vec<Tensor> {
        let dense = inputs.map(|x| self.contiguous(&x.detached()));
        let [given_query, given_key, value, decay, update] = &dense;
        let [(query, query_length), (key, key_length)] = [given_query, given_key].map(|x| self.unit_length(x));
        let sums = self.fresh_like("chunk_local_cumsum", decay, DType::F32);
        let solved = self.fresh(NAME, update.shape.inserted(3, CHUNK), key.dtype);
        let recurrence = self.recurrence(&key, value, keeps);
        let output = self.fresh_like(NAME, &recurrence.new_values, value.dtype);
        self.chunk_products(&key, value, [2, 2, 1]);
        let last = recurrence.last.clone();
        drop(recurrence);
        let mut made: Vec<Tensor> = [Some(output), last].into_iter().flatten().collect();
        if !self.records(&inputs) {
            return made;
        }
        let kept = [&query, &query_length, &key, &key_length, value, &sums, update, &solved];
        let saved = kept.map(|tensor| Saved::new(self, tensor));
        self.attach_many(&mut made, &inputs, move |torch, mut gradients| {
            let Some(gradient) = gradients.drain(..).next().flatten() else { return Gradients::new() };
            let kept = saved.map(|saved| saved.get(torch));
            torch.chunked_rule_backward(&kept, &gradient)
        });
        made
    }

    /// `chunk_gated_delta_rule_bwd`, in its order; names that it gives anew let go of what they had.
    fn chunked_rule_backward(&mut self, kept: &[Tensor; 8], gradient: &Tensor) -> Gradients {
        let [query, _, key, _, value, sums, update, _] = kept;
        let gradient = &self.contiguous(gradient);
        let like = |torch: &mut Self, x: &Tensor| torch.fresh_like(NAME, x, x.dtype);
        let recurrence = self.recurrence(key, value, false);
        let inside_chunks = like(self, gradient);
        let for_states = like(self, &recurrence.states);
        let for_corrected_values = like(self, &inside_chunks);
        drop(inside_chunks);
        let [mut for_query, mut for_key] = [query, key].map(|x| like(self, x));
        let parts = key.shape.last().div_ceil(self.block_of_keys(key));
        let by_part = self.fresh(NAME, sums.shape.inserted(0, parts), DType::F32);
        let for_corrected_keys = like(self, &recurrence.keys);
        let mut for_decay = self.fresh("sum", sums.shape, DType::F32);
        drop(by_part);
        let more_for_key = like(self, key);
        let for_value = like(self, value);
        drop(for_corrected_values);
        let more_for_decay = like(self, sums);
        let for_update = like(self, update);
        for_decay = self.fresh_like("chunk_local_cumsum", &for_decay, DType::F32);
        self.chunk_products(key, value, [5, 5, 7]);
        drop((recurrence, for_states, for_corrected_keys, more_for_key, more_for_decay));
        for_query = self.fresh_like("l2norm", query, for_query.dtype);
        for_key = self.fresh_like("l2norm", key, for_key.dtype);
        smallvec![Some(for_query), Some(for_key), Some(for_value), Some(for_decay), Some(for_update)]
    }

    /// `fused_recurrent_gated_delta_rule`, which has no backward.
    pub fn recurrent_rule(&mut self, inputs: [&Tensor; 5], keeps: bool) -> Vec<Tensor> {
        let [_, key, value, ..] = &inputs.map(|x| self.contiguous(&x.detached()));
        let output = self.fresh_like("fused_recurrent_gated_delta_rule", value, value.dtype);
        let last = keeps.then(|| self.fresh(NAME, state(key, value), DType::F32));
        [Some(output), last].into_iter().flatten().collect()
    }

    /// `l2norm_fwd`: rows of length one, and by what each was scaled.
    fn unit_length(&mut self, x: &Tensor) -> (Tensor, Tensor) {
        let rows = x.shape.removed(-1);
        (self.fresh_like("l2norm", x, x.dtype), self.fresh("l2norm", rows, DType::F32))
    }

    /// `recompute_w_u_fwd` and `chunk_gated_delta_rule_fwd_h`, which forward and backward both run.
    fn recurrence(&mut self, key: &Tensor, value: &Tensor, keeps: bool) -> Recurrence {
        let (keys, values) = (self.fresh_like(NAME, key, key.dtype), self.fresh_like(NAME, value, value.dtype));
        let [batch, heads, key_dim, value_dim] = sizes(key, value);
        let chunks = key.shape.size(1).div_ceil(CHUNK);
        let states = self.fresh(NAME, Shape::from([batch, chunks, heads, key_dim, value_dim]), key.dtype);
        let last = keeps.then(|| self.fresh(NAME, state(key, value), DType::F32));
        let new_values = self.fresh_like(NAME, &values, values.dtype);
        self.chunk_products(key, value, [1, 1, 2]);
        Recurrence { keys, _values: values, states, last, new_values }
    }

    /// So many products of each chunk with itself over keys, over values, and with its state.
    fn chunk_products(&mut self, key: &Tensor, value: &Tensor, [over_keys, over_values, states]: [u64; 3]) {
        let [batch, heads, key_dim, value_dim] = sizes(key, value);
        let count = batch * heads * key.shape.size(1).div_ceil(CHUNK);
        self.multiply(key.dtype, count * over_keys, [CHUNK, CHUNK, key_dim]);
        self.multiply(key.dtype, count * over_values, [CHUNK, CHUNK, value_dim]);
        self.multiply(key.dtype, count * states, [CHUNK, key_dim, value_dim]);
    }

    /// How many elements of a key one block of `chunk_bwd_dqkwg` takes: by the card's shared memory (`check_shared_mem` of
    /// fla/utils/hardware.py), on an A100 also by the type.
    fn block_of_keys(&self, key: &Tensor) -> u64 {
        let most = match self.device.capability {
            90..=119 => 128,
            80 | 87 if key.dtype.size() == 2 => 128,
            80..=89 | 120.. => 64,
            _ => 32,
        };
        key.shape.last().next_power_of_two().clamp(16, most)
    }
}

fn sizes(key: &Tensor, value: &Tensor) -> [u64; 4] {
    [key.shape.size(0), key.shape.size(2), key.shape.last(), value.shape.last()]
}

fn state(key: &Tensor, value: &Tensor) -> Shape {
    Shape::from(sizes(key, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::device::Device;
    use crate::memory::log::{Event, StorageId};

    fn alive(torch: &Torch) -> i64 {
        let log = torch.log.borrow();
        let bytes = |id: StorageId| log.storages[id.0 as usize].bytes as i64;
        log.events.iter().fold(0, |sum, event| match event {
            Event::Allocate(id) => sum + bytes(*id),
            Event::Free(id) => sum - bytes(*id),
            _ => sum,
        })
    }

    #[test]
    fn blocks_of_keys_are_by_card_and_type() {
        let block = |capability: u32, dim: u64, dtype: DType| {
            let mut torch = Torch::new(Device { capability, ..Device::h200() });
            let key = torch.phantom(Shape::from([1, 64, 2, dim]), dtype);
            torch.block_of_keys(&key)
        };
        assert_eq!([80, 86, 90, 120, 75].map(|card| block(card, 128, DType::BF16)), [128, 64, 128, 64, 32]);
        assert_eq!([80, 89, 90].map(|card| block(card, 128, DType::F32)), [64, 64, 128]);
        assert_eq!([8, 48, 96].map(|dim| block(90, dim, DType::BF16)), [16, 64, 128]);
    }

    #[test]
    fn a_forward_pass_keeps_what_its_function_saves_and_backward_lets_go() {
        let mut torch = Torch::new(Device::h200());
        let (batch, seq, heads, key_dim, value_dim) = (2, 100, 4, 128, 64);
        let mut leaf = |sizes: &[u64], dtype: DType| {
            let made = torch.fresh("input", Shape::new(sizes), dtype);
            torch.leaf(made).0
        };
        let query = leaf(&[batch, seq, heads, key_dim], DType::BF16);
        let key = leaf(&[batch, seq, heads, key_dim], DType::BF16);
        let value = leaf(&[batch, seq, heads, value_dim], DType::BF16);
        let decay = leaf(&[batch, seq, heads], DType::F32);
        let update = leaf(&[batch, seq, heads], DType::BF16);
        let before = alive(&torch);
        let mut made = torch.chunked_rule([&query, &key, &value, &decay, &update], true);
        let rows = batch * seq * heads;
        let output = 2 * rows * value_dim;
        let last = 4 * batch * heads * key_dim * value_dim;
        let saved = rows * (2 * 2 * key_dim + 3 * 4 + 2 * CHUNK);
        assert_eq!(alive(&torch) - before, (output + last + saved) as i64);
        made.truncate(1);
        drop(made);
        assert_eq!(alive(&torch), before);
    }
}
