//! What libraries know of a family by its `model_type`: the kernels they let it run on, the modules they patch, split or
//! adapt. A family states its own in its own file; what it does not state is the default.
//!
//! Sources: transformers 5.17 to 5.22 (`_supports_flash_attn`, `base_model_tp_plan`, processors), peft 0.21.2
//! (utils/constants.py, utils/transformers_weight_conversion.py), liger_kernel 0.8.5 (transformers/monkey_patch.py),
//! deepspeed (runtime/zero/leaf_module_config.py).

use super::families::decoders::decoder::Decoder;
use super::tensor_plans::TensorRules;
use super::{Config, ModelError, Task};

/// NameList of modules or parameters.
pub type NameList = &'static [&'static str];

/// Reads the text model that a multimodal model holds.
pub(crate) type TextModel = fn(&Config<'_>) -> Result<Box<dyn Decoder>, ModelError>;

/// What libraries know of a family.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// What its attention can run on.
    pub attention: AttentionKernels,
    /// What Liger does to it.
    pub liger: Liger,
    /// PEFT's default targets of LoRA (and of OFT), none: it has no default. A single entry that starts with `.*` is a
    /// regular expression.
    pub lora: NameList,
    /// Those of VeRA, where they are not LoRA's.
    pub vera: Option<NameList>,
    /// Those of IA³, none: it has no default.
    pub ia3: NameList,
    /// Which of those are feed-forward.
    pub ia3_feedforward: NameList,
    /// How PEFT rewrites targets that name its experts, where it does.
    pub experts: Option<ExpertNames>,
    /// Modules on which PEFT refuses LoRA.
    pub lora_refused: NameList,
    /// transformers' tensor-parallel plan of a layer, none: it has none, or none known here.
    pub tensor_plan: &'static [TensorRules],
    /// Whether its sparse blocks are one module to DeepSpeed unless told otherwise.
    pub leaf_blocks: bool,
    /// The heads it has, where they are not those of its kind (`families/mod.rs`).
    pub tasks: Option<&'static [Task]>,
    /// What a class that ends in `ForConditionalGeneration` is.
    pub conditional_generation: Task,
    /// Auto classes that load that class too.
    pub also: &'static [Task],
    /// Pixels of a patch's side where its processor hands patches to it and the config does not say.
    pub patch_side: Option<u64>,
    /// Tokens of the largest image, where they are known.
    pub image_tokens: Option<ImageTokens>,
    /// Whether its attention knows no positions, unless `use_mem_rope` asks for them (Jamba, Nemotron-H, Zamba2).
    pub unturned: bool,
    /// Positions that its class states where a config does not, beside engines' own 2048 (`serving/lengths.rs`).
    pub positions: Option<u64>,
    /// Whether its config counts the scaling of its positions among them (Gemma 3; vLLM leaves its scaling out by name).
    pub scaled_positions: bool,
    /// Whether windows are turned by a base of their own though a config may not say so (Gemma 3).
    pub turns_windows: bool,
    /// Whether token embeddings are scaled by the root of their width.
    pub scaled_embedding: bool,
    /// Whether a serving engine knows its architecture. Of the families here RWKV 4 is in none: not in vLLM's registry
    /// (`model_executor/models/registry.py`), and llama.cpp has RWKV 6 and 7 only (`llama-arch.cpp`).
    pub served: bool,
    /// What vLLM's code of it does otherwise.
    pub vllm: VllmFacts,
    /// Whether Ollama's library has its latent attention as whole heads: those files were made before llama.cpp kept latents (12801).
    pub whole_heads: bool,
    /// What checkpoints call otherwise (transformers, conversion_mapping.py): a beginning of its names, and theirs.
    pub stored_names: &'static [(&'static str, &'static str)],
    /// Children of its modules in the order of registration, where they differ from `data/registration.txt`.
    pub registration: &'static [NameList],
    /// Reads it as the text model of a multimodal one.
    pub(crate) text: Option<TextModel>,
}

impl Facts {
    /// Those of a family of which nothing else is known.
    pub const DEFAULT: Self = Self {
        attention: AttentionKernels::Torch,
        liger: Liger::Untouched,
        lora: &[],
        vera: None,
        ia3: &[],
        ia3_feedforward: &[],
        experts: None,
        lora_refused: &[],
        tensor_plan: &[],
        leaf_blocks: false,
        tasks: None,
        conditional_generation: Task::ImageTextToText,
        also: &[],
        patch_side: None,
        image_tokens: None,
        unturned: false,
        positions: None,
        scaled_positions: false,
        turns_windows: false,
        scaled_embedding: false,
        served: true,
        vllm: VllmFacts::DEFAULT,
        whole_heads: false,
        stored_names: &[],
        registration: &[],
        text: None,
    };
}

/// Whether tables of words have slots for adapters (`embedding_modules` of vLLM's models).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdaptedTables {
    /// Only linears have.
    Never,
    /// They have in every version.
    Always,
    /// As Qwen 3's: since 0.16, and a tied head for a time once more.
    Qwen3,
}

