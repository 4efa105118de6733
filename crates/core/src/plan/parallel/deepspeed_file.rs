//! DeepSpeed's own configuration file, read into a plan: every key is used, known to change no memory, or refused.

use serde_json::{Map, Value};

use super::{DeepSpeed, ZeroConfig};
use crate::dtype::DType;
use crate::plan::{Fault, Faults, PlanError};

/// What a file says about a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeepSpeedFile {
    /// The engine.
    pub engine: DeepSpeed,
    /// `train_micro_batch_size_per_gpu`.
    pub batch_size: Option<u64>,
    /// `gradient_accumulation_steps`.
    pub gradient_accumulation: Option<u32>,
    /// The type of weights: `bf16` or `fp16`.
    pub weights: Option<DType>,
    /// Whether `gradient_clipping` is on.
    pub clip: bool,
    /// Keys that transformers fills in itself (`auto`) and what they came to, and keys without effect.
    pub notes: Vec<String>,
}

/// Keys that change no memory on the card or the host.
const WITHOUT_EFFECT: [&str; 23] = [
    // No key of DeepSpeed's: it passes over those.
    "cuda_visible_devices",
    "aio",
    "elasticity",
    "scheduler",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "prescale_gradients",
    "gradient_predivide_factor",
    "dump_state",
    "memory_breakdown",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comms_logger",
    "flops_profiler",
    "checkpoint",
    "disable_allgather",
    "train_batch_size",
    "comms_config",
    "monitor_config",
    "seq_parallel_communication_data_type",
];

/// Keys of `zero_optimization` that change none.
const ZERO_WITHOUT_EFFECT: [&str; 9] = [
    "allgather_partitions",
    "reduce_scatter",
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "legacy_stage1",
];

/// Keys of `zero_optimization` that are simulated at their default only.
const ZERO_DEFAULT_ONLY: [(&str, bool); 6] = [
    ("zero_quantized_weights", false),
    ("zero_quantized_gradients", false),
    ("zero_quantized_nontrainable_weights", false),
    ("mics_hierarchical_params_gather", false),
    ("memory_efficient_linear", true),
    ("use_multi_rank_bucket_allreduce", true),
];

/// Keys of the offload sections that change no memory.
const OFFLOAD_WITHOUT_EFFECT: [&str; 5] = ["fast_init", "pipeline", "pipeline_read", "pipeline_write", "nvme_path"];

impl DeepSpeedFile {
    /// Reads a document; `hidden_size` is what transformers fills `auto` bucket sizes in from. Faults name the file's keys.
    pub fn read(document: &Value, hidden_size: Option<u64>) -> Result<Self, PlanError> {
        let Some(object) = document.as_object() else { return Err(bad("deepspeed", document, "a JSON object").into()) };
        let mut file = Self::default();
        let mut faults = Faults::default();
        for (key, value) in object {
            if let Err(found) = file.take(key, value, hidden_size) {
                faults.take(Err(found));
            }
        }
        // DeepSpeed itself refuses both (runtime/engine.py); `auto` is one of them.
        let said = |key: &str| object.get(key).is_some_and(|part| part["enabled"] == true);
        if said("fp16") && (said("bf16") || said("bfloat16")) {
            let fault = Fault::new("fp16.enabled", "bf16.enabled and fp16.enabled are both true");
            faults.add(fault.or("turn one of them off"));
        }
        faults.end()?;
        Ok(file)
    }

