//! Files of TRL's other trainers (trl 1.16: trainer/*_config.py and experimental/): which trainer it is, by keys that only its
//! config has, and what of its keys decides memory.

use serde_json::Value;

use super::Object;
use super::reader::{Reader, whole};
use super::table::{Row, Sense};
use crate::plan::{Fault, TaskKind};

/// Keys that only the config of a trainer has, its own first: where several have one, the most used comes first.
const MARKS: &[(TaskKind, &[&str])] = {
    use TaskKind::*;
    &[
        (Ppo, PPO),
        (Cpo, &["cpo_alpha", "simpo_gamma"]),
        (Gkd, &["lmbda", "seq_kd"]),
        (Distillation, &["teacher_model_name_or_path", "teacher_model_init_kwargs"]),
        (Kto, &["desirable_weight", "undesirable_weight"]),
        (Reward, &["center_rewards_coefficient"]),
        (OnlineDpo, &["reward_model_path", "missing_eos_penalty"]),
        (Rloo, &["normalize_advantages", "reward_clip_range"]),
        (
            Grpo,
            &[
                "num_generations",
                "steps_per_generation",
                "generation_batch_size",
                "num_iterations",
                "scale_rewards",
                "reward_weights",
                "reward_funcs",
                "importance_sampling_level",
                "epsilon",
                "epsilon_high",
                "use_vllm",
                "vllm_mode",
                "top_entropy_quantile",
                "mask_truncated_completions",
                "cast_lm_head_to_fp32",
            ],
        ),
        (
            Dpo,
            &[
                "precompute_ref_log_probs",
                "precompute_ref_batch_size",
                "ref_model",
                "ref_model_init_kwargs",
                "reference_free",
                "sync_ref_model",
                "rpo_alpha",
                "ld_alpha",
                "f_divergence_type",
                "use_weighting",
                "discopop_tau",
                "loss_weights",
                "force_use_ref_model",
                "ref_adapter_name",
            ],
        ),
        (Dpo, &["beta", "max_prompt_length", "max_completion_length"]),
    ]
};

const PPO: &[&str] = &[
    "num_ppo_epochs",
    "kl_coef",
    "kl_estimator",
    "cliprange",
    "cliprange_value",
    "vf_coef",
    "whiten_rewards",
    "num_mini_batches",
    "local_rollout_forward_batch_size",
];

/// Trainers that are not simulated, by keys that only their configs have.
const REFUSED: &[(&str, &[&str])] = &[
    ("the old RLOO trainer", &["rloo_k"]),
    ("a process reward model", &["train_on_last_step_only", "step_separator"]),
];

/// What configs of these trainers have besides `SFTConfig`'s.
pub(super) const TASK_KEYS: &[Row] = &[
    Row("max_prompt_length", Sense::Read("objective.max_prompt_length, where the task has one")),
    Row("mask_truncated_completions", Sense::Read("batch.padded")),
    Row(
        "task trainer max_completion_length max_new_tokens top_k temperature beta num_iterations steps_per_generation \
         generation_batch_size cpo_alpha precompute_ref_log_probs use_weighting reward_model_path \
         teacher_model_name_or_path lmbda response_length num_mini_batches local_rollout_forward_batch_size",
        Sense::Read("objective"),
    ),
    Row(
        "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_tensor_parallel_size",
        Sense::Read("objective.vllm"),
    ),
    Row(
        "reward_funcs reward_weights num_generations num_generations_eval log_* num_completions_to_print",
        Sense::Harmless("rewards by functions are computed on the host; --batch-size counts completions"),
    ),
    Row(
        "desirable_weight undesirable_weight simpo_gamma alpha label_smoothing scale_rewards \
         importance_sampling_level epsilon epsilon_high delta center_rewards_coefficient f_divergence_type \
         f_alpha_divergence_coef ld_alpha loss_weights discopop_tau normalize_advantages reward_clip_range \
         missing_eos_penalty multi_objective_aggregation reference_free rpo_alpha \
         use_bias_correction_kl sapo_* vespo_* entropy_* top_p min_p repetition_penalty",
        Sense::Harmless("numbers in a loss, or in sampling"),
    ),
    Row(
        "vllm_server_* vllm_group_port vllm_importance_* vllm_structured_* vllm_guided_* vllm_model_impl \
         vllm_max_model_length ds3_gather_for_generation precompute_ref_batch_size ref_model_mixup_alpha \
         ref_model_sync_steps generate_during_eval padding_value label_pad_token_id chat_template_kwargs* \
         teacher_model_revision is_encoder_decoder max_tool_calling_iterations",
        Sense::Harmless("it decides nothing on this card"),
    ),
    Row(
        "num_ppo_epochs kl_coef kl_estimator cliprange cliprange_value vf_coef whiten_rewards gamma lam total_episodes \
         num_sample_generations stop_token stop_token_id",
        Sense::Harmless("numbers in PPO's loss, or how long it runs"),
    ),
    Row("sft_model_path", Sense::Read("the model, PPO's policy")),
    Row("disable_dropout", Sense::Said("dropout is as the task's config has it by default")),
    Row("seq_kd", Sense::Said("what the teacher writes takes no more than what the student does")),
    Row("sync_ref_model", Sense::Said("the reference is taken to stay as it is")),
    Row("top_entropy_quantile off_policy_mask_threshold", Sense::Said("masks of tokens are not simulated")),
    Row(
        "cast_lm_head_to_fp32 use_transformers_continuous_batching use_transformers_paged cache_implementation",
        Sense::Refused("it is not modelled yet; leave it out"),
    ),
];

