//! The description of the API: OpenAPI 3.1, its schemas from the types that are read and written.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};
use vramcast_core::plan::{InferPlan, TrainPlan};
use vramcast_core::report::Report;
use vramcast_core::report::events::Events;

use super::body::{
    CompareRequest, EventsRequest, InferRequest, InspectRequest, PlacementRequest, PlanRequest, PlansRequest,
    ReadRequest, RealRequest, TrainRequest, WriteRequest,
};
use super::handlers::estimates::{Suggestions, Validation};
use super::handlers::lists::CatalogueModel;
use super::handlers::plans::{ReadPlan, WrittenPlan};
use super::problem::Problem;
use crate::ask::heat::Heat;
use crate::ask::inspect::Inspection;

/// A launch line with two roles.
const PLACED: &str = "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B --reward_pretrain \
    Qwen/Qwen2.5-0.5B --actor_num_gpus_per_node 8 --vllm_num_engines 8 --colocate_all_models --zero_stage 3";

/// A call with a body.
struct Call {
    path: &'static str,
    summary: &'static str,
    topic: &'static str,
    request: Schema,
    response: Value,
    example: Value,
}

/// The document.
pub(crate) fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut schemas = settings.into_generator();
    let mut paths = Map::new();
    for call in calls(&mut schemas) {
        let body = json!({"required": true, "content": {"application/json": {
            "schema": call.request, "example": call.example,
        }}});
        let mut answers = answers(&call.response);
        for status in ["400", "408", "413", "415", "422", "429", "502", "503"] {
            answers.insert(status.into(), json!({"$ref": "#/components/responses/Problem"}));
        }
        let operation = json!({
            "summary": call.summary, "tags": [call.topic], "operationId": operation_id(call.path),
            "requestBody": body, "responses": answers,
        });
        paths.insert(format!("/api/v1{}", call.path), json!({"post": operation}));
    }
    for (path, summary, topic, response) in lists(&mut schemas) {
        let mut answers = answers(&response);
        answers.insert("429".into(), json!({"$ref": "#/components/responses/Problem"}));
        let mut operation = json!({"summary": summary, "tags": [topic], "operationId": operation_id(path)});
        if path == "/models" {
            for status in ["422", "503"] {
                answers.insert(status.into(), json!({"$ref": "#/components/responses/Problem"}));
            }
            let text = json!({"type": "string", "maxLength": 200});
            operation["parameters"] = json!([
                {"name": "search", "in": "query", "schema": text,
                 "description": "only models whose id, short names or family hold all of these words"},
                {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10000},
                 "description": "at most so many"},
            ]);
        }
        operation["responses"] = Value::Object(answers);
        paths.insert(format!("/api/v1{path}"), json!({"get": operation}));
    }
    let problem = schemas.subschema_for::<Problem>();
    let mut definitions = schemas.take_definitions(true);
    allow_names_of_cards(&mut definitions);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "vramcast",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "How much GPU memory a job needs, and what to change if it does not fit.",
            "description": "Answers are the documents that the commands print with --json. All sizes are bytes. A model \
                is exactly one of `model` (an id or short name of the catalogue) and `config` (a config.json). A plan \
                needs no key: what it leaves out has a default.",
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": definitions,
            "responses": {"Problem": {
                "description": "What is wrong, where, and how to mend it (RFC 9457).",
                "content": {"application/problem+json": {"schema": problem}},
            }},
        },
    })
}

fn answers(response: &Value) -> Map<String, Value> {
    let ok = json!({"description": "The answer.", "content": {"application/json": {"schema": response}}});
    let refused = ["403", "421"].map(|status| (status.to_owned(), json!({"$ref": "#/components/responses/Problem"})));
    [("200".to_owned(), ok)].into_iter().chain(refused).collect()
}

fn operation_id(path: &str) -> String {
    path.trim_matches('/').replace(['/', '.'], "_")
}

fn of<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Value {
    schemas.subschema_for::<T>().to_value()
}

