//! Jobs of TRL's and sentence-transformers' trainers, as truth/jobs/jobs.py ran them, as plans.

use serde_json::{Value, json};

use super::{distributed, run};
use crate::dtype::DType;
use crate::plan::job::Lengths;
use crate::plan::objective::{Vllm, VllmMode};
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
        "task": if plain { "train" } else { "trainer" }, "mask": true, "clip": !plain, "alloc_conf": job["alloc_conf"],
        "batch": job["batch"], "seq": job["seq"], "lora": job["lora"], "quant": job["quant"],
        "weights": if job["weights"].is_null() { json!("bf16") } else { job["weights"].clone() },
        "checkpointing": if plain { job["checkpointing"].clone() } else { settled("gradient_checkpointing").clone() },
        "grad_accum": settled("gradient_accumulation_steps"),
    });
    if plain {
        (run["impl"], run["attn"]) = ("fused".into(), job["attn"].clone());
    } else {
        run["autocast"] = autocast(settled);
        run["trainer_optim"] = settled("optim").clone();
    }
    let mut asked = row.clone();
    asked["run"] = run;
    let mut plan = run::training(&asked)?;
    plan.loss.kind = if plain || kind.compares() { LossKind::Standard } else { LossKind::TrlFused };
    plan.keep_outputs = false;
    plan.clip &= kind != TaskKind::Ppo;
    around(&mut plan, job);
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
    spread(&mut plan, job)?;
    plan.objective = objective(row, kind);
    plan.job.lengths = lengths(row, kind);
    // A completion that no end-of-text ends is masked as if it were padding (grpo_trainer.py, `is_truncated`).
    plan.batch.padded = job["vary"] == true || given["mask_truncated_completions"] == true;
    // Saved and loaded again, so that TRL finds its reference.
    plan.job.from_pretrained |= job["saved"] == true;
    if let Some(multiple) = given["pad_to_multiple_of"].as_u64().filter(|multiple| *multiple > 0) {
        // Texts of a reward row have a token less than it says.
        let real = plan.batch.seq_len - u64::from(kind == TaskKind::Reward);
        plan.batch.padded |= !real.is_multiple_of(multiple);
        plan.batch.seq_len = real.next_multiple_of(multiple);
    }
    if let Some(answer) = job["answer"].as_u64() {
        // A prompt, its answer and the token at its end, where that is shorter than what is cut off.
        let prompt = job["prompt"].as_u64().unwrap_or(plan.batch.seq_len / 2);
        plan.batch.seq_len = plan.batch.seq_len.min(prompt + answer + 1);
    }
    if kind == TaskKind::CrossEncoder {
        plan.batch.seq_len *= 2;
    }
    let epochs = job["args"]["num_ppo_epochs"].as_u64().unwrap_or(1);
    plan.job.steps = Some((job["steps"].as_u64().unwrap_or(3) * epochs) as u32);
    Ok(plan)
}

/// The type that a Trainer computes in.
pub(super) fn autocast<'a>(settled: impl Fn(&str) -> &'a Value) -> Value {
    ["bf16", "fp16"].into_iter().find(|name| *settled(name) == true).map_or(Value::Null, Value::from)
}

/// What the arguments of any Trainer say besides, and the limit of a run.
pub(super) fn around(plan: &mut TrainPlan, job: &Value) {
    let given = &job["args"];
    plan.clip &= given["max_grad_norm"].as_f64() != Some(0.0);
    plan.checkpoints.reentrant |= given["gradient_checkpointing_kwargs"]["use_reentrant"] == true;
    let every = |from: &Value| from.as_u64().map(|steps| steps as u32);
    plan.job.empty_cache_steps = every(&given["torch_empty_cache_steps"]).or(every(&job["empty_cache_steps"]));
    plan.job.memory_limit = job["cap_gib"].as_f64().map(|gib| (gib * f64::from(1 << 30)) as u64);
}

