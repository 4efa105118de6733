//! Whisper and Distil-Whisper.

use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::encoder::mask_over;
use crate::model::blocks::{Encoded, read};
use crate::model::facts::Facts;
use crate::model::families::seq2seq::stack::{Defaults, Stack, decoder_ids, finish, logits};
use crate::model::op::{Activation, Binary, Convolution, Input, Mask, Norm, Op, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Whisper.
pub const FAMILY: Family = Family {
    name: "Whisper",
    model_types: &["whisper"],
    facts: Facts {
        tasks: Some(&[Task::SpeechSeq2Seq, Task::Base]),
        conditional_generation: Task::SpeechSeq2Seq,
        ..Facts::DEFAULT
    },
    build,
};

const DEFAULTS: Defaults = Defaults {
    hidden: 384,
    layers: 4,
    heads: 6,
    width: 1536,
    activation: "gelu",
    dropout: 0.0,
    attention_dropout: 0.0,
};

/// `WhisperEncoder`: two convolutions over the spectrogram, sinusoidal positions, layers.
#[derive(Debug, Clone)]
pub(crate) struct WhisperEncoder {
    pub(crate) mel_bins: u64,
    pub(crate) hidden: u64,
    pub(crate) positions: u64,
    pub(crate) stack: Stack,
}

impl WhisperEncoder {
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            mel_bins: read::positive(c, &["num_mel_bins"], 80)?,
            hidden: read::positive(c, &["d_model", "hidden_size"], 384)?,
            positions: c.size_or(&["max_source_positions"], 1500)?,
            stack: whisper_stack(c, "encoder")?,
        })
    }

    /// The spectrograms of the batch, of the model's own length unless another is given.
    pub(crate) fn input(&self, g: &mut Graph) -> Value {
        let frames = g.inputs.audio_frames.unwrap_or(2 * self.positions);
        g.input(Input::Audio, [g.inputs.batch, self.mel_bins, frames])
    }

    /// Runs it in the current module on `[batch, mel bins, frames]`.
    pub(crate) fn model(&self, g: &mut Graph, features: &Value) -> Value {
        let (frames, whole) = (features.size(-1), self.positions.saturating_mul(2));
        if frames != whole {
            g.fail(format!("{frames} audio frames, and its positions are those of {whole}; pad or cut to that"));
        }
        let spec = |stride| Convolution { stride: [stride, 1, 1], padding: [1, 0, 0], groups: 1, transposed: false };
        let mut embeddings = {
            let x = g.convolution("conv1", features, self.hidden, &[3], spec(1), true);
            g.activation(Activation::Gelu, &x)
        };
        embeddings = {
            let x = g.convolution("conv2", &embeddings, self.hidden, &[3], spec(2), true);
            g.activation(Activation::Gelu, &x)
        };
        embeddings = g.permute(&embeddings, &[0, 2, 1]);
        let ids = g.fill(DType::I64, [self.positions]);
        let table = g.parameter("embed_positions.weight", [self.positions, self.hidden], Role::Frozen);
        let mut hidden = {
            let places = g.embedding_with("embed_positions", table, &ids, self.positions, self.hidden);
            g.add(&embeddings, &places)
        };
        hidden = g.dropout(&hidden, self.stack.dropout);
        for index in 0..self.stack.layers {
            hidden = g.layer("layers", index, |g| self.stack.encoder_layer(g, &hidden, None));
        }
        g.norm("layer_norm", &hidden, Norm::Layer, true)
    }
}

/// Whisper's attention scales queries itself, makes everything dense, and has no bias on keys.
fn whisper_stack(c: &Config<'_>, side: &str) -> Result<Stack, ModelError> {
    let mut stack = Stack::read(c, side, &DEFAULTS)?;
    stack.attention.dense = true;
    stack.attention.bias = [true, false, true, true];
    Ok(stack)
}

struct Whisper {
    vocab: u64,
    hidden: u64,
    positions: u64,
    encoder: WhisperEncoder,
    decoder: Stack,
    tied: bool,
}

impl Whisper {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let encoder = WhisperEncoder::read(c)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 51865)?,
            hidden: encoder.hidden,
            positions: c.size_or(&["max_target_positions"], 448)?,
            encoder,
            decoder: whisper_stack(c, "decoder")?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn model(&self, g: &mut Graph) -> (Value, Encoded) {
        let encoded = Encoded::run(g, |g| {
            let features = self.encoder.input(g);
            g.module("encoder", |g| self.encoder.model(g, &features))
        });
        let hidden = g.module("decoder", |g| self.decode(g, &encoded));
        (hidden, encoded)
    }

    fn decode(&self, g: &mut Graph, encoded: &Encoded) -> Value {
        let ids = decoder_ids(g);
        let (batch, seq) = (ids.size(0), ids.size(1));
        let words = g.embedding("embed_tokens", &ids, self.vocab, self.hidden);
        let mut positions = g.fill(DType::I64, [1, seq]);
        positions = g.scalar(Binary::Add, &positions);
        positions = g.run(Op::Repeat, &[&positions], [batch, seq]);
        let sizes = [self.positions, self.hidden];
        let table = g.parameter("embed_positions.weight", sizes, Role::Embedding);
        let table = g.read(table, sizes);
        g.limit_targets(self.positions);
        let places = g.index(&table, &positions);
        let mut hidden = g.add(&words, &places);
        hidden = g.dropout(&hidden, self.decoder.dropout);
        let mask = mask_over(g, Mask::Causal, batch, seq, g.inputs.keys(None, seq));
        for index in 0..self.decoder.layers {
            hidden = g.layer("layers", index, |g| self.decoder.decoder_layer(g, &hidden, &mask, encoded, None));
        }
        g.norm("layer_norm", &hidden, Norm::Layer, true)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let whisper = Whisper::read(c)?;
    g.caches_in_training();
    if task == Task::Base {
        let (hidden, encoded) = whisper.model(g);
        let outputs: Vec<&Value> = std::iter::once(&hidden).chain(&encoded.states).collect();
        g.run(Op::Return, &outputs, []);
        return Ok(());
    }
    let (hidden, encoded) = g.module("model", |g| whisper.model(g));
    let table = if whisper.tied { g.find("model.decoder.embed_tokens.weight") } else { None };
    let logits = logits(g, "proj_out", &hidden, whisper.vocab, table);
    finish(g, &logits, &encoded);
    Ok(())
}