fn calls(schemas: &mut SchemaGenerator) -> Vec<Call> {
    let any = json!({"type": "object"});
    let model = json!({"model": "llama3-8b"});
    let plan = json!({"model": "llama3-8b", "plan": {"batch": {"batch_size": 2, "seq_len": 2048}}});
    let call = |path, summary, topic, request: Schema, response: Value, example: &Value| Call {
        path,
        summary,
        topic,
        request,
        response,
        example: example.clone(),
    };
    let report = of::<Report>(schemas);
    vec![
        call(
            "/train",
            "Peak memory of training",
            "estimates",
            schemas.subschema_for::<TrainRequest>(),
            report.clone(),
            &plan,
        ),
        call(
            "/infer",
            "Peak memory of generation, or a serving engine's budget",
            "estimates",
            schemas.subschema_for::<InferRequest>(),
            report.clone(),
            &json!({"model": "llama3-8b", "plan": {"new_tokens": 64}}),
        ),
        call(
            "/events",
            "What lives when: a run event by event, or a window of it",
            "estimates",
            schemas.subschema_for::<EventsRequest>(),
            of::<Events>(schemas),
            &json!({"model": "gpt2", "window": [0, 500]}),
        ),
        call(
            "/inspect",
            "What a model consists of",
            "estimates",
            schemas.subschema_for::<InspectRequest>(),
            of::<Inspection>(schemas),
            &model,
        ),
        call(
            "/compare",
            "Published formulas beside the simulation",
            "estimates",
            schemas.subschema_for::<CompareRequest>(),
            any,
            &plan,
        ),
        call(
            "/validate",
            "What is wrong with a plan",
            "plans",
            schemas.subschema_for::<PlanRequest>(),
            of::<Validation>(schemas),
            &plan,
        ),
        call(
            "/suggest",
            "Single changes that would make a plan fit",
            "plans",
            schemas.subschema_for::<PlanRequest>(),
            of::<Suggestions>(schemas),
            &plan,
        ),
        call(
            "/heat",
            "A serving engine over cards and formats of the weights, contexts and sequences at once",
            "estimates",
            schemas.subschema_for::<PlanRequest>(),
            of::<Heat>(schemas),
            &json!({"model": "llama3-8b", "kind": "infer", "engine": "vllm", "gpu": "RTX-4090"}),
        ),
        call(
            "/real",
            "What a real run left behind, beside the prediction: a snapshot, a profile, a rehearsal, a measured row, a message",
            "plans",
            schemas.subschema_for::<RealRequest>(),
            json!({"type": "object"}),
            &json!({"text": "CUDA out of memory. Tried to allocate 2.00 GiB.", "model": "gpt2"}),
        ),
        call(
            "/plan",
            "Plans that fit, memory against cost: what is given stays, the rest is looked for",
            "plans",
            schemas.subschema_for::<PlansRequest>(),
            of::<vramcast_core::planner::frontier::Plans>(schemas),
            &json!({"model": "gpt2", "gpu": "T4", "plan": {"batch": {"batch_size": 16}}}),
        ),
        call(
            "/placement",
            "Roles on shared cards, from a file of verl or OpenRLHF: every card, role and phase",
            "estimates",
            schemas.subschema_for::<PlacementRequest>(),
            json!({"type": "object"}),
            &json!({"text": PLACED, "name": "run.sh", "gpu": "a100-80gb"}),
        ),
        call(
            "/plan/read",
            "A plan file's text as a plan",
            "plans",
            schemas.subschema_for::<ReadRequest>(),
            of::<ReadPlan>(schemas),
            &json!({"text": "model: llama3-8b\nbatch:\n  batch_size: 2\n", "name": "plan.yaml"}),
        ),
        call(
            "/plan/write",
            "A plan as a file, a command line or a report",
            "plans",
            schemas.subschema_for::<WriteRequest>(),
            of::<WrittenPlan>(schemas),
            &json!({"model": "llama3-8b", "kind": "train", "form": "yaml", "plan": {"clip": true}}),
        ),
    ]
}

fn lists(schemas: &mut SchemaGenerator) -> Vec<(&'static str, &'static str, &'static str, Value)> {
    let rows = json!({"type": "object", "required": ["schema", "rows"], "properties": {
        "schema": {"type": "integer"}, "rows": {"type": "array", "items": {"type": "object"}},
    }});
    let any = json!({"type": "object"});
    let models = json!({"type": "array", "items": of::<CatalogueModel>(schemas)});
    // Named so that readers find them among the schemas.
    schemas.subschema_for::<TrainPlan>();
    schemas.subschema_for::<InferPlan>();
    vec![
        ("/models", "Models of the catalogue", "lists", models),
        ("/gpus", "Cards", "lists", rows.clone()),
        ("/optimizers", "Optimizers", "lists", rows.clone()),
        ("/engines", "Engines that spread a training run or serve a model", "lists", rows.clone()),
        ("/frameworks", "Training frameworks and their defaults", "lists", rows.clone()),
        ("/presets", "Jobs that are built in", "lists", rows.clone()),
        ("/dtypes", "Element and storage formats", "lists", rows),
        ("/settings", "Every setting: its flag, its place in a plan, who honours it", "lists", any.clone()),
        ("/schema/train", "JSON schema of training plans", "about", any.clone()),
        ("/schema/infer", "JSON schema of generation plans", "about", any.clone()),
        ("/health", "Whether the server works", "about", any.clone()),
        ("/version", "The version", "about", any.clone()),
        ("/openapi.json", "This document", "about", any),
    ]
}

/// In a request a card is also known by its name.
fn allow_names_of_cards(definitions: &mut Map<String, Value>) {
    for plan in ["TrainPlan", "InferPlan", "ServePlan"] {
        let Some(gpu) = definitions.get_mut(plan).and_then(|schema| schema.pointer_mut("/properties/gpu")) else {
            continue;
        };
        let card = gpu.take();
        *gpu = json!({"description": "The card: its name, or all of it.", "anyOf": [{"type": "string"}, card]});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reference leads somewhere, and every route is described.
    #[test]
    fn the_document_is_whole() {
        let document = document();
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
        let router = include_str!("routes.rs");
        for route in router.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
            let known = document["paths"].get(format!("/api/v1{route}")).is_some();
            assert!(known, "{route} is not described");
        }
        assert!(document.pointer("/components/schemas/TrainPlan/properties/batch").is_some());
    }
}
