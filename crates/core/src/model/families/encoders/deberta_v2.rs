//! DeBERTa-v2 and v3: attention over content and relative positions, kept apart; it has no fused kernel.

use super::bert::{feed_forward, output};
use super::heads::{LmHead, choice_head, first_token, no_head, over_tokens, return_base};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::{Labels, classification_head, loss_and_return};
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Activation, Binary, Convolution, Input, Loss, Norm, Op, ParameterId, Role, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DeBERTa-v2 and v3.
pub const FAMILY: Family = Family {
    name: "DeBERTa-v2",
    model_types: &["deberta-v2"],
    facts: Facts {
        lora: &["query_proj", "value_proj"],
        ia3: &["key_proj", "value_proj", "output.dense"],
        ia3_feedforward: &["output.dense"],
        ..Facts::DEFAULT
    },
    build,
};

struct Deberta {
    vocab: u64,
    embedding: u64,
    hidden: u64,
    layers: u64,
    width: u64,
    positions: u64,
    types: u64,
    position_input: bool,
    activation: Activation,
    dropout: f64,
    attention: Disentangled,
    convolution: Option<(u64, u64, Activation)>,
    tied: bool,
    legacy: bool,
    pooler: (u64, Activation, f64),
    classifier_dropout: f64,
}

/// The attention: which of the position terms there are, and over how many relative positions.
struct Disentangled {
    heads: u64,
    head_dim: u64,
    dropout: f64,
    relative: bool,
    normed: bool,
    span: u64,
    bucketed: bool,
    content_to_position: bool,
    position_to_content: bool,
    shared_projections: bool,
}

/// What all layers share: the mask, relative positions and their embeddings.
struct Shared {
    mask: Value,
    positions: Option<Value>,
    embeddings: Option<Value>,
}

