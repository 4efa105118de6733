//! Files of other tools: training and its engines, as changes to a plan.
//!
//! | module | whose keys |
//! |---|---|
//! | `trainer` | `TrainingArguments`, TRL's `SFTConfig` and `ModelConfig` |
//! | `job` | of those: evaluation, packing, what else surrounds a step |
//! | `trl` | what configs of TRL's other trainers have besides |
//! | `axolotl`, `llama_factory`, `torchtune`, `torchtitan`, `litgpt` | theirs |
//! | `accelerate`, `deepspeed` | who spreads a run |
//! | `megatron`, `bridge`, `megatron_swift` | Megatron-LM's, Megatron-Bridge's, and ms-swift's around it |
//! | `automodel`, `roles` | NeMo Automodel's; verl's and OpenRLHF's fine-tuning |
//! | `verl`, `openrlhf` | the roles of their reinforcement learning |
//! | `sharding` | FSDP and DeepSpeed inside the others' files |
//! | `kinds` | which kind a file is, and those that are refused |
//! | `table`, `reader` | what a key means, and reading by that |
//!
//! Every key is honoured, harmless by name, said not to be simulated, or refused by name.

mod accelerate;
mod automodel;
mod axolotl;
mod bridge;
mod deepspeed;
mod job;
pub(crate) mod kinds;
mod litgpt;
mod llama_factory;
mod llama_factory_v1;
mod megatron;
mod megatron_swift;
mod ms_swift;
mod openrlhf;
mod preference;
mod reader;
mod roles;
mod sharding;
mod shipped;
mod table;
mod torchtitan;
mod torchtune;
mod trainer;
mod trl;
mod verl;

use serde_json::{Map, Value};

use super::Fault;
use super::placement::Placement;
pub(crate) use openrlhf::placement as openrlhf_roles;
pub(crate) use reader::{both, unread};
pub(crate) use table::distance;
pub use table::{Format, Row, Sense};
pub(crate) use torchtitan::flavor as torchtitan_flavor;
pub(crate) use torchtune::builder as torchtune_builder;
pub(crate) use trainer::trainer_optimizer;

/// A file of another tool, as changes to a plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Imported {
    /// Whose file it is.
    pub format: &'static str,
    /// Whose defaults hold where the file is silent: a name of [`super::Framework`].
    pub framework: Option<&'static str>,
    /// The model it names.
    pub model: Option<String>,
    /// The model's `config.json`, where the file tells its sizes and no name.
    pub config: Option<Value>,
    /// Whether it generates or serves instead of training.
    pub generates: bool,
    /// Places in the plan and their values, the later ones above.
    pub changes: Vec<(String, Value)>,
    /// DeepSpeed's configuration that it holds or names.
    pub deepspeed: Option<Value>,
    /// What was read in another sense.
    pub notes: Vec<String>,
    /// What it asks for and is not simulated, by key, with what is in its place.
    pub unsimulated: Vec<String>,
    /// Roles on shared cards, in a plan's place.
    pub placement: Option<Placement>,
}

/// What is known around a file.
#[derive(Clone, Copy)]
pub struct Beside<'a> {
    /// Its name, or nothing.
    pub name: &'a str,
    /// Opens what the file refers to, by the name that stands in it.
    pub open: &'a dyn Fn(&str) -> Result<Value, String>,
    /// Keys that shall be left out.
    pub without: &'a [String],
    /// The program that the file is for, where a line says it.
    pub tool: Option<&'static str>,
    /// The recipe of torchtune or the trainer of TRL that it is for, where a line says it.
    pub recipe: Option<&'a str>,
    /// Whether they are a script's arguments: it may have some of its own.
    pub script: bool,
    /// Whether what is started trains an adapter.
    pub adapter: bool,
    /// Cards of all nodes, where a launcher says them.
    pub cards: Option<u64>,
}

impl Default for Beside<'_> {
    fn default() -> Self {
        let open: &dyn Fn(&str) -> Result<Value, String> =
            &|_| Err("files are not followed from here: write what is in it in its place".into());
        Self { name: "", open, without: &[], tool: None, recipe: None, script: false, adapter: false, cards: None }
    }
}

