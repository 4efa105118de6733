//! PEFT's defaults per `model_type` (peft/utils/constants.py, peft/utils/transformers_weight_conversion.py of 0.21.2 and
//! `_MODEL_TO_CONVERSION_PATTERN` of transformers 5.22).

/// Target modules of LoRA (and of OFT); a single entry that starts with `.*` is a regular expression.
pub const LORA: [(&str, &[&str]); 40] = [
    ("t5", &["q", "v"]),
    ("mt5", &["q", "v"]),
    ("bart", &["q_proj", "v_proj"]),
    ("gpt2", &["c_attn"]),
    ("bloom", &["query_key_value"]),
    ("blip-2", &["q", "v", "q_proj", "v_proj"]),
    ("opt", &["q_proj", "v_proj"]),
    ("gptj", &["q_proj", "v_proj"]),
    ("gpt_neox", &["query_key_value"]),
    ("gpt_neo", &["q_proj", "v_proj"]),
    ("bert", &["query", "value"]),
    ("roberta", &["query", "value"]),
    ("xlm-roberta", &["query", "value"]),
    ("electra", &["query", "value"]),
    ("deberta-v2", &["query_proj", "value_proj"]),
    ("deberta", &["in_proj"]),
    ("layoutlm", &["query", "value"]),
    ("llama", &["q_proj", "v_proj"]),
    ("llama4", &["q_proj", "v_proj"]),
    ("chatglm", &["query_key_value"]),
    ("gpt_bigcode", &["c_attn"]),
    ("mpt", &["Wqkv"]),
    ("RefinedWebModel", &["query_key_value"]),
    ("RefinedWeb", &["query_key_value"]),
    ("falcon", &["query_key_value"]),
    ("btlm", &["c_proj", "c_attn"]),
    ("codegen", &["qkv_proj"]),
    ("mistral", &["q_proj", "v_proj"]),
    ("mixtral", &["q_proj", "v_proj"]),
    ("stablelm", &["q_proj", "v_proj"]),
    ("phi", &["q_proj", "v_proj", "fc1", "fc2"]),
    ("gemma", &["q_proj", "v_proj"]),
    ("gemma2", &["q_proj", "v_proj"]),
    ("gemma3_text", &["q_proj", "v_proj"]),
    ("gemma4", &[r".*language_model\..*\.(q_proj|v_proj)"]),
    ("qwen2", &["q_proj", "v_proj"]),
    ("qwen3", &["q_proj", "v_proj"]),
    ("nemotron_h", &["q_proj", "k_proj", "v_proj", "o_proj"]),
    ("rwkv", &["key", "value", "receptance", "output"]),
    ("rwkv7", &["r_proj", "k_proj", "v_proj", "o_proj", "key", "value"]),
];

