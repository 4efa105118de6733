//! Recorded runs as plans, as truth/ledger/measure.py ran them.

use serde_json::{Value, json};

use super::keys::{self, put};
use super::ledger::model_of;
use crate::dtype::DType;
use crate::plan::adapter::{AdapterPlan, LoraPlan, TaskType};
use crate::plan::{
    Addresses, AllocatorOptions, Gpu, Gpus, InferPlan, Outliers, PlanError, Quantization, RunPlan, Stack, Targets,
    TrainPlan, import,
};
use crate::typed;

/// What a row asks for.
pub fn plan(row: &Value) -> Result<RunPlan, String> {
    match row["run"]["task"] == "infer" {
        true => Ok(RunPlan::Infer(Box::new(generation(row)?))),
        false => Ok(RunPlan::Train(Box::new(training(row)?))),
    }
}

/// What running by a trainer means, in the keys of a run.
fn implied(task: &str) -> Option<Value> {
    match task {
        "train" | "deepspeed" => Some(json!({})),
        "trainer" => Some(json!({"mask": true, "clip": true, "keep_outputs": false, "optimizer": null})),
        "sft" => {
            Some(json!({"mask": true, "clip": true, "keep_outputs": false, "optimizer": null, "loss": "trl-fused"}))
        }
        _ => None,
    }
}

/// A run of training.
pub(super) fn training(row: &Value) -> Result<TrainPlan, String> {
    let mut run = row["run"].clone();
    let task = run["task"].as_str().unwrap_or_default().to_owned();
    let implied = implied(&task).ok_or_else(|| format!("task {} is not simulated yet", run["task"]))?;
    for (key, value) in implied.as_object().into_iter().flatten() {
        run[key] = value.clone();
    }
    let mut tree = json!({});
    if task == "trainer" || task == "sft" {
        let name = run["trainer_optim"].as_str().unwrap_or("adamw_torch_fused");
        let known = import::trainer_optimizer(name).ok_or_else(|| format!("trainer_optim {name} is not known"))?;
        tree["optimizer"] = json!({"kind": known.0, "implementation": known.1, "wide_embeddings": true});
    }
    keys::read(keys::ANY, &run, &mut tree);
    keys::read(keys::TRAINING, &run, &mut tree);
    insert_media(row, &mut tree)?;
    if run["padded"] == true {
        // Every second sample is a quarter shorter.
        let [batch, seq] = ["batch", "seq"].map(|key| run[key].as_u64().unwrap_or(0));
        put(&mut tree, "batch.mask", true.into());
        put(&mut tree, "batch.real_tokens", (batch * seq - batch / 2 * (seq / 4)).into());
    }
    // A pipeline cuts the batch of a step into micro-batches.
    let micro = run["dist"]["microbatches"].as_u64().filter(|_| run["dist"]["engine"] == "mesh").unwrap_or(1).max(1);
    if micro > 1 {
        put(&mut tree, "batch.batch_size", (run["batch"].as_u64().unwrap_or(0) / micro).into());
        put(&mut tree, "gradient_accumulation", (run["grad_accum"].as_u64().unwrap_or(1) * micro).into());
    }
    tree["parallel"] = super::distributed::parallel(&run["dist"])?;
    let mut plan: TrainPlan = typed::read(tree).map_err(|error| format!("run: {error}"))?;
    plan.adapter = adapter(&run)?;
    plan.quantization = quantization(row)?;
    if run["model_code"].as_str().is_some_and(|code| code.starts_with("litgpt")) {
        // LitGPT's loop rebinds its names when the next forward pass is over. Lightning quantises every linear.
        plan.keep_loss = true;
        let lightning =
            |known| Quantization { skip: Some(Vec::new()), packed_from: Some(DType::F16), prepare: false, ..known };
        plan.quantization = plan.quantization.map(lightning);
    }
    (plan.gpu, plan.allocator, plan.stack) = machine(row)?;
    Ok(plan)
}

/// A run of `generate`: greedy, its length forced by `min_new_tokens`.
pub(super) fn generation(row: &Value) -> Result<InferPlan, String> {
    let run = &row["run"];
    for (key, what) in [("lora", "adapters of generate"), ("peft", "adapters of generate"), ("dist", "several cards")] {
        if !run[key].is_null() {
            return Err(format!("{what} are not simulated yet"));
        }
    }
    let mut tree = json!({"new_tokens": 0});
    keys::read(keys::ANY, run, &mut tree);
    keys::read(keys::GENERATION, run, &mut tree);
    let generates = tree["new_tokens"] != 0;
    tree["forced_length"] = generates.into();
    insert_media(row, &mut tree)?;
    // A pretend card holds no data, so every sequence looks finished after its first token, unless the loop was made to
    // go on.
    if generates && is_replayed(row) && run["all_tokens"] != true {
        tree["stop_after"] = 1.into();
    }
    if run["use_cache"] == false {
        tree["cache"] = "none".into();
    } else if run["cache"] == "quantized" {
        let mut how = json!({});
        keys::read(keys::CACHE, &run["cache_config"], &mut how);
        tree["cache"] = json!({"quantized": how});
    } else if !run["cache"].is_null() {
        tree["cache"] = run["cache"].clone();
    }
    // In the model's own type unless the row says otherwise.
    if let (Some(assistant), false) = (tree["assistant"].as_object_mut(), run["weights"].is_null()) {
        assistant.entry("weights").or_insert_with(|| run["weights"].clone());
    }
    let mut plan: InferPlan = typed::read(tree).map_err(|error| format!("run: {error}"))?;
    plan.quantization = quantization(row)?;
    (plan.gpu, plan.allocator, plan.stack) = machine(row)?;
    Ok(plan)
}

