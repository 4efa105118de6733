//! A run of transformers' `generate`, or of a plain forward pass.

use serde::{Deserialize, Serialize};

use super::batch::MAX_TOKENS;
use super::device_map::DeviceMap;
use super::{
    Accepted, AllocatorOptions, Assistant, AttentionKind, Batch, Diffusion, Draft, Fault, Faults, Gpu, Package,
    Quantization, Stack,
};
use crate::dtype::DType;
use crate::model::{Assumption, Inputs, Making, Model, Sharing};

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
    /// What the model is taken for where its type is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assume: Option<Assumption>,
    /// Several cards, the host, a disk: where modules are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_map: Option<DeviceMap>,
    /// How pictures are made, where the model is a pipeline of diffusers or a part of one.
    #[serde(skip_serializing_if = "Diffusion::is_default")]
    pub diffusion: Diffusion,
    /// The card.
    pub gpu: Gpu,
    /// Options of the caching allocator.
    pub allocator: AllocatorOptions,
    /// Versions of the software.
    #[serde(skip_serializing_if = "Stack::is_default")]
    pub stack: Stack,
    /// As of training (`plan::job::Job`); rows say so.
    #[serde(skip)]
    pub cast_on_card: bool,
}

impl Default for InferPlan {
    fn default() -> Self {
        Self {
            // A prompt, not a sample of a data set.
            batch: Batch { seq_len: 1024, ..Batch::default() },
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
            assume: None,
            device_map: None,
            diffusion: Diffusion::default(),
            gpu: Gpu::h200(),
            allocator: AllocatorOptions::default(),
            stack: Stack::default(),
            cast_on_card: false,
        }
    }
}

