//! What a request may hold, and how it is read.

use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use vramcast_core::ask::resolve::reworded;
use vramcast_core::ask::{Asked, Given, Task};
use vramcast_core::model::Assumption;
use vramcast_core::plan::{InferPlan, ServePlan, TrainPlan};
use vramcast_core::report::Level;
use vramcast_core::typed::{self, Misread};

use super::problem::Problem;
use crate::ask::found::Subject;
use crate::ask::question::{Prepared, Question};
use crate::http::Service;

/// A body, if it comes soon.
#[cfg(not(target_family = "wasm"))]
async fn in_time<T>(body: impl Future<Output = T>) -> Result<T, Problem> {
    const LONGEST: std::time::Duration = std::time::Duration::from_secs(10);
    let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come");
    tokio::time::timeout(LONGEST, body).await.map_err(late)
}

/// In a page all of it is there.
#[cfg(target_family = "wasm")]
async fn in_time<T>(body: impl Future<Output = T>) -> Result<T, Problem> {
    Ok(body.await)
}

/// A JSON body, read into a value.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> Json<T> {
    /// Reads what is there.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Problem> {
        typed::located(said(bytes)?).map(Self).map_err(misread)
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed::located(tree(request).await?).map(Self).map_err(misread)
    }
}

/// What a body says. Once for all kinds of requests: a page waits for every copy.
async fn tree(request: Request) -> Result<Value, Problem> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let detail = format!("the body is {kind:?}, not application/json");
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
            .hint("send the header content-type: application/json"));
    }
    let reading = axum::body::Bytes::from_request(request, &());
    let bytes = in_time(reading).await?.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large"),
        _ => Problem::new(StatusCode::BAD_REQUEST, "the body could not be read"),
    })?;
    said(&bytes)
}

/// The same of what is there.
fn said(bytes: &[u8]) -> Result<Value, Problem> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, format!("the body is not JSON: {error}")))?;
    // Said as it is, before a reader says it of a type.
    for (place, part) in [("", Some(&value)), ("/engine_options", value.get("engine_options"))] {
        if part.is_some_and(|part| !part.is_object()) {
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "it is not an object").at(place));
        }
    }
    Ok(value)
}

fn misread(misread: Misread) -> Problem {
    let field = pointer(&misread.place);
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, reworded(&misread.error.to_string())).at(field)
}

/// A path as a JSON pointer.
fn pointer(place: &[String]) -> String {
    place.iter().map(|key| format!("/{}", key.replace('~', "~0").replace('/', "~1"))).collect()
}

/// A request, as faults see it.
pub(crate) trait Body {
    /// Whether a setting stands in its plan: a card, an engine and what it is started with may stand beside it as well.
    fn plans(&self, setting: &str) -> bool;
}

/// What every request about a plan says.
#[derive(Debug, Default)]
pub(crate) struct Wish {
    /// The plan, over the defaults.
    pub(crate) plan: Map<String, Value>,
    /// A framework whose defaults to start from.
    pub(crate) framework: Option<String>,
    /// The card, by name.
    pub(crate) gpu: Option<String>,
    /// Who serves.
    pub(crate) engine: Option<String>,
    /// What the engine is started with.
    pub(crate) engine_options: Map<String, Value>,
}

impl Wish {
    /// The question about a model.
    pub(crate) fn question(self, task: Task, subject: Result<Subject, Problem>) -> Result<Question, Problem> {
        let mut named: Vec<(String, Given)> =
            self.engine_options.into_iter().map(|(name, value)| (name, Given::Value(value))).collect();
        for (name, text) in [("engine", self.engine), ("gpu", self.gpu)] {
            named.extend(text.map(|text| (name.to_owned(), Given::Text(text))));
        }
        let asked =
            Asked { task, framework: self.framework, trees: vec![Value::Object(self.plan)], named, ..Asked::default() };
        Ok(Question { subject: subject?, asked, ..Question::default() })
    }

    /// The question, ready to be answered.
    pub(crate) fn prepare(
        self,
        task: Task,
        subject: Result<Subject, Problem>,
        service: &Service,
    ) -> Result<Prepared, Problem> {
        Ok(self.question(task, subject)?.prepare(service.reach, &service.settings)?)
    }
}

