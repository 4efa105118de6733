//! The ledger: recorded runs against their simulation.

use serde::Serialize;
use serde_json::Value;

use super::recorded;
use crate::dtype::DType;
use crate::lens::Question;
use crate::memory::simulation::{self, Simulation};
use crate::model::Model;
use crate::plan::{
    Addresses, AllocatorOptions, AttentionKind, Batch, CheckpointOptions, Checkpointing, Gpu, Gpus, Implementation,
    Kernels, Optimizer, RunPlan, TrainPlan,
};

/// How one run compares with its simulation.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum LedgerRow {
    /// Both figures exist.
    Scored(Box<Scored>),
    /// There is no prediction, and why.
    Skipped {
        /// The row.
        id: String,
        /// Why.
        skipped: String,
    },
}

/// A row with both figures.
#[derive(Debug, Clone, Serialize)]
pub struct Scored {
    /// The row.
    pub id: String,
    /// The model.
    pub model: String,
    /// What kind of run: `train`, `lora`, `infer`, ….
    pub group: String,
    /// Whether it is close enough: peak allocated within 3 % or the row's own `residual`, or predicted not to fit where it did not.
    pub ok: bool,
    /// Peak allocated.
    pub allocated: Measure,
    /// Peak reserved.
    pub reserved: Measure,
    /// What the whole process held.
    pub process: Measure,
    /// Phase by phase.
    pub phases: Vec<PhaseRow>,
    /// Whether the run ran out of memory, and whether that was predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_of_memory: Option<bool>,
}

/// A predicted and a measured number of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Measure {
    /// Ours.
    pub predicted: Option<u64>,
    /// The run's.
    pub measured: Option<u64>,
}

impl Measure {
    /// The relative error in percent, where both exist.
    pub fn error(&self) -> Option<f64> {
        let (predicted, measured) = (self.predicted? as f64, self.measured? as f64);
        (measured > 0.0).then(|| 100.0 * (predicted - measured) / measured)
    }
}

/// One phase.
#[derive(Debug, Clone, Serialize)]
pub struct PhaseRow {
    /// Its name.
    pub phase: String,
    /// Allocated at its end.
    pub after: Measure,
    /// Most allocated in it.
    pub peak: Measure,
    /// Most reserved in it.
    pub peak_reserved: Measure,
}

/// How far off peak allocated may be, in percent; further where the row names what is left unexplained of it.
fn limit(row: &Value) -> f64 {
    row["residual"]["percent"].as_f64().map_or(3.0, |known| known.abs().max(3.0))
}

/// Why a row says nothing about a prediction.
fn beside_the_point(row: &Value) -> Option<&'static str> {
    let replayed = row["gpu"].as_str().is_some_and(|gpu| gpu.starts_with("replay"));
    match row["config"]["model_type"].as_str() {
        _ if row["gpu"] == "cpu" => Some("measured on a CPU, whose kernels and allocator are others"),
        Some("dbrx") if replayed && row["run"]["task"] != "infer" => {
            Some("a replay holds no data, and DBRX's loop over experts then finds no token for any of them")
        }
        Some("dinov2") if row["config"]["use_swiglu_ffn"] == true && is_before_5_22(row) => {
            Some("DINOv2's gated MLP was one matrix until transformers 5.22 cut it in two, which the model follows")
        }
        _ => None,
    }
}

/// Whether a row was made with a transformers before 5.22.
fn is_before_5_22(row: &Value) -> bool {
    let version = row["software"]["transformers"].as_str().or(row["versions"]["transformers"].as_str());
    let mut numbers = version.unwrap_or_default().split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) < (Some(5), Some(22))
}

/// Scores one row.
pub fn score(row: &Value) -> LedgerRow {
    let id = row["id"].as_str().unwrap_or("(no id)").to_owned();
    if let Some(why) = beside_the_point(row) {
        return LedgerRow::Skipped { id, skipped: why.into() };
    }
    match predict(row) {
        Ok(scored) => LedgerRow::Scored(Box::new(scored)),
        Err(skipped) => LedgerRow::Skipped { id, skipped },
    }
}

