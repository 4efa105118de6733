//! LitGPT's `GPT`, whose `Config` describes every architecture it knows (litgpt/model.py, litgpt/lora.py, litgpt/utils.py).
//!
//! Queries, keys and values are one linear, ordered by group; the rotary tables are in fp32 whatever the model is in,
//! since `max_seq_length` makes them anew; keys and values of grouped heads are repeated; the loss is made in pieces.

use super::litgpt_adapter::Adapter;
use super::litgpt_functions::{capped, converted, joined_loss, pieces, rotated, sliding_mask};
use super::litgpt_lora::Lora;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{attention, read};
use crate::model::facts::Facts;
use crate::model::op::{
    Activation, Attention, Binary, EagerStyle, Input, Norm, Op, ParameterId, Reduction, Role, Unary,
};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// LitGPT.
pub const FAMILY: Family = Family { name: "LitGPT", model_types: &["litgpt"], facts: Facts::DEFAULT, build };

struct Gpt {
    layers: u64,
    heads: u64,
    groups: u64,
    head_size: u64,
    embedding: u64,
    vocabulary: u64,
    intermediate: u64,
    rotary: u64,
    bias: bool,
    head_bias: bool,
    rms: bool,
    unit_offset: bool,
    /// RMSNorm multiplies by its weight before it casts back (since July 2024, and until early 2024).
    weight_first: bool,
    gated: Option<Activation>,
    parallel: bool,
    shared_norm: bool,
    post_norms: bool,
    scaled: bool,
    softcap: bool,
    window: Option<u64>,
    lora: Option<Lora>,
    adapter: Option<Adapter>,
}

