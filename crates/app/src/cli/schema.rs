//! `vramcast schema`.

use clap::{Args, ValueEnum};
use vramcast_core::plan::{InferPlan, TrainPlan};

use super::{Answer, Failure};

/// Of which plans.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Plans of `train` or of `infer`.
    #[arg(default_value = "train")]
    what: What,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    Train,
    Infer,
}

pub(super) fn run(arguments: &Arguments) -> Result<Answer, Failure> {
    let schema = match arguments.what {
        What::Train => schemars::schema_for!(TrainPlan),
        What::Infer => schemars::schema_for!(InferPlan),
    };
    let text = serde_json::to_string_pretty(&schema).map_err(|e| Failure::bad_input(e.to_string()))?;
    Ok(Answer::success(text + "\n"))
}
