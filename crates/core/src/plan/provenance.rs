//! Where every setting of a plan comes from: a flag, a file, a framework's default, or our guess.

use serde::Serialize;
use serde_json::Value;

use super::TrainPlan;
use super::framework::Provenance;

/// One setting and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Origin {
    /// The setting, as plan files spell it.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Where it comes from.
    pub from: String,
    /// The framework, with its version, whose default it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub framework: Option<String>,
}

/// What stands behind our defaults; what is not listed is off, as it is everywhere.
const DEFAULTS: [(&str, &str); 14] = [
    ("batch.batch_size", "our guess"),
    ("batch.seq_len", "our guess"),
    ("weights", "our guess: how most models are published"),
    ("attention", "transformers 5.17's default"),
    ("checkpointing", "transformers 5.17's default"),
    ("kernels", "transformers 5.17's default"),
    ("loss.kind", "transformers 5.17's default"),
    ("optimizer.kind", "transformers 5.17's default (Trainer)"),
    ("optimizer.implementation", "torch 2.11's default on CUDA"),
    ("gradient_accumulation", "transformers 5.17's default"),
    ("keep_outputs", "a plain training loop keeps the output until backward is over"),
    ("gpu", "our guess: the card of the recorded runs"),
    ("allocator", "torch 2.11's defaults"),
    ("clip", "off in a plain training loop"),
];

/// Every setting of a plan; `file` is the plan as its file alone had it, `framework` what a framework's defaults decided.
pub fn trace(plan: &TrainPlan, file: Option<&TrainPlan>, framework: &[Provenance]) -> Vec<Origin> {
    let flat = |plan: &TrainPlan| {
        let mut settings = Vec::new();
        flatten("", &serde_json::to_value(plan).unwrap_or_default(), &mut settings);
        settings
    };
    let same = |known: &[(String, String)], setting: &(String, String)| known.contains(setting);
    let (plain, from_file, settings) = (flat(&TrainPlan::default()), file.map(flat).unwrap_or_default(), flat(plan));
    let origin = |setting: (String, String)| {
        let decided = framework.iter().find(|known| known.key == setting.0);
        let from = if let Some(known) = decided {
            known.source.as_str()
        } else if same(&plain, &setting) {
            let known = DEFAULTS.iter().find(|(key, _)| *key == setting.0 || setting.0.starts_with(&format!("{key}.")));
            known.map_or("off unless asked for", |(_, from)| *from)
        } else if same(&from_file, &setting) {
            "the plan file"
        } else {
            "a flag"
        };
        let framework = decided.map(|known| known.framework.clone());
        Origin { key: setting.0, value: setting.1, from: from.to_owned(), framework }
    };
    settings.into_iter().filter(|(key, _)| !key.starts_with("gpu.") || key == "gpu.name").map(origin).collect()
}

/// `{"batch": {"seq_len": 4}}` as `batch.seq_len = 4`.
fn flatten(prefix: &str, value: &Value, into: &mut Vec<(String, String)>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&path, value, into);
            }
        }
        Value::Null => into.push((prefix.to_owned(), "none".to_owned())),
        Value::String(text) => into.push((prefix.to_owned(), text.clone())),
        other => into.push((prefix.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_know_where_they_come_from() {
        let mut file = TrainPlan::default();
        file.batch.seq_len = 4096;
        let mut plan = file.clone();
        plan.clip = true;
        let origins = trace(&plan, Some(&file), &[]);
        let from = |key: &str| origins.iter().find(|origin| origin.key == key).map(|origin| origin.from.as_str());
        assert_eq!(from("batch.seq_len"), Some("the plan file"));
        assert_eq!(from("clip"), Some("a flag"));
        assert_eq!(from("optimizer.implementation"), Some("torch 2.11's default on CUDA"));
        assert_eq!(from("gpu.name"), Some("our guess: the card of the recorded runs"));
    }
}