/// What vLLM's own code of a family does otherwise than for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VllmFacts {
    /// Triton's kernels attend: images attend to one another, or heads are of two sizes (`is_mm_prefix_lm` of
    /// vllm/config/model.py, `Gemma4Config` of models/config.py).
    pub triton: bool,
    /// The largest batch whose graph is captured, where it is not that of all models (models/config.py).
    pub largest_graph: Option<u64>,
    /// Whether the table of turns stays in fp32; a copy in 16 bits is made when it is first used
    /// (`_match_cos_sin_cache_dtype` of rotary_embedding/base.py).
    pub turns_in_single: bool,
    /// Whether its towers are transformers' own classes, whose matrices vLLM does not quantise (gemma4_mm.py).
    pub plain_towers: bool,
    /// Whether every layer has matrices for keys and values of its own, also one that takes them from another or has its keys for
    /// values (`QKVParallelLinear` in `Gemma4Attention` of gemma4.py).
    pub all_keys: bool,
    /// Whether its experts activate by GELU, which few kernels of experts know (`FusedMoE` in `Gemma4MoE` of gemma4.py).
    pub gelu_experts: bool,
    /// Whether its tables of words have slots for adapters.
    pub tables: AdaptedTables,
}

impl VllmFacts {
    /// Those of most.
    pub const DEFAULT: Self = Self {
        triton: false,
        largest_graph: None,
        turns_in_single: false,
        plain_towers: false,
        all_keys: false,
        gelu_experts: false,
        tables: AdaptedTables::Never,
    };
    /// Those of models whose tables have slots for adapters.
    pub const ADAPTED: Self = Self { tables: AdaptedTables::Always, ..Self::DEFAULT };
    /// Those of models that Triton's kernels run.
    pub const TRITON: Self = Self { triton: true, ..Self::DEFAULT };
}

impl Default for VllmFacts {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What the attention of a family can run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKernels {
    /// torch's own. So have those with flash attention code of their own (Falcon, GPT-J, GPT-Neo), vision-language models,
    /// whose towers hand over lengths of images, and GPT-OSS, whose sinks FlashAttention 2 does not know.
    Torch,
    /// The flash-attn package too, through transformers' interface; flex attention not: transformers has it not for the
    /// family, or its attention drops probabilities by default, which flex attention refuses.
    Flash,
    /// Those, and flex attention.
    FlashAndFlex,
}

/// What Liger does to a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liger {
    /// Nothing.
    Untouched,
    /// It puts these kernels in.
    Patched(LigerPatch),
    /// It patches it in ways that are not simulated: fused experts, towers, its own cross entropy.
    NotSimulated,
}

/// What Liger puts into a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LigerPatch {
    /// Norms by the last part of their path.
    pub norms: NameList,
    /// Whether a norm's backward overwrites the gradient that comes in.
    pub norms_in_place: bool,
    /// Whether queries and keys are rotated where they lie.
    pub rope: bool,
    /// Whether `activation(gate) * up` is one kernel.
    pub glu: bool,
}

impl LigerPatch {
    /// Llama's, and that of the families whose layers have its names.
    pub const LLAMA: Self = Self {
        norms: &["norm", "input_layernorm", "post_attention_layernorm"],
        norms_in_place: true,
        rope: true,
        glu: true,
    };
}

/// How the expert projections of transformers 4 map to the fused parameters of transformers 5.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNames {
    /// Old module name, new parameter name.
    pub mapping: [(&'static str, &'static str); 4],
    /// The old names that are fused into `gate_up_proj`; all or none must be targeted.
    pub fused: [&'static str; 2],
}

impl ExpertNames {
    /// Those of Mixtral and its kin.
    pub const MIXTRAL: Self = Self {
        mapping: [("gate", "gate.weight"), ("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")],
        fused: ["w1", "w3"],
    };
    /// Those that most mixtures have.
    pub const USUAL: Self = Self {
        mapping: [
            ("gate", "gate.weight"),
            ("gate_proj", "gate_up_proj"),
            ("up_proj", "gate_up_proj"),
            ("down_proj", "down_proj"),
        ],
        fused: ["gate_proj", "up_proj"],
    };
}

/// Tokens of the largest image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageTokens {
    /// One for each patch of an image of the model's own size.
    Patches,
    /// Patches of such an image pooled to as many as the config says under `mm_tokens_per_image`, or to so many.
    Pooled(u64),
    /// So many, each of a square of patches: images keep their size up to the processor's limit; and those of a video.
    Merged(u64, VideoTokens),
    /// As many as the config says, each pooled from a square of patches; pictures go through the tower one after the other, and
    /// videos are pictures of fewer tokens (Gemma 4).
    Alone,
}

/// Tokens of the longest video.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VideoTokens {
    /// Frames of the largest image, two of them in one, as many as a sequence has room for (Qwen2-VL).
    Frames,
    /// So many: the processor's limit is of all frames together (Qwen3-VL).
    Fixed(u64),
    /// Pictures of fewer tokens, so many at most (Gemma 4).
    Stills,
    /// None are let in.
    None,
}

impl ImageTokens {
    /// Qwen's default limit: 12,845,056 pixels in squares of 28 (`size.longest_edge` of their preprocessor_config.json).
    pub const QWEN2: Self = Self::Merged(16_384, VideoTokens::Frames);
    /// The same of 16,777,216 in squares of 32; 25,165,824 of a video (video_preprocessor_config.json), two frames in one.
    pub const QWEN3: Self = Self::Merged(16_384, VideoTokens::Fixed(12_288));
}
