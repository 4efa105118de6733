//! Falcon's own attention: keys and values of fewer heads are broadcast by the products, never repeated.

use super::Settings;
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Attention, Binary};
use crate::plan::AttentionKind;

/// `FalconAttention.forward` from the cache on; besides the output, what the caller holds until the layer returns.
pub(super) fn attend(
    torch: &mut Torch,
    spec: &Attention,
    settings: &Settings,
    [query, key, value]: [&Tensor; 3],
    mask: Option<&Tensor>,
    alibi: Option<&Tensor>,
) -> (Tensor, Option<Tensor>) {
    let dropout = spec.dropout_per_mille > 0;
    if settings.attention == AttentionKind::Sdpa {
        let causal = mask.is_none() && query.shape.size(2) > 1;
        let output = torch.attention(query, key, value, mask, causal, dropout, false);
        return (torch.transpose(&output, 1, 2), None);
    }
    let turned = torch.transpose(key, 2, 3);
    let mut scores = torch.matmul(query, &turned);
    if let Some(alibi) = alibi {
        scores = torch.cast(&scores, DType::F32);
        scores = torch.binary(Binary::Add, &scores, alibi);
    }
    let mut probabilities = {
        let masked = mask.map(|mask| torch.binary(Binary::Add, &scores, mask));
        let dtype = alibi.is_some().then_some(query.dtype);
        torch.softmax(masked.as_ref().unwrap_or(&scores), dtype, "_softmax")
    };
    drop(scores);
    if dropout {
        probabilities = torch.dropout(&probabilities);
    }
    let output = torch.matmul(&probabilities, value);
    (torch.transpose(&output, 1, 2), Some(probabilities))
}
