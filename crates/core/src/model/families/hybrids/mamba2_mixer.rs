//! Mamba-2's mixer, shared by Mamba-2, Zamba 2, Granite 4 and Nemotron-H.

use super::mamba2_sums::Sums;
use super::state::{self, CausalConvolution};
use crate::dtype::DType;
use crate::model::op::{Norm, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// A state space with heads: the state of a head moves on by one number per position.
#[derive(Debug, Clone)]
pub(super) struct Mamba2Mixer {
    pub(super) heads: u64,
    pub(super) head_dim: u64,
    pub(super) state: u64,
    pub(super) groups: u64,
    pub(super) chunk: u64,
    pub(super) bias: bool,
    pub(super) convolution: CausalConvolution,
    pub(super) norm: Norm,
}

/// What the scan needs beside the hidden states: `[batch, seq, heads]` for `step`, `[batch, seq, groups, state]` for `b`
/// and `c`.
struct Selected {
    step: Value,
    a: Value,
    b: Value,
    c: Value,
    skip: Value,
    bias: Value,
}

impl Mamba2Mixer {
    /// Refuses heads that its groups cannot share, and sizes beyond any model.
    pub(super) fn check(&self, c: &Config<'_>, groups_key: &str) -> Result<(), ModelError> {
        state::product(c, groups_key, &[self.groups, self.state])?;
        if !self.heads.is_multiple_of(self.groups.max(1)) {
            return Err(c.refuse(groups_key, "a number that divides the heads"));
        }
        Ok(())
    }

    fn channels(&self) -> u64 {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Runs inside the current module on `[batch, seq, hidden]`.
    pub(super) fn run(&self, g: &mut Graph, input: &Value) -> Value {
        g.without_kernels("mamba-ssm and causal-conv1d");
        let (batch, seq) = (input.size(0), input.size(1));
        let (channels, grouped) = (self.channels(), self.groups.saturating_mul(self.state));
        let convolved = channels + 2 * grouped;
        let projected = g.linear("in_proj", input, channels + convolved + self.heads, self.bias);

        let decay = g.parameter("A_log", [self.heads], Role::Other);
        let decay = g.read(decay, [self.heads]);
        let mut a = g.float(&decay);
        a = g.unary(Unary::Exp, &a);
        a = g.unary(Unary::Neg, &a);

        let (gate, mut mixed, step) = g.split3(&projected, -1, [channels, convolved, self.heads]);
        mixed = g.transpose(&mixed, 1, 2);
        mixed = self.convolution.run(g, mixed);
        mixed = g.transpose(&mixed, 1, 2);
        let (mut hidden, b, c) = g.split3(&mixed, -1, [channels, grouped, grouped]);

        let bias = g.parameter("dt_bias", [self.heads], Role::Other);
        let bias = g.read(bias, [self.heads]);
        let skip = g.parameter("D", [self.heads], Role::Other);
        let skip = g.read(skip, [self.heads]);
        let b = g.view(&b, [batch, seq, self.groups, self.state]);
        let c = g.view(&c, [batch, seq, self.groups, self.state]);
        let selected = Selected { step, a, b, c, skip, bias };

        hidden = g.view(&hidden, [batch, seq, self.heads, self.head_dim]);
        let result =
            if state::decodes(g) { self.step(g, &hidden, &selected) } else { self.scan(g, &hidden, &selected) };
        let mut output = g.reshape(&result, [batch, seq, channels]);
        output = g.norm_of("norm", &[&output, &gate], self.norm, false, channels);
        output = g.type_as(&output, input);
        g.linear("out_proj", &output, input.size(-1), self.bias)
    }

    /// All positions, in chunks: inside a chunk like attention, between chunks through the states.
    fn scan(&self, g: &mut Graph, hidden: &Value, selected: &Selected) -> Value {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let (heads, dim, width, chunk) = (self.heads, self.head_dim, self.state, self.chunk);
        let chunks = seq.div_ceil(chunk);
        let padded = chunks.saturating_mul(chunk);

        let mut step = self.positive_step(g, &selected.step, &selected.bias);
        step = g.unary(Unary::Clamp, &step);
        let mut x = g.float(hidden);
        let mut b = self.repeated(g, &selected.b);
        let mut c = self.repeated(g, &selected.c);
        let residual = {
            let skip = g.unsqueeze(&selected.skip, -1);
            let x = g.pad(&x, [batch, padded, heads, dim]);
            g.mul(&skip, &x)
        };
        x = {
            let step = g.unsqueeze(&step, -1);
            let step = g.float(&step);
            g.mul(&x, &step)
        };
        let mut a = {
            let step = g.float(&step);
            g.mul(&selected.a, &step)
        };
        (x, a, b, c) = {
            let x = g.pad(&x, [batch, padded, heads, dim]);
            let a = g.pad(&a, [batch, padded, heads]);
            let b = g.pad(&b, [batch, padded, heads, width]);
            let c = g.pad(&c, [batch, padded, heads, width]);
            (
                g.reshape(&x, [batch, chunks, chunk, heads, dim]),
                g.reshape(&a, [batch, chunks, chunk, heads]),
                g.reshape(&b, [batch, chunks, chunk, heads, width]),
                g.reshape(&c, [batch, chunks, chunk, heads, width]),
            )
        };
        a = g.permute(&a, &[0, 3, 1, 2]);
        let decay_sums = g.cumulative_sum(&a, -1);

        // Inside each chunk, as attention with a decaying mask.
        let mask = {
            let sums = segment_sums(g, &a);
            g.unary(Unary::Exp, &sums)
        };
        let sums = Sums { batch, chunks, chunk, heads, dim, width };
        let by_einsum = g.inputs.transformers.is_some_and(|version| version >= [5, 18]);
        let scores = if by_einsum {
            sums.scores(g, &c, &b)
        } else {
            let c = g.unsqueeze(&c, 3);
            let b = g.unsqueeze(&b, 2);
            let product = g.mul(&c, &b);
            g.reduce(Reduction::Sum, &product, -1, false)
        };
        let weights = if by_einsum {
            let mask = g.permute(&mask, &[0, 2, 3, 4, 1]);
            g.mul(&scores, &mask)
        } else {
            let scores = g.unsqueeze(&scores, -1);
            let mask = g.permute(&mask, &[0, 2, 3, 4, 1]);
            let mask = g.unsqueeze(&mask, -1);
            let product = g.mul(&scores, &mask);
            g.reduce(Reduction::Sum, &product, -1, false)
        };
        let inside = if by_einsum {
            sums.inside(g, &weights, &x)
        } else {
            let weights = g.unsqueeze(&weights, -1);
            let x = g.unsqueeze(&x, 2);
            let product = g.mul(&weights, &x);
            g.reduce(Reduction::Sum, &product, 3, false)
        };

        // What each chunk adds to the state.
        let decays = {
            let last = g.slice(&decay_sums, 3, chunk - 1, 1);
            let rest = g.sub(&last, &decay_sums);
            g.unary(Unary::Exp, &rest)
        };
        let b_decayed = {
            let decays = g.permute(&decays, &[0, 2, 3, 1]);
            let decays = g.unsqueeze(&decays, -1);
            g.mul(&b, &decays)
        };
        let mut states = if by_einsum {
            sums.states(g, &b_decayed, &x)
        } else {
            let b = g.unsqueeze(&b_decayed, 4);
            let x = g.unsqueeze(&x, -1);
            let product = g.mul(&b, &x);
            g.reduce(Reduction::Sum, &product, 2, false)
        };

        // The state before each chunk.
        let first = if state::continues(g) {
            let past = state::recall(g, [batch, heads, dim, width], true);
            let past = g.unsqueeze(&past, 1);
            g.float(&past)
        } else {
            g.fill_like(&states, [batch, 1, heads, dim, width])
        };
        states = g.cat(&[&first, &states], 1);
        let chunk_decays = {
            let last = g.select(&decay_sums, 3, chunk - 1);
            let last = g.pad(&last, [batch, heads, chunks + 1]);
            let sums = segment_sums(g, &last);
            let decays = g.unary(Unary::Exp, &sums);
            g.transpose(&decays, 1, 3)
        };
        let new_states = if by_einsum {
            sums.carried(g, &chunk_decays, &states)
        } else {
            let decays = g.view(&chunk_decays, [batch, chunks + 1, chunks + 1, heads, 1, 1]);
            let states = g.unsqueeze(&states, 2);
            let product = g.mul(&decays, &states);
            g.reduce(Reduction::Sum, &product, 1, false)
        };
        states = g.slice(&new_states, 1, 0, chunks);
        let last_state = g.select(&new_states, 1, chunks);

        // What the states add to the output.
        let decays_out = g.unary(Unary::Exp, &decay_sums);
        let c_times_states = if by_einsum {
            sums.outputs(g, &c, &states)
        } else {
            let c = g.unsqueeze(&c, 4);
            let states = g.unsqueeze(&states, 2);
            g.mul(&c, &states)
        };
        let between = {
            let sums = match by_einsum {
                true => c_times_states.clone(),
                false => g.reduce(Reduction::Sum, &c_times_states, -1, false),
            };
            let decays = g.permute(&decays_out, &[0, 2, 3, 1]);
            let decays = g.unsqueeze(&decays, -1);
            g.mul(&sums, &decays)
        };

        let mut output = g.add(&inside, &between);
        if by_einsum {
            output = g.contiguous(&output);
        }
        output = g.reshape(&output, [batch, padded, heads, dim]);
        output = g.add(&output, &residual);
        if padded > seq {
            output = g.slice(&output, 1, 0, seq);
        }
        state::keep(g, &last_state, heads.saturating_mul(dim).saturating_mul(width));
        output
    }

    /// One position of `generate`, from the state of the last one.
    fn step(&self, g: &mut Graph, hidden: &Value, selected: &Selected) -> Value {
        let batch = hidden.size(0);
        let (heads, dim, width) = (self.heads, self.head_dim, self.state);
        let past = state::recall(g, [batch, heads, dim, width], true);
        let hidden = g.squeeze(hidden, 1);
        let mut step = g.transpose(&selected.step, 1, 2);
        step = g.expand(&step, [batch, heads, dim]);
        let bias = g.unsqueeze(&selected.bias, -1);
        let bias = g.expand(&bias, [heads, dim]);
        step = self.positive_step(g, &step, &bias);
        step = g.unsqueeze(&step, -1);
        let decay = {
            let a = g.view(&selected.a, [heads, 1, 1]);
            let a = g.expand(&a, [heads, dim, width]);
            let step = g.float(&step);
            let product = g.mul(&step, &a);
            g.unary(Unary::Exp, &product)
        };
        let b = self.per_head(g, &selected.b);
        let b = g.unsqueeze(&b, 2);
        let input = g.mul(&step, &b);
        let input_applied = {
            let hidden = g.unsqueeze(&hidden, -1);
            g.mul(&input, &hidden)
        };
        let mut states = {
            let decayed = g.mul(&past, &decay);
            g.add(&decayed, &input_applied)
        };
        let c = self.per_head(g, &selected.c);
        states = g.type_as(&states, &c);
        let mut output = {
            let states = g.view(&states, [batch.saturating_mul(heads), dim, width]);
            let c = g.view(&c, [batch.saturating_mul(heads), width, 1]);
            g.matmul(&states, &c)
        };
        output = g.view(&output, [batch, heads, dim]);
        output = {
            let skip = g.unsqueeze(&selected.skip, -1);
            let skip = g.expand(&skip, [heads, dim]);
            let skipped = g.mul(&hidden, &skip);
            let sum = g.add(&output, &skipped);
            g.type_as(&sum, &output)
        };
        g.type_as(&output, &hidden)
    }

    fn positive_step(&self, g: &mut Graph, step: &Value, bias: &Value) -> Value {
        let shifted = {
            let bias = g.type_as(bias, step);
            g.add(step, &bias)
        };
        g.unary(Unary::Softplus, &shifted)
    }

    /// Groups repeated for their heads, in fp32.
    fn repeated(&self, g: &mut Graph, x: &Value) -> Value {
        let x = g.float(x);
        g.repeat_interleave(&x, 2, self.heads / self.groups.max(1))
    }

    /// `[batch, 1, groups, state] → [batch, heads, state]`.
    fn per_head(&self, g: &mut Graph, x: &Value) -> Value {
        let (batch, times) = (x.size(0), self.heads / self.groups.max(1));
        let mut x = g.reshape(x, [batch, self.groups, 1, self.state]);
        x = g.expand(&x, [batch, self.groups, times, self.state]);
        x = g.contiguous(&x);
        g.reshape(&x, [batch, self.heads, self.state])
    }
}

/// Sums over every segment of the last dimension: `[…, n] → […, n, n]`.
fn segment_sums(g: &mut Graph, x: &Value) -> Value {
    let size = x.size(-1);
    let mut x = g.unsqueeze(x, -1);
    x = g.expand(&x, x.shape().with(-1, size));
    let mut mask = lower_triangle(g, size);
    x = {
        let mask = g.unary(Unary::Not, &mask);
        g.masked_fill(&x, &mask)
    };
    let mut sums = g.cumulative_sum(&x, -2);
    mask = lower_triangle(g, size);
    sums = {
        let mask = g.unary(Unary::Not, &mask);
        g.masked_fill(&sums, &mask)
    };
    sums
}

fn lower_triangle(g: &mut Graph, size: u64) -> Value {
    let ones = g.fill(DType::Bool, [size, size]);
    g.triangle(&ones)
}
