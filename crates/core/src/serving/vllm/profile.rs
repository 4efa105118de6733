//! The profile run: a full batch through the model, then the sampler on all sequences; its peak is set aside.

use super::rules::Rules;
use super::{VllmPlan, encoder, folded, load, second, tuned};
use crate::model::op::{CacheKind, CacheUpdate};
use crate::serving::model::ServedModel;

/// Tokens of latent attention's workspace at most, and what it is asked to hold
/// (`determine_chunked_prefill_workspace_size` of vllm/v1/attention/backends/mla/common.py, v0.11.0).
const LATENT_WORKSPACE: u64 = 64 << 10;

/// Bytes of a logit when the profile run samples: in 16 bits and in fp32 (`_dummy_sampler_run` of gpu_model_runner.py).
const LOGIT: u64 = 2 + 4;
/// What sorting gives: values and indices.
const SORTED: u64 = 4 + 8;
/// What sorting takes (`sort_stable_kernel` of torch's Sort.cu; traces of torch 2.11): indices in another order, and CUB's copies
/// of values and indices.
const SORTING: u64 = 8 + 12;
/// With fewer than 128 rows all are sorted at once and then by their rows: two lists of indices, one of rows, CUB's copies.
const SORTING_ROWS: u64 = 8 + 8 + 4 + 12;
/// Logits for each of which CUB then has 1 KiB of counts (384 threads with 14 each, in the same traces).
const SORT_TILE: u64 = 384 * 14;
/// Without sorting: probabilities and the noise they are divided by.
const SAMPLING: u64 = 4 + 4;

/// The batch that is profiled.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch {
    /// Sequences that are sampled; none where another pipeline stage does it.
    pub(super) sequences: u64,
    /// Tokens.
    pub(super) tokens: u64,
    /// `--max-model-len`.
    pub(super) length: u64,
}

/// Bytes of 16-bit rows.
pub(super) fn two(rows: u64, width: u64) -> u64 {
    rows.saturating_mul(width).saturating_mul(2)
}

impl VllmPlan {
    /// Tensors that stay from the profile run on: cuBLAS's workspace, the experts', what the second runner samples with.
    pub(super) fn kept(&self, model: &ServedModel, rules: &Rules, batch: Batch, second: bool) -> Vec<u64> {
        let mut kept = if second { second::states(model, batch.sequences) } else { Vec::new() };
        kept.push(self.workspace);
        if second && model.vllm.turns_in_single {
            kept.push(two(model.positions, model.turned));
        }
        kept.extend(Some(self.shared(model, rules, batch)).filter(|bytes| *bytes > 0));
        if folded::streams(model) > 0 && self.card.capability >= 120 {
            kept.push(folded::FLASHINFER);
        }
        kept
    }

    /// One workspace for all who ask, as large as the largest, from the text's run on (v1/worker/workspace.py).
    fn shared(&self, model: &ServedModel, rules: &Rules, batch: Batch) -> u64 {
        match rules.experts_kept && model.chosen_experts > 0 && !self.swizzles(model, rules) {
            true => self.expert_buffers(model, rules, batch.tokens).max(folded::gathered(model, batch.length)),
            false => 0,
        }
    }

    /// The peak of the profile run above the weights and what stays, of which an encoder, which runs first, finds no workspace.
    pub(super) fn activations(&self, model: &ServedModel, rules: &Rules, batch: Batch, second: bool) -> u64 {
        let tensor = self.tensor_parallel.max(1);
        let sampler = if second { second::logits(model, batch, tensor) } else { self.sampler(model, rules, batch) };
        // Embeddings, residual and norm; the feed-forward's two halves and their product.
        let compiled = model.hidden.saturating_mul(3).saturating_add(model.width.saturating_mul(3) / tensor);
        let passed = if self.enforce_eager { 0 } else { tuned::passed(model, rules, tensor) };
        let compiled = compiled.saturating_add(folded::streams(model).saturating_mul(2)).saturating_add(passed);
        let eager = second && self.enforce_eager;
        let dense = two(
            batch.tokens,
            if eager {
                second::layer(model, tensor, load::Tiles::of(&self.card, rules).hidden(model))
            } else {
                compiled
            },
        );
        let experts = match rules.experts_kept {
            true if self.swizzles(model, rules) => self.swizzled(model, batch.tokens),
            true if self.cuts(model, rules) => self.cut(model, batch.tokens),
            true => 0,
            false => self.experts(model, batch.tokens),
        };
        let [workspace, latent] = self.latent(model, batch, rules);
        // The second runner makes latent attention's workspace with the cache, after the profile.
        let workspace = if second { 0 } else { workspace };
        let (cached, encoder) = encoder::profile(model, rules, batch, tensor, second);
        let chosen =
            folded::chosen(model, batch.tokens).max(tuned::states(model, rules, &self.card, batch.tokens, tensor));
        let text = sampler.max(dense).max(experts).max(latent).max(chosen).saturating_add(cached);
        text.saturating_add(workspace).max(encoder.saturating_sub(self.shared(model, rules, batch)))
    }

