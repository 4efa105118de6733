//! What vramcast knows.

use std::sync::OnceLock;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vramcast_core::model::Model;
use vramcast_core::source::catalogue;

use super::Shared;
use crate::http::document::Document;
use crate::http::problem::Problem;

/// A model of the catalogue.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct CatalogueModel {
    /// Its id.
    id: String,
    /// The family that reads its config.
    family: String,
    /// The config's `model_type`.
    model_type: String,
    /// Parameters, tied ones once; absent when its config cannot be read.
    parameters: Option<u64>,
    /// Other names for it.
    short_names: Vec<String>,
}

/// Which models.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelQuery {
    /// Only those whose id, short names or family hold all of these words.
    #[serde(default)]
    search: String,
    /// At most so many.
    limit: Option<usize>,
}

/// `GET /models`.
pub(crate) async fn models(
    State(service): Shared,
    query: Result<Query<ModelQuery>, QueryRejection>,
) -> Result<Document, Problem> {
    let sensible = |query: &ModelQuery| query.search.chars().count() <= 200 && query.limit.is_none_or(|n| n <= 10_000);
    let Some(query) = query.ok().map(|Query(query)| query).filter(sensible) else {
        let detail = "search is up to 200 letters, limit a number up to 10000; there is nothing else to ask";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail));
    };
    let all = service.room.aside(catalogue_models).await?;
    let words: Vec<String> = query.search.split_whitespace().map(str::to_lowercase).collect();
    let holds = |model: &&CatalogueModel| {
        let text = format!("{} {} {}", model.id, model.family, model.short_names.join(" ")).to_lowercase();
        words.iter().all(|word| text.contains(word))
    };
    let found: Vec<&CatalogueModel> = all.iter().filter(holds).take(query.limit.unwrap_or(usize::MAX)).collect();
    Ok(Document::of(&found))
}

/// Every model with its size; counting takes a moment, so it happens once.
fn catalogue_models() -> &'static [CatalogueModel] {
    static MODELS: OnceLock<Vec<CatalogueModel>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let described = |entry: catalogue::Entry| {
            let short = catalogue::aliases().iter().filter(|(_, id)| **id == entry.id);
            let short_names = short.map(|(name, _)| name.clone()).collect();
            let model_type = entry.config["model_type"].as_str().unwrap_or_default().to_owned();
            let model = Model::new(entry.config, entry.auto_class.as_deref()).ok();
            CatalogueModel {
                id: entry.id,
                family: model.as_ref().map_or("unknown", |model| model.family().name).to_owned(),
                model_type,
                parameters: model.and_then(|model| model.inventory().ok()).map(|inventory| inventory.total()),
                short_names,
            }
        };
        catalogue::entries().map(described).collect()
    })
}
