//! A cache in few bits (`QuantizedCache` of transformers/cache_utils.py), packed by optimum-quanto 0.2 or HQQ 0.2.
//!
//! The prompt is packed at once. Every token unpacks the whole layer, joins it with a residual in full width and with the
//! new positions, and gives that to attention; when the residual is full, all of it is packed anew. So the peak has one
//! layer unpacked several times over, whatever the bits.

use super::cache::{Store, replace};
use crate::dtype::DType;
use crate::memory::log::{Category, Event};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::{CacheBackend, QuantizedCache};

impl Store {
    /// One update of a layer.
    pub(super) fn update_quantised(
        &self,
        torch: &mut Torch,
        how: QuantizedCache,
        inputs: &[Option<Tensor>],
        shapes: &[Shape],
    ) -> Vec<Option<Tensor>> {
        let slot = self.next_slot();
        torch.in_category(Category::Cache, |torch| {
            let mut packed = self.packed.borrow_mut();
            if packed.len() <= slot {
                packed.resize(slot + 1, Vec::new());
            }
            let new: Vec<Tensor> = inputs.iter().flatten().cloned().collect();
            if packed[slot].is_empty() {
                packed[slot] = new.iter().map(|x| pack(torch, how, x)).collect();
                return inputs.to_vec();
            }
            let wide: Vec<Tensor> = packed[slot].iter().map(|parts| unpack(torch, how, parts)).collect();
            let whole: Vec<Tensor> =
                new.iter().zip(shapes).map(|(x, shape)| torch.fresh("cat", *shape, x.dtype)).collect();
            let residual = self.slots.borrow()[slot].first().map_or(0, |keys| keys.shape.size(-2));
            if residual > 0 && residual + 1 >= how.residual_length {
                for (parts, x) in packed[slot].iter_mut().zip(&whole) {
                    *parts = pack(torch, how, x);
                }
                self.slots.borrow_mut()[slot].clear();
            } else {
                for (index, x) in new.iter().enumerate() {
                    let length = residual.saturating_add(x.shape.size(-2));
                    let joined = torch.fresh("cat", x.shape.with(-2, length), x.dtype);
                    drop(replace(&mut self.slots.borrow_mut()[slot], index, joined));
                }
            }
            drop(wide);
            whole.into_iter().map(Some).collect()
        })
    }
}

/// What a tensor is kept as: its codes, a scale and a zero for every group. The last is a stand-in that knows the shape.
type Parts = Vec<Tensor>;

fn pack(torch: &mut Torch, how: QuantizedCache, x: &Tensor) -> Parts {
    let dense = torch.contiguous(x);
    let mut parts = match how.backend {
        CacheBackend::Quanto => pack_by_quanto(torch, how, &dense),
        CacheBackend::Hqq => pack_by_hqq(torch, how, &dense),
    };
    drop(dense);
    parts.push(torch.phantom(x.shape, x.dtype));
    parts
}

fn groups(how: QuantizedCache, elements: u64) -> u64 {
    elements / how.group_size.max(1)
}

/// Codes in a byte.
fn per_byte(how: QuantizedCache) -> u64 {
    (8 / how.bits.max(1)).max(1)
}

fn flat(torch: &mut Torch, operation: &'static str, elements: u64, dtype: DType) -> Tensor {
    torch.fresh(operation, Shape::from([elements]), dtype)
}

/// `MaxOptimizer`, `quantize_affine` and `pack_weights` of optimum-quanto.
fn pack_by_quanto(torch: &mut Torch, how: QuantizedCache, x: &Tensor) -> Parts {
    let elements = x.shape.elements();
    let (few, bytes) = (groups(how, elements), elements.div_ceil(per_byte(how)));
    let ends = (flat(torch, "amin", few, x.dtype), flat(torch, "amax", few, x.dtype));
    let range = flat(torch, "sub", few, x.dtype);
    let scale = flat(torch, "div", few, x.dtype);
    drop(range);
    let shift = flat(torch, "neg", few, x.dtype);
    drop(ends);
    let shifted = flat(torch, "add", elements, x.dtype);
    let divided = flat(torch, "div", elements, x.dtype);
    drop(shifted);
    let rounded = flat(torch, "round", elements, x.dtype);
    drop(divided);
    let clamped = flat(torch, "clamp", elements, x.dtype);
    let codes = flat(torch, "_to_copy", elements, DType::U8);
    drop((clamped, rounded));
    let packed = flat(torch, "zeros", bytes, DType::U8);
    for _ in 0..per_byte(how) {
        drop(flat(torch, "__lshift__", bytes, DType::U8));
    }
    drop(codes);
    vec![packed, scale, shift]
}

