//! SigLIP and SigLIP 2 (fixed resolution): towers like CLIP's, without a class token, pooled by attention.

use super::Patches;
use super::clip::{Tower, TowerOutput, text_embeddings};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::encoder;
use crate::model::blocks::head::{Labels, classification_head};
use crate::model::facts::{AttentionKernels, Facts};
use crate::model::op::{Binary, Input, Norm, Op, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// SigLIP.
pub const FAMILY: Family = Family {
    name: "SigLIP",
    model_types: &["siglip"],
    facts: Facts { registration: &[&["layer_norm1", "self_attn", "layer_norm2", "mlp"]], ..Facts::DEFAULT },
    build,
};

/// One of its towers on its own.
pub const TOWERS: Family = Family {
    name: "SigLIP (one tower)",
    model_types: &["siglip_vision_model", "siglip_text_model"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, ..FAMILY.facts },
    ..FAMILY
};

const DEFAULTS: [u64; 3] = [768, 12, 3072];
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// `SiglipVisionModel`.
#[derive(Debug, Clone)]
pub(crate) struct SiglipVision {
    pub(crate) patches: Patches,
    pub(crate) tower: Tower,
    pub(crate) head: bool,
}

impl SiglipVision {
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            patches: Patches::read(c, 224, 16)?,
            tower: Tower::read(c, DEFAULTS, ACTIVATION)?,
            head: c.flag("vision_use_head", true)?,
        })
    }

    /// Runs it in the current module on `[images, channels, height, width]`.
    pub(crate) fn model(&self, g: &mut Graph, pixels: &Value, output_hidden_states: bool) -> TowerOutput {
        let hidden = g.module("embeddings", |g| self.embeddings(g, pixels));
        let mut hidden_states = Vec::new();
        let mut last = self.tower.encode(g, &hidden, None, |state| {
            if output_hidden_states {
                hidden_states.push(state.clone());
            }
        });
        last = g.norm("post_layernorm", &last, Norm::Layer, true);
        let pooled = self.head.then(|| g.module("head", |g| self.pool(g, &last)));
        TowerOutput { hidden_states, last, pooled }
    }

    fn embeddings(&self, g: &mut Graph, pixels: &Value) -> Value {
        let (width, count) = (self.tower.hidden, self.patches.count());
        self.patches.fixed(g, pixels);
        let patches = {
            let pixels = g.to_model_type(pixels);
            self.patches.project(g, "patch_embedding", &pixels, width, true)
        };
        let ids = g.held("position_ids", [1, count], DType::I64);
        let positions = g.embedding("position_embedding", &ids, count, width);
        g.add(&patches, &positions)
    }

    /// A learned probe attends to all patches (`nn.MultiheadAttention`, which returns its weights too).
    fn pool(&self, g: &mut Graph, patches: &Value) -> Value {
        let (batch, width) = (patches.size(0), self.tower.hidden);
        let probe = g.parameter("probe", [1, 1, width], Role::Other);
        let probe = g.read(probe, [1, 1, width]);
        let probe = g.run(Op::Repeat, &[&probe], [batch, 1, width]);
        let mut hidden = g.module("attention", |g| self.probe_attention(g, &probe, patches));
        let residual = hidden.clone();
        hidden = g.norm("layernorm", &hidden, Norm::Layer, true);
        hidden = {
            let wide = self.tower.mlp(g, &hidden);
            g.add(&residual, &wide)
        };
        g.squeeze(&hidden, 1)
    }

    fn probe_attention(&self, g: &mut Graph, probe: &Value, patches: &Value) -> Value {
        let (batch, width, heads) = (patches.size(0), self.tower.hidden, self.tower.attention.heads);
        let (rows, head_dim) = (patches.size(1), self.tower.attention.head_dim);
        let weight = g.parameter("in_proj_weight", [3 * width, width], Role::Other);
        let bias = g.parameter("in_proj_bias", [3 * width], Role::Bias);
        let (weight, bias) = (g.read(weight, [3 * width, width]), g.read(bias, [3 * width]));
        let (weight_query, weight_pair) = g.split2(&weight, 0, width, 2 * width);
        let (bias_query, bias_pair) = g.split2(&bias, 0, width, 2 * width);
        let (probe, patches) = (g.transpose(probe, 0, 1), g.transpose(patches, 0, 1));
        let mut query = product(g, &probe, &weight_query, &bias_query);
        let mut pair = product(g, &patches, &weight_pair, &bias_pair);
        pair = g.view(&pair, [1, rows, batch, 2, width]);
        pair = g.transpose(&pair, 0, 3);
        pair = g.view(&pair, [2, rows, batch, width]);
        pair = g.contiguous(&pair);
        let (key, value) = g.split2(&pair, 0, 1, 1);
        drop(pair);
        query = g.view(&query, [1, batch.saturating_mul(heads), head_dim]);
        query = g.transpose(&query, 0, 1);
        let key = g.view(&key, [rows, batch.saturating_mul(heads), head_dim]);
        let key = g.permute(&key, &[1, 2, 0]);
        let value = g.view(&value, [rows, batch.saturating_mul(heads), head_dim]);
        let value = g.transpose(&value, 0, 1);
        let scaled = g.scale(&query);
        let mut weights = g.matmul(&scaled, &key);
        weights = g.softmax(&weights, -1, None);
        let mut attended = g.matmul(&weights, &value);
        attended = g.transpose(&attended, 0, 1);
        attended = g.contiguous(&attended);
        attended = g.view(&attended, [batch, width]);
        attended = g.linear("out_proj", &attended, width, true);
        attended = g.view(&attended, [1, batch, width]);
        weights = g.view(&weights, [batch, heads, 1, rows]);
        let _mean = g.reduce(Reduction::Mean, &weights, 1, false);
        g.transpose(&attended, 0, 1)
    }
}

