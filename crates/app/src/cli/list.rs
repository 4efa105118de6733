//! `vramcast list`.

use clap::{Args, ValueEnum};

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
    let title = arguments.what.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    if context.format == Format::Table {
        return Ok(Answer::success(table.fitted(crate::render::width())));
    }
    let mut page = Page::new(title);
    page.add(Block::Table(table));
    context.answer(&page, document, Exit::Success)
}
