//! `vramcast verify`.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use vramcast_core::model::Model;
use vramcast_core::source::catalogue;
use vramcast_core::source::json as python_json;
use vramcast_core::verify::ledger::{self, LedgerRow, Measure, Scored};
use vramcast_core::verify::lora;
use vramcast_core::verify::models::{self, ModelRow};
use vramcast_core::verify::summary::{self, Quantiles};

use super::{Answer, Failure};
use crate::exit::Exit;
use crate::render::table::Table;

/// What to score.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Truth: folders or files of models, LoRA truth, ledgers; what each is, is seen from its contents.
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

#[derive(Debug, Serialize)]
struct Set {
    path: String,
    kind: &'static str,
    rows: Vec<Value>,
    summary: Value,
    #[serde(skip)]
    text: String,
    #[serde(skip)]
    markdown: String,
    #[serde(skip)]
    good: bool,
}

pub(super) fn run(arguments: &Arguments, as_json: bool, quiet: bool) -> Result<Answer, Failure> {
    let mut sets = Vec::new();
    for path in &arguments.paths {
        sets.extend(score_path(path, arguments)?);
    }
    let good = sets.iter().all(|set| set.good);
    let exit = if good { Exit::Success } else { Exit::No };
    if as_json {
        let document = json!({"schema": 1, "sets": sets});
        return Ok(Answer::document(document, exit));
    }
    if arguments.markdown {
        let tables: Vec<&str> = sets.iter().map(|set| set.markdown.as_str()).collect();
        return Ok(Answer::text(tables.join("\n"), exit));
    }
    let text =
        if quiet { String::new() } else { sets.iter().map(|set| set.text.as_str()).collect::<Vec<_>>().join("\n") };
    Ok(Answer::text(text, exit))
}

fn score_path(path: &Path, arguments: &Arguments) -> Result<Vec<Set>, Failure> {
    let mut model_rows = Vec::new();
    let mut sets = Vec::new();
    let mut files = Vec::new();
    if path.is_dir() {
        let entries = std::fs::read_dir(path).map_err(|e| Failure::bad_input(format!("{}: {e}", path.display())))?;
        files.extend(entries.filter_map(Result::ok).map(|entry| entry.path()));
        files.retain(|file| matches!(file.extension().and_then(|e| e.to_str()), Some("json" | "jsonl")));
        files.sort();
        if files.is_empty() {
            return Err(Failure::bad_input(format!("{}: no .json or .jsonl files in it", path.display())));
        }
    } else {
        files.push(path.to_owned());
    }
    let wanted = |id: &str| arguments.only.as_ref().is_none_or(|text| id.contains(text.as_str()));
    for file in files {
        let text =
            std::fs::read_to_string(&file).map_err(|e| Failure::bad_input(format!("{}: {e}", file.display())))?;
        match Truth::read(&file, &text)? {
            Truth::Model(truth) => {
                if wanted(truth["id"].as_str().unwrap_or_default()) {
                    model_rows.push(models::score(&truth));
                }
            }
            Truth::Lora(rows) => {
                let rows: Vec<&Value> =
                    rows.iter().filter(|row| wanted(row["id"].as_str().unwrap_or_default())).collect();
                sets.push(lora_set(&file, &rows, arguments.worst));
            }
            Truth::Ledger(rows) => {
                let rows: Vec<LedgerRow> = rows
                    .iter()
                    .filter(|row| wanted(row["id"].as_str().unwrap_or_default()))
                    .map(ledger::score)
                    .collect();
                sets.push(ledger_set(&file, &rows, arguments.worst));
            }
        }
    }
    if !model_rows.is_empty() {
        sets.push(model_set(path, &model_rows, arguments.worst));
    }
    Ok(sets)
}

/// Truth is written by Python, which allows `Infinity` and `NaN`.
fn json_of_python(text: &str) -> Result<Value, python_json::JsonError> {
    python_json::parse(text.as_bytes())
}

enum Truth {
    Model(Value),
    Lora(Vec<Value>),
    Ledger(Vec<Value>),
}

impl Truth {
    fn read(file: &Path, text: &str) -> Result<Self, Failure> {
        let shown = file.display();
        if let Ok(value) = json_of_python(text) {
            if value.get("tensors").is_some() && value.get("total_params").is_some() {
                return Ok(Self::Model(value));
            }
            if let Some(rows) = value.get("rows").and_then(Value::as_array) {
                return Ok(Self::Lora(rows.clone()));
            }
            if value.get("run").is_some() {
                return Ok(Self::Ledger(vec![value]));
            }
            return Err(Failure::bad_input(format!("{shown}: neither model truth nor a ledger")).hint(
                "a model file has `tensors` and `total_params`; a ledger has one JSON object a line with `run`",
            ));
        }
        let mut rows = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let row =
                json_of_python(line).map_err(|e| Failure::bad_input(format!("{shown}: line {}: {e}", number + 1)))?;
            if row.get("run").is_none() {
                return Err(Failure::bad_input(format!("{shown}: line {}: no `run` in it", number + 1)));
            }
            rows.push(row);
        }
        Ok(Self::Ledger(rows))
    }
}