/// Why nothing chooses tokens.
const FORWARD: &str = "without new tokens: one forward pass chooses none";

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
    fn check(self, faults: &mut Faults) {
        let (known, nearest): (&str, &[u64]) = match self.backend {
            CacheBackend::Quanto => ("2 or 4 (quanto)", &[2, 4]),
            CacheBackend::Hqq => ("1, 2, 4 or 8 (hqq)", &[1, 2, 4, 8]),
        };
        faults.when(!nearest.contains(&self.bits), || {
            let fault = Fault::value("cache.quantized.bits", self.bits, known);
            nearest.iter().fold(fault, |fault, bits| fault.or_set("cache.quantized.bits", *bits))
        });
        faults.range("cache.quantized.group_size", self.group_size, 1..=1 << 20);
        faults.range("cache.quantized.residual_length", self.residual_length, 1..=MAX_TOKENS);
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
    /// Refuses what cannot run on any model; all of it at once.
    pub fn check(&self) -> Result<(), Vec<Fault>> {
        self.faults(true).end()
    }

    /// Refuses what cannot run on this model; all of it at once.
    pub fn check_on(&self, model: &Model) -> Result<(), Vec<Fault>> {
        let mut faults = self.faults(model.task().generates());
        self.batch.check_tokens(model, &mut faults);
        self.diffusion.check(model, &mut faults);
        if model.is_pipeline() {
            for (path, stated) in
                [("quantization", self.quantization.is_some()), ("device_map", self.device_map.is_some())]
            {
                faults
                    .when(stated, || Fault::unsupported(path, format!("{{{path}}} of a whole pipeline")).or_drop(path));
            }
        }
        faults.end()
    }

    fn faults(&self, generates: bool) -> Faults {
        let mut faults = Faults::default();
        self.batch.check(&mut faults);
        self.allocator.check(&mut faults);
        faults.range("new_tokens", self.new_tokens, 0..=MAX_TOKENS);
        faults.range("beams", self.beams, 1..=1024);
        if let Some(tokens) = self.stop_after {
            faults.range("stop_after", tokens, 1..=MAX_TOKENS);
            faults.when(self.new_tokens > 0 && tokens > self.new_tokens, || {
                Fault::no_effect("stop_after", format!("where {} tokens are generated at most", self.new_tokens))
            });
        }
        faults.float("weights", self.weights);
        faults.when(!matches!(self.attention, AttentionKind::Sdpa | AttentionKind::Eager), || {
            Fault::unsupported(
                "attention",
                "flash and flex attention in generation (sdpa chooses torch's own flash kernels)",
            )
            .or_set("attention", "sdpa")
        });
        if let CacheImplementation::Quantized(how) = self.cache {
            how.check(&mut faults);
        }
        if let Some(quantization) = &self.quantization {
            quantization.check(&mut faults);
        }
        self.check_forward(generates, &mut faults);
        self.check_draft(&mut faults);
        self.check_cards(&mut faults);
        faults
    }

    /// What was not modelled where modules are on several cards or on the host.
    fn check_cards(&self, faults: &mut Faults) {
        let Some(map) = &self.device_map else { return };
        map.check(faults);
        let mut refused = |wrong: bool, path: &str, what: &str| {
            faults.when(wrong, || Fault::unsupported(path, format!("{what} over a device map")).or_drop(path));
        };
        refused(self.assistant.is_some(), "assistant", "an assistant");
        refused(self.prompt_lookup.is_some(), "prompt_lookup", "drafts");
        refused(self.beams > 1, "beams", "beams");
        let plain = matches!(
            self.cache,
            CacheImplementation::Dynamic | CacheImplementation::Static | CacheImplementation::None
        );
        refused(!plain, "cache", "an offloaded or quantised cache");
    }

    /// What chooses or keeps tokens has no place in one forward pass.
    fn check_forward(&self, generates: bool, faults: &mut Faults) {
        let kept = !matches!(self.cache, CacheImplementation::Dynamic | CacheImplementation::None);
        let unseen = [
            ("beams", self.beams > 1),
            ("choice", self.choice == Choice::Sample),
            ("cache", kept),
            ("stop_after", self.stop_after.is_some()),
            ("forced_length", self.forced_length),
            ("assistant", self.assistant.is_some()),
            ("prompt_lookup", self.prompt_lookup.is_some()),
        ];
        for (path, _) in unseen.into_iter().filter(|(_, used)| *used && self.new_tokens == 0) {
            faults.add(match generates {
                true => Fault::no_effect(path, FORWARD).or_set("new_tokens", 128),
                false => Fault::no_effect(path, "on a model that does not generate"),
            });
        }
    }

    /// Who drafts tokens, where someone does.
    pub fn draft(&self) -> Option<Draft<'_>> {
        let lookup = self.prompt_lookup.map(Draft::PromptLookup);
        self.assistant.as_ref().map(Draft::Assistant).or(lookup)
    }

    /// What transformers refuses beside drafted tokens, or what was not modelled with them.
    fn check_draft(&self, faults: &mut Faults) {
        let Some(draft) = self.draft() else {
            return faults.when(self.accepted != Accepted::All, || {
                Fault::no_effect("accepted", "where nothing is drafted").or("add {assistant} or {prompt_lookup}")
            });
        };
        draft.check(faults);
        faults.when(self.assistant.is_some() && self.prompt_lookup.is_some(), || {
            Fault::new("prompt_lookup", "{assistant} and {prompt_lookup} both draft tokens")
                .or_drop("assistant")
                .or_drop("prompt_lookup")
        });
        let refused = |path: &str, what: &str| {
            Fault::unsupported(path, format!("assisted or prompt-lookup decoding with {what}"))
        };
        faults.when(self.batch.batch_size > 1, || {
            refused("batch.batch_size", "several prompts, where transformers takes one,").or_set("batch.batch_size", 1)
        });
        faults.when(self.beams > 1, || {
            refused("beams", "beams, where transformers would ignore the drafts,").or_set("beams", 1)
        });
        faults.when(self.stop_after.is_some(), || refused("stop_after", "an early end").or_drop("stop_after"));
        let cache = match self.cache {
            CacheImplementation::Dynamic => return,
            CacheImplementation::None => "no cache, which transformers refuses,",
            CacheImplementation::Static => "a static cache, which transformers refuses,",
            _ => "an offloaded or quantised cache",
        };
        faults.add(refused("cache", cache).or_set("cache", "dynamic"));
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
            linear_attention_kernels: self.stack.named(Package::FlashLinearAttention).is_some(),
            making: Making {
                guided: !self.diffusion.unguided,
                tiles: self.diffusion.vae_tiling,
                slices: self.diffusion.vae_slicing,
                sliced_attention: self.diffusion.attention_slicing,
            },
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

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(plan: &InferPlan) -> Vec<String> {
        plan.check().err().into_iter().flatten().map(|fault| fault.path).collect()
    }

    #[test]
    fn one_forward_pass_chooses_no_tokens() {
        let cache = CacheImplementation::Static;
        let plan = InferPlan { new_tokens: 0, beams: 2, choice: Choice::Sample, cache, ..InferPlan::default() };
        assert_eq!(paths(&plan), ["beams", "choice", "cache"]);
        assert!(paths(&InferPlan { new_tokens: 8, ..plan }).is_empty());
        assert_eq!(paths(&InferPlan { accepted: Accepted::None, ..InferPlan::default() }), ["accepted"]);
    }

    #[test]
    fn a_cache_and_drafts_are_looked_at_together() {
        let how = QuantizedCache { bits: 3, group_size: 0, ..QuantizedCache::default() };
        let cache = CacheImplementation::Quantized(how);
        let plan = InferPlan { cache, prompt_lookup: Some(0), beams: 2, ..InferPlan::default() };
        let expected = ["cache.quantized.bits", "cache.quantized.group_size", "prompt_lookup", "beams", "cache"];
        assert_eq!(paths(&plan), expected);
    }
}