/// Declares what a request holds beside a model, and which of it is the wish: serde cannot both flatten and refuse unknown keys.
macro_rules! request {
    ($(#[$about:meta])* $name:ident: $($wish:ident)* { $($(#[$field_about:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Deserialize, JsonSchema)]
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
            /// What it says about a plan.
            #[allow(clippy::needless_update, unused_mut, dead_code, reason = "some say all of it, some nothing")]
            pub(crate) fn wish(&mut self) -> Wish {
                Wish { $($wish: std::mem::take(&mut self.$wish),)* ..Wish::default() }
            }

            /// Which model: exactly one of a name and a config.
            pub(crate) fn subject(&mut self) -> Result<Subject, Problem> {
                let missing = |detail: &str| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail).at("/model");
                let (name, config) = (self.model.take(), self.config.take().map(Value::Object));
                match (&name, &config) {
                    (None, None) => Err(missing("give a model by its name, or a config")),
                    (Some(_), Some(_)) => Err(missing("give a model or a config, not both")),
                    _ => Ok(Subject { name, config, auto_class: self.auto_class.take(), ..Subject::default() }),
                }
            }

            /// Whether there is a model.
            #[allow(dead_code, reason = "most must have one")]
            pub(crate) fn has_model(&self) -> bool {
                self.model.is_some() || self.config.is_some()
            }
        }

        impl Body for $name {
            fn plans(&self, setting: &str) -> bool {
                let Wish { plan, engine_options, gpu, engine, .. } = self.clone().wish();
                let (beside, named) = match setting {
                    "gpu" => (gpu.is_some(), true),
                    "engine" => (engine.is_some(), true),
                    _ => (engine_options.contains_key(setting), false),
                };
                // What is missed is missed where the others stand.
                let missed = !named && !plan.is_empty() && engine_options.is_empty();
                !beside && (plan.contains_key(setting) || missed)
            }
        }
    };
}

