//! Plans of other tools: axolotl's and LLaMA-Factory's YAML, arguments of transformers' Trainer and of TRL.
//!
//! | module | whose keys |
//! |---|---|
//! | `trainer` | `TrainingArguments`, TRL's `SFTConfig` and `ModelConfig` |
//! | `axolotl` | axolotl |
//! | `llama_factory` | LLaMA-Factory |
//! | `kinds` | which kind a file is, and those that are refused |
//! | `keys` | reading values, and keys without effect on memory |
//!
//! Every key is read, known to change no memory, refused by name, or reported.

mod axolotl;
mod keys;
pub(crate) mod kinds;
mod llama_factory;
mod trainer;

use serde_json::{Map, Value};

use super::PlanError;
use super::framework::Situation;
use keys::Reader;
pub(crate) use trainer::trainer_optimizer;

/// A file of another tool, as changes to a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// Whose defaults hold where the file is silent: a name of [`super::Framework`].
    pub framework: &'static str,
    /// The model it names.
    pub model: Option<String>,
    /// What kind of run it is.
    pub situation: Situation,
    /// Places in the plan and their values.
    pub changes: Vec<(String, Value)>,
    /// What was not read, or was read in another sense.
    pub notes: Vec<String>,
}

/// Reads a plan of another tool; `None`: the keys are no such tool's.
pub fn read(value: &Value) -> Result<Option<Imported>, PlanError> {
    let Some(object) = value.as_object() else { return Ok(None) };
    let has = |key: &str| object.contains_key(key);
    kinds::refuse(object)?;
    if has("finetuning_type") || has("stage") && (has("cutoff_len") || has("template")) {
        return llama_factory::read(object).map(Some);
    }
    if has("base_model") && ["datasets", "sequence_len", "micro_batch_size", "adapter"].into_iter().any(has) {
        return axolotl::read(object).map(Some);
    }
    kinds::refuse_trainers(object)?;
    let arguments = ["per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "optim"];
    if arguments.into_iter().any(has) {
        return trainer::read(object).map(Some);
    }
    Ok(None)
}

/// What is left after a tool's own keys: those without effect go, the others are named.
fn finish(mut reader: Reader<'_>, framework: &'static str, model: Option<String>, situation: Situation) -> Imported {
    reader.report_the_rest();
    Imported { framework, model, situation, changes: reader.changes, notes: reader.notes }
}

fn situation(adapter: bool, quantised: bool) -> Situation {
    match (adapter, quantised) {
        (_, true) => Situation::Quantised,
        (true, _) => Situation::Adapter,
        _ => Situation::Full,
    }
}

type Object = Map<String, Value>;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn changes(value: Value) -> (Imported, impl Fn(&str) -> Option<Value>) {
        let imported = read(&value).unwrap().unwrap();
        let changes = imported.changes.clone();
        (imported, move |key: &str| changes.iter().rev().find(|(known, _)| known == key).map(|(_, v)| v.clone()))
    }

    #[test]
    fn an_axolotl_file_is_read() {
        let (imported, get) = changes(json!({
            "base_model": "meta-llama/Llama-3.2-1B", "load_in_4bit": true, "adapter": "qlora", "lora_r": 32,
            "lora_target_linear": true, "sequence_len": 4096, "sample_packing": true, "micro_batch_size": 2,
            "gradient_accumulation_steps": 4, "optimizer": "paged_adamw_32bit", "gradient_checkpointing": true,
            "attn_implementation": "flash_attention_2", "learning_rate": 0.0002, "datasets": [], "new_key": 3,
        }));
        assert_eq!((imported.framework, imported.situation), ("axolotl", Situation::Quantised));
        assert_eq!(imported.model.as_deref(), Some("meta-llama/Llama-3.2-1B"));
        assert_eq!(get("batch.seq_len"), Some(json!(4096)));
        assert_eq!(get("adapter.rank"), Some(json!(32)));
        assert_eq!(get("adapter.targets"), Some(json!("all-linear")));
        assert_eq!(get("optimizer.kind"), Some(json!("paged-adamw32")));
        assert_eq!(get("checkpointing"), Some(json!("full")));
        assert!(imported.notes.iter().any(|note| note.contains("new_key")));
        assert!(!imported.notes.iter().any(|note| note.contains("learning_rate")));
    }

    #[test]
    fn a_llama_factory_file_is_read() {
        let (imported, get) = changes(json!({
            "model_name_or_path": "Qwen/Qwen2.5-7B", "stage": "sft", "finetuning_type": "lora", "lora_rank": 16,
            "lora_target": "q_proj,v_proj", "cutoff_len": 1024, "per_device_train_batch_size": 1, "bf16": true,
            "quantization_bit": 4, "template": "qwen",
        }));
        assert_eq!((imported.framework, imported.situation), ("llama-factory", Situation::Quantised));
        assert_eq!(get("autocast"), Some(json!("bf16")));
        assert_eq!(get("adapter.targets"), Some(json!(["q_proj", "v_proj"])));
        assert_eq!(get("quantization.scheme"), Some(json!("nf4")));
        assert_eq!(get("batch.seq_len"), Some(json!(1024)));
    }

    #[test]
    fn training_arguments_are_read_and_trl_is_told_apart() {
        let plain = json!({"per_device_train_batch_size": 4, "fp16": true, "optim": "adafactor", "max_grad_norm": 0});
        let (imported, get) = changes(plain);
        assert_eq!(imported.framework, "hf-trainer");
        assert_eq!((get("autocast"), get("clip")), (Some(json!("fp16")), Some(json!(false))));
        assert_eq!(get("optimizer.kind"), Some(json!("adafactor")));
        let (imported, get) = changes(json!({
            "per_device_train_batch_size": 4, "max_length": 512, "use_peft": true, "lora_r": 64, "load_in_4bit": true,
        }));
        assert_eq!((imported.framework, imported.situation), ("trl", Situation::Quantised));
        assert_eq!((get("adapter.rank"), get("batch.seq_len")), (Some(json!(64)), Some(json!(512))));
    }

    #[test]
    fn what_is_not_simulated_is_refused_by_name() {
        let refused = |value: Value| read(&value).unwrap_err().to_string();
        let axolotl = json!({"base_model": "a/b", "datasets": [], "rl": "dpo"});
        assert!(refused(axolotl).contains("rl: dpo"));
        assert!(refused(json!({"optim": "adamw_torch", "torch_compile": true})).contains("torch_compile"));
        assert!(refused(json!({"stage": "ppo", "template": "x"})).contains("stage: ppo"));
        assert_eq!(read(&json!({"batch": {"batch_size": 1}})).unwrap(), None);
    }
}
