//! Feed-forward blocks.

use crate::model::graph::{Graph, Value};
use crate::model::op::Activation;

/// `down(activation(gate(x)) * up(x))`, the names given in that order: gate, up, down.
pub fn gated_mlp(g: &mut Graph, x: &Value, names: [&str; 3], width: u64, kind: Activation, bias: bool) -> Value {
    let gate = g.linear(names[0], x, width, bias);
    let up = g.linear(names[1], x, width, bias);
    let product = g.glu(kind, &gate, &up);
    drop((gate, up));
    g.linear(names[2], &product, x.size(-1), bias)
}

/// `second(activation(first(x)))`.
pub fn mlp(g: &mut Graph, x: &Value, names: [&str; 2], width: u64, kind: Activation, bias: bool) -> Value {
    let mut wide = g.linear(names[0], x, width, bias);
    wide = g.activation(kind, &wide);
    g.linear(names[1], &wide, x.size(-1), bias)
}
