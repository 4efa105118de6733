//! What a run trains for, in the words of trainers: TRL's commands, LLaMA-Factory's stages, axolotl's `rl`.

use serde_json::{Value, json};

use super::{Object, at};
use crate::plan::{Fault, TaskKind};

/// Keys of the configs of trl 1.16 (trainer/*_config.py) and where a plan has them; prompts are as long as the data there.
const TRL: [(&str, &str); 13] = [
    ("max_completion_length", "max_completion_length"),
    ("beta", "beta"),
    ("precompute_ref_log_probs", "precompute_ref_log_probs"),
    ("use_weighting", "use_weighting"),
    ("steps_per_generation", "steps_per_generation"),
    ("num_iterations", "num_iterations"),
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("vllm_mode", "vllm.mode"),
    ("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization"),
    ("vllm_enable_sleep_mode", "vllm.enable_sleep_mode"),
    ("teacher_model_name_or_path", "teacher.model"),
    ("loss_type", "loss_type"),
];

/// The task of a plan.
pub(super) fn of(plan: &Value) -> TaskKind {
    at(plan, "objective.kind").and_then(Value::as_str).and_then(TaskKind::called).unwrap_or_default()
}

fn loss(plan: &Value) -> Option<&str> {
    at(plan, "objective.loss_type").and_then(Value::as_str)
}

/// A tool's own words for a task: a command of TRL (trl/scripts), a `stage` with its `pref_loss` (llamafactory,
/// hparams/finetuning_args.py), an `rl` (axolotl, utils/schemas/enums.py).
fn words(tool: &str, kind: TaskKind, loss: Option<&str>) -> Option<(&'static str, Option<&'static str>)> {
    use TaskKind::*;
    Some(match (tool, kind, loss) {
        (_, Sft, _) => ("sft", None),
        ("trl", Dpo, _) => ("dpo", None),
        ("trl", Kto, _) => ("kto", None),
        ("trl", Grpo, _) => ("grpo", None),
        ("trl", Rloo, _) => ("rloo", None),
        ("trl", Reward, _) => ("reward", None),
        ("trl", Distillation, _) => ("distillation", None),
        ("llama-factory" | "axolotl", Kto, None | Some("kto")) => ("kto", None),
        ("llama-factory", Dpo, None | Some("sigmoid")) => ("dpo", Some("sigmoid")),
        ("llama-factory", Dpo, Some("hinge")) => ("dpo", Some("hinge")),
        ("llama-factory", Dpo, Some("ipo")) => ("dpo", Some("ipo")),
        ("llama-factory", Orpo, _) => ("dpo", Some("orpo")),
        ("llama-factory", Cpo, Some("simpo")) => ("dpo", Some("simpo")),
        ("llama-factory", Reward, _) => ("rm", None),
        ("axolotl", Dpo, None | Some("sigmoid")) => ("dpo", None),
        ("axolotl", Dpo, Some("ipo")) => ("ipo", None),
        ("axolotl", Orpo, _) => ("orpo", None),
        ("axolotl", Cpo, Some("simpo")) => ("simpo", None),
        ("axolotl", Reward, _) => ("reward", None),
        _ => return None,
    })
}

/// Whether a tool trains what a plan does, and by which word; refused where it does not.
pub(super) fn word(tool: &str, plan: &Value) -> Result<&'static str, Fault> {
    let kind = of(plan);
    if let Some((word, _)) = words(tool, kind, loss(plan)) {
        return Ok(word);
    }
    let which = loss(plan).map(|loss| format!(" with loss_type {loss}")).unwrap_or_default();
    let problem = format!("{tool} has no command here that trains {}{which}", kind.name());
    let others = ["trl", "llama-factory", "axolotl"].into_iter().filter(|tool| words(tool, kind, loss(plan)).is_some());
    let cure = match others.collect::<Vec<_>>().join(" or ") {
        none if none.is_empty() => "no tool that plans are written for has one".to_owned(),
        others => format!("write for {others}"),
    };
    Err(Fault::new("objective.kind", problem).or(cure))
}

/// The keys of a task.
pub(super) fn keys(tool: &str, plan: &Value, file: &mut Object) {
    let (kind, loss) = (of(plan), loss(plan));
    let Some((word, preference)) = words(tool, kind, loss).filter(|_| kind != TaskKind::Sft) else { return };
    match tool {
        "trl" => {
            for (key, place) in TRL {
                if let Some(value) = at(plan, &format!("objective.{place}")).filter(|value| **value != false) {
                    file.insert(key.into(), value.clone());
                }
            }
            // DPOConfig takes several.
            if let Some(loss) = loss.filter(|_| kind == TaskKind::Dpo) {
                file.insert("loss_type".into(), json!(loss.split('+').collect::<Vec<_>>()));
            }
            if at(plan, "objective.vllm").is_some() {
                file.insert("use_vllm".into(), json!(true));
            }
            if kind.rolls_out() {
                file.shift_remove("max_length");
            }
        }
        "llama-factory" => {
            file.insert("stage".into(), json!(word));
            if let Some(loss) = preference {
                file.insert("pref_loss".into(), json!(loss));
            }
        }
        _ if word == "reward" => drop(file.insert("reward_model".into(), json!(true))),
        _ => drop(file.insert("rl".into(), json!(word))),
    }
}
