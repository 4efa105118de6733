//! The first Mamba's mixer, shared by Mamba, Falcon-Mamba and Jamba.

use super::state::{self, CausalConvolution};
use crate::dtype::DType;
use crate::model::blocks::read;
use crate::model::op::{Binary, Norm, Role, Unary};
use crate::model::program::ModuleKind;
use crate::model::{Config, Graph, ModelError, Value};

/// A selective state space: every channel has a state of its own, moved on position by position.
#[derive(Debug, Clone)]
pub(super) struct MambaMixer {
    pub(super) channels: u64,
    pub(super) state: u64,
    pub(super) rank: u64,
    pub(super) bias: bool,
    pub(super) convolution: CausalConvolution,
    /// Norms on time steps, inputs and outputs of the state.
    pub(super) norms: Option<Norm>,
}

/// What a mixer selects from its input: `[batch, seq, state]` for `b` and `c`, `[batch, channels, seq]` for time steps
/// and gate.
struct Selected {
    time_step: Value,
    a: Value,
    b: Value,
    c: Value,
    skip: Value,
    gate: Value,
    bias: Value,
}

/// The rank of the time steps: a number, or a sixteenth of the hidden size.
pub(super) fn time_step_rank(c: &Config<'_>, key: &str, hidden: u64) -> Result<u64, ModelError> {
    match c.str_or(key, "") {
        "auto" => Ok(hidden.div_ceil(16)),
        _ => read::positive(c, &[key], hidden.div_ceil(16)),
    }
}

impl MambaMixer {
    /// Runs inside the current module on `[batch, seq, hidden]`.
    pub(super) fn run(&self, g: &mut Graph, input: &Value, mask: Option<&Value>) -> Value {
        g.without_kernels("mamba-ssm and causal-conv1d");
        let hidden = state::masked(g, input, mask);
        let mut projected = g.linear("in_proj", &hidden, 2 * self.channels, self.bias);
        projected = g.transpose(&projected, 1, 2);

        let decay = g.parameter("A_log", [self.channels, self.state], Role::Other);
        let decay = g.read(decay, [self.channels, self.state]);
        let mut a = g.float(&decay);
        a = g.unary(Unary::Exp, &a);
        a = g.unary(Unary::Neg, &a);

        let (mut x, gate) = g.split2(&projected, 1, self.channels, self.channels);
        x = self.convolution.run(g, x);
        x = g.transpose(&x, 1, 2);
        x = state::masked(g, &x, mask);

        let parts = {
            let selected = g.linear("x_proj", &x, self.rank + 2 * self.state, false);
            g.split3(&selected, -1, [self.rank, self.state, self.state])
        };
        let (mut time_step, mut b, mut c) = parts;
        if let Some(kind) = self.norms {
            time_step = self.part_norm(g, "dt_layernorm", &time_step, kind);
            b = self.part_norm(g, "b_layernorm", &b, kind);
            c = self.part_norm(g, "c_layernorm", &c, kind);
        }
        let (weight, bias) = self.time_projection(g);
        time_step = g.transpose(&time_step, 1, 2);
        time_step = g.matmul(&weight, &time_step);
        let bias = g.float(&bias);
        let skip = g.parameter("D", [self.channels], Role::Other);
        let skip = g.read(skip, [self.channels]);

        let selected = Selected { time_step, a, b, c, skip, gate, bias };
        let mut output = if state::decodes(g) {
            let output = self.step(g, &x, &selected);
            g.unsqueeze(&output, -1)
        } else {
            let x = g.transpose(&x, 1, 2);
            self.scan(g, &x, &selected)
        };
        output = g.transpose(&output, 1, 2);
        output = g.type_as(&output, input);
        g.linear("out_proj", &output, input.size(-1), self.bias)
    }

    fn part_norm(&self, g: &mut Graph, name: &str, x: &Value, kind: Norm) -> Value {
        if kind == Norm::RmsBare {
            // Falcon-Mamba's norms hold ones that only kernels read; the one of the time steps is as wide as the mixer.
            let width = if name == "dt_layernorm" { self.channels } else { self.state };
            g.buffer(&format!("{name}.weight"), [width], DType::F32, false);
        }
        g.norm(name, x, kind, false)
    }

