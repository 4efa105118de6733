//! Estimates of a model and a plan.

use std::sync::Arc;

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use vramcast_core::lens::Question;
use vramcast_core::memory::simulation;
use vramcast_core::plan::{InferPlan, Situation, TrainPlan};
use vramcast_core::planner::suggest::{self, Suggestion};
use vramcast_core::report::Totals;

use super::Shared;
use crate::cli::engines::{self, EngineName};
use crate::cli::model::Found;
use crate::cli::{Failure, Place, compare, inspect};
use crate::estimate::run::{self, Estimate, Options};
use crate::estimate::start::{self, File, Start};
use crate::serve::Service;
use crate::serve::body::{CompareRequest, InferRequest, InspectRequest, Json, Kind, PlanRequest, TrainRequest, Wish};
use crate::serve::document::Document;
use crate::serve::problem::Problem;

type Answer = Result<Document, Problem>;

/// `POST /train`.
pub(crate) async fn train(State(service): Shared, Json(mut request): Json<TrainRequest>) -> Answer {
    service
        .answer(move |service| {
            let found = request.subject().find(service.reach, false)?;
            let wish = Wish { plan: request.plan, framework: request.framework, gpu: request.gpu };
            let (plan, start) = service.train_plan(&found, wish)?;
            let wanted = (request.suggestions, request.gpus_all);
            Ok(service.estimate(wanted, |options| run::train(&found, plan, start, options))?.document()?)
        })
        .await
}

/// `POST /infer`.
pub(crate) async fn infer(State(service): Shared, Json(mut request): Json<InferRequest>) -> Answer {
    service
        .answer(move |service| {
            let found = request.subject().find(service.reach, false)?;
            request.engine_options.check(request.engine)?;
            if request.engine != EngineName::Hf {
                return service.serving(&found, request);
            }
            let plan = service.infer_plan(&found, Wish { plan: request.plan, framework: None, gpu: request.gpu })?;
            let wanted = (request.suggestions, request.gpus_all);
            Ok(service.estimate(wanted, |options| run::generate(&found, plan, Vec::new(), options))?.document()?)
        })
        .await
}

/// `POST /inspect`.
pub(crate) async fn inspect(State(service): Shared, Json(mut request): Json<InspectRequest>) -> Answer {
    service
        .answer(move |service| {
            let found = request.subject().find(service.reach, true)?;
            let wanted = inspect::Wanted { tensors: request.tensors, ..inspect::Wanted::default() };
            Ok(inspect::inspect(&found, &wanted)?)
        })
        .await
}

/// `POST /compare`.
pub(crate) async fn compare(State(service): Shared, Json(mut request): Json<CompareRequest>) -> Answer {
    service
        .answer(move |service| {
            let found = request.subject().find(service.reach, false)?;
            let wish = Wish { plan: request.plan, framework: request.framework, gpu: request.gpu };
            let (plan, start) = service.train_plan(&found, wish)?;
            let question = Question::of_train(&plan);
            Ok(compare::beside_the_simulation(&found, &plan, &question, start.notes)?.document())
        })
        .await
}

/// What is wrong with a plan.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Validation {
    /// Nothing: the plan can run.
    problems: Vec<Fault>,
}

/// One thing that is wrong.
#[derive(Debug, Serialize, JsonSchema)]
struct Fault {
    /// Where in the body: a JSON pointer.
    field: Option<String>,
    /// What is wrong.
    message: String,
    /// How to mend it.
    hint: Option<String>,
}

/// `POST /validate`: the simulation itself is the judge of what cannot run.
pub(crate) async fn validate(State(service): Shared, Json(mut request): Json<PlanRequest>) -> Answer {
    service
        .answer(move |service| {
            let checked = || -> Result<(), Problem> {
                let found = request.subject().find(service.reach, false)?;
                let model = found.require_model()?;
                let wish = Wish { plan: request.plan, framework: request.framework, gpu: request.gpu };
                match request.kind {
                    Kind::Train => {
                        let (plan, _) = service.train_plan(&found, wish)?;
                        simulation::train(model, &plan).map_err(Failure::from)?;
                    }
                    Kind::Infer => {
                        let plan = service.infer_plan(&found, wish)?;
                        simulation::infer(model, &plan).map_err(Failure::from)?;
                    }
                }
                Ok(())
            };
            let fault = |problem: Problem| Fault { field: problem.field, message: problem.detail, hint: problem.hint };
            Ok(Validation { problems: checked().err().into_iter().map(fault).collect() })
        })
        .await
}

/// Changes that would make a plan fit.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Suggestions {
    /// Whether it fits as it is; then nothing is suggested.
    fits: bool,
    /// Single changes, cheapest first.
    suggestions: Vec<Change>,
}

/// One change.
#[derive(Debug, Serialize, JsonSchema)]
struct Change {
    /// The flags that make it.
    text: String,
    /// What it costs, in words.
    cost: &'static str,
    /// Bytes of the process that it saves.
    saves: u64,
    /// The peaks it then has.
    totals: Totals,
    /// Whether it then fits.
    fits: bool,
    /// What it changes in the plan: a JSON merge patch (RFC 7396).
    changes: Value,
}

