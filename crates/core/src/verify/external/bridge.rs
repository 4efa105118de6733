//! Megatron-Bridge's published peaks: decimal GB of rank 0.

use serde_json::{Value, json};

use super::{ExternalRow, number};
use crate::dtype::DType;
use crate::memory::megatron;
use crate::model::Model;
use crate::plan::parallel::megatron::{CrossEntropy, Experts, Megatron, PrecisionAware, Recompute, RecomputeModule};
use crate::plan::parallel::{Engine, Mesh, Parallel};
use crate::plan::{Batch, Gpus, TrainPlan};

/// A row of megatron_bridge.json.
pub(super) fn score(index: usize, row: &Value) -> Vec<ExternalRow> {
    let model = row["model"].as_str().unwrap_or_default();
    let modules = row["recompute_modules"].as_array().map(|list| {
        let names: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
        format!(" recompute [{}]", names.join(" "))
    });
    let label = format!("row {index} {model}{}", modules.unwrap_or_default());
    let skip = |why: &str| vec![ExternalRow::Skipped { row: label.clone(), skipped: why.into() }];
    if let Some(why) = beyond(row, model) {
        return skip(why);
    }
    let simulated = plan(row).and_then(|(model, plan)| megatron::ranks(&model, &plan).map_err(|e| e.to_string()));
    match (simulated, number(&row["measured_bytes"])) {
        (Ok(ranks), Some(measured)) => {
            let predicted = ranks.first().map_or(0, |rank| rank.simulation.replay.peak_allocated());
            vec![ExternalRow::Scored { row: label, quantity: "allocated", predicted, measured }]
        }
        (Err(why), _) => skip(&why),
        _ => skip("nothing was measured"),
    }
}

/// Why a row cannot be simulated.
fn beyond(row: &Value, model: &str) -> Option<&'static str> {
    let text = |key: &str| row[key].as_str().unwrap_or_default();
    if model.contains("Nemotron") {
        return Some("hybrid Mamba layers under Megatron are not simulated");
    }
    if text("precision").contains("FP8") {
        return Some("fp8 under Megatron is not simulated");
    }
    if text("task").contains("LoRA") {
        return Some("LoRA under Megatron is not simulated, and its rank and batch are not published");
    }
    if text("dispatcher").contains("HybridEP") {
        return Some("the HybridEP dispatcher and CUDA graphs are not simulated");
    }
    if row["optimizer_cpu_offload_fraction"].is_number() || row["seq_len"].is_null() {
        return Some("its sequence length is not published");
    }
    row["architecture"]["kv_lora_rank"].is_null().then_some("its architecture is not published")
}

fn plan(row: &Value) -> Result<(Model, TrainPlan), String> {
    let get = |key: &str| number(&row[key]).ok_or(format!("{key} is missing"));
    let shape = &row["architecture"];
    let size = |key: &str| number(&shape[key]).ok_or(format!("architecture.{key} is missing"));
    let config = json!({
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": size("hidden_size")?,
        "num_hidden_layers": size("num_layers")?,
        "num_attention_heads": size("num_attention_heads")?,
        "num_key_value_heads": size("num_attention_heads")?,
        "q_lora_rank": shape["q_lora_rank"],
        "kv_lora_rank": size("kv_lora_rank")?,
        "qk_nope_head_dim": size("qk_head_dim")?,
        "qk_rope_head_dim": size("qk_pos_emb_head_dim")?,
        "v_head_dim": size("v_head_dim")?,
        "intermediate_size": size("ffn_hidden_size")?,
        "moe_intermediate_size": size("moe_ffn_hidden_size")?,
        "n_routed_experts": size("num_experts")?,
        "num_experts_per_tok": size("topk")?,
        "n_shared_experts": size("num_shared_experts")?,
        "first_k_dense_replace": size("dense_layers")?,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": size("vocab_size")?,
        "tie_word_embeddings": shape["tied_embeddings"] == true,
    });
    let model = Model::new(config, None).map_err(|e| e.to_string())?;
    let modules = row["recompute_modules"].as_array().cloned().unwrap_or_default();
    let modules: Result<Vec<RecomputeModule>, _> = modules.into_iter().map(serde_json::from_value).collect();
    let aware = row["optimizer"].as_str().is_some_and(|text| text.contains("precision-aware"));
    let options = Megatron {
        main_gradients: DType::BF16,
        overlap_grad_reduce: row["overlap_grad_reduce"] == true,
        precision_aware: aware.then_some(PrecisionAware {
            exp_avg: DType::BF16,
            exp_avg_sq: DType::BF16,
            store_param_remainders: true,
            // Bridge's mixed precision names a recipe by default.
            fp8_recipe: true,
        }),
        recompute: Recompute::Selective(modules.map_err(|e| e.to_string())?),
        cross_entropy: CrossEntropy::Te,
        moe: Experts {
            shared_expert_overlap: row["moe"]["shared_expert_overlap"] == true,
            router_fp32: true,
            ..Experts::default()
        },
        transformer_engine: 17,
        ..Megatron::default()
    };
    let mesh = Mesh {
        dp_shard: get("dp")?,
        tp: get("tp")?,
        sequence_parallel: row["sequence_parallel"] == true,
        cp: get("cp")?,
        ep: get("ep")?,
        etp: Some(get("etp")?),
        pp: get("pp")?,
        ..Mesh::default()
    };
    let micro = get("micro_batch_size")?;
    let accumulation = get("global_batch_size")? / micro.max(1) / get("dp")?.max(1);
    let plan = TrainPlan {
        batch: Batch { batch_size: micro, seq_len: get("seq_len")?, ..Batch::default() },
        gradient_accumulation: u32::try_from(accumulation).unwrap_or(1).max(1),
        parallel: Some(Parallel { mesh, engine: Engine::Megatron(options), communicators: 1, no_sync: false }),
        gpu: Gpus::embedded().find("H100").map_err(|e| e.to_string())?,
        ..TrainPlan::default()
    };
    Ok((model, plan))
}
