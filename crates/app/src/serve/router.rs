//! Which address leads where.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;

use super::document::Document;
use super::handlers::{estimates, lists};
use super::problem::Problem;
use super::{Service, assets};
use crate::cli::list::{What, listed};

/// Every address.
pub(crate) fn router(service: Arc<Service>) -> Router {
    let list = |what: What| {
        get(
            move |State(service): State<Arc<Service>>| async move { Document::of(&listed(what, None, &service.context)) },
        )
    };
    let api = Router::new()
        .route("/train", post(estimates::train))
        .route("/validate", post(estimates::validate))
        .route("/models", get(lists::models))
        .route("/gpus", list(What::Gpus))
        .route("/optimizers", list(What::Optimizers))
        .route("/engines", list(What::Engines))
        .route("/frameworks", list(What::Frameworks))
        .route("/presets", list(What::Presets))
        .route("/dtypes", list(What::Dtypes))
        .route("/health", get(async || Document::of(&json!({"status": "ok"}))))
        .route("/version", get(async || Document::of(&json!({"version": env!("CARGO_PKG_VERSION")}))));
    Router::new().nest("/api/v1", api).fallback(asset).with_state(service)
}

/// A file of the page.
async fn asset(uri: Uri) -> Response {
    match assets::find(uri.path()) {
        Some(asset) => ([(header::CONTENT_TYPE, asset.media_type)], asset.content).into_response(),
        None => Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path())).into_response(),
    }
}
