//! Public logs of serving engines against our budgets, and published training runs against our simulation.

pub mod bridge;
mod llama_cpp;
mod names;
pub mod simumax;
pub mod vllm;

use serde_json::{Value, json};

use super::kinds::{Kind, Outcome, Score};
use super::ledger::Measure;

/// One figure of one log: which file, row and model, what is compared, and both.
fn compared(row: &str, quantity: &str, predicted: u64, measured: u64) -> Score {
    let compared = Measure { predicted: Some(predicted), measured: Some(measured) };
    Score {
        id: row.to_owned(),
        group: quantity.to_owned(),
        levels: [compared, Measure::default(), Measure::default()],
        outcome: Outcome::Good,
        document: json!({"row": row, "quantity": quantity, "predicted": predicted, "measured": measured}),
    }
}

/// The config of a model cut to size, by the names that Megatron has for its sizes; `vocabulary` may be padded.
fn config(shape: &Value, vocabulary: Option<u64>) -> Result<Value, String> {
    let get = |key: &str| number(&shape[key]).ok_or(format!("architecture.{key} is missing"));
    let (latent, experts) = (!shape["kv_lora_rank"].is_null(), number(&shape["num_experts"]));
    let (kind, class) = match (latent, experts, shape["qk_layernorm"] == true) {
        (true, ..) => ("deepseek_v3", "DeepseekV3ForCausalLM"),
        (false, Some(_), true) => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        (false, Some(_), false) => ("mixtral", "MixtralForCausalLM"),
        (false, None, true) => ("qwen3", "Qwen3ForCausalLM"),
        (false, None, false) => ("llama", "LlamaForCausalLM"),
    };
    let heads = get("num_attention_heads")?;
    let mut config = json!({
        "model_type": kind,
        "architectures": [class],
        "hidden_size": get("hidden_size")?,
        "num_hidden_layers": get("num_layers")?,
        "num_attention_heads": heads,
        "num_key_value_heads": number(&shape["num_kv_heads"]).unwrap_or(heads),
        "intermediate_size": get("ffn_hidden_size")?,
        "vocab_size": vocabulary.map_or_else(|| get("vocab_size"), Ok)?,
        "tie_word_embeddings": shape["tied_embeddings"] == true,
    });
    if latent {
        for (key, from) in [
            ("kv_lora_rank", "kv_lora_rank"),
            ("qk_nope_head_dim", "qk_head_dim"),
            ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
            ("v_head_dim", "v_head_dim"),
            ("n_routed_experts", "num_experts"),
            ("num_experts_per_tok", "topk"),
            ("moe_intermediate_size", "moe_ffn_hidden_size"),
            ("first_k_dense_replace", "dense_layers"),
        ] {
            config[key] = get(from)?.into();
        }
        let shared =
            || Ok::<_, String>(get("moe_shared_expert_intermediate_size")? / get("moe_ffn_hidden_size")?.max(1));
        config["n_shared_experts"] = number(&shape["num_shared_experts"]).map_or_else(shared, Ok)?.into();
        config["q_lora_rank"] = shape["q_lora_rank"].clone();
        (config["n_group"], config["topk_group"]) = (1.into(), 1.into());
        return Ok(config);
    }
    if let Some(size) = number(&shape["head_dim"]) {
        config["head_dim"] = size.into();
    }
    if let Some(experts) = experts {
        let width = get("moe_ffn_hidden_size").or_else(|_| get("ffn_hidden_size"))?;
        config[if kind == "mixtral" { "num_local_experts" } else { "num_experts" }] = experts.into();
        config[if kind == "mixtral" { "intermediate_size" } else { "moe_intermediate_size" }] = width.into();
        config["num_experts_per_tok"] = get("topk")?.into();
    }
    Ok(config)
}

/// Files of published figures.
pub(super) const KIND: Kind = Kind {
    name: "external",
    noun: "figures",
    looks: "one document of published figures with `source`, `metric` and `rows` (truth/external)",
    levels: &["error"],
    joined: false,
    rows: |file| {
        let document = file.documents.first().filter(|document| document["metric"].is_string())?;
        let number = |(index, row): (usize, &Value)| {
            let mut row = row.clone();
            row["index"] = index.into();
            row
        };
        Some(document["rows"].as_array()?.iter().enumerate().map(number).collect())
    },
    score,
};

/// Scores a row of a file, whose `scored_as` says by which rules.
fn score(file: &Value, row: &Value) -> Vec<Score> {
    let index = row["index"].as_u64().unwrap_or(0);
    match file["scored_as"].as_str() {
        Some("vllm log") => vllm::score(index, row),
        Some("llama.cpp log") => llama_cpp::score_log(index, row),
        Some("llama.cpp table") => llama_cpp::score_cell(index, row),
        Some("megatron-bridge") => bridge::score(index, row),
        Some("simumax") => simumax::score(file["card"].as_str().unwrap_or_default(), row),
        _ => {
            let why = file["expected_skip"].as_str().unwrap_or("the file names no rules (`scored_as`)");
            vec![Score::skipped(&format!("row {index}"), why)]
        }
    }
}

/// Bytes of a number of MiB as logs print them.
fn mebibytes(value: &Value) -> Option<u64> {
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())?;
    (number >= 0.0).then(|| (number * 1_048_576.0).round() as u64)
}

fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}
