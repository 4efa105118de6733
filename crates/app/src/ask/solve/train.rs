//! What fits of a training run: the solver of the planner, and its answer as a document.

use serde_json::json;
use vramcast_core::ask::{Kept, Request, Runner, Wanted, resolve, tree};
use vramcast_core::model::Model;
use vramcast_core::plan::RunPlan;
use vramcast_core::planner::solve::{self, Question, Solution, Unknown};
use vramcast_core::units::times;

use super::{Solved, plain};
use crate::ask::question::Prepared;
use crate::failure::Failure;

/// Looks for the answer, and answers with the report of what was found.
pub(crate) fn solve(prepared: &Prepared, unknown: Unknown, kept: Kept) -> Result<Solved, Failure> {
    let show = Wanted { kept, ..Wanted::default() };
    let found = prepared.around(false, |model, around| {
        solve::solve(&Question { model, request: &prepared.request, around, kept }, unknown)
    })?;
    let found = found.map_err(|faults| prepared.failed(faults))?;
    // Where an engine is named, a number of cards has to be: any, to say what was asked, or that nothing fits.
    let mut asked = prepared.request.clone();
    if unknown == Unknown::Gpus && asked.runner != Runner::OneCard {
        tree::set(&mut asked.stated, "parallel.gpus", json!(8));
    }
    let question = question(prepared, &asked, unknown)?;
    let mut document = match &found {
        Some(Solution { model: Some(model), .. }) => prepared.answer_about(model, &prepared.request, show)?.document(),
        Some(found) => prepared.answer_to(&found.tried.request, show)?.document(),
        None => prepared.answer_to(&asked, show)?.document(),
    };
    let answer = found.as_ref().map(|found| found.words.clone());
    let next = found.as_ref().and_then(|found| found.beyond.clone());
    document["question"] = json!(question);
    document["answer"] = json!(answer);
    document["solved"] = json!(found.as_ref().map(|found| json!({"setting": found.path, "value": found.value})));
    document["next"] = json!(next.as_ref().map(|(value, why)| json!({"value": value, "fits": false, "why": why})));
    let mut text = format!("{question}: {}\n", answer.as_deref().unwrap_or("nothing fits"));
    if let Some(found) = &found {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let gpu = found.tried.plan.gpu();
        text += &format!("process {:.2} of {:.2} GiB", gib(found.tried.totals.process), gib(gpu.memory));
        if found.tried.retries > 0 {
            text += &format!(", gives cached memory back {} to fit", times(found.tried.retries));
        }
        text += &next.map_or_else(|| "\n".into(), |(value, why)| format!("; {}: {why}\n", plain(&value)));
    } else {
        text += &super::asked(&document);
    }
    Ok(Solved { answer, document, text })
}

fn question(prepared: &Prepared, asked: &Request, unknown: Unknown) -> Result<String, Failure> {
    let settled = prepared.around(true, |model, around| resolve(model, asked, around))?;
    let settled = settled.map_err(|faults| prepared.failed(faults))?;
    let RunPlan::Train(plan) = &settled.plan else { return Ok(prepared.found.name.clone()) };
    let how = match (&plan.adapter, &plan.quantization) {
        (None, _) => "training",
        (Some(_), None) => "adapters of",
        (Some(_), Some(_)) => "adapters on a quantised",
    };
    let mut said = format!("{how} {}", prepared.found.name);
    if unknown != Unknown::Batch {
        said += &format!(", batch {}", plan.batch.batch_size);
    }
    match plan.batch.images {
        Some([_, height, width]) if prepared.found.model.as_ref().is_some_and(Model::makes_pictures) => {
            said += &format!(", {height}×{width} pixels");
        }
        _ if unknown == Unknown::SeqLen => {}
        _ => said += &format!(", {} tokens", plan.batch.seq_len),
    }
    if !matches!(unknown, Unknown::Gpu | Unknown::Gpus) {
        said += &format!(", on {}", plan.gpu.name);
    }
    Ok(said)
}
