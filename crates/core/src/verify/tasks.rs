//! Jobs of TRL's and sentence-transformers' trainers, as truth/jobs/jobs.py ran them, as plans.

use serde_json::{Value, json};

use super::run;
use crate::dtype::DType;
use crate::plan::job::Lengths;
use crate::plan::{AdapterPlan, Kernels, LossKind, Objective, OtherModel, TaskKind, TrainPlan};

/// The plan of a row.
pub(super) fn plan(row: &Value) -> Result<TrainPlan, String> {
    let job = &row["job"];
    let how = match job["kind"].as_str() {
        Some(kind @ ("dpo" | "ppo")) => kind,
        _ => job["how"].as_str().unwrap_or_default(),
    };
    let known = |(_, name, _): &&(TaskKind, &str, &str)| name.replace('-', "_") == how.replace('-', "_");
    let kind = TaskKind::ALL.iter().find(known).map(|(kind, ..)| *kind);
    let kind =
        kind.filter(|kind| *kind != TaskKind::Sft).ok_or_else(|| format!("jobs of {how} are not simulated yet"))?;
    let plain = job["kind"] == "dpo";
    let (given, settled) = (&job["args"], &row["arguments"]);
    let settled = |key: &str| if settled[key].is_null() { &given[key] } else { &settled[key] };
    let mut run = json!({
        "task": if plain { "train" } else { "trainer" }, "mask": true, "clip": !plain, "impl": "fused",
        "batch": job["batch"], "seq": job["seq"], "lora": job["lora"], "quant": job["quant"],
        "weights": if job["weights"].is_null() { json!("bf16") } else { job["weights"].clone() },
        "checkpointing": if plain { job["checkpointing"].clone() } else { settled("gradient_checkpointing").clone() },
        "grad_accum": settled("gradient_accumulation_steps"),
    });
    if !plain {
        run["autocast"] = if *settled("bf16") == true { "bf16".into() } else { Value::Null };
        run["trainer_optim"] = settled("optim").clone();
    }
    let mut asked = row.clone();
    asked["run"] = run;
    let mut plan = run::training(&asked)?;
    plan.loss.kind = if plain || kind.compares() { LossKind::Standard } else { LossKind::TrlFused };
    plan.keep_outputs = false;
    plan.clip &= kind != TaskKind::Ppo;
    if *settled("use_liger_kernel") == true {
        plan.kernels = Kernels::Liger;
    }
    if let Some(quantization) = &mut plan.quantization {
        // `from_pretrained` leaves the head alone and prepares nothing; TRL casts adapters of such models to bf16.
        (quantization.prepare, quantization.skip, quantization.conv1d) = (false, None, true);
        plan.job.from_pretrained = true;
        if let Some(AdapterPlan::Lora(lora)) = &mut plan.adapter {
            lora.dtype = Some(DType::BF16);
        }
    }
    plan.objective = objective(row, kind);
    plan.job.lengths = lengths(row, kind);
    plan.batch.padded = job["vary"] == true;
    if kind == TaskKind::CrossEncoder {
        plan.batch.seq_len *= 2;
    }
    let epochs = job["args"]["num_ppo_epochs"].as_u64().unwrap_or(1);
    plan.job.steps = Some((job["steps"].as_u64().unwrap_or(3) * epochs) as u32);
    Ok(plan)
}

fn objective(row: &Value, kind: TaskKind) -> Objective {
    let (job, given) = (&row["job"], &row["job"]["args"]);
    let whole = |value: &Value| value.as_u64();
    let prompt = job["prompt"].as_u64().or(job["seq"].as_u64().map(|seq| seq / 2));
    let rolls = kind.rolls_out() || kind == TaskKind::Gkd;
    Objective {
        kind,
        max_prompt_length: prompt
            .filter(|_| matches!(kind, TaskKind::Dpo | TaskKind::Kto | TaskKind::Gkd) && job["kind"] != "dpo"),
        max_completion_length: whole(&job["completion"]).filter(|_| rolls),
        loss_type: match &given["loss_type"] {
            Value::Array(all) => Some(all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("+")),
            one => one.as_str().map(str::to_owned),
        },
        beta: given["beta"].as_f64().filter(|_| matches!(kind, TaskKind::Grpo | TaskKind::Rloo)),
        cpo_alpha: given["cpo_alpha"].as_f64(),
        precompute_ref_log_probs: given["precompute_ref_log_probs"] == true,
        use_weighting: given["use_weighting"] == true,
        steps_per_generation: whole(&given["steps_per_generation"]),
        num_iterations: whole(&given["num_iterations"]),
        temperature: given["temperature"].as_f64().filter(|_| rolls),
        top_k: whole(&given["top_k"]),
        forced_length: rolls && kind != TaskKind::Ppo,
        vllm: None,
        reward_model: other(row, "reward_model").or_else(|| like_the_policy(row, kind)),
        value_model: like_the_policy(row, kind),
        teacher: other(row, "teacher"),
        lmbda: job["lmbda"].as_f64().map(|share| if drawn(row) { 0.0 } else { share }),
        mini_batch_size: whole(&job["mini_batch"]).or(whole(&given["local_rollout_forward_batch_size"])),
        num_mini_batches: whole(&given["num_mini_batches"]),
        texts: None,
    }
}

/// Whether chance decided which batches the student wrote anew: then their lengths are as they came.
fn drawn(row: &Value) -> bool {
    row["job"]["lmbda"].as_f64().is_some_and(|share| share > 0.0 && share < 1.0)
}

/// A further model, whose config the row brings along.
fn other(row: &Value, key: &str) -> Option<OtherModel> {
    let name = row["job"][key].as_str()?;
    Some(OtherModel { model: name.into(), config: row["others"][name].clone(), weights: None })
}

/// What PPO takes where the row names no other.
fn like_the_policy(row: &Value, kind: TaskKind) -> Option<OtherModel> {
    let name = row["model"].as_str().filter(|_| kind == TaskKind::Ppo)?;
    Some(OtherModel { model: name.into(), config: row["config"].clone(), weights: None })
}

/// The longest of each batch, as it really came.
fn lengths(row: &Value, kind: TaskKind) -> Option<Lengths> {
    if row["job"]["vary"] != true && !drawn(row) {
        // A pair is one text of twice the words.
        let pair = 2 * row["job"]["seq"].as_u64()?;
        return (kind == TaskKind::CrossEncoder).then(|| Lengths::Batches(vec![pair]));
    }
    let longest = row["measured"]["lengths"].as_array()?;
    Some(Lengths::Batches(longest.iter().filter_map(Value::as_u64).collect()))
}
