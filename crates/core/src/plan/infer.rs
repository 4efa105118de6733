//! A run of transformers' `generate`, or of a plain forward pass.

use serde::{Deserialize, Serialize};

use super::{
    Accepted, AllocatorOptions, Assistant, AttentionKind, Batch, Draft, Gpu, Package, PlanError, Quantization, Stack,
};
use crate::dtype::DType;
use crate::model::{Inputs, Sharing};

/// What is generated, and how, on one card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InferPlan {
    /// The prompts: `seq_len` tokens each.
    pub batch: Batch,
    /// Tokens to generate after the prompt; 0: one forward pass over the batch, all logits.
    pub new_tokens: u64,
    /// Tokens after which every sequence has ended, when that is before `new_tokens`.
    pub stop_after: Option<u64>,
    /// How keys and values are kept.
    pub cache: CacheImplementation,
    /// Beams per prompt.
    pub beams: u64,
    /// How the next token is chosen.
    pub choice: Choice,
    /// Whether `min_new_tokens` forbids the end of the sequence.
    pub forced_length: bool,
    /// A small model that drafts tokens (`assistant_model`).
    pub assistant: Option<Assistant>,
    /// `prompt_lookup_num_tokens`: so many tokens are drafted by looking them up in the prompt.
    pub prompt_lookup: Option<u64>,
    /// How many drafted tokens the model accepts.
    pub accepted: Accepted,
    /// The type the weights are held in.
    pub weights: DType,
    /// Linears held in few bits by bitsandbytes; `prepare` has no effect here.
    pub quantization: Option<Quantization>,
    /// How attention is computed.
    pub attention: AttentionKind,
    /// The card.
    pub gpu: Gpu,
    /// Options of the caching allocator.
    pub allocator: AllocatorOptions,
    /// Versions of the software.
    #[serde(skip_serializing_if = "Stack::is_default")]
    pub stack: Stack,
}

impl Default for InferPlan {
    fn default() -> Self {
        Self {
            batch: Batch::default(),
            new_tokens: 128,
            stop_after: None,
            cache: CacheImplementation::Dynamic,
            beams: 1,
            choice: Choice::Greedy,
            forced_length: false,
            assistant: None,
            prompt_lookup: None,
            accepted: Accepted::All,
            weights: DType::BF16,
            quantization: None,
            attention: AttentionKind::Sdpa,
            gpu: Gpu::h200(),
            allocator: AllocatorOptions::default(),
            stack: Stack::default(),
        }
    }
}

/// `cache_implementation` of `generate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CacheImplementation {
    /// Grows by copying with every token (transformers' default).
    Dynamic,
    /// Allocated once for prompt and new tokens.
    Static,
    /// Grows like the dynamic one, but lies on the host; a layer's part comes over while the layer before it runs.
    Offloaded,
    /// Packed in few bits, but for the newest tokens.
    Quantized(QuantizedCache),
    /// `use_cache=False`: everything is computed again for every token.
    None,
}

impl CacheImplementation {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Static => "static",
            Self::Offloaded => "offloaded",
            Self::Quantized(QuantizedCache { backend: CacheBackend::Quanto, .. }) => "quanto",
            Self::Quantized(QuantizedCache { backend: CacheBackend::Hqq, .. }) => "hqq",
            Self::None => "none",
        }
    }
}

/// `cache_config` of a quantised cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QuantizedCache {
    /// Who packs.
    pub backend: CacheBackend,
    /// `nbits`: 2 or 4 with quanto; 1, 2, 4 or 8 with HQQ.
    pub bits: u64,
    /// `q_group_size`: elements that share a scale and a zero.
    pub group_size: u64,
    /// `residual_length`: when so many new positions are kept in full width, all is packed anew.
    pub residual_length: u64,
}

impl Default for QuantizedCache {
    fn default() -> Self {
        Self { backend: CacheBackend::Quanto, bits: 4, group_size: 64, residual_length: 128 }
    }
}

impl QuantizedCache {
    fn check(self) -> Result<(), PlanError> {
        let bad = |key: &str, value: u64, expected: &str| {
            Err(PlanError::BadValue { key: key.into(), value: value.to_string(), expected: expected.into() })
        };
        match (self.backend, self.bits) {
            (CacheBackend::Quanto, 2 | 4) | (CacheBackend::Hqq, 1 | 2 | 4 | 8) => {}
            (CacheBackend::Quanto, bits) => return bad("cache-bits", bits, "2 or 4 (quanto)"),
            (CacheBackend::Hqq, bits) => return bad("cache-bits", bits, "1, 2, 4 or 8 (hqq)"),
        }
        match self {
            _ if !(1..=1 << 20).contains(&self.group_size) => {
                bad("cache-group-size", self.group_size, "from 1 to 1048576")
            }
            _ if !(1..=1 << 24).contains(&self.residual_length) => {
                bad("cache-residual", self.residual_length, "from 1 to 16777216")
            }
            _ => Ok(()),
        }
    }
}

/// Who packs a quantised cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CacheBackend {
    /// optimum-quanto, along axis 0 (its default).
    Quanto,
    /// HQQ.
    Hqq,
}

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// The likeliest.
    Greedy,
    /// At random, among the 50 likeliest (`do_sample=True` with transformers' defaults).
    Sample,
}

