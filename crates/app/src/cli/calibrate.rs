//! `vramcast calibrate`.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use vramcast_core::calibrate::{self, CalibrateError, Calibration};
use vramcast_core::memory::process::Fact;
use vramcast_core::source::json as python_json;
use vramcast_core::verify::summary::{Group, Quantiles};

use super::context::Context;
use super::{Answer, Failure};
use crate::ask::files;
use crate::disk;
use crate::exit::Exit;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// What to learn from.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 learned, 1 learned, but tensors of a row are off, which no machine fact explains, 2 bad input."
)]
pub(super) struct Arguments {
    /// Ledgers: one measured run a line, as `vramcast probe --ledger` writes them.
    #[arg(required = true, value_name = "LEDGER")]
    ledgers: Vec<PathBuf>,
    /// Write what was learned to this file, for --profile.
    #[arg(long, value_name = "PROFILE")]
    out: Option<PathBuf>,
    /// Only rows of cards whose name contains this, where a ledger has several.
    #[arg(long, value_name = "NAME")]
    card: Option<String>,
    /// Only rows of torch versions that start with this.
    #[arg(long, value_name = "VERSION")]
    torch: Option<String>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let mut rows = Vec::new();
    for path in &arguments.ledgers {
        rows.extend(read(path)?);
    }
    let torch_of = |row: &Value| {
        let of = |key: &str| row[key]["torch"].as_str().map(str::to_owned);
        of("versions").or_else(|| of("software")).unwrap_or_default()
    };
    let named = |row: &Value, name: &str| row["gpu"].as_str().is_some_and(|gpu| gpu.contains(name));
    rows.retain(|row| {
        arguments.card.as_deref().is_none_or(|name| named(row, name))
            && arguments.torch.as_deref().is_none_or(|version| torch_of(row).starts_with(version))
    });
    let learned = calibrate::calibrate(&rows)?;
    if let Some(path) = &arguments.out {
        disk::write(path, learned.profile.text().as_bytes())
            .map_err(|e| Failure::bad_input(format!("--out {}: {e}", path.display())))?;
    }
    let off = learned.not_bent.iter().any(|row| row.allocated.is_some());
    let exit = if !off { Exit::Success } else { Exit::No };
    context.answer(&page(&learned, arguments.out.as_deref()), json!({"schema": 1, "calibration": learned}), exit)
}

fn read(path: &Path) -> Result<Vec<Value>, Failure> {
    let shown = path.display();
    let text = files::rows(path)?;
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row = python_json::parse(line.as_bytes())
            .map_err(|e| Failure::bad_input(format!("{shown}: line {}: {e}", number + 1)))?;
        if !row["run"].is_object() || !row["measured"].is_object() {
            return Err(Failure::bad_input(format!("{shown}: line {}: no `run` or `measured` in it", number + 1))
                .hint("a ledger is what `vramcast probe --ledger FILE` writes"));
        }
        rows.push(row);
    }
    Ok(rows)
}

fn page(learned: &Calibration, out: Option<&Path>) -> Page {
    let profile = &learned.profile;
    let mut page = Page::new(format!("{} with torch {}, from {} rows", profile.card, profile.torch, profile.rows));
    page.table("Facts of the machine (MiB)", facts(learned));
    if !learned.choices.is_empty() {
        let mut table =
            Table::new(&["alternative of torch", "taken", "rows nearer", "farther", "median off before", "after"]);
        for choice in &learned.choices {
            let taken = if choice.taken { "yes" } else { "no" };
            let [before, after] = choice.median.map(|bytes| mib(bytes as f64));
            table.row(vec![
                choice.choice.into(),
                taken.into(),
                choice.nearer.to_string(),
                choice.farther.to_string(),
                before,
                after,
            ]);
        }
        page.table("Choices, tried because rows were off (MiB)", table);
    }
    page.table("Process, error in percent by kind of run: before, after, and each row by the others", groups(learned));
    if let Some(path) = out {
        page.add(Block::Note(format!("written to {}; use it with --profile", path.display())));
    }
    for stranger in &learned.strangers {
        let side = if stranger.bytes > 0 { "more" } else { "less" };
        page.add(Block::Note(format!(
            "row {}: its process held {} MiB {side} than the facts explain; the medians leave it aside",
            stranger.id,
            mib(stranger.bytes.unsigned_abs() as f64)
        )));
    }
    for row in &learned.not_bent {
        page.add(Block::Note(not_bent(row)));
    }
    if !learned.skipped.is_empty() {
        let (id, why) = &learned.skipped[0];
        page.add(Block::Note(format!("{} rows not used; {id}: {why}", learned.skipped.len())));
    }
    page
}

