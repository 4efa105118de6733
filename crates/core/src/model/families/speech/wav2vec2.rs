//! wav2vec 2.0 (XLSR, MMS) and HuBERT: convolutions over the waveform, then an encoder.

use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::Labels;
use crate::model::blocks::{EncoderAttention, encoder, read};
use crate::model::facts::Facts;
use crate::model::op::{Activation, Convolution, Input, Loss, Norm, Op, Reduction, Role};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// wav2vec 2.0.
pub const FAMILY: Family = Family {
    name: "wav2vec 2.0",
    model_types: &["wav2vec2"],
    facts: Facts::DEFAULT,
    build: |c, task, g| build(c, task, g, "wav2vec2"),
};
/// HuBERT.
pub const HUBERT: Family = Family {
    name: "HuBERT",
    model_types: &["hubert"],
    facts: Facts::DEFAULT,
    build: |c, task, g| build(c, task, g, "hubert"),
};

/// Samples of a second, for batches that bring no audio.
const DEFAULT_SAMPLES: u64 = 16_000;

struct Wav2Vec2 {
    vocab: u64,
    hidden: u64,
    layers: u64,
    width: u64,
    convolutions: Vec<Slide>,
    convolution_bias: bool,
    /// Whether every convolution has a LayerNorm; else only the first has a norm, over each channel.
    layer_norms: bool,
    convolution_activation: Activation,
    projection_norm: bool,
    position_kernel: u64,
    position_groups: u64,
    batch_norm: bool,
    norm_first: bool,
    adapter: u64,
    masked: bool,
    augmented: bool,
    activation: Activation,
    dropout: f64,
    activation_dropout: f64,
    projection_dropout: f64,
    final_dropout: f64,
    attention: EncoderAttention,
}

#[derive(Clone, Copy)]
struct Slide {
    width: u64,
    kernel: u64,
    stride: u64,
}

