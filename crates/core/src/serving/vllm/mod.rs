//! vLLM: a share of the card is granted, a profile run says what weights and activations take, the rest is blocks.

mod card;
mod draft;
mod encoder;
mod experts;
mod folded;
mod graphs;
mod groups;
mod load;
mod outside;
mod profile;
mod rules;
mod second;
mod tuned;
mod versions;

pub use card::Card;
pub use draft::{Draft, Speculation};
pub use groups::{Layout, Terms};
pub use rules::{RULES, Rules};
pub use versions::{DEFAULT_VERSION, readable, rules};

use serde::{Deserialize, Serialize};

use super::model::{Element, ServedModel};
use super::{Budget, Share, thousandths};
use crate::dtype::DType;
use crate::plan::Gpu;

/// What vLLM is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VllmPlan {
    /// Its version, such as `0.11.0`.
    pub version: String,
    /// `--gpu-memory-utilization`, in thousandths.
    pub utilization_thousandths: u64,
    /// `--tensor-parallel-size`.
    pub tensor_parallel: u64,
    /// `--decode-context-parallel-size`: cards that share the cache of a sequence.
    pub context_parallel: u64,
    /// `--pipeline-parallel-size`.
    pub pipeline_parallel: u64,
    /// `--data-parallel-size`: experts are spread over all replicas' cards.
    pub data_parallel: u64,
    /// `--enable-expert-parallel`: whole experts on a card.
    pub expert_parallel: bool,
    /// `--max-model-len`; the model's own length when absent.
    pub max_model_len: Option<u64>,
    /// `--max-num-batched-tokens`; the version's default when absent.
    pub max_num_batched_tokens: Option<u64>,
    /// `--max-num-seqs`; the version's default when absent.
    pub max_num_seqs: Option<u64>,
    /// `--block-size`.
    pub block_size: u64,
    /// The type of keys and values; the weights' own 16 bits when absent (`auto`).
    pub cache_dtype: DType,
    /// `--enforce-eager`: no CUDA graphs.
    pub enforce_eager: bool,
    /// `--max-cudagraph-capture-size`; the version's default when absent.
    pub largest_graph: Option<u64>,
    /// Whether it finds what an earlier start has compiled (`VLLM_CACHE_ROOT`).
    pub compiled_before: bool,
    /// Whether FlashInfer samples where the version would not take it unasked (`VLLM_USE_FLASHINFER_SAMPLER`).
    pub flashinfer: bool,
    /// `--max-loras` and `--max-lora-rank`.
    pub lora: Option<[u64; 2]>,
    /// `--enable-prefix-caching`, where it was asked for: models with states keep a second one.
    pub prefix_caching: bool,
    /// `num_speculative_tokens`: tokens guessed ahead.
    pub speculative_tokens: u64,
    /// `--kv-cache-memory-bytes`: the pool, whatever is left.
    pub cache_bytes: Option<u64>,
    /// `--cpu-offload-gb`, in bytes.
    pub offloaded: u64,
    /// What the card has, in bytes.
    pub memory: u64,
    /// cuBLAS's workspace: 32 MiB on Hopper, 8.125 MiB before it.
    pub workspace: u64,
    /// Multiprocessors of the card.
    pub multiprocessors: u64,
    /// What a CUDA context takes on the card (`Gpu::bare_context`).
    pub bare_context: u64,
    /// The card.
    pub card: Card,
}

impl Default for VllmPlan {
    fn default() -> Self {
        Self {
            version: DEFAULT_VERSION.into(),
            utilization_thousandths: 920,
            tensor_parallel: 1,
            context_parallel: 1,
            pipeline_parallel: 1,
            data_parallel: 1,
            expert_parallel: false,
            max_model_len: None,
            max_num_batched_tokens: None,
            max_num_seqs: None,
            block_size: 16,
            cache_dtype: DType::BF16,
            enforce_eager: false,
            largest_graph: None,
            compiled_before: false,
            flashinfer: false,
            lora: None,
            prefix_caching: false,
            speculative_tokens: 0,
            cache_bytes: None,
            offloaded: 0,
            memory: 80 << 30,
            workspace: 32 << 20,
            multiprocessors: Gpu::h200().threads().0,
            bare_context: Gpu::h200().bare_context(),
            card: Card::default(),
        }
    }
}

/// Cards of this and more get the larger defaults (`get_batch_defaults` of vllm/engine/arg_utils.py), but A100s.
const LARGE_CARD: u64 = 70 << 30;
/// Those of this and more, larger ones still (`get_batch_defaults`).
const LARGEST_CARD: u64 = 160 << 30;

/// Where the search for the longest sequence ends.
const ENDLESS: u64 = 1 << 40;

impl VllmPlan {
    fn is_large(&self, rules: &Rules) -> bool {
        let small = self.card.hosted || (rules.a100_is_small && self.card.is_a100());
        self.memory >= LARGE_CARD && !small
    }

    fn sequences(&self, rules: &Rules) -> u64 {
        self.max_num_seqs.unwrap_or(rules.sequences[usize::from(self.is_large(rules))])
    }

