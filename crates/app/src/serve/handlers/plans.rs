//! Plans in and out: files read, and written in every form.

use std::path::Path;

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use vramcast_core::plan::{Situation, TrainPlan};
use vramcast_core::planner::changes;

use super::Shared;
use crate::cli::plan_file;
use crate::estimate::run;
use crate::estimate::start::{self, Start};
use crate::render;
use crate::serve::Service;
use crate::serve::body::{Form, Json, Kind, ReadRequest, Wish, WriteRequest};
use crate::serve::document::Document;
use crate::serve::problem::Problem;
use crate::serve::written;

/// A plan that was read.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ReadPlan {
    /// What it is for.
    kind: Kind,
    /// The model it names.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// The plan, as requests take it.
    plan: Map<String, Value>,
    /// What was not read, or was read in another sense.
    notes: Vec<String>,
}

/// Keys that only a plan of generation has.
const GENERATION: [&str; 9] =
    ["new_tokens", "stop_after", "cache", "beams", "choice", "forced_length", "assistant", "prompt_lookup", "accepted"];

/// `POST /plan/read`.
pub(crate) async fn read(State(service): Shared, Json(request): Json<ReadRequest>) -> Result<Document, Problem> {
    service.answer(move |service| service.read_plan(&request)).await
}

/// What a plan was written as.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WrittenPlan {
    /// A name for a file.
    name: String,
    /// Its media type.
    media_type: &'static str,
    /// Its text.
    text: String,
}

/// `POST /plan/write`.
pub(crate) async fn write(State(service): Shared, Json(request): Json<WriteRequest>) -> Result<Document, Problem> {
    service.answer(move |service| service.write_plan(request)).await
}

impl Service {
    fn read_plan(&self, request: &ReadRequest) -> Result<ReadPlan, Problem> {
        let at_text = |mut problem: Problem| {
            problem.field = Some("/text".into());
            problem
        };
        // The name only says the form; nothing is opened.
        let name = request.name.as_deref().and_then(|name| Path::new(name).file_name()?.to_str());
        let parsed = match name {
            Some(name) => plan_file::parse(&request.text, name.to_owned()),
            None => plan_file::parse(&request.text, "plan.json".into())
                .or_else(|_| plan_file::parse(&request.text, "plan.toml".into()))
                .or_else(|_| plan_file::parse(&request.text, "plan.yaml".into())),
        };
        let file = parsed.map_err(|failure| at_text(failure.into()))?;
        let Value::Object(mut plan) = file.value.clone() else { return Ok(ReadPlan::default()) };
        if GENERATION.iter().any(|key| plan.contains_key(*key)) {
            let (_, model) =
                start::generation(Some(file), None, || Ok(self.cards.clone())).map_err(|f| at_text(f.into()))?;
            plan.shift_remove("model");
            return Ok(ReadPlan { kind: Kind::Infer, model, plan, notes: Vec::new() });
        }
        let start = Start::read(Some(file), None, Situation::Full, || Ok(self.cards.clone()));
        let start = start.map_err(|failure| at_text(failure.into()))?;
        let plan = self.short(&TrainPlan::default(), &start.plan);
        Ok(ReadPlan { kind: Kind::Train, model: start.model, plan, notes: start.notes })
    }

    /// What a plan changes in the defaults; a known card by its name.
    fn short<Plan: Serialize>(&self, defaults: &Plan, plan: &Plan) -> Map<String, Value> {
        let Value::Object(mut short) = written::without_nulls(changes::between(defaults, plan)) else {
            return Map::new();
        };
        if short.contains_key("gpu") {
            let whole = serde_json::to_value(plan).unwrap_or_default();
            let known = whole["gpu"]["name"].as_str().and_then(|name| self.cards.find(name).ok());
            let same = known.filter(|card| serde_json::to_value(card).is_ok_and(|card| card == whole["gpu"]));
            short["gpu"] = same.map_or(whole["gpu"].clone(), |card| Value::String(card.name));
        }
        short
    }

    fn write_plan(&self, mut request: WriteRequest) -> Result<WrittenPlan, Problem> {
        let subject = request.subject();
        let pasted = subject.is_pasted();
        let found = subject.find(self.reach, false)?;
        let wish = Wish { plan: request.plan, framework: request.framework, gpu: request.gpu };
        let (short, estimate, command) = match request.kind {
            Kind::Train => {
                let (plan, start) = self.train_plan(&found, wish)?;
                let short = self.short(&TrainPlan::default(), &plan);
                (short, self.estimate((false, false), |options| run::train(&found, plan, start, options)), "train")
            }
            Kind::Infer => {
                let plan = self.infer_plan(&found, wish)?;
                let (defaults, _) = start::generation(None, found.stored_dtype(), || Ok(self.cards.clone()))?;
                let mut short = self.short(&defaults, &plan);
                // The key by which a plan of generation is known.
                short.insert("new_tokens".into(), plan.new_tokens.into());
                let run = self.estimate((false, false), |options| run::generate(&found, plan, Vec::new(), options));
                (short, run, "infer")
            }
        };
        // A plan that cannot run is not written down as if it could.
        let estimate = estimate?;
        let report = || render::report::page(&estimate.report, &[]);
        let with_model = || {
            let model = (!pasted).then(|| ("model".to_owned(), Value::String(found.name.clone())));
            Value::Object(model.into_iter().chain(short.clone()).collect())
        };
        let (ending, media_type, text) = match request.form {
            Form::Json => ("json", "application/json", format!("{:#}\n", with_model())),
            Form::Yaml => ("yaml", "application/yaml", written::yaml(&with_model())),
            Form::Toml => ("toml", "application/toml", written::toml(&with_model())?),
            Form::Command => {
                let model = if pasted { "config.json" } else { found.name.as_str() };
                ("sh", "text/x-shellscript", written::command(command, model, short))
            }
            Form::Markdown => ("md", "text/markdown", report().markdown()),
            Form::Html => ("html", "text/html", report().html()),
            Form::Csv => ("csv", "text/csv", report().csv()),
            Form::Svg => ("svg", "image/svg+xml", render::svg::timeline(&estimate.report)),
        };
        Ok(WrittenPlan { name: format!("plan.{ending}"), media_type, text })
    }
}

impl Default for ReadPlan {
    fn default() -> Self {
        Self { kind: Kind::Train, model: None, plan: Map::new(), notes: Vec::new() }
    }
}
