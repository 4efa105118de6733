//! From the name of an upload in a log to the config it was made of.

use crate::source::catalogue;

/// Words of a name that say how weights are stored or tuned, not what is computed.
const NOISE: &str = "instruct it chat base hf meta thinking preview fp8 dynamic block awq gptq int4 int8 4bit 8bit bit \
    w4a16 w8a8 quantized nvfp4 mxfp4 bnb unsloth gguf qat autoround abliterated 2501 2503 2507 2506 v1 \
    ud bf16 f16 q8 q4 0 k m xl text nvidia redhatai mlabonne";

/// Names that are not those of the model they are computed as.
const SAME: &[(&str, &str)] = &[
    ("deepseek-r1-distill-qwen-7b", "qwen2.5-7b"),
    ("deepseek-r1-distill-qwen-14b", "qwen2.5-14b"),
    ("deepseek-r1-distill-qwen-32b", "qwen2.5-32b"),
    ("deepseek-r1-distill-llama-8b", "llama-3.1-8b"),
    ("deepseek-r1-distill-llama-70b", "llama-3.3-70b"),
    ("magidonia-24b", "mistral-small-24b"),
    ("qwen3.6-", "qwen3.5-"),
    ("lfm2.5-embedding-", "lfm2-"),
    ("qwq-32b", "qwen2.5-32b"),
];

/// The model of the catalogue that a log's name means: the same words, sizes and all, apart from noise.
pub(super) fn find(name: &str) -> Option<catalogue::Entry> {
    let first = name.split([' ', '(', ',']).next().unwrap_or_default();
    let own = first.rsplit('/').next().unwrap_or(first).to_ascii_lowercase();
    let meant =
        SAME.iter().fold(own, |name, (from, to)| if name.contains(from) { name.replace(from, to) } else { name });
    let wanted = words(&meant);
    let same = |id: &&str| words(&id.rsplit('/').next().unwrap_or(id).to_ascii_lowercase()) == wanted;
    // Tuned models may have other positions than the base they came from.
    let tuned = |name: &str| ["instruct", "-it", "chat"].iter().any(|word| name.to_ascii_lowercase().contains(word));
    let exact = catalogue::ids().find(|id| id.eq_ignore_ascii_case(first));
    let id = exact
        .or_else(|| catalogue::ids().filter(same).find(|id| tuned(id) == tuned(&meant)))
        .or_else(|| catalogue::ids().find(same))?;
    catalogue::find(id)
}

fn words(name: &str) -> Vec<String> {
    let means_nothing = |word: &str| NOISE.split(' ').any(|noise| noise == word);
    let all = name.split(['-', '_']).filter(|word| !word.is_empty() && !means_nothing(word));
    // `quantized.w8a8` is one word with a dot of no number.
    let plain = all.map(|word| word.trim_end_matches(".w8a8").trim_end_matches(".w4a16"));
    let mut words: Vec<String> = plain.filter(|word| !means_nothing(word)).map(str::to_owned).collect();
    crate::order::sort(&mut words);
    words
}

#[cfg(test)]
mod tests {
    #[test]
    fn uploads_are_recognised() {
        let id = |name: &str| super::find(name).map(|entry| entry.id);
        let known = |name: &str, wanted: &str| assert_eq!(id(name).as_deref(), Some(wanted), "{name}");
        known("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.3-70B-Instruct");
        known("neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "meta-llama/Llama-3.1-70B");
        known("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "Qwen/Qwen2.5-14B");
        known("unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct");
        known("qwen3.6-35b-a3b NVFP4", "Qwen/Qwen3.5-35B-A3B");
        known("unsloth/gemma-4-31B-it-qat-GGUF UD-Q4_K_XL", "google/gemma-4-31B-it");
        assert_eq!(id("Qwen/Qwen3-7B"), None);
    }
}