fn model_set(path: &Path, rows: &[ModelRow], worst: usize) -> Set {
    let good = rows.iter().filter(|row| row.ok).count();
    let mut text = format!("{}: {good} of {} models exact\n", path.display(), rows.len());
    for row in rows.iter().filter(|row| !row.ok).take(worst) {
        let why = row.error.clone().unwrap_or_else(|| {
            let tensors = &row.tensors;
            let names = [("missing", &tensors.missing), ("extra", &tensors.extra), ("reshaped", &tensors.reshaped)];
            let parts = names.iter().filter(|(_, list)| !list.is_empty());
            let mut parts: Vec<String> =
                parts.map(|(what, list)| format!("{} tensors {what} ({})", list.len(), list[0])).collect();
            for (what, pair) in [("kv", row.kv_bytes_per_token), ("active", row.active_params)] {
                if pair.predicted.unwrap_or(0) != pair.expected.unwrap_or(0) {
                    parts.push(format!("{what} {:?} for {:?}", pair.predicted, pair.expected));
                }
            }
            parts.join("; ")
        });
        text += &format!("  {} ({}): {why}\n", row.id, row.model_type);
    }
    Set {
        path: path.display().to_string(),
        kind: "models",
        rows: rows.iter().filter_map(|row| serde_json::to_value(row).ok()).collect(),
        summary: json!({"rows": rows.len(), "ok": good}),
        markdown: format!("{}: {good} of {} models exact\n", path.display(), rows.len()),
        text,
        good: good == rows.len(),
    }
}

/// LoRA truth names models of the catalogue, or brings their config.
fn lora_set(file: &Path, rows: &[&Value], worst: usize) -> Set {
    let mut values = Vec::new();
    let mut good = 0;
    let mut wrong = String::new();
    for row in rows {
        let id = row["id"].as_str().unwrap_or_default();
        let (value, ok, why) = match lora_model(row, id) {
            Err(why) => (json!({"id": id, "ok": false, "skipped": why}), false, why),
            Ok(model) => {
                let scored = lora::score(row, &model);
                let why = format!(
                    "{} trainable {:?}, expected {:?} {}",
                    scored.targets,
                    scored.trainable.predicted,
                    scored.trainable.expected,
                    scored.refused.clone().unwrap_or_default()
                );
                (serde_json::to_value(&scored).unwrap_or_default(), scored.ok, why)
            }
        };
        values.push(value);
        good += usize::from(ok);
        if !ok && rows.len() - good <= worst {
            wrong += &format!("  {id}: {why}\n");
        }
    }
    Set {
        path: file.display().to_string(),
        kind: "lora",
        summary: json!({"rows": rows.len(), "ok": good}),
        markdown: format!("{}: {good} of {} LoRA rows exact\n", file.display(), rows.len()),
        text: format!("{}: {good} of {} LoRA rows exact\n{wrong}", file.display(), rows.len()),
        good: good == rows.len(),
        rows: values,
    }
}

fn lora_model(row: &Value, id: &str) -> Result<Model, String> {
    let entry = catalogue::find(id);
    let config = row.get("config").cloned().or_else(|| entry.as_ref().map(|entry| entry.config.clone()));
    let auto_class = row["auto_class"].as_str().map(str::to_owned).or_else(|| entry.and_then(|entry| entry.auto_class));
    let config = config.ok_or_else(|| format!("{id} is not in the catalogue and the row has no config"))?;
    Model::new(config, auto_class.as_deref()).map_err(|e| e.to_string())
}

fn ledger_set(file: &Path, rows: &[LedgerRow], worst: usize) -> Set {
    let scored: Vec<&Scored> = rows
        .iter()
        .filter_map(|row| if let LedgerRow::Scored(row) = row { Some(row.as_ref()) } else { None })
        .collect();
    let good = scored.iter().filter(|row| row.ok).count();
    let mut text = format!("{}: {} rows, {} scored\n\n", file.display(), rows.len(), scored.len());
    let groups = summary::by_group(&scored);
    let mut table = Table::new(&[
        "group",
        "rows",
        "allocated: median",
        "p95",
        "worst",
        "reserved: median",
        "p95",
        "process: median",
    ]);
    let percent = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.3}"));
    for group in &groups {
        let cells = |q: &Option<Quantiles>, pick: fn(&Quantiles) -> f64| percent(q.as_ref().map(pick));
        table.row(vec![
            group.group.clone(),
            group.rows.to_string(),
            cells(&group.allocated, |q| q.median),
            cells(&group.allocated, |q| q.p95),
            cells(&group.allocated, |q| q.worst),
            cells(&group.reserved, |q| q.median),
            cells(&group.reserved, |q| q.p95),
            cells(&group.process, |q| q.median),
        ]);
    }
    let markdown = format!(
        "`{}`: {} of {} rows scored; absolute errors in percent.\n\n{}",
        file.display(),
        scored.len(),
        rows.len(),
        table.markdown()
    );
    text += &table.to_string();
    text += "(absolute errors in percent)\n";
    let mut by_error: Vec<&&Scored> = scored.iter().filter(|row| row.allocated.error().is_some()).collect();
    let size = |row: &Scored| row.allocated.error().unwrap_or(0.0).abs();
    by_error.sort_by(|a, b| size(b).total_cmp(&size(a)));
    if worst > 0 && !by_error.is_empty() {
        text += "\nworst\n";
        let mut table = Table::new(&["row", "model", "group", "allocated %", "reserved %"]);
        let signed = |measure: &Measure| measure.error().map_or_else(|| "-".into(), |e| format!("{e:+.3}"));
        for row in by_error.iter().take(worst) {
            table.row(vec![
                row.id.clone(),
                row.model.clone(),
                row.group.clone(),
                signed(&row.allocated),
                signed(&row.reserved),
            ]);
        }
        text += &table.to_string();
    }
    for (why, count) in summary::skipped(rows) {
        text += &format!("skipped {count}: {why}\n");
    }
    Set {
        path: file.display().to_string(),
        kind: "ledger",
        rows: rows.iter().filter_map(|row| serde_json::to_value(row).ok()).collect(),
        summary: json!({"rows": rows.len(), "scored": scored.len(), "ok": good, "groups": groups}),
        markdown,
        text,
        good: good == scored.len(),
    }
}
