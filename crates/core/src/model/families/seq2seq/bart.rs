//! BART, mBART, M2M-100 with NLLB, Marian and Pegasus.

use super::stack::{Defaults, Stack, decoder_ids, finish, logits};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::encoder::{full_mask, mask_over};
use crate::model::blocks::{Encoded, read};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::families::encoders::counted_positions;
use crate::model::op::{Binary, Input, Mask, Norm, Op, ParameterId, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// BART.
pub const FAMILY: Family = Family {
    name: "BART",
    model_types: &["bart"],
    facts: Facts {
        attention: AttentionKernels::Flash,
        lora: &["q_proj", "v_proj"],
        ia3: &["q_proj", "v_proj", "fc2"],
        ia3_feedforward: &["fc2"],
        conditional_generation: Task::Seq2SeqLm,
        ..Facts::DEFAULT
    },
    build: |c, task, g| build(c, task, g, Kind::Bart),
};
/// mBART.
pub const MBART: Family = Family {
    name: "mBART",
    model_types: &["mbart"],
    facts: Facts { attention: AttentionKernels::Flash, conditional_generation: Task::Seq2SeqLm, ..Facts::DEFAULT },
    build: |c, task, g| build(c, task, g, Kind::Mbart),
};
/// M2M-100.
pub const M2M_100: Family = Family {
    name: "M2M-100",
    model_types: &["m2m_100"],
    facts: MBART.facts,
    build: |c, task, g| build(c, task, g, Kind::M2m100),
};
/// Marian (OPUS-MT).
pub const MARIAN: Family = Family {
    name: "Marian",
    model_types: &["marian"],
    facts: Facts { attention: AttentionKernels::Flash, ..Facts::DEFAULT },
    build: |c, task, g| build(c, task, g, Kind::Marian),
};
/// Pegasus.
pub const PEGASUS: Family = Family {
    name: "Pegasus",
    model_types: &["pegasus"],
    facts: MBART.facts,
    build: |c, task, g| build(c, task, g, Kind::Pegasus),
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Norms after each block.
    Bart,
    /// Norms before each block and at the end.
    Mbart,
    /// As mBART, with sinusoidal positions and no norm on the embeddings.
    M2m100,
    /// As BART, with a frozen table of positions and no norm on the embeddings.
    Marian,
    /// As mBART, with a frozen table of positions and no norm on the embeddings.
    Pegasus,
}

impl Kind {
    /// Whether norms come before each block, and one at the end.
    fn norms_first(self) -> bool {
        !matches!(self, Self::Bart | Self::Marian)
    }

    /// Whether words and positions are normalised together.
    fn norms_embeddings(self) -> bool {
        matches!(self, Self::Bart | Self::Mbart)
    }
}

struct Bart {
    kind: Kind,
    vocab: u64,
    hidden: u64,
    positions: u64,
    encoder: Stack,
    decoder: Stack,
    tied: bool,
}

impl Bart {
    fn read(c: &Config<'_>, kind: Kind) -> Result<Self, ModelError> {
        let other = kind == Kind::M2m100;
        let defaults = Defaults {
            hidden: 1024,
            layers: 12,
            heads: 16,
            width: 4096,
            activation: if other { "relu" } else { "gelu" },
            dropout: 0.1,
            attention_dropout: if other { 0.1 } else { 0.0 },
        };
        let vocab = match kind {
            Kind::M2m100 => 128_112,
            Kind::Marian => 58101,
            _ => 50265,
        };
        if kind == Kind::Marian {
            one_vocabulary(c, vocab)?;
        }
        let stack = |side: &str| {
            let mut stack = Stack::read(c, side, &defaults)?;
            stack.norm_first = kind.norms_first();
            Ok::<_, ModelError>(stack)
        };
        Ok(Self {
            kind,
            vocab: c.size_or(&["vocab_size"], vocab)?,
            hidden: read::positive(c, &["d_model"], 1024)?,
            positions: c.size_or(&["max_position_embeddings"], 1024)?,
            encoder: stack("encoder")?,
            decoder: stack("decoder")?,
            tied: c.flag("tie_word_embeddings", true)?,
        })
    }

    fn encode(&self, g: &mut Graph, table: ParameterId) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        g.module("encoder", |g| {
            let words = self.words(g, table, &ids);
            let (mut hidden, _places) = self.embeddings(g, &ids, &words, true);
            let mask = full_mask(g, &words);
            for index in 0..self.encoder.layers {
                hidden = g.layer("layers", index, |g| self.encoder.encoder_layer(g, &hidden, Some(&mask)));
            }
            self.final_norm(g, hidden)
        })
    }

    fn decode(&self, g: &mut Graph, table: ParameterId, encoded: &Encoded) -> Value {
        let ids = decoder_ids(g);
        let (batch, seq) = (ids.size(0), ids.size(1));
        g.module("decoder", |g| {
            let words = self.words(g, table, &ids);
            let mask = mask_over(g, Mask::Causal, batch, seq, g.inputs.keys(None, seq));
            let cross = mask_over(g, Mask::Full, batch, seq, encoded.seq);
            let (mut hidden, _places) = self.embeddings(g, &ids, &words, false);
            for index in 0..self.decoder.layers {
                hidden =
                    g.layer("layers", index, |g| self.decoder.decoder_layer(g, &hidden, &mask, encoded, Some(&cross)));
            }
            self.final_norm(g, hidden)
        })
    }

    /// The words, always multiplied by a scale, if only by 1.
    fn words(&self, g: &mut Graph, table: ParameterId, ids: &Value) -> Value {
        let words = g.embedding_with("embed_tokens", table, ids, self.vocab, self.hidden);
        g.scale(&words)
    }

    /// What the layers begin with, and the positions, which keep their name until the stack returns.
    fn embeddings(&self, g: &mut Graph, ids: &Value, words: &Value, encoder: bool) -> (Value, Value) {
        let places = match self.kind {
            Kind::M2m100 => self.sinusoids(g, ids),
            Kind::Marian | Kind::Pegasus => self.frozen(g, ids, encoder),
            _ => self.learned(g, ids, encoder),
        };
        let mut hidden = g.add(words, &places);
        if self.kind.norms_embeddings() {
            hidden = g.norm("layernorm_embedding", &hidden, Norm::Layer, true);
        }
        (g.dropout(&hidden, self.encoder.dropout), places)
    }

    /// Positions from 2 on: one row per sample in the encoder, one for all in the decoder.
    fn learned(&self, g: &mut Graph, ids: &Value, encoder: bool) -> Value {
        let (batch, seq) = (ids.size(0), ids.size(1));
        let mut positions = g.fill(DType::I64, [1, seq]);
        positions = match encoder {
            true => g.expand(&positions, [batch, seq]),
            false => g.scalar(Binary::Add, &positions),
        };
        positions = g.scalar(Binary::Add, &positions);
        if encoder {
            g.limit_positions(self.positions)
        } else {
            g.limit_targets(self.positions)
        }
        g.embedding("embed_positions", &positions, self.positions.saturating_add(2), self.hidden)
    }

    /// A table that is a parameter without a gradient, read for one sample.
    fn frozen(&self, g: &mut Graph, ids: &Value, encoder: bool) -> Value {
        g.without_grad(|g| {
            let mut positions = g.fill(DType::I64, [ids.size(1)]);
            if !encoder {
                g.limit_targets(self.positions);
                positions = g.scalar(Binary::Add, &positions);
            }
            let table = g.parameter("embed_positions.weight", [self.positions, self.hidden], Role::Frozen);
            g.embedding_with("embed_positions", table, &positions, self.positions, self.hidden)
        })
    }

    /// A fixed table, a row for each token that is no padding.
    fn sinusoids(&self, g: &mut Graph, ids: &Value) -> Value {
        let (batch, seq) = (ids.size(0), ids.size(1));
        let rows = self.positions.saturating_add(2);
        g.without_grad(|g| {
            g.module("embed_positions", |g| {
                let table = g.model_buffer("weights", [rows, self.hidden], false);
                let positions = counted_positions(g, ids);
                let flat = g.view(&positions, [batch.saturating_mul(seq)]);
                let picked = g.index(&table, &flat);
                g.view(&picked, [batch, seq, self.hidden])
            })
        })
    }

    fn final_norm(&self, g: &mut Graph, hidden: Value) -> Value {
        if self.kind.norms_first() { g.norm("layer_norm", &hidden, Norm::Layer, true) } else { hidden }
    }

    fn model(&self, g: &mut Graph) -> (Value, Encoded, ParameterId) {
        let table = g.parameter("shared.weight", [self.vocab, self.hidden], Role::Embedding);
        let encoded = Encoded::run(g, |g| self.encode(g, table));
        let hidden = self.decode(g, table, &encoded);
        (hidden, encoded, table)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph, kind: Kind) -> Result<(), ModelError> {
    let bart = Bart::read(c, kind)?;
    // All others switch the cache off when labels are given.
    if kind == Kind::M2m100 {
        g.caches_in_training();
    }
    if task == Task::Base {
        let (hidden, encoded, _) = bart.model(g);
        let outputs: Vec<&Value> = std::iter::once(&hidden).chain(&encoded.states).collect();
        g.run(Op::Return, &outputs, []);
        return Ok(());
    }
    let (hidden, encoded, table) = g.module("model", |g| bart.model(g));
    let mut scores = logits(g, "lm_head", &hidden, bart.vocab, bart.tied.then_some(table));
    if kind != Kind::M2m100 {
        let bias = g.model_buffer("final_logits_bias", [1, bart.vocab], true);
        scores = g.add(&scores, &bias);
    }
    finish(g, &scores, &encoded);
    Ok(())
}

/// Refuses a Marian whose decoder has words of its own.
fn one_vocabulary(c: &Config<'_>, default: u64) -> Result<(), ModelError> {
    if !c.flag("share_encoder_decoder_embeddings", true)? {
        return Err(c.refuse("share_encoder_decoder_embeddings", "true: tables of their own are not supported"));
    }
    let vocab = c.size_or(&["vocab_size"], default)?;
    if c.size_or(&["decoder_vocab_size"], vocab)? != vocab {
        return Err(c.refuse("decoder_vocab_size", "the vocab_size"));
    }
    Ok(())
}