/// Target modules of IA³, and which of them are feed-forward.
pub const IA3: [(&str, &[&str], &[&str]); 27] = [
    ("t5", &["k", "v", "wo"], &["wo"]),
    ("mt5", &["k", "v", "wi_1"], &[]),
    ("gpt2", &["c_attn", "mlp.c_proj"], &["mlp.c_proj"]),
    ("bloom", &["query_key_value", "mlp.dense_4h_to_h"], &["mlp.dense_4h_to_h"]),
    ("roberta", &["key", "value", "output.dense"], &["output.dense"]),
    ("opt", &["q_proj", "k_proj", "fc2"], &["fc2"]),
    ("gptj", &["q_proj", "v_proj", "fc_out"], &["fc_out"]),
    ("gpt_neox", &["query_key_value", "dense_4h_to_h"], &["dense_4h_to_h"]),
    ("gpt_neo", &["q_proj", "v_proj", "c_proj"], &["c_proj"]),
    ("bart", &["q_proj", "v_proj", "fc2"], &["fc2"]),
    ("gpt_bigcode", &["c_attn", "mlp.c_proj"], &["mlp.c_proj"]),
    ("llama", &["k_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("llama4", &["q_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("mistral", &["k_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("mixtral", &["k_proj", "v_proj", "w2"], &["w2"]),
    ("bert", &["key", "value", "output.dense"], &["output.dense"]),
    ("deberta-v2", &["key_proj", "value_proj", "output.dense"], &["output.dense"]),
    ("deberta", &["in_proj", "output.dense"], &["output.dense"]),
    ("RefinedWebModel", &["query_key_value", "dense_4h_to_h"], &["dense_4h_to_h"]),
    ("RefinedWeb", &["query_key_value", "dense_4h_to_h"], &["dense_4h_to_h"]),
    ("falcon", &["query_key_value", "dense_4h_to_h"], &["dense_4h_to_h"]),
    ("phi", &["q_proj", "v_proj", "fc2"], &["fc2"]),
    ("gemma", &["q_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("gemma2", &["q_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("gemma3_text", &["q_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("qwen2", &["q_proj", "v_proj", "down_proj"], &["down_proj"]),
    ("qwen3", &["q_proj", "v_proj", "down_proj"], &["down_proj"]),
];

/// The targets of LoRA for a model type, where PEFT has any.
pub fn lora(model_type: &str) -> Option<&'static [&'static str]> {
    LORA.iter().find(|(name, _)| *name == model_type).map(|(_, list)| *list)
}

/// The targets of VeRA: LoRA's, but for Phi.
pub fn vera(model_type: &str) -> Option<&'static [&'static str]> {
    if model_type == "phi" { Some(&["q_proj", "v_proj"]) } else { lora(model_type) }
}

/// The targets of IA³ for a model type, and the feed-forward ones.
pub fn ia3(model_type: &str) -> Option<(&'static [&'static str], &'static [&'static str])> {
    IA3.iter().find(|(name, ..)| *name == model_type).map(|(_, targets, feedforward)| (*targets, *feedforward))
}

/// How the expert projections of transformers 4 map to the fused parameters of transformers 5.
#[derive(Debug, Clone, Copy)]
pub struct FusedExperts {
    /// Old module name, new parameter name.
    pub mapping: [(&'static str, &'static str); 4],
    /// The old names that are fused into `gate_up_proj`; all or none must be targeted.
    pub fused: [&'static str; 2],
}

const MIXTRAL: FusedExperts = FusedExperts {
    mapping: [("gate", "gate.weight"), ("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")],
    fused: ["w1", "w3"],
};

const QWEN2_MOE: FusedExperts = FusedExperts {
    mapping: [
        ("gate", "gate.weight"),
        ("gate_proj", "gate_up_proj"),
        ("up_proj", "gate_up_proj"),
        ("down_proj", "down_proj"),
    ],
    fused: ["gate_proj", "up_proj"],
};

/// The fused parameter's name.
pub const FUSED_NAME: &str = "gate_up_proj";

/// Types whose targets PEFT rewrites for fused experts (`qwen2_moe` itself is not among them, as in PEFT).
const QWEN2_MOE_TYPES: [&str; 24] = [
    "afmoe",
    "beam",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "glm_moe_dsa",
    "hunyuan_v1_moe",
    "longcat_flash",
    "mellum",
    "olmoe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe",
    "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker",
    "solar_open",
];

/// How a type's expert targets are rewritten, where they are.
pub fn fused_experts(model_type: &str) -> Option<FusedExperts> {
    match model_type {
        "mixtral" | "minimax" | "minimax_m2" => Some(MIXTRAL),
        _ if QWEN2_MOE_TYPES.contains(&model_type) => Some(QWEN2_MOE),
        _ => None,
    }
}

/// Model types and module names that LoRA refuses together.
pub const MAMBA_TYPES: [&str; 5] = ["falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"];
/// See [`MAMBA_TYPES`].
pub const MAMBA_REFUSED: [&str; 2] = ["out_proj", "conv1d"];

pub use crate::model::op::OUTPUT_EMBEDDINGS;
