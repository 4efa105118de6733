//! What the fields of a recorded run that name further options of training mean as a plan.

use serde_json::Value;

use crate::dtype::DType;
use crate::plan::{AttentionKind, LossKind, ModelCode, Selective, TrainPlan};

/// Writes them into a plan; what cannot be simulated is named.
pub(super) fn apply(plan: &mut TrainPlan, run: &Value) -> Result<(), String> {
    let named = |key: &str, value: &Value| format!("run.{key} {value} is not known");
    plan.save_on_cpu = run["save_on_cpu"] == true;
    plan.checkpoints.selective = match &run["selective"] {
        Value::Null => None,
        value if value == "matmul" => Some(Selective::Matmuls),
        value if value == "torchtitan" => Some(Selective::AlternateMatmuls),
        other => return Err(named("selective", other)),
    };
    plan.loss.kind = match &run["loss"] {
        Value::Null if run["task"] == "sft" => LossKind::TrlFused,
        Value::Null => LossKind::Standard,
        value if value == "chunked" => LossKind::Chunked,
        value if value == "cce" => LossKind::CutCrossEntropy,
        other => return Err(named("loss", other)),
    };
    plan.loss.chunks = run["chunks"].as_u64().unwrap_or(plan.loss.chunks);
    if !run["sdpa_kernel"].is_null() {
        let kernel = serde_json::from_value(run["sdpa_kernel"].clone());
        plan.sdpa_kernel = Some(kernel.map_err(|_| named("sdpa_kernel", &run["sdpa_kernel"]))?);
    }
    if let Some(every) = run["every"].as_u64() {
        plan.checkpoints.every = u32::try_from(every).unwrap_or(u32::MAX);
    }
    if let Some(rank) = run["rank"].as_u64() {
        plan.optimizer.rank = rank;
    }
    plan.optimizer_in_backward = run["opt_in_backward"] == true;
    plan.optimizer.master_weights = run["master_weights"] == true;
    plan.gradients = super::ledger::dtype(&run["grad_dtype"]);
    plan.optimizer.state = super::ledger::dtype(&run["state_dtype"]);
    plan.batch.padded = run["padded"] == true;
    plan.batch.mask |= plan.batch.padded;
    if plan.batch.padded {
        // Every second sample is a quarter shorter, as the runs were made.
        let (batch, seq) = (plan.batch.batch_size, plan.batch.seq_len);
        plan.batch.real_tokens = Some(batch * seq - batch / 2 * (seq / 4));
    }
    if !run["model_code"].is_null() {
        let code = serde_json::from_value(run["model_code"].clone());
        plan.model_code = code.map_err(|_| named("model_code", &run["model_code"]))?;
        plan.keep_loss = plan.model_code != ModelCode::Torchtune;
        // LitGPT's loop rebinds its names when the next forward pass is over. Lightning quantises every linear, and rows are
        // of bitsandbytes 0.42.
        if let Some(quantization) = plan.quantization.as_mut().filter(|_| plan.keep_loss) {
            quantization.skip = Some(Vec::new());
            quantization.packed_from = Some(DType::F16);
            (quantization.prepare, quantization.keeps_inputs) = (false, true);
        }
    }
    plan.clip |= run["clip"].is_string();
    let names = run["frozen"].as_array().into_iter().flatten();
    plan.frozen.extend(names.filter_map(Value::as_str).map(str::to_owned));
    match run["attn"].as_str() {
        None | Some("sdpa" | "eager") => Ok(()),
        Some("flash_attention_2") => {
            plan.attention = AttentionKind::Flash2;
            Ok(())
        }
        Some("flex_attention") => {
            plan.attention = AttentionKind::Flex;
            Ok(())
        }
        Some(other) => Err(format!("run.attn {other} is not simulated yet")),
    }
}