impl Gpt {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let heads = read::positive(c, &["n_head"], 32)?;
        let embedding = read::positive(c, &["n_embd"], 4096)?;
        let head_size = read::positive(c, &["head_size"], embedding / heads)?;
        let groups = read::positive(c, &["n_query_groups"], heads)?;
        if !heads.is_multiple_of(groups) {
            return Err(c.refuse("n_query_groups", "a divisor of n_head"));
        }
        let gated = match c.str_or("mlp_class_name", "GptNeoxMLP") {
            "LLaMAMLP" => Some(Activation::Silu),
            "GemmaMLP" => Some(Activation::Gelu),
            "GptNeoxMLP" => None,
            _ => return Err(c.refuse("mlp_class_name", "GptNeoxMLP, LLaMAMLP or GemmaMLP")),
        };
        Ok(Self {
            layers: c.layers(&["n_layer"], 16)?,
            heads,
            groups,
            head_size,
            embedding,
            vocabulary: read::positive(c, &["padded_vocab_size"], 50304)?,
            intermediate: c.size_or(&["intermediate_size"], 4 * embedding)?,
            rotary: (c.number("rotary_percentage", 0.25)?.clamp(0.0, 1.0) * head_size as f64) as u64,
            bias: c.flag("bias", true)?,
            head_bias: c.flag("lm_head_bias", false)?,
            rms: c.str_or("norm_class_name", "LayerNorm") == "RMSNorm",
            unit_offset: c.flag("norm_unit_offset", false)?,
            weight_first: c.flag("norm_weight_first", true)?,
            gated,
            parallel: c.flag("parallel_residual", true)?,
            shared_norm: c.flag("shared_attention_norm", false)?,
            post_norms: c.flag("post_attention_norm", false)?,
            scaled: c.flag("scale_embeddings", false)?,
            softcap: c.number("attention_logit_softcapping", 0.0)? > 0.0,
            window: c.has("sliding_window_size").then(|| c.size(&["sliding_window_size"])).transpose()?,
            lora: Lora::read(c)?,
            adapter: Adapter::read(c)?,
        })
    }

    /// A linear, with an adapter beside it where one is asked for.
    fn linear(&self, g: &mut Graph, name: &str, x: &Value, outputs: u64, bias: bool, adapted: bool) -> Value {
        match (self.lora.as_ref(), self.adapter.as_ref()) {
            (Some(lora), _) => lora.linear(g, name, x, outputs, bias, adapted),
            (None, Some(adapter)) => adapter.linear(g, name, x, outputs, bias),
            (None, None) => g.linear(name, x, outputs, bias),
        }
    }

    fn norm(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        if !self.rms {
            return g.norm(name, x, Norm::Layer, true);
        }
        let weight = g.parameter(&format!("{name}.weight"), [x.size(-1)], Role::Norm);
        g.module(name, |g| self.rms_norm(g, x, weight))
    }

    fn rms_norm(&self, g: &mut Graph, input: &Value, weight: ParameterId) -> Value {
        let x = g.float(input);
        let mean = {
            let square = g.mul(&x, &x);
            g.reduce(Reduction::Mean, &square, -1, true)
        };
        let mut normed = {
            let shifted = g.scalar(Binary::Add, &mean);
            let inverse = g.unary(Unary::Rsqrt, &shifted);
            drop(shifted);
            g.mul(&x, &inverse)
        };
        let mut scale = g.read(weight, [x.size(-1)]);
        if self.unit_offset {
            scale = g.scalar(Binary::Add, &scale);
        }
        if self.weight_first {
            let product = {
                let wide = g.float(&scale);
                g.mul(&normed, &wide)
            };
            return g.type_as(&product, input);
        }
        normed = g.type_as(&normed, input);
        g.mul(&normed, &scale)
    }

    fn block(&self, g: &mut Graph, index: u64, x: &Value, rope: &(Value, Value)) -> Value {
        let normed = self.norm(g, "norm_1", x);
        let mut attended = g.module("attn", |g| self.attention(g, index, &normed, rope));
        if self.post_norms {
            attended = self.norm(g, "post_attention_norm", &attended);
        }
        if self.parallel {
            let second = if self.shared_norm { normed.clone() } else { self.norm(g, "norm_2", x) };
            drop(normed);
            let wide = g.module("mlp", |g| self.mlp(g, &second));
            let sum = g.add(&wide, &attended);
            drop(wide);
            return g.add(&sum, x);
        }
        let x = g.add(&attended, x);
        let mut wide = {
            let second = self.norm(g, "norm_2", &x);
            g.module("mlp", |g| self.mlp(g, &second))
        };
        if self.post_norms {
            wide = self.norm(g, "post_mlp_norm", &wide);
        }
        g.add(&wide, &x)
    }

    fn attention(&self, g: &mut Graph, index: u64, x: &Value, (cosine, sine): &(Value, Value)) -> Value {
        let (batch, seq, size) = (x.size(0), x.size(1), self.head_size);
        let per_group = self.heads / self.groups;
        let width = (self.heads + 2 * self.groups) * size;
        let joined = match self.lora.as_ref() {
            Some(lora) => lora.query_key_value(g, x, width, self.bias, [self.heads, self.groups, size]),
            None => self.linear(g, "attn", x, width, self.bias, false),
        };
        let viewed = g.view(&joined, [batch, seq, self.groups, per_group + 2, size]);
        let mut joined = g.permute(&viewed, &[0, 2, 3, 1, 4]);
        drop(viewed);
        let (mut query, mut key, mut value) = g.split3(&joined, 2, [per_group, 1, 1]);
        if self.groups != self.heads {
            let wide = [batch, self.groups, per_group, seq, size];
            key = g.expand(&key, wide);
            value = g.expand(&value, wide);
        }
        let flat = [batch, self.heads, seq, size];
        query = g.reshape(&query, flat);
        key = g.reshape(&key, flat);
        value = g.reshape(&value, flat);
        let turned = |g: &mut Graph, x: &Value| {
            let part = g.slice(x, -1, 0, self.rotary);
            rotated(g, &part, cosine, sine)
        };
        let (query_turned, key_turned) = (turned(g, &query), turned(g, &key));
        let rejoined = |g: &mut Graph, x: Value, turned: &Value| {
            let rest = g.slice(&x, -1, self.rotary, size - self.rotary);
            g.cat(&[turned, &rest], -1)
        };
        query = rejoined(g, query, &query_turned);
        key = rejoined(g, key, &key_turned);
        let mask = self.window.filter(|_| index.is_multiple_of(2)).map(|_| sliding_mask(g, &query));
        let attended = if self.softcap {
            capped(g, &query, &key, &value, mask.as_ref())
        } else {
            let spec = Attention {
                groups: 1,
                causal: true,
                dropout_per_mille: 0,
                softcap: false,
                sinks: None,
                eager: EagerStyle::PlainSoftmax,
                sdpa: true,
            };
            attention::attend(g, spec, &query, &key, &value, mask.as_ref())
        };
        let attended = match self.adapter.as_ref() {
            Some(adapter) => adapter.attend(g, index, &query, attended),
            None => attended,
        };
        joined = g.reshape(&attended, [batch, seq, self.heads * size]);
        drop(attended);
        let adapted = self.lora.as_ref().is_some_and(|lora| lora.projection);
        self.linear(g, "proj", &joined, self.embedding, self.bias, adapted)
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        let adapted = self.lora.as_ref().is_some_and(|lora| lora.mlp);
        let wide = match self.gated {
            Some(activation) => {
                let gate = self.linear(g, "fc_1", x, self.intermediate, self.bias, adapted);
                let up = self.linear(g, "fc_2", x, self.intermediate, self.bias, adapted);
                let product = g.glu(activation, &gate, &up);
                // Both keep their names until the MLP returns.
                return {
                    let result = self.linear(g, "proj", &product, self.embedding, self.bias, adapted);
                    drop((gate, up, product));
                    result
                };
            }
            None => self.linear(g, "fc", x, self.intermediate, self.bias, adapted),
        };
        let wide = g.activation(Activation::Gelu, &wide);
        self.linear(g, "proj", &wide, self.embedding, self.bias, adapted)
    }

    fn run(&self, g: &mut Graph) {
        let (batch, seq) = (g.inputs.batch, g.inputs.seq);
        let table = [seq, self.rotary.max(1)];
        let rope = (g.held("cos", table, DType::F32), g.held("sin", table, DType::F32));
        let mut hidden = g.module("transformer", |g| {
            let ids = g.input(Input::Tokens, [batch, seq]);
            let mut x = g.embedding("wte", &ids, self.vocabulary, self.embedding);
            if self.scaled {
                x = g.scale(&x);
            }
            for index in 0..self.layers {
                x = g.layer("h", index, |g| self.block(g, index, &x, &rope));
            }
            self.norm(g, "ln_f", &x)
        });
        if !g.inputs.labels {
            hidden = self.linear(g, "lm_head", &hidden, self.vocabulary, self.head_bias, false);
            g.run(Op::Return, &[&hidden], []);
            return;
        }
        let labels = g.input(Input::Labels, [batch, seq]);
        let targets = g.slice(&labels, 1, 1, seq.max(1) - 1);
        match (self.lora.as_ref(), self.adapter.is_some()) {
            (Some(lora), _) => self.chunked(g, hidden, &targets, lora.head),
            (None, true) => self.chunked(g, hidden, &targets, false),
            (None, false) => self.whole(g, hidden, &targets),
        }
    }

    /// finetune/lora.py, adapter.py and adapter_v2.py: the head runs on pieces of the sequence, and each piece has its own cross entropy.
    fn chunked(&self, g: &mut Graph, hidden: Value, targets: &Value, adapted: bool) {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let lengths = pieces(seq);
        let parts = g.split(&hidden, 1, &lengths);
        drop(hidden);
        let head = |g: &mut Graph, x: &Value| self.linear(g, "lm_head", x, self.vocabulary, self.head_bias, adapted);
        let mut logits: Vec<Value> = parts.iter().map(|part| head(g, part)).collect();
        drop(parts);
        logits = converted(g, logits);
        g.rebound();
        if let Some(last) = logits.pop() {
            // The last position predicts nothing.
            let kept = g.slice(&last, 1, 0, last.size(1).max(1) - 1);
            logits.push(kept);
        }
        let flat = |g: &mut Graph, x: &Value| g.reshape(x, [batch * x.size(1), self.vocabulary]);
        let rows: Vec<Value> = logits.iter().map(|piece| flat(g, piece)).collect();
        let lengths: Vec<u64> = logits.iter().map(|piece| piece.size(1)).collect();
        let labels: Vec<Value> =
            g.split(targets, 1, &lengths).iter().map(|part| g.reshape(part, [batch * part.size(1)])).collect();
        let loss = joined_loss(g, &rows, &labels, targets);
        drop((rows, labels));
        let outputs: Vec<&Value> = std::iter::once(&loss).chain(&logits).collect();
        g.run(Op::Return, &outputs, []);
    }

    /// finetune/full.py: logits of the whole sequence, whose cross entropy is computed for so many rows at a time.
    fn whole(&self, g: &mut Graph, hidden: Value, targets: &Value) {
        let narrow = g.linear("lm_head", &hidden, self.vocabulary, self.head_bias);
        drop(hidden);
        let logits = g.float(&narrow);
        drop(narrow);
        g.rebound();
        let kept = g.slice(&logits, 1, 0, logits.size(1).max(1) - 1);
        let count = kept.size(0) * kept.size(1);
        let flat = g.reshape(&kept, [count, self.vocabulary]);
        let labels = g.reshape(targets, [count]);
        let rows = g.split(&flat, 0, &pieces(count));
        let parts = g.split(&labels, 0, &pieces(count));
        drop((kept, flat));
        let loss = joined_loss(g, &rows, &parts, targets);
        drop((rows, parts, labels));
        g.run(Op::Return, &[&loss, &logits], []);
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = Gpt::read(c)?;
    model.run(g);
    if model.lora.is_some() {
        // `mark_only_lora_as_trainable`.
        g.freeze(|name| !name.contains("lora_"));
    }
    if let Some(adapter) = &model.adapter {
        g.freeze(|name| !adapter.trains(name));
    }
    Ok(())
}
