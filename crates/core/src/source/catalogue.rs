//! The models we carry with us: their `config.json` as on the hub, found by id or short name without a network.
//!
//! One JSON object a line (`data/catalogue.jsonl`, `data/synthetic.jsonl`). A lookup compares the start of each line
//! and parses only the hit, because the whole file takes longer to parse than everything else a command does.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::Value;

use super::json;
use crate::typed;

mod derived;
mod suggest;

pub use suggest::suggest;

const PUBLISHED: &str = include_str!("../../data/catalogue.jsonl");
/// Pipelines of diffusers, found by name like models. What lists or tries every model knows nothing of them.
const PIPELINES: &str = include_str!("../../data/pipelines.jsonl");
const SYNTHETIC: &str = include_str!("../../data/synthetic.jsonl");
/// What every line begins with; a test holds the files to it.
const LINE_START: &str = "{\"id\":\"";

/// A model of the catalogue.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its id on the hub, or the short name of a model that is only in a paper.
    pub id: String,
    /// The transformers class it is loaded with.
    pub auto_class: Option<String>,
    /// Its `config.json`.
    pub config: Value,
}

/// Finds a model by id, short name, id in any case, or repository name without its owner.
pub fn find(name: &str) -> Option<Entry> {
    let name = name.trim();
    let line = line_where(|id| id == name)
        .or_else(|| alias(name).and_then(|target| line_where(|id| id == target)))
        .or_else(|| line_where(|id| id.eq_ignore_ascii_case(name)))
        .or_else(|| line_where(|id| repository(id).eq_ignore_ascii_case(name)));
    line.map_or_else(|| derived::find(name).or_else(|| derived::find(alias(name)?)), entry)
}

/// Parts of names that say how a model was trained further or stored, and nothing about its shape.
const TRAINED: [&str; 12] =
    ["instruct", "it", "chat", "hf", "pt", "2507", "thinking", "bf16", "abliterated", "heretic", "uncensored", "sft"];

/// What a name says about a shape: without its owner and such parts. `base` is a size where no number is.
fn shape_of(name: &str) -> String {
    let plain = repository(name).to_lowercase().replace("-bnb-4bit", "");
    let parts = || plain.strip_prefix("meta-").or(plain.strip_prefix("huihui-")).unwrap_or(&plain).split('-');
    let sized = parts().any(|part| part.starts_with(|c: char| c.is_ascii_digit()) && part.ends_with(['b', 'm']));
    let says = |part: &&str| !(TRAINED.contains(part) || sized && *part == "base");
    parts().filter(says).collect::<Vec<_>>().join("-")
}

/// A model that we know, derived ones too, whose name says the same shape as another's: of a mirror, or of one that was trained further.
pub fn kin(name: &str) -> Option<&'static str> {
    let wanted = shape_of(name);
    let said = repository(name).to_lowercase();
    // Of several the one that was trained as the name says: later checkpoints of a shape may have more positions.
    let apart = |id: &&str| {
        let own = repository(id).to_lowercase();
        let trained = own.split('-').filter(|part| TRAINED.contains(part));
        trained.map(|part| if said.split('-').any(|other| other == part) { -1 } else { 1 }).sum::<i32>()
    };
    ids()
        .chain(derived::ids())
        .filter(|id| *id != name && shape_of(id) == wanted)
        .min_by_key(apart)
        .or_else(|| alias(&wanted))
}

/// All ids, published ones first.
pub fn ids() -> impl Iterator<Item = &'static str> {
    lines().filter_map(id_of)
}

/// All models. Parses everything: for listing and tests.
pub fn entries() -> impl Iterator<Item = Entry> {
    lines().filter_map(entry)
}

/// Short names and the ids they stand for, sorted.
pub fn aliases() -> &'static BTreeMap<String, String> {
    static ALIASES: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
        // A test reads the embedded file, so the empty answer cannot be reached in a released build.
        typed::embedded(include_str!("../../data/aliases.toml")).unwrap_or_default()
    });
    &ALIASES
}

/// What a short name stands for; Ollama's have a colon before their tag.
pub fn alias(name: &str) -> Option<&'static str> {
    aliases().get(&name.to_ascii_lowercase().replace(['_', ':'], "-")).map(String::as_str)
}

