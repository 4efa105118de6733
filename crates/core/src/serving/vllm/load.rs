//! Weights as vLLM's loader leaves them on a card: fused matrices, in blocks of torch's caching allocator.
//!
//! "Model loading took" is a difference of *allocated*, which counts whole blocks: a matrix of 35 MiB fills a segment of
//! 36 MiB, whose last MiB is too small to be split off. Over all layers that is up to 2 % of the weights. Since 0.21
//! blocks of 20 MiB and more are not split at all while loading.

use std::rc::Rc;

use super::rules::HopperLayout;
use super::{Card, Rules, folded};
use crate::dtype::DType;
use crate::memory::allocator;
use crate::memory::log::{Event, SharedLog, Storage};
use crate::memory::phase::Work;
use crate::model::Shape;
use crate::model::facts::AdaptedTables;
use crate::plan::AllocatorOptions;
use crate::serving::model::ServedModel;
use crate::serving::tensors::{Division, ServedTensor};

/// Matrices that vLLM joins in one parameter (`packed_modules_mapping` of its models), and their common name.
const FUSED: &[(&str, &str)] = &[
    ("q_proj", "qkv_proj"),
    ("k_proj", "qkv_proj"),
    ("v_proj", "qkv_proj"),
    ("gate_proj", "gate_up_proj"),
    ("up_proj", "gate_up_proj"),
    ("w1", "w13"),
    ("w3", "w13"),
    ("q_a_proj", "fused_qkv_a_proj"),
    ("kv_a_proj_with_mqa", "fused_qkv_a_proj"),
    ("in_proj_qkv", "in_proj_qkvz"),
    ("in_proj_z", "in_proj_qkvz"),
    ("in_proj_b", "in_proj_ba"),
    ("in_proj_a", "in_proj_ba"),
];

/// Projections into the latent of multi-head latent attention, which every card holds whole as it does all of an indexer's, and
/// out of Zamba2's shared blocks.
const WHOLE: &[&str] = &["q_a_proj", "kv_a_proj_with_mqa", "linear"];

/// The card whose weights are counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rank {
    /// Tensor-parallel cards.
    pub(super) tensor: u64,
    /// Cards over which experts are spread: tensor times data parallel.
    pub(super) experts: u64,
    /// Whether those hold whole experts, or parts of all.
    pub(super) whole_experts: bool,
    /// Decoder layers of this pipeline stage, from and to.
    pub(super) layers: [u64; 2],
    /// Whether the stage is the first, and whether it is the last.
    pub(super) ends: [bool; 2],
    /// What kernels for experts in MXFP4 are padded to.
    pub(super) tiles: Tiles,
    /// Whether GPTQ runs in Hopper's own kernel.
    pub(super) hopper: bool,
    /// Whether AWQ does, too.
    pub(super) machete: bool,
    /// How Triton has experts in MXFP4.
    pub(super) swizzle: Swizzle,
    /// Whether experts in NVFP4 are padded.
    pub(super) pads: bool,
}

/// Experts of NVFP4 whose activation has no gate are padded to whole rows of scales on Blackwell, where CUTLASS runs them and
/// not Marlin (`prepare_nvfp4_moe_layer_for_fi_or_cutlass` of flashinfer_fp4_moe.py, v0.21.0; modelopt.py before).
pub(super) fn pads_experts(model: &ServedModel, card: &Card) -> bool {
    let mut experts = model.tensors.iter().filter(|tensor| tensor.division == Division::Experts).peekable();
    let gate = |tensor: &ServedTensor| ["gate", ".w3.", ".w13"].iter().any(|name| tensor.name.contains(name));
    card.capability >= 100 && experts.peek().is_some() && !experts.any(gate)
}

/// Rows of scales that lie together (`swizzle_blockscale` of nvfp4_utils.py).
const SCALE_ROWS: u64 = 128;

/// Sides of an expert's matrix are padded to whole tiles: the residual stream's, and the expert's own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles([u64; 2]);

impl Tiles {
    /// The residual stream as these experts have it.
    pub(super) fn hidden(self, model: &ServedModel) -> u64 {
        let packed = model.tensors.iter().any(|tensor| tensor.division == Division::Experts && is_mxfp4(tensor));
        if packed { model.hidden.next_multiple_of(self.0[0]) } else { model.hidden }
    }

