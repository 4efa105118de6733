//! Whole jobs: recorded runs of many steps against their simulation (truth/jobs/FORMAT.md).

use serde::Serialize;
use serde_json::{Value, json};

use super::kinds::{Kind, Score};
use super::ledger::{Measure, model_of};
use super::{pictures, run, tasks};
use crate::memory::simulation::{self, Simulation};
use crate::model::Model;
use crate::plan::job::{DeviceMap, Evaluation, Generation, Lengths, Packing, random::Twister};
use crate::plan::{Compile, Float8, Kernels, TrainPlan};

/// Files of jobs: one a line.
pub(super) const KIND: Kind = Kind {
    name: "jobs",
    noun: "jobs",
    looks: "recorded jobs, one JSON object a line, with `job` and `config` (truth/jobs/FORMAT.md)",
    levels: &["allocated", "reserved"],
    joined: false,
    rows: |file| {
        let of_jobs = !file.documents.is_empty() && file.documents.iter().all(|row| row["job"].is_object());
        of_jobs.then(|| file.documents.clone())
    },
    score: |_, row| {
        let id = row["id"].as_str().unwrap_or("(no id)");
        vec![match score(row) {
            Ok(scored) => {
                let levels = [scored.allocated, scored.reserved, Measure::default()];
                let group = row["job"]["kind"].as_str().unwrap_or_default().to_owned();
                let group = if scored.fits.is_some() { format!("{group}, limited") } else { group };
                Score { group, levels, ..Score::exact(id, (!scored.ok).then(|| scored.said()), &scored) }
            }
            Err(why) => Score::skipped(id, &why),
        }]
    },
};

/// A job beside its simulation.
#[derive(Debug, Serialize)]
struct Scored {
    id: String,
    ok: bool,
    /// Peak allocated.
    allocated: Measure,
    /// Peak reserved.
    reserved: Measure,
    /// Of a job under a limit: whether it ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<Fits>,
}

#[derive(Debug, Serialize)]
struct Fits {
    predicted: bool,
    measured: bool,
}

impl Scored {
    fn said(&self) -> String {
        match &self.fits {
            Some(fits) if fits.predicted != fits.measured => format!("fits: {} predicted, not so", fits.predicted),
            _ => format!("peak allocated {:+.3} %", self.allocated.error().unwrap_or(f64::NAN)),
        }
    }
}

/// A recorded job, simulated.
pub fn simulated(row: &Value) -> Result<(TrainPlan, Model, Simulation), String> {
    let (plan, job) = (plan(row)?, &row["job"]);
    let mut asked = row.clone();
    if job["head"].is_string() {
        asked["auto_class"] = job["head"].clone();
    }
    if let Some(class) = pictures::class(job) {
        asked["config"]["_class_name"] = class.into();
    }
    if let Some(class) = plan.objective.kind.auto_class() {
        asked["auto_class"] = class.into();
        if plan.objective.kind.scores() {
            asked["config"]["num_labels"] = 1.into();
        }
    }
    // A reward model is made from the config as it is.
    if job["how"] != "reward" {
        asked["run"] = json!({"overrides": job["overrides"]});
    }
    crate::work::fresh();
    let model = model_of(&asked)?;
    let simulation = simulation::train(&model, &plan).map_err(|error| error.to_string())?;
    Ok((plan, model, simulation))
}