fn predict(row: &Value) -> Result<Scored, String> {
    let (simulation, gpu) = simulate(row)?;
    Ok(compare(row, &simulation, &gpu))
}

/// A row beside its simulation on a card.
pub fn compare(row: &Value, simulation: &Simulation, gpu: &Gpu) -> Scored {
    let (log, replay) = (&simulation.log, &simulation.replay);
    let measured = &row["measured"];
    let mut scored = Scored {
        id: row["id"].as_str().unwrap_or_default().to_owned(),
        model: row["model"].as_str().unwrap_or_default().to_owned(),
        group: group(&row["run"]).into(),
        ok: false,
        allocated: Measure { predicted: Some(replay.peak_allocated()), measured: measured["peak_allocated"].as_u64() },
        reserved: Measure { predicted: Some(replay.peak_reserved()), measured: measured["peak_reserved"].as_u64() },
        process: Measure { predicted: Some(simulation.process_bytes()), measured: measured["nvml_used_end"].as_u64() },
        phases: Vec::new(),
        out_of_memory: None,
    };
    if row["oom"] == true {
        // measure.py builds the whole model on the card before an engine shards it.
        let built: u64 = simulation.program.parameters.iter().map(|p| p.shape.elements()).sum::<u64>()
            * dtype(&row["run"]["weights"]).unwrap_or(DType::BF16).size();
        let outside: u64 = simulation.process.iter().map(|part| part.bytes).sum();
        let fits = simulation.process_bytes().max(built + outside) <= gpu.memory;
        scored.out_of_memory = Some(!fits);
        scored.ok = !fits;
        // What was measured stopped half-way: there is nothing to compare with.
        for measure in [&mut scored.allocated, &mut scored.reserved, &mut scored.process] {
            measure.measured = None;
        }
        return scored;
    }
    scored.ok = scored.allocated.error().is_some_and(|error| error.abs() <= limit(row));
    for phase in measured["phases"].as_array().into_iter().flatten() {
        let name = phase["phase"].as_str().unwrap_or_default();
        let Some(ours) = log.phases.iter().position(|known| known == name).and_then(|at| replay.phases.get(at)) else {
            continue;
        };
        let pair = |predicted: u64, key: &str| Measure { predicted: Some(predicted), measured: phase[key].as_u64() };
        scored.phases.push(PhaseRow {
            phase: name.to_owned(),
            after: pair(ours.after, "after"),
            peak: pair(ours.peak, "peak"),
            peak_reserved: pair(ours.peak_reserved, "peak_reserved"),
        });
    }
    scored
}

/// The run of a row, simulated.
pub fn simulate(row: &Value) -> Result<(Simulation, Gpu), String> {
    let plan = run_plan(row)?;
    Ok((simulate_plan(&model_of(row)?, &plan)?, plan.gpu().clone()))
}

/// A plan that was read off a row, simulated.
pub fn simulate_plan(model: &Model, plan: &RunPlan) -> Result<Simulation, String> {
    let run = match plan {
        RunPlan::Train(plan) => simulation::train(model, plan),
        RunPlan::Infer(plan) => simulation::infer(model, plan),
        RunPlan::Serve(_) => return Err("an engine's own rules are no simulation".into()),
    };
    run.map_err(|error| error.to_string())
}

/// The run of a row, as a published formula is asked.
pub fn question(row: &Value) -> Result<Question, String> {
    Ok(match run_plan(row)? {
        RunPlan::Train(plan) => Question::of_train(&plan),
        RunPlan::Infer(plan) => Question::of_infer(&plan),
        RunPlan::Serve(_) => return Err("no formula is asked about a serving engine".into()),
    })
}

/// What a row asks for.
pub fn run_plan(row: &Value) -> Result<RunPlan, String> {
    match row["run"]["task"] == "infer" {
        true => Ok(RunPlan::Infer(Box::new(super::generate::plan(row)?))),
        false => Ok(RunPlan::Train(Box::new(train_plan(row)?))),
    }
}