/// `x · Wᵀ + b` with a slice of a parameter.
fn product(g: &mut Graph, x: &Value, weight: &Value, bias: &Value) -> Value {
    let turned = g.transpose(weight, 0, 1);
    let flat = g.reshape(x, [x.size(0).saturating_mul(x.size(1)), x.size(2)]);
    let product = g.matmul(&flat, &turned);
    let product = g.in_place(Binary::Add, &product, bias);
    g.view(&product, [x.size(0), x.size(1), weight.size(0)])
}

struct SiglipText {
    vocab: u64,
    positions: u64,
    projection: u64,
    tower: Tower,
}

impl SiglipText {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let tower = Tower::read(c, DEFAULTS, ACTIVATION)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 32000)?,
            positions: c.size_or(&["max_position_embeddings"], 64)?,
            projection: c.size_or(&["projection_size"], tower.hidden)?,
            tower,
        })
    }

    fn model(&self, g: &mut Graph) -> (Value, Value) {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq.min(self.positions)]);
        let hidden = text_embeddings(g, &ids, self.vocab, self.positions, self.tower.hidden);
        let mask = encoder::full_mask(g, &hidden);
        let mut last = self.tower.encode(g, &hidden, Some(&mask), |_| ());
        last = g.norm("final_layer_norm", &last, Norm::Layer, true);
        let end = g.slice(&last, 1, ids.size(1).max(1) - 1, 1);
        let end = g.squeeze(&end, 1);
        let pooled = g.linear("head", &end, self.projection, true);
        (last, pooled)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    match c.model_type() {
        "siglip_vision_model" => {
            let vision = SiglipVision::read(c)?;
            let pixels = vision.patches.input(g);
            let output = vision.model(g, &pixels, false);
            let kept: Vec<&Value> = std::iter::once(&output.last).chain(&output.pooled).collect();
            g.run(Op::Return, &kept, []);
        }
        "siglip_text_model" => {
            let (last, pooled) = SiglipText::read(c)?.model(g);
            g.run(Op::Return, &[&last, &pooled], []);
        }
        _ if task == Task::ImageClassification => {
            let (vision, labels) = (SiglipVision::read(&c.section("vision_config"))?, Labels::read(c)?);
            let pixels = vision.patches.input(g);
            let output = g.module("vision_model", |g| vision.model(g, &pixels, false));
            let mean = g.reduce(Reduction::Mean, &output.last, 1, false);
            classification_head(g, "classifier", &mean, &labels);
        }
        _ => build_both(c, g)?,
    }
    Ok(())
}

fn build_both(c: &Config<'_>, g: &mut Graph) -> Result<(), ModelError> {
    let vision = SiglipVision::read(&c.section("vision_config"))?;
    let text = SiglipText::read(&c.section("text_config"))?;
    let pixels = vision.patches.input(g);
    let output = g.module("vision_model", |g| vision.model(g, &pixels, false));
    let (last, text_summary) = g.module("text_model", |g| text.model(g));
    let image_summary = output.pooled.clone().unwrap_or_else(|| output.last.clone());
    let image = normalised(g, &image_summary);
    let words = normalised(g, &text_summary);
    let turned = g.transpose(&image, 0, 1);
    let mut similarity = g.matmul(&words, &turned);
    let scale = g.parameter("logit_scale", [1], Role::Other);
    let shift = g.parameter("logit_bias", [1], Role::Other);
    let (scale, shift) = (g.read(scale, [1]), g.read(shift, [1]));
    similarity = {
        let scale = g.unary(Unary::Exp, &scale);
        let scaled = g.mul(&similarity, &scale);
        g.add(&scaled, &shift)
    };
    let loss = g.inputs.labels.then(|| pairwise_loss(g, &similarity));
    let mut kept: Vec<&Value> = loss.iter().collect();
    kept.extend([&similarity, &words, &image, &last, &text_summary, &output.last, &image_summary]);
    g.run(Op::Return, &kept, []);
    Ok(())
}

/// Every pair of a text and an image is one decision: `-logsigmoid(±similarity)`, summed by text.
fn pairwise_loss(g: &mut Graph, similarity: &Value) -> Value {
    let texts = similarity.size(0);
    let eye = g.fill(DType::F32, [texts, texts]);
    let signs = {
        let ones = g.fill_like(similarity, similarity.shape());
        let others = g.unary(Unary::Neg, &ones);
        let own = g.scale(&eye);
        g.add(&others, &own)
    };
    let likelihood = {
        let signed = g.mul(&signs, similarity);
        g.unary(Unary::LogSigmoid, &signed)
    };
    let by_text = {
        let sum = g.reduce(Reduction::Sum, &likelihood, -1, false);
        g.unary(Unary::Neg, &sum)
    };
    g.reduce_all(Reduction::Mean, &by_text)
}

/// `x / x.norm()`.
fn normalised(g: &mut Graph, x: &Value) -> Value {
    let norm = g.reduce(Reduction::Norm, x, -1, true);
    g.div(x, &norm)
}
