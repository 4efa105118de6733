//! What a request may hold, and how it is read.

use std::time::Duration;

use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use vramcast_core::plan::{InferPlan, TrainPlan};

use super::problem::Problem;
use crate::cli::Failure;
use crate::cli::engines::{EngineArguments, EngineName};
use crate::cli::model::Found;
use crate::estimate::source::{self, Reach};

/// How long a body may take to come.
const LONGEST_UPLOAD: Duration = Duration::from_secs(10);

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
        let reading = axum::body::Bytes::from_request(request, state);
        let bytes = tokio::time::timeout(LONGEST_UPLOAD, reading)
            .await
            .map_err(|_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come"))?
            .map_err(|rejection| match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large"),
                _ => Problem::new(StatusCode::BAD_REQUEST, "the body could not be read"),
            })?;
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {error}")))?;
        // serde would take a list for an object, its values in order.
        for (place, part) in [("", Some(&value)), ("/engine_options", value.get("engine_options"))] {
            if part.is_some_and(|part| !part.is_object()) {
                let problem = Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "it is not an object");
                return Err(problem.at(place));
            }
        }
        let value = serde_path_to_error::deserialize(value).map_err(|error| {
            let field = crate::estimate::start::pointer(error.path());
            Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.into_inner().to_string()).at(field)
        })?;
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
    /// Whether a config was pasted.
    pub(crate) fn is_pasted(&self) -> bool {
        self.config.is_some()
    }

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

/// A plan as a request says it: what stands in a plan file, and what a command has flags for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wish {
    /// The plan, over the defaults.
    pub(crate) plan: Map<String, Value>,
    /// A framework whose defaults to start from.
    pub(crate) framework: Option<String>,
    /// The card, by name.
    pub(crate) gpu: Option<String>,
}

/// Declares what a request holds beside a model: serde cannot both flatten and refuse unknown keys.
macro_rules! request {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            /// A model of the catalogue: its id or a short name. Exactly one of `model` and `config`.
            model: Option<String>,
            /// A model's config.json.
            config: Option<Map<String, Value>>,
            /// The transformers class that loads it (AutoModelForCausalLM, …).
            auto_class: Option<String>,
            $($(#[$field_about])* pub(crate) $field: $kind,)*
        }

        impl $name {
            /// Which model.
            pub(crate) fn subject(&mut self) -> Subject {
                Subject { model: self.model.take(), config: self.config.take(), auto_class: self.auto_class.take() }
            }
        }
    };
}

request! {
    /// A training run.
    TrainRequest {
        /// The plan, over the defaults.
        #[serde(default)]
        #[schemars(with = "TrainPlan")]
        plan: Map<String, Value>,
        /// Start from a framework's defaults instead of ours.
        framework: Option<String>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
        /// Whether to judge every known card.
        #[serde(default)]
        gpus_all: bool,
        /// Whether to look for changes when it does not fit, which takes many estimates.
        #[serde(default)]
        suggestions: bool,
    }
}

request! {
    /// A run of generation, or a serving engine.
    InferRequest {
        /// The plan of transformers' `generate`, over the defaults.
        #[serde(default)]
        #[schemars(with = "InferPlan")]
        plan: Map<String, Value>,
        /// Who serves.
        #[serde(default)]
        engine: EngineName,
        /// What the engine is started with, as its flags are called.
        #[serde(default)]
        engine_options: EngineArguments,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
        /// Whether to judge every known card.
        #[serde(default)]
        gpus_all: bool,
        /// Whether to look for changes when it does not fit, which takes many estimates.
        #[serde(default)]
        suggestions: bool,
    }
}

request! {
    /// A model to be looked into.
    InspectRequest {
        /// Whether to list every tensor.
        #[serde(default)]
        tensors: bool,
    }
}

request! {
    /// A training run for formulas and the simulation.
    CompareRequest {
        /// The plan, over the defaults.
        #[serde(default)]
        #[schemars(with = "TrainPlan")]
        plan: Map<String, Value>,
        /// Start from a framework's defaults instead of ours.
        framework: Option<String>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
    }
}

request! {
    /// A plan to be checked, or to be made to fit.
    PlanRequest {
        /// What the plan is for.
        #[serde(default)]
        kind: Kind,
        /// The plan, over the defaults.
        #[serde(default)]
        plan: Map<String, Value>,
        /// Start from a framework's defaults instead of ours.
        framework: Option<String>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
    }
}

request! {
    /// A plan to be written down.
    WriteRequest {
        /// What the plan is for.
        #[serde(default)]
        kind: Kind,
        /// The form.
        form: Form,
        /// The plan, over the defaults.
        #[serde(default)]
        plan: Map<String, Value>,
        /// Start from a framework's defaults instead of ours.
        framework: Option<String>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
    }
}

/// A plan file's text.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadRequest {
    /// The text: a plan as JSON, TOML or YAML, or a file of axolotl, LLaMA-Factory, TRL or transformers' Trainer.
    pub(crate) text: String,
    /// The file's name, whose ending says which form it has; without one all are tried.
    pub(crate) name: Option<String>,
}

/// What a plan is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Training.
    #[default]
    Train,
    /// Generation.
    Infer,
}

/// How a plan or its report is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// The plan as JSON.
    Json,
    /// The plan as YAML.
    Yaml,
    /// The plan as TOML.
    Toml,
    /// The command line with the same answer.
    Command,
    /// The report as Markdown.
    Markdown,
    /// The report as a page.
    Html,
    /// The report as a table.
    Csv,
    /// The timeline as a picture.
    Svg,
}
