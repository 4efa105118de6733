//! Feed-forward blocks.

use crate::model::graph::{Graph, Value};
use crate::model::op::Activation;

/// `down(activation(gate(x)) * up(x))`, the names given in that order: gate, up, down.
pub fn gated_mlp(g: &mut Graph, x: &Value, names: [&str; 3], width: u64, kind: Activation, bias: bool) -> Value {
    let gate = g.linear(names[0], x, width, bias);
    let gate = g.gate(kind, gate);
    let up = g.linear(names[1], x, width, bias);
    let product = g.gate_product(kind, gate, up);
    g.linear(names[2], &product, x.size(-1), bias)
}

/// `second(activation(first(x)))`.
pub fn mlp(g: &mut Graph, x: &Value, names: [&str; 2], width: u64, kind: Activation, bias: bool) -> Value {
    let mut wide = g.linear(names[0], x, width, bias);
    wide = g.activation(kind, &wide);
    g.linear(names[1], &wide, x.size(-1), bias)
}

/// A gated MLP whose first linear makes gate and up at once: names of the joined linear and of the last.
pub fn joined_gated_mlp(g: &mut Graph, x: &Value, names: [&str; 2], width: u64, kind: Activation, bias: bool) -> Value {
    let joined = g.linear(names[0], x, width.saturating_mul(2), bias);
    let (gate, mut up) = g.split2(&joined, -1, width, width);
    drop(joined);
    up = g.glu(kind, &gate, &up);
    g.linear(names[1], &up, x.size(-1), bias)
}