    fn take(&mut self, key: &str, value: &Value, hidden_size: Option<u64>) -> Result<(), Vec<Fault>> {
        match key {
            "zero_optimization" => self.engine.zero = zero(value, hidden_size, &mut self.notes)?,
            "train_micro_batch_size_per_gpu" => self.batch_size = number(key, value)?,
            "gradient_accumulation_steps" => {
                self.gradient_accumulation = match number(key, value)? {
                    Some(steps) => Some(u32::try_from(steps).map_err(|_| vec![bad(key, value, "a number of steps")])?),
                    None => None,
                };
            }
            "gradient_clipping" => self.clip = value.as_f64().is_some_and(|norm| norm > 0.0) || value == "auto",
            "bf16" | "bfloat16" if on(value) => self.weights = Some(DType::BF16),
            "fp16" if on(value) => self.weights = Some(DType::F16),
            "bf16" | "bfloat16" | "fp16" => {}
            "activation_checkpointing" => activation_checkpointing(value, &mut self.notes),
            "optimizer" => {
                let name = value["type"].as_str().unwrap_or_default();
                self.notes.push(format!("deepspeed optimizer {name}: the plan's optimizer is used"));
            }
            "data_types" => self.engine.grad_accum_dtype = accumulation(value)?,
            "tensor_parallel" => {
                self.notes.push(
                    "not simulated: deepspeed tensor_parallel: every card holds whole layers, which is more".into(),
                );
            }
            // transformers takes none of these; a script of one's own may.
            "autotuning" | "data_efficiency" | "curriculum_learning" | "progressive_layer_drop" => {
                let sizes = key == "autotuning";
                let instead = if sizes {
                    "the sizes that are given stand"
                } else {
                    "every token runs through every layer, which is more"
                };
                if value["enabled"] != false {
                    self.notes.push(format!("not simulated: deepspeed {key}: {instead}"));
                }
            }
            "compression_training" | "quantize_training" if !any_on(value) => {}
            // Its examples train a student beside its teacher (DeepSpeedExamples/compression).
            "compression_training" | "quantize_training" if any_on(value) => {
                let what = format!("deepspeed {key}, compression of a model: another task,");
                return Err(vec![Fault::unsupported(key, what).or("leave it out, unless all of it is off")]);
            }
            // transformers' autocast is its own; DeepSpeed's is the same around its engine.
            "torch_autocast" if value["enabled"] == true => {
                let kind = value["dtype"].as_str().unwrap_or("torch.bfloat16");
                self.notes
                    .push(format!("not simulated: deepspeed torch_autocast: {kind} beside what bf16 and fp16 say"));
            }
            "torch_autocast" => {}
            "compile" if value.is_null() || *value == false || value["enabled"] == false => {}
            "compile" => self.notes.push("not simulated: deepspeed compile: what runs is eager".into()),
            _ if WITHOUT_EFFECT.contains(&key) || key.starts_with("_comment") => {}
            _ => return Err(vec![unsupported(key, value)]),
        }
        Ok(())
    }
}

/// Whether any part of an object is switched on.
fn any_on(value: &Value) -> bool {
    let inner = value.as_object().into_iter().flatten();
    value["enabled"] == true || inner.into_iter().any(|(_, part)| any_on(part))
}

fn on(value: &Value) -> bool {
    matches!(&value["enabled"], Value::Bool(true)) || value["enabled"] == "auto"
}

fn bad(key: &str, value: &Value, expected: &str) -> Fault {
    Fault::value(key, value, expected)
}

fn unsupported(key: &str, value: &Value) -> Fault {
    Fault::unsupported(key, format!("deepspeed {key} {value}")).or_drop(key)
}

fn number(key: &str, value: &Value) -> Result<Option<u64>, Vec<Fault>> {
    match value {
        Value::String(text) if text == "auto" => Ok(None),
        // Sizes are often written as 5e8.
        Value::Number(number) => match (number.as_u64(), number.as_f64()) {
            (Some(whole), _) => Ok(Some(whole)),
            (None, Some(float)) if (0.0..1e18).contains(&float) && float.fract() == 0.0 => Ok(Some(float as u64)),
            _ => Err(vec![bad(key, value, "a whole number")]),
        },
        _ => Err(vec![bad(key, value, "a number or \"auto\"")]),
    }
}

/// `data_types`, which has one key.
fn accumulation(value: &Value) -> Result<Option<DType>, Vec<Fault>> {
    let mut found = None;
    for (key, value) in value.as_object().into_iter().flatten() {
        found = match (key.as_str(), value.as_str()) {
            ("grad_accum_dtype", _) if value.is_null() => None,
            ("grad_accum_dtype", Some("fp32" | "float32" | "float")) => Some(DType::F32),
            ("grad_accum_dtype", Some("bf16" | "bfloat16")) => Some(DType::BF16),
            ("grad_accum_dtype", Some("fp16" | "float16" | "half")) => Some(DType::F16),
            ("grad_accum_dtype", _) => {
                return Err(vec![bad("data_types.grad_accum_dtype", value, "fp32, bf16 or fp16")]);
            }
            _ => return Err(vec![unsupported(&format!("data_types.{key}"), value)]),
        };
    }
    Ok(found)
}

