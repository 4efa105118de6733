//! `vramcast list`.

use clap::{Args, ValueEnum};
use serde_json::json;
use vramcast_core::dtype::builtin_formats;
use vramcast_core::model::families;
use vramcast_core::plan::{Framework, Gpus, OptimizerKind};
use vramcast_core::source::catalogue;
use vramcast_core::units::Bytes;

use super::{Answer, Failure};
use crate::render::table::Table;

/// What to list.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    what: What,
    /// Only lines that contain this.
    #[arg(value_name = "TEXT")]
    filter: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    /// The embedded catalogue, with short names.
    Models,
    /// The families and the model types they read.
    Families,
    /// Element and storage formats.
    Dtypes,
    /// Cards.
    Gpus,
    /// Optimizers, and whose code each one is.
    Optimizers,
    /// Training frameworks, their defaults and where those stand.
    Frameworks,
}

pub(super) fn run(arguments: &Arguments, as_json: bool) -> Result<Answer, Failure> {
    let (headers, rows) = match arguments.what {
        What::Models => (vec!["id", "short names"], models()),
        What::Families => (vec!["family", "model types"], family_rows()),
        What::Dtypes => (vec!["format", "bits per weight", "also called"], dtypes()),
        What::Gpus => (vec!["card", "maker", "GiB"], cards()),
        What::Frameworks => (vec!["framework", "when", "plan value", "default", "source"], frameworks()),
        What::Optimizers => (vec!["optimizer", "whose code", "recorded runs"], optimizers()),
    };
    let wanted = arguments.filter.as_deref().unwrap_or_default().to_lowercase();
    let rows: Vec<Vec<String>> =
        rows.into_iter().filter(|row| row.iter().any(|cell| cell.to_lowercase().contains(&wanted))).collect();
    if as_json {
        let objects: Vec<_> = rows
            .iter()
            .map(|row| {
                let pairs = headers.iter().zip(row).map(|(key, cell)| (key.replace(' ', "_"), json!(cell)));
                serde_json::Value::Object(pairs.collect())
            })
            .collect();
        return Ok(Answer::success(format!("{:#}\n", json!({"schema": 1, "rows": objects}))));
    }
    let mut table = Table::new(&headers);
    rows.into_iter().for_each(|row| table.row(row));
    Ok(Answer::success(table.to_string()))
}

fn models() -> Vec<Vec<String>> {
    let names = |id: &str| {
        let short = catalogue::aliases().iter().filter(|(_, target)| target.as_str() == id);
        short.map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
    };
    catalogue::ids().map(|id| vec![id.to_owned(), names(id)]).collect()
}

fn family_rows() -> Vec<Vec<String>> {
    families::all().map(|family| vec![family.name.to_owned(), family.model_types.join(", ")]).collect()
}

fn dtypes() -> Vec<Vec<String>> {
    let bits = |(numerator, denominator): (u64, u64)| {
        let bits = numerator as f64 / denominator as f64;
        if bits.fract() == 0.0 { format!("{bits}") } else { format!("{bits:.4}") }
    };
    builtin_formats()
        .iter()
        .map(|format| {
            let size = format.bits_per_weight().map_or_else(|| "by shape".to_owned(), bits);
            vec![format.name.clone(), size, format.aliases.join(", ")]
        })
        .collect()
}

fn cards() -> Vec<Vec<String>> {
    let gib = |bytes: u64| format!("{:.1}", Bytes(bytes).gib());
    Gpus::embedded().all().map(|card| vec![card.name, card.vendor, gib(card.memory)]).collect()
}

fn optimizers() -> Vec<Vec<String>> {
    let measured = |kind: OptimizerKind| if kind.is_measured() { "yes" } else { "not yet" };
    OptimizerKind::ALL.iter().map(|(kind, code)| vec![kind.name(), (*code).into(), measured(*kind).into()]).collect()
}

fn frameworks() -> Vec<Vec<String>> {
    let shown = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let mut rows = Vec::new();
    for framework in Framework::all() {
        for default in &framework.defaults {
            let when: Vec<String> = default.when.iter().map(|when| shown(&json!(when))).collect();
            rows.push(vec![
                format!("{}@{}", framework.name, framework.version),
                when.join(", "),
                default.key.clone(),
                shown(&default.value),
                default.source.clone(),
            ]);
        }
    }
    rows
}
