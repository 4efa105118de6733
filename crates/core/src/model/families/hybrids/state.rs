//! What layers with a constant state share: the state itself and the short causal convolution before it.

use crate::model::op::{Activation, CacheKind, CacheUpdate, Convolution, Input, Op};
use crate::model::shape::Shape;
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Whether layers go on from the states that an earlier pass left.
pub(super) fn continues(g: &Graph) -> bool {
    g.inputs.cache && g.inputs.past > 0
}

/// Whether this is a step of `generate`: one token after others.
pub(super) fn decodes(g: &Graph) -> bool {
    continues(g) && g.inputs.seq == 1
}

/// Keeps a state of `elements` per sequence.
pub(super) fn keep(g: &mut Graph, x: &Value, elements: u64) -> Value {
    if !g.inputs.cache {
        return x.clone();
    }
    let kind = CacheKind::State { elements };
    let update = CacheUpdate { kind, heads: 0, key_dim: 0, value_dim: 0, true_heads: 0 };
    g.run(Op::Cache(update), &[x], x.shape())
}

/// The state that an earlier pass left.
pub(super) fn recall(g: &mut Graph, shape: impl Into<Shape>, fp32: bool) -> Value {
    g.run(Op::CachedState { fp32 }, &[], shape)
}

/// The 2-D mask of the batch, for models that multiply with it even when nothing is padded.
pub(super) fn batch_mask(g: &mut Graph) -> Option<Value> {
    let (batch, seq) = (g.inputs.batch, g.inputs.seq);
    (g.inputs.mask && !continues(g)).then(|| g.input(Input::Mask, [batch, seq]))
}

/// Hidden states `[batch, seq, …]` with padded positions zeroed.
pub(super) fn masked(g: &mut Graph, hidden: &Value, mask: Option<&Value>) -> Value {
    let Some(mask) = mask else { return hidden.clone() };
    let mask = g.unsqueeze(mask, -1);
    let product = g.mul(hidden, &mask);
    g.type_as(&product, hidden)
}

/// A convolution over the last few positions, channel by channel, that keeps those positions in the cache.
#[derive(Debug, Clone)]
pub(super) struct CausalConvolution {
    pub(super) name: &'static str,
    pub(super) kernel: u64,
    pub(super) bias: bool,
    pub(super) activation: Option<Activation>,
}

impl CausalConvolution {
    /// Runs on `[batch, channels, seq]`.
    pub(super) fn run(&self, g: &mut Graph, mut x: Value) -> Value {
        let (batch, channels, seq) = (x.size(0), x.size(1), x.size(2));
        if decodes(g) {
            let state = recall(g, [batch, channels, self.kernel], false);
            let mut window = g.cat(&[&state, &x], -1);
            window = g.to_model_type(&window);
            let mut out = self.slide(g, &window, 0);
            out = g.slice(&out, 2, out.size(2).saturating_sub(seq), seq);
            return self.activate(g, out, &x);
        }
        if continues(g) {
            let state = recall(g, [batch, channels, self.kernel], false);
            x = g.cat(&[&state, &x], -1);
        } else if g.inputs.cache {
            if seq < self.kernel {
                x = g.pad(&x, [batch, channels, self.kernel]);
            }
            x = keep(g, &x, channels.saturating_mul(self.kernel));
        }
        let length = x.size(2);
        let mut out = {
            let cast = g.to_model_type(&x);
            self.slide(g, &cast, self.kernel.saturating_sub(1))
        };
        out = g.slice(&out, 2, 0, length);
        out = self.activate(g, out, &x);
        if g.inputs.cache {
            out = g.slice(&out, 2, length - seq.min(length), seq);
        }
        out
    }

    /// The convolution alone.
    pub(super) fn slide(&self, g: &mut Graph, x: &Value, padding: u64) -> Value {
        let channels = x.size(1);
        let padding = [u32::try_from(padding).unwrap_or(u32::MAX), 0, 0];
        let spec = Convolution { stride: [1; 3], padding, groups: channels, transposed: false };
        g.convolution(self.name, x, channels, &[self.kernel], spec, self.bias)
    }

    fn activate(&self, g: &mut Graph, mut out: Value, like: &Value) -> Value {
        if let Some(kind) = self.activation {
            out = g.activation(kind, &out);
        }
        g.type_as(&out, like)
    }
}

/// A product of sizes, refused under this key where it is beyond any model.
pub(super) fn product(c: &Config<'_>, key: &str, factors: &[u64]) -> Result<u64, ModelError> {
    let product = factors.iter().fold(1_u64, |product, &factor| product.saturating_mul(factor));
    if product > 1 << 40 { Err(c.refuse(key, "a size that a model can have")) } else { Ok(product) }
}

/// Which layers mix positions by attention: by a list of names, or by a rule where the list is absent.
pub(super) fn attention_layers(
    c: &Config<'_>,
    keys: &[&str],
    layers: u64,
    rule: impl Fn(u64) -> bool,
) -> Result<Vec<bool>, ModelError> {
    for key in keys {
        let Some(kinds) = c.strings(key)? else { continue };
        if (kinds.len() as u64) < layers {
            return Err(c.refuse(key, "one entry per layer"));
        }
        let is_attention = |kind: &&str| match *kind {
            "full_attention" | "attention" | "hybrid" => Ok(true),
            "linear_attention" | "mamba" | "mamba2" | "conv" | "recurrent" => Ok(false),
            _ => Err(c.refuse(key, "a list of full_attention and linear_attention")),
        };
        return kinds.iter().take(layers as usize).map(is_attention).collect();
    }
    Ok((0..layers).map(rule).collect())
}

/// Runs a model under its prefix, or bare when no head is asked for; then the hidden states are what it returns.
pub(super) fn backbone(
    g: &mut Graph,
    task: Task,
    prefix: &str,
    model: impl FnOnce(&mut Graph) -> Value,
) -> Option<Value> {
    if task == Task::Base {
        let hidden = model(g);
        g.run(Op::Return, &[&hidden], []);
        return None;
    }
    Some(g.module(prefix, model))
}
