//! What every decoder here offers, alone and inside a multimodal model.

use crate::dtype::DType;
use crate::model::blocks::causal::scores;
use crate::model::blocks::{SelfAttention, gated_mlp, head, read};
use crate::model::families::heads::inside_answers;
use crate::model::op::{Activation, Input, Loss, Norm, Op, RotaryTable};
use crate::model::{Breaks, Config, Graph, ModelError, Task, Value};

/// The token table, and whether the head shares it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vocabulary {
    /// Tokens.
    pub rows: u64,
    /// Width of the model.
    pub width: u64,
    /// Whether the head is the same matrix.
    pub tied: bool,
}

impl Vocabulary {
    /// Reads it; what is absent is the class default: tokens, width, tied or not.
    pub(crate) fn read(c: &Config<'_>, rows: u64, width: u64, tied: bool) -> Result<Self, ModelError> {
        Ok(Self {
            rows: c.size_or(&["vocab_size"], rows)?,
            width: read::positive(c, &["hidden_size", "n_embd", "d_model"], width)?,
            tied: c.flag("tie_word_embeddings", tied)?,
        })
    }
}

/// A text model: everything runs inside the current module, the head excepted.
pub(crate) trait Decoder {
    /// The token table.
    fn vocabulary(&self) -> Vocabulary;

    /// Token ids to embeddings.
    fn embed(&self, g: &mut Graph, ids: &Value) -> Value {
        let table = self.vocabulary();
        g.embedding("embed_tokens", ids, table.rows, table.width)
    }

    /// Embeddings `[batch, seq, hidden]` through all layers and the last norm.
    fn model(&self, g: &mut Graph, embeddings: Value) -> Value;

    /// Whether the head has a bias.
    fn head_bias(&self) -> bool {
        false
    }

    /// What is done to the logits before the loss.
    fn finish_logits(&self, _g: &mut Graph, logits: Value) -> Value {
        logits
    }
}

/// The classes transformers makes of a decoder: bare, with a classifier, or with a language head.
pub(crate) fn build(c: &Config<'_>, task: Task, g: &mut Graph, decoder: &dyn Decoder) -> Result<(), ModelError> {
    if read::follows_length(c) {
        g.breaks = Breaks::Rotary;
    }
    if classify(c, task, g, |g| from_tokens(g, decoder))? {
        return Ok(());
    }
    if task == Task::Base {
        let hidden = from_tokens(g, decoder);
        g.run(Op::Return, &[&hidden], []);
        return Ok(());
    }
    let hidden = g.module("model", |g| from_tokens(g, decoder));
    language_head(g, decoder, hidden, "model.embed_tokens.weight");
    Ok(())
}

