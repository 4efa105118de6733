//! `--framework` and `--plan`: where a plan starts from before flags change it.

use std::path::PathBuf;

use clap::Args;
use vramcast_core::plan::{Gpus, Situation};

use super::{Failure, plan_file};
use crate::estimate::start::Start;

/// Where a plan starts from.
#[derive(Debug, Args)]
pub(super) struct StartArguments {
    /// A plan as JSON, TOML or YAML (`vramcast schema`), or a file of axolotl, LLaMA-Factory, TRL or transformers'
    /// Trainer, known by its keys; flags override it.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Start from a framework's defaults: hf-trainer, trl, unsloth, axolotl, llama-factory, litgpt or torchtune;
    /// see `vramcast list frameworks`.
    #[arg(long, value_name = "NAME")]
    framework: Option<String>,
}

impl StartArguments {
    /// The plan that flags are applied to; `asked` is what kind of run the flags ask for.
    pub(super) fn read(&self, asked: Situation, cards: impl Fn() -> Result<Gpus, Failure>) -> Result<Start, Failure> {
        let file = self.plan.as_deref().map(plan_file::read).transpose()?;
        Start::read(file, self.framework.as_deref(), asked, cards)
    }
}
