//! Scores ledger rows: `cargo run --example verify_ledger -- FILE [ID]`. A tool for finding what is off.

use serde_json::Value;
use std::rc::Rc;
use vramcast_core::dtype::DType;
use vramcast_core::memory::allocator::{self, AllocatorOptions};
use vramcast_core::memory::device::Device;
use vramcast_core::memory::lower::{AttentionKind, Settings};
use vramcast_core::memory::optimizer::{Implementation, OptimizerKind};
use vramcast_core::memory::train::{TrainRun, simulate};
use vramcast_core::model::{Images, Inputs, Model};

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let wanted = arguments.get(2).cloned();
    let text = std::fs::read_to_string(&arguments[1]).unwrap();
    let mut errors: Vec<(f64, f64, String)> = Vec::new();
    let mut skipped = 0;
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        let row: Value = serde_json::from_str(line).unwrap();
        let id = row["id"].as_str().unwrap().to_owned();
        if wanted.as_ref().is_some_and(|w| !w.split(',').any(|x| x == id)) {
            continue;
        }
        match score(&row, wanted.is_some()) {
            Ok((a, r)) => errors.push((a, r, format!("{id} {} {}", row["model"].as_str().unwrap(), row["run"]))),
            Err(e) => {
                skipped += 1;
                if wanted.is_some() {
                    println!("{id} skipped: {e}");
                }
            }
        }
    }
    errors.sort_by(|x, y| y.0.abs().total_cmp(&x.0.abs()));
    for (a, r, name) in errors.iter().take(if wanted.is_some() { 999 } else { 60 }) {
        println!("{a:+8.3}% {r:+8.2}%  {}", name.chars().take(230).collect::<String>());
    }
    let median = |mut v: Vec<f64>| {
        v.sort_by(f64::total_cmp);
        if v.is_empty() { 0.0 } else { v[v.len() / 2] }
    };
    let p95 = |mut v: Vec<f64>| {
        v.sort_by(f64::total_cmp);
        if v.is_empty() { 0.0 } else { v[v.len() * 95 / 100] }
    };
    let a: Vec<f64> = errors.iter().map(|e| e.0.abs()).collect();
    let r: Vec<f64> = errors.iter().map(|e| e.1.abs()).collect();
    println!(
        "{} rows, {} skipped: allocated median {:.3} p95 {:.3} max {:.3}; reserved median {:.2} p95 {:.2}",
        errors.len(),
        skipped,
        median(a.clone()),
        p95(a.clone()),
        a.iter().fold(0.0f64, |x, y| x.max(*y)),
        median(r.clone()),
        p95(r)
    );
}

fn dtype(v: &Value) -> Option<DType> {
    match v.as_str() {
        Some("fp32") => Some(DType::F32),
        Some("bf16") => Some(DType::BF16),
        Some("fp16") => Some(DType::F16),
        _ => None,
    }
}

