//! What the adapter, quantisation and Trainer fields of a recorded run mean as a plan (truth/ledger/measure.py).

use serde_json::Value;

use crate::dtype::DType;
use crate::plan::adapter::{AdapterPlan, LoraPlan, TaskType};
use crate::plan::{Implementation, Optimizer, OptimizerKind, Outliers, Quantization, Targets};

/// `run.lora`: `apply_lora` of measure.py.
pub(super) fn adapter(run: &Value) -> Result<Option<AdapterPlan>, String> {
    // Any other method, as the probe applies it.
    if !run["peft"].is_null() {
        return AdapterPlan::from_adapter_config(&run["peft"]).map(|(plan, _)| Some(plan)).map_err(|e| e.to_string());
    }
    let lora = &run["lora"];
    if lora.is_null() {
        return Ok(None);
    }
    let targets: Targets =
        serde_json::from_value(lora["targets"].clone()).map_err(|_| format!("lora targets {}", lora["targets"]))?;
    // Rows of one's own may carry further keys of `LoraConfig`.
    let further = match &lora["config"] {
        Value::Null => LoraPlan::default(),
        config => LoraPlan::from_adapter_config(config).map_err(|e| e.to_string())?.0,
    };
    Ok(Some(AdapterPlan::Lora(LoraPlan {
        rank: lora["r"].as_u64().ok_or("run.lora.r is missing")?,
        dropout: lora["dropout"].as_f64().unwrap_or(0.0),
        targets,
        dtype: match run["task"] == "sft" && !run["quant"].is_null() {
            // TRL holds the adapters of quantised models in bf16.
            true => Some(DType::BF16),
            false => None,
        },
        follow_base: run["task"] != "sft" && lora["fp32_adapter"] == false,
        task: Some(TaskType::CausalLm),
        ..further
    })))
}

/// `run.quant`: `quantize` of measure.py. Weights are random there, so outliers are too.
pub(super) fn quantization(row: &Value) -> Result<Option<Quantization>, String> {
    let run = &row["run"];
    let Some(name) = run["quant"].as_str().filter(|name| stored(name).is_none()) else { return Ok(None) };
    let quantization = Quantization::parse(name).map_err(|e| e.to_string())?;
    Ok(Some(Quantization {
        outliers: Outliers::RandomWeights,
        initializer_range: row["config"]["initializer_range"].as_f64().unwrap_or(0.02),
        skip: Some(vec!["lm_head".into()]),
        // measure.py looks for `nn.Linear` alone.
        conv1d: false,
        one_by_one: true,
        prepare: run["prepare_kbit"] != false && run["task"] != "sft",
        storage: super::ledger::dtype(&run["quant_storage"]).unwrap_or(DType::U8),
        ..quantization
    }))
}

/// The `quantization_config` that a row's name of another library stands for.
pub(super) fn stored(name: &str) -> Option<Value> {
    let bits: u64 = name.strip_prefix("hqq")?.parse().ok()?;
    let settings = serde_json::json!({"nbits": bits, "group_size": 64, "axis": 1});
    Some(serde_json::json!({
        "quant_method": "hqq", "quant_config": {"weight_quant_params": settings}, "skip_modules": ["lm_head"],
    }))
}

/// `run.trainer_optim`: the optimizers of transformers.Trainer by its own names.
pub(super) fn trainer_optimizer(run: &Value) -> Result<Optimizer, String> {
    let (kind, implementation) = match run["trainer_optim"].as_str().unwrap_or("adamw_torch_fused") {
        "adamw_torch" => (OptimizerKind::AdamW, Implementation::Foreach),
        "adamw_torch_fused" => (OptimizerKind::AdamW, Implementation::Fused),
        "adafactor" => (OptimizerKind::Adafactor, Implementation::Foreach),
        "adamw_8bit" | "adamw_bnb_8bit" => (OptimizerKind::AdamW8bit, Implementation::Foreach),
        "paged_adamw_8bit" => (OptimizerKind::PagedAdamW8bit, Implementation::Foreach),
        "lion_8bit" => (OptimizerKind::Lion8bit, Implementation::Foreach),
        "lion_32bit" => (OptimizerKind::Lion, Implementation::Foreach),
        "sgd" => (OptimizerKind::Sgd, Implementation::Foreach),
        "adagrad" => (OptimizerKind::Adagrad, Implementation::Foreach),
        "rmsprop" => (OptimizerKind::Rmsprop, Implementation::Foreach),
        other => return Err(format!("trainer_optim {other} is not known")),
    };
    Ok(Optimizer { kind, implementation, wide_embeddings: true, ..Optimizer::default() })
}