/// The same for a plan of any kind.
macro_rules! plan_request {
    ($(#[$about:meta])* $name:ident { $($own:tt)* }) => {
        request! {
            $(#[$about])*
            $name: plan framework gpu engine engine_options {
                $($own)*
                /// What the plan is for.
                #[serde(default)]
                kind: Task,
                /// The plan, over the defaults.
                #[serde(default)]
                plan: Map<String, Value>,
                /// Start from a framework's defaults instead of ours.
                framework: Option<String>,
                /// The card, by name; over the plan's.
                gpu: Option<String>,
                /// Who serves, for inference.
                engine: Option<String>,
                /// What the engine is started with, as its flags are called.
                #[serde(default)]
                engine_options: Map<String, Value>,
            }
        }
    };
}

request! {
    /// A training run.
    TrainRequest: plan framework gpu {
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
        /// The least confidence that will do (guess, sources, measured): an answer of less is refused.
        require: Option<Level>,
        /// Find what fits instead: batch, seq-len, lora-rank, gpu, gpus or layers.
        solve: Option<String>,
    }
}

request! {
    /// A run of generation, or a serving engine.
    InferRequest: plan gpu engine engine_options {
        /// The plan of transformers' `generate`, over the defaults.
        #[serde(default)]
        #[schemars(with = "InferPlan")]
        plan: Map<String, Value>,
        /// Who serves: hf, vllm, sglang, tgi, tensorrt-llm, llama.cpp or ollama.
        engine: Option<String>,
        /// What the engine is started with, as its flags are called.
        #[serde(default)]
        #[schemars(with = "ServePlan")]
        engine_options: Map<String, Value>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
        /// Whether to judge every known card.
        #[serde(default)]
        gpus_all: bool,
        /// Whether to look for changes when it does not fit, which takes many estimates.
        #[serde(default)]
        suggestions: bool,
        /// The least confidence that will do (guess, sources, measured): an answer of less is refused.
        require: Option<Level>,
        /// Find what fits instead: batch, context, gpu, gpus, quantization, layers or share.
        solve: Option<String>,
    }
}

request! {
    /// A run, to be told event by event.
    EventsRequest: plan framework gpu {
        /// What the plan is for.
        #[serde(default)]
        kind: Task,
        /// The plan, over the defaults.
        #[serde(default)]
        plan: Map<String, Value>,
        /// Start from a framework's defaults instead of ours.
        framework: Option<String>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
        /// The first event and the one after the last; the whole run without.
        window: Option<[usize; 2]>,
    }
}

request! {
    /// A model to be looked into.
    InspectRequest: {
        /// Whether to list every tensor.
        #[serde(default)]
        tensors: bool,
        /// What to take a model for whose type is not known.
        #[serde(default)]
        assume: Option<Assumption>,
    }
}

request! {
    /// A training run for formulas and the simulation.
    CompareRequest: plan framework gpu {
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

plan_request! {
    /// A plan to be checked, or to be made to fit.
    PlanRequest {
    }
}

request! {
    /// What is fixed of a training run, for plans that fit.
    PlansRequest: plan framework gpu {
        /// What is fixed, over the defaults.
        #[serde(default)]
        plan: Map<String, Value>,
        /// Start from a framework's defaults instead of ours.
        framework: Option<String>,
        /// The card, by name; over the plan's.
        gpu: Option<String>,
        /// What must not change though the plan does not say it: full, arithmetic.
        #[serde(default)]
        keep: Vec<String>,
        /// What an hour of a card costs, by its name.
        prices: Option<Map<String, Value>>,
    }
}

plan_request! {
    /// A plan to be written down.
    WriteRequest {
        /// The form.
        form: Form,
    }
}

plan_request! {
    /// What a real run left behind, and the plan to put beside it; without a model there is none.
    RealRequest {
        /// A text: a message, a log, a profile, a rehearsal's document or a ledger's row.
        text: Option<String>,
        /// Or bytes in base64: a memory snapshot of torch.
        base64: Option<String>,
        /// The file's name.
        name: Option<String>,
    }
}

impl RealRequest {
    /// The bytes, of whichever form they have.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, Problem> {
        let wrong = |detail| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail).at("/text");
        match (&self.text, &self.base64) {
            (Some(text), None) => Ok(text.clone().into_bytes()),
            (None, Some(coded)) => decoded(coded).ok_or_else(|| wrong("this is not base64").at("/base64")),
            _ => Err(wrong("give a text or base64, one of them")),
        }
    }
}

/// Bytes of base64 with its padding (RFC 4648).
fn decoded(text: &str) -> Option<Vec<u8>> {
    let digit = |letter: u8| match letter {
        b'A'..=b'Z' => Some(letter - b'A'),
        b'a'..=b'z' => Some(letter - b'a' + 26),
        b'0'..=b'9' => Some(letter - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits = text.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let mut bits = 0u32;
        for at in 0..4 {
            bits = bits << 6 | u32::from(group.get(at).map_or(Some(0), |letter| digit(*letter))?);
        }
        let whole = match group.len() {
            1 => return None,
            digits => digits - 1,
        };
        bytes.extend_from_slice(&bits.to_be_bytes()[1..=whole]);
    }
    Some(bytes)
}

request! {
    /// The text of a run with several roles on shared cards; a model stands for every role's.
    PlacementRequest: plan gpu {
        /// The text: a file, script or launch line of verl or OpenRLHF.
        text: String,
        /// The file's name, whose ending says which form it has; without one all are tried.
        name: Option<String>,
        /// What every role's plan is to have besides.
        #[serde(default)]
        #[schemars(with = "TrainPlan")]
        plan: Map<String, Value>,
        /// The card, by name.
        gpu: Option<String>,
    }
}

/// A plan file's text.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadRequest {
    /// The text: a plan as JSON, TOML or YAML, or a file of another tool, a script, a Python program or a Modelfile.
    pub(crate) text: String,
    /// The file's name, whose ending says which form it has; without one all are tried.
    pub(crate) name: Option<String>,
}

impl Body for ReadRequest {
    fn plans(&self, _: &str) -> bool {
        false
    }
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
