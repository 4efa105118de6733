//! What an engine can run, and what of that is simulated.

use super::{Engine, Fsdp1, Fsdp2, MixedPrecision, Parallel, Reshard, Strategy, Wrap, named};
use crate::dtype::DType;
use crate::plan::adapter::AdapterPlan;
use crate::plan::{Fault, Faults, QuantizationScheme, TrainPlan};

const ENGINE: &str = "parallel.engine";
const NO_SYNC: &str = "parallel.no_sync";
const DP_SHARD: &str = "parallel.mesh.dp_shard";
const DP_REPLICATE: &str = "parallel.mesh.dp_replicate";

/// Refuses what an engine cannot run or the simulation does not know.
pub(super) fn engine(parallel: &Parallel, plan: &TrainPlan, faults: &mut Faults) {
    let mesh = &parallel.mesh;
    faults.when(parallel.no_sync && plan.gradient_accumulation == 1, || {
        Fault::no_effect(NO_SYNC, "without gradient accumulation").or_set("gradient_accumulation", 2)
    });
    faults.when(mesh.world() == 1 && parallel.offloads() && !matches!(parallel.engine, Engine::Deepspeed(_)), || {
        let path = format!("{ENGINE}.{}.offload", parallel.engine.name());
        Fault::unsupported(&path, "FSDP's offload on one card").or_drop(path).or_set(ENGINE, named("deepspeed"))
    });
    match &parallel.engine {
        Engine::Ddp(_) => faults.when(mesh.dp_shard > 1, || {
            let problem = format!("ddp replicates, it does not shard over {{{DP_SHARD}}} {}", mesh.dp_shard);
            let all = mesh.dp_shard.saturating_mul(mesh.dp_replicate);
            Fault::new(DP_SHARD, problem)
                .or(format!("use {{{DP_REPLICATE}}} {all} and {{{DP_SHARD}}} 1"))
                .or_set(ENGINE, named("fsdp2"))
        }),
        Engine::Fsdp1(options) => fsdp1(parallel, options, plan, faults),
        Engine::Fsdp2(options) => fsdp2(parallel, options, plan, faults),
        Engine::Deepspeed(options) => {
            faults.when(parallel.no_sync, || {
                Fault::new(NO_SYNC, format!("{{{NO_SYNC}}} is FSDP's: DeepSpeed decides itself what it reduces when"))
                    .or_drop(NO_SYNC)
            });
            options.check(plan, (mesh.dp_shard, mesh.dp_replicate), "parallel.engine.deepspeed", faults);
        }
        // Where nothing is split, that is said already.
        Engine::Tp(_) => faults.when(mesh.tp > 1 && (mesh.dp_shard > 1 || mesh.dp_replicate > 1), || {
            let problem = format!("tp alone is {} GPUs, not {}", mesh.tp, mesh.world());
            Fault::new(ENGINE, problem).or_set(ENGINE, named("fsdp2"))
        }),
        // Checked with the sizes of the model.
        Engine::Megatron(_) => {}
    }
}

fn fsdp1(parallel: &Parallel, options: &Fsdp1, plan: &TrainPlan, faults: &mut Faults) {
    const AT: &str = "parallel.engine.fsdp1";
    let (mesh, strategy, wrap) = (&parallel.mesh, format!("{AT}.strategy"), format!("{AT}.wrap"));
    let no_shard = options.strategy == Strategy::No;
    faults.when(no_shard && options.offload, || {
        let offload = format!("{AT}.offload");
        Fault::unsupported(&offload, "fsdp1 with NO_SHARD and offload").or_set(&strategy, "full").or_drop(offload)
    });
    faults.when(no_shard && mesh.dp_replicate > 1, || {
        let problem =
            format!("{{{strategy}}} no with {{{DP_REPLICATE}}} {}: hybrid strategies replicate", mesh.dp_replicate);
        Fault::new(&strategy, problem).or_set(&strategy, "full").or_set(DP_REPLICATE, 1)
    });
    faults.when(mesh.dp_shard == 1 && mesh.world() > 1, || {
        Fault::new(DP_SHARD, format!("fsdp1 with {{{DP_SHARD}}} 1 shards nothing"))
            .or_set(ENGINE, named("ddp"))
            .or(format!("use {{{DP_SHARD}}} {} and {{{DP_REPLICATE}}} 1", mesh.dp_replicate))
    });
    types(AT, options.mixed_precision, plan, faults);
    let shardable = quantised(plan, faults);
    // `_flatten` wants one type in a unit.
    let hidden = hidden(plan);
    let stored = plan.quantization.as_ref().map(|quantization| quantization.storage);
    if let Some(stored) = stored.filter(|stored| shardable && *stored != hidden) {
        let problem = format!(
            "fsdp1 wraps parameters of one type together: 4-bit weights are stored as {} and the rest is {}",
            stored.name(),
            hidden.name()
        );
        faults.add(
            Fault::new("quantization.storage", problem)
                .or_set("quantization.storage", hidden.name())
                .or_set("quantization.prepare", false)
                .or_set(ENGINE, named("fsdp2")),
        );
    }
    faults.when(options.wrap == Wrap::Ends, || {
        Fault::unsupported(&wrap, "units of several modules (ends) with fsdp1")
            .or_set(&wrap, "every-layer")
            .or_set(ENGINE, named("fsdp2"))
    });
    match adapter_type(plan) {
        Some(adapter) if adapter != hidden && options.wrap != Wrap::Peft => {
            let problem = format!(
                "fsdp1 wraps parameters of one type together: adapters are {} and the model is {}",
                adapter.name(),
                hidden.name()
            );
            faults.add(
                Fault::new(&wrap, problem)
                    .or_set(&wrap, "peft")
                    .or_set("adapter.dtype", hidden.name())
                    .or_set(ENGINE, named("fsdp2")),
            );
        }
        Some(_) => faults.when(options.flat_params && options.wrap != Wrap::Peft, || {
            let flat = format!("{AT}.flat_params");
            Fault::new(&flat, "fsdp1 without use_orig_params wraps what is trained and what is frozen apart")
                .or_set(&wrap, "peft")
                .or_drop(flat)
        }),
        None => faults.when(options.wrap == Wrap::Peft, || {
            Fault::new(&wrap, format!("{{{wrap}}} peft without an adapter")).or_drop(&wrap)
        }),
    }
}

