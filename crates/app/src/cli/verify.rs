//! `vramcast verify`.

use std::path::{Path, PathBuf};

use clap::Args;
use vramcast_core::verify::kinds::{self, Outcome, Score, Set, Truth};
use vramcast_core::verify::ledger::Measure;
use vramcast_core::verify::summary;

use super::{Answer, Failure};
use crate::exit::Exit;
use crate::render::table::Table;

/// What to score.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Truth: folders or files of models, LoRA truth, ledgers, published figures; what each is, is seen from its contents.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Only rows whose id contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print only the summary tables, as Markdown.
    #[arg(long)]
    markdown: bool,
    /// How many of the worst rows to show.
    #[arg(long, default_value_t = 10, value_name = "N")]
    worst: usize,
}

pub(super) fn run(arguments: &Arguments, as_json: bool, quiet: bool) -> Result<Answer, Failure> {
    let mut truths = Vec::new();
    for file in files(&arguments.paths)? {
        let shown = file.display().to_string();
        let text = crate::ask::files::rows(&file)?;
        let mut truth = Truth::read(&shown, &text).map_err(Failure::bad_input)?;
        if let Some(text) = &arguments.only {
            truth.retain(text);
        }
        truths.push(truth);
    }
    truths.retain(|truth| arguments.only.is_none() || !truth.rows.is_empty());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let sets = kinds::score(truths, threads);
    let exit = if sets.iter().all(Set::is_good) { Exit::Success } else { Exit::No };
    if as_json {
        return Ok(Answer::document(kinds::document(&sets), exit));
    }
    let shown: Vec<String> = match quiet && !arguments.markdown {
        true => Vec::new(),
        false if arguments.markdown => sets.iter().map(summary::markdown).collect(),
        false => sets.iter().map(|set| text(set, arguments.worst)).collect(),
    };
    Ok(Answer::text(shown.join("\n"), exit))
}

/// The files that are meant: of a folder, those that may hold truth.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        let bad = |problem: String| Failure::bad_input(format!("{}: {problem}", path.display()));
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let entries = std::fs::read_dir(path).map_err(|e| bad(e.to_string()))?;
        let of_truth = |file: &PathBuf| matches!(extension(file), Some("json" | "jsonl"));
        let mut own: Vec<PathBuf> = entries.filter_map(Result::ok).map(|entry| entry.path()).filter(of_truth).collect();
        if own.is_empty() {
            return Err(bad("no .json or .jsonl files in it".into()));
        }
        own.sort();
        files.extend(own);
    }
    Ok(files)
}

fn extension(file: &Path) -> Option<&str> {
    file.extension()?.to_str()
}

fn text(set: &Set, worst: usize) -> String {
    let mut text = set.headline() + "\n";
    if let [header, rows @ ..] = summary::table(set).as_slice()
        && !rows.is_empty()
    {
        text += &format!("\n{}(absolute errors in percent)\n", table(header, rows));
        text += &worst_rows(set, worst);
    }
    for (id, why) in set.wrong().take(worst) {
        text += &format!("  {id}: {why}\n");
    }
    for (why, count) in set.skipped() {
        text += &format!("skipped {count}: {why}\n");
    }
    text
}

fn worst_rows(set: &Set, worst: usize) -> String {
    let size = |row: &Score| row.levels[0].error().map(f64::abs);
    let scored = |row: &&Score| !matches!(row.outcome, Outcome::Skipped(_)) && size(row).is_some();
    let mut rows: Vec<&Score> = set.rows.iter().filter(scored).collect();
    rows.sort_by(|a, b| size(b).unwrap_or(0.0).total_cmp(&size(a).unwrap_or(0.0)));
    rows.truncate(worst);
    if rows.is_empty() {
        return String::new();
    }
    let signed = |measure: &Measure| measure.error().map_or_else(|| "-".into(), |error| format!("{error:+.3}"));
    let levels = &set.of.levels[..set.of.levels.len().min(2)];
    let mut header = vec!["row".to_owned(), "model".into(), "group".into()];
    header.extend(levels.iter().map(|level| format!("{level} %")));
    let line = |row: &&Score| {
        let model = row.document["model"].as_str().unwrap_or("-").to_owned();
        let errors = row.levels.iter().take(levels.len()).map(signed);
        [row.id.clone(), model, row.group.clone()].into_iter().chain(errors).collect()
    };
    let lines: Vec<Vec<String>> = rows.iter().map(line).collect();
    format!("\nworst\n{}", table(&header, &lines))
}

fn table(header: &[String], rows: &[Vec<String>]) -> Table {
    let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
    rows.iter().for_each(|row| table.row(row.clone()));
    table
}
