//! Files of trainers with model code of their own: torchtune's YAML, torchtitan's TOML (0.2).

use serde_json::{Value, json};

use super::{Draft, Object, at, is};
use crate::plan::Fault;
use crate::plan::import;

/// torchtune's packages of builders.
const FAMILIES: [&str; 16] = [
    "llama2",
    "llama3",
    "llama3_1",
    "llama3_2",
    "llama3_3",
    "llama3_2_vision",
    "llama4",
    "code_llama2",
    "mistral",
    "gemma",
    "gemma2",
    "phi3",
    "phi4",
    "qwen2",
    "qwen2_5",
    "qwen3",
];

/// Families that share another one's tokenizer name that one's.
fn tokenizer(family: &str, length: Option<&Value>) -> Value {
    let (whose, name) = match family {
        "llama3" | "llama3_1" | "llama3_2" | "llama3_3" => ("llama3", "llama3_tokenizer".to_owned()),
        "code_llama2" => ("llama2", "llama2_tokenizer".to_owned()),
        "gemma2" => ("gemma", "gemma_tokenizer".to_owned()),
        "phi3" => ("phi3", "phi3_mini_tokenizer".to_owned()),
        "llama3_2_vision" | "llama4" => (family, format!("{family}_transform")),
        _ => (family, format!("{family}_tokenizer")),
    };
    let mut part =
        json!({"_component_": format!("torchtune.models.{whose}.{name}"), "path": "???", "max_seq_len": length});
    if family.starts_with("qwen") {
        part["merges_file"] = json!("???");
    }
    part
}

