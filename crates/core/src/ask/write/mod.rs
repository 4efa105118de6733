//! A settled plan as files and a launch line of another tool. What is written is read back and settled again: where that
//! differs from the plan, the tool cannot say it, and that is said.

mod megatron;
mod serving;
mod task;
mod torch_native;
mod training;

use serde_json::{Map, Value, json};

use super::file::Content;
use super::request::{Asked, Request, Task};
use super::resolve::{Settled, Surroundings, resolve};
use super::{line, tree};
use crate::model::Model;
use crate::plan::import::{self, Beside};
use crate::plan::{Fault, RunPlan};
use crate::serving::llama_cpp::Mixture;

/// Tools that plans are written for, and what each takes.
pub const TOOLS: [(&str, &str); 10] = [
    ("trainer", "arguments of transformers' Trainer, for HfArgumentParser"),
    ("trl", "a file of `trl sft`"),
    ("accelerate", "accelerate's file, with DeepSpeed's beside it"),
    ("axolotl", "a file of `axolotl train`"),
    ("llama-factory", "a file of `llamafactory-cli train`"),
    ("torchtune", "a file of `tune run`"),
    ("torchtitan", "its TOML, as 0.2 reads it"),
    ("megatron", "arguments of Megatron-LM's pretrain_gpt.py"),
    ("vllm", "a file and a line of `vllm serve`"),
    ("llama.cpp", "a line of `llama-server`"),
];

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Written {
    /// Names and texts of files.
    pub files: Vec<(String, String)>,
    /// The line that starts it.
    pub line: String,
    /// What of the plan the tool cannot say: a place, what the plan has there, and what the written file comes to.
    pub unsaid: Vec<String>,
}

/// A tool's file on its way.
#[derive(Default)]
struct Draft {
    files: Vec<(String, Value)>,
    line: Vec<String>,
    /// A trainer of the tool's own that is not simulated, in words: its keys are not read back.
    own: Option<String>,
}

/// Writes a plan for a tool, with the model by the name that it is called by.
pub fn write(
    tool: &str,
    model: &Model,
    called: &str,
    request: &Request,
    around: &Surroundings<'_>,
) -> Result<Written, Vec<Fault>> {
    let settled = resolve(model, request, around)?;
    let plan = plan_tree(&settled);
    let draft = match (&settled.plan, tool) {
        (RunPlan::Train(_), "trainer" | "trl" | "accelerate" | "axolotl" | "llama-factory" | "megatron") => {
            training::draft(tool, called, model.config(), &plan).map_err(|fault| vec![fault])?
        }
        (RunPlan::Train(_), "torchtune" | "torchtitan") => {
            task::word(tool, &plan).map_err(|fault| vec![fault])?;
            let written = if tool == "torchtune" { torch_native::torchtune } else { torch_native::torchtitan };
            written(around.name, &plan).map_err(|fault| vec![fault])?
        }
        (RunPlan::Serve(_), "vllm" | "llama.cpp") => serving::draft(tool, called, &plan),
        _ => {
            let names: Vec<&str> = TOOLS.iter().map(|(name, _)| *name).collect();
            let problem = format!("{tool} is no tool that this kind of plan is written for");
            return Err(vec![Fault::new("", problem).or(format!("known are {}", names.join(", ")))]);
        }
    };
    let files: Vec<(String, String)> =
        draft.files.iter().map(|(name, value)| (name.clone(), text(name, value))).collect();
    let unsaid = again(&draft, request.task, model, around, &plan)?;
    Ok(Written { files, line: super::spell::line(&draft.line), unsaid })
}

fn plan_tree(settled: &Settled) -> Value {
    let tree = match &settled.plan {
        RunPlan::Train(plan) => serde_json::to_value(plan),
        RunPlan::Infer(plan) => serde_json::to_value(plan),
        RunPlan::Serve(plan) => serde_json::to_value(plan),
    };
    tree.unwrap_or_default()
}

/// A file's text: YAML holds every JSON value, so a line per key is enough.
fn text(name: &str, value: &Value) -> String {
    if name.ends_with(".json") {
        return format!("{value:#}\n");
    }
    let mut lines = String::new();
    if name.ends_with(".toml") {
        for (part, values) in value.as_object().into_iter().flatten() {
            lines += &format!("[{part}]\n");
            let set = values.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
            set.for_each(|(key, value)| lines += &format!("{key} = {value}\n"));
        }
        return lines;
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                lines += &format!("{key}:\n");
                inner.iter().for_each(|(key, value)| lines += &format!("  {key}: {value}\n"));
            }
            _ => lines += &format!("{key}: {value}\n"),
        }
    }
    lines
}

