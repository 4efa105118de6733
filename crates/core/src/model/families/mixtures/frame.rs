//! The frame that most mixtures share: Llama's decoder with experts in place of the MLP.

use crate::model::blocks::head::{causal_lm_head_named, kept_positions};
use crate::model::blocks::{attention, read};
use crate::model::families::decoders::decoder::classify;
use crate::model::op::{Binary, Input, Loss, Mask, Norm, Op, RotaryTable};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Sizes and habits of the decoder around its attention and experts.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    /// Rows of the vocabulary.
    pub(crate) vocab: u64,
    /// Width of the hidden states.
    pub(crate) hidden: u64,
    /// Number of layers.
    pub(crate) layers: u64,
    /// Kind of the norms.
    pub(crate) norm: Norm,
    /// Whether norms have a bias.
    pub(crate) norm_bias: bool,
    /// Whether the head shares the embedding table.
    pub(crate) tied: bool,
    /// Whether the head has a bias.
    pub(crate) head_bias: bool,
    /// Whether logits are divided by a number.
    pub(crate) scaled_logits: bool,
    /// Whether router logits are kept for a load-balancing loss.
    pub(crate) router_loss: bool,
}

/// The router logits of all layers, kept only where the config asks for them.
#[derive(Debug, Default)]
pub(crate) struct RouterLogits {
    keep: bool,
    all: Vec<Value>,
}

impl RouterLogits {
    /// Keeps the logits of one layer, if they are asked for.
    pub(crate) fn record(&mut self, logits: &Value) {
        if self.keep {
            self.all.push(logits.clone());
        }
    }
}

/// What every layer is given: the mask and the rotary tables.
#[derive(Debug)]
pub(crate) struct Context {
    /// The mask.
    pub(crate) mask: Value,
    /// Cosine and sine.
    pub(crate) rope: (Value, Value),
}

impl Context {
    /// A causal mask (within a window, if there is one), then the rotary tables.
    pub(crate) fn causal(g: &mut Graph, window: Option<u64>, rotary_dim: u64) -> Self {
        let mask = attention::mask(g, window.map_or(Mask::Causal, Mask::Sliding));
        Self { mask, rope: rope(g, rotary_dim) }
    }
}

/// The usual rotary tables.
pub(crate) fn rope(g: &mut Graph, dim: u64) -> (Value, Value) {
    g.rotary_table("rotary_emb", g.inputs.seq, RotaryTable { dim, axes: 1, doubled: true, fp32: false })
}

impl Frame {
    /// Reads the usual keys; the defaults are the class's vocabulary, width and layers.
    pub(crate) fn read(c: &Config<'_>, vocab: u64, hidden: u64, layers: u64) -> Result<Self, ModelError> {
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], vocab)?,
            hidden: read::positive(c, &["hidden_size"], hidden)?,
            layers: c.layers(&["num_hidden_layers"], layers)?,
            norm: Norm::Rms,
            norm_bias: false,
            tied: c.flag("tie_word_embeddings", false)?,
            head_bias: false,
            scaled_logits: false,
            router_loss: c.flag("output_router_logits", false)?,
        })
    }

    /// Embedding, then `context`, the layers and the last norm.
    pub(crate) fn model<C>(
        &self,
        g: &mut Graph,
        embeddings: Option<Value>,
        context: impl FnOnce(&mut Graph) -> C,
        mut layer: impl FnMut(&mut Graph, u64, &Value, &C) -> Value,
    ) -> Value {
        let embeddings = embeddings.unwrap_or_else(|| {
            let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
            g.embedding("embed_tokens", &ids, self.vocab, self.hidden)
        });
        let context = context(g);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| layer(g, index, &hidden, &context));
        }
        g.norm("norm", &hidden, self.norm, self.norm_bias)
    }

    /// A layer: attention and MLP (in the module `mlp`), each after a norm and added to what came in.
    pub(crate) fn layer(
        &self,
        g: &mut Graph,
        input: &Value,
        attention: impl FnOnce(&mut Graph, &Value) -> Value,
        mlp: impl FnOnce(&mut Graph, &Value) -> Value,
    ) -> Value {
        let mut hidden = g.norm("input_layernorm", input, self.norm, self.norm_bias);
        hidden = g.module("self_attn", |g| attention(g, &hidden));
        hidden = g.add(input, &hidden);
        let residual = hidden.clone();
        hidden = g.norm("post_attention_layernorm", &hidden, self.norm, self.norm_bias);
        hidden = g.module("mlp", |g| mlp(g, &hidden));
        g.add(&residual, &hidden)
    }

    /// The model in its module and the head on top; without the head for [`Task::Base`].
    pub(crate) fn build(
        &self,
        c: &Config<'_>,
        g: &mut Graph,
        task: Task,
        model: impl FnOnce(&mut Graph, &mut RouterLogits) -> Value,
    ) -> Result<(), ModelError> {
        let mut routers = RouterLogits { keep: self.router_loss && !task.classifies(), all: Vec::new() };
        if task == Task::Base {
            let hidden = model(g, &mut routers);
            g.run(Op::Return, &[&hidden], []);
            return Ok(());
        }
        if task.classifies() {
            return classify(c, task, g, |g| model(g, &mut routers)).map(|_| ());
        }
        let hidden = g.module("model", |g| model(g, &mut routers));
        let tied = if self.tied { g.find("model.embed_tokens.weight") } else { None };
        if routers.all.is_empty() {
            let finish = |g: &mut Graph, logits: Value| self.finish_logits(g, logits);
            causal_lm_head_named(g, "lm_head", hidden, self.vocab, tied, self.head_bias, finish);
            return Ok(());
        }
        let kept = kept_positions(g, &hidden);
        let logits = match tied {
            Some(weight) => g.linear_with("lm_head", weight, &kept, self.vocab, self.head_bias),
            None => g.linear("lm_head", &kept, self.vocab, self.head_bias),
        };
        let logits = self.finish_logits(g, logits);
        let loss = g.inputs.labels.then(|| {
            let labels = g.input(Input::Labels, [logits.size(0), logits.size(1)]);
            g.run(Op::Loss(Loss::CausalLm), &[&logits, &labels], [])
        });
        let every: Vec<&Value> = routers.all.iter().collect();
        let balance = g.run(Op::Loss(Loss::RouterBalance), &every, []);
        let mut outputs = vec![logits, balance.clone()];
        if let Some(loss) = loss {
            let weighed = g.scale(&balance);
            outputs.insert(0, g.in_place(Binary::Add, &loss, &weighed));
        }
        outputs.append(&mut routers.all);
        let outputs: Vec<&Value> = outputs.iter().collect();
        g.run(Op::Return, &outputs, []);
        Ok(())
    }

    fn finish_logits(&self, g: &mut Graph, logits: Value) -> Value {
        if self.scaled_logits { g.scalar(Binary::Div, &logits) } else { logits }
    }
}
