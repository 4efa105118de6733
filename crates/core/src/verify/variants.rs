//! What the fields of a recorded run that name further options of training mean as a plan.

use serde_json::Value;

use crate::plan::TrainPlan;

/// Writes them into a plan; what cannot be simulated is named.
pub(super) fn apply(plan: &mut TrainPlan, run: &Value) -> Result<(), String> {
    for key in ["selective", "save_on_cpu", "loss", "sdpa_kernel"] {
        if !run[key].is_null() {
            return Err(format!("run.{key} is not simulated yet"));
        }
    }
    if let Some(every) = run["every"].as_u64() {
        plan.checkpoints.every = u32::try_from(every).unwrap_or(u32::MAX);
    }
    if let Some(rank) = run["rank"].as_u64() {
        plan.optimizer.rank = rank;
    }
    plan.optimizer_in_backward = run["opt_in_backward"] == true;
    plan.batch.padded = run["padded"] == true;
    plan.batch.mask |= plan.batch.padded;
    plan.clip |= run["clip"].is_string();
    let names = run["frozen"].as_array().into_iter().flatten();
    plan.frozen.extend(names.filter_map(Value::as_str).map(str::to_owned));
    match run["attn"].as_str() {
        None | Some("sdpa" | "eager") => Ok(()),
        Some(other) => Err(format!("run.attn {other} is not simulated yet")),
    }
}
