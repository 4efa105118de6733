//! Reading another tool's keys one by one, so that none is dropped silently.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::Object;
use crate::plan::PlanError;

/// Keys that change no memory of a training step, of all these tools. Those that end in `*` stand for what begins so.
const WITHOUT_EFFECT: &[&str] = &[
    "adam_*",
    "add_*",
    "auto_resume*",
    "bench_*",
    "cache_dir",
    "chat_template*",
    "completion_only_loss",
    "config_name",
    "cosine_*",
    "data_*",
    "dataloader_*",
    "dataset*",
    "datasets",
    "ddp_timeout",
    "debug",
    "default_system",
    "disable_tqdm",
    "do_eval",
    "do_predict",
    "do_train",
    "early_stopping_*",
    "enable_thinking",
    "eos_token",
    "epochs",
    "eval_*",
    "evals_*",
    "evaluation_strategy",
    "experimental_*",
    "flash_optimum",
    "full_determinism",
    "greater_is_better",
    "group_by_length",
    "hf_*",
    "hub_*",
    "ignore_*",
    "include_*",
    "is_*",
    "learning_rate",
    "load_best_model_at_end",
    "local_rank",
    "logging_*",
    "lora_alpha",
    "lora_fan_in_fan_out",
    "loraplus_*",
    "lr_*",
    "mask_history",
    "max_samples",
    "max_steps",
    "media_dir",
    "metric_for_best_model",
    "min_sample_len",
    "mix_strategy",
    "mlflow_*",
    "model_revision",
    "model_type",
    "num_epochs",
    "num_train_epochs",
    "output_dir",
    "overwrite_*",
    "packing_strategy",
    "pad_token",
    "per_device_eval_batch_size",
    "plot_loss",
    "preprocessing_*",
    "processor_type",
    "push_*",
    "ray_*",
    "remove_unused_columns",
    "report_to",
    "resume_*",
    "run_name",
    "save_*",
    "saves_*",
    "seed",
    "shuffle_*",
    "special_tokens",
    "strict",
    "strategy",
    "streaming",
    "swanlab_*",
    "template",
    "test_datasets",
    "tf32",
    "tokenized_path",
    "tokenizer*",
    "tokens",
    "tool_format",
    "train_on_inputs",
    "train_on_prompt",
    "trust_remote_code",
    "truncation_mode",
    "use_rslora",
    "use_swanlab",
    "use_tensorboard",
    "use_wandb",
    "val_set_size",
    "val_size",
    "wandb_*",
    "warmup_*",
    "weight_decay",
    "xpu_*",
    "assistant_only_loss",
    "average_tokens_across_devices",
    "batch_eval_metrics",
    "label_names",
    "neat_packing_*",
    "project",
    "image_dir",
    "image_column",
    "video_dir",
    "split_special_tokens",
    "use_fast_tokenizer",
    "sample_packing_*",
    "type_of_model",
    "peft_use_rslora",
    "torchdistx_path",
    "gc_steps",
    "torch_empty_cache_steps",
    "bnb_4bit_quant_storage",
];

/// A tool's keys, those that were read already, and what they come to.
pub(super) struct Reader<'a> {
    object: &'a Object,
    seen: BTreeSet<&'a str>,
    /// Places in the plan and their values.
    pub(super) changes: Vec<(String, Value)>,
    /// What a report should say.
    pub(super) notes: Vec<String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(object: &'a Object) -> Self {
        Self { object, seen: BTreeSet::new(), changes: Vec::new(), notes: Vec::new() }
    }

    /// A key's value; absent and null are the same.
    pub(super) fn get(&mut self, key: &'a str) -> Option<&'a Value> {
        self.seen.insert(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// A switch: `true`, and what is written where one may be.
    pub(super) fn is_on(&mut self, key: &'a str) -> bool {
        self.get(key).is_some_and(|value| *value == true || value.as_str() == Some("true"))
    }

    pub(super) fn text(&mut self, key: &'a str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    pub(super) fn number(&mut self, key: &'a str) -> Result<Option<u64>, PlanError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let whole = value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
        whole.map(Some).ok_or_else(|| PlanError::BadValue {
            key: key.into(),
            value: value.to_string(),
            expected: "a whole number".into(),
        })
    }

    pub(super) fn set(&mut self, place: &str, value: impl Into<Value>) {
        self.changes.push((place.into(), value.into()));
    }

    /// A whole number to a place of the plan.
    pub(super) fn number_to(&mut self, key: &'a str, place: &str) -> Result<(), PlanError> {
        if let Some(number) = self.number(key)? {
            self.set(place, number);
        }
        Ok(())
    }

    /// Names given as a list or with commas between them; `all` and `all-linear` are every linear.
    pub(super) fn targets_to(&mut self, key: &'a str, place: &str) {
        let Some(value) = self.get(key) else { return };
        let names: Vec<&str> = match value {
            Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
            Value::String(text) => text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect(),
            _ => Vec::new(),
        };
        match names.as_slice() {
            [] => {}
            ["all" | "all-linear"] => self.set(place, "all-linear"),
            // Signs of a regular expression make it one.
            [one] if one.contains(['*', '(', '|', '\\', '[', '$']) => self.set(place, json!(one)),
            _ => self.set(place, json!(names)),
        }
    }

    /// Refuses a key that is set to anything but off.
    pub(super) fn refuse(&mut self, key: &'a str, hint: &str) -> Result<(), PlanError> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let off = *value == false || *value == 0 || *value == "" || *value == "none" || *value == "no";
        let empty = value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Object::is_empty);
        if off || empty {
            return Ok(());
        }
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Err(PlanError::Unsupported { what: format!("{key}: {shown}"), hint: hint.into() })
    }

    /// Says of every key that was neither read nor is known to change nothing that it was not read.
    pub(super) fn report_the_rest(&mut self) {
        let harmless = |key: &str| {
            WITHOUT_EFFECT.iter().any(|known| match known.strip_suffix('*') {
                Some(start) => key.starts_with(start),
                None => key == *known,
            })
        };
        let rest: Vec<&str> = self
            .object
            .iter()
            .filter(|(key, value)| !value.is_null() && !self.seen.contains(key.as_str()) && !harmless(key))
            .map(|(key, _)| key.as_str())
            .collect();
        if !rest.is_empty() {
            self.notes.push(format!("not read, may change memory: {}", rest.join(", ")));
        }
    }
}
