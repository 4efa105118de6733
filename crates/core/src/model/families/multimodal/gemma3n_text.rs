//! The text model of Gemma 3n: four parallel streams of which one is worked on (AltUp), low-rank side paths (LAuReL),
//! embeddings of each layer's own, and layers that share keys and values.

use super::parts::{dimension, turn};
use crate::dtype::DType;
use crate::model::blocks::attention::{self, Masks};
use crate::model::blocks::read;
use crate::model::families::decoders::decoder::Vocabulary;
use crate::model::families::decoders::gemma::scaled_embedding;
use crate::model::op::{Activation, Attention, Binary, EagerStyle, Norm, Op, Reduction, Role, RotaryTable, Unary};
use crate::model::{Config, Graph, ModelError, Value};

const NORM: Norm = Norm::RmsWeightFirst;

/// The text model.
#[derive(Debug, Clone)]
pub(super) struct Gemma3nText {
    pub vocabulary: Vocabulary,
    pub softcap: bool,
    windows: Vec<Option<u64>>,
    widths: Vec<u64>,
    sparse: Vec<bool>,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    /// From this layer on, keys and values of earlier layers are used.
    first_shared: u64,
    activation: Activation,
    bias: bool,
    dropout: f64,
    /// Rows and width of the embedding that each layer gets of its own.
    layer_rows: u64,
    layer_width: u64,
    streams: u64,
    active: u64,
    scaled: bool,
    rank: u64,
}

/// Keys and values that later layers use: of full layers, of sliding ones.
type Shared = [Option<(Value, Value)>; 2];

