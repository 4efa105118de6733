//! Recorded jobs of models of pictures: denoisers that are trained, autoencoders (`diffusion` and `vae` of truth/jobs/jobs.py).

use serde_json::{Value, json};

use super::ledger::model_of;
use super::run;
use crate::memory::simulation;
use crate::plan::{Diffusion, InferPlan, TrainPlan};

/// diffusers' class of a job's model.
pub(super) fn class(job: &Value) -> Option<&str> {
    job["cls"].as_str().or((job["kind"] == "vae").then_some("AutoencoderKL"))
}

/// A model of diffusers that is trained, made in fp32 on the card and cast there; PEFT gives adapters the type of the weights.
pub(super) fn plan(row: &Value) -> Result<TrainPlan, String> {
    let job = &row["job"];
    let mut plan = run::training(&asked(row, "train"))?;
    plan.batch.images = Some(images(job)?);
    plan.job.cast_on_card = true;
    Ok(plan)
}

/// Peaks of a job without training, where it is one.
pub(super) fn passed(row: &Value) -> Result<Option<[u64; 2]>, String> {
    let job = &row["job"];
    if job["kind"] == "pipeline" {
        let mut plan: InferPlan = run::generation(&asked(row, "infer"))?;
        let number = |key: &str, usual: u64| job[key].as_u64().unwrap_or(usual);
        let count = number("batch", 1).saturating_mul(number("frames", 1));
        plan.batch.images = Some([count, number("height", 512), number("width", 512)]);
        let flag = |key: &str| job[key] == true;
        plan.diffusion = Diffusion {
            offload: crate::typed::read(job["offload"].clone()).map_err(|error| format!("job.offload: {error}"))?,
            unguided: job["guidance"] == false,
            vae_tiling: flag("vae_tiling"),
            vae_slicing: flag("vae_slicing"),
            attention_slicing: flag("attention_slicing"),
        };
        return peaks(row, &plan).map(Some);
    }
    match job["what"].as_str().filter(|_| job["kind"] == "vae") {
        None | Some("train") => return Ok(None),
        Some("decode") => {}
        Some(other) => return Err(format!("an autoencoder's way to {other} alone is not simulated")),
    }
    let mut asked = asked(row, "infer");
    asked["config"]["_class_name"] = class(job).into();
    let mut plan: InferPlan = run::generation(&asked)?;
    plan.batch.images = Some(images(job)?);
    plan.cast_on_card = true;
    peaks(&asked, &plan).map(Some)
}

fn peaks(row: &Value, plan: &InferPlan) -> Result<[u64; 2], String> {
    crate::work::fresh();
    let simulated = simulation::infer(&model_of(row)?, plan).map_err(|error| error.to_string())?;
    Ok([simulated.replay.peak_allocated(), simulated.replay.peak_reserved()])
}

fn asked(row: &Value, task: &str) -> Value {
    let job = &row["job"];
    let mut asked = row.clone();
    asked["run"] = json!({"task": task, "batch": job["batch"], "seq": 1, "weights": "bf16", "new_tokens": 0});
    for key in ["weights", "checkpointing"] {
        if !job[key].is_null() {
            asked["run"][key] = job[key].clone();
        }
    }
    if let Some(rank) = job["lora"]["r"].as_u64() {
        let targets = ["to_k", "to_q", "to_v", "to_out.0"];
        asked["run"]["lora"] =
            json!({"r": rank, "alpha": 8, "dropout": 0.0, "targets": targets, "fp32_adapter": false});
    }
    asked
}

/// Rows count latents along a side, and along time where they are of videos.
fn images(job: &Value) -> Result<[u64; 3], String> {
    let [side, between] = if class(job) == Some("LTXVideoTransformer3DModel") { [32, 8] } else { [8, 4] };
    let number = |key: &str| job[key].as_u64().ok_or(format!("job.{key} is missing"));
    let pixels = number("latent")?.saturating_mul(side);
    let frames = job["frames"].as_u64().unwrap_or(1).saturating_sub(1).saturating_mul(between) + 1;
    Ok([number("batch")?.saturating_mul(frames), pixels, pixels])
}