fn fsdp2(parallel: &Parallel, options: &Fsdp2, plan: &TrainPlan, faults: &mut Faults) {
    const AT: &str = "parallel.engine.fsdp2";
    types(AT, options.mixed_precision, plan, faults);
    quantised(plan, faults);
    faults.when(options.wrap == Wrap::Peft, || {
        let path = format!("{AT}.wrap");
        Fault::unsupported(&path, "PEFT's wrap policy with fsdp2").or_set(path, "every-layer")
    });
    for (key, reshard) in
        [("reshard_after_forward", options.reshard_after_forward), ("reshard_root", options.reshard_root)]
    {
        let Reshard::To(ranks) = reshard else { continue };
        let (path, world) = (format!("{AT}.{key}"), parallel.sharded_over());
        let fits = |ranks: u64| (2..world).contains(&ranks) && world.is_multiple_of(ranks);
        if !fits(ranks) {
            let valid: Vec<u64> = (2..world).filter(|ranks| fits(*ranks)).collect();
            let listed: Vec<String> = valid.iter().map(u64::to_string).collect();
            let expected =
                format!("true, false or one of [{}], which divide {{{DP_SHARD}}} {world}", listed.join(", "));
            let below = valid.iter().rev().find(|valid| **valid < ranks);
            let nearest = [below, valid.iter().find(|valid| **valid > ranks)].into_iter().flatten();
            let fault = Fault::value(&path, ranks, expected);
            faults.add(nearest.fold(fault, |fault, ranks| fault.or_set(&path, *ranks)).or_set(&path, true));
        } else if parallel.mesh.dp_replicate > 1 {
            let what = format!("{{{path}}} {ranks} with {{{DP_REPLICATE}}}");
            faults.add(Fault::unsupported(&path, what).or_set(&path, true).or_set(&path, false));
        }
    }
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

/// Whether 4-bit weights, where there are some, can be sharded.
fn quantised(plan: &TrainPlan, faults: &mut Faults) -> bool {
    let Some(quantization) = &plan.quantization else { return true };
    if quantization.scheme == QuantizationScheme::Int8 {
        let path = "quantization.scheme";
        faults.add(
            Fault::unsupported(path, "LLM.int8 under FSDP, which shards 4-bit weights stored as floats,")
                .or_set(path, "nf4"),
        );
        return false;
    }
    let float = matches!(quantization.storage, DType::F32 | DType::BF16 | DType::F16);
    faults.when(!float, || {
        let (path, stored) = ("quantization.storage", quantization.storage.name());
        Fault::new(path, format!("FSDP shards floats, and 4-bit weights are stored as {stored}"))
            .or_set(path, plan.weights.name())
    });
    float
}

fn types(engine: &str, types: Option<MixedPrecision>, plan: &TrainPlan, faults: &mut Faults) {
    let Some(types) = types else { return };
    faults.float(&format!("{engine}.mixed_precision.parameters"), types.parameters);
    faults.float(&format!("{engine}.mixed_precision.reduce"), types.reduce);
    faults.when(plan.autocast.is_some(), || {
        let path = format!("{engine}.mixed_precision");
        Fault::unsupported("autocast", format!("{{autocast}} together with {{{path}}}"))
            .or_drop("autocast")
            .or_drop(path)
    });
}
