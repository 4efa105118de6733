//! A plan as a job for the probe: a ledger row without its measurements.
//!
//! What a row can say is what the probe can run. So a job is read back as the ledger is read, and a plan that does not
//! come back as it went in is refused, with the name of what was lost.

use serde_json::{Map, Value, json};

use super::{generate, ledger};
use crate::dtype::DType;
use crate::model::{Model, Task};
use crate::plan::adapter::{AdapterPlan, LoraPlan};
use crate::plan::parallel::Engine;
use crate::plan::{
    AllocatorOptions, AttentionKind, CacheBackend, CacheImplementation, Checkpointing, Implementation, InferPlan,
    Kernels, Parallel, Quantization, QuantizationScheme, TrainPlan,
};

/// What the probe shall run, besides the plan.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The row's name.
    pub id: &'a str,
    /// What the model is called.
    pub name: &'a str,
    /// The model.
    pub model: &'a Model,
    /// The transformers class that builds it, where it is known.
    pub auto_class: Option<&'a str>,
}

/// A job that trains.
pub fn train(subject: Subject<'_>, plan: &TrainPlan) -> Result<Value, String> {
    let mut run = Map::new();
    let deepspeed = matches!(&plan.parallel, Some(Parallel { engine: Engine::Deepspeed(_), .. }));
    run.insert("task".into(), if deepspeed { "deepspeed" } else { "train" }.into());
    insert_batch(&mut run, &plan.batch);
    run.insert("weights".into(), dtype(plan.weights)?.into());
    if let Some(autocast) = plan.autocast {
        run.insert("autocast".into(), dtype(autocast)?.into());
    }
    run.insert("attn".into(), attention(plan.attention)?.into());
    run.insert("checkpointing".into(), (plan.checkpointing == Checkpointing::Full).into());
    run.insert("reentrant".into(), plan.checkpoints.reentrant.into());
    run.insert("optimizer".into(), serde_json::to_value(plan.optimizer.kind).unwrap_or_default());
    if plan.optimizer.implementation != Implementation::Foreach {
        run.insert("impl".into(), serde_json::to_value(plan.optimizer.implementation).unwrap_or_default());
    }
    run.insert("grad_accum".into(), plan.gradient_accumulation.into());
    run.insert("clip".into(), plan.clip.into());
    run.insert("keep_outputs".into(), plan.keep_outputs.into());
    run.insert("liger".into(), (plan.kernels == Kernels::Liger).into());
    insert_allocator(&mut run, plan.allocator);
    match &plan.adapter {
        None => {}
        Some(AdapterPlan::Lora(plan)) => drop(run.insert("lora".into(), lora(plan))),
        Some(_) => return Err("the probe runs LoRA and its variants; this adapter is not one of them".into()),
    }
    if let Some(quantization) = &plan.quantization {
        run.insert("quant".into(), scheme(quantization).into());
        run.insert("prepare_kbit".into(), quantization.prepare.into());
    }
    if let Some(parallel) = &plan.parallel {
        run.insert("dist".into(), distributed(parallel)?);
    }
    let row = row(subject, run);
    same(plan, &ledger::train_plan(&row)?)?;
    Ok(row)
}

