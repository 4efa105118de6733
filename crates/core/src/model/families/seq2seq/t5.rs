//! T5, T5 1.1, Flan-T5, mT5 and UMT5: relative position biases, RMSNorm, no biases in linears.

use super::stack::{decoder_ids, finish, logits};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::attention::join_heads;
use crate::model::blocks::encoder::{full_mask, mask_over};
use crate::model::blocks::{Encoded, EncoderAttention, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Input, Mask, Norm, Op, ParameterId, Role, Unary};
use crate::model::{Config, Graph, ModelError, Shape, Task, Value};

/// T5.
pub const FAMILY: Family = Family {
    name: "T5",
    model_types: &["t5"],
    facts: Facts {
        lora: &["q", "v"],
        ia3: &["k", "v", "wo"],
        ia3_feedforward: &["wo"],
        conditional_generation: Task::Seq2SeqLm,
        ..Facts::DEFAULT
    },
    build,
};

/// mT5.
pub const MT5: Family = Family {
    name: "mT5",
    model_types: &["mt5"],
    facts: Facts { ia3: &["k", "v", "wi_1"], ia3_feedforward: &[], ..FAMILY.facts },
    ..FAMILY
};

/// UMT5.
pub const UMT5: Family = Family {
    name: "UMT5",
    model_types: &["umt5"],
    facts: Facts { conditional_generation: Task::Seq2SeqLm, ..Facts::DEFAULT },
    ..FAMILY
};

struct T5 {
    vocab: u64,
    hidden: u64,
    layers: u64,
    decoder_layers: u64,
    width: u64,
    buckets: u64,
    gated: bool,
    activation: Activation,
    dropout: f64,
    attention: EncoderAttention,
    tied: bool,
    /// Whether every layer has biases of its own (UMT5).
    own_biases: bool,
}

/// What the layers of a stack hand on to each other.
struct Layers<'a> {
    mask: Value,
    encoded: Option<(&'a Encoded, Value)>,
    bias: Option<Value>,
    cross_bias: Option<Value>,
}