/// A reader, the format, and whether a file is of it.
type Known = (fn(&Value, &Beside<'_>) -> Result<Imported, Vec<Fault>>, &'static Format, fn(&Object) -> bool);

/// Formats by marks of their own, the surest first.
const FORMATS: &[Known] = &[
    (torchtune::read, &torchtune::FORMAT, |file| file.values().any(|part| part.get("_component_").is_some())),
    (deepspeed::read, &deepspeed::FORMAT, |file| {
        let enabled = |key: &str| file.get(key).is_some_and(|part| part.get("enabled").is_some());
        ["zero_optimization", "train_micro_batch_size_per_gpu"].iter().any(|key| file.contains_key(*key))
            || enabled("fp16")
            || enabled("bf16")
    }),
    (accelerate::read, &accelerate::FORMAT, |file| {
        file.contains_key("distributed_type")
            || file.contains_key("compute_environment")
            || file.contains_key("num_processes") && file.contains_key("mixed_precision")
            || file.keys().any(|key| key.ends_with("_config")) && file.contains_key("mixed_precision")
            || file.len() == 1 && file.contains_key("fsdp_config")
    }),
    (bridge::read, &bridge::FORMAT, bridge::is_marked),
    (automodel::read, &automodel::FORMAT, automodel::is_marked),
    (roles::verl, &roles::VERL, |file| {
        let model = |key: &str| file.get("model").is_some_and(|part| part.get(key).is_some());
        file.contains_key("actor_rollout_ref") || model("partial_pretrain")
    }),
    (roles::openrlhf, &roles::OPENRLHF, |_| false),
    (torchtitan::read, &torchtitan::FORMAT, torchtitan::is_marked),
    (litgpt::read, &litgpt::FORMAT, |file| {
        let train = |key: &str| file.get("train").is_some_and(|part| part.get(key).is_some());
        train("global_batch_size") || train("micro_batch_size")
    }),
    (llama_factory_v1::read, &llama_factory_v1::FORMAT, |file| {
        file.contains_key("model_class") || file.contains_key("peft_config") && file.contains_key("model")
    }),
    (llama_factory::read, &llama_factory::FORMAT, |file| {
        let has = |key: &str| file.contains_key(key);
        has("finetuning_type")
            || has("stage") && (has("cutoff_len") || has("template"))
            || has("model_name_or_path") && has("template")
    }),
    (axolotl::read, &axolotl::FORMAT, |file| {
        let keys = ["datasets", "sequence_len", "micro_batch_size", "adapter", "pretraining_dataset"];
        file.contains_key("base_model") && keys.into_iter().any(|key| file.contains_key(key))
    }),
    (megatron_swift::read, &megatron_swift::FORMAT, |_| false),
    (ms_swift::read, &ms_swift::FORMAT, |file| {
        ["train_type", "tuner_type", "rlhf_type"].iter().any(|key| file.contains_key(*key))
    }),
    (megatron::read, &megatron::FORMAT, |file| {
        file.contains_key("tensor_model_parallel_size")
            || file.contains_key("hidden_size") && file.contains_key("micro_batch_size")
    }),
    (trainer::read, &trainer::TRL, |_| false),
    (trainer::read, &trainer::TRAINER, |file| {
        let arguments = [
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_grad_norm",
            "optim",
            "model_name_or_path",
            "num_train_epochs",
        ];
        arguments.into_iter().any(|key| file.contains_key(key))
    }),
];

/// Every format that is read.
pub fn formats() -> impl Iterator<Item = &'static Format> {
    FORMATS.iter().map(|(_, format, _)| *format)
}

/// Reads a file of another tool; `None`: the keys are no such tool's.
pub fn read(value: &Value, beside: &Beside<'_>) -> Result<Option<Imported>, Vec<Fault>> {
    let Some(object) = value.as_object() else { return Ok(None) };
    kinds::refuse(object).map_err(|fault| vec![fault])?;
    let Some((read, ..)) = FORMATS.iter().find(|(_, _, marks)| marks(object)) else {
        let task = trl::task(object, None).map_err(|fault| vec![fault])?;
        return task.map(|_| trainer::read(value, beside)).transpose();
    };
    read(value, beside).map(Some)
}

/// Reads a file or arguments of a format that is known by its name.
pub fn read_as(title: &str, value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    match FORMATS.iter().find(|(_, format, _)| format.title == title) {
        Some((read, ..)) => read(value, beside),
        None => Err(vec![Fault::unsupported("", format!("{title}'s configuration"))]),
    }
}

/// Arguments that only scripts of training have.
const TRAINING: [&str; 26] = [
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "num_train_epochs",
    "learning_rate",
    "max_grad_norm",
    "optim",
    "deepspeed",
    "fsdp",
    "use_peft",
    "do_train",
    "lora_r",
    "lora_target_modules",
    "use_liger_kernel",
    "warmup_ratio",
    "warmup_steps",
    "num_generations",
    "max_completion_length",
    "max_steps",
    "logging_steps",
    "save_steps",
    "save_strategy",
    "weight_decay",
    "lr_scheduler_type",
    "per_device_eval_batch_size",
];

/// Whether some arguments are those of a Trainer.
pub fn trains(value: &Value) -> bool {
    TRAINING.iter().any(|key| value.get(key).is_some())
}

