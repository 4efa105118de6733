//! What vramcast knows, as rows.

use serde_json::json;
use vramcast_core::ask::{Kind, Runner, Scope, table};
use vramcast_core::dtype::builtin_formats;
use vramcast_core::lens::Method;
use vramcast_core::model::families;
use vramcast_core::plan::{Framework, OptimizerKind, RunPlan};
use vramcast_core::report::coverage::Coverage;
use vramcast_core::source::catalogue;
use vramcast_core::units::Bytes;

use super::job;
use crate::settings::Settings;

/// What can be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
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
    /// Engines that spread a training run or serve a model.
    Engines,
    /// The simulation and the published formulas (`--method`).
    Methods,
    /// Jobs that are built in (`vramcast calculate --config NAME`).
    Presets,
    /// Every setting: its flag, its place in a plan, who honours it and where its default comes from.
    Settings,
}

impl What {
    /// All of them, by name.
    pub(crate) const ALL: [(&'static str, Self); 10] = [
        ("models", Self::Models),
        ("families", Self::Families),
        ("dtypes", Self::Dtypes),
        ("gpus", Self::Gpus),
        ("optimizers", Self::Optimizers),
        ("frameworks", Self::Frameworks),
        ("engines", Self::Engines),
        ("methods", Self::Methods),
        ("presets", Self::Presets),
        ("settings", Self::Settings),
    ];
}

/// The document of `vramcast list WHAT --json`.
pub(crate) fn listed(what: What, filter: Option<&str>, settings: &Settings) -> serde_json::Value {
    let (headers, rows) = rows(what, filter, settings);
    document(&headers, &rows)
}

pub(crate) fn rows(what: What, filter: Option<&str>, settings: &Settings) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let (headers, rows) = match what {
        What::Models => (vec!["id", "short names"], models()),
        What::Families => (vec!["family", "model types"], family_rows()),
        What::Dtypes => (vec!["format", "bits per weight", "also called"], dtypes(settings)),
        What::Gpus => (vec!["card", "maker", "GiB"], cards(settings)),
        What::Frameworks => (vec!["framework", "when", "plan value", "default", "source"], frameworks()),
        What::Optimizers => (vec!["optimizer", "whose code", "recorded runs"], optimizers()),
        What::Engines => (vec!["engine", "for", "how"], engines()),
        What::Methods => (vec!["method", "formula", "source"], methods()),
        What::Presets => (vec!["preset", "model", "engine", "GPUs"], presets()),
        What::Settings => (vec!["flag", "place", "values", "help", "default", "engines"], settings_rows()),
    };
    let wanted = filter.unwrap_or_default().to_lowercase();
    let holds = |row: &Vec<String>| row.iter().any(|cell| cell.to_lowercase().contains(&wanted));
    (headers, rows.into_iter().filter(holds).collect())
}

