//! A run of transformers' `generate` settled.

use serde_json::{Value, json};

use super::{Draft, Settled, Surroundings, positions};
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::{Model, Task};
use crate::plan::{Fault, InferPlan, RunPlan};

pub(super) fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    let defaults = InferPlan { weights: around.stored.unwrap_or(InferPlan::default().weights), ..InferPlan::default() };
    let mut draft = Draft::new(request, &defaults);
    let plain = draft.tree.clone();
    let mut stated = request.stated.clone();
    // Who generates is no part of the plan.
    tree::take(&mut stated, "engine");
    if request.framework.is_some() {
        draft.faults.add(Fault::no_effect("framework", "on generation: profiles are of training"));
    }
    tree::lay(&mut draft.tree, &stated);
    draft.honoured(&plain, around);
    draft.card(around);
    if draft.tree.get("assistant").is_some_and(Value::is_object) && !draft.states("assistant.weights") {
        let weights = draft.tree["weights"].clone();
        if tree::get(&draft.tree, "assistant.weights").is_none() {
            tree::set(&mut draft.tree, "assistant.weights", weights);
        }
    }
    let Some(mut plan) = draft.plan::<InferPlan>() else { return Err(draft.faults.end().err().unwrap_or_default()) };
    draft.images(model, &mut plan.batch);
    length(model, &mut draft, &mut plan, around.name);
    if around.lenient {
        draft.faults.clone().end()?;
        return Ok(Settled { plan: RunPlan::Infer(Box::new(plan)), notes: draft.notes, origins: Vec::new() });
    }
    draft.faults.take(plan.check_on(model));
    draft.faults.clone().end()?;
    for unused in model.unused_inputs(&plan.inputs(plan.batch.seq_len, 0)).unwrap_or_default() {
        draft.notes.push(format!("{unused}: {} does not take it, so it changes nothing", around.name));
    }
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Infer(Box::new(plan)), notes: draft.notes, origins })
}

/// Prompt and new tokens within the model's positions: those that nobody gave a length are cut, others are refused.
fn length(model: &Model, draft: &mut Draft<'_>, plan: &mut InferPlan, name: &str) {
    // A decoder beside an encoder counts its own tokens.
    let Some(most) = positions(model).filter(|_| !encodes(model)) else { return };
    let tokens = plan.batch.seq_len.saturating_add(plan.new_tokens);
    if tokens <= most {
        return;
    }
    let (prompt, new) = (draft.states("batch.seq_len"), draft.states("new_tokens"));
    let room = |taken: u64| most.saturating_sub(taken);
    if !prompt && room(plan.new_tokens) > 0 {
        plan.batch.seq_len = room(plan.new_tokens);
        draft.derived.push(("batch.seq_len".into(), "what the model's positions leave".into()));
    } else if !new && room(plan.batch.seq_len) > 0 {
        plan.new_tokens = room(plan.batch.seq_len);
        draft.derived.push(("new_tokens".into(), "what the model's positions leave".into()));
    } else {
        let (path, left) = if room(plan.new_tokens) > 0 {
            ("batch.seq_len", room(plan.new_tokens))
        } else {
            ("new_tokens", room(plan.batch.seq_len))
        };
        let what = format!("{name} has {most} positions, and {tokens} tokens need as many");
        let fault = Fault::new(path, what);
        return draft.faults.add(if left > 0 {
            fault.or_set(path, json!(left))
        } else {
            fault.or("ask for fewer tokens")
        });
    }
    draft.notes.push(format!("the model has {most} positions: {} + {} tokens", plan.batch.seq_len, plan.new_tokens));
}

fn encodes(model: &Model) -> bool {
    matches!(model.task(), Task::Seq2SeqLm | Task::SpeechSeq2Seq)
}
