//! A training run settled.

use serde_json::{Value, json};

use super::{Draft, Settled, Surroundings, engine, mesh, positions};
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::Model;
use crate::plan::{Fault, OptimizerKind, RunPlan, Situation, TrainPlan};

pub(super) fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    let defaults = TrainPlan::default();
    let mut draft = Draft::new(request, &defaults);
    let plain = draft.tree.clone();
    if let Some(name) = &request.framework {
        draft.framework(name, situation(&request.stated));
    }
    let stated = adapted(&request.stated);
    tree::lay(&mut draft.tree, &stated);
    draft.honoured(&plain, around);
    draft.card(around);
    stepping(&mut draft);
    mesh::settle(&mut draft);
    engine::settle(&mut draft);
    let Some(mut plan) = draft.plan::<TrainPlan>() else { return Err(draft.faults.end().err().unwrap_or_default()) };
    draft.images(model, &mut plan.batch);
    length(model, &mut draft, &mut plan, around.name);
    if around.lenient {
        draft.faults.clone().end()?;
        return Ok(Settled { plan: RunPlan::Train(Box::new(plan)), notes: draft.notes, origins: Vec::new() });
    }
    draft.faults.take(plan.check_on(model));
    if draft.faults.is_empty() && !plan.frozen.is_empty() {
        match model.program(plan.batch.training_inputs()) {
            Ok(program) => match plan.resolve_frozen(&program) {
                Ok(notes) => draft.notes.extend(notes),
                Err(faults) => draft.faults.take(Err(faults)),
            },
            Err(error) => draft.faults.add(Fault::new("model", error.to_string())),
        }
    }
    draft.faults.clone().end()?;
    for unused in model.unused_inputs(&plan.batch.training_inputs()).unwrap_or_default() {
        draft.notes.push(format!("{unused}: {} does not take it, so it changes nothing", around.name));
    }
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Train(Box::new(plan)), notes: draft.notes, origins })
}

/// What kind of run is asked for, as far as a framework's defaults depend on it.
pub(super) fn situation(stated: &Value) -> Situation {
    let has = |key: &str| stated.get(key).is_some_and(|value| !value.is_null());
    match (has("adapter"), has("quantization")) {
        (_, true) => Situation::Quantised,
        (true, _) => Situation::Adapter,
        _ => Situation::Full,
    }
}

/// The request with its adapter as a plan holds it: a method, and options of that method where they belong.
fn adapted(stated: &Value) -> Value {
    let mut stated = stated.clone();
    let Some(adapter) = stated.get_mut("adapter").and_then(Value::as_object_mut) else { return stated };
    let methods = ["ia3", "oft", "vera", "prompt-tuning", "prefix-tuning"];
    let other = methods.into_iter().find(|name| adapter.contains_key(*name));
    adapter.entry("method").or_insert_with(|| if other.is_some() { "other".into() } else { "lora".into() });
    let Some(name) = other.filter(|_| adapter["method"] == "other") else { return stated };
    let moved: Vec<(String, Value)> = ["rank", "targets", "virtual_tokens"]
        .into_iter()
        .filter_map(|key| Some((key.to_owned(), adapter.shift_remove(key)?)))
        .collect();
    let Some(options) = adapter.get_mut(name).and_then(Value::as_object_mut) else { return stated };
    if name.ends_with("tuning") {
        options.entry("virtual_tokens").or_insert(json!(20));
    }
    if name == "prefix-tuning" {
        options.entry("projection").or_insert(json!(false));
    }
    for (key, value) in moved {
        if name == "oft" && key == "rank" {
            options.insert("block_size".into(), json!(0));
        }
        options.insert(key, value);
    }
    stated
}

/// How a framework's own optimizer steps says nothing about another one.
fn stepping(draft: &mut Draft<'_>) {
    if !draft.states("optimizer.kind") || draft.states("optimizer.implementation") {
        return;
    }
    let kind = tree::get(&draft.tree, "optimizer.kind").cloned().unwrap_or_default();
    if serde_json::from_value::<OptimizerKind>(kind).is_ok_and(|kind| !kind.has_fused()) {
        draft.derive("optimizer.implementation", json!("foreach"), "torch 2.11's default on CUDA");
    }
}

/// Samples that nobody gave a length are no longer than the model can take; others are refused.
fn length(model: &Model, draft: &mut Draft<'_>, plan: &mut TrainPlan, name: &str) {
    let asked = plan.batch.seq_len;
    let Some(most) = positions(model).filter(|most| *most < asked) else { return };
    if draft.states("batch.seq_len") {
        let fault = Fault::new("batch.seq_len", format!("{name} has {most} positions, not {asked}"));
        return draft.faults.add(fault.or_set("batch.seq_len", most));
    }
    plan.batch.seq_len = most;
    draft.derived.push(("batch.seq_len".into(), "as many positions as the model has".into()));
    draft.notes.push(format!("the model has {most} positions: samples are {most} tokens long"));
}