fn entry(line: &str) -> Option<Entry> {
    let mut row = json::parse(line.as_bytes()).ok()?;
    let config = row.get_mut("config")?.take();
    let text = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_owned);
    Some(Entry { id: text("id")?, auto_class: text("auto_class"), config })
}

fn lines() -> impl Iterator<Item = &'static str> {
    PUBLISHED.lines().chain(SYNTHETIC.lines())
}

fn line_where(mut wanted: impl FnMut(&str) -> bool) -> Option<&'static str> {
    lines().chain(PIPELINES.lines()).find(|line| id_of(line).is_some_and(&mut wanted))
}

fn id_of(line: &'static str) -> Option<&'static str> {
    line.strip_prefix(LINE_START)?.split_once('"').map(|(id, _)| id)
}

fn repository(id: &str) -> &str {
    id.rsplit_once('/').map_or(id, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_model() {
        let all: Vec<Entry> = lines().map(|line| entry(line).unwrap()).collect();
        assert_eq!(PUBLISHED.lines().count(), 378);
        assert!(ids().eq(all.iter().map(|entry| entry.id.as_str())));
        for entry in &all {
            assert!(entry.config.get("model_type").is_some_and(Value::is_string), "{}", entry.id);
            assert_eq!(find(&entry.id).as_ref(), Some(entry));
        }
        let mut sorted: Vec<&str> = ids().collect();
        crate::order::sort(&mut sorted);
        sorted.dedup();
        assert_eq!(sorted.len(), all.len(), "an id twice");
    }

    #[test]
    fn kin_are_trained_as_the_name_says() {
        for (name, kin_of_it) in [
            ("someone/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
            ("someone/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B-Thinking-2507"),
            ("someone/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
            ("someone/Qwen3-30B-A3B-Instruct", "Qwen/Qwen3-30B-A3B"),
            ("someone/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
            ("someone/Huihui-Qwen3-30B-A3B-Instruct-2507-abliterated", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
            ("someone/QwQ-32B-heretic", "Qwen/QwQ-32B"),
        ] {
            assert_eq!(kin(name), Some(kin_of_it), "{name}");
        }
    }

    #[test]
    fn every_alias_leads_somewhere() {
        let table: BTreeMap<String, String> = toml::from_str(include_str!("../../data/aliases.toml")).unwrap();
        assert!(table.len() > 250);
        for (name, id) in &table {
            assert_eq!(name, &name.to_lowercase());
            assert_eq!(find(name).map(|entry| entry.id).as_ref(), Some(id), "{name}");
            assert!(ids().all(|other| other != name), "{name} is an id already");
        }
    }

    #[test]
    fn found_in_any_case_and_without_owner() {
        let id = |name: &str| find(name).map(|entry| entry.id);
        assert_eq!(id("llama3-8b").as_deref(), Some("meta-llama/Meta-Llama-3-8B"));
        assert_eq!(id("Llama3_8B").as_deref(), Some("meta-llama/Meta-Llama-3-8B"));
        assert_eq!(id("META-LLAMA/llama-2-7B-HF").as_deref(), Some("meta-llama/Llama-2-7b-hf"));
        assert_eq!(id("mistral-7b-instruct-V0.3").as_deref(), Some("mistralai/Mistral-7B-Instruct-v0.3"));
        assert_eq!(id("phi-2").as_deref(), Some("microsoft/phi-2"));
        assert_eq!(id("gpt3-175b").as_deref(), Some("gpt3-175b"));
        assert_eq!(id(""), None);
        assert_eq!(id("\""), None);
        assert_eq!(id("nobody/nothing"), None);
    }

    /// Brown et al. 2020: 174.6 billion, of which the embeddings are 0.64.
    #[test]
    fn gpt3_is_as_large_as_published() {
        let config = find("gpt3").unwrap().config;
        let number = |key: &str| config[key].as_u64().unwrap();
        let (width, layers) = (number("n_embd"), number("n_layer"));
        let parameters =
            (number("vocab_size") + number("n_positions") + 2) * width + layers * (12 * width * width + 13 * width);
        assert_eq!(parameters / 100_000_000, 1746);
    }
}