fn insert_media(row: &Value, tree: &mut Value) -> Result<(), String> {
    let run = &row["run"];
    let batch = run["batch"].as_u64().ok_or("run.batch is missing")?;
    if let Some([height, width]) = run["grid"].as_array().map(Vec::as_slice) {
        // Rows count patches.
        let side = model_of(row)?.image_patches().map_or(1, |cut| cut.side);
        let pixels = |patches: &Value| patches.as_u64().unwrap_or(0).saturating_mul(side);
        put(tree, "batch.images", json!([batch, pixels(height), pixels(width)]));
    }
    if row["kind"] == "speech" {
        put(tree, "batch.audio_frames", 3000.into());
    }
    Ok(())
}

fn is_replayed(row: &Value) -> bool {
    row["gpu"].as_str().is_some_and(|gpu| gpu.starts_with("replay"))
}

/// The card a row names (the H200 where it names none), how its allocator was set, and the software.
fn machine(row: &Value) -> Result<(Gpu, AllocatorOptions, Stack), String> {
    const KNOWN: [&str; 7] = ["A100-80GB", "A10G", "RTX 4090", "T4", "L40S", "H100-80GB", "B200-180GB"];
    let (run, name) = (&row["run"], row["gpu"].as_str().unwrap_or_default());
    let named = KNOWN.iter().find(|card| name.contains(card.split('-').next().unwrap_or_default()));
    let mut gpu = named.and_then(|card| Gpus::embedded().find(card).ok()).unwrap_or_else(Gpu::h200);
    if is_replayed(row) {
        // The pretend driver gives every card the H200's.
        gpu.machine.context = Some(Gpu::h200().context());
    }
    if run["dist"].is_object() {
        // One card of a world that is not there: DDP's communicator is real and has no one to connect to, the others'
        // process group is torch's fake one.
        gpu.machine.nccl_channels = 0;
        if run["dist"]["engine"] != "ddp" {
            (gpu.machine.nccl, gpu.machine.communicator) = (0, 0);
        }
    }
    let said = |error: PlanError| error.to_string();
    let (mut allocator, _) = AllocatorOptions::parse(run["alloc_conf"].as_str().unwrap_or_default()).map_err(said)?;
    // A pretend card hands out addresses in its own way, unless the row says that it was a rehearsal's.
    let ascending = is_replayed(row) && row["addresses"] != "driver";
    allocator.addresses = if ascending { Addresses::Ascending } else { Addresses::Driver };
    let versions = ["software", "versions"].into_iter().filter_map(|key| row[key].as_object()).flatten();
    let versions = versions.filter_map(|(name, version)| Some((name.as_str(), version.as_str()?)));
    Ok((gpu, allocator, Stack::recorded(versions).map_err(said)?))
}

/// `run.lora`: `apply_lora` of measure.py; `run.peft`: any method, as the probe applies it.
fn adapter(run: &Value) -> Result<Option<AdapterPlan>, String> {
    let said = |error: PlanError| error.to_string();
    if !run["peft"].is_null() {
        return AdapterPlan::from_adapter_config(&run["peft"]).map(|(plan, _)| Some(plan)).map_err(said);
    }
    let lora = &run["lora"];
    if lora.is_null() {
        return Ok(None);
    }
    let targets: Targets =
        typed::read(lora["targets"].clone()).map_err(|_| format!("lora targets {}", lora["targets"]))?;
    // Rows of one's own may carry further keys of `LoraConfig`.
    let further = match &lora["config"] {
        Value::Null => LoraPlan::default(),
        config => LoraPlan::from_adapter_config(config).map_err(said)?.0,
    };
    let sft = run["task"] == "sft";
    Ok(Some(AdapterPlan::Lora(LoraPlan {
        rank: lora["r"].as_u64().ok_or("run.lora.r is missing")?,
        dropout: lora["dropout"].as_f64().unwrap_or(0.0),
        targets,
        // TRL holds the adapters of quantised models in bf16.
        dtype: (sft && !run["quant"].is_null()).then_some(DType::BF16),
        follow_base: !sft && lora["fp32_adapter"] == false,
        task: Some(TaskType::CausalLm),
        ..further
    })))
}

/// `run.quant`: `quantize` of measure.py. Weights are random there, so outliers are too.
fn quantization(row: &Value) -> Result<Option<Quantization>, String> {
    let run = &row["run"];
    let Some(name) = run["quant"].as_str().filter(|name| stored(name).is_none()) else { return Ok(None) };
    let quantization = Quantization::parse(name).map_err(|error| error.to_string())?;
    let storage = match &run["quant_storage"] {
        Value::Null => DType::U8,
        storage => typed::read(storage.clone()).map_err(|error| format!("run.quant_storage: {error}"))?,
    };
    Ok(Some(Quantization {
        outliers: Outliers::RandomWeights,
        initializer_range: row["config"]["initializer_range"].as_f64().unwrap_or(0.02),
        skip: Some(vec!["lm_head".into()]),
        // measure.py looks for `nn.Linear` alone.
        conv1d: false,
        one_by_one: true,
        prepare: run["prepare_kbit"] != false && run["task"] != "sft",
        storage,
        ..quantization
    }))
}

/// The `quantization_config` that a row's name of another library stands for.
pub(super) fn stored(name: &str) -> Option<Value> {
    let bits: u64 = name.strip_prefix("hqq")?.parse().ok()?;
    let settings = json!({"nbits": bits, "group_size": 64, "axis": 1});
    Some(json!({
        "quant_method": "hqq", "quant_config": {"weight_quant_params": settings}, "skip_modules": ["lm_head"],
    }))
}