impl Deberta {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 1536)?;
        let heads = read::positive(c, &["num_attention_heads"], 24)?;
        let positions = c.size_or(&["max_position_embeddings"], 512)?;
        let dropout = c.number("hidden_dropout_prob", 0.1)?;
        // -1 stands for none in both.
        let positive = |key: &str| c.number(key, -1.0).map(|x| (x >= 1.0).then_some(x.min(1e9) as u64));
        let buckets = positive("position_buckets")?;
        let terms = match c.strings("pos_att_type") {
            Ok(list) => list.unwrap_or_default().join("|"),
            Err(_) => c.str_or("pos_att_type", "").to_lowercase(),
        };
        let attention = Disentangled {
            heads,
            head_dim: c.size_or(&["attention_head_size"], hidden / heads)?,
            dropout: c.number("attention_probs_dropout_prob", 0.1)?,
            relative: c.flag("relative_attention", false)?,
            normed: c.str_or("norm_rel_ebd", "none").to_lowercase().contains("layer_norm"),
            span: buckets.or(positive("max_relative_positions")?).unwrap_or(positions),
            bucketed: buckets.is_some(),
            content_to_position: terms.contains("c2p"),
            position_to_content: terms.contains("p2c"),
            shared_projections: c.flag("share_att_key", false)?,
        };
        let kernel = c.size_or(&["conv_kernel_size"], 0)?;
        let convolution = (kernel > 0)
            .then(|| Ok((kernel, read::positive(c, &["conv_groups"], 1)?, read::activation(c, "conv_act", "tanh")?)));
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 128_100)?,
            embedding: c.size_or(&["embedding_size"], hidden)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 24)?,
            width: c.size_or(&["intermediate_size"], 6144)?,
            positions,
            types: c.size_or(&["type_vocab_size"], 0)?,
            position_input: c.flag("position_biased_input", true)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout,
            attention,
            convolution: convolution.transpose()?,
            tied: c.flag("tie_word_embeddings", true)?,
            legacy: c.flag("legacy", true)?,
            pooler: (
                c.size_or(&["pooler_hidden_size"], hidden)?,
                read::activation(c, "pooler_hidden_act", "gelu")?,
                c.number("pooler_dropout", 0.0)?,
            ),
            classifier_dropout: c.number("cls_dropout", dropout)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let shape = [g.inputs.batch, g.inputs.seq];
        let ids = g.input(Input::Tokens, shape);
        // Without a mask, ones in fp32 stand in for it.
        let mask = if g.inputs.mask { g.input(Input::Mask, shape) } else { g.fill(DType::F32, shape) };
        let types = g.fill(DType::I64, shape);
        let embeddings = g.module("embeddings", |g| self.embeddings(g, &ids, &types, &mask));
        g.module("encoder", |g| self.encoder(g, &embeddings, &mask))
    }

    fn embeddings(&self, g: &mut Graph, ids: &Value, types: &Value, mask: &Value) -> Value {
        // Positions are numbered by a buffer, whether or not they are embedded.
        g.limit_positions(self.positions);
        let held = g.held("position_ids", [1, self.positions], DType::I64);
        let positions = g.slice(&held, 1, 0, ids.size(1));
        let words = g.embedding("word_embeddings", ids, self.vocab, self.embedding);
        let places = match self.position_input {
            true => g.embedding("position_embeddings", &positions, self.positions, self.embedding),
            false => g.fill_like(&words, words.shape()),
        };
        let mut embeddings = words.clone();
        if self.position_input {
            embeddings = g.add(&embeddings, &places);
        }
        let token_types =
            (self.types > 0).then(|| g.embedding("token_type_embeddings", types, self.types, self.embedding));
        if let Some(token_types) = &token_types {
            embeddings = g.add(&embeddings, token_types);
        }
        if self.embedding != self.hidden {
            embeddings = g.linear("embed_proj", &embeddings, self.hidden, false);
        }
        embeddings = g.norm("LayerNorm", &embeddings, Norm::Layer, true);
        let mask = g.unsqueeze(mask, 2);
        let mask = g.type_as(&mask, &embeddings);
        embeddings = g.mul(&embeddings, &mask);
        g.dropout(&embeddings, self.dropout)
    }

    fn encoder(&self, g: &mut Graph, embeddings: &Value, input_mask: &Value) -> Value {
        let seq = embeddings.size(1);
        let mask = {
            let keys = g.view(input_mask, [embeddings.size(0), 1, 1, seq]);
            let queries = g.view(input_mask, [embeddings.size(0), 1, seq, 1]);
            g.mul(&keys, &queries)
        };
        let relative = self.attention.relative;
        let positions = relative.then(|| self.attention.positions(g, seq));
        let table = relative.then(|| {
            let sizes = [2 * self.attention.span, self.hidden];
            let table = g.parameter("rel_embeddings.weight", sizes, Role::Embedding);
            g.read(table, sizes)
        });
        let table = match (table, self.attention.normed) {
            (Some(table), true) => Some(g.norm("LayerNorm", &table, Norm::Layer, true)),
            (table, _) => table,
        };
        let shared = Shared { mask, positions, embeddings: table };
        // The encoder is always asked for all hidden states.
        let mut states = vec![embeddings.clone()];
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layer", index, |g| self.layer(g, &hidden, &shared));
            if let (0, Some(spec)) = (index, self.convolution) {
                hidden = g.module("conv", |g| self.convolution(g, spec, embeddings, &hidden, input_mask));
            }
            states.push(hidden.clone());
        }
        hidden
    }

    fn layer(&self, g: &mut Graph, input: &Value, shared: &Shared) -> Value {
        let attended = g.module("attention", |g| {
            let context = g.module("self", |g| self.attention.run(g, input, shared, self.dropout));
            g.module("output", |g| output(g, &context, input, self.dropout))
        });
        feed_forward(g, &attended, self.width, self.activation, self.dropout)
    }

    /// A convolution over the embeddings joins the first layer's output.
    fn convolution(
        &self,
        g: &mut Graph,
        (kernel, groups, activation): (u64, u64, Activation),
        embeddings: &Value,
        residual: &Value,
        mask: &Value,
    ) -> Value {
        let padding = [((kernel - 1) / 2).min(1 << 16) as u32, 0, 0];
        let spec = Convolution { stride: [1; 3], padding, groups, transposed: false };
        let mut out = {
            let turned = g.permute(embeddings, &[0, 2, 1]);
            let turned = g.contiguous(&turned);
            let convolved = g.convolution("conv", &turned, self.hidden, &[kernel], spec, true);
            let turned = g.permute(&convolved, &[0, 2, 1]);
            g.contiguous(&turned)
        };
        let inverse = g.scalar(Binary::Sub, mask);
        let inverse = g.to(&inverse, DType::Bool);
        let wide = g.unsqueeze(&inverse, -1);
        let wide = g.expand(&wide, out.shape());
        out = g.run(Op::MaskedFill { in_place: true }, &[&out, &wide], out.shape());
        out = g.dropout(&out, self.dropout);
        out = g.activation(activation, &out);
        let sum = g.add(residual, &out);
        let normed = g.norm("LayerNorm", &sum, Norm::Layer, true);
        let mask = g.unsqueeze(mask, 2);
        let mask = g.type_as(&mask, &normed);
        g.mul(&normed, &mask)
    }
}

