//! Names of Ollama's library: `NAME:TAG`, whose tag is a size, a variant and a quantisation (`8b-instruct-q8_0`).

use crate::serving::llama_cpp::Mixture;

/// What a name without a tag (`latest`) stands for.
const LATEST: &[(&str, &str)] = &[
    ("codellama", "7b"),
    ("deepseek-r1", "8b"),
    ("gemma2", "9b"),
    ("gemma3", "4b"),
    ("gemma3n", "e4b"),
    ("gemma4", "e4b"),
    ("deepseek-v2", "16b"),
    ("deepseek-coder-v2", "16b"),
    ("devstral", "24b"),
    ("dolphin3", "8b"),
    ("hermes3", "8b"),
    ("magistral", "24b"),
    ("mistral-small3.1", "24b"),
    ("mistral-small3.2", "24b"),
    ("phi", "2.7b"),
    ("qwen2.5-coder", "7b"),
    ("qwen2.5vl", "7b"),
    // Files of 6.0, 6.6 and 23 GB in published lists of `ollama list`.
    ("ministral-3", "8b"),
    ("qwen3.5", "9b"),
    ("qwen3.6", "35b-a3b"),
    ("qwen3-coder", "30b"),
    ("qwq", "32b"),
    ("solar", "10.7b"),
    ("zephyr", "7b"),
    ("gpt-oss", "20b"),
    ("llama2", "7b"),
    ("llama3", "8b"),
    ("llama3.1", "8b"),
    ("llama3.2", "3b"),
    ("llama3.3", "70b"),
    ("mistral", "7b"),
    ("mixtral", "8x7b"),
    ("phi3", "mini"),
    ("phi3.5", "mini"),
    ("qwen2", "7b"),
    ("qwen2.5", "7b"),
    ("qwen3", "8b"),
];

