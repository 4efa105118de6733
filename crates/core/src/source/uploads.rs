//! Quantised uploads, by their names: while the hub is out of reach a name is all that says how a checkpoint is stored.
//!
//! What an upload leaves whole stands in its config alone, but publishers follow recipes: `data/uploads.toml` has those that
//! could be read, with their sources.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::typed;

/// Ends of names, longest first, and the method that makes such a checkpoint.
const ENDS: [(&str, &str); 28] = [
    ("-unsloth-bnb-4bit", "nf4"),
    ("-int4-autoround", "gptq"),
    ("-awq-bf16-int4", "awq"),
    ("-qat-w4a16-ct", "gptq"),
    ("-quantized.w4a16", "gptq"),
    ("-quantized.w8a8", "fp8"),
    ("-fp8-dynamic", "fp8"),
    ("-modelopt-fp4", "nvfp4"),
    ("-autoround", "gptq"),
    ("-gptq-int4", "gptq"),
    ("-gptq-int8", "gptq"),
    ("-nvfp4-v2", "nvfp4"),
    ("-fp8-block", "fp8"),
    ("-awq-int4", "awq"),
    ("-awq-4bit", "awq"),
    ("-bnb-4bit", "nf4"),
    ("-int4-awq", "awq"),
    ("-fp4-v2", "nvfp4"),
    ("-fp8-kv", "fp8"),
    ("-w4a16", "gptq"),
    ("-w8a8", "fp8"),
    ("-nvfp4", "nvfp4"),
    ("-mxfp4", "mxfp4"),
    ("-gptq", "gptq"),
    ("-awq", "awq"),
    ("-int4", "gptq"),
    ("-fp8", "fp8"),
    ("-fp4", "nvfp4"),
];

/// A quantised upload.
#[derive(Debug, Clone, PartialEq)]
pub struct Upload<'a> {
    /// Its name without the end that says how it is stored.
    pub base: &'a str,
    /// The method that its end says.
    pub method: &'static str,
    /// Its `quantization_config` by its publisher's recipe, and where that was read.
    pub recipe: Option<(Value, &'static str)>,
}

/// What the name of an upload says, if it says that it is quantised.
pub fn quantised(name: &str) -> Option<Upload<'_>> {
    let lower = name.to_ascii_lowercase();
    let (end, method) = ENDS.iter().find(|(end, _)| lower.ends_with(end))?;
    let base = &name[..name.len() - end.len()];
    let (publisher, model) = lower[..base.len()].split_once('/').unwrap_or(("", &lower[..base.len()]));
    let recipe = TABLE.recipe.iter().find(|recipe| recipe.is_of(publisher, end, model));
    let recipe = recipe.and_then(|recipe| Some((recipe.section(end)?, recipe.source.as_str())));
    Some(Upload { base, method, recipe })
}

/// What ModelOpt leaves whole unless it is told otherwise.
pub fn left_by_modelopt() -> Vec<&'static str> {
    TABLE.leaves.get("modelopt").and_then(|list| TABLE.spelled_out(list)).unwrap_or_default()
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    leaves: BTreeMap<String, Vec<String>>,
    formats: BTreeMap<String, Map<String, Value>>,
    recipe: Vec<Recipe>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recipe {
    publishers: Option<Vec<String>>,
    ends: Vec<String>,
    models: Option<Vec<String>>,
    format: String,
    #[serde(default)]
    by_end: BTreeMap<String, String>,
    #[serde(default)]
    mixed: BTreeMap<String, String>,
    leaves: Vec<String>,
    #[serde(default)]
    cache: bool,
    source: String,
}

// A test reads the embedded file, so the empty table cannot be reached in a released build.
static TABLE: LazyLock<Table> =
    LazyLock::new(|| typed::embedded(include_str!("../../data/uploads.toml")).unwrap_or_default());

impl Table {
    /// A list with those it refers to in their places. `None`: one of them is not there.
    fn spelled_out<'a>(&'a self, names: &'a [String]) -> Option<Vec<&'a str>> {
        let mut all = Vec::new();
        for name in names {
            match name.strip_prefix('@') {
                Some(list) => all.extend(self.spelled_out(self.leaves.get(list)?)?),
                None => all.push(name.as_str()),
            }
        }
        Some(all)
    }
}

impl Recipe {
    fn is_of(&self, publisher: &str, end: &str, model: &str) -> bool {
        let publishes = |publishers: &Vec<String>| publishers.iter().any(|name| name == publisher);
        self.publishers.as_ref().is_none_or(publishes)
            && self.ends.iter().any(|own| own == end)
            && self.models.as_ref().is_none_or(|models| models.iter().any(|pattern| matches(pattern, model)))
    }

    /// The `quantization_config`, its list of modules in the words of its method.
    fn section(&self, end: &str) -> Option<Value> {
        let format = self.by_end.get(end).unwrap_or(&self.format);
        let mut section = TABLE.formats.get(format)?.clone();
        let leaves = TABLE.spelled_out(&self.leaves)?;
        let expressions = || leaves.iter().map(|name| format!("{}$", expression(name)));
        let (key, names): (&str, Vec<String>) = match section.get("quant_method")?.as_str()? {
            "modelopt" => ("exclude_modules", leaves.iter().map(|name| (*name).to_owned()).collect()),
            "compressed-tensors" => ("ignore", expressions().map(|text| format!("re:{text}")).collect()),
            _ => ("modules_to_not_convert", expressions().collect()),
        };
        section.insert(key.to_owned(), json!(names));
        if !self.mixed.is_empty() {
            let layers = self.mixed.iter().map(|(module, how)| (module.clone(), json!({"quant_algo": how})));
            section.insert("quantized_layers".to_owned(), Value::Object(layers.collect()));
        }
        if self.cache {
            section.insert("kv_cache_quant_algo".to_owned(), json!("FP8"));
        }
        Some(Value::Object(section))
    }
}

