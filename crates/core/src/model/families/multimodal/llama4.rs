//! Llama 4 (Scout, Maverick): a vision tower with rotary as complex numbers, patches shuffled, the text model with its
//! head as one module.

use super::parts::{dimension, patches, placeholder_mask, resized_pixels, tower};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{EncoderAttention, attention, causal_lm_head, mlp};
use crate::model::facts::{Facts, Liger};
use crate::model::families::mixtures::llama4_text::Llama4Text;
use crate::model::families::vision::Patches;
use crate::model::op::{Activation, EagerStyle, Input, Norm, Op, Role, Rotary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Llama 4.
pub const FAMILY: Family = Family {
    name: "Llama 4",
    model_types: &["llama4"],
    facts: Facts {
        liger: Liger::NotSimulated,
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "v_proj", "down_proj"],
        ia3_feedforward: &["down_proj"],
        tasks: super::ALSO_CAUSAL,
        ..Facts::DEFAULT
    },
    build,
};

struct Vision {
    patches: Patches,
    hidden: u64,
    layers: u64,
    width: u64,
    attention: EncoderAttention,
    /// Patches on each side of the square that becomes one token.
    shrink: u64,
    /// Widths of the adapter.
    adapter: [u64; 2],
    adapter_dropout: f64,
}

impl Vision {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size"], 768)?;
        let heads = dimension(c, &["num_attention_heads"], 16)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "o_proj"]);
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.eager = EagerStyle::Fp32Softmax;
        let ratio = c.number("pixel_shuffle_ratio", 0.5)?;
        if !(0.01..=1.0).contains(&ratio) {
            return Err(c.refuse("pixel_shuffle_ratio", "a ratio between 0.01 and 1"));
        }
        Ok(Self {
            patches: patches(c, 448, 14)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 34)?,
            width: c.size_or(&["intermediate_size"], 5632)?,
            attention,
            shrink: (1.0 / ratio) as u64,
            adapter: [dimension(c, &["projector_input_dim"], 4096)?, dimension(c, &["projector_output_dim"], 4096)?],
            adapter_dropout: c.number("projector_dropout", 0.0)?,
        })
    }

    /// `[tiles, tokens, adapter]`.
    fn model(&self, g: &mut Graph) -> Value {
        let pixels = resized_pixels(g, &self.patches);
        let mut x = self.embed(g, &pixels);
        x = g.norm("layernorm_pre", &x, Norm::Layer, true);
        x = g.view(&x, [pixels.size(0), x.size(2), self.hidden]);
        let rope = self.rotary(g);
        g.module("model", |g| {
            for index in 0..self.layers {
                x = g.layer("layers", index, |g| self.layer(g, &x, &rope));
            }
        });
        x = g.norm("layernorm_post", &x, Norm::Layer, true);
        x = g.slice(&x, 1, 0, self.patches.count());
        g.module("vision_adapter", |g| self.adapt(g, &x))
    }

    fn embed(&self, g: &mut Graph, pixels: &Value) -> Value {
        let (tiles, count) = (pixels.size(0), self.patches.count());
        let [height, width] = self.patches.patch;
        let class = g.parameter("class_embedding", [self.hidden], Role::Other);
        let table = g.parameter("positional_embedding_vlm", [count.saturating_add(1), self.hidden], Role::Other);
        // `unfold` copies every patch into a column.
        let mut x = g.run(Op::Repeat, &[pixels], [tiles, self.patches.channels * height * width, count]);
        x = g.permute(&x, &[0, 2, 1]);
        x = g.linear("patch_embedding.linear", &x, self.hidden, false);
        let class = g.read(class, [self.hidden]);
        let class = g.expand(&class, [tiles, 1, self.hidden]);
        x = g.cat(&[&x, &class], 1);
        x = g.reshape(&x, [tiles, 1, count + 1, self.hidden]);
        let table = g.read(table, [count + 1, self.hidden]);
        g.add(&x, &table)
    }

    /// One complex number per pair of a head: a buffer, read as two tables of fp32.
    fn rotary(&self, g: &mut Graph) -> (Value, Value) {
        let (rows, half) = (self.patches.count() + 1, self.attention.head_dim / 2);
        g.buffer("rotary_embedding.freqs_ci", [rows, 1, half], DType::C64, false);
        let [cosine, sine] = [(); 2].map(|()| g.run(Op::Buffer(DType::F32), &[], [1, rows, half]));
        (cosine, sine)
    }

    fn layer(&self, g: &mut Graph, input: &Value, rope: &(Value, Value)) -> Value {
        let mut hidden = g.norm("input_layernorm", input, Norm::Layer, true);
        hidden = g.module("self_attn", |g| self.attend(g, &hidden, rope));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, Norm::Layer, true);
        hidden = g.module("mlp", |g| mlp(g, &hidden, ["fc1", "fc2"], self.width, Activation::Gelu, true));
        g.add(&residual, &hidden)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value, (cosine, sine): &(Value, Value)) -> Value {
        let own = &self.attention;
        let [mut query, mut key, mut value] = [0, 1, 2].map(|which| {
            let x = g.linear(own.names[which], hidden, own.heads.saturating_mul(own.head_dim), true);
            g.split_last(&x, own.heads, own.head_dim)
        });
        (query, key) = attention::rotate_whole(g, Rotary::Complex, &query, &key, cosine, sine);
        query = g.transpose(&query, 1, 2);
        key = g.transpose(&key, 1, 2);
        value = g.transpose(&value, 1, 2);
        let attended = attention::attend(g, own.spec(), &query, &key, &value, None);
        let joined = attention::join_heads(g, attended);
        g.linear("o_proj", &joined, self.hidden, true)
    }

    /// Squares of patches become channels, then two linears with a gelu after each.
    fn adapt(&self, g: &mut Graph, x: &Value) -> Value {
        let (tiles, count, channels, shrink) = (x.size(0), x.size(1), x.size(2), self.shrink);
        let side = count.isqrt();
        if side * side != count || !side.is_multiple_of(shrink) {
            g.fail(format!("{count} patches cannot be shuffled by {shrink}"));
            return x.clone();
        }
        let mut x = g.view(x, [tiles, side, side / shrink, channels * shrink]);
        x = g.permute(&x, &[0, 2, 1, 3]);
        x = g.contiguous(&x);
        x = g.view(&x, [tiles, side / shrink, side / shrink, channels * shrink * shrink]);
        x = g.permute(&x, &[0, 2, 1, 3]);
        x = g.contiguous(&x);
        x = g.view(&x, [tiles, count / (shrink * shrink), channels * shrink * shrink]);
        g.module("mlp", |g| {
            x = g.linear("fc1", &x, self.adapter[0], false);
            x = g.activation(Activation::Gelu, &x);
            x = g.dropout(&x, self.adapter_dropout);
            x = g.linear("fc2", &x, self.adapter[1], false);
            g.activation(Activation::Gelu, &x)
        })
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let text = Llama4Text::read(&c.section("text_config"))?;
    let frame = &text.frame;
    if task == Task::CausalLm {
        let hidden = g.module("model", |g| text.model(g, None));
        let tied = if frame.tied { g.find("model.embed_tokens.weight") } else { None };
        causal_lm_head(g, hidden, frame.vocab, tied, false);
        return Ok(());
    }
    let vision = Vision::read(&c.section("vision_config"))?;
    let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
    let mut embeddings = g.embedding("language_model.model.embed_tokens", &ids, frame.vocab, frame.hidden);
    let given = g.inputs.images.is_some();
    let features = tower(g, given, |g| {
        let seen = g.module("vision_model", |g| vision.model(g));
        let flat = g.view(&seen, [seen.size(0) * seen.size(1), seen.size(2)]);
        let projected = g.linear("multi_modal_projector.linear_1", &flat, frame.hidden, false);
        (seen, projected)
    });
    let features = features.map(|(seen, projected)| {
        let projected = g.type_as(&projected, &embeddings);
        let mask = placeholder_mask(g, &ids);
        embeddings = g.masked_scatter(&embeddings, &mask, &projected);
        g.run(Op::Return, &[&seen], []);
        (seen, projected)
    });
    g.module("language_model", |g| {
        let hidden = g.module("model", |g| text.model(g, Some(embeddings.clone())));
        let tied = if frame.tied { g.find("language_model.model.embed_tokens.weight") } else { None };
        causal_lm_head(g, hidden, frame.vocab, tied, false);
    });
    drop(features);
    Ok(())
}
