//! The sizes of what goes into a model.

use serde::{Deserialize, Serialize};

use super::{Fault, Faults};
use crate::model::{Images, Inputs, Making, Model, Sharing, Task};

/// One batch on one card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Batch {
    /// Samples per card.
    pub batch_size: u64,
    /// Tokens per sample.
    pub seq_len: u64,
    /// Tokens per sample of the decoder, in encoder-decoder models; as many as `seq_len` when absent.
    pub target_len: Option<u64>,
    /// Images of the whole batch: how many, and their height and width in pixels.
    pub images: Option<[u64; 3]>,
    /// Audio frames per sample.
    pub audio_frames: Option<u64>,
    /// Whether an attention mask is passed.
    pub mask: bool,
    /// Whether samples are padded, so that the mask really masks.
    pub padded: bool,
    /// Tokens of the whole batch that are no padding; all of them when absent.
    pub real_tokens: Option<u64>,
    /// Samples that lie one after the other in its only row, each with positions of its own; a job's batches say so.
    #[serde(skip)]
    pub documents: Option<u64>,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            batch_size: 1,
            seq_len: 2048,
            target_len: None,
            images: None,
            audio_frames: None,
            mask: false,
            padded: false,
            real_tokens: None,
            documents: None,
        }
    }
}

/// Larger sizes are a slip of the pen.
const MAX_SAMPLES: u64 = 1 << 20;
pub(super) const MAX_TOKENS: u64 = 1 << 24;

impl Batch {
    /// Refuses sizes that cannot be.
    pub(super) fn check(&self, faults: &mut Faults) {
        faults.range("batch.batch_size", self.batch_size, 1..=MAX_SAMPLES);
        faults.range("batch.seq_len", self.seq_len, 0..=MAX_TOKENS);
        if let Some(tokens) = self.target_len {
            faults.range("batch.target_len", tokens, 1..=MAX_TOKENS);
        }
        for size in self.images.into_iter().flatten() {
            faults.range("batch.images", size, 1..=1 << 16);
        }
        let (path, all) = ("batch.real_tokens", self.tokens());
        if let Some(real) = self.real_tokens.filter(|real| *real > all) {
            let expected = format!("at most the {all} tokens of the batch");
            faults.add(Fault::value(path, real, expected).or_set(path, all).or_drop(path));
        }
    }

    /// Refuses samples without a token where a model reads tokens.
    pub(super) fn check_tokens(&self, model: &Model, faults: &mut Faults) {
        faults.when(Self::reads_tokens(model) && self.seq_len == 0, || {
            Fault::value("batch.seq_len", 0, format!("from 1 to {MAX_TOKENS}")).or_set("batch.seq_len", 1)
        });
    }

    /// Whether a model reads tokens.
    pub(crate) fn reads_tokens(model: &Model) -> bool {
        let config = model.config();
        match model.task() {
            Task::ImageClassification
            | Task::AudioClassification
            | Task::VideoClassification
            | Task::SpeechSeq2Seq
            | Task::Ctc => false,
            Task::Base | Task::PreTraining => [config, &config["text_config"]].iter().any(|c| c["vocab_size"].is_u64()),
            _ => true,
        }
    }

    /// The batch that `find_executable_batch_size` of accelerate tries next: nine tenths of the samples.
    pub fn smaller(&self) -> Option<Self> {
        let samples = (self.batch_size as f64 * 0.9) as u64;
        let images =
            self.images.map(|[count, h, w]| [(count.saturating_mul(samples) / self.batch_size.max(1)).max(1), h, w]);
        (samples > 0).then(|| Self { batch_size: samples, images, real_tokens: None, ..self.clone() })
    }

    /// Tokens of the whole batch, padding among them.
    pub fn tokens(&self) -> u64 {
        self.batch_size.saturating_mul(self.seq_len)
    }

    /// The inputs of a training step.
    pub fn training_inputs(&self) -> Inputs {
        Inputs {
            batch: self.batch_size,
            seq: self.seq_len,
            target_seq: self.target_len.unwrap_or(self.seq_len),
            past: 0,
            cache: false,
            static_cache: None,
            position_ids: self.documents.is_some(),
            labels: true,
            // Who pads masks.
            mask: self.mask || self.padded,
            images: self.images.map(|[count, height, width]| Images { count, height, width, frames: 1 }),
            audio_frames: self.audio_frames,
            last_logits: None,
            beams: 1,
            encoded: false,
            sharing: Sharing::Once,
            transformers: None,
            linear_attention_kernels: false,
            making: Making::default(),
        }
    }
}