/// A job that generates.
pub fn infer(subject: Subject<'_>, plan: &InferPlan) -> Result<Value, String> {
    let mut run = Map::new();
    run.insert("task".into(), "infer".into());
    insert_batch(&mut run, &plan.batch);
    run.insert("new_tokens".into(), plan.new_tokens.into());
    match plan.cache {
        CacheImplementation::Static => drop(run.insert("cache".into(), "static".into())),
        CacheImplementation::None => drop(run.insert("use_cache".into(), false.into())),
        CacheImplementation::Quantized(how) => {
            let backend = if how.backend == CacheBackend::Hqq { "hqq" } else { "quanto" };
            let config = json!({
                "backend": backend, "nbits": how.bits, "q_group_size": how.group_size,
                "residual_length": how.residual_length,
            });
            run.insert("cache".into(), "quantized".into());
            run.insert("cache_config".into(), config);
        }
        CacheImplementation::Offloaded => drop(run.insert("cache".into(), "offloaded".into())),
        _ => {}
    }
    if plan.beams > 1 {
        run.insert("beams".into(), plan.beams.into());
    }
    run.insert("weights".into(), dtype(plan.weights)?.into());
    run.insert("attn".into(), attention(plan.attention)?.into());
    if let Some(quantization) = &plan.quantization {
        run.insert("quant".into(), scheme(quantization).into());
    }
    insert_allocator(&mut run, plan.allocator);
    let row = row(subject, run);
    // The probe forces the length, so that every run does the same work.
    same(&InferPlan { forced_length: true, ..plan.clone() }, &generate::plan(&row)?)?;
    Ok(row)
}

fn row(subject: Subject<'_>, run: Map<String, Value>) -> Value {
    let config = subject.model.config();
    let kind = match subject.model.task() {
        Task::Seq2SeqLm => "seq2seq",
        Task::MaskedLm => "mlm",
        Task::ImageClassification => "image",
        Task::SpeechSeq2Seq => "speech",
        _ if run.contains_key("grid") => "qwen_vl",
        _ => "causal",
    };
    json!({
        "id": subject.id, "model": subject.name, "kind": kind, "auto_class": subject.auto_class, "config": config,
        "run": run,
    })
}

fn insert_batch(run: &mut Map<String, Value>, batch: &crate::plan::Batch) {
    run.insert("batch".into(), batch.batch_size.into());
    run.insert("seq".into(), batch.seq_len.into());
    if let Some(target) = batch.target_len {
        run.insert("target_seq".into(), target.into());
    }
    if let Some([_, height, width]) = batch.images {
        run.insert("grid".into(), json!([height, width]));
    }
    run.insert("mask".into(), batch.mask.into());
}

fn insert_allocator(run: &mut Map<String, Value>, options: AllocatorOptions) {
    let mut parts = Vec::new();
    if options.expandable_segments {
        parts.push("expandable_segments:True".to_owned());
    }
    parts.extend(options.max_split_size.map(|bytes| format!("max_split_size_mb:{}", bytes >> 20)));
    parts.extend(options.roundup_power2_divisions.map(|n| format!("roundup_power2_divisions:{n}")));
    parts.extend(options.roundup_power2_divisions_by_size.map(|table| {
        let entries: Vec<String> =
            table.iter().enumerate().map(|(place, n)| format!("{}:{n}", 1u64 << place)).collect();
        format!("roundup_power2_divisions:[{}]", entries.join(","))
    }));
    if !parts.is_empty() {
        run.insert("alloc_conf".into(), parts.join(",").into());
    }
}

fn dtype(dtype: DType) -> Result<&'static str, String> {
    match dtype {
        DType::F32 => Ok("fp32"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("fp16"),
        other => Err(format!("the probe builds models in fp32, bf16 or fp16, not in {other:?}")),
    }
}

fn attention(kind: AttentionKind) -> Result<&'static str, String> {
    match kind {
        AttentionKind::Sdpa => Ok("sdpa"),
        AttentionKind::Eager => Ok("eager"),
        AttentionKind::Flash2 => Ok("flash_attention_2"),
        other => Err(format!("the probe does not run {other:?} attention")),
    }
}

fn scheme(quantization: &Quantization) -> String {
    let name = match quantization.scheme {
        QuantizationScheme::Nf4 => "nf4",
        QuantizationScheme::Fp4 => "fp4",
        QuantizationScheme::Int8 => "int8",
    };
    if quantization.double { format!("{name}-dq") } else { name.to_owned() }
}

