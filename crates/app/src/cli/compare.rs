//! `vramcast compare`: every published formula beside the simulation, and beside what was measured.

use std::path::PathBuf;

use clap::Args;
use vramcast_core::lens::{Method, Question};

use super::context::Context;
use super::{Answer, train};
use crate::ask::compare::{Comparison, beside_a_run, beside_the_simulation};
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::gib;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// What to compare: a training run, or a recorded one.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Arguments {
    #[command(flatten)]
    run: train::Arguments,
    /// A ledger of measured runs; needs --row.
    #[arg(long, value_name = "FILE", requires = "row", help_heading = "A measured run")]
    ledger: Option<PathBuf>,
    /// The row of the ledger.
    #[arg(long, value_name = "ID", requires = "ledger", help_heading = "A measured run")]
    row: Option<String>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let compared = match (&arguments.ledger, &arguments.row) {
        (Some(file), Some(row)) => beside_a_run(file, row)?,
        _ => {
            let prepared = arguments.run.prepare(context)?;
            let (plan, notes) = prepared.train(true)?;
            let mut question = Question::of_train(&plan);
            arguments.run.lens.apply(&mut question, &context.settings)?;
            beside_the_simulation(&prepared.found, &plan, &question, notes)?
        }
    };
    context.answer(&page(&compared), compared.document(), Exit::Success)
}

fn page(compared: &Comparison) -> Page {
    let mut page = Page::new(&compared.title);
    let heading = format!("% of {}", compared.against);
    let mut table = Table::new(&["method", "GiB", &heading, "says"]);
    let mut bars = Vec::new();
    for line in &compared.lines {
        let says = Method::ALL.iter().find(|method| method.name() == line.name).map_or("", |method| method.about());
        match &line.bytes {
            Ok(bytes) => {
                let shown = compared.difference(*bytes).map_or_else(String::new, |percent| format!("{percent:+.1}"));
                table.row(vec![line.name.clone(), gib(*bytes), shown, shorten(says)]);
                bars.push((line.name.clone(), *bytes));
            }
            Err(why) => table.row(vec![line.name.clone(), String::new(), String::new(), shorten(why)]),
        }
    }
    page.add(Block::Table(table));
    page.add(Block::Picture(bars));
    compared.notes.iter().for_each(|note| page.add(Block::Note(note.clone())));
    page
}

/// Cut to what is left of the line.
fn shorten(text: &str) -> String {
    let room = crate::render::width().saturating_sub(44).max(20);
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room - 1).collect::<String>().trim_end().to_owned() + "…"
}
