//! `vramcast schema`.

use super::{Answer, Failure};
use vramcast_core::plan::TrainPlan;

pub(super) fn run() -> Result<Answer, Failure> {
    let schema = schemars::schema_for!(TrainPlan);
    let text = serde_json::to_string_pretty(&schema).map_err(|e| Failure::bad_input(e.to_string()))?;
    Ok(Answer::success(text + "\n"))
}
