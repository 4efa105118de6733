//! What changed in vLLM from version to version, as far as memory goes.

/// The rules of a range of versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The first version they hold for, major, minor and patch.
    pub since: [u32; 3],
    /// Whether the V1 engine runs when nothing else is said (chunked prefill always, logits on every rank, compiled
    /// forward).
    pub v1: bool,
    /// Whether kernels that are fused side by side are benchmarked when a model is first compiled, with tensors as large as its own
    /// (`benchmark_combo_kernel` of vllm/config/compilation.py).
    pub benchmarks: bool,
    /// Whether captured CUDA graphs are taken out of the cache's share.
    pub graphs_in_budget: bool,
    /// Whether graphs are captured on trial while vLLM measures what is outside torch.
    pub graphs_profiled: bool,
    /// Whether ranks meet before vLLM looks what is free.
    pub met_before: bool,
    /// Whether sums over cards are fused with norms, in FlashInfer's workspace.
    pub sums_fused: bool,
    /// Whether the CUDA context counts as memory of vLLM's own, or only what grew while it profiled.
    pub context_counted: bool,
    /// Whether the profile run samples, or makes the logits of every token of the batch (V1 before 0.8).
    pub samples: bool,
    /// Sequences in a batch by default, on small cards and on large ones.
    pub sequences: [u64; 2],
    /// Whether an A100 counts as a small card whatever its memory.
    pub a100_is_small: bool,
    /// Whether the builds that are published without a name for their CUDA are for CUDA 13.
    pub cuda13: bool,
    /// Tokens in a batch where prompts of more than 32k are cut in chunks (the V0 engine).
    pub chunk: u64,
    /// Whether layers of several kinds get groups of their own; else sliding layers are kept like the others.
    pub groups: bool,
    /// Whether layers that attend within chunks (Llama 4) have a group of their own.
    pub chunked_groups: bool,
    /// How much more layers than the rarest kind, in percent, the most frequent may have to be padded to one group.
    pub group_slack: u64,
    /// Whether states of constant size have types of their own, or that of keys and values.
    pub state_types: bool,
    /// Whether finished prompts of a model with states can be kept, which costs a second state per sequence.
    pub states_kept: bool,
    /// Whether they are where nobody says otherwise (`--no-enable-prefix-caching`).
    pub states_kept_unasked: bool,
    /// Whether Mamba 2 has a block for a state inside a prompt (`num_prefill_checkpoint_blocks` of mamba_mixer2.py).
    pub checkpoints: bool,
    /// Blocks of hybrids with latent attention are whole multiples of this.
    pub latent_step: u64,
    /// Elements of a token's latent fill whole multiples of this.
    pub latent_entry: u64,
    /// Whether products of neighbouring projections stay beside those around a latent.
    pub absorbs: bool,
    /// Whether pages of several sizes lie side by side in a block, or every group has room for one of each (DeepSeek-V4).
    pub packed_pages: bool,
    /// Whether blocks of such groups count alike where a sequence's are counted, or as the bytes of their own.
    pub counts_blocks: bool,
    /// Whether the printed token count is concurrency times the longest sequence (else blocks per group times block).
    pub tokens_by_concurrency: bool,
    /// Rows that adapters may add to the vocabulary, for which the tables' slots have room.
    pub lora_extra_vocabulary: u64,
    /// Whether Qwen 3's tables have slots for adapters.
    pub adapts_qwen3: bool,
    /// Whether a tied head of Qwen 3 is the table's own module, or one that shares its weight.
    pub head_is_table: bool,
    /// `max_split_size` of the allocator while weights are loaded (`_scoped_allocator_max_split` of gpu_worker.py).
    pub load_max_split: Option<u64>,
    /// Whether top-p sampling sorts all logits, or a Triton kernel finds the threshold (`apply_top_k_top_p`).
    pub sampler_sorts: bool,
    /// Whether that kernel has a row of logits for every multiprocessor (else FlashInfer samples).
    pub sampler_buffers: bool,
    /// Whether experts run in two buffers that stay (`WorkspaceManager`), as wide as the residual stream at least.
    pub experts_kept: bool,
    /// Whether vLLM's own CUTLASS kernels run experts in NVFP4 that activate by GELU (`_supports_activation` of cutlass_moe.py), or
    /// Marlin's and FlashInfer's, whose buffers are as Triton's.
    pub gelu_cut: bool,
    /// Whether Triton's kernels of linear attention are tried out in the profile run; if so, whether large Blackwells run others.
    pub tunes_states: Option<bool>,
    /// Which models the second model runner runs (`use_v2_model_runner` of vllm/config/vllm.py).
    pub second_runner: SecondRunner,
    /// Whether it runs models that a model of its own guesses for (`_get_v2_model_runner_unsupported_features` of config/vllm.py).
    pub second_drafts: bool,
    /// Or repetitions of the prompt.
    pub second_repeats: bool,
    /// Whether the second runner foresees its graphs (`profile_cudagraph_memory` of v1/worker/gpu/model_runner.py).
    pub second_foresees: bool,
    /// Whether what torch reserved counts, or what is allocated (`total_consumed` of mem_utils.py).
    pub reserved_counts: bool,
    /// Whether windows leave room for all batches in flight (`max_in_flight_tokens`: one more than stages), or for one.
    pub batches_in_flight: bool,
    /// Tokens in a batch on cards of 160 GiB and more.
    pub largest_batch: u64,
    /// Whether a batch that nobody bounds has no more tokens than all sequences of full length.
    pub bounded_batch: bool,
    /// `--gpu-memory-utilization` when it is not given, in thousandths.
    pub utilization_thousandths: u64,
    /// Whether AWQ runs in Hopper's own kernel (`_POSSIBLE_KERNELS` of kernels/linear), or in Marlin everywhere.
    pub awq_machete: bool,
    /// Whether the layout of Triton's experts in MXFP4 is known on all cards (mxfp4.py and third_party/triton_kernels); else
    /// tiles of 0.11, but for Hopper.
    pub swizzles: bool,
    /// Whether the models of `BY_TRANSFORMERS` (load.rs) are run by transformers' own classes.
    pub by_transformers: bool,
    /// That layout on Hopper. Before 0.12 Triton's kernels had to be installed beside vLLM, without which Marlin runs them
    /// (`get_mxfp4_backend` of mxfp4.py, v0.11.0: `has_triton_kernels`).
    pub hopper: Option<HopperLayout>,
    /// How the towers of Qwen's image models attend.
    pub tower: Tower,
    /// Whether their feed-forwards have both halves in one matrix, and norms that add first (Qwen2.5-VL).
    pub joined_tower: bool,
    /// Whether time stamps are counted for every token of a video (Qwen3-VL), and room is made for all of them.
    pub stamped_videos: bool,
    /// Whether the longest video leaves room for an image (Qwen2-VL).
    pub image_beside_video: bool,
    /// What changed with this version, and where it was read.
    pub source: &'static str,
}

