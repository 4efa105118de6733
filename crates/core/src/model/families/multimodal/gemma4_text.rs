//! The text model of Gemma 4.

use super::parts::{dimension, turn};
use crate::dtype::DType;
use crate::model::blocks::attention::{self, Masks};
use crate::model::blocks::moe::FusedExperts;
use crate::model::blocks::{gated_mlp, read};
use crate::model::families::decoders::decoder::Vocabulary;
use crate::model::families::decoders::gemma::scaled_embedding;
use crate::model::op::{Activation, Attention, Binary, EagerStyle, Norm, Reduction, Role, RotaryTable};
use crate::model::{Config, Graph, ModelError, Value};

const NORM: Norm = Norm::RmsWeightFirst;

/// The text model.
#[derive(Debug, Clone)]
pub(super) struct Gemma4Text {
    pub vocabulary: Vocabulary,
    pub softcap: bool,
    /// The window of each layer; without one it is a full layer.
    windows: Vec<Option<u64>>,
    heads: u64,
    sliding: Heads,
    full: Heads,
    /// Whether full layers take their keys for values.
    keys_are_values: bool,
    /// From this layer on, keys and values of earlier layers are used.
    first_shared: u64,
    width: u64,
    double_wide: bool,
    activation: Activation,
    bias: bool,
    dropout: f64,
    causal: bool,
    /// Whether the tokens of an image see each other.
    images_see_themselves: bool,
    /// Width of the embedding that each layer gets of its own, and rows of its table.
    layer_input: Option<(u64, u64)>,
    experts: Option<FusedExperts>,
}

/// Keys and values of one kind of layer.
#[derive(Debug, Clone, Copy)]
struct Heads {
    kv_heads: u64,
    dim: u64,
}

/// Keys and values that later layers use: of full layers, of sliding ones.
type Shared = [Option<(Value, Value)>; 2];

