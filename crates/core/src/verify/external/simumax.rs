//! Megatron runs that SimuMax published: exact counters of every rank on 8 x B200, and reconstructed ones on A100.

use serde_json::{Value, json};

use super::{ExternalRow, number};
use crate::dtype::DType;
use crate::memory::megatron;
use crate::model::Model;
use crate::plan::parallel::megatron::{ContextExchange, CrossEntropy, Experts, Fp8, Megatron, Recompute};
use crate::plan::parallel::{Engine, Mesh, Parallel};
use crate::plan::{AllocatorOptions, Batch, Gpus, Package, Stack, TrainPlan, Version};

/// A row of simumax_b200.json or simumax_a100.json; rows that repeat another's memory run are left out.
pub(super) fn score(gpu: &str, row: &Value) -> Vec<ExternalRow> {
    let case = row["case"].as_str().unwrap_or_default().to_owned();
    if row["memory_reused_from_case"].is_string() {
        return Vec::new();
    }
    let skip = |why: String| vec![ExternalRow::Skipped { row: case.clone(), skipped: why }];
    let ranks = match plan(row, gpu).and_then(|(model, plan)| megatron::ranks(&model, &plan).map_err(|e| e.to_string()))
    {
        Ok(ranks) => ranks,
        Err(why) => return skip(why),
    };
    let gpus = number(&row["world_size"]).unwrap_or(1) / ranks.len().max(1) as u64;
    let mut rows = Vec::new();
    for rank in &ranks {
        let replay = &rank.simulation.replay;
        // The last pipeline stage has the last ranks.
        let of_rank = |field: &str| {
            let own = (rank.stage * gpus..(rank.stage + 1) * gpus).map(|index| index.to_string());
            own.filter_map(|index| number(&row["measured_by_rank"][index.as_str()][field])).max()
        };
        let label = format!("{case} stage {}", rank.stage);
        if let Some(measured) = of_rank("max_allocated_bytes") {
            let predicted = replay.peak_allocated();
            rows.push(ExternalRow::Scored { row: label.clone(), quantity: "allocated by stage", predicted, measured });
        }
        if let Some(measured) = of_rank("max_reserved_bytes") {
            let predicted = replay.peak_reserved();
            rows.push(ExternalRow::Scored { row: label, quantity: "reserved by stage", predicted, measured });
        }
    }
    let most = |of: fn(&crate::memory::allocator::Replay) -> u64| {
        ranks.iter().map(|rank| of(&rank.simulation.replay)).max().unwrap_or(0)
    };
    let measured = number(&row["measured_bytes"]).or_else(|| number(&row["measured_bytes_reconstructed"]));
    for (quantity, predicted, measured) in [
        ("allocated", most(|replay| replay.peak_allocated()), measured),
        ("reserved", most(|replay| replay.peak_reserved()), number(&row["measured_reserved_bytes"])),
    ] {
        if let Some(measured) = measured {
            rows.push(ExternalRow::Scored { row: case.clone(), quantity, predicted, measured });
        }
    }
    rows
}

/// What a row ran.
pub fn plan(row: &Value, gpu: &str) -> Result<(Model, TrainPlan), String> {
    let get = |key: &str| number(&row[key]).ok_or(format!("{key} is missing"));
    let model = Model::new(config(&row["architecture"], row)?, None).map_err(|e| e.to_string())?;
    let moe = &row["moe"];
    let cp_comm = match row["cp_comm_type"].as_str() {
        None | Some("a2a") => ContextExchange::A2a,
        Some("p2p") => ContextExchange::P2p,
        Some(exchange) => return Err(format!("context parallel by {exchange} is not simulated")),
    };
    if let Some(dispatcher) = moe["token_dispatcher"].as_str().filter(|dispatcher| *dispatcher != "alltoall") {
        return Err(format!("the {dispatcher} dispatcher is not simulated"));
    }
    let capacity = moe["expert_capacity_factor"].as_f64().filter(|_| moe["pad_expert_input_to_capacity"] == true);
    let options = Megatron {
        virtual_pipeline: get("vp")?,
        cp_comm,
        distributed_optimizer: row["distributed_optimizer"] == true,
        main_gradients: if row["grad_accum_dtype"] == "bf16" { DType::BF16 } else { DType::F32 },
        recompute: recompute(row["recompute"].as_str().unwrap_or_default()),
        fp8: (row["fp8"] == true).then(Fp8::default),
        cross_entropy: match row["cross_entropy_fusion"].as_str() {
            Some(fusion) if fusion.starts_with("te") => CrossEntropy::Te,
            _ => CrossEntropy::Unfused,
        },
        moe: Experts { capacity_percent: capacity.map(|factor| (factor * 100.0).round() as u64), ..Experts::default() },
        ..Megatron::default()
    };
    let mesh = Mesh {
        dp_shard: get("dp")?,
        tp: get("tp")?,
        sequence_parallel: row["sequence_parallel"] == true && get("tp")? > 1,
        cp: get("cp")?,
        ep: get("ep")?,
        etp: (get("ep")? > 1).then_some(get("etp")?),
        pp: get("pp")?,
        ..Mesh::default()
    };
    let batch = Batch { batch_size: get("micro_batch_size")?, seq_len: get("seq_len")?, ..Batch::default() };
    // The files' `software`; torch on A100 is not named there.
    let [core, engine] = if gpu == "B200" { [14, 11] } else { [12, 1] };
    let stack = Stack::default()
        .with(Package::MegatronCore, Version::new(0, core, 0))
        .with(Package::TransformerEngine, Version::new(2, engine, 0))
        .with(Package::Torch, Version::new(2, 10, 0));
    let plan = TrainPlan {
        batch,
        gradient_accumulation: u32::try_from(get("num_microbatches")?).unwrap_or(u32::MAX),
        clip: true,
        parallel: Some(Parallel { mesh, engine: Engine::Megatron(options), no_sync: false }),
        gpu: Gpus::embedded().find(gpu).map_err(|e| e.to_string())?,
        allocator: AllocatorOptions::default(),
        stack,
        ..TrainPlan::default()
    };
    Ok((model, plan))
}