impl T5 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let own_biases = c.model_type() == "umt5";
        let multilingual = c.model_type() == "mt5" || own_biases;
        let pick = |plain: u64, other: u64| if multilingual { other } else { plain };
        let heads = read::positive(c, &["num_heads", "num_attention_heads"], pick(8, 6))?;
        let head_dim = c.size_or(&["d_kv", "head_dim"], 64)?;
        let dropout = c.number("dropout_rate", 0.1)?;
        let mut attention = EncoderAttention::new(heads, head_dim, ["q", "k", "v", "o"]);
        attention.bias = [false; 4];
        attention.dropout = dropout;
        let layers = c.layers(&["num_layers", "num_hidden_layers"], pick(6, 8))?;
        let kind = c.str_or("feed_forward_proj", if multilingual { "gated-gelu" } else { "relu" });
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], pick(32128, 250_112))?,
            hidden: read::positive(c, &["d_model", "hidden_size"], 512)?,
            layers,
            decoder_layers: c.layers(&["num_decoder_layers"], layers)?,
            width: c.size_or(&["d_ff"], pick(2048, 1024))?,
            buckets: c.size_or(&["relative_attention_num_buckets"], 32)?,
            gated: kind.starts_with("gated"),
            activation: match kind {
                "gated-gelu" => Activation::GeluNew,
                "relu" => Activation::Relu,
                "gated-silu" | "silu" => Activation::Silu,
                "gelu" => Activation::Gelu,
                "gelu_new" | "gated-gelu_new" => Activation::GeluNew,
                _ => return Err(c.refuse("feed_forward_proj", "relu, gelu, silu, gated-gelu or gated-silu")),
            },
            dropout,
            attention,
            // Its config class ties whatever the file says.
            tied: own_biases || c.flag("tie_word_embeddings", true)?,
            own_biases,
        })
    }

    fn encoder(&self, g: &mut Graph, table: ParameterId) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        g.module("encoder", |g| {
            let embeddings = g.embedding_with("embed_tokens", table, &ids, self.vocab, self.hidden);
            let mask = full_mask(g, &embeddings);
            self.stack(g, &embeddings, Layers { mask, encoded: None, bias: None, cross_bias: None })
        })
    }

    fn decoder(&self, g: &mut Graph, table: ParameterId, encoded: &Encoded) -> Value {
        let ids = decoder_ids(g);
        let (batch, seq) = (ids.size(0), ids.size(1));
        g.module("decoder", |g| {
            let embeddings = g.embedding_with("embed_tokens", table, &ids, self.vocab, self.hidden);
            let mask = mask_over(g, Mask::Causal, batch, seq, g.inputs.keys(None, seq));
            let cross = mask_over(g, Mask::Full, batch, seq, encoded.seq);
            self.stack(g, &embeddings, Layers { mask, encoded: Some((encoded, cross)), bias: None, cross_bias: None })
        })
    }

    fn stack(&self, g: &mut Graph, embeddings: &Value, mut layers: Layers<'_>) -> Value {
        let count = if layers.encoded.is_some() { self.decoder_layers } else { self.layers };
        let mut hidden = g.dropout(embeddings, self.dropout);
        for index in 0..count {
            hidden = g.layer("block", index, |g| self.layer(g, &hidden, &mut layers));
        }
        hidden = g.norm("final_layer_norm", &hidden, Norm::RmsT5, false);
        g.dropout(&hidden, self.dropout)
    }

    fn layer(&self, g: &mut Graph, input: &Value, layers: &mut Layers<'_>) -> Value {
        let causal = layers.encoded.is_some();
        let mut hidden = g.module("layer.0", |g| {
            let normed = g.norm("layer_norm", input, Norm::RmsT5, false);
            let attended = g.module("SelfAttention", |g| {
                let query = self.attention.project(g, &normed, 0);
                let (key, value) = match causal {
                    true => self.attention.cached_pair(g, &normed),
                    false => (self.attention.project(g, &normed, 1), self.attention.project(g, &normed, 2)),
                };
                let bias = match layers.bias.take() {
                    Some(bias) => bias,
                    None => self.position_bias(g, query.size(2), key.size(2), causal),
                };
                let bias = layers.bias.insert(bias);
                let attended = self.attend(g, [&query, &key, &value, bias, &layers.mask], causal);
                layers.bias.take_if(|_| self.own_biases);
                attended
            });
            self.add_dropped(g, input, &attended)
        });
        if let Some((encoded, mask)) = &layers.encoded {
            hidden = g.module("layer.1", |g| {
                let normed = g.norm("layer_norm", &hidden, Norm::RmsT5, false);
                let attended = g.module("EncDecAttention", |g| {
                    let query = self.attention.project(g, &normed, 0);
                    let (key, value) = self.attention.cross_pair(g, &normed, encoded);
                    let bias = layers.cross_bias.take().unwrap_or_else(|| {
                        let sizes = [1, self.attention.heads, query.size(2), key.size(2)];
                        match self.own_biases {
                            true => g.fill_like(&query, sizes),
                            false => g.run(Op::ZeroBias, &[&query], sizes),
                        }
                    });
                    let bias = layers.cross_bias.insert(bias);
                    let attended = self.attend(g, [&query, &key, &value, bias, mask], false);
                    layers.cross_bias.take_if(|_| self.own_biases);
                    attended
                });
                self.add_dropped(g, &hidden, &attended)
            });
        }
        g.module(if causal { "layer.2" } else { "layer.1" }, |g| {
            let mut forwarded = g.norm("layer_norm", &hidden, Norm::RmsT5, false);
            forwarded = g.module("DenseReluDense", |g| self.feed_forward(g, &forwarded));
            self.add_dropped(g, &hidden, &forwarded)
        })
    }

    /// The residual; in fp16 infinities are clamped.
    fn add_dropped(&self, g: &mut Graph, input: &Value, x: &Value) -> Value {
        let mut sum = {
            let dropped = g.dropout(x, self.dropout);
            g.add(input, &dropped)
        };
        sum = g.unary(Unary::ClampFp16, &sum);
        sum
    }

    fn attend(&self, g: &mut Graph, inputs: [&Value; 5], causal: bool) -> Value {
        let mut spec = self.attention.spec();
        spec.causal = causal;
        let (query, value) = (inputs[0], inputs[2]);
        let shape = Shape::from([query.size(0), query.size(2), query.size(1), value.size(-1)]);
        let attended = g.run(Op::BiasedAttention(spec), &inputs, shape);
        let context = join_heads(g, attended);
        g.linear("o", &context, self.hidden, false)
    }

    /// One bias per head and bucket of distance, made by the first layer: `[1, heads, queries, keys]`.
    fn position_bias(&self, g: &mut Graph, queries: u64, keys: u64, causal: bool) -> Value {
        let distance = {
            let mut from = g.fill(DType::I64, [queries, 1]);
            from = g.scalar(Binary::Add, &from);
            let to = g.fill(DType::I64, [1, keys]);
            g.sub(&to, &from)
        };
        let buckets = bucketed(g, &distance, causal);
        let mut bias = g.embedding("relative_attention_bias", &buckets, self.buckets, self.attention.heads);
        bias = g.permute(&bias, &[2, 0, 1]);
        g.unsqueeze(&bias, 0)
    }

    fn feed_forward(&self, g: &mut Graph, x: &Value) -> Value {
        if self.gated {
            let gate = {
                let gate = g.linear("wi_0", x, self.width, false);
                g.activation(self.activation, &gate)
            };
            let linear = g.linear("wi_1", x, self.width, false);
            let product = g.mul(&gate, &linear);
            // Both names stay until the function ends.
            return self.narrow(g, product);
        }
        let mut wide = g.linear("wi", x, self.width, false);
        wide = g.activation(self.activation, &wide);
        self.narrow(g, wide)
    }

    fn narrow(&self, g: &mut Graph, mut wide: Value) -> Value {
        wide = g.dropout(&wide, self.dropout);
        // `wo` may be kept in fp32 for accuracy: its input is cast to the type of its weight, whatever autocast does next.
        wide = g.to_model_type(&wide);
        g.linear("wo", &wide, self.hidden, false)
    }
}