fn score(row: &Value, verbose: bool) -> Result<(f64, f64), String> {
    let run = &row["run"];
    if row["oom"] == true || !row["measured"].is_object() {
        return Err("oom".into());
    }
    if run["task"] != "train"
        || !run["lora"].is_null()
        || !run["quant"].is_null()
        || !run["dist"].is_null()
        || run["liger"] == true
    {
        return Err("kind".into());
    }
    let mut config = row["config"].clone();
    if let Some(o) = run["overrides"].as_object() {
        for (k, v) in o {
            let mut t = &mut config;
            let parts: Vec<&str> = k.split('.').collect();
            for p in &parts[..parts.len() - 1] {
                t = &mut t[*p];
            }
            t[*parts.last().unwrap()] = v.clone();
        }
    }
    let model = Model::new(config, row["auto_class"].as_str()).map_err(|e| e.to_string())?;
    if let Some(n) = model.notes().first() {
        return Err(n.clone());
    }
    let (batch, seq) = (run["batch"].as_u64().unwrap(), run["seq"].as_u64().unwrap());
    let images = run["grid"].as_array().map(|g| Images {
        count: batch,
        height: g[0].as_u64().unwrap(),
        width: g[1].as_u64().unwrap(),
        frames: 1,
    });
    let speech = row["kind"] == "speech";
    let inputs = Inputs {
        batch,
        seq,
        target_seq: run["target_seq"].as_u64().unwrap_or(seq),
        past: 0,
        cache: false,
        labels: true,
        mask: run["mask"] == true,
        images,
        audio_frames: speech.then_some(3000),
        last_logits_only: false,
    };
    let program = model.program(inputs).map_err(|e| e.to_string())?;
    let optimizer = match run["optimizer"].as_str().unwrap_or("adamw") {
        "adamw" => OptimizerKind::AdamW,
        "adam" => OptimizerKind::Adam,
        "amsgrad" => OptimizerKind::Amsgrad,
        "nadam" => OptimizerKind::Nadam,
        "sgd" => OptimizerKind::Sgd,
        "sgd-momentum" => OptimizerKind::SgdMomentum,
        "nesterov" => OptimizerKind::Nesterov,
        "adagrad" => OptimizerKind::Adagrad,
        "rmsprop" => OptimizerKind::Rmsprop,
        "adafactor" => OptimizerKind::Adafactor,
        "torch-adafactor" => OptimizerKind::TorchAdafactor,
        "adamw8bit" => OptimizerKind::AdamW8bit,
        "paged-adamw8bit" => OptimizerKind::PagedAdamW8bit,
        "adamw-bnb32" => OptimizerKind::AdamWBnb32,
        "lion8bit" => OptimizerKind::Lion8bit,
        "lion" => OptimizerKind::Lion,
        "muon" => OptimizerKind::Muon,
        other => return Err(other.into()),
    };
    let implementation = match run["impl"].as_str() {
        Some("fused") => Implementation::Fused,
        Some("forloop") => Implementation::Forloop,
        _ => Implementation::Foreach,
    };
    let gpu = row["gpu"].as_str().unwrap_or("H200");
    let device = if gpu.contains("A100") {
        Device { capability: 80, multiprocessors: 108, threads_per_multiprocessor: 2048 }
    } else if gpu.contains("4090") {
        Device { capability: 89, multiprocessors: 128, threads_per_multiprocessor: 1536 }
    } else if gpu.contains("T4") {
        Device { capability: 75, multiprocessors: 40, threads_per_multiprocessor: 1024 }
    } else {
        Device::H200
    };
    let plan = TrainRun {
        device,
        settings: Settings {
            attention: if run["attn"] == "eager" { AttentionKind::Eager } else { AttentionKind::Sdpa },
            checkpointing: run["checkpointing"] == true,
            autocast: dtype(&run["autocast"]),
            weights: dtype(&run["weights"]).unwrap_or(DType::BF16),
            padded: false,
        },
        optimizer,
        implementation,
        accumulation: run["grad_accum"].as_u64().unwrap_or(1) as u32,
        clip: run["clip"] == true,
        mask: run["mask"] == true,
        steps: 3,
        keep_outputs: run["keep_outputs"] != false,
    };
    let log = simulate(program, &plan);
    let conf = run["alloc_conf"].as_str().unwrap_or("");
    let replay = allocator::replay(
        &log,
        AllocatorOptions { expandable_segments: conf.contains("expandable_segments:True"), ..Default::default() },
        None,
    );
    let measured = &row["measured"];
    let error = |ours: u64, theirs: &Value| {
        let t = theirs.as_u64().unwrap_or(1) as f64;
        100.0 * (ours as f64 - t) / t
    };
    if verbose {
        let mib = |x: u64| x as f64 / 1048576.0;
        println!("loaded {:.3} vs {:.3}", mib(replay.phases[0].before), mib(measured["loaded"].as_u64().unwrap_or(0)));
        for (i, p) in measured["phases"].as_array().unwrap().iter().enumerate() {
            let Some(o) = log.phases.iter().position(|n| n == p["phase"].as_str().unwrap()).map(|x| replay.phases[x])
            else {
                continue;
            };
            let g = |k: &str| mib(p[k].as_u64().unwrap());
            println!(
                "{:10} before {:10.3} ({:+9.3})  after {:10.3} ({:+9.3})  peak {:10.3} ({:+9.3})  reserved {:10.1} ({:+8.1})",
                p["phase"].as_str().unwrap(),
                mib(o.before),
                mib(o.before) - g("before"),
                mib(o.after),
                mib(o.after) - g("after"),
                mib(o.peak),
                mib(o.peak) - g("peak"),
                mib(o.peak_reserved),
                mib(o.peak_reserved) - g("peak_reserved")
            );
            if i > 12 {
                break;
            }
        }
    }
    let _ = Rc::new(0);
    Ok((
        error(replay.peak_allocated(), &measured["peak_allocated"]),
        error(replay.peak_reserved(), &measured["peak_reserved"]),
    ))
}
