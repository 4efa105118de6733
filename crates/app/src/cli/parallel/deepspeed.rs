//! Flags of DeepSpeed, and its file.

use std::path::PathBuf;

use clap::Args;
use serde_json::Value;
use vramcast_core::plan::TrainPlan;
use vramcast_core::plan::parallel::{DeepSpeed, DeepSpeedFile, Engine, Offload, OffloadDevice};

use crate::cli::Failure;

/// DeepSpeed's own.
#[derive(Debug, Args)]
#[command(next_help_heading = "DeepSpeed")]
pub(super) struct ZeroArguments {
    /// The ZeRO stage [default: 2].
    #[arg(long, value_name = "STAGE", requires = "gpus")]
    zero: Option<u8>,
    /// DeepSpeed's configuration file; --zero and the offload flags override it.
    #[arg(long, value_name = "FILE", requires = "gpus")]
    deepspeed: Option<PathBuf>,
    /// Keep fp32 weights, gradients and states there: cpu or nvme [without a value: cpu].
    #[arg(long, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_missing_value = "cpu", requires = "gpus")]
    offload_optimizer: Option<String>,
    /// Keep shards of parameters there (ZeRO 3): cpu or nvme [without a value: cpu].
    #[arg(long, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_missing_value = "cpu", requires = "gpus")]
    offload_param: Option<String>,
    /// A key of DeepSpeed's zero_optimization, such as overlap_comm=false (may be given several times); overrides the file.
    #[arg(long, value_name = "KEY=VALUE", requires = "gpus")]
    zero_option: Vec<String>,
    /// What gradients are accumulated in over micro-batches (data_types.grad_accum_dtype) [default: the weights' type].
    #[arg(long, value_name = "TYPE", requires = "gpus")]
    grad_accum_dtype: Option<String>,
}

impl ZeroArguments {
    pub(super) fn is_used(&self) -> bool {
        self.zero.is_some()
            || self.deepspeed.is_some()
            || self.offload_optimizer.is_some()
            || self.offload_param.is_some()
            || !self.zero_option.is_empty()
            || self.grad_accum_dtype.is_some()
    }

    pub(super) fn engine(
        &self,
        plan: &mut TrainPlan,
        hidden_size: Option<u64>,
        notes: &mut Vec<String>,
    ) -> Result<Engine, Failure> {
        let mut document = serde_json::json!({ "zero_optimization": { "stage": 2 } });
        let mut source = "--zero-option".to_owned();
        if let Some(path) = &self.deepspeed {
            source = format!("--deepspeed {}", path.display());
            let failed = |error: String| Failure::bad_input(format!("{source}: {error}"));
            let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
            document = serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
        }
        self.add_options(&mut document)?;
        let file = DeepSpeedFile::read(&document, hidden_size)
            .map_err(|error| Failure::bad_input(format!("{source}: {error}")))?;
        let DeepSpeed { mut zero, grad_accum_dtype } = file.engine;
        plan.weights = file.weights.unwrap_or(plan.weights);
        plan.batch.batch_size = file.batch_size.unwrap_or(plan.batch.batch_size);
        plan.gradient_accumulation = file.gradient_accumulation.unwrap_or(plan.gradient_accumulation);
        plan.clip |= file.clip;
        notes.extend(file.notes);
        zero.stage = self.zero.unwrap_or(zero.stage);
        for (flag, given, offload) in [
            ("offload-optimizer", &self.offload_optimizer, &mut zero.offload_optimizer),
            ("offload-param", &self.offload_param, &mut zero.offload_param),
        ] {
            let device = match given.as_deref() {
                None => continue,
                Some("cpu") => OffloadDevice::Cpu,
                Some("nvme") => OffloadDevice::Nvme,
                Some("none") => OffloadDevice::None,
                Some(other) => return Err(Failure::bad_input(format!("--{flag}: {other} is not cpu, nvme or none"))),
            };
            *offload = Some(Offload { device, ..offload.clone().unwrap_or_default() });
        }
        Ok(Engine::Deepspeed(DeepSpeed { zero, grad_accum_dtype }))
    }

    /// Puts single keys into a file's document.
    fn add_options(&self, document: &mut Value) -> Result<(), Failure> {
        // What is no object is the reader's to refuse.
        let mut put = |section: &str, key: &str, value: Value| {
            if let Some(object) = document.as_object_mut() {
                let section = object.entry(section).or_insert_with(|| Value::Object(Default::default()));
                if let Some(section) = section.as_object_mut() {
                    section.insert(key.to_owned(), value);
                }
            }
        };
        for option in &self.zero_option {
            let Some((key, value)) = option.split_once('=') else {
                return Err(Failure::bad_input(format!("--zero-option {option}: not KEY=VALUE"))
                    .hint("for example --zero-option reduce_bucket_size=5e7"));
            };
            let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
            put("zero_optimization", key, value);
        }
        if let Some(dtype) = &self.grad_accum_dtype {
            put("data_types", "grad_accum_dtype", Value::String(dtype.clone()));
        }
        Ok(())
    }
}