/// They act on `deepspeed.checkpointing.checkpoint`, which transformers does not call.
fn activation_checkpointing(value: &Value, notes: &mut Vec<String>) {
    for (key, value) in value.as_object().into_iter().flatten() {
        let matters = ["partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"];
        if matters.contains(&key.as_str()) && *value == true {
            notes.push(format!(
                "deepspeed activation_checkpointing.{key} has no effect: transformers checkpoints with torch's own function"
            ));
        }
    }
}

fn zero(value: &Value, hidden_size: Option<u64>, notes: &mut Vec<String>) -> Result<ZeroConfig, Vec<Fault>> {
    let Some(object) = value.as_object() else { return Err(vec![bad("zero_optimization", value, "an object")]) };
    // Without ZeRO its other options are passed over.
    let off = object.get("stage").is_some_and(|stage| *stage == 0);
    let mut kept = Map::new();
    let mut faults = Faults::default();
    for (key, value) in object {
        let (known, place) = (key.as_str(), format!("zero_optimization.{key}"));
        if ZERO_WITHOUT_EFFECT.contains(&known) || off && known != "stage" {
            continue;
        }
        if let Some((_, default)) = ZERO_DEFAULT_ONLY.iter().find(|(name, _)| *name == known) {
            faults.when(*value != *default, || unsupported(&place, value));
            continue;
        }
        // transformers fills in three; whoever fills in others does not say how.
        if *value == "auto" && !FILLED_IN.contains(&known) {
            notes.push(format!("deepspeed {key}: auto is DeepSpeed's default here"));
            continue;
        }
        let read = match value {
            Value::String(text) if text == "auto" => match filled_in(known, hidden_size) {
                Some(size) => {
                    notes.push(format!("deepspeed {key}: auto is {size}, as transformers fills it in"));
                    Ok(size.into())
                }
                None => Err(vec![bad(&place, value, "a number (auto needs a model with a hidden_size)")]),
            },
            stage if known == "stage" && !(0..=3).any(|known| *stage == known) => {
                Err(vec![bad(&place, value, "0, 1, 2 or 3")])
            }
            Value::Number(_) if known != "mics_shard_size" => number(&place, value).map(Into::into),
            Value::Object(section) if known.starts_with("offload_") => offload(&place, section),
            other => Ok(other.clone()),
        };
        match read {
            Ok(value) => drop(kept.insert(key.clone(), value)),
            Err(found) => faults.take(Err(found)),
        }
    }
    faults.end()?;
    crate::typed::read(Value::Object(kept))
        .map_err(|error| vec![Fault::value("zero_optimization", error, "what is simulated")])
}

/// Sizes that transformers fills in.
const FILLED_IN: [&str; 3] =
    ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"];

/// What transformers puts in place of `auto` (integrations/deepspeed.py).
fn filled_in(key: &str, hidden_size: Option<u64>) -> Option<u64> {
    let hidden = hidden_size?;
    match key {
        "reduce_bucket_size" => Some(hidden.saturating_mul(hidden)),
        "stage3_prefetch_bucket_size" => Some(hidden.saturating_mul(hidden).saturating_mul(9) / 10),
        _ => Some(hidden.saturating_mul(10)),
    }
}

