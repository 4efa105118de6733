//! GGUF's architectures and the model types of transformers that they hold (llama.cpp's conversion/ and gguf-py, b21e4de).

/// An architecture: its name, the types it is made of (the first is taken for a file that does not say more).
struct Row {
    name: &'static str,
    types: &'static [&'static str],
    /// The norm before the feed-forward is called `post_attention_norm`.
    renamed: bool,
}

const fn row(name: &'static str, types: &'static [&'static str]) -> Row {
    Row { name, types, renamed: false }
}

const ROWS: &[Row] = &[
    row("llama", &["llama", "mistral", "mixtral", "ministral"]),
    row("mistral3", &["ministral3"]),
    row("llama4", &["llama4_text", "llama4"]),
    row("qwen2", &["qwen2"]),
    row("qwen2moe", &["qwen2_moe"]),
    row("qwen2vl", &["qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"]),
    row("qwen3", &["qwen3"]),
    row("qwen3moe", &["qwen3_moe"]),
    row("qwen3vl", &["qwen3_vl", "qwen3_vl_text"]),
    row("qwen3vlmoe", &["qwen3_vl_moe", "qwen3_vl_moe_text"]),
    Row { name: "qwen3next", types: &["qwen3_next"], renamed: true },
    Row { name: "qwen35", types: &["qwen3_5", "qwen3_5_text"], renamed: true },
    Row { name: "qwen35moe", types: &["qwen3_5_moe", "qwen3_5_moe_text"], renamed: true },
    row("gemma", &["gemma"]),
    row("gemma2", &["gemma2"]),
    row("gemma3", &["gemma3_text", "gemma3"]),
    row("gemma3n", &["gemma3n_text", "gemma3n"]),
    row("gemma4", &["gemma4_text", "gemma4"]),
    row("phi2", &["phi"]),
    row("phi3", &["phi3"]),
    row("phimoe", &["phimoe"]),
    row("glm4", &["glm4"]),
    row("chatglm", &["glm"]),
    Row { name: "glm4moe", types: &["glm4_moe"], renamed: true },
    Row { name: "gpt-oss", types: &["gpt_oss"], renamed: true },
    Row { name: "seed_oss", types: &["seed_oss"], renamed: true },
    row("deepseek2", &["deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"]),
    row("command-r", &["cohere"]),
    row("cohere2", &["cohere2"]),
    Row { name: "olmo2", types: &["olmo2", "olmo3"], renamed: true },
    row("olmo", &["olmo"]),
    row("olmoe", &["olmoe"]),
    row("starcoder2", &["starcoder2"]),
    row("starcoder", &["gpt_bigcode"]),
    row("stablelm", &["stablelm"]),
    row("falcon", &["falcon"]),
    row("gptneox", &["gpt_neox"]),
    row("gpt2", &["gpt2"]),
    row("bloom", &["bloom"]),
    row("mpt", &["mpt"]),
    row("smollm3", &["smollm3"]),
    row("granite", &["granite"]),
    row("granitemoe", &["granitemoe", "granitemoeshared"]),
    row("granitehybrid", &["granitemoehybrid"]),
    Row { name: "exaone4", types: &["exaone4"], renamed: true },
    row("nemotron", &["nemotron"]),
    row("nemotron_h", &["nemotron_h"]),
    row("hunyuan-moe", &["hunyuan_v1_moe"]),
    row("hunyuan-dense", &["hunyuan_v1_dense"]),
    row("minimax-m2", &["minimax_m2"]),
    row("dots1", &["dots1"]),
    row("arcee", &["arcee"]),
    row("apertus", &["apertus"]),
    row("ernie4_5", &["ernie4_5"]),
    row("ernie4_5-moe", &["ernie4_5_moe"]),
    row("mamba", &["mamba"]),
    row("mamba2", &["mamba2"]),
    row("jamba", &["jamba"]),
    row("falcon-h1", &["falcon_h1"]),
    row("lfm2", &["lfm2"]),
    row("lfm2moe", &["lfm2_moe"]),
    row("bert", &["bert", "xlm-roberta", "roberta"]),
];

/// The architecture of a model type.
pub fn of_type(model_type: &str) -> Option<&'static str> {
    ROWS.iter().find(|row| row.types.contains(&model_type)).map(|row| row.name)
}

/// Whether llama.cpp makes embeddings with models of this type.
pub fn embeds(model_type: &str) -> bool {
    of_type(model_type) == Some("bert")
}

/// The model type that an architecture is read as.
pub fn model_type(name: &str) -> Option<&'static str> {
    ROWS.iter().find(|row| row.name == name).and_then(|row| row.types.first().copied())
}

/// Whether `post_attention_layernorm` is `post_attention_norm`, not `ffn_norm`.
pub fn renames_norm(name: &str) -> bool {
    ROWS.iter().any(|row| row.name == name && row.renamed)
}
