//! Our figures beside torchtitan's published peaks (reserved), as a Markdown table:
//! `cargo run -p vramcast-core --example published_torchtitan -- truth/external/torchtitan.json`.
//!
//! Rows that cannot be expressed are counted with the reason. Where a compiled row has an axis that is not compiled here, eager
//! code stands in, as it does where a file of torchtitan's is read, and the row says so. docs/how-compiled-memory-works.md has the table.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::checkpoints::Selective;
use vramcast_core::plan::parallel::{
    Engine, Fsdp1, Fsdp2, Mesh, MixedPrecision, Parallel, Pipeline, Reshard, Schedule, TensorForm, TensorParallel,
};
use vramcast_core::plan::{
    AllocatorOptions, Batch, CheckpointOptions, Checkpointing, Compile, Float8, Gpus, Implementation, Optimizer,
    Package, Stack, TrainPlan, Version,
};

const GIB: f64 = (1_u64 << 30) as f64;

#[allow(clippy::disallowed_methods)]
fn main() {
    let path = std::env::args().nth(1).expect("the path of torchtitan.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let mut left_out = BTreeMap::<String, u32>::new();
    let (mut plain, mut compiled) = (Vec::new(), Vec::new());
    println!("| run | published | ours | difference |\n|---|---:|---:|---:|");
    for row in file["rows"].as_array().unwrap() {
        let (reserved, allocated, how) = match answered(row) {
            Ok(answer) => answer,
            Err(why) => {
                *left_out.entry(why).or_default() += 1;
                continue;
            }
        };
        let errors = if row["torch_compile"] == false { &mut plain } else { &mut compiled };
        let mut show = |what: &str, published: f64, ours: f64| {
            let error = (ours / published - 1.0) * 100.0;
            errors.push(error.abs());
            println!("| {}{how}, {what} | {published:.2} GiB | {ours:.2} GiB | {error:+.1} % |", name(row));
        };
        show("reserved", row["published_gib"].as_f64().unwrap(), reserved);
        if let Some(active) = row["measured_active_bytes"].as_f64() {
            show("active", active / GIB, allocated);
        }
    }
    for (what, mut errors) in [("eager", plain), ("compiled", compiled)] {
        errors.sort_by(f64::total_cmp);
        if let Some(last) = errors.last() {
            println!(
                "\n{} {what} figures, median {:.1} %, largest {last:.1} %",
                errors.len(),
                errors[errors.len() / 2]
            );
        }
    }
    left_out.iter().for_each(|(why, count)| println!("left out: {count} × {why}"));
}

/// Peak reserved and allocated of a row in GiB with what runs, or why there is none: as it was run, or by what stands in.
fn answered(row: &Value) -> Result<(f64, f64, &'static str), String> {
    if row["torch_compile"] == false {
        return predicted(row).map(|(reserved, allocated)| (reserved, allocated, ""));
    }
    let mut other = row.clone();
    other["float8"] = Value::Null;
    let mut eager = other.clone();
    eager["torch_compile"] = false.into();
    let how = if row["float8"].is_null() { ", compiled" } else { ", compiled, float8" };
    let mut found = predicted(row).map(|(reserved, allocated)| (reserved, allocated, how));
    for (row, how) in [(other, ", compiled, bf16 for float8"), (eager, ", compiled, by eager bf16")] {
        found = found.or_else(|why| match why.as_str() {
            why if why.contains("torch.compile") || why.contains("float8") => {
                predicted(&row).map(|(reserved, allocated)| (reserved, allocated, how))
            }
            _ => Err(why),
        });
    }
    found
}

fn name(row: &Value) -> String {
    let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let engine = if text("note").contains("FSDP1") { "FSDP1" } else { "FSDP2" };
    let axes = ["tp", "cp", "pp"].map(|axis| (axis, row[axis].as_u64().unwrap_or(1)));
    let axes: String =
        axes.iter().filter(|(_, size)| *size > 1).map(|(axis, size)| format!(" {axis} {size}")).collect();
    format!(
        "{} {}, {} cards, {engine}{axes}{}, {} × {}, AC {}{}",
        text("model"),
        text("date"),
        row["world_size"],
        row["pipeline_schedule"].as_str().map(|name| format!(" {name}")).unwrap_or_default(),
        row["local_batch_size"],
        row["seq_len"],
        text("activation_checkpoint"),
        if text("hardware").contains("A100") { ", A100" } else { "" },
    )
}

/// Peak reserved and allocated of a row in GiB, or why there is none.
fn predicted(row: &Value) -> Result<(f64, f64), String> {
    let number = |key: &str| row[key].as_u64().unwrap_or(1);
    if number("ep") > 1 {
        return Err("ep is not simulated for this engine".into());
    }
    let compiled = row["torch_compile"] == true;
    if row["torch_compile"].is_string() || row["note"].as_str().is_some_and(|note| note.contains("graph_trainer")) {
        return Err(
            "torchtitan's graph_trainer, an experiment that partitions the whole graph by rules of its own".into()
        );
    }
    let float8 = match row["float8"].as_str() {
        None => None,
        Some(text) if text.contains("fp4") || text.contains("mxfp8") => return Err("nvfp4 and mxfp8".into()),
        Some(text) if text.contains("bug") => {
            return Err("float8 whose checkpoints kept what they need not, a defect since mended".into());
        }
        Some(text) if text.starts_with("rowwise") => Some(Float8::Rowwise),
        Some(_) => Some(Float8::Tensorwise),
    };
    if row["published_gib"].as_f64().is_none() {
        return Err("no figure (out of memory)".into());
    }
    let loss = row["loss"].as_str().unwrap_or("eager CE on fp32 logits");
    if !loss.starts_with("eager CE") {
        return Err(format!("loss: {loss}"));
    }
    let (checkpointing, checkpoints) = match row["activation_checkpoint"].as_str() {
        Some("full") => (Checkpointing::Full, CheckpointOptions::default()),
        Some("selective-op") => {
            let selective = Some(Selective::AlternateMatmuls);
            (Checkpointing::Full, CheckpointOptions { selective, ..CheckpointOptions::default() })
        }
        Some("none") => (Checkpointing::Off, CheckpointOptions::default()),
        other => return Err(format!("activation checkpointing {other:?}")),
    };
    let note = row["note"].as_str().unwrap_or_default();
    let types = Some(MixedPrecision { parameters: DType::BF16, reduce: DType::F32, upcast: false });
    let engine = if note.contains("FSDP1") {
        Engine::Fsdp1(Fsdp1 { mixed_precision: types, ..Fsdp1::default() })
    } else {
        // torchtitan computes the loss on parts of the vocabulary unless told not to.
        let tensor = match number("tp") {
            1 => TensorParallel::default(),
            _ => TensorParallel { form: TensorForm::Torchtitan, loss_parallel: true },
        };
        let schedule = match row["pipeline_schedule"].as_str() {
            Some("Interleaved1F1B") => Schedule::Interleaved,
            _ => Schedule::OneForwardOneBackward,
        };
        // Under a pipeline parameters stay gathered between micro-batches.
        let reshard_after_forward = Reshard::Flag(number("pp") == 1);
        let pipeline = Pipeline { schedule, ..Pipeline::default() };
        let float8_gather = row["float8"].as_str().is_some_and(|text| text.contains("all-gather"));
        let options = Fsdp2 { mixed_precision: types, tensor, pipeline, reshard_after_forward, ..Fsdp2::default() };
        Engine::Fsdp2(Fsdp2 { float8_gather, ..options })
    };
    let (mut shard, tp, cp, pp) = (number("fsdp_shard"), number("tp"), number("cp"), number("pp"));
    if shard * tp * cp * pp > number("world_size") {
        // Shards over the cards of a sequence are counted with.
        shard /= cp;
    }
    let replicas = (number("world_size") / (shard * tp * cp * pp).max(1)).max(1);
    let mesh = Mesh { dp_replicate: replicas, dp_shard: shard, tp, cp, pp, ..Mesh::default() };
    // As many micro-batches as pipeline ranks was torchtitan's default.
    let micro = pp;
    let card = if row["hardware"].as_str().unwrap_or_default().contains("A100") { "A100-80GB" } else { "H100-80GB" };
    // Enough room that nothing is given back: H100s with 96 GB are not in the table of cards.
    let mut gpu = Gpus::embedded().find(card).map_err(|e| e.to_string())?;
    gpu.memory = gpu.memory.max(96 << 30);
    let text = if row["expandable_segments"] == true { "expandable_segments:True" } else { "" };
    let (allocator, _) = AllocatorOptions::parse(text).map_err(|e| e.to_string())?;
    let date = row["date"].as_str().unwrap_or_default();
    // 6e4988550 made the fused one the default.
    let implementation = if date < "2025-02-24" { Implementation::Foreach } else { Implementation::Fused };
    // torch's nightly builds of these days were on the way to 2.4, and past 2.6; the rules that 2.7 has for pipelines are of January 2025.
    let stack = match date {
        "2024-03-26" => Stack::default().with(Package::Torch, Version::new(2, 4, 0)),
        "2024-12" => Stack::default().with(Package::Torch, Version::new(2, 6, 0)),
        _ => Stack::default(),
    };
    let plan = TrainPlan {
        batch: Batch {
            batch_size: (number("local_batch_size") / micro).max(1),
            seq_len: number("seq_len"),
            ..Batch::default()
        },
        weights: DType::F32,
        checkpointing,
        checkpoints,
        optimizer: Optimizer { implementation, ..Optimizer::default() },
        clip: true,
        gradient_accumulation: micro as u32,
        // Since e29b6b4d4 the loop lets go of the logits before backward.
        keep_outputs: date < "2024-06-12",
        // Losses are compiled since bbb1b616e, and were for some weeks before e8977b007 of December 2024.
        compile: compiled.then_some(if date < "2025-04-02" { Compile::Layers } else { Compile::LayersAndLoss }),
        float8,
        parallel: Some(Parallel { mesh, engine, no_sync: false }),
        gpu,
        allocator,
        stack,
        ..TrainPlan::default()
    };
    let model = model(row)?;
    let simulation = simulation::train(&model, &plan).map_err(|e| e.to_string())?;
    let replay = &simulation.replay;
    Ok((replay.peak_reserved() as f64 / GIB, replay.peak_allocated() as f64 / GIB))
}

/// The architecture of a row as transformers' model of that shape.
fn model(row: &Value) -> Result<Model, String> {
    let shape = &row["architecture"];
    let name = row["model"].as_str().unwrap_or_default().to_lowercase();
    if ["moe", "deepseek", "llama4", "gpt-oss", "a3b"].iter().any(|part| name.contains(part)) {
        return Err(format!("{name}: routed experts of torchtitan's own"));
    }
    let kind = if name.contains("qwen3") { "qwen3" } else { "llama" };
    let config = json!({
        "model_type": kind, "hidden_size": shape["hidden_size"], "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_attention_heads"], "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"], "intermediate_size": shape["ffn_hidden_size"],
        "vocab_size": shape["vocab_size"], "tie_word_embeddings": shape["tied"],
        "max_position_embeddings": 1 << 20,
    });
    if config.as_object().is_some_and(|config| config.values().any(Value::is_null)) {
        return Err(format!("{name}: the architecture is not known in full"));
    }
    Model::new(config, None).map_err(|e| e.to_string())
}
