//! What kind a file is, by keys that only that kind has, so that no file is read as another's.

use super::Object;
use crate::plan::Fault;

/// Kinds that a plan file may have.
pub(crate) const READ: &str = "a plan or a report of vramcast, or a file of axolotl, LLaMA-Factory, TRL, transformers' \
                        Trainer, accelerate, DeepSpeed, torchtune, LitGPT, torchtitan, Automodel, verl or vLLM";

/// Whether its keys mark a file.
type Marks = fn(&Object) -> bool;

/// Kinds that are known and are no plan: what they are, and what to do with them.
const OTHERS: &[(Marks, &str, &str)] = &[
    (
        |file| file.contains_key("peft_type"),
        "PEFT's adapter_config.json",
        "give it as --adapter FILE (in Python peft_config=)",
    ),
    (
        |file| file.contains_key("model_type") && file.contains_key("architectures"),
        "a model's config.json",
        "give it as the model",
    ),
    (
        |file| file.contains_key("provider") && file.contains_key("gpu"),
        "axolotl's file for a cloud",
        "give the one for training",
    ),
    (|file| file.contains_key("exp_manager"), "NeMo's configuration", "it is not read; say it by flags"),
    (
        |file| file.contains_key("parallelism") && file.contains_key("training") && file.contains_key("hardware"),
        "a job file",
        "`vramcast calculate --config FILE` reads it",
    ),
    (
        |file| file.contains_key("prompt_length") && file.contains_key("max_new_tokens"),
        "a file of lengths for a benchmark of serving",
        "give the line that serves",
    ),
    (
        |file| file.contains_key("kt_config") || file.contains_key("use_kt"),
        "a file of KTransformers, which keeps experts on the host",
        "it is not simulated",
    ),
];

/// A file of a kind that is no plan.
pub(super) fn refuse(file: &Object) -> Result<(), Fault> {
    let found = OTHERS.iter().find(|(marks, ..)| marks(file));
    found.map_or(Ok(()), |(_, name, cure)| Err(Fault::new("", format!("it is {name}, not a plan")).or(*cure)))
}

#[cfg(test)]
mod tests {
    use super::super::{Beside, read};
    use serde_json::{Value, json};

    fn said(file: Value) -> String {
        read(&file, &Beside::default()).unwrap_err().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn files_are_what_they_are() {
        let format = |file: Value| read(&file, &Beside::default()).unwrap().unwrap().format;
        assert_eq!(format(json!({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1})), "DeepSpeed");
        assert_eq!(format(json!({"bf16": {"enabled": true}, "gradient_accumulation_steps": 1})), "DeepSpeed");
        let torchtune = json!({"model": {"_component_": "torchtune.models.x"}, "gradient_accumulation_steps": 8});
        assert!(said(torchtune).contains("no builder of torchtune"));
        assert!(said(json!({"peft_type": "LORA", "r": 8})).contains("adapter_config.json"));
        assert!(said(json!({"model_type": "llama", "architectures": ["x"]})).contains("config.json"));
    }
}
