//! Estimates of a model and a plan.

use std::fmt::Debug;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use vramcast_core::ask::{Task, Wanted};
use vramcast_core::lens::Question as Formula;
use vramcast_core::planner::solve::Unknown;
use vramcast_core::report::events;

use super::Shared;
use crate::ask::found::Subject;
use crate::ask::question::Prepared;
use crate::ask::{compare, engines, heat, inspect, plan, real::Change, solve};
use crate::http::Service;
use crate::http::body::{
    Body, CompareRequest, EventsRequest, InferRequest, InspectRequest, Json, PlanRequest, PlansRequest, TrainRequest,
};
use crate::http::document::Document;
use crate::http::problem::{Fault, Problem};

type Answer = Result<Document, Problem>;

/// `POST /train`.
pub(crate) async fn train(State(service): Shared, Json(request): Json<TrainRequest>) -> Answer {
    service
        .answer(request, |service, mut request| {
            let subject = request.subject();
            let (suggestions, all_cards, require) = (request.suggestions, request.gpus_all, request.require);
            let wanted = Wanted { suggestions, all_cards, require, ..Wanted::default() };
            let prepared = request.wish().prepare(Task::Train, subject, service)?;
            if let Some(name) = request.solve {
                let unknown = Unknown::find(&name).ok_or_else(|| unsolvable(&name, &Unknown::names()))?;
                return Ok(solve::train::solve(&prepared, unknown, wanted.kept)?.document);
            }
            Ok(prepared.answer(wanted)?.document())
        })
        .await
}

/// `POST /infer`.
pub(crate) async fn infer(State(service): Shared, Json(request): Json<InferRequest>) -> Answer {
    service
        .answer(request, |service, mut request| {
            let subject = request.subject();
            let wish = request.wish();
            let (suggestions, all_cards, require) = (request.suggestions, request.gpus_all, request.require);
            let wanted = Wanted { suggestions, all_cards, require, ..Wanted::default() };
            if wish.engine.as_deref() == Some("all") {
                let prepared = wish.question(Task::Infer, subject)?.to_each(service.reach, &service.settings)?;
                return Ok(engines::document(&engines::answers(&prepared, wanted)?));
            }
            let prepared = wish.prepare(Task::Infer, subject, service)?;
            if let Some(name) = request.solve {
                let known = solve::Wanted::NAMES;
                let wanted = solve::Wanted::find(&name).ok_or_else(|| unsolvable(&name, known))?;
                return Ok(solve::solve(&prepared, solve::Need { wanted, concurrency: None })?.document);
            }
            Ok(prepared.answer(wanted)?.document())
        })
        .await
}

fn unsolvable(name: &str, known: &str) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, format!("{name} is not {known}")).at("/solve")
}

/// `POST /events`.
pub(crate) async fn events(State(service): Shared, Json(request): Json<EventsRequest>) -> Answer {
    service
        .answer(request, |service, mut request| {
            if request.window.is_some_and(|[from, to]| from > to) {
                let backwards = "it ends before it begins";
                return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, backwards).at("/window"));
            }
            let subject = request.subject();
            let run = request.wish().prepare(request.kind, subject, service)?.simulate()?;
            let none = || Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "a serving engine's budget has no events");
            Ok(events::of(&run.ok_or_else(none)?, request.window))
        })
        .await
}

/// `POST /inspect`.
pub(crate) async fn inspect(State(service): Shared, Json(request): Json<InspectRequest>) -> Answer {
    service
        .answer(request, |service, mut request| {
            let subject = Subject { assume: request.assume, ..request.subject()? };
            let found = subject.find(service.reach, true)?;
            let wanted = inspect::Wanted { tensors: request.tensors, ..inspect::Wanted::default() };
            Ok(inspect::inspect(&found, &wanted)?)
        })
        .await
}

/// `POST /compare`.
pub(crate) async fn compare(State(service): Shared, Json(request): Json<CompareRequest>) -> Answer {
    service
        .answer(request, |service, mut request| {
            let subject = request.subject();
            let prepared = request.wish().prepare(Task::Train, subject, service)?;
            let (plan, notes) = prepared.train(true)?;
            let formula = Formula::of_train(&plan);
            Ok(compare::beside_the_simulation(&prepared.found, &plan, &formula, notes)?.document())
        })
        .await
}

/// What is wrong with a plan.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Validation {
    /// Nothing: the plan can run.
    problems: Vec<Fault>,
}

/// `POST /validate`: the answer itself is the judge of what cannot run.
pub(crate) async fn validate(State(service): Shared, Json(request): Json<PlanRequest>) -> Answer {
    service
        .answer(request, |service, request| {
            let checked = || -> Result<(), Problem> {
                service.prepare(request.clone())?.answer(Wanted::default())?;
                Ok(())
            };
            let found = checked().err().map(|problem| problem.within(&request).all());
            Ok(Validation { problems: found.unwrap_or_default().iter().map(Fault::cut).collect() })
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

/// `POST /plan`.
pub(crate) async fn plans(State(service): Shared, Json(request): Json<PlansRequest>) -> Answer {
    service
        .answer(request, |service, mut request| {
            let subject = request.subject();
            let prepared = request.wish().prepare(Task::Train, subject, service)?;
            let prices = match request.prices {
                Some(prices) => plan::prices(&Value::Object(prices), &prepared).map_err(|one| one.within("prices"))?,
                None => Default::default(),
            };
            let keep = plan::keep(&request.keep).map_err(|one| one.within("keep"))?;
            let wish = plan::Wish { keep, prices, alone: true, ..plan::Wish::default() };
            Ok(plan::find(&prepared, &wish)?)
        })
        .await
}

/// `POST /heat`.
pub(crate) async fn heat(State(service): Shared, Json(request): Json<PlanRequest>) -> Answer {
    service.answer(request, |service, request| Ok(heat::heat(&service.prepare(request)?)?)).await
}

/// `POST /suggest`.
pub(crate) async fn suggest(State(service): Shared, Json(request): Json<PlanRequest>) -> Answer {
    service
        .answer(request, |service, request| {
            let wanted = Wanted { suggestions: true, ..Wanted::default() };
            let answer = service.prepare(request)?.answer(wanted)?;
            let suggestions = answer.suggestions.into_iter().map(Change::from).collect();
            Ok(Suggestions { fits: answer.fits, suggestions })
        })
        .await
}

impl Service {
    /// Computes an answer where there is room for it.
    pub(super) async fn answer<R: Body + Debug + Clone + Send + Sync + 'static, T: Serialize>(
        self: &Arc<Self>,
        request: R,
        work: impl Fn(&Self, R) -> Result<T, Problem> + Send + Sync + 'static,
    ) -> Answer {
        let service = Arc::clone(self);
        let request = Arc::new(request);
        let (asked, name) = (Arc::clone(&request), std::any::type_name_of_val(&work));
        let question = move || format!("{name} {asked:?}");
        let told = move || work(&service, R::clone(&request)).map_err(|problem| problem.within(&*request));
        self.room.run(question, move || Ok(Document::of(&told()?))).await
    }

    fn prepare(&self, mut request: PlanRequest) -> Result<Prepared, Problem> {
        let subject = request.subject();
        request.wish().prepare(request.kind, subject, self)
    }
}
