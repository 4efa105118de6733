//! The server about itself.

use axum::extract::State;
use serde_json::json;
use vramcast_core::plan::{InferPlan, TrainPlan};

use super::Shared;
use crate::http::document::Document;
use crate::http::openapi;

/// `GET /health`.
pub(crate) async fn health(State(service): Shared) -> Document {
    let (running, waiting) = service.room.load();
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
