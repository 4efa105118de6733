//! `vramcast inspect`.

use std::path::{Path, PathBuf};

use clap::Args;
use vramcast_core::dtype::{Format, formats_from_toml};

use super::Answer;
use super::model::{AssumeArguments, ModelArguments};
use crate::ask::files;
use crate::ask::found::{Reach, Subject};
use crate::ask::inspect::{Wanted, inspect};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render;

/// What to show of a model.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    assume: AssumeArguments,
    /// List every tensor.
    #[arg(long)]
    tensors: bool,
    /// Count bytes in this format (bf16, fp8, nf4, q4_k, …) instead of a choice of them.
    #[arg(long, value_name = "FORMAT")]
    dtype: Option<String>,
    /// A TOML file with storage formats of your own, in the shape of vramcast's data/dtypes.toml.
    #[arg(long, value_name = "FILE")]
    format_file: Option<PathBuf>,
    /// Print the config the answer was made from, and nothing else.
    #[arg(long)]
    config: bool,
}

pub(super) fn run(arguments: &Arguments, as_json: bool) -> Result<Answer, Failure> {
    let subject = Subject { assume: arguments.assume.assume, ..arguments.model.subject() };
    let found = subject.find(Reach::Machine, !arguments.config)?;
    if arguments.config {
        let config = found.resolved.config.as_ref().ok_or_else(|| Failure::bad_input("there is no config"))?;
        return Ok(Answer::document(config.clone(), Exit::Success));
    }
    let wanted = Wanted {
        tensors: arguments.tensors,
        dtype: arguments.dtype.as_deref(),
        formats: arguments.format_file.as_deref().map_or(Ok(Vec::new()), own_formats)?,
    };
    let inspection = inspect(&found, &wanted)?;
    if as_json {
        let document = serde_json::to_value(&inspection).map_err(|e| Failure::bad_input(e.to_string()))?;
        return Ok(Answer::document(document, Exit::Success));
    }
    Ok(Answer::success(render::inspect::text(&inspection)))
}

fn own_formats(path: &Path) -> Result<Vec<Format>, Failure> {
    formats_from_toml(&files::text(path)?)
        .map_err(|e| Failure::bad_input(format!("--format-file {}: {e}", path.display())))
}
