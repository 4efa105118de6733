//! Plans in and out: files read, and written in every form.

use std::path::Path;

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use vramcast_core::ask::file::Content;
use vramcast_core::ask::{Task, Wanted, spell};

use super::Shared;
use crate::ask::found::Subject;
use crate::ask::{files, placement, real};
use crate::failure::Failure;
use crate::http::Service;
use crate::http::body::{Form, Json, PlacementRequest, ReadRequest, RealRequest, WriteRequest};
use crate::http::document::Document;
use crate::http::problem::Problem;
use crate::http::written;
use crate::render;

/// What a text is for.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Training.
    Train,
    /// Generation and serving.
    Infer,
    /// Several roles on shared cards, which have no single plan: `/placement` answers the text.
    Placement,
}

/// A plan that was read.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ReadPlan {
    /// What it is for.
    kind: Kind,
    /// The model it names.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// The framework whose defaults hold where it is silent.
    #[serde(skip_serializing_if = "Option::is_none")]
    framework: Option<String>,
    /// The plan, as requests take it.
    plan: Map<String, Value>,
    /// What was not read, or was read in another sense.
    notes: Vec<String>,
}

/// `POST /plan/read`.
pub(crate) async fn read(State(service): Shared, Json(request): Json<ReadRequest>) -> Result<Document, Problem> {
    service.answer(request, |service, request| service.read_plan(&request)).await
}

/// `POST /placement`.
pub(crate) async fn placement(
    State(service): Shared,
    Json(request): Json<PlacementRequest>,
) -> Result<Document, Problem> {
    service.answer(request, |service, request| service.placed(request)).await
}

/// `POST /real`.
pub(crate) async fn real(State(service): Shared, Json(request): Json<RealRequest>) -> Result<Document, Problem> {
    service.answer(request, |service, request| service.read_real(request)).await
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
    service.answer(request, |service, request| service.write_plan(request)).await
}

fn at_text(problem: Problem) -> Problem {
    Problem { field: Some("/text".into()), ..problem }
}

/// What a launch line without a file is called.
const LINE: &str = "the line";

/// What a text says. Its name only says the form; nothing is opened.
fn content(text: &str, name: Option<&str>) -> Result<Content, Problem> {
    let parsed = match name.and_then(|name| Path::new(name).file_name()?.to_str()) {
        Some(name) => files::content(text, name),
        None if files::is_script(Path::new(LINE), text) => files::content(text, LINE),
        None => files::content(text, "plan.json")
            .or_else(|_| files::content(text, "plan.toml"))
            .or_else(|_| files::content(text, "plan.yaml")),
    };
    parsed.map_err(|failure| at_text(failure.into()))
}

impl Service {
    fn read_plan(&self, request: &ReadRequest) -> Result<ReadPlan, Problem> {
        let content = content(&request.text, request.name.as_deref())?;
        if content.placement.is_some() {
            let (model, framework, plan) = (content.model, content.framework, Map::new());
            return Ok(ReadPlan { kind: Kind::Placement, model, framework, plan, notes: content.notes });
        }
        let folded = content.folded().map_err(|faults| Failure::faults(faults, vramcast_core::ask::Runner::OneCard));
        let Content { task, model, config, framework, tree, mut notes, .. } =
            folded.map_err(|failure| at_text(failure.into()))?;
        if config.is_some() {
            notes.push("the text tells a model's sizes and no name: give its config.json as the model".into());
        }
        let plan = if let Value::Object(plan) = tree { plan } else { Map::new() };
        let kind = if task == Some(Task::Infer) { Kind::Infer } else { Kind::Train };
        Ok(ReadPlan { kind, model, framework, plan, notes })
    }

    fn placed(&self, mut request: PlacementRequest) -> Result<Value, Problem> {
        let Some(found) = content(&request.text, request.name.as_deref())?.take_placement() else {
            let none = "it places no roles on shared cards, as files of verl and OpenRLHF do";
            return Err(at_text(Failure::bad_input(none).hint("/plan/read reads a plan of one model").into()));
        };
        let subject = if request.has_model() { request.subject() } else { Ok(Subject::default()) };
        let base = request.wish().question(Task::Train, subject)?;
        Ok(placement::answer(&found, &base, self.reach, &self.settings)?.document())
    }

    fn read_real(&self, mut request: RealRequest) -> Result<real::Real, Problem> {
        let (bytes, name) = (request.bytes()?, request.name.take().unwrap_or_else(|| "the text".into()));
        let beside = match request.has_model() {
            false => None,
            true => {
                let subject = request.subject();
                Some(request.wish().prepare(request.kind, subject, self)?)
            }
        };
        let read = real::read(&bytes, &name, beside.as_ref());
        read.map_err(|failure| at_text(failure.into()))
    }

    fn write_plan(&self, mut request: WriteRequest) -> Result<WrittenPlan, Problem> {
        let subject = request.subject();
        let pasted = subject.as_ref().is_ok_and(|subject| subject.config.is_some());
        let prepared = request.wish().prepare(request.kind, subject, self)?;
        // A plan that cannot run is not written down as if it could.
        let answer = prepared.answer(Wanted::default())?;
        let report = || render::report::page(&answer.report, &[]);
        let file = || {
            let model = (!pasted).then(|| ("model".to_owned(), Value::String(prepared.found.name.clone())));
            let framework =
                prepared.request.framework.clone().map(|name| ("framework".to_owned(), Value::String(name)));
            let task = (request.kind == Task::Infer).then(|| ("task".to_owned(), Value::String("infer".into())));
            let stated = prepared.request.stated.as_object().cloned().unwrap_or_default();
            Value::Object(model.into_iter().chain(framework).chain(task).chain(stated).collect())
        };
        let (ending, media_type, text) = match request.form {
            Form::Json => ("json", "application/json", format!("{:#}\n", file())),
            Form::Yaml => ("yaml", "application/yaml", written::yaml(&file())),
            Form::Toml => ("toml", "application/toml", written::toml(&file())?),
            Form::Command => {
                let model = if pasted { "config.json" } else { prepared.found.name.as_str() };
                let task = if request.kind == Task::Train { "train" } else { "infer" };
                ("sh", "text/x-shellscript", written::command(task, model, &spell::command(&prepared.request)))
            }
            Form::Markdown => ("md", "text/markdown", report().markdown()),
            Form::Html => ("html", "text/html", report().html()),
            Form::Csv => ("csv", "text/csv", report().csv()),
            Form::Svg => ("svg", "image/svg+xml", render::svg::timeline(&answer.report)),
        };
        Ok(WrittenPlan { name: format!("plan.{ending}"), media_type, text })
    }
}
