//! `vramcast import`: what a real run recorded of its memory, beside the prediction.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;
use vramcast_core::ask::Wanted;
use vramcast_core::recording::{self, Reconciled, Recording};
use vramcast_core::report::Report;

use super::context::Context;
use super::{Answer, Failure, infer, train};
use crate::ask::real;
use crate::disk;
use crate::exit::Exit;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// No file of a run is larger than a person can want to read.
const MAX_BYTES: u64 = 1 << 30;

/// What was recorded, and what was run.
#[derive(Debug, Args)]
#[command(
    override_usage = "vramcast import [OPTIONS] <FILE> [train|infer] [MODEL] [PLAN OPTIONS]",
    after_help = "\
Examples:
  vramcast import snapshot.pickle
  vramcast import snapshot.pickle train llama3-8b --batch-size 4 --seq-len 4096
  vramcast import trace.json infer llama3-8b --prompt 4096"
)]
pub(super) struct Arguments {
    /// A memory snapshot of torch (torch.cuda.memory._dump_snapshot), or a chrome trace or memory timeline (JSON) of
    /// torch.profiler.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(subcommand)]
    what: Option<What>,
}

/// A plan beside what is read.
#[derive(Debug, Subcommand)]
pub(super) enum What {
    /// Beside the prediction of a training run, with the flags of `vramcast train`.
    Train(Box<train::Arguments>),
    /// Beside the prediction of generation, with the flags of `vramcast infer`.
    Infer(Box<infer::Arguments>),
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let recording = read(&arguments.file)?;
    let predicted = arguments.what.as_ref().map(|what| predict(what, context)).transpose()?;
    let lines = predicted.as_ref().map(|report| recording::reconcile(&recording, report));
    let mut page = Page::new(format!("{}: {}, {} events", arguments.file.display(), recording.kind, recording.events));
    describe(&mut page, &recording);
    if let (Some(report), Some(lines)) = (&predicted, &lines) {
        compare(&mut page, report, lines);
    }
    for note in &recording.notes {
        page.add(Block::Note(note.clone()));
    }
    let mut document = json!({"schema": 1, "recording": recording});
    if let (Some(report), Some(lines)) = (&predicted, &lines) {
        document["predicted"] = json!({"totals": report.totals, "peak_phase": report.peak_phase});
        document["reconciled"] = json!(lines);
    }
    context.answer(&page, document, Exit::Success)
}

pub(super) fn read(path: &Path) -> Result<Recording, Failure> {
    let shown = path.display();
    let bytes = disk::read(path, MAX_BYTES).map_err(|error| {
        let failure = Failure::bad_input(format!("{shown}: {error}"));
        match error.kind() {
            ErrorKind::FileTooLarge => failure.hint("record fewer steps: _record_memory_history(max_entries=…)"),
            _ => failure,
        }
    })?;
    real::recording(&bytes, &shown.to_string())
}

fn predict(what: &What, context: &Context) -> Result<Report, Failure> {
    let prepared = match what {
        What::Train(train) => train.prepare(context)?,
        What::Infer(infer) => infer.prepare(context)?,
    };
    Ok(prepared.answer(Wanted::default())?.report)
}

pub(super) fn describe(page: &mut Page, recording: &Recording) {
    let mut table = Table::new(&["recorded at the peak", "MiB"]);
    for part in &recording.parts {
        table.row(vec![part.purpose.map_or("not known", |purpose| purpose.name()).into(), mib(part.bytes)]);
    }
    table.row(vec!["allocated".into(), mib(recording.peak_allocated)]);
    if let Some(bytes) = recording.peak_reserved {
        table.row(vec!["reserved, at most".into(), mib(bytes)]);
    }
    let where_it_is = recording.peak_in.map(|place| format!(", in {place}")).unwrap_or_default();
    page.table(&format!("The peak{where_it_is}"), table);
    if !recording.sites.is_empty() {
        let mut table = Table::new(&["line of source", "MiB", "blocks"]);
        for site in &recording.sites {
            table.row(vec![site.source.clone(), mib(site.bytes), site.blocks.to_string()]);
        }
        page.table("Who made most of it", table);
    }
}

fn compare(page: &mut Page, report: &Report, lines: &[Reconciled]) {
    let mut table = Table::new(&["part", "recorded MiB", "predicted MiB", "difference MiB"]);
    for line in lines {
        let difference = line.recorded.map(|recorded| line.predicted as f64 - recorded as f64);
        table.row(vec![
            line.name.into(),
            line.recorded.map_or_else(|| "-".into(), mib),
            mib(line.predicted),
            difference.map_or_else(|| "-".into(), |bytes| format!("{:+.2}", bytes / f64::from(1 << 20))),
        ]);
    }
    page.table(&format!("Beside the prediction, whose peak is in {}", report.peak_phase), table);
}

fn mib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}
