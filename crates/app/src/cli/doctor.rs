//! `vramcast doctor`: what broke a run, from its log, its message or its memory snapshot.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vramcast_core::ask::Wanted;
use vramcast_core::doctor::{self, Cause, Finding};
use vramcast_core::planner::smallest::Suggestion;

use super::context::Context;
use super::import::{self, What};
use super::{Answer, Failure};
use crate::ask::question::Prepared;
use crate::ask::real;
use crate::disk;
use crate::exit::Exit;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// No log is longer than a person can want to read.
const MAX_BYTES: u64 = 256 << 20;

/// What a run left behind, and what was run.
#[derive(Debug, Args)]
#[command(
    override_usage = "vramcast doctor [OPTIONS] <LOG|SNAPSHOT|-> [train|infer] [MODEL] [PLAN OPTIONS]",
    after_help = "\
Examples:
  vramcast doctor train.log
  vramcast doctor - < traceback.txt
  vramcast doctor snapshot.pickle
  vramcast doctor train.log train llama3-8b --batch-size 4 --gpu a100-40gb
  vramcast doctor train.log train --plan axolotl.yml"
)]
pub(super) struct Arguments {
    /// A log, a traceback or a message; `-`: what is piped in. Or a memory snapshot of torch.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(subcommand)]
    what: Option<What>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let shown = arguments.file.display();
    let bytes =
        disk::read(&arguments.file, MAX_BYTES).map_err(|error| Failure::bad_input(format!("{shown}: {error}")))?;
    let snapshot = real::is_snapshot(&bytes).then(|| import::read(&arguments.file)).transpose()?;
    let mut found = match &snapshot {
        Some(recording) => doctor::of_recording(recording).into_iter().collect(),
        None if is_noise(&bytes) => {
            return Err(Failure::bad_input(format!("{shown}: it is no text, and no memory snapshot of torch"))
                .hint("give a log, a traceback, or what torch.cuda.memory._dump_snapshot wrote"));
        }
        None => doctor::diagnose(&doctor::text(&bytes)),
    };
    if found.is_empty() && snapshot.is_some() {
        return Err(Failure::bad_input(format!("{shown}: nothing in this snapshot ran out of memory or grew"))
            .hint("`vramcast import FILE train MODEL …` says what lived at its peak and which lines made it"));
    }
    if found.is_empty() {
        return Err(Failure::bad_input(format!("{shown}: nothing in it speaks of memory"))
            .hint("give the part of the log with the error, or its whole text"));
    }
    let mut prepared = match &arguments.what {
        Some(What::Train(train)) => Some(train.prepare(context)?),
        Some(What::Infer(infer)) => Some(infer.prepare(context)?),
        None => None,
    };
    // The card of the message, where none is named.
    if let (Some(prepared), Some(total)) = (&mut prepared, found[0].message.as_ref().and_then(|message| message.total))
    {
        prepared.on_card_of(total);
    }
    let answer = match &prepared {
        Some(prepared) => Some(prepared.answer(Wanted { suggestions: true, ..Wanted::default() })?),
        None => None,
    };
    // What is simulated to fit goes before what helps in general, which the plan may have already.
    let beyond = match (&prepared, &answer) {
        (Some(prepared), Some(answer)) => real::beyond(prepared, &found[0], answer)?,
        _ => Vec::new(),
    };
    if answer.as_ref().is_some_and(|answer| !answer.fits) || !beyond.is_empty() {
        found.iter_mut().filter(|finding| finding.cause == Cause::TooMuch).for_each(|finding| finding.cures.clear());
    } else if matches!(arguments.what, Some(What::Infer(_))) {
        found.iter_mut().for_each(Finding::of_generation);
    }
    let mut document = json!({"schema": 1, "findings": found});
    let mut page = Page::new(format!("{shown}: {}", found[0].cause.title()));
    found.iter().for_each(|finding| describe(&mut page, finding));
    if let Some(recording) = &snapshot {
        import::describe(&mut page, recording);
        document["recording"] = json!(recording);
    }
    if let (Some(prepared), Some(answer)) = (&prepared, &answer) {
        beside((&mut page, &mut document), &found[0], prepared, answer, &beyond)?;
    }
    context.answer(&page, document, Exit::Success)
}