    /// By the kernel that a card gets (`get_mxfp4_backend` and `create_weights` of vLLM's mxfp4.py, v0.11.0): Triton on
    /// Hopper where vLLM brings it, FlashInfer on Blackwell's data-centre cards, Marlin on all others.
    pub(super) fn of(card: &Card, rules: &Rules) -> Self {
        Self(match (card.is_hopper() && rules.hopper.is_some(), card.is_large_blackwell()) {
            (true, _) => [1, 64],
            (_, true) => [256, 256],
            _ => [256, 128],
        })
    }
}

/// The layout of experts in MXFP4 where Triton's kernels run them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Swizzle {
    /// Another kernel does.
    None,
    Hopper(HopperLayout),
    /// Where FlashInfer's kernels are not installed, as they are not by `pip install vllm` alone.
    Blackwell,
}

impl Swizzle {
    /// By the card (`select_mxfp4_moe_backend` of vLLM's mxfp4.py, v0.32.0).
    pub(super) fn of(card: &Card, rules: &Rules) -> Self {
        match rules.swizzles {
            _ if card.is_hopper() => rules.hopper.map_or(Self::None, Self::Hopper),
            true if card.is_large_blackwell() => Self::Blackwell,
            _ => Self::None,
        }
    }

    /// Bytes of a card's experts: `[outputs, inputs]` in four bits, or a byte of scale for 32 inputs.
    fn bytes(self, experts: u64, [outputs, inputs]: [u64; 2], scales: bool) -> u64 {
        let (rows, columns) = match (self, scales) {
            // Pieces of 256 outputs.
            (Self::Hopper(layout), true) => {
                (outputs.next_multiple_of(256), inputs.div_ceil(32).next_multiple_of(layout.groups))
            }
            (Self::Hopper(layout), false) => {
                (outputs.next_multiple_of(layout.values), (inputs / 2).next_multiple_of(layout.values))
            }
            (Self::None, false) => (outputs, inputs / 2),
            // Inputs in whole pieces of 128 bytes, scales in tiles of 128 by 4 (blackwell_value.py, blackwell_scale.py).
            (_, false) => (outputs, inputs.next_multiple_of(256) / 2),
            (_, true) => (outputs.next_multiple_of(128), inputs.next_multiple_of(256) / 32),
        };
        experts.saturating_mul(rows).saturating_mul(columns)
    }
}

/// The card's rows of the table of words, and the adapters' rows beside them.
pub(super) fn table(model: &ServedModel, rank: Rank, rules: &Rules, lora: Option<[u64; 2]>) -> u64 {
    let of = |tensor: &&ServedTensor| tensor.division == Division::Table && !model.is_head(tensor);
    let own = model.tensors.iter().find(of).map_or(0, |tensor| own_share(model, tensor, tensor.bytes(), rank));
    let [slots, rows] = lora.filter(|_| adapts_tables(model, rules)).unwrap_or_default();
    own.saturating_add(slots.saturating_mul(rows).saturating_mul(model.vocabulary).saturating_mul(2))
}

/// Buffers for what an encoder adds to the text's first layers, a row for every token of a batch (`deepstack_input_embeds` of
/// qwen3_vl.py).
pub(super) fn deepstack(model: &ServedModel, batched: u64) -> u64 {
    let further = model.image_encoder.map_or(0, |encoder| encoder.streams.saturating_sub(1));
    further.saturating_mul(batched).saturating_mul(model.hidden).saturating_mul(2)
}

/// A buffer for the inputs of every layer that stand beside the stream, a row for every token of a batch
/// (`per_layer_embeddings` of gemma3n_mm.py and gemma4_mm.py).
pub(super) fn inputs_of_layers(model: &ServedModel, batched: u64) -> u64 {
    let rows = model.tensors.iter().find(|tensor| tensor.name.contains("per_layer_model_projection"));
    let width = rows.filter(|_| model.multimodal).map_or(0, |tensor| tensor.shape.first().copied().unwrap_or(0));
    width.saturating_mul(batched).saturating_mul(2)
}

/// The streams of a batch that a layer for further tokens reads (`_mtp_hidden_buffer` of models/deepseek_v4), made with the model.
pub(super) fn streams(model: &ServedModel, batched: u64) -> u64 {
    folded::streams(model).saturating_mul(batched).saturating_mul(2)
}

/// The layers of a pipeline stage: equal shares, what is left over goes to the stages before the last
/// (`get_pp_indices` of vllm/distributed/utils.py).
pub(super) fn stage_layers(layers: u64, stage: u64, stages: u64) -> [u64; 2] {
    let (share, over) = (layers / stages, layers % stages);
    let own = |index: u64| share + u64::from(index + 1 < stages && index + 1 + over >= stages);
    let first = (0..stage).map(own).sum::<u64>();
    [first, first + own(stage)]
}

