//! Megatron-Bridge's published peaks: decimal GB, mostly of rank 0. What a row does not say is what the recipe of that model
//! and card count says (src/megatron/bridge/{recipes,perf_recipes}/*/h100 at 067f987d).

use serde_json::Value;

use super::{compared, number};
use crate::dtype::DType;
use crate::memory::megatron;
use crate::model::Model;
use crate::plan::parallel::megatron::{
    CrossEntropy, Dispatcher, Experts, Fp8, Fp8Recipe, Megatron, PrecisionAware, Recompute, RecomputeModule,
};
use crate::plan::parallel::{Engine, Mesh, Parallel};
use crate::plan::{AllocatorOptions, Batch, Gpus, Package, Stack, TrainPlan, Version};
use crate::source::catalogue;
use crate::verify::kinds::Score;

/// A row of megatron_bridge.json.
pub(super) fn score(index: u64, row: &Value) -> Vec<Score> {
    let model = row["model"].as_str().unwrap_or_default();
    let modules = row["recompute_modules"].as_array().map(|list| {
        let names: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
        format!(" recompute [{}]", names.join(" "))
    });
    let label = format!("row {index} {model}{}", modules.unwrap_or_default());
    let skip = |why: &str| vec![Score::skipped(&label, why)];
    if let Some(why) = beyond(row, model) {
        return skip(why);
    }
    let simulated = plan(row).and_then(|(model, plan)| megatron::ranks(&model, &plan).map_err(|e| e.to_string()));
    match (simulated, number(&row["measured_bytes"])) {
        (Ok(ranks), Some(measured)) => {
            // Where no rank is named it is the worst.
            let named =
                row["metric"].as_str().is_some_and(|metric| metric.contains("rank-0") || metric.contains("rank 0"));
            let peaks = ranks.iter().map(|rank| rank.simulation.replay.peak_allocated());
            let predicted = peaks.take(if named { 1 } else { usize::MAX }).max().unwrap_or(0);
            vec![compared(&label, "allocated", predicted, measured)]
        }
        (Err(why), _) => skip(&why),
        _ => skip("nothing was measured"),
    }
}

/// Why a row cannot be simulated.
fn beyond(row: &Value, model: &str) -> Option<&'static str> {
    if model.contains("Nemotron") {
        return Some("hybrid Mamba layers under Megatron are not simulated");
    }
    let lora = row["task"].as_str().is_some_and(|task| task.contains("LoRA"));
    lora.then_some("the rank, the targets and the batch of the LoRA runs are not published")
}

fn model(row: &Value) -> Result<Model, String> {
    let config = match &row["architecture"] {
        Value::Null => {
            let name = row["model"].as_str().unwrap_or_default();
            catalogue::find(name).ok_or(format!("the architecture of {name} is not known"))?.config
        }
        shape => super::config(shape, None)?,
    };
    Model::new(config, None).map_err(|e| e.to_string())
}

fn options(row: &Value) -> Result<Megatron, String> {
    let text = |key: &str| row[key].as_str().unwrap_or_default();
    let modules = row["recompute_modules"].as_array().cloned().unwrap_or_default();
    let modules: Result<Vec<RecomputeModule>, _> = modules.into_iter().map(crate::typed::read).collect();
    let aware = text("optimizer").contains("precision-aware");
    // The recipe for few cards of Qwen3's mixture recomputes every layer and sums gradients in fp32.
    let offload = row["optimizer_cpu_offload_fraction"].as_f64();
    let small = row.get("optimizer_cpu_offload_fraction").is_some();
    Ok(Megatron {
        virtual_pipeline: number(&row["vp"]).unwrap_or(1),
        main_gradients: if small { DType::F32 } else { DType::BF16 },
        overlap_grad_reduce: row["overlap_grad_reduce"] == true || text("dispatcher").contains("HybridEP") || small,
        precision_aware: aware.then_some(PrecisionAware {
            exp_avg: DType::BF16,
            exp_avg_sq: DType::BF16,
            store_param_remainders: true,
            // Bridge's mixed precision names a recipe by default.
            fp8_recipe: true,
        }),
        optimizer_cpu_offload_percent: offload.map_or(0, |share| (share * 100.0).round() as u64),
        recompute: match small {
            true => Recompute::Uniform(1),
            false => Recompute::Selective(modules.map_err(|e| e.to_string())?),
        },
        cross_entropy: CrossEntropy::Te,
        moe: Experts {
            shared_expert_overlap: row["moe"]["shared_expert_overlap"] == true,
            router_fp32: row["moe"].is_object() || number(&row["ep"]).is_some(),
            dispatcher: match text("dispatcher").contains("HybridEP") {
                true => Dispatcher::Hybridep,
                false => Dispatcher::Alltoall,
            },
            ..Experts::default()
        },
        fp8: text("precision").contains("FP8 current").then_some(Fp8 {
            recipe: Fp8Recipe::Tensorwise,
            param_gather: true,
            ..Fp8::default()
        }),
        ..Megatron::default()
    })
}

/// What a row ran.
pub fn plan(row: &Value) -> Result<(Model, TrainPlan), String> {
    let get = |key: &str| number(&row[key]).ok_or(format!("{key} is missing"));
    let or_one = |key: &str| number(&row[key]).unwrap_or(1).max(1);
    let options = options(row)?;
    let (tp, pp, cp) = (or_one("tp"), or_one("pp"), or_one("cp"));
    // "2 nodes of H100 80GB (16 GPUs if nodes are 8-way)".
    let dp = number(&row["dp"]).unwrap_or(16 / (tp * pp * cp).min(16));
    let mesh = Mesh {
        dp_shard: dp,
        tp,
        sequence_parallel: tp > 1,
        cp,
        ep: or_one("ep"),
        etp: number(&row["ep"]).map(|_| or_one("etp")),
        pp,
        ..Mesh::default()
    };
    let micro = get("micro_batch_size")?;
    let accumulation = get("global_batch_size")? / micro.max(1) / dp.max(1);
    let plan = TrainPlan {
        // The recipes' sequence where a row has none.
        batch: Batch { batch_size: micro, seq_len: number(&row["seq_len"]).unwrap_or(4096), ..Batch::default() },
        gradient_accumulation: u32::try_from(accumulation).unwrap_or(1).max(1),
        parallel: Some(Parallel { mesh, engine: Engine::Megatron(options), no_sync: false }),
        gpu: Gpus::embedded().find("H100").map_err(|e| e.to_string())?,
        allocator: AllocatorOptions {
            expandable_segments: row["outcome"].as_str().is_some_and(|text| text.contains("expandable_segments")),
            ..AllocatorOptions::default()
        },
        stack: Stack::default().with(Package::TransformerEngine, Version::new(2, 17, 0)),
        ..TrainPlan::default()
    };
    Ok((model(row)?, plan))
}
