//! Mixtures of experts: routers and fused experts.

use crate::model::graph::{Graph, Value};
use crate::model::op::{Activation, ExpertStyle, Experts, ModuleId, Op, Role};
use crate::model::program::ModuleKind;

/// Fused gated experts as transformers 5 stores them: `experts.gate_up_proj` and `experts.down_proj`.
#[derive(Debug, Clone, Copy)]
pub struct FusedExperts {
    /// How many.
    pub count: u64,
    /// How many run for a token.
    pub top_k: u64,
    /// Width of one.
    pub width: u64,
    /// The activation.
    pub activation: Activation,
    /// Whether there is a gate beside the up projection.
    pub gated: bool,
    /// Whether there are biases.
    pub bias: bool,
    /// Whether weights lie as `[experts, in, out]`.
    pub transposed: bool,
    /// How they run.
    pub style: ExpertStyle,
}

impl FusedExperts {
    /// Gated silu experts without bias.
    pub fn new(count: u64, top_k: u64, width: u64, activation: Activation) -> Self {
        Self {
            count,
            top_k,
            width,
            activation,
            gated: true,
            bias: false,
            transposed: false,
            style: ExpertStyle::Interface,
        }
    }

    /// Runs them in a module of this name: `hidden` is `[tokens, hidden]`, indices and weights `[tokens, top_k]`.
    pub fn run(&self, g: &mut Graph, name: &str, hidden: &Value, indices: &Value, weights: &Value) -> Value {
        let (experts, module) = self.declare(g, name, hidden.size(-1));
        g.run_one(Some(module), Op::Experts(experts), &[hidden, indices, weights], hidden.shape())
    }

    /// Runs all of them on `[experts · tokens, hidden]` ([`ExpertStyle::Dense`]).
    pub fn run_dense(&self, g: &mut Graph, name: &str, hidden: &Value) -> Value {
        let (experts, module) = self.declare(g, name, hidden.size(-1));
        g.run_one(Some(module), Op::Experts(experts), &[hidden], hidden.shape())
    }

    fn declare(&self, g: &mut Graph, name: &str, size: u64) -> (Experts, ModuleId) {
        let (count, width) = (self.count, self.width);
        let wide = if self.gated { 2 * width } else { width };
        let role = Role::Experts { count, top_k: self.top_k };
        let first = if self.gated { "gate_up_proj" } else { "up_proj" };
        let (up_shape, down_shape) = if self.transposed {
            ([count, size, wide], [count, width, size])
        } else {
            ([count, wide, size], [count, size, width])
        };
        let gate_up = g.parameter(&format!("{name}.{first}"), up_shape, role);
        let up_bias = self.bias.then(|| g.parameter(&format!("{name}.{first}_bias"), [count, wide], role));
        let down = g.parameter(&format!("{name}.down_proj"), down_shape, role);
        let biases = up_bias.map(|up| (up, g.parameter(&format!("{name}.down_proj_bias"), [count, size], role)));
        let module = g.leaf(name, ModuleKind::Experts);
        g.attach(module, &[Some(gate_up), biases.map(|b| b.0), Some(down), biases.map(|b| b.1)]);
        let experts = Experts {
            count,
            top_k: self.top_k,
            gate_up,
            down,
            biases,
            width,
            gated: self.gated,
            activation: self.activation,
            transposed: self.transposed,
            style: self.style,
        };
        (experts, module)
    }
}