/// Models whose short name here is another, or that have the shapes of another (the distilled ones of DeepSeek-R1).
const CALLED: &[(&str, &str)] = &[
    ("deepseek-r1-1.5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    ("deepseek-r1-7b", "Qwen/Qwen2.5-7B"),
    ("deepseek-r1-8b", "Qwen/Qwen3-8B"),
    ("deepseek-r1-14b", "Qwen/Qwen2.5-14B"),
    ("deepseek-r1-32b", "Qwen/Qwen2.5-32B"),
    ("deepseek-r1-70b", "meta-llama/Llama-3.3-70B-Instruct"),
    ("deepseek-r1-671b", "deepseek-ai/DeepSeek-R1"),
    ("ministral-3-3b", "mistralai/Ministral-3-3B-Instruct-2512"),
    ("ministral-3-8b", "mistralai/Ministral-3-8B-Instruct-2512"),
    ("ministral-3-14b", "mistralai/Ministral-3-14B-Instruct-2512"),
    ("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
    ("phi3-3.8b", "phi3-mini"),
    ("phi3-14b", "phi3-medium"),
    ("phi3.5-3.8b", "phi3.5-mini"),
    ("phi4-14b", "phi4"),
    ("phi4-reasoning", "microsoft/Phi-4-reasoning"),
    ("phi4-reasoning-14b", "microsoft/Phi-4-reasoning"),
    ("phi-2.7b", "microsoft/phi-2"),
    ("qwen2.5vl-3b", "Qwen/Qwen2.5-VL-3B-Instruct"),
    ("qwen2.5vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ("qwen2.5vl-32b", "Qwen/Qwen2.5-VL-32B-Instruct"),
    ("qwen3-4b-2507", "Qwen/Qwen3-4B-Instruct-2507"),
    ("qwen3-30b-a3b-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    ("qwen3-coder-30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    ("qwen3-coder-30b-a3b", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    ("deepseek-v2-16b", "deepseek-ai/DeepSeek-V2-Lite"),
    ("deepseek-v2-236b", "deepseek-ai/DeepSeek-V2"),
    ("deepseek-coder-v2-16b", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"),
    ("deepseek-coder-v2-236b", "deepseek-ai/DeepSeek-Coder-V2-Instruct"),
    ("gemma3n-e2b", "google/gemma-3n-E2B-it"),
    ("gemma3n-e4b", "google/gemma-3n-E4B-it"),
    ("gemma4-e2b", "google/gemma-4-E2B-it"),
    ("gemma4-e4b", "google/gemma-4-E4B-it"),
    ("mistral-small3.1-24b", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),
    ("mistral-small3.2-24b", "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
    ("devstral-24b", "mistralai/Devstral-Small-2507"),
    ("magistral-24b", "mistralai/Magistral-Small-2507"),
    ("nemotron-3-nano-30b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    ("nemotron-3-nano-4b", "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16"),
    ("granite3.3-8b", "ibm-granite/granite-3.3-8b-instruct"),
    ("granite4-micro", "ibm-granite/granite-4.0-micro"),
    ("granite4-micro-h", "ibm-granite/granite-4.0-h-micro"),
    ("granite4-tiny-h", "ibm-granite/granite-4.0-h-tiny"),
    ("granite4-small-h", "ibm-granite/granite-4.0-h-small"),
    ("dolphin3-8b", "meta-llama/Llama-3.1-8B"),
    ("hermes3-8b", "NousResearch/Hermes-3-Llama-3.1-8B"),
    ("zephyr-7b", "HuggingFaceH4/zephyr-7b-beta"),
    ("wizardlm2-7b", "mistralai/Mistral-7B-v0.1"),
    ("solar-10.7b", "upstage/SOLAR-10.7B-v1.0"),
];

/// Names whose tags without a quantisation are `Q4_0`: those of the library's first year, until August 2024, as its pages
/// are remembered, not read. Later ones are `Q4_K_M`.
const EARLY: [&str; 34] = [
    "codegemma",
    "codellama",
    "codestral",
    "command-r",
    "command-r-plus",
    "deepseek-coder",
    "deepseek-coder-v2",
    "deepseek-llm",
    "deepseek-v2",
    "falcon",
    "gemma",
    "gemma2",
    // A log of 2026 says so: the file is of August 2024.
    "hermes3",
    "llama2",
    "llama3",
    "llava",
    "mistral-nemo",
    "mixtral",
    "neural-chat",
    "openchat",
    "orca-mini",
    "phi",
    "phi3",
    "phi3.5",
    "qwen",
    "qwen2",
    "solar",
    "stablelm2",
    "starcoder2",
    "tinyllama",
    "vicuna",
    "wizardlm2",
    "yi",
    "zephyr",
];

/// Tags whose default is another.
const OTHERWISE: [(&str, &str); 5] = [
    ("bge-m3", "F16"),
    ("llama3.2-1b", "Q8_0"),
    ("smollm2-1.7b", "Q8_0"),
    ("gemma3-270m", "Q8_0"),
    // With a layer that guesses ahead, as a log of its tensors says.
    ("qwen3.8", "Q4_K_M+MTP"),
];

/// Words of a tag that say how a model was trained, not how large it is.
const VARIANTS: [&str; 10] = ["instruct", "chat", "text", "it", "base", "distill", "qwen", "llama", "lite", "qat"];

/// The model of a name, its quantisation where the tag has one, and what to say.
pub fn library(name: &str) -> (String, Option<&'static str>, Option<String>) {
    // Repositories of the hub, of users and files are no names of the library.
    let hub = ["hf.co/", "huggingface.co/"].iter().find_map(|host| name.strip_prefix(host));
    if let Some(name) = hub.or(Some(name).filter(|name| name.contains(['/', '\\']))) {
        return (name.to_owned(), None, None);
    }
    let (own, tag) = name.split_once(':').unwrap_or((name, "latest"));
    let latest = LATEST.iter().find(|(known, _)| *known == own).map(|(_, tag)| *tag);
    let tag = if tag == "latest" { latest.unwrap_or_default() } else { tag };
    let mixture = tag.rsplit('-').next().and_then(Mixture::find);
    let parts = tag.split('-').filter(|part| !VARIANTS.contains(part) && Mixture::find(part).is_none());
    let plain = std::iter::once(own).chain(parts).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-");
    let known = CALLED.iter().find(|(known, _)| *known == plain).map(|(_, id)| *id);
    let said = known.filter(|id| own == "deepseek-r1" && !id.starts_with("deepseek"));
    let said = said.map(|id| format!("{name} has the shapes of {id}, which is counted"));
    let otherwise = OTHERWISE.iter().find(|(name, _)| *name == plain || *name == own).map(|(_, mixture)| *mixture);
    let usual = otherwise.or_else(|| EARLY.contains(&own).then_some("Q4_0"));
    (known.map_or(plain, str::to_owned), mixture.map(|mixture| mixture.name).or(usual), said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_sizes_variants_and_mixtures() {
        for (name, model, mixture) in [
            ("llama3:8b", "llama3-8b", Some("Q4_0")),
            ("llama3.1:8b-instruct-q8_0", "llama3.1-8b", Some("Q8_0")),
            ("llama3.1:8b-instruct-q4_K_M", "llama3.1-8b", Some("Q4_K_M")),
            ("llama3.2", "llama3.2-3b", None),
            ("llama3.2:latest", "llama3.2-3b", None),
            ("phi3", "phi3-mini", Some("Q4_0")),
            (
                "deepseek-coder-v2:16b-lite-instruct-q5_K_M",
                "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
                Some("Q5_K_M"),
            ),
            ("gemma4", "google/gemma-4-E4B-it", None),
            ("qwen2.5:0.5b-instruct-fp16", "qwen2.5-0.5b", Some("F16")),
            ("deepseek-r1:7b", "Qwen/Qwen2.5-7B", None),
            ("deepseek-r1:1.5b-qwen-distill-q4_K_M", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", Some("Q4_K_M")),
            ("mistral:7b-instruct-q5_K_S", "mistralai/Mistral-7B-Instruct-v0.3", Some("Q5_K_S")),
            ("hf.co/owner/name-GGUF:Q4_K_M", "owner/name-GGUF:Q4_K_M", None),
            ("./model.gguf", "./model.gguf", None),
            ("qwen3", "qwen3-8b", None),
        ] {
            let (found, stored, _) = library(name);
            assert_eq!((found.as_str(), stored), (model, mixture), "{name}");
        }
    }
}
