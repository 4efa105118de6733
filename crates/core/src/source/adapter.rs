//! PEFT's `adapter_config.json` as a typed value. What it does to a model is the plan's business, not ours.
//!
//! Keys and defaults: `peft/tuners/lora/config.py`, `peft/config.py` (peft 0.21). A key we do not know is listed in
//! [`Adapter::unknown_keys`], never dropped in silence.

use serde_json::{Map, Value};

/// Why an adapter config was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The document is not an object.
    #[error("adapter_config.json is not an object")]
    NotAnObject,
    /// There is no `peft_type`, so it is some other file.
    #[error("adapter_config.json has no `peft_type`")]
    NoPeftType,
    /// A value has the wrong type.
    #[error("adapter_config.json: `{key}` should be {expected}, found {found}")]
    BadValue {
        /// Its key.
        key: &'static str,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
}

/// Which modules are meant.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Modules {
    /// Nothing was said: PEFT's table for the model type decides.
    #[default]
    Default,
    /// Every linear layer but the output head.
    AllLinear,
    /// Names or suffixes of names.
    List(Vec<String>),
    /// A regular expression over the whole name.
    Regex(String),
}

/// Which biases are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Bias {
    /// None.
    #[default]
    None,
    /// All of the model.
    All,
    /// Those of the adapted layers.
    AdapterOnly,
}

/// An adapter config.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Adapter {
    /// `LORA`, `IA3`, … in upper case.
    pub peft_type: String,
    /// `base_model_name_or_path`.
    pub base_model: Option<String>,
    /// `task_type`.
    pub task_type: Option<String>,
    /// Rank; PEFT's default is 8.
    pub r: u64,
    /// Scale; PEFT's default is 8.
    pub lora_alpha: f64,
    /// Dropout before the adapter; a probability above zero keeps a mask.
    pub lora_dropout: f64,
    /// What is adapted.
    pub target_modules: Modules,
    /// What is left out of that.
    pub exclude_modules: Modules,
    /// Bare parameters (fused experts) that are adapted.
    pub target_parameters: Vec<String>,
    /// Modules trained in full, as copies.
    pub modules_to_save: Vec<String>,
    /// Other ranks for modules matching a pattern, in the file's order.
    pub rank_pattern: Vec<(String, u64)>,
    /// Other scales for modules matching a pattern, in the file's order.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Only these layers.
    pub layers_to_transform: Option<Vec<u64>>,
    /// What the list of layers is called, where it is not found by itself.
    pub layers_pattern: Vec<String>,
    /// Which biases are trained.
    pub bias: Bias,
    /// Whether the up-projection itself has a bias.
    pub lora_bias: bool,
    /// Weight-decomposed: adds a magnitude vector per module.
    pub use_dora: bool,
    /// Scales by the root of the rank; no effect on memory.
    pub use_rslora: bool,
    /// Weights are stored [in, out].
    pub fan_in_fan_out: bool,
    /// Keys we do not know, sorted.
    pub unknown_keys: Vec<String>,
}

/// Keys PEFT writes that do not change what is trained or how large it is.
const NO_EFFECT: &[&str] = &[
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "use_qalora",
];

/// Reads an adapter config.
pub fn parse(config: &Value) -> Result<Adapter, AdapterError> {
    let keys = Keys(config.as_object().ok_or(AdapterError::NotAnObject)?);
    let peft_type = keys.text("peft_type")?.ok_or(AdapterError::NoPeftType)?.to_ascii_uppercase();
    let adapter = Adapter {
        peft_type,
        base_model: keys.text("base_model_name_or_path")?,
        task_type: keys.text("task_type")?,
        r: keys.whole("r")?.unwrap_or(8),
        lora_alpha: keys.number("lora_alpha")?.unwrap_or(8.0),
        lora_dropout: keys.number("lora_dropout")?.unwrap_or(0.0),
        target_modules: keys.modules("target_modules")?,
        exclude_modules: keys.modules("exclude_modules")?,
        target_parameters: keys.texts("target_parameters")?,
        modules_to_save: keys.texts("modules_to_save")?,
        rank_pattern: keys.table("rank_pattern", Value::as_u64)?,
        alpha_pattern: keys.table("alpha_pattern", Value::as_f64)?,
        layers_to_transform: keys.layers("layers_to_transform")?,
        layers_pattern: keys.texts("layers_pattern")?,
        bias: keys.bias()?,
        lora_bias: keys.flag("lora_bias")?,
        use_dora: keys.flag("use_dora")?,
        use_rslora: keys.flag("use_rslora")?,
        fan_in_fan_out: keys.flag("fan_in_fan_out")?,
        unknown_keys: keys.unknown(),
    };
    Ok(adapter)
}

/// Every key [`parse`] reads.
const KNOWN: &[&str] = &[
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
];

struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    /// The value, unless it is absent or null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, AdapterError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(AdapterError::BadValue { key, expected, found: shortened(value) }),
        }
    }

    fn text(&self, key: &'static str) -> Result<Option<String>, AdapterError> {
        self.read(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    fn whole(&self, key: &'static str) -> Result<Option<u64>, AdapterError> {
        self.read(key, "a whole number", Value::as_u64)
    }

    fn number(&self, key: &'static str) -> Result<Option<f64>, AdapterError> {
        self.read(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &'static str) -> Result<bool, AdapterError> {
        Ok(self.read(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// A list of texts; one text alone is a list of one.
    fn texts(&self, key: &'static str) -> Result<Vec<String>, AdapterError> {
        let read = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        Ok(self.read(key, "a list of names", read)?.unwrap_or_default())
    }

    fn modules(&self, key: &'static str) -> Result<Modules, AdapterError> {
        match self.get(key) {
            None => Ok(Modules::Default),
            Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => Ok(Modules::AllLinear),
            Some(Value::String(text)) => Ok(Modules::Regex(text.clone())),
            Some(_) => self.texts(key).map(Modules::List),
        }
    }

    fn table<T>(
        &self,
        key: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<(String, T)>, AdapterError> {
        let rows =
            |value: &Value| value.as_object()?.iter().map(|(name, value)| Some((name.clone(), read(value)?))).collect();
        Ok(self.read(key, "a table of numbers", rows)?.unwrap_or_default())
    }

    fn layers(&self, key: &'static str) -> Result<Option<Vec<u64>>, AdapterError> {
        self.read(key, "a layer number or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(Value::as_u64).collect(),
            single => single.as_u64().map(|layer| vec![layer]),
        })
    }

    fn bias(&self) -> Result<Bias, AdapterError> {
        let read = |value: &Value| match value.as_str()? {
            "none" => Some(Bias::None),
            "all" => Some(Bias::All),
            text if text.ends_with("_only") => Some(Bias::AdapterOnly),
            _ => None,
        };
        Ok(self.read("bias", "`none`, `all` or `lora_only`", read)?.unwrap_or_default())
    }

    fn unknown(&self) -> Vec<String> {
        let known = |key: &&String| KNOWN.contains(&key.as_str()) || NO_EFFECT.contains(&key.as_str());
        // Absent features are written as null or false; only a key that says something is worth a word.
        let idle = |value: &Value| value.is_null() || value == &Value::Bool(false);
        let mut unknown: Vec<String> =
            self.0.iter().filter(|(key, value)| !known(key) && !idle(value)).map(|(key, _)| key.clone()).collect();
        crate::order::sort(&mut unknown);
        unknown
    }
}

/// A value short enough for a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reads_a_usual_config() {
        let adapter = parse(&json!({
            "peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "bias": "lora_only",
            "target_modules": ["q_proj", "v_proj"], "exclude_modules": "vision.*", "modules_to_save": ["lm_head"],
            "rank_pattern": {"^model.layers.0": 32}, "layers_to_transform": 3, "use_dora": true,
            "base_model_name_or_path": "meta-llama/Llama-2-7b-hf", "task_type": "CAUSAL_LM",
            "inference_mode": true, "layer_replication": null, "trainable_token_indices": [1], "megatron_config": null
        }))
        .unwrap();
        assert_eq!((adapter.r, adapter.lora_alpha, adapter.bias), (16, 32.0, Bias::AdapterOnly));
        assert_eq!(adapter.target_modules, Modules::List(vec!["q_proj".into(), "v_proj".into()]));
        assert_eq!(adapter.exclude_modules, Modules::Regex("vision.*".into()));
        assert_eq!(adapter.rank_pattern, [("^model.layers.0".to_owned(), 32)]);
        assert_eq!(adapter.layers_to_transform, Some(vec![3]));
        assert_eq!(adapter.unknown_keys, ["trainable_token_indices"]);
        assert!(adapter.use_dora && !adapter.use_rslora);
    }

    #[test]
    fn defaults_are_pefts() {
        let adapter = parse(&json!({"peft_type": "lora", "target_modules": "all-linear"})).unwrap();
        assert_eq!((adapter.r, adapter.lora_alpha, adapter.peft_type.as_str()), (8, 8.0, "LORA"));
        assert_eq!(adapter.target_modules, Modules::AllLinear);
        assert_eq!(adapter.exclude_modules, Modules::Default);
    }

    #[test]
    fn mistakes_are_named() {
        let refused = |value: Value| parse(&value).unwrap_err().to_string();
        assert_eq!(refused(json!([])), "adapter_config.json is not an object");
        assert_eq!(refused(json!({"r": 8})), "adapter_config.json has no `peft_type`");
        assert_eq!(
            refused(json!({"peft_type": "LORA", "r": -8})),
            "adapter_config.json: `r` should be a whole number, found -8"
        );
        assert!(refused(json!({"peft_type": "LORA", "target_modules": [1]})).contains("a list of names"));
        assert!(refused(json!({"peft_type": "LORA", "bias": "some"})).contains("`none`, `all` or `lora_only`"));
        assert!(refused(json!({"peft_type": "LORA", "bias": "x".repeat(500)})).ends_with("..."));
    }
}
