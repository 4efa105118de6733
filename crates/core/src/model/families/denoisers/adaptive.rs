//! Norms that a step's embedding shifts and scales, as transformers of diffusers have them (models/normalization.py), and what follows them.

use crate::model::op::{Activation, Binary, Norm};
use crate::model::{Graph, Value};

/// `linear(silu(time))` in so many parts, one row each.
pub(super) fn modulation(g: &mut Graph, time: &Value, parts: usize) -> Vec<Value> {
    let (active, width) = (g.activation(Activation::Silu, time), time.size(-1));
    let all = g.linear("linear", &active, width.saturating_mul(parts as u64), true);
    let cut = g.split(&all, 1, &vec![width; parts]);
    cut.iter().map(|part| g.unsqueeze(part, 1)).collect()
}

/// `x * (1 + scale) + shift`.
pub(super) fn shifted(g: &mut Graph, x: &Value, scale: &Value, shift: &Value) -> Value {
    let more = g.scalar(Binary::Add, scale);
    let scaled = g.mul(x, &more);
    drop(more);
    g.add(&scaled, shift)
}

/// The same of a norm without weights.
pub(super) fn adapted(g: &mut Graph, name: &str, x: &Value, scale: &Value, shift: &Value) -> Value {
    let normal = g.norm_of(name, &[x], Norm::LayerPlain, false, x.size(-1));
    shifted(g, &normal, scale, shift)
}

/// `AdaLayerNormZero`, or the one of three parts: what it gives, and all parts (shift, scale, gate, …).
pub(super) fn zero(g: &mut Graph, name: &str, x: &Value, time: &Value, parts: usize) -> (Value, Vec<Value>) {
    g.module(name, |g| {
        let parts = modulation(g, time, parts);
        (adapted(g, "norm", x, &parts[1], &parts[0]), parts)
    })
}

/// `AdaLayerNormContinuous`.
pub(super) fn continuous(g: &mut Graph, name: &str, x: &Value, time: &Value) -> Value {
    g.module(name, |g| {
        let parts = modulation(g, time, 2);
        adapted(g, "norm", x, &parts[0], &parts[1])
    })
}

/// `FeedForward` with gelu.
pub(super) fn feed_forward(g: &mut Graph, name: &str, x: &Value, inner: u64) -> Value {
    g.module(name, |g| {
        let width = x.size(-1);
        let mut hidden = g.linear("net.0.proj", x, inner, true);
        hidden = g.activation(Activation::Gelu, &hidden);
        g.linear("net.2", &hidden, width, true)
    })
}