impl Gemma4Text {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let layers = c.layers(&["num_hidden_layers"], 30)?;
        let everywhere = c.str_or("use_bidirectional_attention", "") == "all";
        let window = c.size_or(&["sliding_window"], 512)?;
        let window = if everywhere { window / 2 + 1 } else { window };
        let mut windows = read::layer_windows(c, layers, Some(window), |index| (index + 1) % 6 != 0)?;
        if let Some(last) = windows.last_mut() {
            *last = None;
        }
        let kv_heads = dimension(c, &["num_key_value_heads"], 4)?;
        let keys_are_values = c.flag("attention_k_eq_v", false)?;
        let wide_heads =
            if keys_are_values { dimension(c, &["num_global_key_value_heads"], kv_heads)? } else { kv_heads };
        let activation = read::activation(c, "hidden_activation", "gelu_pytorch_tanh")?;
        let layer_input = c.size_or(&["hidden_size_per_layer_input"], 256)?;
        let experts = if c.flag("enable_moe_block", false)? {
            let width = c.size(&["moe_intermediate_size", "expert_intermediate_size"])?;
            Some(FusedExperts::new(c.size(&["num_experts"])?, c.size(&["top_k_experts"])?, width, activation))
        } else {
            None
        };
        Ok(Self {
            vocabulary: Vocabulary::read(c, 262_144, 2304, true)?,
            softcap: c.has("final_logit_softcapping"),
            windows,
            heads: dimension(c, &["num_attention_heads"], 8)?,
            sliding: Heads { kv_heads, dim: dimension(c, &["head_dim"], 256)? },
            full: Heads { kv_heads: wide_heads, dim: dimension(c, &["global_head_dim"], 512)? },
            keys_are_values,
            first_shared: layers.saturating_sub(c.size_or(&["num_kv_shared_layers"], 0)?),
            width: c.size_or(&["intermediate_size"], 9216)?,
            double_wide: c.flag("use_double_wide_mlp", false)?,
            activation,
            bias: c.flag("attention_bias", false)?,
            dropout: c.number("attention_dropout", 0.0)?,
            causal: !everywhere,
            images_see_themselves: c.str_or("use_bidirectional_attention", "") == "vision",
            layer_input: match layer_input {
                0 => None,
                width => Some((width, c.size_or(&["vocab_size_per_layer_input"], 262_144)?)),
            },
            experts,
        })
    }

    pub(super) fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        scaled_embedding(g, ids, self.vocabulary)
    }

    pub(super) fn has_layer_inputs(&self) -> bool {
        self.layer_input.is_some()
    }

    /// What each layer gets of every token: `[batch, seq, layers, width]`.
    pub(super) fn embed_per_layer(&self, g: &mut Graph, ids: &Value) -> Option<Value> {
        let (width, rows) = self.layer_input?;
        let layers = self.windows.len() as u64;
        g.buffer("embed_tokens_per_layer.embed_scale", [], DType::BF16, false);
        let mut all = g.embedding("embed_tokens_per_layer", ids, rows, layers * width);
        all = g.scale(&all);
        Some(g.reshape(&all, [ids.size(0), ids.size(1), layers, width]))
    }

    pub(super) fn masks(&self, g: &mut Graph, images: bool) -> Masks {
        match (self.causal, images && self.images_see_themselves) {
            (true, true) => Masks::with_images(g, &self.windows),
            (true, false) => Masks::new(g, &self.windows, true),
            (false, _) => Masks::bidirectional(g, &self.windows, true),
        }
    }

    pub(super) fn model(&self, g: &mut Graph, embeddings: &Value, inputs: Option<&Value>, masks: &Masks) -> Value {
        let inputs = inputs.map(|inputs| self.project_inputs(g, embeddings, inputs));
        let full = self.rotary(g, "full_attention", self.full.dim);
        let sliding = self.rotary(g, "sliding_attention", self.sliding.dim);
        let mut shared: Shared = [None, None];
        let mut hidden = embeddings.clone();
        for (index, &window) in self.windows.iter().enumerate() {
            let rope = if window.is_some() { &sliding } else { &full };
            let input = inputs.as_ref().map(|inputs| {
                let own = g.slice(inputs, 2, index as u64, 1);
                g.squeeze(&own, 2)
            });
            hidden = g.layer("layers", index as u64, |g| {
                self.layer(g, index, &hidden, input.as_ref(), rope, masks.of(window), &mut shared)
            });
        }
        g.norm("norm", &hidden, NORM, false)
    }

    /// The embeddings of each layer joined with a projection of the model's own.
    fn project_inputs(&self, g: &mut Graph, embeddings: &Value, inputs: &Value) -> Value {
        let mut projection = g.linear("per_layer_model_projection", embeddings, inputs.size(2) * inputs.size(3), false);
        projection = g.scale(&projection);
        projection = g.reshape(&projection, inputs.shape());
        projection = g.norm("per_layer_projection_norm", &projection, NORM, false);
        let sum = g.add(&projection, inputs);
        g.scale(&sum)
    }

    fn rotary(&self, g: &mut Graph, kind: &str, dim: u64) -> (Value, Value) {
        for buffer in ["inv_freq", "original_inv_freq"] {
            g.buffer(&format!("rotary_emb.{kind}_{buffer}"), [dim / 2], DType::F32, false);
        }
        g.rotary_table_bare(g.inputs.seq, RotaryTable { dim, axes: 1, doubled: true, fp32: false })
    }

    #[allow(clippy::too_many_arguments)]
    fn layer(
        &self,
        g: &mut Graph,
        index: usize,
        input: &Value,
        layer_input: Option<&Value>,
        rope: &(Value, Value),
        mask: &Value,
        shared: &mut Shared,
    ) -> Value {
        let mut hidden = g.norm("input_layernorm", input, NORM, false);
        hidden = g.module("self_attn", |g| self.attention(g, index, &hidden, rope, mask, shared));
        hidden = g.norm("post_attention_layernorm", &hidden, NORM, false);
        hidden = g.add(input, &hidden);
        let mut residual = hidden.clone();
        hidden = g.norm("pre_feedforward_layernorm", &hidden, NORM, false);
        let is_shared = index as u64 >= self.first_shared && self.first_shared > 0;
        let width = if self.double_wide && is_shared { 2 * self.width } else { self.width };
        let names = ["gate_proj", "up_proj", "down_proj"];
        hidden = g.module("mlp", |g| gated_mlp(g, &hidden, names, width, self.activation, false));
        if let Some(experts) = &self.experts {
            hidden = mixture(g, experts, &hidden, &residual);
        }
        hidden = g.norm("post_feedforward_layernorm", &hidden, NORM, false);
        hidden = g.add(&residual, &hidden);
        if let Some(layer_input) = layer_input {
            residual = hidden.clone();
            hidden = g.linear("per_layer_input_gate", &hidden, layer_input.size(-1), false);
            hidden = g.activation(self.activation, &hidden);
            hidden = g.mul(&hidden, layer_input);
            hidden = g.linear("per_layer_projection", &hidden, residual.size(-1), false);
            hidden = g.norm("post_per_layer_input_norm", &hidden, NORM, false);
            hidden = g.add(&residual, &hidden);
        }
        g.buffer("layer_scalar", [1], DType::BF16, true);
        let scalar = g.run(crate::model::op::Op::Buffer(DType::BF16), &[], [1]);
        g.in_place(Binary::Mul, &hidden, &scalar)
    }

    fn attention(
        &self,
        g: &mut Graph,
        index: usize,
        hidden: &Value,
        (cosine, sine): &(Value, Value),
        mask: &Value,
        shared: &mut Shared,
    ) -> Value {
        let window = self.windows[index];
        let sliding = window.is_some();
        let heads = if sliding { self.sliding } else { self.full };
        let cosine = g.unsqueeze(cosine, 2);
        let sine = g.unsqueeze(sine, 2);
        let mut query = g.linear("q_proj", hidden, self.heads * heads.dim, self.bias);
        query = g.split_last(&query, self.heads, heads.dim);
        query = g.norm("q_norm", &query, NORM, false);
        query = turn(g, &query, &cosine, &sine);
        query = g.transpose(&query, 1, 2);
        let reused = if index as u64 >= self.first_shared { shared[usize::from(sliding)].clone() } else { None };
        let (key, value) = match reused {
            Some(both) => both,
            None => {
                let mut key = g.linear("k_proj", hidden, heads.kv_heads * heads.dim, self.bias);
                key = g.split_last(&key, heads.kv_heads, heads.dim);
                let mut value = if self.keys_are_values && !sliding {
                    key.clone()
                } else {
                    let value = g.linear("v_proj", hidden, heads.kv_heads * heads.dim, self.bias);
                    g.split_last(&value, heads.kv_heads, heads.dim)
                };
                key = g.norm("k_norm", &key, NORM, false);
                key = turn(g, &key, &cosine, &sine);
                key = g.transpose(&key, 1, 2);
                value = g.norm("v_norm", &value, Norm::RmsBare, false);
                value = g.transpose(&value, 1, 2);
                g.cache(attention::grouped_cache(heads.kv_heads, heads.dim, window), &key, &value)
            }
        };
        if self.is_kept(index) {
            shared[usize::from(sliding)] = Some((key.clone(), value.clone()));
        }
        let spec = Attention {
            groups: self.heads / heads.kv_heads,
            causal: self.causal,
            dropout_per_mille: (self.dropout.clamp(0.0, 1.0) * 1000.0).round() as u32,
            softcap: false,
            sinks: None,
            eager: EagerStyle::Fp32Softmax,
            sdpa: true,
        };
        let attended = attention::attend(g, spec, &query, &key, &value, Some(mask));
        let joined = attention::join_heads(g, attended);
        g.linear("o_proj", &joined, hidden.size(-1), self.bias)
    }

    /// Whether later layers may use this one's keys and values: the last of its kind that has its own.
    fn is_kept(&self, index: usize) -> bool {
        let own = &self.windows[..(self.first_shared as usize).min(self.windows.len())];
        own.iter().rposition(|window| window.is_some() == self.windows[index].is_some()) == Some(index)
    }
}

