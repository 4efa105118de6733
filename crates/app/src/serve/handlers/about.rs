//! The server about itself.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use vramcast_core::plan::{InferPlan, TrainPlan};

use super::Shared;
use crate::serve::document::Document;
use crate::serve::openapi;

/// `GET /health`.
pub(crate) async fn health(State(service): Shared) -> Document {
    let (running, waiting) = service.pool.load();
    Document::of(&json!({"status": "ok", "running": running, "waiting": waiting}))
}

/// `GET /version`.
pub(crate) async fn version() -> Document {
    Document::of(&json!({"name": "vramcast", "version": env!("CARGO_PKG_VERSION"), "api": 1}))
}

/// `GET /schema/train`.
pub(crate) async fn train_schema() -> Document {
    Document::of(&schemars::schema_for!(TrainPlan))
}

/// `GET /schema/infer`.
pub(crate) async fn infer_schema() -> Document {
    Document::of(&schemars::schema_for!(InferPlan))
}

/// `GET /openapi.json`.
pub(crate) async fn openapi() -> Document {
    Document::of(&openapi::document())
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(service): Shared) -> Response {
    let text = service.metrics.text(&service.pool);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