type Object = Map<String, Value>;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn changes(value: Value) -> (Imported, impl Fn(&str) -> Option<Value>) {
        let imported = read(&value, &Beside::default()).unwrap().unwrap();
        let changes = imported.changes.clone();
        (imported, move |key: &str| changes.iter().rev().find(|(known, _)| known == key).map(|(_, v)| v.clone()))
    }

    fn refused(value: Value) -> String {
        let faults = read(&value, &Beside::default()).unwrap_err();
        faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn an_axolotl_file_is_read() {
        let (imported, get) = changes(json!({
            "base_model": "meta-llama/Llama-3.2-1B", "load_in_4bit": true, "adapter": "qlora", "lora_r": 32,
            "lora_target_linear": true, "sequence_len": 4096, "sample_packing": true, "micro_batch_size": 2,
            "gradient_accumulation_steps": 4, "optimizer": "paged_adamw_32bit", "gradient_checkpointing": true,
            "attn_implementation": "flash_attention_2", "learning_rate": 0.0002, "datasets": [],
        }));
        assert_eq!(imported.framework, Some("axolotl"));
        assert_eq!(imported.model.as_deref(), Some("meta-llama/Llama-3.2-1B"));
        assert_eq!(get("batch.seq_len"), Some(json!(4096)));
        assert_eq!(get("adapter.rank"), Some(json!(32)));
        assert_eq!(get("adapter.targets"), Some(json!("all-linear")));
        assert_eq!(get("optimizer.kind"), Some(json!("paged-adamw32")));
        assert_eq!(get("checkpointing"), Some(json!("full")));
        assert!(imported.unsimulated.is_empty());
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest_name() {
        let text =
            refused(json!({"base_model": "a/b", "datasets": [], "sequence_lem": 3, "context_parapllel_size": 2}));
        assert!(
            text.contains("sequence_lem is no key of axolotl 0.19") && text.contains("(sequence_len is one)"),
            "{text}"
        );
        assert!(text.contains("context_parapllel_size"), "{text}");
        let without = ["sequence_lem".to_owned()];
        let beside = Beside { without: &without, ..Beside::default() };
        let read = read(&json!({"base_model": "a/b", "datasets": [], "sequence_lem": 3}), &beside).unwrap().unwrap();
        assert_eq!(read.unsimulated, ["sequence_lem: left out as asked"]);
    }

    #[test]
    fn engines_inside_files_are_followed() {
        let open = |name: &str| match name {
            "zero3.json" => {
                Ok(json!({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}))
            }
            _ => Err("there is no such file".to_owned()),
        };
        let beside = Beside { open: &open, ..Beside::default() };
        let file = json!({"base_model": "a/b", "datasets": [], "bf16": true, "deepspeed": "zero3.json"});
        let imported = read(&file, &beside).unwrap().unwrap();
        let document = imported.deepspeed.unwrap();
        assert_eq!((&document["bf16"]["enabled"], &document["fp16"]["enabled"]), (&json!(true), &json!(false)));
        let file = json!({"base_model": "a/b", "datasets": [], "deepspeed": "other.json"});
        assert!(read(&file, &beside).unwrap_err()[0].to_string().contains("other.json: there is no such file"));
        let (_, get) = changes(json!({"base_model": "a/b", "datasets": [], "fsdp": ["full_shard", "auto_wrap"],
            "fsdp_config": {"fsdp_offload_params": true, "fsdp_use_orig_params": false, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}}));
        assert_eq!(get("parallel.engine.fsdp1.offload"), Some(json!(true)));
        assert_eq!(get("parallel.engine.fsdp1.strategy"), Some(json!("grad-op")));
        assert_eq!(get("weights"), Some(json!("fp32")));
    }

    #[test]
    fn a_llama_factory_file_is_read() {
        let (imported, get) = changes(json!({
            "model_name_or_path": "Qwen/Qwen2.5-7B", "stage": "sft", "finetuning_type": "lora", "lora_rank": 16,
            "lora_target": "q_proj,v_proj", "cutoff_len": 1024, "per_device_train_batch_size": 1, "bf16": true,
            "quantization_bit": 4, "template": "qwen",
        }));
        assert_eq!(imported.framework, Some("llama-factory"));
        assert_eq!(get("autocast"), Some(json!("bf16")));
        assert_eq!(get("adapter.targets"), Some(json!(["q_proj", "v_proj"])));
        assert_eq!(get("quantization.scheme"), Some(json!("nf4")));
        assert_eq!(get("batch.seq_len"), Some(json!(1024)));
        let (_, get) =
            changes(json!({"model_name_or_path": "a/b", "template": "qwen", "infer_backend": "huggingface"}));
        assert_eq!((get("new_tokens"), get("choice")), (Some(json!(1024)), Some(json!("sample"))));
    }

    #[test]
    fn training_arguments_are_read_and_trl_is_told_apart() {
        let plain = json!({"per_device_train_batch_size": 4, "fp16": true, "optim": "adafactor", "max_grad_norm": 0});
        let (imported, get) = changes(plain);
        assert_eq!(imported.framework, Some("hf-trainer"));
        assert_eq!((get("autocast"), get("clip")), (Some(json!("fp16")), Some(json!(false))));
        assert_eq!(get("optimizer.kind"), Some(json!("adafactor")));
        let (imported, get) = changes(json!({
            "per_device_train_batch_size": 4, "max_length": 512, "use_peft": true, "lora_r": 64, "load_in_4bit": true,
        }));
        assert_eq!(imported.framework, Some("trl"));
        assert_eq!((get("adapter.rank"), get("batch.seq_len")), (Some(json!(64)), Some(json!(512))));
    }

    #[test]
    fn who_spreads_a_run_is_read() {
        let (_, get) = changes(json!({"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2,
            "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": false}}));
        assert_eq!((get("parallel.gpus"), get("parallel.nodes")), (Some(json!(8)), Some(json!(2))));
        assert_eq!(get("parallel.engine.fsdp2.reshard_after_forward"), Some(json!(false)));
        let (imported, _) = changes(json!({"distributed_type": "DEEPSPEED", "num_processes": 4,
            "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}}));
        assert_eq!(imported.deepspeed.unwrap()["zero_optimization"]["offload_param"], json!({"device": "cpu"}));
    }

    #[test]
    fn trainers_with_code_of_their_own_are_read() {
        let torchtune = json!({"model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_rank": 16,
            "apply_lora_to_mlp": true, "lora_attn_modules": ["q_proj", "output_proj"]}, "batch_size": 4,
            "optimizer": {"_component_": "torch.optim.AdamW", "fused": true, "lr": 1e-4}});
        let (imported, get) = changes(torchtune);
        assert_eq!(
            (imported.model.as_deref(), imported.framework),
            (Some("meta-llama/Llama-3.1-8B"), Some("torchtune"))
        );
        assert_eq!(get("adapter.targets"), Some(json!(["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])));
        let litgpt = json!({"checkpoint_dir": "checkpoints/google/gemma-2b", "precision": "bf16-true", "quantize": "bnb.nf4",
            "lora_r": 8, "train": {"global_batch_size": 16, "micro_batch_size": 2, "max_seq_length": 512}});
        let (imported, get) = changes(litgpt);
        assert_eq!(imported.model.as_deref(), Some("google/gemma-2b"));
        assert_eq!(
            (get("gradient_accumulation"), get("adapter.targets")),
            (Some(json!(8)), Some(json!(["query", "value"])))
        );
    }

    #[test]
    fn evaluation_is_read_where_it_happens() {
        let axolotl = |over: Value| {
            let mut file = json!({"base_model": "a/b", "datasets": [], "micro_batch_size": 2});
            over.as_object().unwrap().iter().for_each(|(key, value)| file[key] = value.clone());
            file
        };
        let factory = json!({"model_name_or_path": "a/b", "stage": "sft", "template": "x", "eval_strategy": "steps",
            "per_device_eval_batch_size": 3, "compute_accuracy": true});
        for (file, rows) in [
            (axolotl(json!({})), None),
            (axolotl(json!({"val_set_size": 0.05})), Some(2)),
            (axolotl(json!({"val_set_size": 0.05, "eval_batch_size": 4})), Some(4)),
            (axolotl(json!({"val_set_size": 0.05, "eval_strategy": "no"})), None),
            (axolotl(json!({"test_datasets": [{"path": "x"}]})), Some(2)),
            (factory, Some(3)),
        ] {
            let (_, get) = changes(file.clone());
            assert_eq!(get("job.evaluation.batch_size"), rows.map(|rows: u64| json!(rows)), "{file}");
        }
        let (read, get) = changes(axolotl(json!({"load_in_4bit": true})));
        assert_eq!(get("quantization.scheme"), None);
        assert!(read.unsimulated.iter().any(|said| said.starts_with("load_in_4bit: ")), "{:?}", read.unsimulated);
    }

    #[test]
    fn what_is_not_simulated_is_refused_by_name() {
        assert!(refused(json!({"base_model": "a/b", "datasets": [], "rl": "grpo"})).contains("rl: grpo"));
        assert!(
            refused(json!({"optim": "adamw_torch", "label_smoothing_factor": 0.1})).contains("label_smoothing_factor")
        );
        assert!(refused(json!({"stage": "ppo", "template": "x"})).contains("stage: ppo"));
        assert_eq!(read(&json!({"batch": {"batch_size": 1}}), &Beside::default()).unwrap(), None);
    }
}