impl Disentangled {
    /// The distance of every pair, in logarithmic buckets.
    fn positions(&self, g: &mut Graph, seq: u64) -> Value {
        let (queries, keys) = (g.fill(DType::I64, [seq, 1]), g.fill(DType::I64, [1, seq]));
        let mut distance = g.sub(&queries, &keys);
        if self.bucketed {
            let sign = g.unary(Unary::Abs, &distance);
            let far = {
                let near = g.compare(&distance);
                let absolute = g.unary(Unary::Abs, &distance);
                g.run(Op::Where, &[&near, &absolute, &absolute], distance.shape())
            };
            let mut bucket = g.to(&far, DType::F32);
            for kind in [Unary::Log, Unary::Round] {
                bucket = g.unary(kind, &bucket);
                bucket = g.scalar(Binary::Mul, &bucket);
            }
            let near = g.compare(&far);
            let plain = g.to(&distance, DType::F32);
            let signed = g.mul(&bucket, &sign);
            distance = g.run(Op::Where, &[&near, &plain, &signed], distance.shape());
        }
        distance = g.to(&distance, DType::I64);
        g.unsqueeze(&distance, 0)
    }

    fn run(&self, g: &mut Graph, hidden: &Value, shared: &Shared, dropout: f64) -> Value {
        let (batch, seq) = (hidden.size(0), hidden.size(1));
        let query = self.project(g, "query_proj", hidden);
        let key = self.project(g, "key_proj", hidden);
        let value = self.project(g, "value_proj", hidden);
        let mut scores = {
            let turned = g.transpose(&key, -1, -2);
            let scaled = g.scalar(Binary::Div, &turned);
            g.matmul(&query, &scaled)
        };
        let mut bias = None;
        if let (Some(positions), Some(table)) = (&shared.positions, &shared.embeddings) {
            let table = g.dropout(table, dropout);
            bias = self.bias(g, &query, &key, positions, &table);
        }
        if let Some(bias) = &bias {
            scores = g.add(&scores, bias);
        }
        scores = g.view(&scores, [batch, self.heads, seq, seq]);
        let mask = g.to(&shared.mask, DType::Bool);
        scores = {
            let hole = g.unary(Unary::Not, &mask);
            g.masked_fill(&scores, &hole)
        };
        let mut weights = g.softmax(&scores, -1, None);
        weights = g.dropout(&weights, self.dropout);
        let mut context = {
            let flat = g.view(&weights, [batch.saturating_mul(self.heads), seq, seq]);
            g.matmul(&flat, &value)
        };
        context = g.view(&context, [batch, self.heads, seq, self.head_dim]);
        context = g.permute(&context, &[0, 2, 1, 3]);
        context = g.contiguous(&context);
        g.view(&context, [batch, seq, self.heads.saturating_mul(self.head_dim)])
    }

    /// `[batch, seq, hidden] → [batch · heads, seq, head_dim]`, dense.
    fn project(&self, g: &mut Graph, name: &str, x: &Value) -> Value {
        let (batch, seq) = (x.size(0), x.size(1));
        let mut x = g.linear(name, x, self.heads.saturating_mul(self.head_dim), true);
        x = g.split_last(&x, self.heads, self.head_dim);
        x = g.permute(&x, &[0, 2, 1, 3]);
        x = g.contiguous(&x);
        g.view(&x, [batch.saturating_mul(self.heads), seq, self.head_dim])
    }

