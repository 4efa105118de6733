//! What an engine can run, and what of that is simulated.

use super::{Engine, Fsdp1, Fsdp2, MixedPrecision, Parallel, Reshard, Strategy, Wrap};
use crate::dtype::DType;
use crate::plan::adapter::AdapterPlan;
use crate::plan::{PlanError, QuantizationScheme, TrainPlan};

fn unsupported(what: impl Into<String>, hint: &str) -> Result<(), PlanError> {
    Err(PlanError::Unsupported { what: what.into(), hint: hint.into() })
}

fn conflict(what: impl Into<String>, hint: impl Into<String>) -> Result<(), PlanError> {
    Err(PlanError::Conflict { what: what.into(), hint: hint.into() })
}

/// Refuses what an engine cannot run or the simulation does not know.
pub(super) fn engine(parallel: &Parallel, plan: &TrainPlan) -> Result<(), PlanError> {
    let mesh = &parallel.mesh;
    if parallel.no_sync && plan.gradient_accumulation < 2 {
        return conflict("no_sync without gradient accumulation has no effect", "drop it, or accumulate");
    }
    if plan.optimizer_in_backward {
        return unsupported("an optimizer that steps in backward on several cards", "step after backward");
    }
    if mesh.world() == 1 && parallel.offloads() && !matches!(parallel.engine, Engine::Deepspeed(_)) {
        return unsupported("FSDP's offload on one card", "DeepSpeed's is simulated (--engine deepspeed)");
    }
    match &parallel.engine {
        Engine::Ddp(_) if mesh.dp_shard > 1 => conflict(
            format!("ddp replicates, it does not shard over dp_shard {}", mesh.dp_shard),
            format!("use dp_replicate {}, or fsdp2", mesh.dp_shard.saturating_mul(mesh.dp_replicate)),
        ),
        Engine::Ddp(_) => Ok(()),
        Engine::Fsdp1(options) => fsdp1(parallel, options, plan),
        Engine::Fsdp2(options) => fsdp2(parallel, options, plan),
        Engine::Deepspeed(_) if parallel.no_sync => {
            conflict("no_sync is FSDP's", "DeepSpeed decides itself what it reduces when")
        }
        Engine::Deepspeed(options) => options.check(plan, (mesh.dp_shard, mesh.dp_replicate)),
        Engine::Tp(_) if mesh.dp_shard > 1 || mesh.dp_replicate > 1 => conflict(
            format!("tp alone is {} GPUs, not {}", mesh.tp, mesh.world()),
            "use fsdp2 with tp, which shards over the others",
        ),
        Engine::Tp(_) => Ok(()),
        // Checked with the sizes of the model.
        Engine::Megatron(_) => Ok(()),
    }
}

fn fsdp1(parallel: &Parallel, options: &Fsdp1, plan: &TrainPlan) -> Result<(), PlanError> {
    if options.strategy == Strategy::No && options.offload {
        return unsupported("fsdp1 with NO_SHARD and offload", "use FULL_SHARD");
    }
    if parallel.mesh.dp_shard == 1 && parallel.mesh.world() > 1 {
        return conflict(
            "fsdp1 with dp_shard 1 shards nothing",
            format!("use ddp, or dp_shard {}", parallel.mesh.dp_replicate),
        );
    }
    types(options.mixed_precision, plan)?;
    quantised(plan)?;
    // `_flatten` wants one type in a unit.
    let hidden = hidden(plan);
    if let Some(quantization) = plan.quantization.as_ref().filter(|quantization| quantization.storage != hidden) {
        return conflict(
            format!(
                "fsdp1 wraps parameters of one type together: 4-bit weights are stored as {} and the rest is {}",
                quantization.storage.name(),
                hidden.name()
            ),
            "store them in that type (bnb_4bit_quant_storage), skip prepare_model_for_kbit_training, or use fsdp2",
        );
    }
    match adapter_type(plan) {
        Some(adapter) if adapter != hidden && options.wrap != Wrap::Peft => conflict(
            format!(
                "fsdp1 wraps parameters of one type together: adapters are {} and the model is {}",
                adapter.name(),
                hidden.name()
            ),
            "wrap as PEFT does (wrap: peft), make adapters of the model's type, or use fsdp2",
        ),
        Some(_) if options.flat_params && options.wrap != Wrap::Peft => conflict(
            "fsdp1 without use_orig_params wraps what is trained and what is frozen apart",
            "wrap as PEFT does (wrap: peft), or keep use_orig_params",
        ),
        None if options.wrap == Wrap::Peft => conflict("PEFT's wrap policy without an adapter", "drop it"),
        _ => Ok(()),
    }
}

