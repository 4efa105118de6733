//! A plan as a job for the probe: a ledger row without its measurements.
//!
//! What a row can say is what the probe can run. So a job is read back as the ledger is read, and a plan that does not
//! come back as it went in is refused, with the name of what was lost.

use serde_json::{Map, Value, json};

use super::{keys, run};
use crate::dtype::DType;
use crate::model::{Model, Task};
use crate::plan::adapter::{AdapterPlan, LoraPlan};
use crate::plan::parallel::Engine;
use crate::plan::{
    AllocatorOptions, AttentionKind, Batch, CacheImplementation, InferPlan, Parallel, Quantization, TrainPlan,
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
    let deepspeed = matches!(&plan.parallel, Some(Parallel { engine: Engine::Deepspeed(_), .. }));
    let mut run = Map::from_iter([("task".to_owned(), if deepspeed { "deepspeed" } else { "train" }.into())]);
    let tree = tree(plan);
    check(plan.attention, [plan.weights, plan.autocast.unwrap_or(plan.weights)])?;
    run.extend(keys::write(keys::ANY, &tree));
    run.extend(keys::write(keys::TRAINING, &tree));
    insert_rest(&mut run, subject.model, &plan.batch, plan.allocator, plan.quantization.as_ref());
    match &plan.adapter {
        None => {}
        Some(AdapterPlan::Lora(plan)) => drop(run.insert("lora".into(), lora(plan))),
        Some(_) => return Err("the probe runs LoRA and its variants; this adapter is not one of them".into()),
    }
    if let Some(quantization) = &plan.quantization {
        run.insert("prepare_kbit".into(), quantization.prepare.into());
    }
    if let Some(parallel) = &plan.parallel {
        run.insert("dist".into(), distributed(parallel)?);
    }
    let row = row(subject, run);
    same(plan, &run::training(&row)?)?;
    Ok(row)
}

/// A job that generates.
pub fn infer(subject: Subject<'_>, plan: &InferPlan) -> Result<Value, String> {
    let mut run = Map::from_iter([("task".to_owned(), "infer".into())]);
    let tree = tree(plan);
    check(plan.attention, [plan.weights; 2])?;
    run.extend(keys::write(keys::ANY, &tree));
    run.extend(keys::write(keys::GENERATION, &tree));
    match plan.cache {
        CacheImplementation::None => drop(run.insert("use_cache".into(), false.into())),
        CacheImplementation::Quantized(_) => {
            run.insert("cache".into(), "quantized".into());
            run.insert("cache_config".into(), keys::write(keys::CACHE, &tree["cache"]["quantized"]).into());
        }
        CacheImplementation::Dynamic => {}
        _ => drop(run.insert("cache".into(), tree["cache"].clone())),
    }
    insert_rest(&mut run, subject.model, &plan.batch, plan.allocator, plan.quantization.as_ref());
    let row = row(subject, run);
    // The probe forces the length, so that every run does the same work.
    same(&InferPlan { forced_length: plan.new_tokens > 0, ..plan.clone() }, &run::generation(&row)?)?;
    Ok(row)
}

fn tree(plan: &impl serde::Serialize) -> Value {
    serde_json::to_value(plan).unwrap_or_default()
}

fn check(attention: AttentionKind, types: [DType; 2]) -> Result<(), String> {
    if !matches!(attention, AttentionKind::Sdpa | AttentionKind::Eager | AttentionKind::Flash2) {
        return Err(format!("the probe does not run {attention:?} attention"));
    }
    match types.into_iter().find(|dtype| !matches!(dtype, DType::F32 | DType::BF16 | DType::F16)) {
        Some(other) => Err(format!("the probe builds models in fp32, bf16 or fp16, not in {other:?}")),
        None => Ok(()),
    }
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

/// What has no place of its own in the table.
fn insert_rest(
    run: &mut Map<String, Value>,
    model: &Model,
    batch: &Batch,
    options: AllocatorOptions,
    quantization: Option<&Quantization>,
) {
    if let Some([_, height, width]) = batch.images {
        let along = |pixels: u64| model.image_patches().map_or(pixels, |cut| cut.along(pixels));
        run.insert("grid".into(), json!([along(height), along(width)]));
    }
    if let Some(quantization) = quantization {
        let name = tree(&quantization.scheme).as_str().unwrap_or_default().to_owned();
        run.insert("quant".into(), if quantization.double { name + "-dq" } else { name }.into());
    }
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
    let tree = tree(&parallel.engine);
    let keys = match &parallel.engine {
        Engine::Ddp(_) => keys::DDP,
        Engine::Fsdp1(_) => keys::FSDP1,
        Engine::Fsdp2(_) => keys::FSDP2,
        Engine::Deepspeed(_) => &[],
        other => return Err(format!("the probe does not run {}", other.name())),
    };
    let name = parallel.engine.name();
    let options = &tree[name];
    let mut dist = Map::from_iter([("engine".to_owned(), name.into()), ("world".into(), parallel.mesh.world().into())]);
    dist.extend(keys::write(keys, options));
    match &parallel.engine {
        Engine::Deepspeed(deepspeed) => drop(dist.insert("zero".into(), deepspeed.zero.stage.into())),
        Engine::Ddp(_) => {}
        _ => drop(dist.insert("mp".into(), (!options["mixed_precision"].is_null()).into())),
    }
    Ok(dist.into())
}

/// Whether a plan came back from its row; what has no effect on memory, or is the machine's, may differ.
fn same<P: serde::Serialize>(asked: &P, understood: &P) -> Result<(), String> {
    let (asked, understood) = (simplified(asked), simplified(understood));
    let mut lost = Vec::new();
    differences("", &asked, &understood, &mut lost);
    if lost.is_empty() { Ok(()) } else { Err(format!("the probe cannot run this plan as it is: {}", lost.join(", "))) }
}

fn simplified<P: serde::Serialize>(plan: &P) -> Value {
    let mut value = tree(plan);
    let adapter = ["alpha", "task", "rslora", "dtype"].map(|key| format!("/adapter/{key}"));
    let quantization = ["outliers", "initializer_range", "skip"].map(|key| format!("/quantization/{key}"));
    for path in ["/gpu".to_owned(), "/stack".to_owned()].into_iter().chain(adapter).chain(quantization) {
        if let Some(place) = value.pointer_mut(&path) {
            *place = Value::Null;
        }
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