/// What the attention of Qwen's towers holds at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tower {
    /// Queries and keys are turned one after the other, in fp32.
    Apart,
    /// Both joined in one, in fp32.
    Joined,
    /// Both as projected, in fp32.
    Single,
    /// The same in 16 bits.
    Turned,
    /// The same, copied before.
    Copied,
}

/// Triton's layout of experts in MXFP4 on Hopper (hopper_value.py and hopper_scale.py of triton_kernels).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HopperLayout {
    /// What sides of values are multiples of, in bytes.
    pub values: u64,
    /// What groups that share a scale are.
    pub groups: u64,
    /// Whether the scales as they were loaded stay beside those in the layout: nothing deletes them before 0.25.
    pub scales_kept: bool,
}

/// Models that the second model runner runs by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SecondRunner {
    /// There is none, or it must be asked for.
    None,
    /// Qwen3 without experts and not quantised.
    Qwen3,
    /// Some architectures.
    Listed,
    /// Those of the list that have experts, and all that have neither experts nor states.
    Plain,
    /// All.
    All,
}

pub(super) const OLDEST: Rules = Rules {
    since: [0, 0, 0],
    v1: false,
    benchmarks: false,
    graphs_in_budget: false,
    graphs_profiled: false,
    met_before: false,
    sums_fused: false,
    context_counted: true,
    samples: true,
    sequences: [256, 256],
    a100_is_small: false,
    chunk: 512,
    groups: false,
    chunked_groups: false,
    group_slack: 0,
    state_types: false,
    states_kept: false,
    cuda13: false,
    states_kept_unasked: false,
    checkpoints: false,
    latent_step: 16,
    latent_entry: 1,
    absorbs: false,
    packed_pages: false,
    counts_blocks: false,
    tokens_by_concurrency: false,
    lora_extra_vocabulary: 256,
    adapts_qwen3: false,
    head_is_table: true,
    load_max_split: None,
    sampler_sorts: true,
    sampler_buffers: false,
    experts_kept: false,
    gelu_cut: false,
    tunes_states: None,
    second_runner: SecondRunner::None,
    second_drafts: false,
    second_repeats: false,
    second_foresees: false,
    reserved_counts: false,
    batches_in_flight: false,
    largest_batch: 8192,
    bounded_batch: false,
    utilization_thousandths: 900,
    awq_machete: false,
    swizzles: false,
    by_transformers: false,
    hopper: None,
    tower: Tower::Apart,
    joined_tower: false,
    stamped_videos: false,
    image_beside_video: true,
    source: "V0 by default; logs of 0.6 to 0.8 in truth/external/vllm_logs.json: four terms add up to the grant",
};
pub(super) const V0_6_5: Rules = Rules {
    since: [0, 6, 5],
    context_counted: false,
    source: "vllm/worker/worker.py of v0.6.5: `memory_profiling`",
    ..OLDEST
};
const V0_6_6: Rules = Rules {
    since: [0, 6, 6],
    chunk: 2048,
    source: "vllm/config.py of v0.6.6: chunks of 2048 tokens, 512 in v0.6.0",
    ..V0_6_5
};
const V0_7_1: Rules = Rules {
    since: [0, 7, 1],
    absorbs: true,
    source: "vllm/attention/backends/mla/utils.py of v0.7.1 to v0.7.3: `VLLM_MLA_PERFORM_MATRIX_ABSORPTION`; gone in v0.8.0",
    ..V0_6_6
};
const V0_7_2: Rules = Rules {
    since: [0, 7, 2],
    latent_entry: 128,
    source: "vllm/worker/cache_engine.py of v0.7.2 and v0.7.3: `align_to_256bytes` of the model's type; gone in v0.8.0",
    ..V0_7_1
};
const V0_8_0: Rules = Rules {
    since: [0, 8, 0],
    v1: true,
    context_counted: true,
    sequences: [1024, 1024],
    source: "vllm/engine/arg_utils.py of v0.8.0: V1 by default, 1024 sequences; its gpu_worker.py counts all of the card",
    ..V0_6_6
};
const V0_8_4: Rules = Rules {
    since: [0, 8, 4],
    sequences: [256, 1024],
    source: "vllm/engine/arg_utils.py of v0.8.4: 256 sequences on cards below 70 GiB",
    ..V0_8_0
};
const V0_9_0: Rules =
    Rules { since: [0, 9, 0], a100_is_small: true, source: "vllm/engine/arg_utils.py of v0.9.0", ..V0_8_4 };