pub(super) fn torchtune(model: &str, plan: &Value) -> Result<Draft, Fault> {
    let Some(builder) = import::torchtune_builder(model) else {
        return Err(Fault::new("", format!("torchtune has no builder of {model} that is known here"))
            .or("write for another tool"));
    };
    let starts = |family: &&&str| builder.strip_prefix(**family).is_some_and(|rest| rest.starts_with('_'));
    let family = FAMILIES.iter().filter(starts).max_by_key(|family| family.len()).copied().unwrap_or(builder);
    let lora = is(plan, "adapter.method", "lora");
    let quantised = at(plan, "quantization.scheme").is_some();
    let before = if quantised {
        "qlora_"
    } else if lora {
        "lora_"
    } else {
        ""
    };
    let mut part = json!({"_component_": format!("torchtune.models.{family}.{before}{builder}")});
    if lora {
        let targets: Vec<&str> = match at(plan, "adapter.targets") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => super::LINEARS.to_vec(),
        };
        let attention: Vec<&str> = targets
            .iter()
            .filter(|name| ["q_proj", "k_proj", "v_proj", "o_proj"].contains(name))
            .map(|name| if *name == "o_proj" { "output_proj" } else { name })
            .collect();
        part["lora_attn_modules"] = json!(attention);
        part["apply_lora_to_mlp"] = json!(targets.contains(&"gate_proj"));
        part["apply_lora_to_output"] = json!(targets.contains(&"lm_head"));
        for (key, path) in [("lora_rank", "rank"), ("lora_dropout", "dropout")] {
            if let Some(value) = at(plan, &format!("adapter.{path}")) {
                part[key] = value.clone();
            }
        }
        part["lora_alpha"] = json!(super::alpha(plan));
        if at(plan, "adapter.dora") == Some(&json!(true)) {
            part["use_dora"] = json!(true);
        }
    }
    let mut file = Object::new();
    let mut put = |key: &str, value: Value| drop(file.insert(key.into(), value));
    put("model", part);
    put("tokenizer", tokenizer(family, at(plan, "batch.seq_len")));
    // What the recipes read beside; `???` is OmegaConf's word for what somebody still has to say.
    let dir = json!({"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "???", "checkpoint_files": "???",
        "output_dir": "out", "model_type": "???"});
    put("checkpointer", dir);
    let logger = json!({"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out/logs"});
    put("metric_logger", logger);
    for (key, value) in [
        ("output_dir", json!("out")),
        ("device", json!("cuda")),
        ("seed", Value::Null),
        ("shuffle", json!(true)),
        ("epochs", json!(1)),
        ("max_steps_per_epoch", Value::Null),
        ("resume_from_checkpoint", json!(false)),
        ("log_level", json!("INFO")),
    ] {
        put(key, value);
    }
    put("dataset", json!({"_component_": "torchtune.datasets.alpaca_dataset", "packed": false}));
    put("batch_size", at(plan, "batch.batch_size").cloned().unwrap_or_default());
    put("gradient_accumulation_steps", at(plan, "gradient_accumulation").cloned().unwrap_or_else(|| json!(1)));
    put("dtype", at(plan, "weights").cloned().unwrap_or_default());
    let optimizer = match at(plan, "optimizer.kind").and_then(Value::as_str) {
        Some("adam") => "torch.optim.Adam",
        Some("sgd") => "torch.optim.SGD",
        Some("adamw8bit") => "bitsandbytes.optim.AdamW8bit",
        Some("paged-adamw8bit") => "bitsandbytes.optim.PagedAdamW8bit",
        Some("paged-adamw32") => "bitsandbytes.optim.PagedAdamW",
        _ => "torch.optim.AdamW",
    };
    put(
        "optimizer",
        json!({"_component_": optimizer, "lr": 2e-5, "fused": is(plan, "optimizer.implementation", "fused")}),
    );
    put("optimizer_in_bwd", json!(at(plan, "optimizer_in_backward") == Some(&json!(true))));
    match at(plan, "loss.kind").and_then(Value::as_str) {
        Some("chunked") => {
            put(
                "loss",
                json!({"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss", "num_output_chunks": at(plan, "loss.chunks")}),
            );
        }
        _ => put("loss", json!({"_component_": "torch.nn.CrossEntropyLoss"})),
    }
    put("clip_grad_norm", if at(plan, "clip") == Some(&json!(true)) { json!(1.0) } else { Value::Null });
    put("enable_activation_checkpointing", json!(is(plan, "checkpointing", "full")));
    let (world, mesh) = mesh(plan);
    let many = at(plan, "parallel.engine").is_some();
    if many {
        let offload = at(plan, "parallel.engine.fsdp2.offload") == Some(&json!(true));
        put("fsdp_cpu_offload", json!(offload));
        for (axis, key) in [
            ("tp", "tensor_parallel_dim"),
            ("dp_shard", "data_parallel_shard_dim"),
            ("dp_replicate", "data_parallel_replicate_dim"),
            ("cp", "context_parallel_dim"),
        ] {
            if mesh(axis) > 1 {
                put(key, json!(mesh(axis)));
            }
        }
    }
    let recipe = match (lora, many) {
        (true, true) => "lora_finetune_distributed",
        (true, false) => "lora_finetune_single_device",
        (false, true) => "full_finetune_distributed",
        (false, false) => "full_finetune_single_device",
    };
    let mut line = vec!["tune".to_owned(), "run".to_owned()];
    if many {
        line.extend(["--nproc_per_node".to_owned(), world.to_string()]);
    }
    line.extend([recipe, "--config", "torchtune.yaml"].map(str::to_owned));
    Ok(Draft { files: vec![("torchtune.yaml".into(), Value::Object(file))], line, own: None })
}

