//! Preference and reward training in the words of tools that run TRL's trainers, or their own after them: axolotl's `rl`,
//! LLaMA-Factory's `stage` with its `pref_loss`, ms-swift's `rlhf_type`.

use serde_json::Value;

use super::reader::Reader;
use crate::plan::TaskKind;

/// Numbers in their losses.
pub(super) const NUMBERS: &str = "rl_beta beta pref_beta orpo_alpha kto_desirable_weight kto_undesirable_weight kto_chosen_weight \
     kto_rejected_weight desirable_weight undesirable_weight dpo_label_smoothing label_smoothing simpo_gamma ld_alpha \
     center_rewards_coefficient";

/// TRL's trainer of a tool's word, and which of its losses.
fn task(word: &str, loss: Option<&str>) -> Option<(TaskKind, Option<&'static str>)> {
    Some(match (word, loss) {
        ("kto", _) => (TaskKind::Kto, None),
        ("orpo", _) | ("dpo", Some("orpo")) => (TaskKind::Orpo, None),
        ("simpo", _) | ("dpo", Some("simpo")) => (TaskKind::Cpo, Some("simpo")),
        ("cpo", _) => (TaskKind::Cpo, None),
        ("ipo", _) | ("dpo", Some("ipo")) => (TaskKind::Dpo, Some("ipo")),
        ("dpo", Some("hinge")) => (TaskKind::Dpo, Some("hinge")),
        ("dpo", None | Some("sigmoid")) => (TaskKind::Dpo, None),
        ("rm" | "reward", _) => (TaskKind::Reward, None),
        _ => return None,
    })
}

/// Reads what `key` asks for as TRL's trainer of it, once all else of the file is read.
pub(super) fn read(reader: &mut Reader<'_>, key: &str, word: &str, loss: Option<&str>) {
    let Some((kind, loss)) = task(word, loss) else {
        let shown = loss.map_or_else(|| word.to_owned(), |loss| format!("{word} with {loss}"));
        let cure = "another task: of these tools' dpo, ipo, kto, orpo, simpo and reward training are simulated; \
                    `vramcast train MODEL --task grpo` simulates TRL's GRPO";
        return reader.refuse(key, &shown, cure);
    };
    // Pairs are padded, and evaluated otherwise; these trainers bring their own loss.
    let evaluated = |place: &str| place.starts_with("job.evaluation");
    if reader.changes.iter().any(|(place, _)| evaluated(place)) {
        reader.say("evaluation", "that of this task is not simulated");
    }
    reader.changes.retain(|(place, _)| !evaluated(place) && place != "batch.mask" && !place.starts_with("loss."));
    reader.set("objective.kind", kind.name());
    // axolotl runs TRL's own; the others' make whole logits (train/dpo/trainer.py, trainers/rlhf_trainer), as TRL's of KTO
    // cannot here.
    let whole = reader.title() != "axolotl" && kind != TaskKind::Kto;
    reader.set("loss.kind", if whole { "standard" } else { "trl-fused" });
    if let Some(loss) = loss {
        reader.set("objective.loss_type", loss);
    }
    if reader.is_on("precompute_ref_log_probs") {
        reader.set("objective.precompute_ref_log_probs", true);
    }
    if let (TaskKind::Cpo, Some(alpha)) = (kind, reader.real("cpo_alpha")) {
        reader.set("objective.cpo_alpha", alpha);
    }
    let whose = reader.title();
    reader.say(key, &format!("{whose}'s own trainer of {word} is taken for TRL's {}", kind.name()));
}

/// Whether a switch is on that asks for rewards (`reward_model: true`).
pub(super) fn rewards(value: &Value) -> bool {
    *value == true || value == "true"
}
