//! ALiBi biases as BLOOM and Falcon build them.

use crate::dtype::DType;
use crate::model::op::{Binary, Cast, Input, Op};
use crate::model::{Graph, Value};

/// The 2-D mask of the batch, or ones of this type where it brings none: `[batch, past + seq]`, filled up to the length of
/// a static cache.
pub(super) fn tokens_mask(g: &mut Graph, ones: DType) -> Value {
    let seen = g.inputs.seq.saturating_add(g.inputs.past);
    let shape = [g.inputs.batch, g.inputs.static_cache.unwrap_or(seen)];
    if g.inputs.mask { g.input(Input::Mask, shape) } else { g.fill(ones, shape) }
}

/// `slopes · position` per head, `[batch · heads, 1, keys]`, in the type of `like`.
pub(super) fn per_row(g: &mut Graph, mask: &Value, heads: u64, like: &Value, slopes_in_bf16: bool) -> Value {
    let (batch, keys) = (mask.size(0), mask.size(1));
    let closest = 1u64 << heads.max(1).ilog2();
    let powers = g.fill(DType::I32, [closest]);
    let powers = g.float(&powers);
    let mut slopes = g.scalar(Binary::Pow, &powers);
    if closest != heads {
        let extra = g.fill(DType::F32, [heads - closest]);
        slopes = g.cat(&[&slopes, &extra], 0);
    }
    let positions = {
        let counts = g.cumulative_sum(mask, -1);
        let from_zero = g.scalar(Binary::Sub, &counts);
        let kept = g.mul(&from_zero, mask);
        g.view(&kept, [batch, 1, keys])
    };
    let mut columns = g.view(&slopes, [heads, 1]);
    if slopes_in_bf16 {
        columns = g.run(Op::Cast(Cast::To(DType::BF16)), &[&columns], columns.shape());
    }
    let bias = g.mul(&columns, &positions);
    let rows = g.reshape(&bias, [batch.saturating_mul(heads), 1, keys]);
    g.type_as(&rows, like)
}