/// `Quantizer.quantize` of HQQ: fits the zeros by shrinking in fp16, up to 20 times; the second round is like all later ones.
fn pack_by_hqq(torch: &mut Torch, how: QuantizedCache, x: &Tensor) -> Parts {
    let elements = x.shape.elements();
    let few = groups(how, elements);
    let wide = (x.dtype != DType::F32).then(|| flat(torch, "_to_copy", elements, DType::F32));
    let single = |torch: &mut Torch, name: &'static str| flat(torch, name, few, DType::F32);
    let [low, high] = ["min", "max"].map(|name| {
        let values = single(torch, name);
        drop(flat(torch, name, few, DType::I64));
        values
    });
    let range = single(torch, "sub");
    drop(single(torch, "reciprocal"));
    let scale = single(torch, "clamp");
    drop(range);
    drop(single(torch, "neg"));
    let zero = single(torch, "mul");
    let [half_scale, half_zero] = fit(torch, elements, few);
    drop((scale, zero));
    let product = flat(torch, "mul", elements, DType::F32);
    let shifted = flat(torch, "add", elements, DType::F32);
    drop(product);
    let rounded = flat(torch, "round", elements, DType::F32);
    drop((shifted, low, high, wide));
    empty_cache(torch);
    let inverse = flat(torch, "reciprocal", few, DType::F16);
    drop(half_scale);
    let packed = pack_bits(torch, how, elements);
    drop(rounded);
    empty_cache(torch);
    let kept = [inverse, half_zero].map(|t| match x.dtype {
        DType::F16 => t,
        dtype => flat(torch, "_to_copy", few, dtype),
    });
    let [scale, zero] = kept;
    vec![packed, scale, zero]
}

/// `optimize_weights_proximal_legacy`: a scale and a zero in fp16.
fn fit(torch: &mut Torch, elements: u64, few: u64) -> [Tensor; 2] {
    let half = |torch: &mut Torch, name: &'static str| flat(torch, name, elements, DType::F16);
    let narrow = half(torch, "_to_copy");
    let scale = flat(torch, "_to_copy", few, DType::F16);
    let mut zero = flat(torch, "_to_copy", few, DType::F16);
    let mut before: Option<(Tensor, Tensor)> = None;
    for _ in 0..2 {
        let product = half(torch, "mul");
        let shifted = half(torch, "add");
        drop(product);
        let codes = half(torch, "round");
        drop(shifted);
        let centred = half(torch, "sub");
        let again = half(torch, "div");
        drop(centred);
        let error = half(torch, "sub");
        let shrunk = half(torch, "abs");
        let power = half(torch, "pow");
        let scaled = half(torch, "mul");
        drop(power);
        drop(scaled);
        drop(half(torch, "sign"));
        drop(error);
        let rest = half(torch, "sub");
        let back = half(torch, "mul");
        drop(rest);
        let away = half(torch, "sub");
        drop(back);
        zero = flat(torch, "mean", few, DType::F16);
        drop((away, shrunk));
        before = Some((again, codes));
        let error = half(torch, "sub");
        let size = half(torch, "abs");
        drop((error, size));
    }
    drop((before, narrow));
    empty_cache(torch);
    [scale, zero]
}

/// `BitPack`: codes of one byte, then shifted parts joined by `|`.
fn pack_bits(torch: &mut Torch, how: QuantizedCache, elements: u64) -> Tensor {
    let codes = flat(torch, "_to_copy", elements, DType::U8);
    let bytes = elements.div_ceil(per_byte(how));
    if per_byte(how) == 1 {
        return codes;
    }
    let mut joined = flat(torch, "__lshift__", bytes, DType::U8);
    for part in 1..per_byte(how) {
        // The last part is not shifted.
        let shifted = (part + 1 < per_byte(how)).then(|| flat(torch, "__lshift__", bytes, DType::U8));
        joined = flat(torch, "__or__", bytes, DType::U8);
        drop(shifted);
    }
    drop(codes);
    joined
}

/// The whole tensor again, in full width.
fn unpack(torch: &mut Torch, how: QuantizedCache, parts: &[Tensor]) -> Tensor {
    let Some(like) = parts.last() else { return torch.phantom(Shape::new(&[]), DType::F32) };
    let (elements, dtype) = (like.shape.elements(), like.dtype);
    match how.backend {
        CacheBackend::Quanto => {
            let codes = flat(torch, "unpack", elements, DType::U8);
            let wide = flat(torch, "mul", elements, dtype);
            drop(codes);
            wide
        }
        CacheBackend::Hqq => {
            let bytes = elements.div_ceil(per_byte(how));
            let codes = flat(torch, "empty", elements, dtype);
            if per_byte(how) > 1 {
                for part in 0..per_byte(how) {
                    let masked = flat(torch, "__and__", bytes, DType::U8);
                    let shifted = (part + 1 < per_byte(how)).then(|| flat(torch, "__rshift__", bytes, DType::U8));
                    drop((masked, shifted));
                }
            }
            let centred = flat(torch, "sub", elements, dtype);
            let wide = flat(torch, "mul", elements, dtype);
            drop((centred, codes));
            wide
        }
    }
}

fn empty_cache(torch: &Torch) {
    torch.log.borrow_mut().events.push(Event::EmptyCache);
}