    /// The projection of the time steps is a linear whose matrix and bias are used by hand.
    fn time_projection(&self, g: &mut Graph) -> (Value, Value) {
        let weight = g.parameter("dt_proj.weight", [self.channels, self.rank], Role::Linear);
        let bias = g.parameter("dt_proj.bias", [self.channels], Role::Bias);
        let module = g.leaf("dt_proj", ModuleKind::Linear { inputs: self.rank, outputs: self.channels });
        g.attach(module, &[Some(weight), Some(bias)]);
        (g.read(weight, [self.channels, self.rank]), g.read(bias, [self.channels]))
    }

    /// All positions one after another; `x` and `gate` are `[batch, channels, seq]`.
    fn scan(&self, g: &mut Graph, x: &Value, selected: &Selected) -> Value {
        let Selected { time_step, a, b, c, skip, gate, bias } = selected;
        let skip = g.float(skip);
        let (batch, seq) = (x.size(0), x.size(2));
        let step = self.positive_step(g, time_step, bias, 1);
        let step = g.unsqueeze(&step, -1);
        let decays = {
            let a = g.view(a, [1, self.channels, 1, self.state]);
            let product = g.mul(&a, &step);
            g.unary(Unary::Exp, &product)
        };
        let inputs = {
            let b = g.unsqueeze(b, 1);
            let b = g.float(&b);
            g.mul(&step, &b)
        };
        let inputs_applied = {
            let x = g.unsqueeze(x, -1);
            let x = g.float(&x);
            g.mul(&inputs, &x)
        };
        let mut states = [g.fill_like(x, [batch, self.channels, self.state])];
        let outputs = g.each_position(seq, &mut states, |g, index, [state]| {
            *state = {
                let decay = g.select(&decays, 2, index);
                let decayed = g.mul(&decay, state);
                let input = g.select(&inputs_applied, 2, index);
                g.add(&decayed, &input)
            };
            let output = {
                let state = g.type_as(state, x);
                let c = g.select(c, 1, index);
                let c = g.unsqueeze(&c, -1);
                g.matmul(&state, &c)
            };
            Some(g.select(&output, 2, 0))
        });
        let mut output = g.stack_positions(&outputs, -1);
        output = {
            let skip = g.view(&skip, [1, self.channels, 1]);
            let skipped = g.mul(x, &skip);
            g.add(&output, &skipped)
        };
        output = {
            let gate = g.unary(Unary::Silu, gate);
            g.mul(&output, &gate)
        };
        state::keep(g, &states[0], self.channels.saturating_mul(self.state));
        output
    }

    /// One position of `generate`, from the state of the last one.
    fn step(&self, g: &mut Graph, x: &Value, selected: &Selected) -> Value {
        let Selected { time_step, a, b, c, skip, gate, bias } = selected;
        let past = state::recall(g, [x.size(0), self.channels, self.state], true);
        let x = g.select(x, 1, 0);
        let (b, c) = (g.select(b, 1, 0), g.select(c, 1, 0));
        let gate = g.select(gate, 2, 0);
        let time_step = g.select(time_step, 2, 0);
        let step = self.positive_step(g, &time_step, bias, 0);
        let step_wide = g.float(&step);
        let step_wide = g.unsqueeze(&step_wide, -1);
        let decay = {
            let product = g.mul(&step_wide, a);
            g.unary(Unary::Exp, &product)
        };
        let input = {
            let b = g.float(&b);
            let b = g.unsqueeze(&b, 1);
            g.mul(&step_wide, &b)
        };
        let input_applied = {
            let x = g.float(&x);
            let x = g.unsqueeze(&x, -1);
            g.mul(&input, &x)
        };
        let state = {
            let decayed = g.mul(&past, &decay);
            g.add(&decayed, &input_applied)
        };
        let mut output = {
            let state = g.type_as(&state, &c);
            let c = g.unsqueeze(&c, -1);
            g.matmul(&state, &c)
        };
        output = g.squeeze(&output, -1);
        output = {
            let skipped = g.mul(&x, skip);
            g.add(&output, &skipped)
        };
        output = {
            let gate = g.unary(Unary::Silu, &gate);
            g.mul(&output, &gate)
        };
        g.type_as(&output, &x)
    }

    fn positive_step(&self, g: &mut Graph, time_step: &Value, bias: &Value, trailing: usize) -> Value {
        let mut sizes = vec![self.channels];
        sizes.resize(1 + trailing, 1);
        let shifted = {
            let bias = g.type_as(bias, time_step);
            let bias = g.view(&bias, sizes.as_slice());
            g.binary(Binary::Add, time_step, &bias)
        };
        g.unary(Unary::Softplus, &shifted)
    }
}