/// A parameter of the card.
struct Piece {
    name: String,
    parts: Vec<u64>,
}

/// What a card holds after loading.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loaded {
    pub(super) weights: u64,
    /// The slots of adapters.
    pub(super) slots: u64,
    /// What stays besides, and what torch reserved beyond all of it where that counts.
    pub(super) kept: u64,
}

/// Loads a card's share; `kept` are tensors that stay besides.
pub(super) fn weights(model: &ServedModel, rank: Rank, rules: &Rules, lora: Option<[u64; 2]>, kept: &[u64]) -> Loaded {
    let log = SharedLog::default();
    log.borrow_mut().phase(Work::Weights.into());
    let mut held: Vec<Rc<Storage>> = Vec::new();
    let take = |bytes: u64| Storage::of_bytes(&log, "parameter", bytes, Shape::from([bytes]), DType::U8);
    if rules.by_transformers && BY_TRANSFORMERS.contains(&model.architecture.as_str()) {
        model.tensors.iter().for_each(|tensor| drop(take(tensor.bytes())));
    }
    let pieces = pieces(model, rank, rules);
    let turns = pieces.iter().position(|piece| OUTPUTS.iter().any(|name| piece.name.contains(name)));
    for (at, piece) in pieces.into_iter().enumerate() {
        held.extend(piece.parts.into_iter().map(take));
        if turns == Some(at) {
            held.extend(model.tables.iter().map(|rows| rotary(model, *rows, &take)));
        }
    }
    log.borrow_mut().phase(Work::Adapters.into());
    if let Some([count, rows]) = lora {
        held.extend(slots(model, rank, rules, count.max(1), rows).into_iter().map(take));
    }
    log.borrow_mut().phase(Work::Load.into());
    held.extend(kept.iter().copied().map(take));
    // Before profiling (`memory_profiling` of mem_utils.py).
    log.borrow_mut().events.push(Event::EmptyCache);
    log.borrow_mut().end_phase();
    let options = AllocatorOptions { max_split_size: rules.load_max_split, ..AllocatorOptions::default() };
    let replay = allocator::replay(&log.borrow(), options, None);
    drop(held);
    let after = |index: usize| replay.phases.get(index).map_or(0, |phase| phase.after);
    let whole = if rules.reserved_counts { replay.phases.get(2).map_or(0, |phase| phase.reserved) } else { after(2) };
    Loaded { weights: after(0), slots: after(1) - after(0), kept: whole - after(1) }
}

/// Architectures that transformers' own classes run (`_TRANSFORMERS_SUPPORTED_MODELS` of vLLM's registry.py, v0.32.0): every
/// matrix is made whole, let go, and made anew as this card's part, which finds larger blocks in the allocator's cache.
const BY_TRANSFORMERS: &[&str] = &[
    "ArceeForCausalLM",
    "CwmForCausalLM",
    "GlmForCausalLM",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "PhiForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
];

/// Projections out of attention, after which the first layer makes the table of turns (`LlamaAttention` of vllm's llama.py).
const OUTPUTS: &[&str] = &[".o_proj.", ".out_proj.", "attention.dense.", "self_attn.dense.", ".wo.", ".o_b_proj."];

/// The table of turns: angles, cosines, sines and both together in fp32, then in 16 bits. What is let go stays in the allocator's
/// cache, where blocks that are not split serve smaller weights (`_compute_cos_sin_cache` of rotary_embedding/base.py).
fn rotary(model: &ServedModel, rows: u64, take: &impl Fn(u64) -> Rc<Storage>) -> Rc<Storage> {
    let elements = rows.saturating_mul(model.turned);
    let angles = elements.saturating_mul(2);
    let single = [take(angles), take(angles), take(angles)];
    let both = take(elements.saturating_mul(4));
    drop(single);
    if model.vllm.turns_in_single {
        return both;
    }
    let table = take(elements.saturating_mul(2));
    drop(both);
    table
}

