//! Masks, and attention by SDPA or by the models' own code.

use super::Settings;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Attention, Binary, EagerStyle, Mask, Reduction, Unary};
use crate::plan::AttentionKind;

/// The mask a model builds, or none where SDPA can do without (transformers/masking_utils.py).
///
/// `given`: the model has a 2-D mask, of the batch or its own.
pub(super) fn mask(torch: &mut Torch, kind: Mask, shape: Shape, settings: &Settings, given: bool) -> Option<Tensor> {
    match settings.attention {
        AttentionKind::Flash2 | AttentionKind::Flash3 => return super::flash::mask(torch, shape, settings),
        // Lists of blocks: a few KiB.
        AttentionKind::Flex => return None,
        AttentionKind::Sdpa | AttentionKind::Eager => {}
    }
    let (queries, keys) = (shape.size(2), shape.size(3));
    let eager = settings.attention == AttentionKind::Eager;
    let (kind, eager, kept) = match kind {
        Mask::CausalEager => (Mask::Causal, true, false),
        Mask::SlidingEager(window) => (Mask::Sliding(window), true, false),
        Mask::CausalKept => (Mask::Causal, eager, true),
        kind => (kind, eager, false),
    };
    let skippable = !kept
        && match kind {
            Mask::Causal | Mask::CausalEager | Mask::CausalKept => queries == 1 || queries == keys,
            Mask::Full => true,
            Mask::Images(_) => false,
            Mask::Sliding(window) | Mask::SlidingEager(window) | Mask::Chunked(window) | Mask::FullSliding(window) => {
                keys < window && (queries == 1 || queries == keys)
            }
        };
    // Several samples in a row, whose positions begin anew: `find_packed_sequence_indices`.
    let apart = settings.documents.is_some_and(|documents| documents > 1);
    let joined = match given || settings.mask {
        true => Joined::Padding,
        false if apart => Joined::Documents,
        false => Joined::Nothing,
    };
    if !eager {
        return (!skippable || settings.padded || apart).then(|| seen(torch, shape, windowed(kind), joined));
    }
    if kind == Mask::Full && !settings.padded {
        return None;
    }
    // Eager code adds a float mask of the model's type, made from a boolean one.
    let boolean = seen(torch, shape, windowed(kind), joined);
    let zero = torch.fresh("scalar_tensor", Shape::new(&[]), settings.weights);
    let float = torch.fresh("mask", shape, settings.weights);
    drop((zero, boolean));
    Some(float)
}

fn windowed(kind: Mask) -> bool {
    matches!(kind, Mask::Sliding(_) | Mask::SlidingEager(_))
}

/// What is joined with the square of positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Joined {
    Nothing,
    /// The 2-D mask.
    Padding,
    /// Which tokens belong to the same sample.
    Documents,
}

/// Which position sees which: one square for all samples, joined with what else there is.
fn seen(torch: &mut Torch, shape: Shape, windowed: bool, with: Joined) -> Tensor {
    let square = shape.with(0, 1);
    let mut pattern = if windowed {
        // A window is joined with what lies before.
        let raw = torch.fresh("gt", square, DType::Bool);
        let near = torch.fresh("bitwise_and", square, DType::Bool);
        drop(raw);
        let before = torch.fresh("le", square, DType::Bool);
        let both = torch.fresh("bitwise_and", square, DType::Bool);
        drop((near, before));
        both
    } else {
        torch.fresh("le", square, DType::Bool)
    };
    if with == Joined::Nothing {
        return torch.expand(&pattern, shape);
    }
    pattern = torch.fresh("bitwise_and", square, DType::Bool);
    let same = (with == Joined::Documents).then(|| {
        let of_queries = torch.fresh("index", Shape::from([1, 1, shape.size(2), 1]), DType::I64);
        let of_keys = torch.fresh("index", Shape::from([1, 1, 1, shape.size(3)]), DType::I64);
        let same = torch.fresh("eq", square, DType::Bool);
        drop((of_queries, of_keys));
        same
    });
    let joined = torch.fresh("bitwise_and", shape, DType::Bool);
    drop((same, pattern));
    joined
}

/// Attention; besides the output, what the caller goes on holding until the layer returns.
pub(super) fn attend(
    torch: &mut Torch,
    spec: &Attention,
    settings: &Settings,
    [query, key, value]: [&Tensor; 3],
    mask: Option<&Tensor>,
    sinks: Option<&Tensor>,
) -> (Tensor, Option<Tensor>) {
    if settings.attention.is_flash() {
        (super::flash::attend(torch, spec, settings, [query, key, value], mask), None)
    } else if settings.attention == AttentionKind::Flex {
        (super::flex::attend(torch, spec, [query, key, value]), None)
    } else if spec.sdpa && settings.attention == AttentionKind::Sdpa {
        (sdpa(torch, spec, query, key, value, mask), None)
    } else {
        let (output, probabilities) = eager(torch, spec, query, key, value, mask, sinks);
        (output, Some(probabilities))
    }
}