pub(super) fn torchtitan(model: &str, plan: &Value) -> Result<Draft, Fault> {
    if at(plan, "parallel.engine.fsdp2").is_none() {
        let problem = "torchtitan shards by FSDP2, and this plan does not";
        return Err(
            Fault::new("parallel.engine", problem).or("add {parallel.engine} = fsdp2, or write for another tool")
        );
    }
    let mut file = json!({"job": {"dump_folder": "./outputs"}});
    match import::torchtitan_flavor(model) {
        Some((name, flavor)) => file["model"] = json!({"name": name, "flavor": flavor}),
        None => {
            file["model"] = json!({"name": "transformers_modeling_backend", "flavor": "full"});
            file["hf_transformers"] = json!({"model": model});
        }
    }
    const AT: &str = "parallel.engine.fsdp2";
    let how = at(plan, "optimizer.implementation").and_then(Value::as_str).unwrap_or("fused");
    let name = if is(plan, "optimizer.kind", "adam") { "Adam" } else { "AdamW" };
    file["optimizer"] =
        json!({"name": name, "lr": 3e-4, "implementation": if how == "forloop" { "for-loop" } else { how }});
    let types = |key: &str| match at(plan, &format!("{AT}.mixed_precision.{key}"))
        .or_else(|| at(plan, "weights"))
        .and_then(Value::as_str)
    {
        Some("bf16") => "bfloat16",
        _ => "float32",
    };
    file["training"] = json!({
        "local_batch_size": at(plan, "batch.batch_size"), "seq_len": at(plan, "batch.seq_len"), "steps": 1000, "dataset": "c4",
        "max_norm": if at(plan, "clip") == Some(&json!(true)) { 1.0 } else { 0.0 },
        "dtype": if is(plan, "weights", "bf16") { "bfloat16" } else { "float32" },
        // Its parser takes no other type to reduce in (config/job_config.py).
        "mixed_precision_param": types("parameters"), "mixed_precision_reduce": "float32",
        "enable_cpu_offload": at(plan, &format!("{AT}.offload")) == Some(&json!(true)),
    });
    let (world, mesh) = mesh(plan);
    let count = |path: &str| at(plan, path).and_then(Value::as_u64).unwrap_or(1);
    let data = mesh("dp_replicate") * mesh("dp_shard");
    let (rows, micro) = (count("batch.batch_size"), count("gradient_accumulation"));
    // Micro-batches of a pipeline are accumulated ones.
    if mesh("pp") == 1 {
        file["training"]["global_batch_size"] = json!(rows * data * micro);
    } else {
        file["training"]["local_batch_size"] = json!(rows * micro);
    }
    let reshard = match at(plan, &format!("{AT}.reshard_after_forward")) {
        Some(Value::Bool(true)) => "always",
        Some(Value::Bool(false)) => "never",
        _ => "default",
    };
    file["parallelism"] = json!({
        "data_parallel_replicate_degree": mesh("dp_replicate"), "data_parallel_shard_degree": mesh("dp_shard"), "tensor_parallel_degree": mesh("tp"),
        "pipeline_parallel_degree": mesh("pp"), "context_parallel_degree": mesh("cp"), "fsdp_reshard_after_forward": reshard,
    });
    if mesh("pp") > 1 {
        file["parallelism"]["pipeline_parallel_microbatch_size"] = json!(rows);
    }
    let schedule = at(plan, &format!("{AT}.pipeline.schedule")).and_then(Value::as_str).filter(|_| mesh("pp") > 1);
    if let Some(schedule) = schedule {
        let named = match schedule {
            "gpipe" => "GPipe",
            "interleaved-1f1b" => "Interleaved1F1B",
            "looped-bfs" => "LoopedBFS",
            "interleaved-zero-bubble" => "InterleavedZeroBubble",
            "zbv-zero-bubble" => "ZBVZeroBubble",
            _ => "1F1B",
        };
        file["parallelism"]["pipeline_parallel_schedule"] = json!(named);
    }
    let every = at(plan, "checkpoints.every").and_then(Value::as_u64).unwrap_or(1);
    file["activation_checkpoint"] = match is(plan, "checkpointing", "full") {
        false => json!({"mode": "none"}),
        true if at(plan, "checkpoints.selective").is_some() => {
            json!({"mode": "selective", "selective_ac_option": "op"})
        }
        true if every > 1 => json!({"mode": "selective", "selective_ac_option": every.to_string()}),
        true => json!({"mode": "full"}),
    };
    let nproc = format!("--nproc_per_node={world}");
    let line = ["torchrun", &nproc, "-m", "torchtitan.train", "--job.config_file", "torchtitan.toml"]
        .map(str::to_owned)
        .to_vec();
    Ok(Draft { files: vec![("torchtitan.toml".into(), file)], line, own: None })
}

/// How many cards there are, and how many an axis has.
fn mesh(plan: &Value) -> (u64, impl Fn(&str) -> u64 + '_) {
    let size =
        |plan: &Value, axis: &str| at(plan, &format!("parallel.mesh.{axis}")).and_then(Value::as_u64).unwrap_or(1);
    let world = ["dp_replicate", "dp_shard", "tp", "sp", "cp", "pp"].iter().map(|axis| size(plan, axis)).product();
    (world, move |axis: &str| size(plan, axis))
}