/// Reads what was written and settles it: places where the two plans differ.
fn again(
    draft: &Draft,
    task: Task,
    model: &Model,
    around: &Surroundings<'_>,
    plan: &Value,
) -> Result<Vec<String>, Vec<Fault>> {
    let open = |name: &str| {
        let found = draft.files.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone()).ok_or_else(|| "there is no such file".to_owned())
    };
    let content = match draft.files.as_slice() {
        // accelerate's file says who spreads a run, and nothing of what runs.
        [(name, value), ..] if draft.line.is_empty() => Content::of_imported(import::read_as(
            "accelerate",
            value,
            &Beside { name, open: &open, ..Beside::default() },
        )?),
        _ => line::read(&draft.line, &open, &[])?,
    };
    let mut asked = Asked { task, ..Asked::default() };
    let deepspeed = content.deepspeed.clone();
    let described = content.config.clone();
    // A GGUF file's name says how it is quantised.
    let stored = content.model.as_deref().and_then(Mixture::of_name).map(|(_, mixture)| mixture.name);
    let quantised = at(plan, "quantization").and_then(Value::as_str);
    if let Some(name) = quantised.filter(|name| stored.is_some() && Mixture::find(name).map(|one| one.name) == stored) {
        asked.trees.push(json!({"quantization": name}));
    }
    asked.beneath(content);
    if let Some(document) = deepspeed {
        asked.deepspeed(&document, Some(model.config()))?;
    }
    asked.on_cards();
    let gpu = tree::get(plan, "gpu").cloned().unwrap_or_default();
    asked.trees.push(json!({"gpu": gpu}));
    let request = asked.request()?;
    let read = plan_tree(&resolve(model, &request, around)?);
    let shown = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), ToString::to_string);
    let mut unsaid: Vec<String> = draft.own.iter().cloned().collect();
    // A line that tells sizes and no name.
    if draft.line.iter().any(|word| word == "pretrain_gpt.py") {
        let count = |model: &Model| model.inventory().ok().map(|all| all.count(|_| true));
        let other = described.and_then(|config| count(&Model::new(config, None).ok()?));
        if other != count(model) {
            let said = other.map_or_else(|| "none".to_owned(), |count| format!("one of {count} parameters"));
            unsaid.push(format!("the model's own sizes: by the line it is {said}"));
        }
    }
    // Parts that a plan leaves out are as they are by default.
    let usual = json!({"job": crate::plan::Job::default(), "objective": crate::plan::Objective::default()});
    for (path, value) in tree::leaves(plan) {
        let other = tree::get(&read, &path).or_else(|| tree::get(&usual, &path));
        let idle = path.starts_with("gpu.")
            || path.contains(".config")
            || without_effect(plan, model, &path, other)
            || nothing(&value) && other.is_none_or(nothing);
        if !idle && other != Some(&value) {
            unsaid.push(format!("{path}: {value} in the plan, {} by the file", shown(other)));
        }
    }
    Ok(unsaid)
}

fn nothing(value: &Value) -> bool {
    value.is_null() || *value == false || *value == json!([]) || *value == json!({})
}

/// Whether a place of this plan decides nothing, or says the same in other words.
fn without_effect(plan: &Value, model: &Model, path: &str, other: Option<&Value>) -> bool {
    let kind = at(plan, "optimizer.kind").and_then(Value::as_str).unwrap_or_default();
    match path {
        // bitsandbytes' alone.
        "optimizer.wide_embeddings" => !kind.contains("8bit"),
        "quantization.double" => is(plan, "quantization.scheme", "int8"),
        // LLaMA-Factory leaves vision towers out, which this model may not have.
        "adapter.exclude" => {
            let towers =
                |value: &Value| value.is_null() || value.as_str().is_some_and(|is| is.contains("vision_tower"));
            let both = [tree::get(plan, path), other].into_iter().flatten().all(towers);
            both && model.config().get("vision_config").is_none()
        }
        "adapter.targets" => {
            let names = other.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            let has = |name: &&str| names.iter().any(|known| known == *name);
            is(plan, path, "all-linear") && LINEARS.iter().all(has)
        }
        _ => false,
    }
}

/// The linears of a decoder's layer.
const LINEARS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// A value of a plan that is something.
fn at<'a>(plan: &'a Value, path: &str) -> Option<&'a Value> {
    tree::get(plan, path).filter(|value| !value.is_null())
}

fn is(plan: &Value, path: &str, value: &str) -> bool {
    at(plan, path).is_some_and(|known| known == value)
}

/// Trainers take whole numbers only.
fn alpha(plan: &Value) -> Option<Value> {
    let alpha = at(plan, "adapter.alpha")?.as_f64()?;
    Some(if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) })
}

type Object = Map<String, Value>;
