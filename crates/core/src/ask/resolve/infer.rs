//! A run of transformers' `generate` settled.

use serde_json::{Value, json};

use super::{Draft, Settled, Surroundings, precision, sizes};
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::Model;
use crate::plan::draft::vocabulary;
use crate::plan::{Fault, InferPlan, RunPlan};

pub(super) fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    let defaults = InferPlan { weights: around.stored.unwrap_or(InferPlan::default().weights), ..InferPlan::default() };
    let mut draft = Draft::new(request, &defaults);
    let plain = draft.tree.clone();
    let mut stated = request.stated.clone();
    // Who generates is no part of the plan.
    tree::take(&mut stated, "engine");
    // One card of one is a plain run.
    if stated.get("device_map").is_some_and(|map| *map == json!({"cards": 1})) {
        tree::take(&mut stated, "device_map");
    }
    if request.framework.is_some() {
        draft.faults.add(Fault::no_effect("framework", "on generation: profiles are of training"));
    }
    tree::lay(&mut draft.tree, &stated);
    draft.honoured(&plain, around);
    draft.card(around);
    precision::settle(&mut draft);
    if draft.tree.get("assistant").is_some_and(Value::is_object) && !draft.states("assistant.weights") {
        let weights = draft.tree["weights"].clone();
        if tree::get(&draft.tree, "assistant.weights").is_none() {
            tree::set(&mut draft.tree, "assistant.weights", weights);
        }
    }
    let Some(mut plan) = draft.plan::<InferPlan>() else { return Err(draft.faults.end().err().unwrap_or_default()) };
    draft.images(model, &mut plan.batch);
    sizes::generation(model, &mut draft, &mut plan, around.name);
    if around.lenient {
        draft.faults.clone().end()?;
        return Ok(Settled { plan: RunPlan::Infer(Box::new(plan)), notes: draft.notes, origins: Vec::new() });
    }
    draft.faults.take(plan.check_on(model));
    sizes::media(model, &mut draft, plan.inputs(plan.batch.seq_len, 0), around.name);
    draft.faults.clone().end()?;
    sizes::idle(model, &mut draft, &plan, around.name);
    if let Some(assistant) = &plan.assistant
        && let [Some(own), Some(other)] = [model.config(), &assistant.config].map(vocabulary)
        && own != other
    {
        let (name, drafts) = (around.name, &assistant.model);
        draft.notes.push(format!(
            "{drafts} has a vocabulary of {other} tokens and {name} one of {own}: transformers then asks for both \
             tokenizers, and what it encodes anew with them is not simulated"
        ));
    }
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Infer(Box::new(plan)), notes: draft.notes, origins })
}
