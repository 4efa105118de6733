//! The parts of ledger rows that speak of several cards.

use serde_json::Value;

use super::ledger::dtype;
use crate::dtype::DType;
use crate::plan::parallel::{
    BackwardPrefetch, ContextParallel, Ddp, DeepSpeed, DeepSpeedFile, Engine, Fsdp1, Fsdp2, Mesh, MixedPrecision,
    Pipeline, Place, Reshard, Rotate, Schedule, Strategy, TensorForm, TensorParallel, Wrap,
};
use crate::plan::{Gpu, Parallel};

/// `run.dist` as measure.py runs it.
pub(super) fn parallel(run: &Value) -> Result<Option<Parallel>, String> {
    let dist = &run["dist"];
    if dist.is_null() {
        return Ok(None);
    }
    let world = dist["world"].as_u64().ok_or("run.dist.world is missing")?;
    let replicas = dist["replicate"].as_u64().unwrap_or(1).max(1);
    let weights = dtype(&run["weights"]).unwrap_or(DType::BF16);
    let engine = match dist["engine"].as_str() {
        Some("ddp") => Engine::Ddp(Ddp {
            gradient_as_bucket_view: dist["bucket_view"] == true,
            static_graph: dist["static_graph"] == true,
            ..Ddp::default()
        }),
        Some("fsdp1") => Engine::Fsdp1(fsdp1(dist)),
        Some("fsdp2") => Engine::Fsdp2(fsdp2(dist)),
        Some("tp") if world == dist["tp"].as_u64().unwrap_or(world) => Engine::Tp(tensor(dist)?),
        Some("tp") => Engine::Fsdp2(Fsdp2 { tensor: tensor(dist)?, ..fsdp2(dist) }),
        Some("mesh") => Engine::Fsdp2(Fsdp2 { tensor: tensor(dist)?, ..staged(dist)? }),
        Some("deepspeed") => Engine::Deepspeed(zero(dist, weights)?),
        _ => return Err(format!("engine {} is not known", dist["engine"])),
    };
    // Only DDP's rows have a real communicator; the others' process group is torch's fake one.
    let (mesh, communicators) = match engine {
        Engine::Ddp(_) => (Mesh::replicated(world), 1),
        _ => {
            let [tp, cp, pp] = ["tp", "cp", "pp"].map(|axis| dist[axis].as_u64().unwrap_or(1).max(1));
            (
                Mesh {
                    dp_replicate: replicas,
                    dp_shard: world / replicas / (tp * cp * pp),
                    tp,
                    cp,
                    pp,
                    ..Mesh::default()
                },
                0,
            )
        }
    };
    Ok(Some(Parallel { mesh, engine, communicators, no_sync: dist["no_sync"] == true }))
}

/// Rows are measured on one card: a communicator of theirs has no one to connect to.
pub(super) fn on_a_card(mut gpu: Gpu) -> Gpu {
    gpu.machine.nccl_channels = 0;
    gpu
}

/// `mp`: true, or the types by name.
fn mixed(dist: &Value, reduce: DType) -> Option<MixedPrecision> {
    match &dist["mp"] {
        Value::Bool(true) => Some(MixedPrecision { parameters: DType::BF16, reduce }),
        Value::Object(types) => {
            let named = |key: &str| types.get(key).and_then(dtype);
            Some(MixedPrecision {
                parameters: named("param").unwrap_or(DType::BF16),
                reduce: named("reduce").unwrap_or(reduce),
            })
        }
        _ => None,
    }
}