/// The card's parameters in the order in which they are made.
fn pieces(model: &ServedModel, rank: Rank, rules: &Rules) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let folds = model.layers.iter().any(folded::folds);
    for tensor in model.tensors.iter().filter(|tensor| on_stage(model, tensor, rank)) {
        let module = tensor.module();
        let fused = FUSED.iter().find(|(part, _)| *part == module).map(|(_, whole)| *whole);
        let name = fused.map_or_else(|| tensor.name.clone(), |whole| tensor.name.replace(module, whole));
        let held = |tensor: &ServedTensor| -> Vec<u64> {
            on_card(tensor, rank).into_iter().map(|part| own_share(model, tensor, part, rank)).collect()
        };
        let mut parts = held(tensor);
        if let Some((keys, missing)) = missing_keys(model, tensor) {
            let added = held(keys);
            parts.iter_mut().zip(added).for_each(|(sum, part)| *sum = sum.saturating_add(part.saturating_mul(missing)));
        }
        // Triton's experts have biases in fp32 (`convert_gpt_oss_weight_to_mxfp4_moe_kernel_format`).
        let single = rank.swizzle != Swizzle::None
            && model.vllm.turns_in_single
            && tensor.name.contains("experts")
            && module.ends_with("bias");
        let parts: Vec<u64> = if single { parts.iter().map(|part| part.saturating_mul(2)).collect() } else { parts };
        // Decays are kept in fp32 (`self.A` of mamba_mixer.py).
        let single = || tensor.shape.iter().product::<u64>().saturating_mul(4);
        let parts = match module {
            "A_log" => vec![single() / rank.tensor],
            // What mixes the streams, and the bias of folded positions (`nn.Parameter` of deepseek_v4/model.py, compressor.py).
            "fn" | "hc_fn" | "position_bias" if folds => vec![single()],
            _ => parts,
        };
        match pieces.iter_mut().rev().take(16).find(|piece| fused.is_some() && piece.name == name) {
            Some(piece) if piece.parts.len() == parts.len() => {
                piece.parts.iter_mut().zip(&parts).for_each(|(sum, part)| *sum = sum.saturating_add(*part));
            }
            _ => pieces.push(Piece { name, parts }),
        }
        // Attention over latents multiplies by both halves of this in 16 bits, whatever it is stored in: a copy of what is
        // quantised (`process_weights_after_loading` of mla/common.py).
        if module == "kv_b_proj" && tensor.quantised {
            let copy = tensor.shape.iter().product::<u64>().saturating_mul(2) / rank.tensor;
            pieces.push(Piece { name: "kv_b_proj in 16 bits".into(), parts: vec![copy] });
        }
        if module == "kv_b_proj" && rules.absorbs {
            let parts = absorbed(model, tensor).into_iter().flatten().map(|bytes| bytes / rank.tensor).collect();
            pieces.push(Piece { name: "absorbed".into(), parts });
        }
    }
    pieces
}

/// Products that stay for tokens that are generated, the raw matrices for prompts (`W_Q_UK`, `W_QR` and `W_UV_O` of mla/utils.py,
/// v0.7.1): queries times keys and values times outputs, stored as those are, and the turned part of the queries in 16 bits. Of
/// matrices in four bits none are made: vLLM then has no latents.
fn absorbed(model: &ServedModel, latent: &ServedTensor) -> Option<[u64; 3]> {
    let own = model.tensors.iter().filter(|tensor| tensor.layer.is_some() && tensor.layer == latent.layer);
    let of = |names: &[&str]| {
        let found = own.clone().find(|tensor| names.contains(&tensor.module()))?;
        Some([*found.shape.first()?, *found.shape.get(1)?])
    };
    let ([queries, inner], [stream, values]) = (of(&["q_b_proj", "q_proj"])?, of(&["o_proj"])?);
    let [both, width] = [*latent.shape.first()?, *latent.shape.get(1)?];
    let size = (latent.bytes() / both.saturating_mul(width).max(1)).min(2);
    let turned = queries.saturating_add(values).saturating_sub(both);
    let product = |outer: u64| outer.saturating_mul(model.heads).saturating_mul(width).saturating_mul(size);
    (size > 0).then(|| [product(inner), inner.saturating_mul(turned).saturating_mul(2), product(stream)])
}