/// What the arguments of a launcher say, as `--recompute-method block --recompute-num-layers 0`.
fn recompute(arguments: &str) -> Recompute {
    let mut words = arguments.split(|c: char| c.is_whitespace() || "()".contains(c));
    let layers = words.by_ref().find(|word| *word == "--recompute-num-layers").and_then(|_| words.next()?.parse().ok());
    match layers {
        Some(0) | None => Recompute::None,
        Some(layers) if arguments.contains("uniform") => Recompute::Uniform(layers),
        Some(layers) => Recompute::Block(layers),
    }
}

/// The config of the truncated model that was run; its vocabulary is padded already.
fn config(shape: &Value, row: &Value) -> Result<Value, String> {
    let get = |key: &str| number(&shape[key]).ok_or(format!("architecture.{key} is missing"));
    let vocabulary = number(&row["padded_vocab_size"]).ok_or("padded_vocab_size is missing")?;
    let latent = shape["attention_type"] == "mla";
    let (kind, class) = match (latent, number(&shape["num_experts"]), shape["qk_layernorm"] == true) {
        (true, _, _) => ("deepseek_v3", "DeepseekV3ForCausalLM"),
        (false, Some(_), true) => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        (false, Some(_), false) => ("mixtral", "MixtralForCausalLM"),
        (false, None, true) => ("qwen3", "Qwen3ForCausalLM"),
        (false, None, false) => ("llama", "LlamaForCausalLM"),
    };
    let mut config = json!({
        "model_type": kind,
        "architectures": [class],
        "hidden_size": get("hidden_size")?,
        "num_hidden_layers": get("num_layers")?,
        "num_attention_heads": get("num_attention_heads")?,
        "num_key_value_heads": get("num_kv_heads")?,
        "intermediate_size": get("ffn_hidden_size")?,
        "vocab_size": vocabulary,
        "tie_word_embeddings": shape["tied_embeddings"] == true,
    });
    let Some(fields) = config.as_object_mut() else { return Err("no config".into()) };
    if latent {
        for (key, from) in [
            ("q_lora_rank", "q_lora_rank"),
            ("kv_lora_rank", "kv_lora_rank"),
            ("qk_nope_head_dim", "qk_head_dim"),
            ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
            ("v_head_dim", "v_head_dim"),
            ("n_routed_experts", "num_experts"),
            ("num_experts_per_tok", "topk"),
            ("moe_intermediate_size", "moe_ffn_hidden_size"),
            ("first_k_dense_replace", "dense_layers"),
        ] {
            fields.insert(key.into(), json!(get(from)?));
        }
        let shared = get("moe_shared_expert_intermediate_size")? / get("moe_ffn_hidden_size")?.max(1);
        fields.insert("n_shared_experts".into(), json!(shared));
        fields.insert("n_group".into(), json!(1));
        fields.insert("topk_group".into(), json!(1));
        return Ok(config);
    }
    fields.insert("head_dim".into(), json!(get("head_dim")?));
    if let Some(experts) = number(&shape["num_experts"]) {
        let width = json!(get("moe_ffn_hidden_size").or_else(|_| get("ffn_hidden_size"))?);
        fields.insert(if kind == "mixtral" { "num_local_experts" } else { "num_experts" }.into(), json!(experts));
        fields.insert(if kind == "mixtral" { "intermediate_size" } else { "moe_intermediate_size" }.into(), width);
        fields.insert("num_experts_per_tok".into(), json!(get("topk")?));
    }
    Ok(config)
}