pub(super) const V0_9_1: Rules = Rules {
    since: [0, 9, 1],
    context_counted: false,
    groups: true,
    chunked_groups: true,
    source: "vllm/v1/core/kv_cache_utils.py of v0.9.1: groups of one page size; v0.9.0 keeps all layers as full ones",
    ..V0_9_0
};
const V0_10_1: Rules = Rules {
    since: [0, 10, 1],
    state_types: true,
    joined_tower: true,
    source: "vllm/v1/kv_cache_interface.py of v0.10.1: `MambaSpec.dtypes`; one dtype, that of the cache, in v0.10.0",
    ..V0_9_1
};
const V0_11_0: Rules = Rules {
    since: [0, 11, 0],
    chunked_groups: false,
    met_before: true,
    tower: Tower::Joined,
    stamped_videos: true,
    image_beside_video: false,
    source: "vllm/config/__init__.py and v1/worker/gpu_worker.py of v0.11.0; four H100 logs of 0.11.0 add up without graphs",
    ..V0_10_1
};
const V0_11_1: Rules = Rules {
    since: [0, 11, 1],
    benchmarks: true,
    bounded_batch: true,
    latent_step: 64,
    tower: Tower::Single,
    source: "vllm/model_executor/models/config.py of v0.11.1: `kernel_block_alignment_size`; torch 2.9, which \
             vllm/config/compilation.py fuses more with; engine/arg_utils.py: `_set_default_args`",
    ..V0_11_0
};
const V0_12_0: Rules = Rules {
    since: [0, 12, 0],
    group_slack: 25,
    lora_extra_vocabulary: 0,
    tower: Tower::Turned,
    hopper: Some(HopperLayout { values: 32, groups: 2, scales_kept: true }),
    source: "vllm/v1/core/kv_cache_utils.py and vllm/config/lora.py of v0.12.0: adapters no longer add words; \
             cmake/external_projects/triton_kernels.cmake brings Triton's kernels, quantization/mxfp4.py",
    ..V0_11_1
};
const V0_13_0: Rules = Rules {
    since: [0, 13, 0],
    stamped_videos: false,
    source: "vllm/model_executor/models/qwen3_vl.py and v1/worker/gpu_model_runner.py of v0.13.0",
    ..V0_12_0
};
const V0_14_0: Rules = Rules {
    since: [0, 14, 0],
    experts_kept: true,
    source: "unquantized_fused_moe_method.py and v1/worker/workspace.py of v0.14.0: the modular kernel",
    ..V0_13_0
};
const V0_15_0: Rules = Rules {
    since: [0, 15, 0],
    states_kept: true,
    tower: Tower::Copied,
    source: "vllm/v1/kv_cache_interface.py of v0.15.0: `mamba_cache_mode`, two states where it is `align`",
    ..V0_14_0
};
const V0_16_0: Rules = Rules {
    since: [0, 16, 0],
    adapts_qwen3: true,
    source: "vllm/model_executor/models/qwen3.py of v0.16.0: `embedding_modules`",
    ..V0_15_0
};
const V0_17_0: Rules = Rules {
    since: [0, 17, 0],
    sampler_sorts: false,
    sampler_buffers: true,
    sums_fused: true,
    hopper: Some(HopperLayout { values: 64, groups: 2, scales_kept: true }),
    source: "vllm/v1/sample/ops/topk_topp_sampler.py of v0.17.0 uses Triton from 8 sequences on; vllm/config/vllm.py: \
             `enable_allreduce_rms_fusion`; triton_kernels of 3.6",
    ..V0_16_0
};
const V0_18_0: Rules = Rules {
    since: [0, 18, 0],
    group_slack: 50,
    gelu_cut: true,
    tunes_states: Some(false),
    graphs_profiled: true,
    source: "vllm/v1/core/kv_cache_utils.py of v0.18.0; v1/worker/gpu_worker.py: `profile_cudagraph_memory`; \
             models/qwen3_next.py: `_warmup_prefill_kernels`; fused_moe/cutlass_moe.py",
    ..V0_17_0
};
const V0_20_0: Rules = Rules {
    since: [0, 20, 0],
    graphs_in_budget: true,
    utilization_thousandths: 920,
    cuda13: true,
    source: "vllm/envs.py (VLLM_MAIN_CUDA_VERSION too) and vllm/config/cache.py of v0.20.0",
    ..V0_18_0
};
const V0_20_1: Rules = Rules {
    since: [0, 20, 1],
    tokens_by_concurrency: true,
    source: "vllm/v1/core/kv_cache_utils.py of v0.20.1: tokens are concurrency times length",
    ..V0_20_0
};
const V0_21_0: Rules = Rules {
    since: [0, 21, 0],
    load_max_split: Some(20 << 20),
    sampler_buffers: false,
    gelu_cut: false,
    source: "vllm/v1/worker/gpu_worker.py and vllm/envs.py of v0.21.0: FlashInfer samples; models/gemma4.py: `gelu_tanh`",
    ..V0_20_1
};
const V0_22_0: Rules = Rules {
    since: [0, 22, 0],
    second_runner: SecondRunner::Qwen3,
    hopper: Some(HopperLayout { values: 32, groups: 2, scales_kept: true }),
    source: "vllm/config/vllm.py of v0.22.0: `DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`",
    ..V0_21_0
};
const V0_23_0: Rules = Rules {
    since: [0, 23, 0],
    packed_pages: true,
    gelu_cut: true,
    source: "vllm/v1/core/kv_cache_utils.py of v0.23.0: `_get_kv_cache_config_deepseek_v4`; fused_moe/experts/cutlass_moe.py: `GELU_TANH`",
    ..V0_22_0
};
const V0_24_0: Rules = Rules {
    since: [0, 24, 0],
    second_runner: SecondRunner::Listed,
    tunes_states: Some(true),
    awq_machete: true,
    gelu_cut: false,
    source: "vllm/config/vllm.py of v0.24.0: six architectures; quantization/auto_awq.py: `choose_mp_linear_kernel`; \
             fused_moe/experts/flashinfer_cutlass_moe.py: `GELU_TANH`",
    ..V0_23_0
};
const V0_25_0: Rules = Rules {
    since: [0, 25, 0],
    second_runner: SecondRunner::Plain,
    hopper: Some(HopperLayout { values: 32, groups: 2, scales_kept: false }),
    source: "vllm/config/vllm.py of v0.25.0: `_is_default_v2_model_runner_model`",
    ..V0_24_0
};
const V0_26_0: Rules = Rules {
    since: [0, 26, 0],
    batches_in_flight: true,
    source: "vllm/v1/kv_cache_interface.py and vllm/config/vllm.py of v0.26.0",
    ..V0_25_0
};
const V0_27_0: Rules = Rules {
    since: [0, 27, 0],
    latent_step: 128,
    counts_blocks: true,
    reserved_counts: true,
    graphs_profiled: false,
    source: "vllm/platforms/interface.py of v0.27.0: `_align_hybrid_block_size`; utils/mem_utils.py: `total_consumed`",
    ..V0_26_0
};
const V0_28_0: Rules = Rules {
    since: [0, 28, 0],
    largest_batch: 16_384,
    head_is_table: false,
    states_kept_unasked: true,
    source: "vllm/engine/arg_utils.py of v0.28.0: cards of 160 GiB, `_set_default_chunked_prefill_and_prefix_caching_args` \
             without its exception for hybrids; models/qwen3.py: `tie_weights`",
    ..V0_27_0
};
const V0_29_0: Rules = Rules {
    since: [0, 29, 0],
    second_runner: SecondRunner::All,
    second_foresees: true,
    checkpoints: true,
    source: "v0.29.0: `use_v2_model_runner` of vllm/config/vllm.py asks for no architecture any more; \
             `profile_cudagraph_memory` of v1/worker/gpu/cudagraph_utils.py; `num_prefill_checkpoint_blocks` of kv_cache_interface.py",
    ..V0_28_0
};
const V0_31_0: Rules = Rules {
    since: [0, 31, 0],
    swizzles: true,
    hopper: Some(HopperLayout { values: 1, groups: 4, scales_kept: false }),
    second_drafts: true,
    source: "cmake/external_projects/triton_kernels.cmake of v0.31.0: the commit of 0.32; vllm/config/vllm.py",
    ..V0_29_0
};
const V0_32_0: Rules = Rules {
    since: [0, 32, 0],
    by_transformers: true,
    second_repeats: true,
    source: "vllm/model_executor/models/registry.py of v0.32.0, and its worker rehearsed (truth/engines)",
    ..V0_31_0
};

/// From new to old.
pub const RULES: &[Rules] = &[
    V0_32_0, V0_31_0, V0_29_0, V0_28_0, V0_27_0, V0_26_0, V0_25_0, V0_24_0, V0_23_0, V0_22_0, V0_21_0, V0_20_1,
    V0_20_0, V0_18_0, V0_17_0, V0_16_0, V0_15_0, V0_14_0, V0_13_0, V0_12_0, V0_11_1, V0_11_0, V0_10_1, V0_9_1, V0_9_0,
    V0_8_4, V0_8_0, V0_7_2, V0_7_1, V0_6_6, V0_6_5, OLDEST,
];

/// What kernels loaded lazily take by the time of the profile run, per multiprocessor of the card: 0.13 GiB on an H100 (132 of
/// them), 0.09 on an A100 (108), 0.03 on a T4 (40) in truth/external/vllm_logs.json. That it grows with multiprocessors is
/// no cause: code differs from card to card (docs/open-constants.md).
pub(super) const OUTSIDE_TORCH: u64 = 1 << 20;