pub(crate) fn document(headers: &[&str], rows: &[Vec<String>]) -> serde_json::Value {
    let object = |row: &Vec<String>| {
        let pairs = headers.iter().zip(row).map(|(key, cell)| (key.replace(' ', "_"), json!(cell)));
        serde_json::Value::Object(pairs.collect())
    };
    json!({"schema": 1, "rows": rows.iter().map(object).collect::<Vec<_>>()})
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

fn dtypes(settings: &Settings) -> Vec<Vec<String>> {
    let bits = |(numerator, denominator): (u64, u64)| {
        let bits = numerator as f64 / denominator as f64;
        if bits.fract() == 0.0 { format!("{bits}") } else { format!("{bits:.4}") }
    };
    let all = settings.formats.iter().chain(builtin_formats());
    all.map(|format| {
        let size = format.bits_per_weight().map_or_else(|| "by shape".to_owned(), bits);
        vec![format.name.clone(), size, format.aliases.join(", ")]
    })
    .collect()
}

fn cards(settings: &Settings) -> Vec<Vec<String>> {
    let gib = |bytes: u64| format!("{:.1}", Bytes(bytes).gib());
    settings.all_cards().all().map(|card| vec![card.name, card.vendor, gib(card.memory)]).collect()
}

fn optimizers() -> Vec<Vec<String>> {
    let recorded = &Coverage::recorded().of(&RunPlan::Train(Box::default())).features;
    let measured = |kind: OptimizerKind| {
        if recorded.contains_key(&format!("optimizer {}", kind.name())) { "yes" } else { "not yet" }
    };
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

/// Who runs plans.
fn engines() -> Vec<Vec<String>> {
    let all = Scope::ENGINES.runners().chain(Scope::INFER.runners());
    let command = |runner: Runner| if runner.trains() { "train" } else { "infer" };
    all.map(|runner| vec![runner.name().into(), command(runner).into(), runner.about().into()]).collect()
}

/// Every setting: flag, place, values, who honours it, where its default comes from.
fn settings_rows() -> Vec<Vec<String>> {
    let values = |kind: Kind| match kind {
        Kind::Switch | Kind::Off => "on or off".to_owned(),
        Kind::Whole => "a whole number".to_owned(),
        Kind::Real => "a number".to_owned(),
        Kind::Text => "text".to_owned(),
        Kind::Names => "names".to_owned(),
        Kind::Choice(words) => words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", "),
        Kind::Listed(words) => words().join(", "),
        Kind::Spelled(spelling) => spelling.words.join(", "),
        Kind::Refused(_) => "refused".to_owned(),
    };
    let row = |row: &vramcast_core::ask::Setting| {
        let who: Vec<&str> = row.scope.runners().map(Runner::name).collect();
        let flag = if row.flag.is_empty() { "--set".to_owned() } else { format!("--{}", row.flag) };
        vec![flag, row.path.into(), values(row.kind), row.help.into(), row.from.into(), who.join(", ")]
    };
    table::all().map(row).collect()
}

fn methods() -> Vec<Vec<String>> {
    let simulate = ["simulate", "the job, run on tensors without data (the default)", "vramcast"].map(str::to_owned);
    let row = |method: Method| vec![method.name().into(), method.about().into(), method.source().into()];
    std::iter::once(simulate.to_vec()).chain(Method::ALL.into_iter().map(row)).collect()
}

fn presets() -> Vec<Vec<String>> {
    let row = |(name, text): &(&str, &str)| {
        let job: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        let model = format!("{} ({})", job["model"]["name"], job["model"]["num_parameters"]).replace('"', "");
        let engine = job["engine"]["type"].as_str().unwrap_or_default().to_owned();
        vec![(*name).to_owned(), model, engine, job["hardware"]["num_gpus"].to_string()]
    };
    job::PRESETS.iter().map(row).collect()
}

/// The table of settings as a document, for interfaces that make their own fields of it.
pub(crate) fn settings() -> serde_json::Value {
    let plain = [
        (Scope::TRAIN, json!(vramcast_core::plan::TrainPlan::default())),
        (Scope::GENERATE, json!(vramcast_core::plan::InferPlan::default())),
        (Scope::SERVE, json!(vramcast_core::plan::ServePlan::default())),
    ];
    let kind = |row: &vramcast_core::ask::Setting| match row.kind {
        Kind::Switch => json!({"type": "switch"}),
        Kind::Off => json!({"type": "switch", "off": true}),
        Kind::Whole => json!({"type": "whole"}),
        Kind::Real => json!({"type": "number"}),
        Kind::Text => json!({"type": "text"}),
        Kind::Names => json!({"type": "names"}),
        Kind::Choice(words) => {
            let words: Vec<_> = words.iter().map(|(word, help)| json!({"value": word, "help": help})).collect();
            json!({"type": "choice", "words": words})
        }
        Kind::Listed(words) => {
            let words: Vec<_> = words().into_iter().map(|word| json!({"value": word, "help": ""})).collect();
            json!({"type": "choice", "words": words})
        }
        Kind::Spelled(spelling) => {
            // What each word stands for, so that a page can write it into a plan.
            let word = |word: &&str| json!({"value": word, "sets": (spelling.read)(word).ok()});
            let words: Vec<_> = spelling.words.iter().map(word).collect();
            json!({"type": if row.is_switch() { "switch" } else { "spelled" }, "words": words})
        }
        Kind::Refused(why) => json!({"type": "refused", "why": why}),
    };
    let row = |row: &vramcast_core::ask::Setting| {
        let usual = plain.iter().find(|(scope, _)| row.scope.meets(*scope));
        let usual = usual.and_then(|(_, tree)| vramcast_core::ask::tree::get(tree, row.path));
        let runners: Vec<&str> = row.scope.runners().map(Runner::name).collect();
        json!({
            "path": row.path, "flag": row.flag, "aliases": row.aliases, "kind": kind(row), "help": row.help,
            "default": usual, "from": row.from, "topic": row.topic, "title": row.topic.title(), "engines": runners,
            "example": row.example,
        })
    };
    json!({"schema": 1, "settings": table::all().map(row).collect::<Vec<_>>()})
}