impl Wav2Vec2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 768)?;
        let heads = read::positive(c, &["num_attention_heads"], 12)?;
        let names = ["q_proj", "k_proj", "v_proj", "out_proj"];
        let mut attention = EncoderAttention::new(heads, hidden / heads, names);
        attention.dropout = c.number("attention_dropout", 0.1)?;
        if c.flag("add_adapter", false)? {
            return Err(c.refuse("add_adapter", "false: convolutional adapters are not modelled"));
        }
        let masked = c.number("mask_time_prob", 0.05)? > 0.0 || c.number("mask_feature_prob", 0.0)? > 0.0;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 32)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 12)?,
            width: c.size_or(&["intermediate_size"], 3072)?,
            convolutions: slides(c)?,
            convolution_bias: c.flag("conv_bias", false)?,
            layer_norms: c.str_or("feat_extract_norm", "group") == "layer",
            convolution_activation: read::activation(c, "feat_extract_activation", "gelu")?,
            projection_norm: c.flag("feat_proj_layer_norm", true)?,
            position_kernel: read::positive(c, &["num_conv_pos_embeddings"], 128)?,
            position_groups: read::positive(c, &["num_conv_pos_embedding_groups"], 16)?,
            batch_norm: c.flag("conv_pos_batch_norm", false)?,
            norm_first: c.flag("do_stable_layer_norm", false)?,
            adapter: c.size_or(&["adapter_attn_dim"], 0)?,
            masked,
            augmented: masked && c.flag("apply_spec_augment", true)?,
            activation: read::activation(c, "hidden_act", "gelu")?,
            dropout: c.number("hidden_dropout", 0.1)?,
            activation_dropout: c.number("activation_dropout", 0.1)?,
            projection_dropout: c.number("feat_proj_dropout", 0.0)?,
            final_dropout: c.number("final_dropout", 0.1)?,
            attention,
        })
    }

    /// The last hidden state, and the features before it: normed in wav2vec 2.0, which returns them, else raw.
    fn model(&self, g: &mut Graph, normed: bool) -> (Value, Value) {
        let samples = g.inputs.audio_frames.unwrap_or(DEFAULT_SAMPLES);
        let audio = g.input(Input::Audio, [g.inputs.batch, samples]);
        let mut features = g.module("feature_extractor", |g| self.extract(g, &audio));
        features = g.transpose(&features, 1, 2);
        let mut hidden = g.module("feature_projection", |g| {
            let mut x = features.clone();
            if self.projection_norm {
                x = g.norm("layer_norm", &x, Norm::Layer, true);
            }
            let projected = g.linear("projection", &x, self.hidden, true);
            if normed {
                features = x;
            }
            g.dropout(&projected, self.projection_dropout)
        });
        if self.masked {
            let vector = g.parameter("masked_spec_embed", [self.hidden], Role::Other);
            // SpecAugment runs in training only, and labels are the sign of it.
            if self.augmented && g.inputs.labels {
                let chosen = g.fill(DType::Bool, [hidden.size(0), hidden.size(1)]);
                let vector = g.read(vector, [self.hidden]);
                let op = Op::Scatter { dim: 0, in_place: true };
                hidden = g.run(op, &[&hidden, &chosen, &vector], hidden.shape());
            }
        }
        let hidden = g.module("encoder", |g| self.encode(g, &hidden));
        (hidden, features)
    }

    fn extract(&self, g: &mut Graph, audio: &Value) -> Value {
        let mut hidden = g.unsqueeze(audio, 1);
        for (index, slide) in self.convolutions.iter().enumerate() {
            hidden = g.layer("conv_layers", index as u64, |g| self.convolve(g, index, *slide, &hidden));
        }
        hidden
    }

    fn convolve(&self, g: &mut Graph, index: usize, slide: Slide, input: &Value) -> Value {
        let stride = [slide.stride.min(1 << 16) as u32, 1, 1];
        let spec = Convolution { stride, padding: [0; 3], groups: 1, transposed: false };
        let mut hidden = g.convolution("conv", input, slide.width, &[slide.kernel], spec, self.convolution_bias);
        if self.layer_norms {
            hidden = g.transpose(&hidden, -2, -1);
            hidden = g.norm("layer_norm", &hidden, Norm::Layer, true);
            hidden = g.transpose(&hidden, -2, -1);
        } else if index == 0 {
            let groups = Norm::Group(slide.width.min(u64::from(u32::MAX)) as u32);
            hidden = g.norm_of("layer_norm", &[&hidden], groups, true, slide.width);
        }
        g.activation(self.convolution_activation, &hidden)
    }

    fn encode(&self, g: &mut Graph, input: &Value) -> Value {
        let mask = encoder::full_mask(g, input);
        let places = g.module("pos_conv_embed", |g| self.positions(g, input));
        let mut hidden = g.add(input, &places);
        if !self.norm_first {
            hidden = g.norm("layer_norm", &hidden, Norm::Layer, true);
        }
        hidden = g.dropout(&hidden, self.dropout);
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| self.layer(g, &hidden, &mask));
        }
        if self.norm_first { g.norm("layer_norm", &hidden, Norm::Layer, true) } else { hidden }
    }

    /// Positions by a wide grouped convolution, its kernel normed anew in each pass unless the input is.
    fn positions(&self, g: &mut Graph, input: &Value) -> Value {
        let (size, kernel) = (self.hidden, self.position_kernel);
        let padding = [(kernel / 2).min(1 << 16) as u32, 0, 0];
        let spec = Convolution { stride: [1; 3], padding, groups: self.position_groups, transposed: false };
        let mut hidden = g.transpose(input, 1, 2);
        if self.batch_norm {
            hidden = g.norm_of("batch_norm", &[&hidden], Norm::Batch, true, size);
            hidden = g.convolution("conv", &hidden, size, &[kernel], spec, true);
        } else {
            let bias = Some(g.parameter("conv.bias", [size], Role::Bias));
            let lengths = g.parameter("conv.parametrizations.weight.original0", [1, 1, kernel], Role::Other);
            let sizes = [size, size / self.position_groups, kernel];
            let weight = g.parameter("conv.parametrizations.weight.original1", sizes, Role::Convolution);
            let normed = {
                let (own, lengths) = (g.read(weight, sizes), g.read(lengths, [1, 1, kernel]));
                let reduce = Op::Reduce { kind: Reduction::Norm, dim: None, keep: true };
                let norm = g.run(reduce, &[&own], [1, 1, kernel]);
                let ratio = g.div(&lengths, &norm);
                g.mul(&own, &ratio)
            };
            let length = hidden.size(2).saturating_add(2 * (kernel / 2)).saturating_sub(kernel).saturating_add(1);
            let op = Op::Convolution { weight, bias, spec };
            hidden = g.run(op, &[&hidden, &normed], [hidden.size(0), size, length]);
        }
        if kernel % 2 == 0 {
            hidden = g.slice(&hidden, 2, 0, hidden.size(2).max(1) - 1);
        }
        hidden = g.activation(self.convolution_activation, &hidden);
        g.transpose(&hidden, 1, 2)
    }

    fn layer(&self, g: &mut Graph, input: &Value, mask: &Value) -> Value {
        let mut hidden = input.clone();
        if self.norm_first {
            hidden = g.norm("layer_norm", &hidden, Norm::Layer, true);
        }
        hidden = g.module("attention", |g| self.attention.run(g, &hidden, Some(mask)));
        hidden = g.dropout(&hidden, self.dropout);
        hidden = g.add(input, &hidden);
        if !self.norm_first {
            hidden = g.norm("layer_norm", &hidden, Norm::Layer, true);
            let wide = g.module("feed_forward", |g| self.feed_forward(g, &hidden));
            hidden = g.add(&hidden, &wide);
            drop(wide);
            return g.norm("final_layer_norm", &hidden, Norm::Layer, true);
        }
        let wide = {
            let normed = g.norm("final_layer_norm", &hidden, Norm::Layer, true);
            g.module("feed_forward", |g| self.feed_forward(g, &normed))
        };
        hidden = g.add(&hidden, &wide);
        drop(wide);
        if self.adapter > 0 {
            let adapted = g.module("adapter_layer", |g| {
                let mut x = g.norm("norm", &hidden, Norm::Layer, true);
                x = g.linear("linear_1", &x, self.adapter, true);
                x = g.activation(Activation::Relu, &x);
                g.linear("linear_2", &x, self.hidden, true)
            });
            hidden = g.add(&hidden, &adapted);
        }
        hidden
    }

    fn feed_forward(&self, g: &mut Graph, x: &Value) -> Value {
        let mut wide = g.linear("intermediate_dense", x, self.width, true);
        wide = g.activation(self.activation, &wide);
        wide = g.dropout(&wide, self.activation_dropout);
        wide = g.linear("output_dense", &wide, self.hidden, true);
        g.dropout(&wide, self.dropout)
    }
}

