//! What kind a file is, by keys that only that kind has, so that no file is read as another's.

use serde_json::Value;

use super::Object;
use crate::plan::Fault;

/// Kinds that a plan file may have.
pub(crate) const READ: &str = "a plan or a report of vramcast, or a file of axolotl, LLaMA-Factory, TRL, transformers' \
                        Trainer, accelerate, DeepSpeed, torchtune, LitGPT or torchtitan";

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
        |file| file.contains_key("actor_rollout_ref"),
        "verl's configuration",
        "reinforcement learning is not modelled yet",
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
        |file| file.contains_key("kt_config") || file.contains_key("use_kt"),
        "a file of KTransformers, which keeps experts on the host",
        "it is not simulated",
    ),
];

/// Trainers of TRL that do something else than supervised fine-tuning, and keys that only their configs have
/// (trl 1.16, trainer/*_config.py and experimental/). A key says it by being there: their defaults are no nulls.
const TRAINERS: &[(&str, &[&str])] = &[
    ("PPO", &["num_ppo_epochs", "kl_coef", "cliprange", "cliprange_value", "vf_coef", "whiten_rewards"]),
    ("RLOO", &["rloo_k"]),
    (
        "GRPO or RLOO",
        &[
            "num_generations",
            "steps_per_generation",
            "num_iterations",
            "scale_rewards",
            "reward_weights",
            "reward_funcs",
            "importance_sampling_level",
            "epsilon_high",
            "use_vllm",
            "vllm_mode",
        ],
    ),
    ("KTO", &["desirable_weight", "undesirable_weight"]),
    ("a reward model", &["center_rewards_coefficient", "train_on_last_step_only", "step_separator"]),
    ("CPO", &["cpo_alpha", "simpo_gamma"]),
    ("GKD", &["lmbda", "seq_kd", "teacher_model_name_or_path"]),
    (
        "DPO",
        &[
            "precompute_ref_log_probs",
            "ref_model",
            "ref_model_init_kwargs",
            "reference_free",
            "sync_ref_model",
            "rpo_alpha",
            "ld_alpha",
            "f_divergence_type",
            "force_use_ref_model",
            "ref_adapter_name",
        ],
    ),
    ("DPO, ORPO or another trainer on preferences", &["beta", "max_prompt_length", "max_completion_length"]),
    ("online DPO or PPO", &["reward_model_path", "missing_eos_penalty"]),
];

/// A file of a kind that is no plan.
pub(super) fn refuse(file: &Object) -> Result<(), Fault> {
    let found = OTHERS.iter().find(|(marks, ..)| marks(file));
    found.map_or(Ok(()), |(_, name, cure)| Err(Fault::new("", format!("it is {name}, not a plan")).or(*cure)))
}

/// A config of a trainer that is not simulated.
pub(super) fn refuse_trainers(file: &Object) -> Result<(), Fault> {
    let loss = file.get("loss_type").filter(|loss| !loss.is_null());
    // What SFTConfig may have; DPOConfig takes several.
    let supervised = |loss: &Value| loss.as_str().is_some_and(|name| ["nll", "dft", "chunked_nll"].contains(&name));
    let by_loss =
        || loss.filter(|loss| !supervised(loss)).map(|_| ("DPO or another trainer on preferences", "loss_type"));
    let by_key = TRAINERS
        .iter()
        .find_map(|(name, keys)| keys.iter().find(|key| file.contains_key(**key)).map(|key| (*name, *key)));
    let Some((name, key)) = by_key.or_else(by_loss) else { return Ok(()) };
    let value = file.get(key).map_or_else(String::new, |value| match value {
        Value::Null => String::new(),
        value => format!(": {}", value.to_string().chars().take(40).collect::<String>()),
    });
    let problem = format!("{key}{value} is a key of {name}, which is not supervised fine-tuning and not modelled yet");
    Err(Fault { unsupported: true, ..Fault::new("", problem) }
        .or("only supervised fine-tuning is simulated: its policy alone is answered where the key is left out"))
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

    #[test]
    fn other_trainers_are_no_fine_tuning() {
        for (key, value, name) in [
            ("num_generations", json!(8), "GRPO"),
            ("kl_coef", json!(0.05), "PPO"),
            ("center_rewards_coefficient", Value::Null, "reward"),
            ("desirable_weight", json!(1.0), "KTO"),
            ("beta", json!(0.1), "DPO"),
            ("rloo_k", json!(2), "RLOO"),
            ("precompute_ref_log_probs", json!(false), "DPO"),
            ("loss_type", json!(["sigmoid"]), "DPO"),
        ] {
            let text = said(json!({"per_device_train_batch_size": 1, key: value}));
            assert!(text.contains(name) && text.contains("not supervised") && text.contains(key), "{key}: {text}");
        }
        // Without any argument of the Trainer too.
        assert!(said(json!({"beta": 0.1, "max_prompt_length": 512})).contains("not supervised"));
        assert!(
            read(&json!({"per_device_train_batch_size": 1, "loss_type": "chunked_nll"}), &Beside::default()).is_ok()
        );
    }
}
