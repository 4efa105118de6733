//! Voxtral: Whisper's encoder, four frames joined into one token, Llama.

use serde_json::json;

use super::parts::{Host, dimension, text_model, text_type, two_linears, with_defaults};
use crate::model::Family;
use crate::model::blocks::{EncoderAttention, attention, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, EagerStyle, Input, Norm, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Voxtral.
pub const FAMILY: Family = Family {
    name: "Voxtral",
    model_types: &["voxtral"],
    facts: Facts {
        tasks: Some(&[Task::MultimodalLm, Task::Base]),
        conditional_generation: Task::MultimodalLm,
        also: &[Task::Seq2SeqLm, Task::SpeechSeq2Seq],
        ..Facts::DEFAULT
    },
    build,
};

struct Encoder {
    hidden: u64,
    layers: u64,
    width: u64,
    activation: Activation,
    mels: u64,
    positions: u64,
    attention: EncoderAttention,
}

impl Encoder {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = dimension(c, &["hidden_size", "d_model"], 1280)?;
        let heads = dimension(c, &["num_attention_heads", "encoder_attention_heads"], 20)?;
        let mut attention = EncoderAttention::new(heads, hidden / heads, ["q_proj", "k_proj", "v_proj", "out_proj"]);
        attention.bias = [true, false, true, true];
        attention.dropout = c.number("attention_dropout", 0.0)?;
        attention.eager = EagerStyle::PlainSoftmax;
        Ok(Self {
            hidden,
            layers: c.layers(&["num_hidden_layers", "encoder_layers"], 32)?,
            width: dimension(c, &["intermediate_size", "encoder_ffn_dim"], 5120)?,
            activation: read::activation(c, "activation_function", "gelu")?,
            mels: dimension(c, &["num_mel_bins"], 128)?,
            positions: dimension(c, &["max_source_positions"], 1500)?,
            attention,
        })
    }

    /// `[clips, positions, hidden]`; a clip always has as many frames as the encoder has room for.
    fn model(&self, g: &mut Graph) -> Value {
        let frames = self.positions.saturating_mul(2);
        let clips = g.inputs.audio_frames.map_or(1, |given| given.div_ceil(frames).max(1));
        let clips = clips.saturating_mul(g.inputs.batch.max(1));
        let sound = g.input(Input::Audio, [clips, self.mels, frames]);
        let sound = g.to_model_type(&sound);
        let spec = |stride| Convolution { stride: [stride, 1, 1], padding: [1, 0, 0], groups: 1, transposed: false };
        let mut x = g.convolution("conv1", &sound, self.hidden, &[3], spec(1), true);
        x = g.activation(Activation::Gelu, &x);
        x = g.convolution("conv2", &x, self.hidden, &[3], spec(2), true);
        x = g.activation(Activation::Gelu, &x);
        x = g.permute(&x, &[0, 2, 1]);
        let shape = [self.positions, self.hidden];
        let positions = g.parameter("embed_positions.weight", shape, Role::Embedding);
        let positions = g.read(positions, shape);
        let mut hidden = g.add(&x, &positions);
        hidden = g.type_as(&hidden, &x);
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden));
        }
        g.norm("layer_norm", &hidden, Norm::Layer, true)
    }

    fn layer(&self, g: &mut Graph, input: &Value) -> Value {
        let mut hidden = g.norm("self_attn_layer_norm", input, Norm::Layer, true);
        hidden = g.module("self_attn", |g| self.attend(g, &hidden));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("final_layer_norm", &hidden, Norm::Layer, true);
        hidden = g.linear("fc1", &hidden, self.width, true);
        hidden = g.activation(self.activation, &hidden);
        hidden = g.linear("fc2", &hidden, self.hidden, true);
        g.add(&residual, &hidden)
    }

    fn attend(&self, g: &mut Graph, hidden: &Value) -> Value {
        let [query, key, value] = [0, 1, 2].map(|which| {
            let mut x = g.linear(self.attention.names[which], hidden, self.hidden, self.attention.bias[which]);
            if which == 0 {
                x = g.scale(&x);
            }
            x = attention::split_heads(g, x, self.attention.heads, self.attention.head_dim);
            g.contiguous(&x)
        });
        let attended = attention::attend(g, self.attention.spec(), &query, &key, &value, None);
        let joined = attention::join_heads(g, attended);
        g.linear("out_proj", &joined, self.hidden, true)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let encoder = Encoder::read(&c.section("audio_config"))?;
    let text = with_defaults(
        &c.section("text_config"),
        json!({
            "vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
            "num_key_value_heads": 8, "head_dim": 128
        }),
    );
    let text = text_model(&Config::new(&text)?, text_type(c, "llama"))?;
    let activation = read::activation(c, "projector_hidden_act", "gelu")?;
    let width = text.vocabulary().width;
    let host = Host { text: text.as_ref(), module: "language_model", tied: false };
    let given = g.inputs.audio_frames.is_some();
    host.run(g, task, given, |g| {
        let heard = g.module("audio_tower", |g| encoder.model(g));
        // Neighbouring frames are read as one long row, as wide as the encoder's MLP.
        let elements = heard.shape().elements();
        let rows = g.reshape(&heard, [elements / encoder.width, encoder.width]);
        g.module("multi_modal_projector", |g| two_linears(g, &rows, width, activation, false))
    });
    Ok(())
}