/// The convolutions over the waveform: three lists of the same length.
fn slides(c: &Config<'_>) -> Result<Vec<Slide>, ModelError> {
    let widths = c.sizes("conv_dim")?.unwrap_or_else(|| vec![512; 7]);
    let kernels = c.sizes("conv_kernel")?.unwrap_or_else(|| vec![10, 3, 3, 3, 3, 2, 2]);
    let strides = c.sizes("conv_stride")?.unwrap_or_else(|| vec![5, 2, 2, 2, 2, 2, 2]);
    let same = widths.len() == kernels.len() && widths.len() == strides.len() && widths.len() <= 64;
    if !same || widths.iter().chain(&kernels).chain(&strides).any(|&size| size == 0) {
        return Err(c.refuse("conv_dim", "a list of positive sizes, as long as conv_kernel and conv_stride"));
    }
    let each = widths.iter().zip(&kernels).zip(&strides);
    Ok(each.map(|((&width, &kernel), &stride)| Slide { width, kernel, stride }).collect())
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph, name: &str) -> Result<(), ModelError> {
    let model = Wav2Vec2::read(c)?;
    let normed = name == "wav2vec2";
    match task {
        Task::Base => {
            let (hidden, features) = model.model(g, normed);
            let outputs: Vec<&Value> = std::iter::once(&hidden).chain(normed.then_some(&features)).collect();
            g.run(Op::Return, &outputs, []);
        }
        Task::Ctc | Task::CausalLm => {
            let (hidden, _features) = g.module(name, |g| model.model(g, normed));
            let dropped = g.dropout(&hidden, model.final_dropout);
            let logits = g.linear("lm_head", &dropped, model.vocab, true);
            return_with(g, Loss::Ctc, &logits, [g.inputs.batch, g.inputs.seq].as_slice());
        }
        Task::AudioClassification => {
            let labels = Labels::read(c)?;
            let projection = c.size_or(&["classifier_proj_size"], 256)?;
            let (hidden, _features) = g.module(name, |g| model.model(g, normed));
            let projected = g.linear("projector", &hidden, projection, true);
            let pooled = g.reduce(Reduction::Mean, &projected, 1, false);
            let logits = g.linear("classifier", &pooled, labels.count, true);
            return_with(g, Loss::CrossEntropy, &logits, &[g.inputs.batch]);
        }
        _ => {
            return Err(ModelError::Unsupported {
                what: format!("{name} for {task:?}"),
                hint: "use AutoModel, AutoModelForCTC or AutoModelForAudioClassification".to_owned(),
            });
        }
    }
    Ok(())
}

fn return_with(g: &mut Graph, loss: Loss, logits: &Value, label_sizes: &[u64]) {
    let loss = g.inputs.labels.then(|| {
        let labels = g.input(Input::Labels, label_sizes);
        g.run(Op::Loss(loss), &[logits, &labels], [])
    });
    let outputs: Vec<&Value> = loss.iter().chain([logits]).collect();
    g.run(Op::Return, &outputs, []);
}