impl Gemma3nText {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let layers = c.layers(&["num_hidden_layers"], 35)?;
        let window = c.size_or(&["sliding_window"], 512)?;
        let widths = match c.get("intermediate_size") {
            Some(value) if value.is_array() => c.sizes("intermediate_size")?.unwrap_or_default(),
            _ => vec![c.size_or(&["intermediate_size"], 16384)?; layers as usize],
        };
        if widths.len() as u64 != layers {
            return Err(c.refuse("intermediate_size", "one width, or one per layer"));
        }
        let sparse = match c.get("activation_sparsity_pattern").and_then(serde_json::Value::as_array) {
            Some(list) => list.iter().map(|share| share.as_f64().unwrap_or(0.0) > 0.0).collect(),
            None => (0..layers).map(|index| layers > 10 && index < 10).collect(),
        };
        let streams = dimension(c, &["altup_num_inputs"], 4)?;
        let active = c.size_or(&["altup_active_idx"], 0)?;
        if active >= streams || streams > 64 {
            return Err(c.refuse("altup_num_inputs", "a number of streams up to 64, above altup_active_idx"));
        }
        Ok(Self {
            vocabulary: Vocabulary::read(c, 262_400, 2048, true)?,
            softcap: !read::is_null(c, "final_logit_softcapping"),
            windows: read::layer_windows(c, layers, Some(window), |index| (index + 1) % 5 != 0)?,
            widths,
            sparse,
            heads: dimension(c, &["num_attention_heads"], 8)?,
            kv_heads: dimension(c, &["num_key_value_heads"], 2)?,
            head_dim: dimension(c, &["head_dim"], 256)?,
            first_shared: match layers.saturating_sub(c.size_or(&["num_kv_shared_layers"], 15)?) {
                0 => layers,
                first => first,
            },
            activation: read::activation(c, "hidden_activation", "gelu_pytorch_tanh")?,
            bias: c.flag("attention_bias", false)?,
            dropout: c.number("attention_dropout", 0.0)?,
            layer_rows: c.size_or(&["vocab_size_per_layer_input"], 262_144)?,
            layer_width: dimension(c, &["hidden_size_per_layer_input"], 256)?,
            streams,
            active,
            scaled: c.flag("altup_correct_scale", true)?,
            rank: dimension(c, &["laurel_rank"], 64)?,
        })
    }

    pub(super) fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        scaled_embedding(g, ids, self.vocabulary)
    }

    /// What each layer gets of every token: `[batch, seq, layers, width]`.
    pub(super) fn embed_per_layer(&self, g: &mut Graph, ids: &Value) -> Value {
        let layers = self.windows.len() as u64;
        g.buffer("embed_tokens_per_layer.embed_scale", [], DType::BF16, false);
        let mut all = g.embedding("embed_tokens_per_layer", ids, self.layer_rows, layers * self.layer_width);
        all = g.scale(&all);
        g.reshape(&all, [ids.size(0), ids.size(1), layers, self.layer_width])
    }

    pub(super) fn model(&self, g: &mut Graph, embeddings: &Value, inputs: &Value) -> Value {
        for buffer in ["per_layer_projection_scale", "per_layer_input_scale"] {
            g.buffer(buffer, [], DType::BF16, false);
        }
        let inputs = self.project_inputs(g, embeddings, inputs);
        let masks = Masks::new(g, &self.windows, true);
        let mut hidden = self.spread(g, embeddings);
        let ropes = ["full_attention", "sliding_attention"].map(|kind| self.rotary(g, kind));
        let mut shared: Shared = [None, None];
        for (index, &window) in self.windows.iter().enumerate() {
            let own = g.slice(&inputs, 2, index as u64, 1);
            let own = g.squeeze(&own, 2);
            let rope = &ropes[usize::from(window.is_some())];
            hidden = g.layer("layers", index as u64, |g| {
                self.layer(g, index, &hidden, &own, rope, masks.of(window), &mut shared)
            });
        }
        hidden = self.gather(g, &hidden);
        g.norm("norm", &hidden, NORM, false)
    }

    fn project_inputs(&self, g: &mut Graph, embeddings: &Value, inputs: &Value) -> Value {
        let mut own = g.linear("per_layer_model_projection", embeddings, inputs.size(2) * inputs.size(3), false);
        {
            let scale = g.fill_like(embeddings, []);
            own = g.in_place(Binary::Mul, &own, &scale);
        }
        own = g.reshape(&own, inputs.shape());
        own = g.norm("per_layer_projection_norm", &own, NORM, false);
        let sum = g.add(&own, inputs);
        g.scale(&sum)
    }

    fn rotary(&self, g: &mut Graph, kind: &str) -> (Value, Value) {
        for buffer in ["inv_freq", "original_inv_freq"] {
            g.buffer(&format!("rotary_emb.{kind}_{buffer}"), [self.head_dim / 2], DType::F32, false);
        }
        let table = RotaryTable { dim: self.head_dim, axes: 1, doubled: true, fp32: false };
        g.rotary_table_bare(g.inputs.seq, table)
    }

    /// One stream becomes several of the same magnitude: `[streams, batch, seq, hidden]`.
    fn spread(&self, g: &mut Graph, embeddings: &Value) -> Value {
        let target = magnitude(g, embeddings);
        let mut streams = vec![embeddings.clone()];
        for index in 1..self.streams {
            let projected =
                g.linear(&format!("altup_projections.{}", index - 1), embeddings, embeddings.size(-1), false);
            streams.push(matched(g, &projected, &target));
        }
        g.stack(&streams.iter().collect::<Vec<_>>(), 0)
    }

    /// The streams back to one: their mean.
    fn gather(&self, g: &mut Graph, hidden: &Value) -> Value {
        let first = stream(g, hidden, 0);
        let target = magnitude(g, &first);
        let mut streams = vec![first];
        for index in 1..self.streams {
            let own = stream(g, hidden, index);
            let name = format!("altup_unembed_projections.{}", index - 1);
            let projected = g.linear(&name, &own, hidden.size(-1), false);
            streams.push(matched(g, &projected, &target));
        }
        let stacked = g.stack(&streams.iter().collect::<Vec<_>>(), 0);
        g.reduce(Reduction::Mean, &stacked, 0, false)
    }

    #[allow(clippy::too_many_arguments)]
    fn layer(
        &self,
        g: &mut Graph,
        index: usize,
        input: &Value,
        layer_input: &Value,
        rope: &(Value, Value),
        mask: &Value,
        shared: &mut Shared,
    ) -> Value {
        let predictions = g.module("altup", |g| self.predict(g, input));
        let active = stream(g, &predictions, self.active);
        let normed = g.norm("input_layernorm", &active, NORM, false);
        let side = g.module("laurel", |g| {
            let left = g.linear("linear_left", &normed, self.rank, false);
            let right = g.linear("linear_right", &left, normed.size(-1), false);
            drop(left);
            let right = g.norm("post_laurel_norm", &right, NORM, false);
            g.add(&normed, &right)
        });
        let mut attended = g.module("self_attn", |g| self.attention(g, index, &normed, rope, mask, shared));
        attended = g.norm("post_attention_layernorm", &attended, NORM, false);
        let gated = g.add(&active, &attended);
        let joined = {
            let sum = g.add(&gated, &side);
            g.scalar(Binary::Div, &sum)
        };
        let before = g.norm("pre_feedforward_layernorm", &joined, NORM, false);
        let after = g.module("mlp", |g| self.mlp(g, index, &before));
        let after_normed = g.norm("post_feedforward_layernorm", &after, NORM, false);
        let activated = g.add(&joined, &after_normed);
        let mut corrected = g.module("altup", |g| self.correct(g, &predictions, &activated));
        let mut first = {
            let picked = stream(g, &corrected, self.active);
            g.unary(Unary::Clone, &picked)
        };
        let width = first.size(-1);
        let scale = g.parameter("altup.correct_output_scale", [width], Role::Other);
        if self.scaled {
            let scale = g.read(scale, [width]);
            first = g.mul(&first, &scale);
        }
        first = g.linear("per_layer_input_gate", &first, self.layer_width, false);
        first = g.activation(self.activation, &first);
        first = g.mul(&first, layer_input);
        first = g.linear("per_layer_projection", &first, width, false);
        first = g.norm("post_per_layer_input_norm", &first, NORM, false);
        if self.streams > 1 {
            let slice = Op::AddToSlice { dim: 0, length: self.streams - 1 };
            corrected = g.run(slice, &[&corrected, &first], corrected.shape());
        }
        corrected
    }

    fn modalities(&self, g: &mut Graph, x: &Value) -> Value {
        g.buffer("router_input_scale", [], DType::BF16, false);
        let routed = {
            let normed = g.norm("router_norm", x, NORM, false);
            let scaled = g.scale(&normed);
            g.linear("modality_router", &scaled, self.streams, false)
        };
        let wide = g.float(&routed);
        let turned = g.unary(Unary::Tanh, &wide);
        g.type_as(&turned, x)
    }

    fn predict(&self, g: &mut Graph, hidden: &Value) -> Value {
        let (streams, batch, seq) = (self.streams, hidden.size(1), hidden.size(2));
        let active = stream(g, hidden, self.active);
        let modalities = self.modalities(g, &active);
        let mut weights = g.linear("prediction_coefs", &modalities, streams * streams, false);
        weights = g.reshape(&weights, [batch, seq, streams, streams]);
        weights = g.permute(&weights, &[0, 1, 3, 2]);
        let turned = g.permute(hidden, &[1, 2, 3, 0]);
        let mut predictions = g.matmul(&turned, &weights);
        predictions = g.permute(&predictions, &[3, 0, 1, 2]);
        predictions = g.in_place(Binary::Add, &predictions, hidden);
        g.contiguous(&predictions)
    }

    fn correct(&self, g: &mut Graph, predictions: &Value, activated: &Value) -> Value {
        let modalities = self.modalities(g, activated);
        let active = stream(g, predictions, self.active);
        let mut innovation = g.sub(activated, &active);
        innovation = g.run(Op::Repeat, &[&innovation], predictions.shape());
        let mut weights = g.linear("correction_coefs", &modalities, self.streams, false);
        weights = g.scalar(Binary::Add, &weights);
        weights = g.permute(&weights, &[2, 0, 1]);
        weights = g.unsqueeze(&weights, -1);
        let corrected = g.mul(&innovation, &weights);
        let corrected = g.in_place(Binary::Add, &corrected, predictions);
        g.contiguous(&corrected)
    }

    fn mlp(&self, g: &mut Graph, index: usize, x: &Value) -> Value {
        let width = self.widths.get(index).copied().unwrap_or(0);
        let mut gate = g.linear("gate_proj", x, width, false);
        if self.sparse.get(index).copied().unwrap_or(false) {
            // Only values well above the mean pass.
            let mean = g.reduce(Reduction::Mean, &gate, -1, true);
            let deviation = g.reduce(Reduction::Variance, &gate, -1, true);
            let spread = g.scale(&deviation);
            let cutoff = g.add(&mean, &spread);
            let above = g.sub(&gate, &cutoff);
            gate = g.unary(Unary::Relu, &above);
        }
        let activated = g.activation(self.activation, &gate);
        let up = g.linear("up_proj", x, width, false);
        let product = g.mul(&activated, &up);
        g.linear("down_proj", &product, x.size(-1), false)
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
        let sliding = usize::from(window.is_some());
        let (heads, kv_heads, dim) = (self.heads, self.kv_heads, self.head_dim);
        let cosine = g.unsqueeze(cosine, 2);
        let sine = g.unsqueeze(sine, 2);
        let mut query = g.linear("q_proj", hidden, heads.saturating_mul(dim), self.bias);
        query = g.split_last(&query, heads, dim);
        query = g.norm("q_norm", &query, NORM, false);
        query = turn(g, &query, &cosine, &sine);
        query = g.transpose(&query, 1, 2);
        let reused = if index as u64 >= self.first_shared { shared[sliding].clone() } else { None };
        let (key, value) = match reused {
            Some(both) => both,
            None => {
                let mut key = g.linear("k_proj", hidden, kv_heads.saturating_mul(dim), self.bias);
                key = g.split_last(&key, kv_heads, dim);
                key = g.norm("k_norm", &key, NORM, false);
                key = turn(g, &key, &cosine, &sine);
                key = g.transpose(&key, 1, 2);
                let mut value = g.linear("v_proj", hidden, kv_heads.saturating_mul(dim), self.bias);
                value = g.split_last(&value, kv_heads, dim);
                value = g.norm("v_norm", &value, Norm::RmsBare, false);
                value = g.transpose(&value, 1, 2);
                g.cache(attention::grouped_cache(kv_heads, dim, window), &key, &value)
            }
        };
        let own = &self.windows[..(self.first_shared as usize).min(self.windows.len())];
        if own.iter().rposition(|other| other.is_some() == window.is_some()) == Some(index) {
            shared[sliding] = Some((key.clone(), value.clone()));
        }
        let spec = Attention {
            groups: heads / kv_heads,
            causal: true,
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
}

fn stream(g: &mut Graph, x: &Value, index: u64) -> Value {
    let one = g.slice(x, 0, index, 1);
    g.squeeze(&one, 0)
}

/// `mean(x²)^0.5` over the width.
fn magnitude(g: &mut Graph, x: &Value) -> Value {
    let square = g.scalar(Binary::Pow, x);
    let mean = g.reduce(Reduction::Mean, &square, -1, true);
    g.scalar(Binary::Pow, &mean)
}

/// A projected stream brought to the magnitude of the first.
fn matched(g: &mut Graph, x: &Value, target: &Value) -> Value {
    let magnitude = {
        let square = g.scalar(Binary::Pow, x);
        let mean = g.reduce(Reduction::Mean, &square, -1, true);
        let safe = g.scalar(Binary::Max, &mean);
        g.unary(Unary::Sqrt, &safe)
    };
    let scaled = g.mul(x, target);
    g.div(&scaled, &magnitude)
}
