//! Which modules Liger patches, per `model_type` (liger_kernel 0.8.5, transformers/monkey_patch.py, its defaults).

use super::PlanError;

/// What Liger puts into a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LigerPatch {
    /// Norms by the last part of their path.
    pub norms: &'static [&'static str],
    /// Whether a norm's backward overwrites the gradient that comes in.
    pub norms_in_place: bool,
    /// Whether queries and keys are rotated where they lie.
    pub rope: bool,
    /// Whether `activation(gate) * up` is one kernel.
    pub glu: bool,
}

const LLAMA: LigerPatch = LigerPatch {
    norms: &["norm", "input_layernorm", "post_attention_layernorm"],
    norms_in_place: true,
    rope: true,
    glu: true,
};
const QWEN3: LigerPatch =
    LigerPatch { norms: &["norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"], ..LLAMA };
const GEMMA2: LigerPatch = LigerPatch {
    norms: &[
        "norm",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "q_norm",
        "k_norm",
    ],
    norms_in_place: false,
    ..LLAMA
};
const POST_NORMS: LigerPatch = LigerPatch {
    norms: &["norm", "post_attention_layernorm", "post_feedforward_layernorm"],
    norms_in_place: false,
    ..LLAMA
};
const GLM4: LigerPatch = LigerPatch {
    norms: &["norm", "input_layernorm", "post_attention_layernorm", "post_mlp_layernorm", "post_self_attn_layernorm"],
    norms_in_place: false,
    rope: false,
    ..LLAMA
};
const LOSS_ONLY: LigerPatch = LigerPatch { norms: &[], norms_in_place: false, rope: false, glu: false };

/// Types that Liger patches in ways that are not simulated: fused experts, towers, its own cross entropy.
const NOT_SIMULATED: [&str; 32] = [
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "falcon_h1",
    "gemma3",
    "gemma4",
    "gemma4_text",
    "glm4v",
    "glm4v_moe",
    "gpt_oss",
    "granite",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internvl",
    "llama4",
    "llama4_text",
    "llava",
    "mixtral",
    "mllama",
    "mllama_text_model",
    "muse_glimmer",
    "paligemma",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
];

/// What Liger does to a model of this type; `None`: nothing, it leaves unknown types alone.
pub fn patch(model_type: &str) -> Result<Option<LigerPatch>, PlanError> {
    match model_type {
        "llama" | "mistral" | "ministral" | "qwen2" | "smollm3" | "phi3" | "gemma" => Ok(Some(LLAMA)),
        "qwen3" => Ok(Some(QWEN3)),
        "gemma2" | "gemma3_text" => Ok(Some(GEMMA2)),
        "olmo2" | "olmo3" => Ok(Some(POST_NORMS)),
        "exaone4" => {
            const NORMS: &[&str] =
                &["norm", "post_attention_layernorm", "post_feedforward_layernorm", "q_norm", "k_norm"];
            Ok(Some(LigerPatch { norms: NORMS, ..POST_NORMS }))
        }
        "glm4" => Ok(Some(GLM4)),
        "nemotron" => Ok(Some(LOSS_ONLY)),
        other if NOT_SIMULATED.contains(&other) => Err(PlanError::Unsupported {
            what: format!("Liger on {other} models"),
            hint: "leave Liger out, or ask for a dense Llama, Mistral, Qwen, Gemma, Phi-3, OLMo or GLM-4".into(),
        }),
        _ => Ok(None),
    }
}
