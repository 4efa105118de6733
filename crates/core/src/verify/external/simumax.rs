//! Megatron runs that SimuMax published: exact counters of every rank on 8 x B200, and reconstructed ones on A100.

use serde_json::Value;

use super::{compared, number};
use crate::dtype::DType;
use crate::memory::megatron;
use crate::model::Model;
use crate::plan::parallel::megatron::{ContextExchange, CrossEntropy, Experts, Fp8, Megatron, Recompute};
use crate::plan::parallel::{Engine, Mesh, Parallel};
use crate::plan::{AllocatorOptions, Batch, Gpus, Package, Stack, TrainPlan, Version};
use crate::verify::kinds::Score;

/// A row of simumax_b200.json or simumax_a100.json; rows that repeat another's memory run are left out.
pub(super) fn score(gpu: &str, row: &Value) -> Vec<Score> {
    let case = row["case"].as_str().unwrap_or_default().to_owned();
    if row["memory_reused_from_case"].is_string() {
        return Vec::new();
    }
    let skip = |why: String| vec![Score::skipped(&case, &why)];
    let ranks = match plan(row, gpu).and_then(|(model, plan)| megatron::ranks(&model, &plan).map_err(|e| e.to_string()))
    {
        Ok(ranks) => ranks,
        Err(why) => return skip(why),
    };
    let gpus = number(&row["world_size"]).unwrap_or(1) / ranks.len().max(1) as u64;
    let mut rows = Vec::new();
    for rank in &ranks {
        let replay = &rank.simulation.replay;
        // The last pipeline stage has the last ranks.
        let of_rank = |field: &str| {
            let own = (rank.stage * gpus..(rank.stage + 1) * gpus).map(|index| index.to_string());
            own.filter_map(|index| number(&row["measured_by_rank"][index.as_str()][field])).max()
        };
        let label = format!("{case} stage {}", rank.stage);
        if let Some(measured) = of_rank("max_allocated_bytes") {
            let predicted = replay.peak_allocated();
            rows.push(compared(&label, "allocated by stage", predicted, measured));
        }
        if let Some(measured) = of_rank("max_reserved_bytes") {
            let predicted = replay.peak_reserved();
            rows.push(compared(&label, "reserved by stage", predicted, measured));
        }
    }
    let most = |of: fn(&crate::memory::allocator::Replay) -> u64| {
        ranks.iter().map(|rank| of(&rank.simulation.replay)).max().unwrap_or(0)
    };
    let measured = number(&row["measured_bytes"]).or_else(|| number(&row["measured_bytes_reconstructed"]));
    for (quantity, predicted, measured) in [
        ("allocated", most(|replay| replay.peak_allocated()), measured),
        ("reserved", most(|replay| replay.peak_reserved()), number(&row["measured_reserved_bytes"])),
    ] {
        if let Some(measured) = measured {
            rows.push(compared(&case, quantity, predicted, measured));
        }
    }
    rows
}

/// What a row ran.
pub fn plan(row: &Value, gpu: &str) -> Result<(Model, TrainPlan), String> {
    let get = |key: &str| number(&row[key]).ok_or(format!("{key} is missing"));
    let config = super::config(&row["architecture"], Some(get("padded_vocab_size")?))?;
    let model = Model::new(config, None).map_err(|e| e.to_string())?;
    let moe = &row["moe"];
    let cp_comm = match row["cp_comm_type"].as_str() {
        None | Some("a2a") => ContextExchange::A2a,
        Some("p2p") => ContextExchange::P2p,
        Some(exchange) => return Err(format!("context parallel by {exchange} is not simulated")),
    };
    if let Some(dispatcher) = moe["token_dispatcher"].as_str().filter(|dispatcher| *dispatcher != "alltoall") {
        return Err(format!("the {dispatcher} dispatcher is not simulated"));
    }
    let capacity = moe["expert_capacity_factor"].as_f64().filter(|_| moe["pad_expert_input_to_capacity"] == true);
    let options = Megatron {
        virtual_pipeline: get("vp")?,
        cp_comm,
        distributed_optimizer: row["distributed_optimizer"] == true,
        main_gradients: if row["grad_accum_dtype"] == "bf16" { DType::BF16 } else { DType::F32 },
        recompute: recompute(row["recompute"].as_str().unwrap_or_default()),
        fp8: (row["fp8"] == true).then(Fp8::default),
        cross_entropy: match row["cross_entropy_fusion"].as_str() {
            Some(fusion) if fusion.starts_with("te") => CrossEntropy::Te,
            _ => CrossEntropy::Unfused,
        },
        moe: Experts { capacity_percent: capacity.map(|factor| (factor * 100.0).round() as u64), ..Experts::default() },
        ..Megatron::default()
    };
    let mesh = Mesh {
        dp_shard: get("dp")?,
        tp: get("tp")?,
        sequence_parallel: row["sequence_parallel"] == true && get("tp")? > 1,
        cp: get("cp")?,
        ep: get("ep")?,
        etp: (get("ep")? > 1).then_some(get("etp")?),
        pp: get("pp")?,
        ..Mesh::default()
    };
    let batch = Batch { batch_size: get("micro_batch_size")?, seq_len: get("seq_len")?, ..Batch::default() };
    // The files' `software`; torch on A100 is not named there.
    let [core, engine] = if gpu == "B200" { [14, 11] } else { [12, 1] };
    let stack = Stack::default()
        .with(Package::MegatronCore, Version::new(0, core, 0))
        .with(Package::TransformerEngine, Version::new(2, engine, 0))
        .with(Package::Torch, Version::new(2, 10, 0));
    let plan = TrainPlan {
        batch,
        gradient_accumulation: u32::try_from(get("num_microbatches")?).unwrap_or(u32::MAX),
        clip: true,
        parallel: Some(Parallel { mesh, engine: Engine::Megatron(options), no_sync: false }),
        gpu: Gpus::embedded().find(gpu).map_err(|e| e.to_string())?,
        allocator: AllocatorOptions::default(),
        stack,
        ..TrainPlan::default()
    };
    Ok((model, plan))
}

/// What the arguments of a launcher say, as `--recompute-method block --recompute-num-layers 0`.
fn recompute(arguments: &str) -> Recompute {
    let mut words = arguments.split(|c: char| c.is_whitespace() || "()".contains(c));
    let layers = words.by_ref().find(|word| *word == "--recompute-num-layers").and_then(|_| words.next()?.parse().ok());
    match layers {
        Some(0) | None => Recompute::None,
        Some(layers) if arguments.contains("uniform") => Recompute::Uniform(layers),
        Some(layers) => Recompute::Block(layers),
    }
}