/// Attention with a position bias that joins the scores (T5); inputs are as for [`attend`], the bias before the mask.
pub(super) fn attend_biased(
    torch: &mut Torch,
    spec: &Attention,
    settings: &Settings,
    [query, key, value]: [&Tensor; 3],
    bias: &Tensor,
    mask: Option<&Tensor>,
) -> (Tensor, Option<Tensor>) {
    if settings.attention == AttentionKind::Sdpa {
        let causal = spec.causal && query.shape.size(2) > 1;
        let joined = position_mask(torch, causal, query, key, bias, mask);
        return (sdpa(torch, spec, query, key, value, Some(&joined)), None);
    }
    let turned = torch.transpose(key, 2, 3);
    let mut scores = {
        let raw = torch.matmul(query, &turned);
        torch.scalar(Binary::Mul, &raw)
    };
    scores = torch.binary(Binary::Add, &scores, bias);
    if let Some(mask) = mask {
        scores = torch.binary(Binary::Add, &scores, mask);
    }
    let mut probabilities = torch.softmax(&scores, None, "_softmax");
    drop(scores);
    if spec.dropout_per_mille > 0 {
        probabilities = torch.dropout(&probabilities);
    }
    let output = torch.matmul(&probabilities, value);
    let turned = torch.transpose(&output, 1, 2);
    drop(output);
    (torch.contiguous(&turned), Some(probabilities))
}

/// `create_position_bias_mask`: the bias, with the smallest number where nothing is seen.
fn position_mask(
    torch: &mut Torch,
    causal: bool,
    query: &Tensor,
    key: &Tensor,
    bias: &Tensor,
    mask: Option<&Tensor>,
) -> Tensor {
    let (queries, keys) = (query.shape.size(2), key.shape.size(2));
    let seen = match mask {
        Some(mask) if mask.dtype == DType::Bool => mask.clone(),
        Some(mask) => return torch.binary(Binary::Add, bias, mask),
        None if causal => {
            let rows = torch.fresh("arange", Shape::from([queries]), DType::I64);
            let columns = torch.fresh("arange", Shape::from([keys]), DType::I64);
            let seen = torch.fresh("ge", Shape::from([1, 1, queries, keys]), DType::Bool);
            drop((rows, columns));
            seen
        }
        None => return bias.clone(),
    };
    let least = torch.fresh("scalar_tensor", Shape::new(&[]), bias.dtype);
    torch.where_(&seen, bias, &least)
}

/// transformers/integrations/sdpa_attention.py.
fn sdpa(
    torch: &mut Torch,
    spec: &Attention,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: Option<&Tensor>,
) -> Tensor {
    let grouped =
        spec.groups > 1 && mask.is_none() && key.shape.last() == value.shape.last() && key.shape.last() <= 256;
    let (key, value) = if spec.groups > 1 && !grouped {
        (torch.repeat_heads(key, spec.groups), torch.repeat_heads(value, spec.groups))
    } else {
        (key.clone(), value.clone())
    };
    let causal = query.shape.size(2) > 1 && mask.is_none() && spec.causal;
    let output = torch.attention(query, &key, &value, mask, causal, spec.dropout_per_mille > 0, grouped);
    drop((key, value));
    let turned = torch.transpose(&output, 1, 2);
    torch.contiguous(&turned)
}

/// The `eager_attention_forward` of the models.
fn eager(
    torch: &mut Torch,
    spec: &Attention,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: Option<&Tensor>,
    sinks: Option<&Tensor>,
) -> (Tensor, Tensor) {
    let (key, value) = if spec.groups > 1 {
        (torch.repeat_heads(key, spec.groups), torch.repeat_heads(value, spec.groups))
    } else {
        (key.clone(), value.clone())
    };
    let turned = torch.transpose(&key, 2, 3);
    let mut scores = {
        let raw = torch.matmul(query, &turned);
        torch.scalar(Binary::Mul, &raw)
    };
    if spec.softcap {
        scores = torch.scalar(Binary::Div, &scores);
        scores = torch.unary(Unary::Tanh, &scores);
        scores = torch.scalar(Binary::Mul, &scores);
    }
    if let Some(mask) = mask {
        scores = torch.binary(Binary::Add, &scores, mask);
    }
    // Names that code with sinks keeps until its attention returns.
    let mut held = None;
    let mut probabilities = if let Some(sinks) = sinks {
        let joined = with_sinks(torch, &scores, sinks, query);
        let probabilities = torch.softmax(&joined, Some(joined.dtype), "_softmax");
        held = Some((joined, probabilities.clone()));
        let kept = torch.slice(&probabilities, 3, probabilities.shape.last() - 1, 1);
        torch.cast(&kept, value.dtype)
    } else {
        let dtype = (spec.eager == EagerStyle::Fp32Softmax).then_some(DType::F32);
        let mut probabilities = torch.softmax(&scores, dtype, "_softmax");
        if spec.eager == EagerStyle::Fp32Softmax {
            probabilities = torch.cast(&probabilities, query.dtype);
        }
        probabilities
    };
    drop(scores);
    if spec.eager == EagerStyle::PlainSoftmax {
        probabilities = torch.cast(&probabilities, value.dtype);
    }
    if spec.dropout_per_mille > 0 {
        probabilities = torch.dropout(&probabilities);
    }
    let output = torch.matmul(&probabilities, &value);
    let turned = torch.transpose(&output, 1, 2);
    drop(output);
    let dense = torch.contiguous(&turned);
    drop(held);
    (dense, probabilities)
}

/// A learned sink joins the scores of every row, which are then shifted by their largest.
fn with_sinks(torch: &mut Torch, scores: &Tensor, sinks: &Tensor, query: &Tensor) -> Tensor {
    let [batch, heads, rows] = [0, 1, 2].map(|axis| query.shape.size(axis));
    let opened = torch.reshape(sinks, Shape::from([1, heads, 1, 1]));
    let spread = torch.expand(&opened, Shape::from([batch, heads, rows, 1]));
    let joined = torch.cat(&[scores, &spread], 3);
    let largest = torch.reduce(Reduction::Max, &joined, Some(3), true);
    torch.binary(Binary::Sub, &joined, &largest)
}