impl InferPlan {
    /// Refuses what cannot run.
    pub fn check(&self) -> Result<(), PlanError> {
        const MAX_BATCH: u64 = 1 << 20;
        const MAX_TOKENS: u64 = 1 << 24;
        let bad = |key: &str, value: u64, expected: &str| {
            Err(PlanError::BadValue { key: key.into(), value: value.to_string(), expected: expected.into() })
        };
        match self {
            _ if !(1..=MAX_BATCH).contains(&self.batch.batch_size) => {
                bad("batch-size", self.batch.batch_size, "from 1 to 1048576")
            }
            _ if self.batch.seq_len > MAX_TOKENS => bad("prompt", self.batch.seq_len, "up to 16777216"),
            _ if self.new_tokens > MAX_TOKENS => bad("new-tokens", self.new_tokens, "up to 16777216"),
            _ if !matches!(self.attention, AttentionKind::Sdpa | AttentionKind::Eager) => Err(PlanError::Unsupported {
                what: "flash and flex attention in generation".into(),
                hint: "sdpa chooses torch's own flash kernels".into(),
            }),
            _ if !(1..=1024).contains(&self.beams) => bad("beams", self.beams, "from 1 to 1024"),
            _ if !matches!(self.weights, DType::F32 | DType::BF16 | DType::F16) => Err(PlanError::BadValue {
                key: "weights".into(),
                value: self.weights.name().into(),
                expected: "fp32, bf16 or fp16".into(),
            }),
            Self { cache: CacheImplementation::Quantized(how), .. } if how.check().is_err() => how.check(),
            _ => {
                self.check_draft()?;
                self.quantization.as_ref().map_or(Ok(()), Quantization::check)
            }
        }
    }

    /// Who drafts tokens, where someone does.
    pub fn draft(&self) -> Option<Draft<'_>> {
        let lookup = self.prompt_lookup.map(Draft::PromptLookup);
        self.assistant.as_ref().map(Draft::Assistant).or(lookup)
    }

    /// What transformers refuses beside drafted tokens, or what was not modelled with them.
    fn check_draft(&self) -> Result<(), PlanError> {
        let Some(draft) = self.draft() else { return Ok(()) };
        let refused = |what: &str, hint: &str| {
            let what = format!("assisted or prompt-lookup decoding with {what}");
            Err(PlanError::Unsupported { what, hint: hint.into() })
        };
        match self {
            Self { assistant: Some(_), prompt_lookup: Some(_), .. } => Err(PlanError::Conflict {
                what: "an assistant model and prompt lookup both draft tokens".into(),
                hint: "use one of them".into(),
            }),
            _ if self.new_tokens == 0 => refused("no new tokens", "raise --new-tokens"),
            _ if self.batch.batch_size > 1 => refused("several prompts", "transformers takes one: --batch-size 1"),
            _ if self.beams > 1 => refused("beams", "transformers would ignore the drafts; use one beam"),
            _ if self.stop_after.is_some() => refused("an early end", "leave stop_after out"),
            _ => match self.cache {
                CacheImplementation::Static | CacheImplementation::None => refused(
                    &format!("{} cache", if self.cache == CacheImplementation::None { "no" } else { "a static" }),
                    "transformers refuses it; use a dynamic cache",
                ),
                CacheImplementation::Dynamic => draft.check(),
                _ => refused("an offloaded or quantised cache", "it is not simulated; use a dynamic cache"),
            },
        }
    }

    /// Sequences that run at once: every beam of every prompt.
    pub fn sequences(&self) -> u64 {
        self.batch.batch_size.saturating_mul(self.beams)
    }

    /// The inputs of a pass over `seq` tokens after `past` ones.
    pub fn inputs(&self, seq: u64, past: u64) -> Inputs {
        let generates = self.new_tokens > 0;
        let room = self.batch.seq_len.saturating_add(self.new_tokens).saturating_sub(1);
        let first = past == 0;
        Inputs {
            batch: self.sequences(),
            seq,
            target_seq: if generates { 1 } else { self.batch.target_len.unwrap_or(seq) },
            past,
            cache: self.cache != CacheImplementation::None,
            static_cache: (generates && self.cache == CacheImplementation::Static).then_some(room),
            position_ids: generates,
            labels: false,
            mask: generates || self.batch.mask,
            last_logits: generates.then_some(1),
            sharing: self.quantization.as_ref().map_or(Sharing::Once, Quantization::sharing),
            transformers: Some(self.stack.version(Package::Transformers).release()),
            ..self.batch.training_inputs()
        }
        .without_media(!first)
    }

    /// The inputs of a pass that checks `drafted` tokens; the first one takes the prompt along.
    pub fn checking_inputs(&self, length: u64, drafted: u64, first: bool) -> Inputs {
        let inputs = match first {
            true => self.inputs(length.saturating_add(drafted), 0),
            false => self.inputs(drafted.saturating_add(1), length.saturating_sub(1)),
        };
        Inputs { last_logits: Some(drafted.saturating_add(1)), ..inputs }
    }

    /// The inputs of a decoder's pass over one token after `past` ones, beside an encoder that ran with the first.
    pub fn decoder_inputs(&self, past: u64) -> Inputs {
        let room = (self.cache == CacheImplementation::Static).then_some(self.new_tokens);
        let inputs = Inputs { beams: self.beams, position_ids: false, ..self.inputs(self.batch.seq_len, 0) };
        if self.cache == CacheImplementation::None {
            // Everything so far goes in again, beside what the encoder made once.
            return Inputs { target_seq: past.saturating_add(1), encoded: past > 0, ..inputs }.without_media(past > 0);
        }
        Inputs { past, target_seq: 1, static_cache: room, ..inputs }.without_media(past > 0)
    }
}