/// What kind of run a row is, as the targets of accuracy group them.
fn group(run: &Value) -> &'static str {
    match run["quant"].as_str() {
        Some(_) if run["task"] == "infer" => "infer-quant",
        None if run["task"] == "infer" => "infer",
        _ if run["task"] == "trainer" => "trainer",
        _ if run["task"] == "sft" => "sft",
        _ if !run["dist"].is_null() => super::distributed::group(run),
        Some("int8") => "qlora-int8",
        Some(_) => "qlora-4bit",
        None if !run["lora"].is_null() => "lora",
        None if !run["peft"].is_null() => "peft",
        None if run["liger"] == true => "liger",
        None => "train",
    }
}

/// The model of a row, with the keys the run changed.
pub fn model_of(row: &Value) -> Result<Model, String> {
    let mut config = row["config"].clone();
    // These classes copy text keys of the top level into a section of their own when they are made; a key that is set on
    // the outside afterwards has no effect.
    let copied = matches!(config["model_type"].as_str(), Some("qwen2_vl" | "qwen2_5_vl"));
    let effective = |key: &String| !copied || key.contains('.');
    for (key, value) in row["run"]["overrides"].as_object().into_iter().flatten().filter(|(key, _)| effective(key)) {
        // Some configs know their layers by another name (`attribute_map`).
        let named = ["n_layer", "n_layers", "num_layers"].into_iter().find(|name| config.get(name).is_some());
        let key = match named.filter(|_| key == "num_hidden_layers" && config.get(key).is_none()) {
            Some(name) => name,
            None => key.as_str(),
        };
        // Older vision-language configs hold the text model's keys at the top; transformers moves them.
        let key = match key.strip_prefix("text_config.") {
            Some(inner) if config.get("text_config").is_none() && config.get(inner).is_some() => inner,
            _ => key,
        };
        let mut target = &mut config;
        for part in key.split('.') {
            if target.is_null() {
                *target = Value::Object(Default::default());
            }
            let Some(object) = target.as_object_mut() else { return Err(format!("overrides.{key}: no such section")) };
            target = object.entry(part).or_insert(Value::Null);
        }
        *target = value.clone();
    }
    // Rows are built with random weights in full, whatever the checkpoint holds.
    if let Some(object) = config.as_object_mut() {
        object.remove("quantization_config");
        if let Some(section) = row["run"]["quant"].as_str().and_then(recorded::stored) {
            object.insert("quantization_config".into(), section);
        }
    }
    // `from_config` of transformers 5 ties these heads; their checkpoints, and so the model truth, do not.
    match config.get("model_type").and_then(Value::as_str) {
        Some("t5" | "mt5") => config["tie_word_embeddings"] = true.into(),
        Some("internvl") => {
            let tied = config.get("tie_word_embeddings").cloned().unwrap_or(true.into());
            if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
                text.insert("tie_word_embeddings".into(), tied);
            }
        }
        _ => {}
    }
    // As measure.py cuts them when a run has fewer layers.
    if let Some(layers) = config.get("num_hidden_layers").and_then(Value::as_u64) {
        for key in ["layer_types", "no_rope_layers"] {
            if let Some(list) = config.get_mut(key).and_then(Value::as_array_mut) {
                list.truncate(usize::try_from(layers).unwrap_or(usize::MAX));
            }
        }
    }
    let model = Model::new(config, row["auto_class"].as_str()).map_err(|e| e.to_string())?;
    match model.notes().first() {
        Some(note) => Err(note.clone()),
        None => Ok(model),
    }
}

