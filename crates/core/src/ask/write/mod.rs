//! A settled plan as files and a launch line of another tool. What is written is read back and settled again: where that
//! differs from the plan, the tool cannot say it, and that is said.

mod serving;
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
}

/// Writes a plan for a tool.
pub fn write(tool: &str, model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Written, Vec<Fault>> {
    let settled = resolve(model, request, around)?;
    let plan = plan_tree(&settled);
    let draft = match (&settled.plan, tool) {
        (RunPlan::Train(_), "trainer" | "trl" | "accelerate" | "axolotl" | "llama-factory" | "megatron") => {
            training::draft(tool, around.name, &plan)
        }
        (RunPlan::Train(_), "torchtune") => torch_native::torchtune(around.name, &plan).map_err(|fault| vec![fault])?,
        (RunPlan::Train(_), "torchtitan") => {
            torch_native::torchtitan(around.name, &plan).map_err(|fault| vec![fault])?
        }
        (RunPlan::Serve(_), "vllm" | "llama.cpp") => serving::draft(tool, around.name, &plan),
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
    let mut unsaid = Vec::new();
    for (path, value) in tree::leaves(plan) {
        let other = tree::get(&read, &path);
        let idle = path.starts_with("gpu.") || path.contains(".config") || value.is_null() && other.is_none();
        if !idle && other != Some(&value) {
            unsaid.push(format!("{path}: {value} in the plan, {} by the file", shown(other)));
        }
    }
    Ok(unsaid)
}

/// A value of a plan that is something.
fn at<'a>(plan: &'a Value, path: &str) -> Option<&'a Value> {
    tree::get(plan, path).filter(|value| !value.is_null())
}

fn is(plan: &Value, path: &str, value: &str) -> bool {
    at(plan, path).is_some_and(|known| known == value)
}

type Object = Map<String, Value>;
