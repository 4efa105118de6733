//! `vramcast list`.

use clap::Args;

use super::Answer;
use super::context::{Context, Format};
use crate::ask::lists::{What, document, rows};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// What to list.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// models, families, dtypes, gpus, optimizers, frameworks, engines, methods, presets or settings.
    #[arg(value_name = "WHAT", value_parser = what)]
    what: What,
    /// Only lines that contain this.
    #[arg(value_name = "TEXT")]
    filter: Option<String>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let (headers, rows) = rows(arguments.what, arguments.filter.as_deref(), &context.settings);
    let document = document(&headers, &rows);
    let mut table = Table::new(&headers);
    rows.into_iter().for_each(|row| table.row(row));
    let title = What::ALL.iter().find(|(_, what)| *what == arguments.what).map_or("", |(name, _)| name);
    if context.format == Format::Table {
        return Ok(Answer::success(table.fitted(crate::render::width())));
    }
    let mut page = Page::new(title);
    page.add(Block::Table(table));
    context.answer(&page, document, Exit::Success)
}

fn what(text: &str) -> Result<What, String> {
    let known = What::ALL.iter().find(|(name, _)| *name == text || name.strip_suffix('s') == Some(text));
    known
        .map(|(_, what)| *what)
        .ok_or_else(|| format!("one of {}", What::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")))
}