    /// Whether a first start holds more than a later one. Over several cards what is looked up is summed before anything else
    /// (`VocabParallelEmbedding.forward` of vocab_parallel_embedding.py), so that no kernel which reads the table is tried out
    /// with what follows: e3, e4, e21 and p10 of truth/external/found have no second table.
    pub(super) fn compiles(&self, model: &ServedModel, rules: &Rules) -> bool {
        rules.benchmarks && !self.enforce_eager && !model.multimodal && self.tensor_parallel <= 1
    }

    /// What a first start holds while it compiles: what the kernel reads that looks words up, made once more, and its output. Tensors
    /// of kernels that inductor tries out are made at random (`benchmark_fused_nodes` and `benchmark_combo_kernel` of torch's
    /// scheduler.py). By its size in pairs of logs (g1 and g2, d4, e17 and e27 of truth/external/found, in all of which the rest is
    /// the same). With encoders the model is given embeddings instead.
    pub(super) fn compiling(&self, model: &ServedModel, rules: &Rules, batch: Batch, rank: load::Rank) -> u64 {
        if self.compiled_before || !self.compiles(model, rules) {
            return 0;
        }
        load::table(model, rank, rules, self.lora).saturating_add(two(batch.tokens, model.hidden))
    }

    /// Latent attention: the workspace that stays, and the keys and values it would be unpacked to.
    fn latent(&self, model: &ServedModel, batch: Batch, rules: &Rules) -> [u64; 2] {
        let kept = |cache: &CacheUpdate| match cache.kind {
            CacheKind::Latent { expanded } => Some((expanded, cache.key_dim, cache.value_dim)),
            _ => None,
        };
        let found = model.layers.iter().flat_map(|layer| &layer.caches).find_map(kept);
        let Some((expanded, rank, turned)) = found.filter(|_| rules.v1) else { return [0, 0] };
        let heads = (model.heads / self.tensor_parallel.max(1)).max(1);
        let per_head = (expanded / model.heads.max(1)).saturating_sub(turned);
        let pages = self.max_num_seqs.unwrap_or(batch.sequences).saturating_mul(self.block_size);
        let tokens = batch.length.saturating_mul(8).max(pages.saturating_mul(4)).min(LATENT_WORKSPACE).max(pages);
        let unpacked = two(tokens, heads.saturating_mul(per_head));
        let query = heads.saturating_mul(per_head / 2 + turned).saturating_add(heads.saturating_mul(per_head / 2));
        let around =
            two(batch.tokens, model.hidden.saturating_mul(3).saturating_add(query).saturating_add(rank + turned));
        [two(tokens, rank + turned), unpacked.saturating_add(around)]
    }

    fn sampler(&self, model: &ServedModel, rules: &Rules, batch: Batch) -> u64 {
        let rows = batch.sequences.min(batch.tokens);
        if !rules.samples && rows > 0 {
            // Logits of every token in 16 bits, then in fp32.
            let logits = batch.tokens.saturating_mul(model.vocabulary).saturating_mul(6);
            return two(batch.tokens, model.hidden).saturating_add(logits);
        }
        let count = rows.saturating_mul(model.vocabulary);
        // FlashInfer masks what is not among the likeliest, and makes probabilities of the rest: as much as without it, unsorted
        // (`top_k_top_p_sampling_from_logits`).
        let sorts = (rules.sampler_sorts || rows < 8) && !self.flashinfer;
        let logits = count.saturating_mul(LOGIT).saturating_add(match (sorts, rows) {
            (true, 2..128) => {
                count.saturating_mul(SORTED + SORTING_ROWS).saturating_add(count.div_ceil(SORT_TILE) << 10)
            }
            (true, _) => count.saturating_mul(SORTED + SORTING),
            (false, _) => count.saturating_mul(SAMPLING),
        });
        // A row for every multiprocessor that has a sequence (`_TRITON_BUFFER_CACHE` of topk_topp_triton.py).
        let programs = rows.min(self.multiprocessors).next_power_of_two().min(self.multiprocessors);
        let buffered = rules.sampler_buffers && rows >= 8 && !self.flashinfer;
        let buffers = if buffered { programs.saturating_mul(model.vocabulary).saturating_mul(4) } else { 0 };
        // Hidden states of the batch; those that are sampled, and noise of the same size in their stead.
        two(batch.tokens, model.hidden)
            .saturating_add(two(rows.saturating_mul(2), model.hidden))
            .saturating_add(logits)
            .saturating_add(buffers)
    }
}
