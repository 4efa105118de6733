//! Names of Ollama's library: `NAME:TAG`, whose tag is a size, a variant and a quantisation (`8b-instruct-q8_0`).

use crate::serving::llama_cpp::Mixture;

/// What a name without a tag (`latest`) stands for.
const LATEST: &[(&str, &str)] = &[
    ("codellama", "7b"),
    ("deepseek-r1", "8b"),
    ("gemma2", "9b"),
    ("gemma3", "4b"),
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
    ("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
    ("phi3-3.8b", "phi3-mini"),
    ("phi3-14b", "phi3-medium"),
    ("phi3.5-3.8b", "phi3.5-mini"),
    ("phi4-14b", "phi4"),
];

/// Words of a tag that say how a model was trained, not how large it is.
const VARIANTS: [&str; 8] = ["instruct", "chat", "text", "it", "base", "distill", "qwen", "llama"];

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
    (known.map_or(plain, str::to_owned), mixture.map(|mixture| mixture.name), said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_sizes_variants_and_mixtures() {
        for (name, model, mixture) in [
            ("llama3:8b", "llama3-8b", None),
            ("llama3.1:8b-instruct-q8_0", "llama3.1-8b", Some("Q8_0")),
            ("llama3.1:8b-instruct-q4_K_M", "llama3.1-8b", Some("Q4_K_M")),
            ("llama3.2", "llama3.2-3b", None),
            ("llama3.2:latest", "llama3.2-3b", None),
            ("phi3", "phi3-mini", None),
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
