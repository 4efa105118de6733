//! DBRX: fused projections with clipping, experts in a Python loop.

use super::frame::rope;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::causal::{LmHead, decoder};
use crate::model::blocks::{SelfAttention, attention, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Input, Mask, Norm, Op, ParameterId, Reduction, Role, Rotary, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DBRX.
pub const FAMILY: Family = Family { name: "DBRX", model_types: &["dbrx"], facts: Facts::DEFAULT, build };

struct Dbrx {
    vocab: u64,
    hidden: u64,
    layers: u64,
    attention: SelfAttention,
    residual_dropout: f64,
    width: u64,
    experts: u64,
    top_k: u64,
    activation: Activation,
    jitter: bool,
    normalised: bool,
}

impl Dbrx {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let (own, experts) = (c.section("attn_config"), c.section("ffn_config"));
        let hidden = read::positive(c, &["d_model", "hidden_size"], 2048)?;
        let heads = read::positive(c, &["n_heads", "num_attention_heads"], 16)?;
        let mut attention = SelfAttention::new(heads, read::positive(&own, &["kv_n_heads"], 1)?, hidden / heads);
        attention.dropout = own.number("attn_pdrop", 0.0)?;
        let count = read::positive(&experts, &["moe_num_experts"], 4)?;
        if count > 4096 {
            return Err(experts.refuse("moe_num_experts", "at most 4096"));
        }
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 32000)?,
            hidden,
            layers: c.layers(&["n_layers", "num_hidden_layers"], 24)?,
            attention,
            residual_dropout: c.number("resid_pdrop", 0.0)?,
            width: experts.size_or(&["ffn_hidden_size"], 3584)?,
            experts: count,
            top_k: read::positive(&experts, &["moe_top_k"], 1)?,
            activation: read::activation(&experts.section("ffn_act_fn"), "name", "silu")?,
            jitter: experts.has("moe_jitter_eps"),
            normalised: !experts.keys().any(|key| key == "moe_normalize_expert_weights")
                || experts.has("moe_normalize_expert_weights"),
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.embedding("wte", &ids, self.vocab, self.hidden);
        let mask = attention::mask(g, Mask::Causal);
        let rope = rope(g, self.attention.head_dim);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("blocks", index, |g| self.layer(g, &hidden, &rope, &mask));
        }
        g.norm("norm_f", &hidden, Norm::Layer, false)
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let (residual, mut hidden) = g.module("norm_attn_norm", |g| {
            let mut hidden = g.norm("norm_1", input, Norm::Layer, false);
            hidden = g.module("attn", |g| self.attend(g, &hidden, rope, mask));
            hidden = g.dropout(&hidden, self.residual_dropout);
            hidden = g.add(&hidden, input);
            let normed = g.norm("norm_2", &hidden, Norm::Layer, false);
            (hidden, normed)
        });
        hidden = g.module("ffn", |g| self.experts(g, &hidden));
        hidden = g.dropout(&hidden, self.residual_dropout);
        g.add(&residual, &hidden)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, rope: &(Value, Value), mask: &Value) -> Value {
        let own = &self.attention;
        let kv_width = own.kv_heads.saturating_mul(own.head_dim);
        let mut joined = g.linear("Wqkv", hidden, self.hidden + 2 * kv_width, false);
        joined = g.unary(Unary::Clamp, &joined);
        let (mut query, mut key, mut value) = g.split3(&joined, 2, [self.hidden, kv_width, kv_width]);
        query = attention::split_heads(g, query, own.heads, own.head_dim);
        key = attention::split_heads(g, key, own.kv_heads, own.head_dim);
        value = attention::split_heads(g, value, own.kv_heads, own.head_dim);
        (query, key) = attention::rotate_whole(g, Rotary::Half, &query, &key, &rope.0, &rope.1);
        (key, value) = g.cache(own.cache(), &key, &value);
        let attended = attention::attend(g, own.spec(None), &query, &key, &value, Some(mask));
        let merged = attention::join_heads(g, attended);
        g.linear("out_proj", &merged, self.hidden, false)
    }

    fn experts(&self, g: &mut Graph, input: &Value) -> Value {
        let tokens = [input.size(0).saturating_mul(input.size(1)), self.hidden];
        let mut input = input.clone();
        let logits = g.module("router", |g| {
            if self.jitter {
                input = g.run(Op::Jitter, &[&input], input.shape());
            }
            let flat = g.view(&input, tokens);
            g.linear("layer", &flat, self.experts, false)
        });
        let (weights, indices) = {
            let scores = g.softmax(&logits, 1, None);
            let (mut weights, indices) = g.top_k(&scores, self.top_k);
            if self.normalised {
                let size = g.reduce(Reduction::Norm, &weights, -1, true);
                weights = g.div(&weights, &size);
            }
            (weights, indices)
        };
        let output = g.module("experts", |g| {
            let flat = g.reshape(&input, tokens);
            let sum = self.run_experts(g, &flat, &weights);
            g.view(&sum, input.shape())
        });
        drop(indices);
        output
    }

    /// One expert after the other on the tokens that chose it; which ones is data, so each gets an equal share.
    fn run_experts(&self, g: &mut Graph, hidden: &Value, weights: &Value) -> Value {
        let role = Role::Experts { count: self.experts, top_k: self.top_k };
        let shape = [self.experts.saturating_mul(self.width), self.hidden];
        let [gate, up, down] = ["w1", "v1", "w2"].map(|name| g.parameter(&format!("mlp.{name}"), shape, role));
        let mut sum = g.without_grad(|g| g.unary(Unary::Clone, hidden));
        let chosen = hidden.size(0).saturating_mul(self.top_k);
        let (share, rest) = (chosen / self.experts, chosen % self.experts);
        let mask = g.without_grad(|g| g.fill(DType::I64, [hidden.size(0), self.top_k, self.experts]));
        for index in 0..self.experts {
            let count = share + u64::from(index < rest);
            if count == 0 {
                continue;
            }
            let tokens = g.fill(DType::I64, [count]);
            let [up, gate, down] = [up, gate, down].map(|parameter| self.expert(g, parameter, index));
            let mut states = {
                let rows = g.index(hidden, &tokens);
                g.module("mlp", |g| self.expert_mlp(g, &rows, [&gate, &up, &down]))
            };
            states = {
                let each = g.run(Op::Index, &[weights, &tokens], [count, 1]);
                g.mul(&states, &each)
            };
            sum = g.run(Op::IndexAddInPlace, &[&sum, &tokens, &states], sum.shape());
        }
        drop(mask);
        sum
    }

    /// The rows of one expert, `[width, hidden]`, as a view.
    fn expert(&self, g: &mut Graph, parameter: ParameterId, index: u64) -> Value {
        let all = g.read(parameter, [self.experts.saturating_mul(self.width), self.hidden]);
        let split = g.view(&all, [self.experts, self.width, self.hidden]);
        let one = g.slice(&split, 0, index, 1);
        g.squeeze(&one, 0)
    }

    fn expert_mlp(&self, g: &mut Graph, x: &Value, [gate, up, down]: [&Value; 3]) -> Value {
        let product = |g: &mut Graph, weight: &Value| {
            let turned = g.transpose(weight, 0, 1);
            g.matmul(x, &turned)
        };
        let mut gated = product(g, gate);
        let wide = product(g, up);
        gated = g.activation(self.activation, &gated);
        let inner = g.mul(&gated, &wide);
        g.matmul(&inner, down)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let dbrx = Dbrx::read(c)?;
    let head = LmHead { vocab: dbrx.vocab, tied: None, bias: false };
    decoder(g, task, "transformer", head, |g| dbrx.model(g));
    Ok(())
}