/// Distances in buckets: exact up to half of them, logarithmic beyond.
fn bucketed(g: &mut Graph, distance: &Value, causal: bool) -> Value {
    let (start, distance) = if causal {
        let zeros = g.fill_like(distance, distance.shape());
        let least = g.binary(Binary::Min, distance, &zeros);
        drop(zeros);
        (None, g.unary(Unary::Neg, &least))
    } else {
        let start = {
            let mut start = g.compare(distance);
            start = g.to(&start, DType::I64);
            start = g.scale(&start);
            g.scalar(Binary::Add, &start)
        };
        (Some(start), g.unary(Unary::Abs, distance))
    };
    let small = g.compare(&distance);
    let mut large = {
        let mut large = g.float(&distance);
        large = g.scalar(Binary::Div, &large);
        large = g.unary(Unary::Log, &large);
        large = g.scalar(Binary::Div, &large);
        large = g.scale(&large);
        large = g.to(&large, DType::I64);
        g.scalar(Binary::Add, &large)
    };
    large = {
        let last = g.fill_like(&large, large.shape());
        g.binary(Binary::Min, &large, &last)
    };
    let chosen = g.run(Op::Where, &[&small, &distance, &large], distance.shape());
    match start {
        Some(start) => g.in_place(Binary::Add, &start, &chosen),
        None => g.scalar(Binary::Add, &chosen),
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let t5 = T5::read(c)?;
    g.caches_in_training();
    let table = g.parameter("shared.weight", [t5.vocab, t5.hidden], Role::Embedding);
    if c.strings("architectures")?.is_some_and(|names| names.iter().any(|name| name.ends_with("T5EncoderModel"))) {
        let states = t5.encoder(g, table);
        g.run(Op::Return, &[&states], []);
        return Ok(());
    }
    let encoded = Encoded::run(g, |g| t5.encoder(g, table));
    let mut hidden = t5.decoder(g, table, &encoded);
    if task == Task::Base {
        let outputs: Vec<&Value> = std::iter::once(&hidden).chain(&encoded.states).collect();
        g.run(Op::Return, &outputs, []);
        return Ok(());
    }
    // Untied heads (T5 1.1) go with unscaled states.
    if t5.tied {
        hidden = g.scale(&hidden);
    }
    let logits = logits(g, "lm_head", &hidden, t5.vocab, t5.tied.then_some(table));
    finish(g, &logits, &encoded);
    Ok(())
}