fn not_bent(row: &calibrate::NotBent) -> String {
    let mut levels = Vec::new();
    levels.extend(row.allocated.map(|error| format!("allocated {error:+.2} %")));
    levels.extend(row.reserved.map(|error| format!("reserved {error:+.2} %")));
    let points = match &row.residual {
        Some(residual) => residual.to_string(),
        None => "tensors agree, the allocator's segments do not".to_owned(),
    };
    format!("row {} ({}): {}: no fact of a machine, left as it is; {points}", row.id, row.model, levels.join(", "))
}

fn facts(learned: &Calibration) -> Table {
    let mut table =
        Table::new(&["fact", "built in", "learned", "rows", "they show", "each by the others: median, worst"]);
    for fit in &learned.facts {
        let range = fit.range.map_or_else(
            || "-".into(),
            |[least, most]| {
                if least == most { mib(least as f64) } else { format!("{} to {}", mib(least as f64), mib(most as f64)) }
            },
        );
        let left_out = match (fit.left_out, fit.rows) {
            (Some([median, worst]), _) => format!("{}, {}", mib(median as f64), mib(worst as f64)),
            (None, 0) => "-".into(),
            (None, _) => "one row: not checked".into(),
        };
        let learned = if fit.rows == 0 { "as built in".into() } else { mib(fit.after as f64) };
        let given: Vec<&str> = fit.given.iter().map(|fact| fact.name()).collect();
        let mut name = fact_name(fit.fact);
        if fit.rows > 0 && !given.is_empty() {
            name += &format!(" (given {})", given.join(", "));
        }
        table.row(vec![name, mib(fit.before as f64), learned, fit.rows.to_string(), range, left_out]);
    }
    table
}

fn fact_name(fact: Fact) -> String {
    let when = match fact {
        Fact::KernelsTraining | Fact::CudnnTraining => ", training",
        Fact::KernelsInference | Fact::CudnnInference => ", generation",
        _ => "",
    };
    format!("{}{when}", fact.name())
}

fn groups(learned: &Calibration) -> Table {
    let mut table = Table::new(&[
        "group",
        "rows",
        "before: median",
        "worst",
        "after: median",
        "worst",
        "by the others: median",
        "worst",
    ]);
    let cells = |groups: &[Group], name: &str| {
        let process = groups.iter().find(|group| group.group == name).and_then(|group| group.process);
        let show =
            |pick: fn(&Quantiles) -> f64| process.as_ref().map_or_else(|| "-".into(), |q| format!("{:.3}", pick(q)));
        [show(|q| q.median), show(|q| q.worst)]
    };
    for group in learned.after.iter().filter(|group| group.process.is_some()) {
        let mut row = vec![group.group.clone(), group.rows.to_string()];
        for groups in [&learned.before, &learned.after, &learned.left_out] {
            row.extend(cells(groups, &group.group));
        }
        table.row(row);
    }
    table
}

fn mib(bytes: f64) -> String {
    format!("{:.1}", bytes / f64::from(1 << 20))
}

impl From<CalibrateError> for Failure {
    fn from(error: CalibrateError) -> Self {
        let failure = Self::bad_input(error.to_string());
        match error {
            CalibrateError::Mixed(_) => failure.hint("a profile is of one machine: choose with --card and --torch"),
            CalibrateError::NoProcess => failure.hint("measure with `vramcast probe … --ledger FILE` on the GPU"),
            _ => failure,
        }
    }
}