/// transformers' generic classes over a decoder that give labels; false where the task is another.
pub(crate) fn classify(
    c: &Config<'_>,
    task: Task,
    g: &mut Graph,
    model: impl FnOnce(&mut Graph) -> Value,
) -> Result<bool, ModelError> {
    match task {
        Task::SequenceClassification => {
            let named = c.section("id2label").keys().count() as u64;
            let labels = c.size_or(&["num_labels"], if named == 0 { 2 } else { named })?;
            // Nobody says `use_cache=False`, and the cache is in what is returned.
            if c.flag("use_cache", true)? {
                g.caches_in_training();
            }
            let hidden = g.module("model", model);
            scores(g, &hidden, &head::Labels { count: labels, loss: Loss::CrossEntropy });
        }
        // transformers/modeling_layers.py: GenericForTokenClassification, GenericForQuestionAnswering.
        Task::TokenClassification => {
            let dropout = ["classifier_dropout", "hidden_dropout"].iter().find_map(|key| c.get(key)?.as_f64());
            let bias = c.flag("token_classification_bias", true)?;
            if c.flag("use_cache", true)? {
                g.caches_while_it_runs();
            }
            let hidden = g.module("model", model);
            let dropped = g.dropout(&hidden, dropout.unwrap_or(0.1));
            head::token_head(g, "score", &dropped, (head::Labels::read(c)?.count, Loss::CrossEntropyFp32), bias);
        }
        Task::QuestionAnswering => {
            if c.flag("use_cache", true)? {
                g.caches_while_it_runs();
            }
            let hidden = g.module(inside_answers(c.model_type()), model);
            head::answer_head(g, "qa_outputs", &hidden);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// `lm_head`, the loss and the output; `table` is the full name of the token table.
pub(crate) fn language_head(g: &mut Graph, decoder: &dyn Decoder, hidden: Value, table: &str) {
    let vocabulary = decoder.vocabulary();
    let tied = if vocabulary.tied { g.find(table) } else { None };
    let finish = |g: &mut Graph, logits| decoder.finish_logits(g, logits);
    head::causal_lm_head_named(g, "lm_head", hidden, vocabulary.rows, tied, decoder.head_bias(), finish);
}

fn from_tokens(g: &mut Graph, decoder: &dyn Decoder) -> Value {
    let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
    let embeddings = decoder.embed(g, &ids);
    decoder.model(g, embeddings)
}

/// Class defaults of a decoder.
pub(crate) struct Defaults {
    /// Tokens.
    pub vocabulary: u64,
    /// Width of the model.
    pub hidden: u64,
    /// Width of the MLP.
    pub width: u64,
    /// Layers.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; `None`: as many.
    pub kv_heads: Option<u64>,
    /// Width of a head; `None`: hidden divided by heads.
    pub head_dim: Option<u64>,
    /// Activation of the MLP.
    pub activation: &'static str,
    /// Whether the head is the token table.
    pub tied: bool,
}

/// What nearly every decoder reads the same way.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    /// The token table.
    pub vocabulary: Vocabulary,
    /// Layers.
    pub layers: u64,
    /// Width of the MLP.
    pub width: u64,
    /// Its activation.
    pub activation: Activation,
    /// The attention, with `attention_bias` on all four projections.
    pub attention: SelfAttention,
}

impl Sizes {
    /// Reads them; what is absent is the class default.
    pub(crate) fn read(c: &Config<'_>, defaults: Defaults) -> Result<Self, ModelError> {
        let activation = read::activation(c, "hidden_act", defaults.activation)?;
        Self::read_with(c, defaults, activation)
    }

    /// The same with an activation that is read elsewhere.
    pub(crate) fn read_with(c: &Config<'_>, defaults: Defaults, activation: Activation) -> Result<Self, ModelError> {
        let vocabulary = Vocabulary::read(c, defaults.vocabulary, defaults.hidden, defaults.tied)?;
        let heads = read::positive(c, &["num_attention_heads"], defaults.heads)?;
        let kv_heads = read::kv_heads(c, heads, defaults.kv_heads.unwrap_or(heads))?;
        let head_dim = match defaults.head_dim {
            Some(default) if !read::is_null(c, "head_dim") => read::positive(c, &["head_dim"], default)?,
            _ => read::head_dim(c, vocabulary.width, heads)?,
        };
        let mut attention = SelfAttention::new(heads, kv_heads, head_dim);
        attention.qkv_bias = c.flag("attention_bias", false)?;
        attention.out_bias = attention.qkv_bias;
        attention.dropout = c.number("attention_dropout", 0.0)?;
        Ok(Self {
            vocabulary,
            layers: c.layers(&["num_hidden_layers"], defaults.layers)?,
            width: c.size_or(&["intermediate_size"], defaults.width)?,
            activation,
            attention,
        })
    }

    /// The rotary table in the model's type.
    pub(crate) fn rope(&self, g: &mut Graph) -> (Value, Value) {
        rope(g, self.attention.rotary_dim, false)
    }

    /// As many layers without a window as there are layers.
    pub(crate) fn no_windows(&self) -> Vec<Option<u64>> {
        vec![None; self.layers as usize]
    }
}

/// The rotary table `rotary_emb`, in fp32 or the model's type.
pub(crate) fn rope(g: &mut Graph, dim: u64, fp32: bool) -> (Value, Value) {
    g.rotary_table("rotary_emb", g.inputs.seq, RotaryTable { dim, axes: 1, doubled: true, fp32 })
}

/// The rotary tables of full and of windowed layers, each where there are such layers, with buffers of their own.
pub(crate) fn ropes_by_kind(
    g: &mut Graph,
    windows: &[Option<u64>],
    dim: u64,
    fp32: bool,
) -> [Option<(Value, Value)>; 2] {
    [("full_attention", false), ("sliding_attention", true)].map(|(kind, sliding)| {
        if !windows.iter().any(|window| window.is_some() == sliding) {
            return None;
        }
        for buffer in ["inv_freq", "original_inv_freq"] {
            g.buffer(&format!("rotary_emb.{kind}_{buffer}"), [dim / 2], DType::F32, false);
        }
        Some(g.rotary_table_bare(g.inputs.seq, RotaryTable { dim, axes: 1, doubled: true, fp32 }))
    })
}

/// The two norms of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Norms {
    /// Before the attention and before the MLP.
    pub names: [&'static str; 2],
    /// Their formula.
    pub kind: Norm,
    /// Whether they have a shift.
    pub bias: bool,
}

impl Norms {
    /// Llama's.
    pub(crate) const LLAMA: Self =
        Self { names: ["input_layernorm", "post_attention_layernorm"], kind: Norm::Rms, bias: false };
}

/// Llama's layer: each half is a norm, its work, and the sum with what came in.
pub(crate) fn pre_norm_layer(
    g: &mut Graph,
    input: &Value,
    norms: Norms,
    attention: impl FnOnce(&mut Graph, &Value) -> Value,
    mlp: impl FnOnce(&mut Graph, &Value) -> Value,
) -> Value {
    let mut hidden = g.norm(norms.names[0], input, norms.kind, norms.bias);
    hidden = g.module("self_attn", |g| attention(g, &hidden));
    hidden = g.add(input, &hidden);
    let residual = hidden.clone();
    hidden = g.norm(norms.names[1], &hidden, norms.kind, norms.bias);
    hidden = g.module("mlp", |g| mlp(g, &hidden));
    g.add(&residual, &hidden)
}

/// The gated MLP under Llama's names, without biases.
pub(crate) fn llama_mlp(g: &mut Graph, x: &Value, sizes: &Sizes) -> Value {
    gated_mlp(g, x, ["gate_proj", "up_proj", "down_proj"], sizes.width, sizes.activation, false)
}

/// All layers in order, each with its index and its window.
pub(crate) fn run_layers(
    g: &mut Graph,
    mut hidden: Value,
    windows: &[Option<u64>],
    mut layer: impl FnMut(&mut Graph, u64, Option<u64>, &Value) -> Value,
) -> Value {
    for (index, &window) in (0..).zip(windows) {
        hidden = g.layer("layers", index, |g| layer(g, index, window, &hidden));
    }
    hidden
}