fn offload(key: &str, section: &Map<String, Value>) -> Result<Value, Vec<Fault>> {
    let mut kept = Map::new();
    for (name, value) in section {
        let place = format!("{key}.{name}");
        if name == "ratio" {
            if value.as_f64().is_some_and(|ratio| ratio < 1.0) {
                return Err(vec![unsupported(&place, value)]);
            }
            continue;
        }
        // Whoever fills it in does not say how: DeepSpeed's own stands.
        if value == "auto" {
            continue;
        }
        let value = match value {
            Value::Number(_) => number(&place, value)?.into(),
            other => other.clone(),
        };
        if !OFFLOAD_WITHOUT_EFFECT.contains(&name.as_str()) {
            kept.insert(name.clone(), value);
        }
    }
    Ok(Value::Object(kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_usual_file_is_read() {
        let document = json!({
            "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto",
            "zero_optimization": {
                "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": "auto",
                "sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": true,
                "offload_optimizer": {"device": "cpu", "pin_memory": true}
            }
        });
        let file = DeepSpeedFile::read(&document, Some(100)).expect("it is read");
        assert_eq!(file.batch_size, Some(4));
        assert_eq!(file.gradient_accumulation, None);
        assert_eq!(file.weights, Some(DType::BF16));
        assert_eq!(file.engine.zero.stage, 3);
        assert_eq!(file.engine.zero.reduce_bucket_size, 10_000);
        assert!(file.engine.zero.offload_optimizer.as_ref().is_some_and(|offload| offload.pin_memory));
    }

    #[test]
    fn accumulation_disks_and_options_without_effect_are_read() {
        let document = json!({
            "data_types": {"grad_accum_dtype": "fp32"},
            "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false},
            "zero_optimization": {
                "stage": 3, "zero_hpz_partition_size": 8,
                "offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 6, "buffer_size": 1e8, "ratio": 1.0}
            }
        });
        let file = DeepSpeedFile::read(&document, None).expect("it is read");
        assert_eq!(file.engine.grad_accum_dtype, Some(DType::F32));
        assert_eq!(file.engine.zero.zero_hpz_partition_size, 8);
        let offload = file.engine.zero.offload_param.expect("it is there");
        assert!(offload.is_to_disk() && offload.pin_memory);
        assert_eq!((offload.buffer_count, offload.buffer_size), (Some(6), 100_000_000));
        assert!(file.notes.iter().any(|note| note.contains("partition_activations has no effect")));
        assert!(!file.notes.iter().any(|note| note.contains("cpu_checkpointing")));
    }

    #[test]
    fn sizes_that_nobody_fills_in_are_deepspeeds_own() {
        let document = json!({
            "cuda_visible_devices": 0, "torch_autocast": {"enabled": true, "dtype": "torch.bfloat16"},
            "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto", "offload_param": {"device": "cpu", "buffer_size": "auto"}}
        });
        let file = DeepSpeedFile::read(&document, Some(64)).expect("it is read");
        assert_eq!(file.engine.zero.stage3_max_live_parameters, 1_000_000_000);
        assert!(file.notes.iter().any(|note| note.starts_with("not simulated: deepspeed torch_autocast")));
        let compressed =
            json!({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}});
        let PlanError::Faults(faults) = DeepSpeedFile::read(&compressed, None).expect_err("refused") else { panic!() };
        assert!(faults[0].to_string().contains("another task"));
    }

    #[test]
    fn what_is_not_simulated_is_refused_by_name() {
        let refused = |document: Value| {
            let PlanError::Faults(faults) = DeepSpeedFile::read(&document, None).expect_err("refused") else {
                panic!("no faults")
            };
            faults.iter().map(|fault| fault.path.clone()).collect::<Vec<_>>()
        };
        let zero = |section: Value| refused(json!({"zero_optimization": section}));
        assert_eq!(
            zero(json!({"reduce_bucket_size": "auto", "sub_group_size": -1, "zero_quantized_weights": true})),
            ["reduce_bucket_size", "sub_group_size", "zero_quantized_weights"]
                .map(|key| format!("zero_optimization.{key}"))
        );
        assert_eq!(zero(json!({"stage": 2, "no_such_key": 1})), ["zero_optimization"]);
        assert_eq!(zero(json!({"stage": 5})), ["zero_optimization.stage"]);
        assert_eq!(refused(json!({"bf16": {"enabled": true}, "fp16": {"enabled": true}})), ["fp16.enabled"]);
        assert_eq!(
            refused(json!({"sparse_attention": {}, "data_types": {"x": 1}})),
            ["sparse_attention", "data_types.x"]
        );
    }
}
