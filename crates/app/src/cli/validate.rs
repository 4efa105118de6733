//! `vramcast validate`: every problem of a job file with its place.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::Answer;
use super::context::Context;
use crate::ask::job::{check, read};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::{Block, Level, Page};

/// What to validate.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A job file, or the name of a preset.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let text = read(&arguments.file)?;
    let shown = arguments.file.display();
    let (_, problems) = check(&text);
    let mut page = Page::new(format!("{shown}: {}", count(problems.len())));
    for problem in &problems {
        let place = problem.place.map_or_else(String::new, |place| format!(":{}:{}", place.line, place.column));
        let path = if problem.path.is_empty() { String::new() } else { format!("{}: ", problem.path) };
        page.add(Block::Text(format!("{shown}{place}: {path}{}", problem.message)));
    }
    if problems.is_empty() {
        page.add(Block::Verdict(Level::Good, "valid".into()));
    }
    let list: Vec<_> = problems
        .iter()
        .map(|problem| {
            json!({
                "path": problem.path, "message": problem.message,
                "line": problem.place.map(|place| place.line), "column": problem.place.map(|place| place.column),
            })
        })
        .collect();
    let document = json!({"schema": 1, "file": shown.to_string(), "valid": problems.is_empty(), "problems": list});
    let exit = if problems.is_empty() { Exit::Success } else { Exit::BadInput };
    context.answer(&page, document, exit)
}

fn count(problems: usize) -> String {
    match problems {
        0 => "no problems".into(),
        1 => "1 problem".into(),
        many => format!("{many} problems"),
    }
}