pub(super) fn train_plan(row: &Value) -> Result<TrainPlan, String> {
    let run = &row["run"];
    let sft = run["task"] == "sft";
    let trainer = run["task"] == "trainer" || sft;
    if run["task"] != "train" && run["task"] != "deepspeed" && !trainer {
        return Err(format!("task {} is not simulated yet", run["task"]));
    }
    let number = |key: &str| run[key].as_u64();
    // A pipeline cuts the batch of a step into micro-batches.
    let micro = run["dist"]["microbatches"].as_u64().filter(|_| run["dist"]["engine"] == "mesh").unwrap_or(1).max(1);
    let batch_size = number("batch").ok_or("run.batch is missing")? / micro;
    let grid = run["grid"].as_array().map(|grid| [0, 1].map(|i| grid.get(i).and_then(Value::as_u64).unwrap_or(1)));
    let optimizer = match run.get("optimizer") {
        _ if trainer => recorded::trainer_optimizer(run)?,
        None | Some(Value::Null) => Optimizer::default(),
        Some(name) => Optimizer {
            kind: serde_json::from_value(name.clone()).map_err(|_| format!("optimizer {name} is not known"))?,
            ..Optimizer::default()
        },
    };
    let implementation = match run["impl"].as_str() {
        Some("fused") => Implementation::Fused,
        Some("forloop") => Implementation::Forloop,
        _ if trainer => optimizer.implementation,
        _ => Implementation::Foreach,
    };
    let (allocator, _) =
        AllocatorOptions::parse(run["alloc_conf"].as_str().unwrap_or_default()).map_err(|e| e.to_string())?;
    let mut plan = TrainPlan {
        batch: Batch {
            batch_size,
            seq_len: number("seq").unwrap_or(0),
            target_len: number("target_seq"),
            images: grid.map(|[height, width]| [batch_size, height, width]),
            audio_frames: (row["kind"] == "speech").then_some(3000),
            mask: run["mask"] == true || trainer,
            padded: false,
            real_tokens: None,
        },
        weights: dtype(&run["weights"]).unwrap_or(DType::BF16),
        autocast: dtype(&run["autocast"]),
        attention: if run["attn"] == "eager" { AttentionKind::Eager } else { AttentionKind::Sdpa },
        checkpointing: if run["checkpointing"] == true { Checkpointing::Full } else { Checkpointing::Off },
        checkpoints: CheckpointOptions { reentrant: run["reentrant"] == true, ..CheckpointOptions::default() },
        kernels: if run["liger"] == true { Kernels::Liger } else { Kernels::Transformers },
        optimizer: Optimizer { implementation, ..optimizer },
        optimizer_in_backward: false,
        gradient_accumulation: number("grad_accum").unwrap_or(1).saturating_mul(micro) as u32,
        clip: run["clip"] == true || trainer,
        keep_outputs: run["keep_outputs"] != false && !trainer,
        frozen: Vec::new(),
        parallel: super::distributed::parallel(run)?,
        adapter: recorded::adapter(run)?,
        quantization: recorded::quantization(row)?,
        gpu: super::distributed::on_a_card(card(row["gpu"].as_str().unwrap_or_default())),
        allocator: on_its_card(row, allocator),
        ..TrainPlan::default()
    };
    super::variants::apply(&mut plan, run)?;
    Ok(plan)
}

pub(super) fn dtype(value: &Value) -> Option<DType> {
    match value.as_str()? {
        "fp32" => Some(DType::F32),
        "bf16" => Some(DType::BF16),
        "fp16" => Some(DType::F16),
        _ => None,
    }
}

/// A pretend card hands out addresses in its own way.
pub(super) fn on_its_card(row: &Value, options: AllocatorOptions) -> AllocatorOptions {
    let replayed = row["gpu"].as_str().is_some_and(|gpu| gpu.starts_with("replay"));
    AllocatorOptions { addresses: if replayed { Addresses::Ascending } else { Addresses::Driver }, ..options }
}

/// The card a row names; the H200 where it names none.
pub(super) fn card(name: &str) -> Gpu {
    let known = ["A100-80GB", "RTX 4090", "T4", "L40S", "H100-80GB", "B200-180GB"];
    let short = |card: &str| card.split('-').next().unwrap_or_default().to_owned();
    let named = known.iter().find(|card| name.contains(&short(card)));
    named.and_then(|card| Gpus::embedded().find(card).ok()).unwrap_or_else(Gpu::h200)
}
