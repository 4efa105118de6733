//! Functions beside LitGPT's modules: rotation, attention with squashed scores, the loss in pieces.

use crate::dtype::DType;
use crate::model::op::{Binary, Loss, Op, Reduction, Unary};
use crate::model::{Graph, Value};

/// Tokens of a piece of the loss (`lm_head_chunk_size` of finetune/lora.py, `chunk_size` of `chunked_cross_entropy`).
const CHUNK: u64 = 128;

/// Lightning Fabric hands the model's output on in torch's default type (`convert_output` of its precision plugins): all
/// pieces are there before the first is cast.
pub(super) fn converted(g: &mut Graph, logits: Vec<Value>) -> Vec<Value> {
    let wide = logits.iter().map(|piece| g.float(piece)).collect();
    drop(logits);
    wide
}

/// A length cut in pieces of [`CHUNK`].
pub(super) fn pieces(length: u64) -> Vec<u64> {
    (0..length.div_ceil(CHUNK)).map(|piece| CHUNK.min(length - piece * CHUNK)).collect()
}

/// A loss for every token, joined, summed, and divided by how many count.
pub(super) fn joined_loss(g: &mut Graph, logits: &[Value], labels: &[Value], targets: &Value) -> Value {
    let both = logits.iter().zip(labels);
    let losses: Vec<Value> =
        both.map(|(piece, target)| g.run(Op::Loss(Loss::EachToken), &[piece, target], [piece.size(0)])).collect();
    let counted = {
        let kept = g.compare(targets);
        g.reduce_all(Reduction::Sum, &kept)
    };
    let sum = {
        let joined = g.cat(&losses.iter().collect::<Vec<_>>(), 0);
        g.reduce_all(Reduction::Sum, &joined)
    };
    drop(losses);
    g.div(&sum, &counted)
}

/// `apply_rope`: tables in fp32 make the products so; the sum is cast back.
pub(super) fn rotated(g: &mut Graph, x: &Value, cosine: &Value, sine: &Value) -> Value {
    let half = x.size(-1) / 2;
    let (first, second) = (g.slice(x, -1, 0, half), g.slice(x, -1, half, x.size(-1) - half));
    let turned = {
        let negative = g.unary(Unary::Neg, &second);
        g.cat(&[&negative, &first], -1)
    };
    let sum = {
        let straight = g.mul(x, cosine);
        let crossed = g.mul(&turned, sine);
        g.add(&straight, &crossed)
    };
    g.type_as(&sum, x)
}

/// The square mask of a layer with a window, made anew in each.
pub(super) fn sliding_mask(g: &mut Graph, query: &Value) -> Value {
    let seq = query.size(2);
    let mask = {
        let ones = g.fill_like(query, [seq, seq]);
        g.triangle(&ones)
    };
    let bias = {
        let ones = g.fill_like(&mask, [seq, seq]);
        g.triangle(&ones)
    };
    g.in_place(Binary::Add, &mask, &bias)
}

/// Attention with squashed scores, which no kernel of SDPA has.
pub(super) fn capped(g: &mut Graph, query: &Value, key: &Value, value: &Value, mask: Option<&Value>) -> Value {
    let turned = g.transpose(key, 2, 3);
    let mut scores = {
        let raw = g.matmul(query, &turned);
        g.scale(&raw)
    };
    scores = {
        let divided = g.scalar(Binary::Div, &scores);
        let squashed = g.unary(Unary::Tanh, &divided);
        drop(divided);
        g.scale(&squashed)
    };
    let own = match mask {
        Some(mask) => mask.clone(),
        None => {
            let ones = g.fill_like(query, [query.size(2), query.size(2)]);
            g.triangle(&ones)
        }
    };
    scores = g.add(&scores, &own);
    scores = {
        let wide = g.softmax(&scores, -1, Some(DType::F32));
        g.type_as(&wide, query)
    };
    let attended = g.matmul(&scores, value);
    g.transpose(&attended, 1, 2)
}
