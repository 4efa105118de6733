//! `vramcast list`.

use clap::{Args, ValueEnum};
use serde_json::json;
use vramcast_core::dtype::builtin_formats;
use vramcast_core::lens::Method;
use vramcast_core::model::families;
use vramcast_core::plan::{Framework, OptimizerKind};
use vramcast_core::report::coverage::Coverage;
use vramcast_core::source::catalogue;
use vramcast_core::units::Bytes;

use super::context::Context;
use super::{Answer, Failure, job};
use crate::exit::Exit;
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

/// What can be listed.
#[derive(Debug, Clone, Copy, ValueEnum)]
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
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let (headers, rows) = rows(arguments.what, arguments.filter.as_deref(), context);
    let document = document(&headers, &rows);
    let mut table = Table::new(&headers);
    rows.into_iter().for_each(|row| table.row(row));
    let title = arguments.what.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    if context.format == super::context::Format::Table {
        return Ok(Answer::success(table.fitted(crate::render::width())));
    }
    let mut page = Page::new(title);
    page.add(Block::Table(table));
    context.answer(&page, document, Exit::Success)
}

/// The document of `vramcast list WHAT --json`.
pub(crate) fn listed(what: What, filter: Option<&str>, context: &Context) -> serde_json::Value {
    let (headers, rows) = rows(what, filter, context);
    document(&headers, &rows)
}

fn rows(what: What, filter: Option<&str>, context: &Context) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let (headers, rows) = match what {
        What::Models => (vec!["id", "short names"], models()),
        What::Families => (vec!["family", "model types"], family_rows()),
        What::Dtypes => (vec!["format", "bits per weight", "also called"], dtypes(context)),
        What::Gpus => (vec!["card", "maker", "GiB"], cards(context)),
        What::Frameworks => (vec!["framework", "when", "plan value", "default", "source"], frameworks()),
        What::Optimizers => (vec!["optimizer", "whose code", "recorded runs"], optimizers()),
        What::Engines => (vec!["engine", "for", "how"], engines()),
        What::Methods => (vec!["method", "formula", "source"], methods()),
        What::Presets => (vec!["preset", "model", "engine", "GPUs"], presets()),
    };
    let wanted = filter.unwrap_or_default().to_lowercase();
    let holds = |row: &Vec<String>| row.iter().any(|cell| cell.to_lowercase().contains(&wanted));
    (headers, rows.into_iter().filter(holds).collect())
}

fn document(headers: &[&str], rows: &[Vec<String>]) -> serde_json::Value {
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

fn dtypes(context: &Context) -> Vec<Vec<String>> {
    let bits = |(numerator, denominator): (u64, u64)| {
        let bits = numerator as f64 / denominator as f64;
        if bits.fract() == 0.0 { format!("{bits}") } else { format!("{bits:.4}") }
    };
    let all = context.settings.formats.iter().chain(builtin_formats());
    all.map(|format| {
        let size = format.bits_per_weight().map_or_else(|| "by shape".to_owned(), bits);
        vec![format.name.clone(), size, format.aliases.join(", ")]
    })
    .collect()
}

fn cards(context: &Context) -> Vec<Vec<String>> {
    let gib = |bytes: u64| format!("{:.1}", Bytes(bytes).gib());
    context.cards().all().map(|card| vec![card.name, card.vendor, gib(card.memory)]).collect()
}

fn optimizers() -> Vec<Vec<String>> {
    let recorded = Coverage::recorded().train.features;
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

fn engines() -> Vec<Vec<String>> {
    const ENGINES: [(&str, &str, &str); 12] = [
        ("ddp", "train", "simulated: --gpus N --engine ddp"),
        ("fsdp", "train", "simulated: --gpus N --engine fsdp (version 1)"),
        ("fsdp2", "train", "simulated: --gpus N --engine fsdp2"),
        ("deepspeed", "train", "simulated: --gpus N --engine deepspeed --zero 0 to 3"),
        ("megatron", "train", "simulated: --gpus N --engine megatron --tp T --pp P"),
        ("hf", "infer", "simulated: transformers' generate"),
        ("vllm", "infer", "by its budget rules: --engine vllm"),
        ("sglang", "infer", "by its budget rules: --engine sglang"),
        ("tgi", "infer", "by its budget rules: --engine tgi"),
        ("tensorrt-llm", "infer", "by its budget rules: --engine tensorrt-llm"),
        ("llama.cpp", "infer", "by its buffers: --engine llama.cpp"),
        ("ollama", "infer", "by its buffers: --engine ollama"),
    ];
    ENGINES.iter().map(|(name, what, how)| vec![(*name).into(), (*what).into(), (*how).into()]).collect()
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