/// Experts beside the MLP: they see what the MLP saw before its norm, and both results are added.
fn mixture(g: &mut Graph, experts: &FusedExperts, dense: &Value, residual: &Value) -> Value {
    let first = g.norm("post_feedforward_layernorm_1", dense, NORM, false);
    let flat = g.reshape(residual, [residual.size(0) * residual.size(1), residual.size(2)]);
    let (indices, weights) = g.module("router", |g| route(g, experts, &flat));
    let mut second = g.norm("pre_feedforward_layernorm_2", &flat, NORM, false);
    second = experts.run(g, "experts", &second, &indices, &weights);
    second = g.reshape(&second, residual.shape());
    second = g.norm("post_feedforward_layernorm_2", &second, NORM, false);
    g.add(&first, &second)
}

fn route(g: &mut Graph, experts: &FusedExperts, flat: &Value) -> (Value, Value) {
    let scale = g.parameter("scale", [flat.size(1)], Role::Other);
    let expert_scale = g.parameter("per_expert_scale", [experts.count], Role::Other);
    let mut hidden = g.norm("norm", flat, Norm::RmsBare, false);
    hidden = {
        let scale = g.read(scale, [flat.size(1)]);
        let scaled = g.mul(&hidden, &scale);
        g.scale(&scaled)
    };
    let scores = g.linear("proj", &hidden, experts.count, false);
    let probabilities = g.softmax(&scores, -1, Some(DType::F32));
    let (mut weights, indices) = g.top_k(&probabilities, experts.top_k);
    {
        let total = g.reduce(Reduction::Sum, &weights, -1, true);
        weights = g.in_place(Binary::Div, &weights, &total);
    }
    let table = g.read(expert_scale, [experts.count]);
    let scales = g.index(&table, &indices);
    weights = g.mul(&weights, &scales);
    (indices, weights)
}