fn score(row: &Value) -> Result<Scored, String> {
    if let Some(why) = row["not_comparable"].as_str() {
        return Err(why.to_owned());
    }
    // A row that is known to be off says why; limits hold it where it is.
    let tolerance = if row["off"].is_string() { f64::INFINITY } else { 3.0 };
    if let Some(peaks) = pictures::passed(row)? {
        let measure =
            |predicted: u64, key: &str| Measure { predicted: Some(predicted), measured: row["measured"][key].as_u64() };
        let (allocated, reserved) = (measure(peaks[0], "peak_allocated"), measure(peaks[1], "peak_reserved"));
        let ok = allocated.error().is_none_or(|error| error.abs() <= tolerance);
        return Ok(Scored {
            id: row["id"].as_str().unwrap_or_default().to_owned(),
            ok,
            allocated,
            reserved,
            fits: None,
        });
    }
    let (plan, model, simulated) = simulated(row)?;
    let simulate = |plan: &TrainPlan| simulation::train(&model, plan).map_err(|error| error.to_string());
    let replay = &simulated.replay;
    let mut peaks = [replay.peak_allocated(), replay.peak_reserved()];
    if row["job"]["resume"] == true {
        // The second run of the row.
        let mut plan = plan.clone();
        (plan.job.resume, plan.job.warm) = (true, true);
        let again = simulate(&plan)?.replay;
        peaks = [peaks[0].max(again.peak_allocated()), peaks[1].max(again.peak_reserved())];
    }
    // Of a run whose batch is found the peaks are those of tries that failed, and the batch is what counts.
    let (oom, measured) = (row["oom"] == true || plan.job.find_batch_size, &row["measured"]);
    // A job that broke off has no peaks of its own.
    let measure = |predicted: u64, key: &str| Measure {
        predicted: Some(predicted),
        measured: measured[key].as_u64().filter(|_| !oom && !replay.out_of_memory),
    };
    let mut scored = Scored {
        id: row["id"].as_str().unwrap_or_default().to_owned(),
        ok: false,
        allocated: measure(peaks[0], "peak_allocated"),
        reserved: measure(peaks[1], "peak_reserved"),
        fits: plan.job.memory_limit.map(|_| Fits { predicted: !replay.out_of_memory, measured: row["oom"] != true }),
    };
    let close = scored.allocated.error().is_none_or(|error| error.abs() <= tolerance);
    let found = || format!("of {} samples,", measured["batch"]);
    let right = !plan.job.find_batch_size || simulated.notes.iter().any(|note| note.contains(&found()));
    scored.ok = close && right && scored.fits.as_ref().is_none_or(|fits| fits.predicted == fits.measured);
    Ok(scored)
}

/// The family of a recorded run: its `model_type`, or its class where diffusers has it.
pub fn family(row: &Value) -> &str {
    row["config"]["model_type"].as_str().or_else(|| pictures::class(&row["job"])).unwrap_or_default()
}