/// The keys' matrix that stands for those which a layer of these queries has in vLLM and not in its checkpoint, and how many they
/// are: values that are the keys, or both where another layer's are taken.
fn missing_keys<'a>(model: &'a ServedModel, queries: &ServedTensor) -> Option<(&'a ServedTensor, u64)> {
    let layer = queries.layer.filter(|_| model.vllm.all_keys && queries.module() == "q_proj")?;
    let of = |module: &'static str| {
        move |tensor: &&ServedTensor| tensor.layer.is_some() && tensor.module() == module && tensor.shape.len() == 2
    };
    let here = |module| model.tensors.iter().filter(of(module)).find(|tensor| tensor.layer == Some(layer));
    match (here("k_proj"), here("v_proj")) {
        (Some(_), Some(_)) => None,
        (Some(keys), None) => Some((keys, 1)),
        (None, _) => {
            // The last layer of the same kind that has its own.
            let kind = model.tensors.iter().filter(of("q_proj")).filter(|tensor| tensor.shape == queries.shape);
            let layers: Vec<usize> = kind.filter_map(|tensor| tensor.layer).collect();
            let own = model.tensors.iter().filter(of("k_proj"));
            let mut own = own.filter(|keys| keys.layer.is_some_and(|at| at < layer && layers.contains(&at)));
            own.next_back().map(|keys| (keys, 2))
        }
    }
}

/// What stays of a matrix when it is loaded. GPTQ's zeros, all alike, and its order of inputs are let go by the kernel that
/// runs it (`process_weights_after_loading` of gptq_marlin.py: `marlin_make_empty_zp`, `marlin_make_empty_g_idx`).
/// The kernel for Hopper keeps both, and unpacks AWQ's zeros to 16 bits (`transform_w_zp` of machete.py).
fn on_card(tensor: &ServedTensor, rank: Rank) -> Vec<u64> {
    let kept = rank.hopper && tensor.division != Division::Experts;
    match tensor.parts[..] {
        // Others have as many parts, whose second is scales: NVFP4, compressed-tensors.
        [packed, zeros, scales, _] if zeros < scales && !kept => vec![packed, scales],
        [packed, zeros, scales] if rank.machete && zeros < scales => vec![packed, scales, scales],
        _ => tensor.parts.clone(),
    }
}

fn on_stage(model: &ServedModel, tensor: &ServedTensor, rank: Rank) -> bool {
    match tensor.layer {
        Some(layer) => (rank.layers[0]..rank.layers[1]).contains(&(layer as u64)),
        // Encoders of images are with the embedding; a tied table is at both ends.
        None if model.is_head(tensor) => rank.ends[1],
        None if tensor.division == Division::Table => rank.ends[0] || (rank.ends[1] && model.head == 0),
        None => rank.ends[0],
    }
}

/// Whether a matrix is in MXFP4: a byte of scale for 32 elements in 4 bits.
pub(super) fn is_mxfp4(tensor: &ServedTensor) -> bool {
    matches!(tensor.parts[..], [blocks, scales] if scales > 0 && blocks == scales.saturating_mul(16))
}

/// Whether a matrix is in NVFP4: a byte of scale for 16 elements in 4 bits, and scales of the whole.
pub(super) fn is_nvfp4(tensor: &ServedTensor) -> bool {
    matches!(tensor.parts[..], [packed, scales, _, ..] if scales > 0 && packed == scales.saturating_mul(8))
}

/// Bytes of a card's experts in MXFP4, in whole tiles.
fn tiled(model: &ServedModel, tensor: &ServedTensor, bytes: u64, rank: Rank) -> u64 {
    let [_, rows, columns] = tensor.shape[..] else { return bytes };
    let (hidden, width) = (model.hidden.max(1), model.expert_width.max(1));
    let halves = (rows.saturating_mul(columns) / hidden / width).max(1);
    let cards = if rank.whole_experts { 1 } else { rank.experts.max(1) };
    let tile = if rank.swizzle == Swizzle::None { rank.tiles.0[1] } else { 64 };
    let own = (width / cards).next_multiple_of(tile);
    if rank.swizzle != Swizzle::None {
        let sides = if halves == 1 { [hidden, own] } else { [own.saturating_mul(halves), hidden] };
        let scales = tensor.parts.get(1) == Some(&bytes);
        let kept = matches!(rank.swizzle, Swizzle::Hopper(layout) if scales && layout.scales_kept);
        let kept = if kept { bytes } else { 0 };
        return rank.swizzle.bytes(tensor.shape[0], sides, scales).saturating_mul(cards).saturating_add(kept);
    }
    let padded = hidden.next_multiple_of(rank.tiles.0[0]).saturating_mul(own).saturating_mul(halves);
    let plain = u128::from((rows.saturating_mul(columns) / cards).max(1));
    u64::try_from(u128::from(bytes) * u128::from(padded) / plain).unwrap_or(u64::MAX)
}