fn names(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

fn fsdp1(dist: &Value) -> Fsdp1 {
    Fsdp1 {
        strategy: match dist["strategy"].as_str() {
            Some("grad_op" | "hybrid_grad_op") => Strategy::GradOp,
            Some("no") => Strategy::No,
            _ => Strategy::Full,
        },
        mixed_precision: mixed(dist, DType::BF16),
        wrap: if dist["wrap"] == "peft" { Wrap::Peft } else { Wrap::LongestStack },
        offload: dist["offload"] == true,
        ignored: names(&dist["ignored"]),
        backward_prefetch: match dist["backward_prefetch"].as_str() {
            Some("post") => BackwardPrefetch::Post,
            Some("none") => BackwardPrefetch::None,
            _ => BackwardPrefetch::Pre,
        },
        forward_prefetch: dist["forward_prefetch"] == true,
        flat_params: dist["orig_params"] == false,
    }
}

fn fsdp2(dist: &Value) -> Fsdp2 {
    let reshard = |key: &str| match dist[key].as_u64() {
        Some(ranks) => Reshard::To(ranks),
        None => Reshard::Flag(dist[key] != false),
    };
    Fsdp2 {
        reshard_after_forward: reshard("reshard"),
        reshard_root: reshard(if dist["reshard_root"].is_null() { "reshard" } else { "reshard_root" }),
        mixed_precision: mixed(dist, DType::F32),
        wrap: Wrap::LongestStack,
        offload: dist["offload"] == true,
        ignored: names(&dist["ignored"]),
        ..Fsdp2::default()
    }
}

/// Pipelines and contexts, and the card of them that was looked at.
fn staged(dist: &Value) -> Result<Fsdp2, String> {
    let schedule = match dist["schedule"].as_str() {
        None | Some("1F1B") => Schedule::OneForwardOneBackward,
        Some("GPipe") => Schedule::Gpipe,
        Some("Interleaved1F1B") => Schedule::Interleaved,
        Some("LoopedBFS") => Schedule::LoopedBfs,
        Some("InterleavedZeroBubble") => Schedule::InterleavedZeroBubble,
        Some("ZBVZeroBubble") => Schedule::ZbvZeroBubble,
        Some(other) => return Err(format!("the schedule {other} is not known")),
    };
    let [pp, cp] = ["pp_rank", "cp_rank"].map(|key| dist[key].as_u64().unwrap_or(0));
    Ok(Fsdp2 {
        pipeline: Pipeline { schedule, stages_per_rank: dist["stages_per_rank"].as_u64(), ..Pipeline::default() },
        context: ContextParallel {
            rotate: if dist["rotate"] == "alltoall" { Rotate::Alltoall } else { Rotate::Allgather },
            load_balance: dist["load_balance"] != false,
        },
        rank: Some(Place { pp, cp }),
        ..fsdp2(dist)
    })
}

fn zero(dist: &Value, weights: DType) -> Result<DeepSpeed, String> {
    if weights == DType::F32 {
        return Err("deepspeed rows have 16-bit weights".into());
    }
    let mut config = match &dist["zero_config"] {
        Value::Null => Value::Object(Default::default()),
        config => config.clone(),
    };
    config["stage"] = dist["zero"].clone();
    let mut document = match &dist["config"] {
        Value::Null => Value::Object(Default::default()),
        document => document.clone(),
    };
    document["zero_optimization"] = config;
    let file = DeepSpeedFile::read(&document, None).map_err(|error| error.to_string())?;
    Ok(file.engine)
}

/// `form` of tensor parallel.
fn tensor(dist: &Value) -> Result<TensorParallel, String> {
    match dist["form"].as_str() {
        None | Some("transformers") => Ok(TensorParallel::default()),
        Some("torchtitan") => {
            Ok(TensorParallel { form: TensorForm::Torchtitan, loss_parallel: dist["loss_parallel"] == true })
        }
        Some(form) => Err(format!("tensor parallel of the form {form} is not simulated")),
    }
}

/// The group a row is scored in.
pub(super) fn group(run: &Value) -> &'static str {
    match (run["dist"]["engine"].as_str(), run["dist"]["zero"].as_u64()) {
        (Some("ddp"), _) => "ddp",
        (Some("fsdp1"), _) => "fsdp1",
        (Some("fsdp2"), _) => "fsdp2",
        (Some("mesh"), _) if run["dist"]["pp"].as_u64().is_some_and(|pp| pp > 1) => "fsdp2-pp",
        (Some("mesh"), _) => "fsdp2-cp",
        (Some("tp"), _) if run["dist"]["tp"] == run["dist"]["world"] => "tp",
        (Some("tp"), _) => "fsdp2-tp",
        (_, Some(0)) => "zero-0",
        (_, Some(1)) => "zero-1",
        (_, Some(2)) => "zero-2",
        _ => "zero-3",
    }
}