/// A recorded job as a plan, as truth/jobs/jobs.py ran it.
pub fn plan(row: &Value) -> Result<TrainPlan, String> {
    let job = &row["job"];
    let kind = job["kind"].as_str().unwrap_or_default();
    let task = match kind {
        "varlen" | "load" | "classify" | "compiled" | "diffusion" | "vae" => "train",
        "trainer" => "trainer",
        // TRL's own trainers are other loops; its supervised one is the Trainer's with a loss of its own.
        "trl" if job["how"] == "sft" => "sft",
        "trl" | "ppo" | "dpo" | "contrastive" => return tasks::plan(row),
        _ => return Err(format!("jobs of kind {kind} are not simulated yet")),
    };
    if job["args"]["activation_offloading"] == true {
        return Err("activations that TRL sends to the host are not simulated yet".into());
    }
    if kind == "load" {
        return loading(row);
    }
    if kind == "diffusion" || kind == "vae" {
        return pictures::plan(row);
    }
    let mut run = json!({"task": task, "clip": true, "mask": true});
    let words = [("batch", "batch"), ("seq", "seq"), ("weights", "weights"), ("checkpointing", "checkpointing")];
    let more = [("lora", "lora"), ("attn", "attn"), ("alloc_conf", "alloc_conf"), ("grad_accum", "grad_accum")];
    for (from, to) in words.into_iter().chain(more).chain([("autocast", "autocast"), ("optim", "trainer_optim")]) {
        run[to] = job[from].clone();
    }
    if run["weights"].is_null() {
        run["weights"] = "bf16".into();
    }
    if job["fused"] == true || kind == "classify" {
        run["impl"] = "fused".into();
    }
    if kind == "classify" || kind == "compiled" {
        run["clip"] = false.into();
        run["impl"] = "fused".into();
        run["mask"] = (kind == "classify" || job["mask"] == true).into();
        run["autocast"] = if job["autocast"] == true { "bf16".into() } else { Value::Null };
    }
    if kind == "trl" {
        let settled = &row["arguments"];
        run["checkpointing"] = settled["gradient_checkpointing"].clone();
        run["autocast"] = tasks::autocast(|key| &settled[key]);
        run["trainer_optim"] = settled["optim"].clone();
        run["grad_accum"] = settled["gradient_accumulation_steps"].clone();
    }
    let mut asked = row.clone();
    asked["run"] = run;
    let mut plan = run::training(&asked)?;
    if kind == "classify" {
        return Ok(plan);
    }
    if kind == "compiled" {
        let (layers, loss) = (job["per_layer"] == true, job["loss"] == true);
        plan.compile = Some(match (layers, loss) {
            (true, true) => Compile::LayersAndLoss,
            (true, false) => Compile::Layers,
            (false, true) => Compile::ModelAndLoss,
            (false, _) if job["mode"] == "reduce-overhead" => Compile::ReduceOverhead,
            (false, _) => Compile::Model,
        });
        // Its loop lets go of the logits.
        plan.keep_outputs = !loss;
        plan.float8 = match job["float8"].as_str() {
            Some("rowwise") => Some(Float8::Rowwise),
            other => other.map(|_| Float8::Tensorwise),
        };
        // A compiled step of AdamW makes nothing that the fused one does not.
        let other = !job["mode"].is_null() && job["mode"] != "default" && plan.compile != Some(Compile::ReduceOverhead);
        return if other { Err("mode of torch.compile is not simulated yet".into()) } else { Ok(plan) };
    }
    plan.compile = (job["compile"] == true).then_some(Compile::Model);
    plan.job.steps = job["steps"].as_u64().map(|steps| steps as u32);
    if kind == "trl" {
        supervised(row, &mut plan);
        tasks::spread(&mut plan, job)?;
    }
    plan.job.lengths = match kind {
        "varlen" => Some(measured_lengths(row)?),
        "trl" => texts(job),
        _ if job["vary"] == true => Some(Lengths::Samples(drawn(job, 4096))),
        _ => None,
    };
    tasks::around(&mut plan, job);
    plan.job.evaluation = job["eval_rows"].as_u64().filter(|rows| *rows > 0).map(|rows| Evaluation {
        rows,
        batch_size: job["eval_batch"].as_u64().unwrap_or(8),
        every: plan.job.steps,
        metrics: job["metrics"] == true && job["loss_only"] != true,
        accumulation_steps: job["eval_accumulation"].as_u64().map(|steps| steps as u32),
        by_batch: job["batch_eval"] == true,
        argmax: job["preprocess"] == true,
        skip_logits: false,
        generation: job["generate"]
            .as_u64()
            .map(|max_length| Generation { max_length, beams: job["beams"].as_u64().unwrap_or(1) }),
    });
    plan.job.find_batch_size = job["auto_batch"] == true;
    Ok(plan)
}

/// What TRL's supervised trainer does with its data.
fn supervised(row: &Value, plan: &mut TrainPlan) {
    if row["arguments"]["use_liger_kernel"] == true {
        plan.kernels = Kernels::Liger;
    }
    let (settled, asked) = (&row["arguments"], &row["job"]["args"]);
    let strategy = [settled, asked].into_iter().find_map(|from| from["packing_strategy"].as_str());
    plan.job.packing = (settled["packing"] == true).then_some(match strategy {
        Some("wrapped") => Packing::Wrapped,
        Some("bfd_split") => Packing::BfdSplit,
        _ => Packing::Bfd,
    });
    plan.job.pad_to_multiple_of = asked["pad_to_multiple_of"].as_u64();
    plan.job.padding_free = settled["padding_free"] == true && !plan.job.packing.is_some_and(Packing::keeps_ends);
}

