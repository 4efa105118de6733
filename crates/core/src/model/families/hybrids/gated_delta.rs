//! The gated delta rule, the linear attention of Qwen3-Next and Qwen3.5.

use super::state::{self, CausalConvolution};
use crate::dtype::DType;
use crate::model::blocks::read;
use crate::model::op::{Binary, Norm, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// Positions that are computed together.
const CHUNK: u64 = 64;

/// Heads that each keep a matrix of keys times values, decayed and corrected at every position.
#[derive(Debug, Clone)]
pub(super) struct GatedDelta {
    key_heads: u64,
    value_heads: u64,
    key_dim: u64,
    value_dim: u64,
    convolution: CausalConvolution,
    /// Whether queries, keys, values and gates come from one projection (Qwen3-Next).
    joined: bool,
}

/// What the projections give: queries, keys and values side by side, the output gate, the raw update and decay rates.
struct Projected {
    mixed: Value,
    gate: Value,
    update: Value,
    decay: Value,
    /// The joined projections, which live as long.
    _joined: Vec<Value>,
    /// Queries, keys and values before they are mixed, whose names are taken over by the mixed ones.
    parts: Vec<Value>,
}

/// What the rule runs on, `[batch, seq, heads, …]`.
struct Rule {
    query: Value,
    key: Value,
    value: Value,
    decay: Value,
    update: Value,
}

impl GatedDelta {
    pub(super) fn read(c: &Config<'_>, joined: bool) -> Result<Self, ModelError> {
        let key_heads = read::positive(c, &["linear_num_key_heads"], 16)?;
        let value_heads = read::positive(c, &["linear_num_value_heads"], 32)?;
        let key_dim = read::positive(c, &["linear_key_head_dim"], 128)?;
        let value_dim = read::positive(c, &["linear_value_head_dim"], 128)?;
        state::product(c, "linear_num_key_heads", &[key_heads, key_dim])?;
        state::product(c, "linear_num_value_heads", &[value_heads, value_dim])?;
        if value_heads % key_heads != 0 {
            return Err(c.refuse("linear_num_value_heads", "a multiple of linear_num_key_heads"));
        }
        let convolution = CausalConvolution {
            name: "conv1d",
            kernel: read::positive(c, &["linear_conv_kernel_dim"], 4)?,
            bias: false,
            activation: Some(read::activation(c, "hidden_act", "silu")?),
        };
        Ok(Self { key_heads, value_heads, key_dim, value_dim, convolution, joined })
    }

    fn keys(&self) -> u64 {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> u64 {
        self.value_heads * self.value_dim
    }

    /// Runs inside the current module on `[batch, seq, hidden]`.
    pub(super) fn run(&self, g: &mut Graph, input: &Value) -> Value {
        g.without_kernels(match g.inputs.linear_attention_kernels {
            true => "causal-conv1d",
            false => "flash-linear-attention and causal-conv1d",
        });
        let (batch, seq) = (input.size(0), input.size(1));
        let Projected { mut mixed, mut gate, update, decay, _joined, parts } =
            if self.joined { self.project_joined(g, input) } else { self.project(g, input) };
        mixed = self.convolution.run(g, mixed);
        mixed = g.transpose(&mixed, 1, 2);
        let (mut query, mut key, mut value) = g.split3(&mixed, -1, [self.keys(), self.keys(), self.values()]);
        drop(parts);
        query = g.reshape(&query, [batch, seq, self.key_heads, self.key_dim]);
        key = g.reshape(&key, [batch, seq, self.key_heads, self.key_dim]);
        value = g.reshape(&value, [batch, seq, self.value_heads, self.value_dim]);

        let update_rate = g.unary(Unary::Sigmoid, &update);
        let decay_rate = self.decay_rate(g, &decay);
        let times = self.value_heads / self.key_heads;
        if times > 1 {
            query = g.repeat_interleave(&query, 2, times);
            key = g.repeat_interleave(&key, 2, times);
        }
        let past = state::continues(g)
            .then(|| state::recall(g, [batch, self.value_heads, self.key_dim, self.value_dim], true));
        let rule = Rule { query, key, value, decay: decay_rate, update: update_rate };
        let (mut output, last) = match (g.inputs.linear_attention_kernels, state::decodes(g)) {
            (true, recurrent) => {
                let Rule { query, key, value, decay, update } = &rule;
                g.gated_delta_rule(recurrent, [query, key, value, decay, update], g.inputs.cache)
            }
            (false, true) => self.step(g, &rule, past.as_ref()),
            (false, false) => self.scan(g, &rule, past.as_ref()),
        };
        let _kept_state = last.map(|last| state::keep(g, &last, self.values().saturating_mul(self.key_dim)));

        let rows = output.shape().elements() / self.value_dim;
        output = g.reshape(&output, [rows, self.value_dim]);
        gate = g.reshape(&gate, [rows, self.value_dim]);
        output = g.norm_of("norm", &[&output, &gate], Norm::RmsThenGate, false, self.value_dim);
        output = g.reshape(&output, [batch, seq, self.values()]);
        g.linear("out_proj", &output, input.size(-1), false)
    }

    fn project(&self, g: &mut Graph, input: &Value) -> Projected {
        let mut mixed = g.linear("in_proj_qkv", input, 2 * self.keys() + self.values(), false);
        mixed = g.transpose(&mixed, 1, 2);
        let mut gate = g.linear("in_proj_z", input, self.values(), false);
        gate = g.reshape(&gate, [input.size(0), input.size(1), self.value_heads, self.value_dim]);
        let update = g.linear("in_proj_b", input, self.value_heads, false);
        let decay = g.linear("in_proj_a", input, self.value_heads, false);
        Projected { mixed, gate, update, decay, _joined: Vec::new(), parts: Vec::new() }
    }

    fn project_joined(&self, g: &mut Graph, input: &Value) -> Projected {
        let (batch, seq) = (input.size(0), input.size(1));
        let times = self.value_heads / self.key_heads;
        let wide = times * self.value_dim;
        let qkvz = g.linear("in_proj_qkvz", input, 2 * self.keys() + 2 * self.values(), false);
        let ba = g.linear("in_proj_ba", input, 2 * self.value_heads, false);
        let (query, key, mut value, mut gate, mut update, mut decay) = {
            let qkvz = g.view(&qkvz, [batch, seq, self.key_heads, 2 * self.key_dim + 2 * wide]);
            let ba = g.view(&ba, [batch, seq, self.key_heads, 2 * times]);
            let (keys, values) = g.split2(&qkvz, 3, 2 * self.key_dim, 2 * wide);
            let (query, key) = g.split2(&keys, 3, self.key_dim, self.key_dim);
            let (value, gate) = g.split2(&values, 3, wide, wide);
            let (update, decay) = g.split2(&ba, 3, times, times);
            (query, key, value, gate, update, decay)
        };
        value = g.reshape(&value, [batch, seq, self.value_heads, self.value_dim]);
        gate = g.reshape(&gate, [batch, seq, self.value_heads, self.value_dim]);
        update = g.reshape(&update, [batch, seq, self.value_heads]);
        decay = g.reshape(&decay, [batch, seq, self.value_heads]);
        let query = g.reshape(&query, [batch, seq, self.keys()]);
        let key = g.reshape(&key, [batch, seq, self.keys()]);
        value = g.reshape(&value, [batch, seq, self.values()]);
        let mut mixed = g.cat(&[&query, &key, &value], -1);
        mixed = g.transpose(&mixed, 1, 2);
        Projected { mixed, gate, update, decay, _joined: vec![qkvz, ba], parts: vec![query, key, value] }
    }

    /// `-exp(A_log) * softplus(a + dt_bias)`, in fp32.
    fn decay_rate(&self, g: &mut Graph, decay: &Value) -> Value {
        let log = g.parameter("A_log", [self.value_heads], Role::Other);
        let bias = g.parameter("dt_bias", [self.value_heads], Role::Other);
        let rate = {
            let log = g.read(log, [self.value_heads]);
            let log = g.float(&log);
            let rate = g.unary(Unary::Exp, &log);
            g.unary(Unary::Neg, &rate)
        };
        let step = {
            let bias = g.read(bias, [self.value_heads]);
            let decay = g.float(decay);
            let shifted = g.add(&decay, &bias);
            drop(decay);
            g.unary(Unary::Softplus, &shifted)
        };
        g.mul(&rate, &step)
    }

    /// Heads before positions, in fp32 and dense; queries and keys of length one.
    fn prepared(&self, g: &mut Graph, rule: &Rule) -> Rule {
        let wide = |g: &mut Graph, x: &Value| {
            let x = g.transpose(x, 1, 2);
            g.to_dense(&x, DType::F32)
        };
        let mut query = wide(g, &rule.query);
        let mut key = wide(g, &rule.key);
        let value = wide(g, &rule.value);
        let update = wide(g, &rule.update);
        let decay = wide(g, &rule.decay);
        query = unit_length(g, &query);
        key = unit_length(g, &key);
        query = g.scale(&query);
        Rule { query, key, value, decay, update }
    }

    /// All positions, chunk by chunk.
    fn scan(&self, g: &mut Graph, rule: &Rule, past: Option<&Value>) -> (Value, Option<Value>) {
        let (batch, seq, heads) = (rule.key.size(0), rule.key.size(1), self.value_heads);
        let (key_dim, value_dim) = (self.key_dim, self.value_dim);
        let chunks = seq.div_ceil(CHUNK);
        let padded = chunks * CHUNK;
        let Rule { mut query, mut key, mut value, mut decay, mut update } = self.prepared(g, rule);
        (query, key, value) = (
            g.pad(&query, [batch, heads, padded, key_dim]),
            g.pad(&key, [batch, heads, padded, key_dim]),
            g.pad(&value, [batch, heads, padded, value_dim]),
        );
        (update, decay) = (g.pad(&update, [batch, heads, padded]), g.pad(&decay, [batch, heads, padded]));

        let rate = g.unsqueeze(&update, -1);
        let mut updated_values = g.mul(&value, &rate);
        let mut updated_keys = g.mul(&key, &rate);
        query = g.reshape(&query, [batch, heads, chunks, CHUNK, key_dim]);
        key = g.reshape(&key, [batch, heads, chunks, CHUNK, key_dim]);
        updated_keys = g.reshape(&updated_keys, [batch, heads, chunks, CHUNK, key_dim]);
        updated_values = g.reshape(&updated_values, [batch, heads, chunks, CHUNK, value_dim]);
        decay = g.reshape(&decay, [batch, heads, chunks, CHUNK]);
        let mask = {
            let ones = g.fill(DType::Bool, [CHUNK, CHUNK]);
            g.triangle(&ones)
        };
        let decay_sums = g.cumulative_sum(&decay, 3);

        // Inside each chunk.
        let mut pairs = {
            let rows = g.unsqueeze(&decay_sums, 4);
            let columns = g.unsqueeze(&decay_sums, 3);
            g.sub(&rows, &columns)
        };
        pairs = g.masked_fill(&pairs, &mask);
        pairs = g.unary(Unary::Exp, &pairs);
        let keys_across = g.transpose(&key, -1, -2);
        let system = {
            let products = g.matmul(&updated_keys, &keys_across);
            g.mul(&products, &pairs)
        };
        let inside = {
            let products = g.matmul(&query, &keys_across);
            g.mul(&products, &pairs)
        };
        let decayed_keys = {
            let decays = g.unary(Unary::Exp, &decay_sums);
            let decays = g.unsqueeze(&decays, -1);
            g.mul(&updated_keys, &decays)
        };
        let new_values = g.solve_triangular(&system, &updated_values);
        let read_keys = g.solve_triangular(&system, &decayed_keys);
        drop(keys_across);

        let mut last = match past {
            Some(past) => g.type_as(past, &new_values),
            None => g.fill_like(&new_values, [batch, heads, key_dim, value_dim]),
        };
        let mut output = g.fill_like(&new_values, new_values.shape());
        query = {
            let decays = g.unary(Unary::Exp, &decay_sums);
            let decays = g.unsqueeze(&decays, -1);
            g.mul(&query, &decays)
        };
        key = {
            let end = g.slice(&decay_sums, 3, CHUNK - 1, 1);
            let rest = g.sub(&end, &decay_sums);
            let decays = g.unary(Unary::Exp, &rest);
            drop(rest);
            let decays = g.unsqueeze(&decays, -1);
            g.mul(&key, &decays)
        };
        let chunk_decays = {
            let end = g.select(&decay_sums, 3, CHUNK - 1);
            let decays = g.unary(Unary::Exp, &end);
            g.view(&decays, [batch, heads, chunks, 1, 1])
        };

        // From chunk to chunk; names of one turn live until the next takes them over.
        let mut names = None;
        for index in 0..chunks {
            let corrected = {
                let values = g.select(&new_values, 2, index);
                let keys = g.select(&read_keys, 2, index);
                let known = g.matmul(&keys, &last);
                g.sub(&values, &known)
            };
            let between = {
                let queries = g.select(&query, 2, index);
                g.matmul(&queries, &last)
            };
            let chunk_output = {
                let weights = g.select(&inside, 2, index);
                let attended = g.matmul(&weights, &corrected);
                g.add(&between, &attended)
            };
            let chunk_output = g.unsqueeze(&chunk_output, 2);
            output = g.assign(&output, 2, index, &chunk_output);
            drop(chunk_output);
            names = Some((corrected.clone(), between));
            last = {
                let decay = g.select(&chunk_decays, 2, index);
                let decayed = g.mul(&last, &decay);
                let keys = g.select(&key, 2, index);
                let keys = g.transpose(&keys, -1, -2);
                let written = g.matmul(&keys, &corrected);
                g.add(&decayed, &written)
            };
        }
        let last = g.inputs.cache.then_some(last);
        let _names = names;
        output = g.reshape(&output, [batch, heads, padded, value_dim]);
        output = g.slice(&output, 2, 0, seq);
        output = g.transpose(&output, 1, 2);
        (g.to_dense_like(&output, &rule.query), last)
    }

    /// One position of `generate`, from the state of the last one.
    fn step(&self, g: &mut Graph, rule: &Rule, past: Option<&Value>) -> (Value, Option<Value>) {
        let Rule { query, key, value, decay, update } = self.prepared(g, rule);
        let first = |g: &mut Graph, x: &Value| g.select(x, 2, 0);
        let mut state = match past {
            Some(past) => past.clone(),
            None => g.fill_like(&value, [value.size(0), self.value_heads, self.key_dim, self.value_dim]),
        };
        let mut output = g.fill_like(&value, value.shape());
        state = {
            let decay = first(g, &decay);
            let decay = g.unary(Unary::Exp, &decay);
            let decay = g.view(&decay, [value.size(0), self.value_heads, 1, 1]);
            g.mul(&state, &decay)
        };
        let key = first(g, &key);
        let key = g.unsqueeze(&key, -1);
        let known = {
            let product = g.mul(&state, &key);
            g.reduce(Reduction::Sum, &product, -2, false)
        };
        let correction = {
            let value = first(g, &value);
            let rate = first(g, &update);
            let rate = g.unsqueeze(&rate, -1);
            let difference = g.sub(&value, &known);
            g.mul(&difference, &rate)
        };
        state = {
            let correction = g.unsqueeze(&correction, -2);
            let written = g.mul(&key, &correction);
            g.add(&state, &written)
        };
        let now = {
            let query = first(g, &query);
            let query = g.unsqueeze(&query, -1);
            let product = g.mul(&state, &query);
            g.reduce(Reduction::Sum, &product, -2, false)
        };
        let now = g.unsqueeze(&now, 2);
        output = g.assign(&output, 2, 0, &now);
        output = g.transpose(&output, 1, 2);
        output = g.contiguous(&output);
        (g.type_as(&output, &rule.query), Some(state))
    }
}

/// `x * rsqrt(sum(x²) + eps)` over the last dimension.
fn unit_length(g: &mut Graph, x: &Value) -> Value {
    let inverse = {
        let squares = g.mul(x, x);
        let sum = g.reduce(Reduction::Sum, &squares, -1, true);
        drop(squares);
        let sum = g.scalar(Binary::Add, &sum);
        g.unary(Unary::Rsqrt, &sum)
    };
    g.mul(x, &inverse)
}
