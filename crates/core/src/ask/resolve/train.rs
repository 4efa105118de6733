//! A training run settled.

use serde_json::{Value, json};

use super::{Draft, Settled, Surroundings, engine, mesh, precision, sizes};
use crate::ask::request::Request;
use crate::ask::{origin, tree};
use crate::model::{Model, Program};
use crate::plan::{
    AdapterLayout, AdapterPlan, AttentionKind, Checkpointing, Fault, Kernels, ModelCode, ModelSizes, OptimizerKind,
    RunPlan, Situation, TaskKind, TrainPlan, liger,
};
use crate::typed;

pub(super) fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    let defaults = TrainPlan::default();
    let mut draft = Draft::new(request, &defaults);
    let plain = draft.tree.clone();
    let kind = task(&request.stated);
    if let Some(name) = &request.framework {
        draft.framework(name, situation(&request.stated), model.config());
    }
    let stated = adapted(&request.stated);
    tree::lay(&mut draft.tree, &stated);
    draft.honoured(&plain, around);
    draft.card(around);
    stepping(&mut draft);
    if kind.rolls_out() && !draft.states("batch.seq_len") {
        draft.derive("objective.max_prompt_length", json!(512), "our guess: the default of trl before 0.2x");
    }
    if kind == TaskKind::Ppo {
        ppo(&mut draft, model, around.name);
    }
    fused_evaluation(&mut draft);
    precision::settle(&mut draft);
    prepared(&mut draft);
    mesh::settle(&mut draft);
    engine::settle(&mut draft);
    let Some(mut plan) = draft.plan::<TrainPlan>() else { return Err(draft.faults.end().err().unwrap_or_default()) };
    draft.images(model, &mut plan.batch);
    unpatched(model, &mut draft, &plan);
    sizes::training(model, &mut draft, &mut plan, around.name);
    if around.lenient {
        draft.faults.clone().end()?;
        return Ok(Settled { plan: RunPlan::Train(Box::new(plan)), notes: draft.notes, origins: Vec::new() });
    }
    draft.faults.take(plan.check_on(model));
    idle(&mut draft, &plan);
    spaced(model, &plan, &mut draft);
    let (saved, targets) = match &plan.adapter {
        Some(AdapterPlan::Lora(lora)) => {
            let peft = plan.model_code == ModelCode::Transformers && draft.states("adapter.targets");
            (lora.modules_to_save.clone(), Some(lora.clone()).filter(|_| peft))
        }
        _ => (Vec::new(), None),
    };
    if draft.faults.is_empty() && !(plan.frozen.is_empty() && saved.is_empty() && targets.is_none()) {
        match model.shared_program(plan.batch.training_inputs()) {
            Ok(program) => {
                if let Some(lora) = &targets {
                    let names = AdapterLayout::passed_over(
                        lora,
                        model.config()["model_type"].as_str().unwrap_or_default(),
                        &program,
                    );
                    let said = names.iter().map(|name| format!("no module is called {name}: PEFT passes over it"));
                    draft.notes.extend(said);
                }
                match plan.resolve_frozen(&program) {
                    Ok(notes) => draft.notes.extend(notes),
                    Err(faults) => draft.faults.take(Err(faults)),
                }
                unknown(&saved, &program, &mut draft);
            }
            Err(error) => draft.faults.add(Fault::new("model", error.to_string())),
        }
    }
    sizes::media(model, &mut draft, plan.batch.training_inputs(), around.name);
    draft.faults.clone().end()?;
    let origins = origin::trace(&plan, &request.stated, &draft.framework, &draft.derived, request.runner);
    Ok(Settled { plan: RunPlan::Train(Box::new(plan)), notes: draft.notes, origins })
}

/// `PPOTrainer` makes an Accelerator that is told nothing of `bf16`, and a loop that turns no checkpoints on and clips nothing.
fn ppo(draft: &mut Draft<'_>, model: &Model, name: &str) {
    const ALONE: &str = "trl 1.12, ppo_trainer.py: an Accelerator and a loop of its own";
    draft.derive("autocast", Value::Null, ALONE);
    draft.derive("checkpointing", json!("off"), ALONE);
    draft.derive("clip", json!(false), ALONE);
    for place in ["objective.reward_model", "objective.value_model"] {
        draft.derive(place, json!({"model": name, "config": model.config()}), "a model like the policy");
    }
}