    fn batched(&self, rules: &Rules, length: u64) -> u64 {
        let usual = match rules.v1 {
            true if self.memory >= LARGEST_CARD && self.is_large(rules) => rules.largest_batch,
            true if self.is_large(rules) => 8192,
            true => 2048,
            // Before V1 prompts were cut in chunks from 32k on only.
            false if length > 32_768 => rules.chunk,
            false => length.max(2048),
        };
        let all = if rules.bounded_batch { self.sequences(rules).saturating_mul(length) } else { u64::MAX };
        self.max_num_batched_tokens.unwrap_or(usual.min(all))
    }

    /// The budget of a model: that of the pipeline stage whose cache holds least.
    pub fn budget(&self, model: &ServedModel) -> Budget {
        self.budget_with(model, None)
    }

    /// The budget of a model whose tokens are guessed ahead by another.
    pub fn budget_with(&self, model: &ServedModel, draft: Option<&Draft>) -> Budget {
        let stages = self.pipeline_parallel.clamp(1, 1024);
        let all = (0..stages).map(|stage| self.stage_budget(model, draft, stage, stages));
        let fewest = all.min_by_key(|budget| (budget.blocks, u64::MAX - budget.missing));
        fewest.unwrap_or_else(|| self.stage_budget(model, draft, 0, 1))
    }

