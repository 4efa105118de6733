//! `vramcast plan`.

use std::path::PathBuf;

use clap::Args;
use serde_json::Value;

use super::Answer;
use super::context::Context;
use super::train;
use crate::ask::plan::{self, Wish};
use crate::disk;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render;

/// What is fixed; the rest is looked for.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Arguments {
    #[command(flatten)]
    train: train::Arguments,
    /// What must not change though it is not named: full (all of the model is trained), arithmetic (types and optimizer).
    #[arg(long, value_name = "WHAT", value_delimiter = ',', help_heading = "Planning")]
    keep: Vec<String>,
    /// What an hour of a card costs: a file of "CARD" = PRICE.
    #[arg(long, value_name = "FILE", help_heading = "Planning")]
    prices: Option<PathBuf>,
}

/// More than anybody's list of prices.
const LARGEST: u64 = 1 << 20;

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("plan")?;
    let prepared = arguments.train.prepare(context)?;
    let keep = plan::keep(&arguments.keep).map_err(|failure| failure.within("--keep"));
    let mut wish = Wish { keep: keep?, kept: arguments.train.kept("plan")?, ..Wish::default() };
    if let Some(path) = &arguments.prices {
        let file = format!("--prices {}", path.display());
        let bad = |what: String| Failure::bad_input(what).within(&file);
        let text = disk::text(path, LARGEST).map_err(|error| bad(error.to_string()))?;
        let value: Value = match serde_json::from_str(&text) {
            Ok(value) => value,
            Err(_) => toml::from_str(&text).map_err(|error| bad(error.message().to_owned()))?,
        };
        wish.prices = plan::prices(&value, &prepared).map_err(|failure| failure.within(&file))?;
    }
    let found = plan::find(&prepared, &wish)?;
    let exit = if found.plans.is_empty() { Exit::No } else { Exit::Success };
    if as_json {
        return Ok(Answer::document(plan::document(&found), exit));
    }
    Ok(Answer::text(render::plans::text(&found, &prepared.found.own_notes()), exit))
}