fn own_share(model: &ServedModel, tensor: &ServedTensor, bytes: u64, rank: Rank) -> u64 {
    let module = tensor.module();
    let bytes = match tensor.division {
        Division::Experts if is_mxfp4(tensor) => tiled(model, tensor, bytes, rank),
        Division::Experts if rank.pads && is_nvfp4(tensor) => {
            let cards = if rank.whole_experts { 1 } else { rank.experts.max(1) };
            let own = (model.expert_width / cards).max(1);
            bytes / own * own.next_multiple_of(SCALE_ROWS)
        }
        _ => bytes,
    };
    match tensor.division {
        Division::Whole => bytes,
        Division::Split if WHOLE.contains(&module) || tensor.name.contains(".indexer.") => bytes,
        // Keys of one head and what folds them (`disable_tp` in models/deepseek_v4/attention.py and compressor.py).
        Division::Split if tensor.name.contains(".compressor.") || module == "kv_proj" && model.kv_heads == 1 => bytes,
        Division::Split if tensor.layer.is_some() && (module == "k_proj" || module == "v_proj") => {
            // Fewer heads than cards are repeated.
            let heads = model.kv_heads.max(1);
            bytes / heads * heads.div_ceil(rank.tensor).max(1)
        }
        Division::Split if module == "in_proj" && model.has_second_mamba() && model.state_groups < rank.tensor => {
            // Every card has a group of its own (`extra_groups_for_head_shards` of mamba_utils.py).
            let rows = tensor.shape.first().copied().unwrap_or(1).max(1);
            let grouped = model.state_groups.saturating_mul(model.state_size).saturating_mul(2);
            let own = rows.saturating_sub(grouped) / rank.tensor + model.state_size.saturating_mul(2);
            bytes / rows * own
        }
        Division::Split => bytes / rank.tensor,
        Division::Experts if rank.whole_experts => {
            // The first cards hold one more where they do not divide (`determine_expert_map`).
            let count = tensor.shape.first().copied().unwrap_or(1).max(1);
            bytes / count * count.div_ceil(rank.experts.max(1))
        }
        Division::Experts => bytes / rank.experts.max(1),
        Division::Table => {
            // Rows are padded to 64, then to the number of cards (vocab_parallel_embedding.py).
            let rows = model.vocabulary.max(1);
            bytes / rows * rows.next_multiple_of(64).div_ceil(rank.tensor)
        }
    }
}

fn adapts_tables(model: &ServedModel, rules: &Rules) -> bool {
    match model.vllm.tables {
        AdaptedTables::Never => false,
        AdaptedTables::Always => true,
        AdaptedTables::Qwen3 => rules.adapts_qwen3,
    }
}

/// Tensors of the adapters' slots: two per joined matrix, and the tables' where the version has them
/// (vllm/lora/layers).
fn slots(model: &ServedModel, rank: Rank, rules: &Rules, count: u64, rows: u64) -> Vec<u64> {
    let mut made = Vec::new();
    let size = |a: u64, b: u64| count.saturating_mul(a).saturating_mul(b).saturating_mul(2);
    for tensor in model.tensors.iter().filter(|tensor| on_stage(model, tensor, rank)) {
        let [outputs, inputs] = tensor.shape[..] else { continue };
        let module = tensor.module();
        match (tensor.division, tensor.layer) {
            (Division::Split, Some(_)) => {
                // Rows of `o_proj` and `down_proj` are split, columns of the others.
                let by_rows = ["o_proj", "down_proj", "out_proj", "dense", "c_proj", "w2"].contains(&module);
                let share = |side: u64, split: bool| if split { side / rank.tensor } else { side };
                made.push(size(rows, share(inputs, by_rows)));
                made.push(size(share(outputs, !by_rows), rows));
            }
            (Division::Table, None) if adapts_tables(model, rules) => {
                let extra = rules.lora_extra_vocabulary;
                // The embedding's, and those of the logits; the words that adapters add, beside the table and in each.
                made.extend([size(extra, inputs), size(extra, inputs), extra.saturating_mul(inputs).saturating_mul(2)]);
                made.push(size(outputs.saturating_add(extra), rows));
                made.push(size(inputs, rows));
                if model.head == 0 {
                    made.push(size(inputs, rows));
                    made.push(size(outputs.saturating_add(extra).next_multiple_of(256), rows));
                    // A head that is the table itself is wrapped once more.
                    if rules.head_is_table && model.vllm.tables == AdaptedTables::Qwen3 {
                        made.extend([size(outputs.saturating_add(extra), rows), size(inputs, rows)]);
                    }
                }
            }
            _ => {}
        }
    }
    made
}