/// `POST /suggest`.
pub(crate) async fn suggest(State(service): Shared, Json(mut request): Json<PlanRequest>) -> Answer {
    service
        .answer(move |service| {
            let found = request.subject().find(service.reach, false)?;
            let model = found.require_model()?;
            let wish = Wish { plan: request.plan, framework: request.framework, gpu: request.gpu };
            let (fits, found) = match request.kind {
                Kind::Train => {
                    let (plan, _) = service.train_plan(&found, wish)?;
                    let now = simulation::train(model, &plan).map_err(Failure::from)?.process_bytes();
                    let fits = now <= plan.gpu.memory;
                    let suggest = || suggest::for_training(model, &plan, plan.gpu.memory, now, &service.cards);
                    (fits, if fits { Vec::new() } else { suggest() })
                }
                Kind::Infer => {
                    let plan = service.infer_plan(&found, wish)?;
                    let now = simulation::infer(model, &plan).map_err(Failure::from)?.process_bytes();
                    let fits = now <= plan.gpu.memory;
                    let suggest = || suggest::for_generation(model, &plan, plan.gpu.memory, now, &service.cards);
                    (fits, if fits { Vec::new() } else { suggest() })
                }
            };
            let change = |mut suggestion: Suggestion| Change {
                changes: service.with_name_of_card(suggestion.changes.take()),
                text: suggestion.change,
                cost: suggestion.cost.words(),
                saves: suggestion.saved,
                totals: suggestion.totals,
                fits: suggestion.fits,
            };
            Ok(Suggestions { fits, suggestions: found.into_iter().map(change).collect() })
        })
        .await
}

impl Service {
    /// Computes an answer where there is room for it.
    pub(super) async fn answer<T: Serialize>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, Problem> + Send + 'static,
    ) -> Answer {
        let service = Arc::clone(self);
        self.pool.run(move || Ok(Document::of(&work(&service)?))).await
    }

    /// An estimate with the cards of this server; whether suggestions and all cards are wanted.
    pub(super) fn estimate(
        &self,
        (suggest, all_cards): (bool, bool),
        run: impl FnOnce(&Options) -> Result<Estimate, Failure>,
    ) -> Result<Estimate, Failure> {
        run(&Options { kept: &|_| Ok(0), suggest, all_cards, cards: &|| Ok(self.cards.clone()) })
    }

    /// The plan of a request: a framework's defaults, the plan as its file would say it, the card.
    pub(super) fn train_plan(&self, found: &Found, wish: Wish) -> Result<(TrainPlan, Start), Failure> {
        let file = File { name: "plan".into(), value: Value::Object(wish.plan) };
        let framework = wish.framework.as_deref();
        let mut start = Start::read(Some(file), framework, Situation::Full, || Ok(self.cards.clone()))?;
        let mut plan = start.plan.clone();
        plan.batch.mask |= plan.batch.padded;
        if let Some(name) = &wish.gpu {
            plan.gpu = self.cards.find(name)?;
        }
        start.settle(&mut plan, found, false)?;
        Ok((plan, start))
    }

    /// The same for generation.
    pub(super) fn infer_plan(&self, found: &Found, wish: Wish) -> Result<InferPlan, Failure> {
        let file = File { name: "plan".into(), value: Value::Object(wish.plan) };
        let (mut plan, _) = start::generation(Some(file), found.stored_dtype(), || Ok(self.cards.clone()))?;
        if let Some(name) = &wish.gpu {
            plan.gpu = self.cards.find(name)?;
        }
        plan.check()?;
        Ok(plan)
    }

    /// A change of the card by its name.
    fn with_name_of_card(&self, mut changes: Value) -> Value {
        let name = changes.pointer("/gpu/name").and_then(Value::as_str);
        if let Some(card) = name.and_then(|name| self.cards.find(name).ok()) {
            changes["gpu"] = Value::String(card.name);
        }
        changes
    }

    /// A serving engine, which has a plan of its own: of the request's only the card counts, and that is said.
    fn serving(&self, found: &Found, request: InferRequest) -> Result<Value, Problem> {
        let ignored: Vec<&String> = request.plan.keys().filter(|key| *key != "gpu").collect();
        let notes: Vec<String> =
            ignored.iter().map(|key| format!("plan: {key} has no effect on {}", request.engine.title())).collect();
        let card = request
            .plan
            .get("gpu")
            .cloned()
            .map(|gpu| Wish { plan: [("gpu".to_owned(), gpu)].into_iter().collect(), ..Wish::default() });
        let wish = Wish { gpu: request.gpu, ..card.unwrap_or_default() };
        let gpu = self.infer_plan(found, wish)?.gpu;
        let asked = engines::Request {
            engine: request.engine,
            name: &found.name,
            model: found.require_model()?,
            arguments: &request.engine_options,
            reach: self.reach,
        };
        let served = asked.serve(&gpu).map_err(|failure| match failure.place() {
            None => failure.at(Place::Request("/engine_options".into())),
            Some(_) => failure,
        })?;
        let mut document = served.document(&found.name, &gpu);
        if !notes.is_empty() {
            document["notes"] = json!(notes);
        }
        Ok(document)
    }
}