fn describe(page: &mut Page, finding: &Finding) {
    let mut said = format!("{}, says {}: {}", finding.cause.title(), finding.source, finding.because);
    match finding.ranks.as_slice() {
        [] | [_] => {}
        ranks => said += &format!(" (ranks {})", ranks.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
    }
    page.add(Block::Note(said));
    if let Some(place) = &finding.place {
        let line = place.line.as_ref().map(|line| format!(", at {line}")).unwrap_or_default();
        let step = place.step.map(|step| format!(", in step {step}")).unwrap_or_default();
        page.add(Block::Note(format!("it was in {}{step}{line}", place.phase)));
    }
    if let Some(message) = &finding.message {
        let mut table = Table::new(&["what the message says", "GiB"]);
        for (name, value) in [
            ("asked for", message.asked),
            ("the card has", message.total),
            ("free", message.free),
            ("tensors hold", message.allocated),
            ("torch holds beside that", message.unused),
            ("this process holds", message.process),
        ] {
            if let Some(bytes) = value {
                table.row(vec![name.into(), gib(bytes)]);
            }
        }
        page.table("", table);
    }
    for cure in &finding.cures {
        page.add(Block::Note(format!("try: {cure}")));
    }
}

/// Which operation of the predicted run asks for these bytes, and what would make it fit.
fn beside(
    (page, document): (&mut Page, &mut serde_json::Value),
    finding: &Finding,
    prepared: &Prepared,
    answer: &vramcast_core::ask::Answer,
    beyond: &[Suggestion],
) -> Result<(), Failure> {
    if let Some(asked) = finding.message.as_ref().and_then(|message| message.asked) {
        let requests = prepared.requests(asked)?;
        let mut table = Table::new(&["operation", "module", "when", "what for", "times"]);
        for one in requests.iter().take(6) {
            table.row(vec![
                one.operation.into(),
                one.module.clone(),
                one.phase.clone(),
                one.purpose.into(),
                one.times.to_string(),
            ]);
        }
        match requests.is_empty() {
            true => page.add(Block::Note(format!(
                "no operation of the predicted run asks for {} GiB: another batch, another model or other code ran",
                gib(asked)
            ))),
            false => page.table(&format!("Who asks for {} GiB in the predicted run", gib(asked)), table),
        }
        document["requests"] = json!(requests);
    }
    let (totals, gpu) = (answer.report.totals, answer.report.plan.gpu().clone());
    let verdict = if answer.fits { "fits" } else { "does not fit" };
    page.add(Block::Note(format!(
        "the prediction: {} GiB for the process, which {verdict} {} ({} GiB)",
        gib(totals.process),
        gpu.name,
        gib(gpu.memory)
    )));
    if answer.fits && finding.cause == Cause::TooMuch {
        page.add(Block::Note(
            "so what ran was not this plan: longer samples, another batch, evaluation, or another card".into(),
        ));
    }
    if !beyond.is_empty() {
        page.add(Block::Note("what leaves free as much as it took beyond that prediction:".into()));
    }
    for change in answer.suggestions.iter().chain(beyond) {
        page.add(Block::Note(format!(
            "it would fit with {} ({}): {} GiB",
            change.change,
            change.words(),
            gib(change.process)
        )));
    }
    document["predicted"] =
        json!({"totals": totals, "fits": answer.fits, "suggestions": answer.suggestions, "beyond": beyond});
    Ok(())
}

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

/// Whether a file's beginning is no text: every sentence would be looked for in it, for a minute.
fn is_noise(bytes: &[u8]) -> bool {
    let text = doctor::text(&bytes[..bytes.len().min(1 << 16)]);
    let odd =
        |letter: &char| *letter == '\u{fffd}' || letter.is_control() && !letter.is_whitespace() && *letter != '\u{1b}';
    text.chars().filter(odd).count() > text.chars().count() / 10
}
