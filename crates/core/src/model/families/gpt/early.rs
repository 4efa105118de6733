//! What GPT-J, CodeGen and GPT-Neo share: attention in fp32 written out, and rotation of neighbouring pairs.

use crate::dtype::DType;
use crate::model::op::Unary;
use crate::model::{Graph, Value};

/// Scores and softmax in fp32, `adjust` between both (scale, mask); returns the attended values
/// `[batch, heads, seq, dim]` and the probabilities, which the caller hands on.
pub(super) fn attention(
    g: &mut Graph,
    [query, key, value]: [&Value; 3],
    dropout: f64,
    adjust: impl FnOnce(&mut Graph, Value) -> Value,
) -> (Value, Value) {
    let query = g.float(query);
    let key = g.float(key);
    let turned = g.transpose(&key, -1, -2);
    let scores = g.matmul(&query, &turned);
    let mut weights = adjust(g, scores);
    weights = g.softmax(&weights, -1, None);
    weights = g.type_as(&weights, value);
    weights = g.dropout(&weights, dropout);
    let attended = g.matmul(&weights, value);
    (attended, weights)
}

/// `[batch, heads, seq, dim] → [batch, seq, heads · dim]`, copied.
pub(super) fn merge_heads(g: &mut Graph, x: &Value) -> Value {
    let tokens = g.permute(x, &[0, 2, 1, 3]);
    let dense = g.contiguous(&tokens);
    g.view(&dense, [x.size(0), x.size(2), x.size(1).saturating_mul(x.size(3))])
}

/// The first `rotary_dim` dimensions of keys, then of queries (both `[batch, seq, heads, dim]`) rotated, the rest joined
/// again; the parts come third, since the callers' code keeps names for them. `sincos` is `[1, seq, rotary_dim]`: sines, then cosines.
pub(super) fn rotate(
    g: &mut Graph,
    rotary_dim: Option<u64>,
    query: &Value,
    key: &Value,
    sincos: &Value,
) -> (Value, Value, Vec<Value>) {
    let half = sincos.size(-1) / 2;
    let (sine, cosine) = g.split2(sincos, -1, half, half);
    let Some(turned) = rotary_dim else {
        let key = rotate_pairs(g, key, &sine, &cosine);
        let query = rotate_pairs(g, query, &sine, &cosine);
        return (query, key, Vec::new());
    };
    let rest = key.size(-1).saturating_sub(turned);
    let mut key_turned = g.slice(key, -1, 0, turned);
    let key_passed = g.slice(key, -1, turned, rest);
    let mut query_turned = g.slice(query, -1, 0, turned);
    let query_passed = g.slice(query, -1, turned, rest);
    key_turned = rotate_pairs(g, &key_turned, &sine, &cosine);
    query_turned = rotate_pairs(g, &query_turned, &sine, &cosine);
    let key = g.cat(&[&key_turned, &key_passed], -1);
    let query = g.cat(&[&query_turned, &query_passed], -1);
    (query, key, vec![key_turned, key_passed, query_turned, query_passed])
}

fn rotate_pairs(g: &mut Graph, x: &Value, sine: &Value, cosine: &Value) -> Value {
    let doubled = |g: &mut Graph, table: &Value| {
        let table = g.unsqueeze(table, 2);
        g.repeat_interleave(&table, 3, 2)
    };
    let sine = doubled(g, sine);
    let cosine = doubled(g, cosine);
    let first = g.mul(x, &cosine);
    let swapped = {
        let pairs = x.size(-1) / 2;
        let even = g.slice_step(x, -1, 0, pairs, 2);
        let odd = g.slice_step(x, -1, 1, pairs, 2);
        let stacked = {
            let negative = g.unary(Unary::Neg, &odd);
            g.stack(&[&negative, &even], -1)
        };
        g.view(&stacked, x.shape())
    };
    let second = g.mul(&swapped, &sine);
    drop(swapped);
    g.add(&first, &second)
}

/// The buffer of sines and cosines that every layer keeps, `[positions, dim]`.
pub(super) fn position_table(g: &mut Graph, positions: u64, dim: u64) -> Value {
    g.buffer("embed_positions", [positions, dim], DType::F32, false);
    g.run(crate::model::op::Op::Buffer(DType::F32), &[], [positions, dim])
}