/// The task of a file; `None`: supervised fine-tuning.
pub(super) fn task(file: &Object, named: Option<&str>) -> Result<Option<TaskKind>, Fault> {
    let has = |keys: &[&'static str]| keys.iter().find(|key| file.contains_key(**key)).copied();
    if let Some((name, key)) = REFUSED.iter().find_map(|(name, keys)| Some((*name, has(keys)?))) {
        let problem = format!("{key} is a key of {name}, which is not modelled yet");
        return Err(Fault { unsupported: true, ..Fault::new("", problem) }
            .or("`vramcast list settings` shows the tasks that are, under --task"));
    }
    let written = || file.get("task").or_else(|| file.get("trainer")).and_then(Value::as_str);
    if let Some(kind) = named.or_else(written).and_then(TaskKind::called) {
        return Ok(Some(kind).filter(|kind| *kind != TaskKind::Sft));
    }
    let by_key = MARKS.iter().find(|(_, keys)| has(keys).is_some()).map(|(kind, _)| *kind);
    Ok(by_key.or_else(|| by_loss(file.get("loss_type")?)))
}

/// What SFTConfig may not have; DPOConfig takes several.
fn by_loss(loss: &Value) -> Option<TaskKind> {
    match loss.as_str() {
        Some("nll" | "dft" | "chunked_nll") => None,
        Some("kto" | "apo_zero_unpaired") => Some(TaskKind::Kto),
        Some("simpo" | "alphapo") => Some(TaskKind::Cpo),
        Some("grpo" | "bnpo" | "dr_grpo" | "dapo" | "cispo" | "sapo" | "luspo" | "vespo") => Some(TaskKind::Grpo),
        _ if loss.is_null() => None,
        _ => Some(TaskKind::Dpo),
    }
}

/// The keys of a task.
pub(super) fn read(reader: &mut Reader<'_>, kind: TaskKind) {
    reader.set("objective.kind", kind.name());
    // These trainers leave Liger's loss out.
    if reader.was_set("kernels").is_some() {
        reader.changes.retain(|(place, _)| place != "loss.kind");
    }
    let sure = |keys: &[&str]| keys.iter().any(|key| reader.has(key));
    if kind == TaskKind::Dpo
        && reader.beside.recipe.is_none()
        && !sure(MARKS[MARKS.len() - 2].1)
        && !sure(&["task", "trainer"])
    {
        reader.notes.push("taken for DPO, the most used of the trainers with these keys; --task says otherwise".into());
    }
    if let Some(length) = reader
        .number("max_prompt_length")
        .filter(|_| !matches!(kind, TaskKind::Orpo | TaskKind::Cpo | TaskKind::Reward))
    {
        reader.set("objective.max_prompt_length", length);
    }
    if kind == TaskKind::Gkd {
        real_to(reader, "lmbda", "objective.lmbda");
    }
    if kind == TaskKind::Ppo {
        reader.number_to("response_length", "objective.max_completion_length");
        reader.number_to("num_mini_batches", "objective.num_mini_batches");
        reader.number_to("local_rollout_forward_batch_size", "objective.mini_batch_size");
        // trl's own script loads both from there.
        if let Some(name) = reader.text("reward_model_path") {
            reader.set("objective.value_model.model", name);
        }
        let idle = |(place, _): &(String, Value)| {
            ["autocast", "clip"].contains(&place.as_str()) || place.starts_with("checkpoint")
        };
        if reader.changes.iter().any(idle) {
            reader.changes.retain(|change| !idle(change));
            reader.notes.push("PPOTrainer computes in the weights' type, recomputes and clips nothing".into());
        }
    } else if kind.rolls_out() || kind == TaskKind::Gkd {
        reader.number_to("max_completion_length", "objective.max_completion_length");
        reader.number_to("max_new_tokens", "objective.max_completion_length");
        // vLLM samples by itself.
        if !reader.is_on("use_vllm") {
            reader.number_to("top_k", "objective.top_k");
            real_to(reader, "temperature", "objective.temperature");
        }
    }
    if matches!(kind, TaskKind::Grpo | TaskKind::Rloo) {
        real_to(reader, "beta", "objective.beta");
        reader.number_to("num_iterations", "objective.num_iterations");
        reader.number_to("steps_per_generation", "objective.steps_per_generation");
        groups(reader);
        if reader.is_on("mask_truncated_completions") {
            // What no end-of-text ends is masked as if it were padding.
            reader.set("batch.padded", true);
        }
        if let Some(all) = reader.number("generation_batch_size") {
            let each = reader.get("per_device_train_batch_size").and_then(whole).unwrap_or(8);
            reader.set("batch.batch_size", each);
            reader.set("objective.steps_per_generation", (all / each.max(1)).max(1));
            reader.notes.push("generation_batch_size is taken as that of one card".into());
        }
    }
    if kind == TaskKind::Cpo {
        real_to(reader, "cpo_alpha", "objective.cpo_alpha");
    }
    for key in ["precompute_ref_log_probs", "use_weighting"] {
        if reader.is_on(key) {
            reader.set(&format!("objective.{key}"), true);
        }
    }
    let loss = match reader.get("loss_type") {
        Some(Value::Array(all)) => Some(all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("+")),
        Some(Value::String(one)) => Some(one.clone()),
        _ => None,
    };
    if let Some(loss) = loss.filter(|_| !matches!(kind, TaskKind::Orpo | TaskKind::Reward | TaskKind::Rloo)) {
        reader.set("objective.loss_type", loss);
    }
    for (key, place) in [
        ("reward_model_path", "objective.reward_model.model"),
        ("teacher_model_name_or_path", "objective.teacher.model"),
    ] {
        if let Some(name) = reader.text(key) {
            reader.set(place, name);
        }
    }
    if reader.is_on("padding_free") {
        match kind {
            // trainer/dpo_trainer.py: "temporarily unavailable after a refactor".
            TaskKind::Dpo => reader.say("padding_free", "trl 1.16's DPOTrainer falls back to padding"),
            _ => reader.refuse("padding_free", "true", "leave it out"),
        }
    }
    // Others read what surrounds the step before.
    let around = |(place, _): &(String, Value)| place.starts_with("job.evaluation");
    if reader.changes.iter().any(around) {
        reader.changes.retain(|change| !around(change));
        reader.say("eval_strategy", "evaluation of this task is not simulated");
    }
    colocated(reader);
}

/// What `__post_init__` of these configs refuses on any number of cards.
fn groups(reader: &mut Reader<'_>) {
    let [group, all, steps] =
        ["num_generations", "generation_batch_size", "steps_per_generation"].map(|key| reader.number(key));
    let each = all.and_then(|_| reader.get("per_device_train_batch_size").and_then(whole));
    let mut refuse = |problem: String, cure: String| reader.faults.add(Fault::new("", problem).or(cure));
    if let Some(group) = group.filter(|group| *group < 2) {
        let problem = format!("num_generations: {group} is no group: advantages compare at least two completions");
        refuse(problem, "use 2 or more".into());
    }
    let Some(all) = all else { return };
    if steps.is_some() {
        refuse("generation_batch_size and steps_per_generation both say it".into(), "leave one of them out".into());
    }
    for (key, value) in [("num_generations", group), ("per_device_train_batch_size", each)] {
        if let Some(value) = value.filter(|value| *value > 1 && !all.is_multiple_of(*value)) {
            let problem = format!("generation_batch_size: {all} is no multiple of {key}, {value}");
            refuse(problem, format!("use {}", all.next_multiple_of(value)));
        }
    }
}

/// A rollout engine: in a server of its own it takes nothing here.
fn colocated(reader: &mut Reader<'_>) {
    if !reader.is_on("use_vllm") {
        return;
    }
    let mode = reader.text("vllm_mode").unwrap_or("colocate");
    reader.set("objective.vllm.mode", mode);
    if mode == "colocate" {
        real_to(reader, "vllm_gpu_memory_utilization", "objective.vllm.gpu_memory_utilization");
        if reader.is_on("vllm_enable_sleep_mode") {
            reader.set("objective.vllm.enable_sleep_mode", true);
        }
        if let Some(cards) = reader.number("vllm_tensor_parallel_size").filter(|cards| *cards > 1) {
            let cure = "an engine over several cards is not modelled yet; use 1";
            reader.refuse("vllm_tensor_parallel_size", &cards.to_string(), cure);
        }
    }
}

fn real_to(reader: &mut Reader<'_>, key: &str, place: &str) {
    let written = reader.get(key).filter(|value| !value.is_null()).cloned();
    match (reader.real(key), written) {
        (Some(value), _) => reader.set(place, value),
        (None, Some(value)) => reader.faults.add(Fault::new("", format!("{key}: {value} is not a number"))),
        (None, None) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Beside, read};
    use serde_json::{Value, json};

    fn get(file: Value, place: &str) -> Option<Value> {
        let imported = read(&file, &Beside::default()).unwrap().unwrap();
        imported.changes.iter().rev().find(|(known, _)| known == place).map(|(_, value)| value.clone())
    }

    #[test]
    fn trainers_are_known_by_their_keys() {
        for (key, value, task) in [
            ("num_generations", json!(8), "grpo"),
            ("center_rewards_coefficient", json!(0.01), "reward"),
            ("desirable_weight", json!(1.0), "kto"),
            ("beta", json!(0.1), "dpo"),
            ("precompute_ref_log_probs", json!(false), "dpo"),
            ("loss_type", json!(["sigmoid"]), "dpo"),
            ("cpo_alpha", json!(0.0), "cpo"),
            ("task", json!("orpo"), "orpo"),
            ("seq_kd", json!(true), "gkd"),
            ("kl_coef", json!(0.05), "ppo"),
        ] {
            let file = json!({"per_device_train_batch_size": 1, key: value});
            assert_eq!(get(file, "objective.kind"), Some(json!(task)), "{key}");
        }
        let supervised = json!({"per_device_train_batch_size": 1, "loss_type": "chunked_nll"});
        assert_eq!(get(supervised, "objective.kind"), None);
    }

    #[test]
    fn what_is_not_simulated_is_refused_by_name() {
        for (key, name) in [("rloo_k", "RLOO"), ("step_separator", "process reward")] {
            let said = read(&json!({"per_device_train_batch_size": 1, key: 1}), &Beside::default()).unwrap_err()[0]
                .to_string();
            assert!(said.contains(name) && said.contains(key), "{said}");
        }
    }

    #[test]
    fn a_grpo_file_is_read() {
        let file = json!({
            "model_name_or_path": "Qwen/Qwen2.5-0.5B", "per_device_train_batch_size": 8, "max_prompt_length": 256,
            "max_completion_length": 128, "num_generations": 8, "beta": 0.04, "generation_batch_size": 32, "epsilon": 0.2,
            "mask_truncated_completions": true,
        });
        assert_eq!(get(file.clone(), "batch.padded"), Some(json!(true)));
        assert_eq!(get(file.clone(), "objective.steps_per_generation"), Some(json!(4)));
        assert_eq!(get(file.clone(), "objective.beta"), Some(json!(0.04)));
        assert_eq!(get(file.clone(), "objective.max_completion_length"), Some(json!(128)));
        assert!(!read(&file, &Beside::default()).unwrap().unwrap().notes.iter().any(|note| note.contains("epsilon")));
    }
}
