//! Estimates of a model and a plan.

use std::sync::Arc;

use axum::extract::State;
use serde_json::{Value, json};
use vramcast_core::memory::simulation;
use vramcast_core::plan::{InferPlan, Situation, TrainPlan};

use crate::cli::Failure;
use crate::cli::model::Found;
use crate::estimate::run::{self, Options};
use crate::estimate::start::{self, File, Start};
use crate::serve::Service;
use crate::serve::body::{Json, Kind, TrainRequest, ValidateRequest};
use crate::serve::document::Document;
use crate::serve::problem::Problem;

type Shared = State<Arc<Service>>;

/// `POST /train`.
pub(crate) async fn train(State(service): Shared, Json(request): Json<TrainRequest>) -> Result<Document, Problem> {
    let shared = Arc::clone(&service);
    service.pool.run(move || Ok(Document::of(&shared.train(request)?))).await
}

/// `POST /validate`.
pub(crate) async fn validate(
    State(service): Shared,
    Json(request): Json<ValidateRequest>,
) -> Result<Document, Problem> {
    let shared = Arc::clone(&service);
    service.pool.run(move || Ok(Document::of(&json!({"problems": shared.validate(request)})))).await
}

impl Service {
    fn train(&self, mut request: TrainRequest) -> Result<Value, Problem> {
        let found = request.subject().find(self.reach, false)?;
        let plan = (Value::Object(request.plan), request.framework.as_deref(), request.gpu.as_deref());
        let (plan, start) = self.train_plan(&found, plan)?;
        let options = Options {
            kept: &|_| Ok(0),
            suggest: request.suggestions,
            all_cards: request.gpus_all,
            cards: &|| Ok(self.cards.clone()),
        };
        Ok(run::train(&found, plan, start, &options)?.document()?)
    }

    /// The plan of a request: a framework's defaults, the plan as its file would say it, the card.
    fn train_plan(
        &self,
        found: &Found,
        (plan, framework, gpu): (Value, Option<&str>, Option<&str>),
    ) -> Result<(TrainPlan, Start), Failure> {
        let file = File { name: "plan".into(), value: plan };
        let mut start = Start::read(Some(file), framework, Situation::Full, || Ok(self.cards.clone()))?;
        let mut plan = start.plan.clone();
        plan.batch.mask |= plan.batch.padded;
        if let Some(name) = gpu {
            plan.gpu = self.cards.find(name)?;
        }
        start.settle(&mut plan, found, false)?;
        Ok((plan, start))
    }

    fn infer_plan(&self, found: &Found, plan: Value, gpu: Option<&str>) -> Result<InferPlan, Failure> {
        let file = File { name: "plan".into(), value: plan };
        let (mut plan, _) = start::generation(Some(file), found.stored_dtype(), || Ok(self.cards.clone()))?;
        if let Some(name) = gpu {
            plan.gpu = self.cards.find(name)?;
        }
        plan.check()?;
        Ok(plan)
    }

    /// What is wrong with a plan; the simulation itself is the judge of what cannot run.
    fn validate(&self, mut request: ValidateRequest) -> Vec<Value> {
        let checked = || -> Result<(), Problem> {
            let found = request.subject().find(self.reach, false)?;
            let model = found.require_model()?;
            let gpu = request.gpu.as_deref();
            match request.kind {
                Kind::Train => {
                    let plan = (Value::Object(request.plan), request.framework.as_deref(), gpu);
                    let (plan, _) = self.train_plan(&found, plan)?;
                    simulation::train(model, &plan).map_err(Failure::from)?;
                }
                Kind::Infer => {
                    let plan = self.infer_plan(&found, Value::Object(request.plan), gpu)?;
                    simulation::infer(model, &plan).map_err(Failure::from)?;
                }
            }
            Ok(())
        };
        let problem =
            |problem: Problem| json!({"field": problem.field, "message": problem.detail, "hint": problem.hint});
        checked().err().into_iter().map(problem).collect()
    }
}