/// `SFTTrainer.compute_loss` passes `skip_logits` where nothing but the loss is wanted of an evaluation.
fn fused_evaluation(draft: &mut Draft<'_>) {
    let says = |path: &str, value: Value| tree::get(&draft.tree, path) == Some(&value);
    let evaluates = tree::get(&draft.tree, "job.evaluation").is_some_and(Value::is_object);
    let fuses = says("kernels", json!("liger")) && says("loss.kind", json!("standard"));
    let trl = draft.request.framework.as_deref() == Some("trl");
    let applies = trl && evaluates && fuses && !says("job.evaluation.metrics", json!(true));
    if applies {
        draft.derive("job.evaluation.skip_logits", json!(true), "trl 1.16, sft_trainer.py: only the loss is wanted");
    }
}

/// What is trained for.
fn task(stated: &Value) -> TaskKind {
    let kind = tree::get(stated, "objective.kind").cloned().unwrap_or_default();
    typed::read(kind).unwrap_or_default()
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

/// `apply_liger_kernel_to_*` leaves types alone that it has no kernels for, and says so in a log.
fn unpatched(model: &Model, draft: &mut Draft<'_>, plan: &TrainPlan) {
    let model_type = model.config()["model_type"].as_str().unwrap_or_default();
    if plan.kernels == Kernels::Liger && matches!(liger::patch(model_type), Ok(None)) {
        draft.notes.push(format!("Liger has no kernels for models of type {model_type}: transformers' own run"));
    }
}

/// What is read in a sense that others than the plan's own have.
fn idle(draft: &mut Draft<'_>, plan: &TrainPlan) {
    const WIDE: &str = "optimizer.wide_embeddings";
    let kind = plan.optimizer.kind;
    if draft.states(WIDE) && plan.optimizer.wide_embeddings && kind.in_32_bits() == kind {
        draft.faults.add(Fault::no_effect(WIDE, format!("on {}, which keeps no state in 8 bits", kind.name())));
    }
    const REAL: &str = "batch.real_tokens";
    let flash = matches!(plan.attention, AttentionKind::Flash2 | AttentionKind::Flash3);
    if draft.states(REAL) && !flash {
        let fault = Fault::no_effect(REAL, "without flash attention, which alone leaves padding out");
        draft.faults.add(fault.or_set("attention", "flash2"));
    }
}

/// Of fewer layers than that, every N-th is none.
fn spaced(model: &Model, plan: &TrainPlan, draft: &mut Draft<'_>) {
    let every = u64::from(plan.checkpoints.every);
    let layers = ModelSizes::of(model.config(), 0).layers;
    let Some(layers) = layers.filter(|layers| plan.checkpointing == Checkpointing::Full && every > *layers) else {
        return;
    };
    let what = format!("every {every}th of {layers} layers is none: nothing is recomputed");
    draft.faults.add(Fault::new("checkpoints", what).or(format!("every-{layers} recomputes one layer")));
}

/// PEFT passes over names of modules that a model does not have.
fn unknown(saved: &[String], program: &Program, draft: &mut Draft<'_>) {
    const PLACE: &str = "adapter.modules_to_save";
    let has = |name: &&String| !program.modules.iter().any(|module| module.path.ends_with(name.as_str()));
    for name in saved.iter().filter(has) {
        let fault =
            Fault::new(PLACE, format!("{{{PLACE}}}: {name} names no module of this model, and PEFT passes over it"));
        draft.faults.add(fault.or_drop(PLACE).or("name modules such as embed_tokens or lm_head"));
    }
}

/// `prepare_model_for_kbit_training` turns gradient checkpointing on unless it is told not to.
fn prepared(draft: &mut Draft<'_>) {
    let quantised = draft.tree.get("quantization").is_some_and(Value::is_object);
    let prepares = tree::get(&draft.tree, "quantization.prepare").and_then(Value::as_bool).unwrap_or(true);
    // A framework's profile says itself what it does.
    if !quantised || !prepares || draft.request.framework.is_some() || draft.states("checkpointing") {
        return;
    }
    draft.derive("checkpointing", json!("full"), "prepare_model_for_kbit_training of peft 0.21 turns it on");
    draft.notes.push(
        "layers are recomputed: prepare_model_for_kbit_training turns gradient checkpointing on unless told not to"
            .into(),
    );
}

/// How a framework's own optimizer steps says nothing about another one.
fn stepping(draft: &mut Draft<'_>) {
    if !draft.states("optimizer.kind") || draft.states("optimizer.implementation") {
        return;
    }
    let kind = tree::get(&draft.tree, "optimizer.kind").cloned().unwrap_or_default();
    if typed::read::<OptimizerKind>(kind).is_ok_and(|kind| !kind.has_fused()) {
        draft.derive("optimizer.implementation", json!("foreach"), "torch 2.11's default on CUDA");
    }
}