/// Texts of all lengths, each with a token at its end, where a row has them: listed, or drawn again.
fn texts(job: &Value) -> Option<Lengths> {
    let rows = job["rows"].as_u64().unwrap_or(64) as usize;
    let (vary, share) = (job["vary"] == true, job["prompt"].as_f64());
    let all = match (job["texts"].as_array(), vary) {
        (Some(listed), _) => listed.clone(),
        (None, true) => drawn(job, rows).into_iter().map(Value::from).collect(),
        (None, false) => vec![(job["seq"].as_u64().unwrap_or(0) + 8).into(); 64],
    };
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    match share {
        None => vary.then(|| Lengths::Samples(all.iter().map(|words| number(words) + 1).collect())),
        Some(share) => Some(Lengths::Pairs(
            all.iter()
                .map(|words| match words.as_array() {
                    Some(pair) => [0, 1].map(|at| pair.get(at).map_or(0, number) + at as u64),
                    None => {
                        let prompt = ((number(words) as f64 * share) as u64).max(1);
                        [prompt, number(words) - prompt + 1]
                    }
                })
                .collect(),
        )),
    }
}

/// `from_pretrained`, and a merge.
fn loading(row: &Value) -> Result<TrainPlan, String> {
    let job = &row["job"];
    let mut asked = row.clone();
    asked["run"] =
        json!({"task": "train", "batch": 1, "seq": 1, "weights": "bf16", "lora": job["lora"], "quant": job["quant"]});
    if !job["weights"].is_null() {
        asked["run"]["weights"] = job["weights"].clone();
    }
    let mut plan = run::training(&asked)?;
    if let Some(quantization) = &mut plan.quantization {
        (quantization.prepare, quantization.skip, quantization.conv1d) = (false, None, true);
    }
    (plan.job.from_pretrained, plan.job.merge) = (true, plan.adapter.is_some());
    // bitsandbytes packs on the card, whatever it is told.
    if ["none", "cpu"].iter().any(|map| job["device_map"] == *map) && plan.quantization.is_none() {
        if job["move"] != true {
            return Err("the model stays on the host".to_owned());
        }
        plan.job.device_map = DeviceMap::Cpu;
    }
    plan.job.steps = Some(0);
    Ok(plan)
}

/// The longest of each batch: as it was recorded, or drawn again.
fn measured_lengths(row: &Value) -> Result<Lengths, String> {
    if let Some(all) = row["measured"]["lengths"].as_array() {
        return Ok(Lengths::Batches(all.iter().filter_map(Value::as_u64).collect()));
    }
    let job = &row["job"];
    let [steps, batch] = ["steps", "batch"].map(|key| job[key].as_u64().unwrap_or(0) as usize);
    let drawn = drawn(job, steps * batch);
    Ok(Lengths::Batches(drawn.chunks(batch.max(1)).filter_map(|all| all.iter().copied().max()).collect()))
}

/// `lengths` of jobs.py.
fn drawn(job: &Value, count: usize) -> Vec<u64> {
    let number = |key: &str, usual: f64| job[key].as_f64().unwrap_or(usual);
    let (mean, deviation, top) = (number("mu", 5.9), number("sigma", 0.8), job["seq"].as_u64().unwrap_or(0));
    let mut draw = Twister::python(job["seed"].as_u64().unwrap_or(0));
    let one = |_| (draw.normal(mean, deviation).exp() as u64).max(16).min(top);
    let mut all: Vec<u64> = (0..count).map(one).collect();
    let longest = job["longest_at"].as_u64().map_or(count / 2, |at| at as usize);
    if let Some(at) = all.get_mut(longest) {
        *at = top;
    }
    all
}
