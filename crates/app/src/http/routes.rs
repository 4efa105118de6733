//! Which address leads where.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};

use super::Service;
use super::document::Document;
use super::handlers::{about, estimates, lists, plans};
use crate::ask::lists::{What, listed, settings};

/// Every address below `/api/v1`.
pub(crate) fn routes() -> Router<Arc<Service>> {
    let list = |what: What| {
        get(
            move |State(service): State<Arc<Service>>| async move { Document::of(&listed(what, None, &service.settings)) },
        )
    };
    Router::new()
        .route("/train", post(estimates::train))
        .route("/infer", post(estimates::infer))
        .route("/events", post(estimates::events))
        .route("/inspect", post(estimates::inspect))
        .route("/compare", post(estimates::compare))
        .route("/validate", post(estimates::validate))
        .route("/suggest", post(estimates::suggest))
        .route("/heat", post(estimates::heat))
        .route("/real", post(plans::real))
        .route("/plan", post(estimates::plans))
        .route("/placement", post(plans::placement))
        .route("/plan/read", post(plans::read))
        .route("/plan/write", post(plans::write))
        .route("/models", get(lists::models))
        .route("/gpus", list(What::Gpus))
        .route("/optimizers", list(What::Optimizers))
        .route("/engines", list(What::Engines))
        .route("/frameworks", list(What::Frameworks))
        .route("/presets", list(What::Presets))
        .route("/dtypes", list(What::Dtypes))
        .route("/settings", get(async || Document::of(&settings())))
        .route("/health", get(about::health))
        .route("/version", get(about::version))
        .route("/schema/train", get(about::train_schema))
        .route("/schema/infer", get(about::infer_schema))
        .route("/openapi.json", get(about::openapi))
}