/// A run on several cards, as `accelerate launch` starts it with the files that trl brings along (accelerate_configs).
pub(super) fn spread(plan: &mut TrainPlan, job: &Value) -> Result<(), String> {
    let mut parallel = distributed::parallel(&job["dist"])?;
    if parallel.is_null() {
        return Ok(());
    }
    let policy = json!({"parameters": "bf16", "reduce": "bf16", "upcast": true});
    let options = match job["dist"]["engine"].as_str() {
        Some("fsdp1") => {
            let wrap = if plan.adapter.is_some() { "peft" } else { "every-layer" };
            json!({"wrap": wrap, "forward_prefetch": true, "mixed_precision": policy})
        }
        Some("fsdp2") => json!({"wrap": "ends", "reshard_root": false, "mixed_precision": policy}),
        Some("deepspeed") => {
            plan.weights = DType::BF16;
            json!({})
        }
        _ => Value::Null,
    };
    if options.is_object() {
        plan.autocast = None;
        let engine = job["dist"]["engine"].as_str().unwrap_or_default();
        for (key, value) in options.as_object().into_iter().flatten() {
            parallel["engine"][engine][key] = value.clone();
        }
    }
    parallel["no_sync"] = (plan.gradient_accumulation > 1 && job["dist"]["engine"] != "deepspeed").into();
    plan.parallel = crate::typed::read(parallel).map_err(|error| format!("dist: {error}"))?;
    Ok(())
}

fn objective(row: &Value, kind: TaskKind) -> Objective {
    let (job, given) = (&row["job"], &row["job"]["args"]);
    let whole = |value: &Value| value.as_u64();
    let seq = job["seq"].as_u64().unwrap_or(0);
    let prompt = match given["truncation_mode"] == "keep_end" {
        true => seq.saturating_sub(job["answer"].as_u64().unwrap_or(seq)),
        false => job["prompt"].as_u64().unwrap_or(seq / 2),
    };
    let pairs = matches!(kind, TaskKind::Dpo | TaskKind::Kto | TaskKind::Gkd) && job["kind"] != "dpo";
    let rolls = kind.rolls_out() || kind == TaskKind::Gkd;
    Objective {
        kind,
        max_prompt_length: pairs.then_some(prompt).or(whole(&job["query"])),
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
        forced_length: rolls && kind != TaskKind::Ppo && job["vllm"].is_null(),
        vllm: job["vllm"].is_object().then(|| Vllm {
            mode: VllmMode::Colocate,
            gpu_memory_utilization: job["vllm"]["share"].as_f64(),
            enable_sleep_mode: job["vllm"]["sleep"] == true,
        }),
        reward_model: other(row, "reward_model").or_else(|| like_the_policy(row, kind)),
        value_model: like_the_policy(row, kind),
        teacher: other(row, "teacher"),
        lmbda: job["lmbda"].as_f64().map(|share| if drawn(row) { 0.0 } else { share }),
        mini_batch_size: whole(&job["mini_batch"]).or(whole(&given["local_rollout_forward_batch_size"])),
        num_mini_batches: whole(&given["num_mini_batches"]),
        texts: (job["negatives"] == true).then_some(3),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::parallel::Engine;
    use crate::plan::{AttentionKind, OptimizerKind};

    fn planned(job: Value) -> TrainPlan {
        let config = json!({"model_type": "qwen2"});
        super::super::jobs::plan(&json!({"config": config, "job": job, "gpu": "NVIDIA H200"})).unwrap()
    }

    #[test]
    fn arguments_of_a_row_are_honoured() {
        let trl = |args: Value| planned(json!({"kind": "trl", "how": "dpo", "batch": 2, "seq": 64, "args": args}));
        assert_eq!(trl(json!({"optim": "adamw_8bit"})).optimizer.kind, OptimizerKind::AdamW8bit);
        assert_ne!(
            trl(json!({"optim": "adamw_torch"})).optimizer.implementation,
            trl(json!({"optim": "adamw_torch_fused"})).optimizer.implementation
        );
        assert_eq!(trl(json!({"fp16": true})).autocast, Some(DType::F16));
        assert!(trl(json!({})).clip && !trl(json!({"max_grad_norm": 0.0})).clip);
        assert_eq!(trl(json!({"torch_empty_cache_steps": 2})).job.empty_cache_steps, Some(2));
        let plain = planned(json!({"kind": "dpo", "batch": 2, "seq": 64, "attn": "eager", "cap_gib": 2}));
        assert_eq!((plain.attention, plain.job.memory_limit), (AttentionKind::Eager, Some(2 << 30)));
    }

    #[test]
    fn several_cards_are_as_accelerate_spreads_them() {
        let dist = json!({"engine": "fsdp2", "world": 2, "reshard": true});
        let job = json!({"kind": "trl", "how": "dpo", "batch": 2, "seq": 64, "args": {"bf16": true}, "dist": dist});
        let plan = planned(job);
        let Some(Engine::Fsdp2(options)) = plan.parallel.map(|parallel| parallel.engine) else { panic!("not FSDP2") };
        assert!(plan.autocast.is_none() && options.mixed_precision.is_some_and(|types| types.upcast));
    }
}
