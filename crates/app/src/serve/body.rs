//! What a request may hold, and how it is read.

use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::problem::Problem;
use crate::cli::Failure;
use crate::cli::model::Found;
use crate::estimate::source::{self, Reach};

/// A JSON body, read into a value.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("application/json") {
            let detail = format!("the body is {kind:?}, not application/json");
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
                .hint("send the header content-type: application/json"));
        }
        let bytes = axum::body::Bytes::from_request(request, state).await.map_err(|rejection| {
            let status = rejection.status();
            Problem::new(status, rejection.body_text())
        })?;
        let mut reader = serde_json::Deserializer::from_slice(&bytes);
        let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            let field = crate::estimate::start::pointer(error.path());
            let problem = error.into_inner();
            if problem.is_data() {
                Problem::new(StatusCode::UNPROCESSABLE_ENTITY, problem.to_string()).at(field)
            } else {
                Problem::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {problem}"))
            }
        })?;
        reader
            .end()
            .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {error}")))?;
        Ok(Self(value))
    }
}

/// Which model: exactly one of a name and a config.
#[derive(Debug, Clone, Default)]
pub(crate) struct Subject {
    model: Option<String>,
    config: Option<Map<String, Value>>,
    auto_class: Option<String>,
}

impl Subject {
    /// Finds the model.
    pub(crate) fn find(self, reach: Reach, headers: bool) -> Result<Found, Problem> {
        let missing = |detail: &str| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail).at("/model");
        let auto_class = self.auto_class.as_deref();
        let found: Result<Found, Failure> = match (self.model, self.config) {
            (Some(name), None) => reach.find(&name, auto_class, headers),
            (None, Some(config)) => source::pasted(Value::Object(config), auto_class),
            (None, None) => return Err(missing("give a model by its name, or a config")),
            (Some(_), Some(_)) => return Err(missing("give a model or a config, not both")),
        };
        Ok(found?)
    }
}

/// A training run to be estimated.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainRequest {
    /// A model of the catalogue: its id or a short name.
    model: Option<String>,
    /// A model's config.json.
    config: Option<Map<String, Value>>,
    /// The transformers class that loads it.
    auto_class: Option<String>,
    /// The plan, over the defaults.
    #[serde(default)]
    pub(crate) plan: Map<String, Value>,
    /// Start from a framework's defaults instead of ours.
    pub(crate) framework: Option<String>,
    /// The card, by name; over the plan's.
    pub(crate) gpu: Option<String>,
    /// Whether to judge every known card.
    #[serde(default)]
    pub(crate) gpus_all: bool,
    /// Whether to look for changes when it does not fit, which takes many estimates.
    #[serde(default)]
    pub(crate) suggestions: bool,
}

impl TrainRequest {
    /// Which model.
    pub(crate) fn subject(&mut self) -> Subject {
        Subject { model: self.model.take(), config: self.config.take(), auto_class: self.auto_class.take() }
    }
}

/// A plan to be checked.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ValidateRequest {
    /// What the plan is for.
    pub(crate) kind: Kind,
    /// A model of the catalogue: its id or a short name.
    model: Option<String>,
    /// A model's config.json.
    config: Option<Map<String, Value>>,
    /// The transformers class that loads it.
    auto_class: Option<String>,
    /// The plan, over the defaults.
    #[serde(default)]
    pub(crate) plan: Map<String, Value>,
    /// Start from a framework's defaults instead of ours.
    pub(crate) framework: Option<String>,
    /// The card, by name; over the plan's.
    pub(crate) gpu: Option<String>,
}

impl ValidateRequest {
    /// Which model.
    pub(crate) fn subject(&mut self) -> Subject {
        Subject { model: self.model.take(), config: self.config.take(), auto_class: self.auto_class.take() }
    }
}

/// What a plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Training.
    Train,
    /// Generation.
    Infer,
}