/// A regular expression of a wildcard.
fn expression(wildcard: &str) -> String {
    let spelled = |character: char| match character {
        '*' => ".*".to_owned(),
        '?' => ".".to_owned(),
        '.' => r"\.".to_owned(),
        other => other.to_string(),
    };
    wildcard.chars().map(spelled).collect()
}

/// Whether a name is of a pattern in which `*` is anything.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::source::quantization::{Quantization, Role, Weight};

    fn left(upload: &str, module: &str, role: Role) -> bool {
        let (section, _) = quantised(upload).unwrap().recipe.unwrap();
        let quantization = Quantization::from_config(&section).unwrap().unwrap();
        let name = format!("{module}.weight");
        let weight = Weight { name: &name, shape: &[256, 256], dtype: DType::BF16, role, transposed: false };
        !quantization.stored(&weight).unwrap().quantized
    }

    #[test]
    fn names_say_how_checkpoints_are_stored() {
        let said = |name| quantised(name).map(|upload| (upload.base, upload.method));
        assert_eq!(said("Qwen/Qwen2.5-32B-Instruct-AWQ"), Some(("Qwen/Qwen2.5-32B-Instruct", "awq")));
        assert_eq!(said("RedHatAI/Llama-3.1-8B-FP8-dynamic"), Some(("RedHatAI/Llama-3.1-8B", "fp8")));
        assert_eq!(said("unsloth/x-unsloth-bnb-4bit"), Some(("unsloth/x", "nf4")));
        assert_eq!(said("Qwen/Qwen2.5-32B-Instruct"), None);
    }

    #[test]
    fn every_recipe_can_be_read() {
        let table: Table = toml::from_str(include_str!("../../data/uploads.toml")).unwrap();
        for recipe in &table.recipe {
            assert!(!recipe.source.is_empty());
            for end in &recipe.ends {
                assert!(ENDS.iter().any(|(known, _)| known == end), "no name is read to end with {end}");
                let section = recipe.section(end).unwrap_or_else(|| panic!("{}: {end}", recipe.source));
                Quantization::from_config(&section).unwrap().unwrap();
            }
        }
        assert!(left_by_modelopt().contains(&"*lm_head*") && left_by_modelopt().contains(&"*visual*"));
    }

    #[test]
    fn publishers_leave_what_their_configs_say() {
        // The same model by two publishers.
        let attention = "model.language_model.layers.3.self_attn.q_proj";
        let states = "model.language_model.layers.0.linear_attn.out_proj";
        assert!(left("RedHatAI/Qwen3.6-35B-A3B-NVFP4", states, Role::Linear));
        assert!(!left("RedHatAI/Qwen3.6-35B-A3B-NVFP4", attention, Role::Linear));
        assert!(left("RedHatAI/Qwen3.6-35B-A3B-NVFP4", "lm_head", Role::Head));
        assert!(!left("nvidia/Qwen3.6-35B-A3B-NVFP4", states, Role::Linear));
        assert!(!left("nvidia/Qwen3.6-35B-A3B-NVFP4", "lm_head", Role::Head));
        assert!(left("nvidia/Qwen3.5-122B-A10B-NVFP4", attention, Role::Linear));
        assert!(!left("nvidia/Qwen3-30B-A3B-NVFP4", "model.layers.3.self_attn.q_proj", Role::Linear));
        assert!(left("nvidia/Qwen3-30B-A3B-FP4", "model.layers.3.mlp.gate", Role::Linear));
        // Towers and routers, whoever quantises; projections called gate are none.
        for upload in ["Qwen/Qwen3-VL-8B-Instruct-FP8", "someone/Qwen3-VL-8B-Instruct-FP8", "RedHatAI/x-quantized.w8a8"]
        {
            assert!(left(upload, "model.visual.blocks.3.attn.qkv", Role::Linear), "{upload}");
            assert!(left(upload, "model.layers.3.mlp.gate", Role::Linear), "{upload}");
            assert!(!left(upload, "model.layers.3.mlp.gate_proj", Role::Linear), "{upload}");
        }
        // Mamba layers before attention.
        let nano = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4";
        assert!(left(nano, "backbone.layers.4.mixer.in_proj", Role::Linear));
        assert!(!left(nano, "backbone.layers.14.mixer.in_proj", Role::Linear));
        assert!(left(nano, "backbone.layers.5.mixer.q_proj", Role::Linear));
        assert!(!left(nano, "backbone.layers.6.mixer.shared_experts.up_proj", Role::Linear));
    }

    #[test]
    fn patterns() {
        assert!(matches("qwen3.6-27b", "qwen3.6-27b") && !matches("qwen3.6-27b", "qwen3.6-27b-base"));
        assert!(matches("deepseek-r1*-v2", "deepseek-r1-0528-v2") && !matches("deepseek-r1*-v2", "deepseek-r1"));
        assert!(matches("*", "") && matches("a*b*c", "axxbyyc") && !matches("a*b*c", "axxc"));
    }
}