fn fsdp2(parallel: &Parallel, options: &Fsdp2, plan: &TrainPlan) -> Result<(), PlanError> {
    types(options.mixed_precision, plan)?;
    quantised(plan)?;
    if options.wrap == Wrap::Peft {
        return unsupported("PEFT's wrap policy with fsdp2", "wrap every layer");
    }
    for (key, reshard) in
        [("reshard_after_forward", options.reshard_after_forward), ("reshard_root", options.reshard_root)]
    {
        let Reshard::To(ranks) = reshard else { continue };
        let world = parallel.sharded_over();
        if !(2..world).contains(&ranks) || !world.is_multiple_of(ranks) {
            let valid: Vec<String> = (2..world).filter(|n| world.is_multiple_of(*n)).map(|n| n.to_string()).collect();
            return Err(PlanError::BadValue {
                key: key.into(),
                value: ranks.to_string(),
                expected: format!("true, false or one of [{}], which divide dp_shard {world}", valid.join(", ")),
            });
        }
        if parallel.mesh.dp_replicate > 1 {
            return unsupported(format!("{key} {ranks} with dp_replicate"), "use true or false");
        }
    }
    Ok(())
}

/// The type of embeddings and norms.
fn hidden(plan: &TrainPlan) -> DType {
    match &plan.quantization {
        Some(quantization) if quantization.prepare && plan.weights.size() == 2 => DType::F32,
        _ => plan.weights,
    }
}

/// The type of adapters, where there are some.
fn adapter_type(plan: &TrainPlan) -> Option<DType> {
    match &plan.adapter {
        Some(AdapterPlan::Lora(lora)) => {
            let hidden = hidden(plan);
            Some(match &plan.quantization {
                None => lora.dtype_on(hidden),
                base => lora.dtype_on_quantised(hidden, base.as_ref()),
            })
        }
        _ => None,
    }
}

fn quantised(plan: &TrainPlan) -> Result<(), PlanError> {
    let Some(quantization) = &plan.quantization else { return Ok(()) };
    if quantization.scheme == QuantizationScheme::Int8 {
        return unsupported("LLM.int8 under FSDP", "FSDP shards 4-bit weights stored as floats (nf4)");
    }
    if !matches!(quantization.storage, DType::F32 | DType::BF16 | DType::F16) {
        return conflict(
            format!("FSDP shards floats, and 4-bit weights are stored as {}", quantization.storage.name()),
            "set bnb_4bit_quant_storage to the type of the model",
        );
    }
    Ok(())
}

fn types(types: Option<MixedPrecision>, plan: &TrainPlan) -> Result<(), PlanError> {
    let Some(types) = types else { return Ok(()) };
    for (key, dtype) in [("mixed-precision.parameters", types.parameters), ("mixed-precision.reduce", types.reduce)] {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(PlanError::BadValue {
                key: key.into(),
                value: dtype.name().into(),
                expected: "fp32, bf16 or fp16".into(),
            });
        }
    }
    if plan.autocast.is_some() {
        return unsupported("autocast together with mixed precision of the engine", "drop one of them");
    }
    Ok(())
}