    fn stage_budget(&self, model: &ServedModel, draft: Option<&Draft>, stage: u64, stages: u64) -> Budget {
        let rules = rules(&self.version);
        let tensor = self.tensor_parallel.max(1);
        let length = self.max_model_len.unwrap_or(model.longest).max(1);
        let (sequences, batched) = (self.sequences(&rules), self.batched(&rules, length));
        let layers = load::stage_layers(model.layers.len() as u64, stage, stages);
        let ends = [stage == 0, stage + 1 == stages];
        let experts = tensor.saturating_mul(self.data_parallel.max(1));
        let tiles = load::Tiles::of(&self.card, &rules);
        let hopper = self.card.is_hopper();
        let machete = rules.awq_machete && hopper;
        let swizzle = load::Swizzle::of(&self.card, &rules);
        let rank = load::Rank {
            tensor,
            experts,
            whole_experts: self.expert_parallel,
            layers,
            ends,
            tiles,
            hopper,
            machete,
            swizzle,
            pads: load::pads_experts(model, &self.card),
        };
        let sampled = if ends[1] { sequences } else { 0 };
        let batch = profile::Batch { sequences: sampled, tokens: batched, length };
        let second = second::runs(model, &rules, draft);
        let kept = self.kept(model, &rules, batch, second);
        let loaded = load::weights(model, rank, &rules, self.lora, &kept);
        // `make_layers` wraps decoder layers alone: tables and the head stay on the card.
        let own = model.layers.get(index(layers[0])..index(layers[1])).unwrap_or_default();
        let movable = own.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.split / tensor + layer.whole));
        let offloaded = self.offloaded.min(movable).min(loaded.weights);
        let beside = load::deepstack(model, batched)
            .saturating_add(load::inputs_of_layers(model, batched))
            .saturating_add(load::streams(model, batched));
        let weights = (loaded.weights - offloaded).saturating_add(beside);
        let profiled = self.activations(model, &rules, batch, second);
        let first = if ends[0] { self.compiling(model, &rules, batch, rank) } else { 0 };
        let activations = loaded.kept.saturating_add(profiled.max(first));
        // What comes from the stage before, and its residual.
        let received = if ends[0] || !rules.v1 { 0 } else { profile::two(batched, model.hidden.saturating_mul(2)) };
        let activations = activations.saturating_add(received);
        let graphs = graphs::Graphs {
            model,
            layers: layers[1].saturating_sub(layers[0]),
            tensor,
            sequences,
            batched,
            decoded: self.speculative_tokens.saturating_add(1),
            largest: self.largest_graph.or(model.vllm.largest_graph),
            card: &self.card,
            workspace: self.workspace,
            narrow: self.cache_dtype.size() < 2,
        };
        let captures = !self.enforce_eager;
        let left = Some(graphs).filter(|_| captures && rules.graphs_profiled && !second);
        let mut parts = vec![
            Share::new("weights", weights),
            Share::new("activations while profiling", activations),
            Share::new("outside torch", self.outside_torch(&rules, stages, model.hidden, left)),
        ];
        // Drafts are with the output.
        let draft = draft.filter(|_| ends[1]);
        if let Some(draft) = draft.filter(|draft| draft.weights > 0) {
            parts.push(Share::new("draft model", draft.weights));
        }
        if self.lora.is_some() {
            parts.push(Share::new("LoRA slots", loaded.slots));
        }
        let foreseen = !second || rules.second_foresees;
        let counted = rules.graphs_in_budget && captures && foreseen;
        if counted {
            parts.push(Share::new("CUDA graphs", graphs.foreseen(second)));
        }
        let granted = thousandths(self.memory, self.utilization_thousandths);
        let held = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        let cache = self.cache_bytes.unwrap_or_else(|| granted.saturating_sub(held));
        let mut budget = self.pool(model, draft, cache, layers);
        budget.engine = format!("vLLM {}", self.version);
        budget.granted = granted;
        // A pool of given size must fit the card, not the share.
        budget.missing = match self.cache_bytes {
            Some(asked) => held.saturating_add(asked).saturating_sub(self.memory),
            None => held.saturating_sub(granted),
        };
        budget.fits &= budget.missing == 0;
        budget.parts = parts;
        if self.compiled_before && !self.compiles(model, &rules) {
            budget.notes.push(
                "--compile-cache changes nothing: a first start of this kind holds no more than a later one".into(),
            );
        }
        if self.flashinfer && (second || !rules.samples || !(rules.sampler_sorts || rules.sampler_buffers)) {
            budget.notes.push("--flashinfer-sampler changes nothing: this version samples by it, or sorts no logits while it profiles".into());
        }
        if first > profiled {
            let more = (first - profiled) as f64 / f64::from(1u32 << 30);
            budget.notes.push(format!("a first start, which compiles; one that finds what it compiled (--compile-cache) has {more:.2} GiB more for the cache"));
        }
        if counted {
            let text = "CUDA graphs: what the driver holds of a graph is the median of logs of an H100; vLLM's own estimate varies";
            budget.notes.push(text.into());
        }
        budget.notes.extend(self.host_note());
        if offloaded > 0 {
            let [held, all] = [offloaded, movable].map(|bytes| bytes as f64 / f64::from(1u32 << 30));
            let all = if offloaded == movable { "all layers" } else { &format!("of {all:.2} GiB of layers") };
            budget.notes.push(format!("in the host's memory, pinned: {held:.2} GiB, {all}; tables and the head stay"));
        }
        match (model.multimodal, model.image_encoder) {
            (true, None) => {
                budget.notes.push("the profile run of the image or audio encoder is not counted".into());
            }
            (true, Some(_)) => {
                let text = "images in the profile run are counted by the encoder's widest layer";
                budget.notes.push(text.into());
            }
            _ => {}
        }
        budget
    }

    /// What a pool of `cache` bytes holds.
    pub fn blocks(&self, model: &ServedModel, draft: Option<&Draft>, cache: u64) -> Budget {
        self.pool(model, draft, cache, [0, model.layers.len() as u64])
    }

    fn pool(&self, model: &ServedModel, draft: Option<&Draft>, cache: u64, layers: [u64; 2]) -> Budget {
        let rules = rules(&self.version);
        // Cards that share a sequence hold every so manieth token of it (`max_memory_usage_bytes` of kv_cache_interface.py).
        let shared = self.context_parallel.max(1);
        let whole = self.max_model_len.unwrap_or(model.longest).max(1);
        let length = whole.div_ceil(shared);
        // Batches that are computed but whose tokens are not settled yet hold blocks of sliding layers too.
        let batches = if rules.batches_in_flight { self.pipeline_parallel.max(1).saturating_add(1) } else { 1 };
        let batched = self.batched(&rules, length).saturating_mul(batches);
        let mut own = model.clone();
        let [from, to] = layers.map(|at| index(at).min(model.layers.len()));
        own.layers = model.layers.get(from..to).unwrap_or_default().to_vec();
        own.layers.extend(draft.into_iter().flat_map(|draft| draft.layers.iter().cloned()));
        let terms = Terms {
            element: Element::plain(self.cache_dtype),
            dtype: self.cache_dtype,
            ranks: self.tensor_parallel.max(1),
            block_size: self.block_size,
            prefix_caching: self.prefix_caching,
            speculative_tokens: self.speculative_tokens,
        };
        let layout = Layout::new(&own, terms, &rules);
        let blocks = cache / layout.block_bytes.max(1);
        let need = layout.blocks(length, batched).max(1);
        let concurrency = u128::from(blocks) * 1000 / u128::from(need);
        let tokens = if rules.tokens_by_concurrency {
            u128::from(blocks) * u128::from(length) / u128::from(need)
        } else {
            u128::from(blocks / layout.group_count().max(1)) * u128::from(layout.block_size)
        };
        let tokens = tokens * u128::from(shared);
        let longest = super::solve::largest(1, ENDLESS, |length| layout.blocks(length, batched) <= blocks);
        // Windows alone hold as little of any length: only the model ends it.
        let longest = longest.map(|length| if length == ENDLESS { whole } else { length.saturating_mul(shared) });
        Budget {
            engine: String::new(),
            granted: 0,
            parts: Vec::new(),
            cache,
            missing: 0,
            cache_tokens: u64::try_from(tokens).unwrap_or(u64::MAX),
            blocks,
            block_size: layout.block_size,
            full_length: whole,
            full_bytes: need.saturating_mul(layout.block_bytes),
            concurrency_thousandths: u64::try_from(concurrency).unwrap_or(u64::MAX),
            fits: need <= blocks,
            largest_sequence: longest.unwrap_or(0),
            notes: Vec::new(),
        }
    }
}

fn index(layer: u64) -> usize {
    usize::try_from(layer).unwrap_or(usize::MAX)
}
