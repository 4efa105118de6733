//! Megatron-LM's line.

use serde_json::{Value, json};

use super::{at, is};

/// What the line says of a decoder's own sizes, and nothing where it cannot.
fn sizes(name: &str, config: &Value, put: &mut impl FnMut(&str, Option<String>)) {
    let size = |key: &str| config[key].as_u64();
    let kind = config["model_type"].as_str().unwrap_or_default();
    let (Some(layers), Some(hidden), Some(heads)) =
        (size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads"))
    else {
        return;
    };
    if !["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"].contains(&kind) {
        return;
    }
    for (flag, value) in [
        ("num-layers", Some(layers)),
        ("hidden-size", Some(hidden)),
        ("ffn-hidden-size", size("intermediate_size")),
        ("num-attention-heads", Some(heads)),
        ("kv-channels", size("head_dim").filter(|width| width.checked_mul(heads) != Some(hidden))),
        ("max-position-embeddings", size("max_position_embeddings")),
        ("vocab-size", size("vocab_size")),
        ("num-experts", size("num_local_experts").or_else(|| size("num_experts"))),
        ("moe-router-topk", size("num_experts_per_tok")),
        ("moe-ffn-hidden-size", size("moe_intermediate_size")),
        ("num-query-groups", size("num_key_value_heads").filter(|groups| *groups != heads)),
    ] {
        if flag == "num-query-groups" && value.is_some() {
            put("group-query-attention", None);
        }
        if let Some(value) = value {
            put(flag, Some(value.to_string()));
        }
    }
    put("swiglu", None);
    put("normalization", Some("RMSNorm".into()));
    put("position-embedding-type", Some("rope".into()));
    if config["attention_bias"] != true && config["mlp_bias"] != true {
        put("disable-bias-linear", None);
    }
    if config["tie_word_embeddings"] != true {
        put("untie-embeddings-and-output-weights", None);
    }
    if kind == "qwen2" {
        put("add-qkv-bias", None);
    }
    if kind.starts_with("qwen3") {
        put("qk-layernorm", None);
    }
    put("tokenizer-type", Some("HuggingFaceTokenizer".into()));
    put("tokenizer-model", Some(name.into()));
}

/// Arguments of `pretrain_gpt.py` (megatron/training/arguments.py).
pub(super) fn line(name: &str, config: &Value, plan: &Value) -> Vec<String> {
    const AT: &str = "parallel.engine.megatron";
    let size = |axis: &str| at(plan, &format!("parallel.mesh.{axis}")).and_then(Value::as_u64).unwrap_or(1);
    let world = ["dp_replicate", "dp_shard", "tp", "cp", "pp"].iter().map(|axis| size(axis)).product::<u64>();
    let mut line = vec!["torchrun".to_owned(), format!("--nproc_per_node={world}"), "pretrain_gpt.py".to_owned()];
    let mut put = |flag: &str, value: Option<String>| {
        line.push(format!("--{flag}"));
        line.extend(value);
    };
    sizes(name, config, &mut put);
    let number = |path: &str| at(plan, path).map(ToString::to_string);
    put("micro-batch-size", number("batch.batch_size"));
    put("seq-length", number("batch.seq_len"));
    put("tensor-model-parallel-size", Some(size("tp").to_string()));
    put("pipeline-model-parallel-size", Some(size("pp").to_string()));
    put("context-parallel-size", Some(size("cp").to_string()));
    for (flag, path) in [
        ("sequence-parallel", "parallel.mesh.sequence_parallel".to_owned()),
        ("use-distributed-optimizer", format!("{AT}.distributed_optimizer")),
        ("overlap-grad-reduce", format!("{AT}.overlap_grad_reduce")),
    ] {
        if at(plan, &path) == Some(&json!(true)) {
            put(flag, None);
        }
    }
    put(if is(plan, "weights", "fp16") { "fp16" } else { "bf16" }, None);
    // Its own defaults are 0.1, which is not simulated.
    put("attention-dropout", Some("0".into()));
    put("hidden-dropout", Some("0".into()));
    let rows = |path: &str| at(plan, path).and_then(Value::as_u64).unwrap_or(1);
    let replicas = size("dp_replicate") * size("dp_shard");
    put("global-batch-size", Some((rows("batch.batch_size") * rows("gradient_accumulation") * replicas).to_string()));
    for (flag, path, usual) in [
        ("expert-model-parallel-size", "parallel.mesh.ep".to_owned(), 1),
        ("expert-tensor-parallel-size", "parallel.mesh.etp".to_owned(), 0),
        ("num-virtual-stages-per-pipeline-rank", format!("{AT}.virtual_pipeline"), 1),
        ("make-vocab-size-divisible-by", format!("{AT}.make_vocab_size_divisible_by"), 128),
        ("mtp-num-layers", format!("{AT}.mtp_layers"), 0),
        ("decoder-first-pipeline-num-layers", format!("{AT}.split.ends.first"), 0),
        ("decoder-last-pipeline-num-layers", format!("{AT}.split.ends.last"), 0),
    ] {
        if let Some(value) = at(plan, &path).and_then(Value::as_u64).filter(|value| *value != usual) {
            put(flag, Some(value.to_string()));
        }
    }
    if is(plan, &format!("{AT}.cross_entropy"), "te") {
        put("cross-entropy-loss-fusion", None);
        put("cross-entropy-fusion-impl", Some("te".into()));
    }
    if is(plan, &format!("{AT}.main_gradients"), "bf16") {
        put("grad-reduce-in-bf16", None);
    }
    if is(plan, &format!("{AT}.cp_comm"), "a2a") {
        put("cp-comm-type", Some("a2a".into()));
    }
    if at(plan, &format!("{AT}.gradient_accumulation_fusion")) == Some(&json!(false)) {
        put("no-gradient-accumulation-fusion", None);
    }
    if let Some(recipe) = at(plan, &format!("{AT}.fp8.recipe")).and_then(Value::as_str) {
        put("fp8-format", Some("hybrid".into()));
        put("fp8-recipe", Some(recipe.into()));
        if at(plan, &format!("{AT}.fp8.param_gather")) == Some(&json!(true)) {
            put("fp8-param-gather", None);
        }
    }
    if let Some((how, layers)) =
        at(plan, &format!("{AT}.recompute")).and_then(Value::as_object).and_then(|one| one.iter().next())
    {
        match layers.as_u64() {
            Some(layers) => {
                put("recompute-granularity", Some("full".into()));
                put("recompute-method", Some(how.clone()));
                put("recompute-num-layers", Some(layers.to_string()));
            }
            None => {
                put("recompute-granularity", Some("selective".into()));
                put("recompute-modules", None);
                let parts = layers.as_array().into_iter().flatten().filter_map(Value::as_str);
                line.extend(parts.map(str::to_owned));
            }
        }
    }
    line
}