/// `LoraConfig`'s own names.
fn lora(plan: &LoraPlan) -> Value {
    let mut config = Map::new();
    let mut put = |key: &str, value: Value, default: bool| {
        if !default {
            config.insert(key.into(), value);
        }
    };
    put("exclude_modules", json!(plan.exclude), plan.exclude.is_none());
    put("layers_to_transform", json!(plan.layers_to_transform), plan.layers_to_transform.is_empty());
    put("layers_pattern", json!(plan.layers_pattern), plan.layers_pattern.is_empty());
    let ranks: Map<String, Value> = plan.rank_pattern.iter().map(|(name, rank)| (name.clone(), json!(rank))).collect();
    put("rank_pattern", Value::Object(ranks), plan.rank_pattern.is_empty());
    put("modules_to_save", json!(plan.modules_to_save), plan.modules_to_save.is_empty());
    put("bias", json!(plan.bias), plan.bias == Default::default());
    put("lora_bias", plan.lora_bias.into(), !plan.lora_bias);
    put("use_dora", plan.dora.into(), !plan.dora);
    put("use_rslora", plan.rslora.into(), !plan.rslora);
    put("target_parameters", json!(plan.target_parameters), plan.target_parameters.is_empty());
    json!({
        "r": plan.rank, "alpha": plan.alpha, "dropout": plan.dropout, "targets": plan.targets,
        "fp32_adapter": plan.dtype.is_none_or(|dtype| dtype == DType::F32), "config": config,
    })
}

fn distributed(parallel: &Parallel) -> Result<Value, String> {
    let world = parallel.mesh.world();
    match &parallel.engine {
        Engine::Ddp(ddp) => Ok(json!({
            "engine": "ddp", "world": world, "bucket_view": ddp.gradient_as_bucket_view,
            "static_graph": ddp.static_graph,
        })),
        Engine::Fsdp2(fsdp) => Ok(json!({
            "engine": "fsdp2", "world": world, "reshard": fsdp.reshard_after_forward,
            "mp": fsdp.mixed_precision.is_some(),
        })),
        Engine::Fsdp1(fsdp) => Ok(json!({
            "engine": "fsdp1", "world": world, "mp": fsdp.mixed_precision.is_some(),
            "strategy": serde_json::to_value(fsdp.strategy).unwrap_or_default(),
        })),
        Engine::Deepspeed(deepspeed) => {
            Ok(json!({"engine": "deepspeed", "world": world, "zero": deepspeed.zero.stage}))
        }
        other => Err(format!("the probe does not run {}", other.name())),
    }
}

/// Whether a plan came back from its row; what has no effect on memory, or is the machine's, may differ.
fn same<P: serde::Serialize>(asked: &P, understood: &P) -> Result<(), String> {
    let (asked, understood) = (simplified(asked), simplified(understood));
    let mut lost = Vec::new();
    differences("", &asked, &understood, &mut lost);
    if lost.is_empty() { Ok(()) } else { Err(format!("the probe cannot run this plan as it is: {}", lost.join(", "))) }
}

fn simplified<P: serde::Serialize>(plan: &P) -> Value {
    let mut value = serde_json::to_value(plan).unwrap_or_default();
    for path in ["/gpu", "/adapter/alpha", "/adapter/task", "/adapter/rslora", "/adapter/dtype"] {
        if let Some(place) = value.pointer_mut(path) {
            *place = Value::Null;
        }
    }
    for path in ["outliers", "initializer_range", "skip"] {
        if let Some(place) = value.pointer_mut(&format!("/quantization/{path}")) {
            *place = Value::Null;
        }
    }
    if let Some(place) = value.pointer_mut("/parallel/communicators") {
        *place = Value::Null;
    }
    value
}

fn differences(path: &str, asked: &Value, understood: &Value, lost: &mut Vec<String>) {
    match (asked, understood) {
        (Value::Object(asked), Value::Object(understood)) => {
            for (key, value) in asked {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                differences(&path, value, understood.get(key).unwrap_or(&Value::Null), lost);
            }
        }
        (asked, understood) if asked != understood => lost.push(format!("{path} is {asked}")),
        _ => {}
    }
}