    /// The scores between contents and relative positions.
    fn bias(&self, g: &mut Graph, query: &Value, key: &Value, positions: &Value, table: &Value) -> Option<Value> {
        let table = g.unsqueeze(table, 0);
        // With shared projections both are made, queries first; else only those that are used, keys first.
        let shared = self.shared_projections;
        let make = |g: &mut Graph, name: &str| {
            let one = self.project(g, name, &table);
            g.run(Op::Repeat, &[&one], one.shape().with(0, query.size(0)))
        };
        let shared_query = shared.then(|| make(g, "query_proj"));
        let places_key = match shared {
            true => Some(make(g, "key_proj")),
            false => self.content_to_position.then(|| make(g, "pos_key_proj")),
        };
        let own_query = (!shared && self.position_to_content).then(|| make(g, "pos_query_proj"));
        let places_query = shared_query.or(own_query);
        let mut score = None;
        let (mut _first, mut _second) = (None, None);
        if let (true, Some(places)) = (self.content_to_position, &places_key) {
            let gathered = self.term(g, query, places, positions, false);
            let scaled = g.scalar(Binary::Div, &gathered);
            // `0 + x` is a copy.
            score = Some(g.scalar(Binary::Add, &scaled));
            _first = Some(gathered);
        }
        if let (true, Some(places)) = (self.position_to_content, &places_query) {
            let gathered = self.term(g, key, places, positions, true);
            let gathered = g.transpose(&gathered, -1, -2);
            let scaled = g.scalar(Binary::Div, &gathered);
            score = Some(match &score {
                Some(score) => g.in_place(Binary::Add, score, &scaled),
                None => g.scalar(Binary::Add, &scaled),
            });
            _second = Some(gathered);
        }
        score
    }

    /// The scores with every relative position, then those of the actual distances.
    fn term(&self, g: &mut Graph, x: &Value, places: &Value, positions: &Value, negated: bool) -> Value {
        let all = {
            let turned = g.transpose(places, -1, -2);
            g.matmul(x, &turned)
        };
        let mut index = positions.clone();
        if negated {
            index = g.unary(Unary::Neg, &index);
        }
        index = g.scalar(Binary::Add, &index);
        index = g.unary(Unary::Clamp, &index);
        let wide = g.expand(&index, [x.size(0), x.size(1), positions.size(-1)]);
        g.gather(&all, -1, &wide)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let deberta = Deberta::read(c)?;
    match task {
        Task::Base => {
            let hidden = deberta.model(g);
            return_base(g, &hidden, None);
        }
        Task::MaskedLm | Task::CausalLm | Task::PreTraining => {
            let hidden = g.module("deberta", |g| deberta.model(g));
            let table = if deberta.tied { g.find("deberta.embeddings.word_embeddings.weight") } else { None };
            let (activation, vocab) = (deberta.activation, deberta.vocab);
            let logits = if deberta.legacy {
                let names = ["transform.dense", "transform.LayerNorm"];
                let head = LmHead { names, width: deberta.embedding, activation, vocab };
                g.module("cls", |g| g.module("predictions", |g| head.logits(g, &hidden, table)))
            } else {
                let head = LmHead { names: ["dense", "LayerNorm"], width: deberta.hidden, activation, vocab };
                let table = g.find("deberta.embeddings.word_embeddings.weight");
                g.module("lm_predictions", |g| g.module("lm_head", |g| embedding_logits(g, &head, &hidden, table)))
            };
            loss_and_return(g, Loss::CrossEntropy, logits);
        }
        Task::SequenceClassification | Task::MultipleChoice => {
            let labels = Labels::read(c)?;
            let hidden = g.module("deberta", |g| deberta.model(g));
            let (width, activation, dropout) = deberta.pooler;
            let mut pooled = g.module("pooler", |g| {
                let mut first = first_token(g, &hidden);
                first = g.dropout(&first, dropout);
                let pooled = g.linear("dense", &first, width, true);
                g.activation(activation, &pooled)
            });
            pooled = g.dropout(&pooled, deberta.classifier_dropout);
            match task {
                Task::MultipleChoice => choice_head(g, &pooled),
                _ => classification_head(g, "classifier", &pooled, &labels),
            }
        }
        Task::TokenClassification | Task::QuestionAnswering => {
            let hidden = g.module("deberta", |g| deberta.model(g));
            over_tokens(c, task, g, &hidden, deberta.dropout)?;
        }
        _ => return Err(no_head("DeBERTa-v2", task)),
    }
    Ok(())
}

/// The newer head: a product with the embedding table itself, then a bias.
fn embedding_logits(g: &mut Graph, head: &LmHead, hidden: &Value, table: Option<ParameterId>) -> Value {
    let x = head.transform(g, hidden);
    let bias = g.parameter("bias", [head.vocab], Role::Bias);
    let Some(table) = table else {
        g.fail("the embedding table is missing");
        return x;
    };
    let table = g.read(table, [head.vocab, x.size(-1)]);
    let turned = g.transpose(&table, 0, 1);
    let product = g.matmul(&x, &turned);
    let bias = g.read(bias, [head.vocab]);
    g.add(&product, &bias)
}
