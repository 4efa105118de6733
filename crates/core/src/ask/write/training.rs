//! Files of trainers, and of accelerate for those that are spread over cards.

use serde_json::{Value, json};

use super::{Draft, Object, alpha, at, is, task};
use crate::plan::{Fault, TaskKind};

pub(super) fn draft(tool: &str, model: &str, config: &Value, plan: &Value) -> Result<Draft, Fault> {
    let mut draft = Draft::default();
    let spread = accelerate(plan, &mut draft.files);
    if tool == "accelerate" {
        // One card is a file of accelerate's too.
        if draft.files.is_empty() {
            let compute = at(plan, "autocast").cloned().filter(|kind| !kind.is_null()).unwrap_or_else(|| json!("no"));
            let file = json!({"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 1,
                "mixed_precision": compute, "distributed_type": "NO"});
            draft.files.push(("accelerate.yaml".into(), file));
        }
        return Ok(draft);
    }
    let word = task::word(tool, plan)?;
    let (file_of_trl, script) = (format!("{word}.yaml"), format!("{word}.py"));
    let name = match tool {
        "trainer" => "arguments.json",
        "trl" => file_of_trl.as_str(),
        "axolotl" => "axolotl.yml",
        "llama-factory" => "llama_factory.yaml",
        _ => "",
    };
    // `TrainingArguments` says nothing of either: a file without them would train the whole model.
    for (place, what) in [("adapter", "adapters"), ("quantization", "a quantised base")] {
        if tool == "trainer" && at(plan, place).is_some() {
            let problem = format!("the Trainer's arguments say nothing of {what}: a script adds them by itself");
            return Err(Fault::new(place, problem).or("write for trl, axolotl or llama-factory, whose files do"));
        }
    }
    if tool == "megatron" {
        draft.files.clear();
        draft.line = super::megatron::line(model, config, plan);
        return Ok(draft);
    }
    let mut file = Object::new();
    match tool {
        "axolotl" => axolotl(model, plan, &mut file),
        "llama-factory" => llama_factory(model, plan, &mut file),
        _ => arguments(model, plan, &mut file, tool == "trl"),
    }
    task::keys(tool, plan, &mut file);
    let launch = match spread {
        true => ["accelerate", "launch", "--config_file", "accelerate.yaml"].map(str::to_owned).to_vec(),
        false => Vec::new(),
    };
    let program: &[&str] = match (tool, spread) {
        ("trainer", _) => &["train.py", "arguments.json"],
        ("trl", true) => &[script.as_str(), "--config", name],
        ("trl", false) => &["trl", word, "--config", name],
        ("axolotl", true) => &["-m", "axolotl.cli.train", "axolotl.yml"],
        ("axolotl", false) => &["axolotl", "train", "axolotl.yml"],
        // `llamafactory-cli` is no module; it starts this one (launcher.py).
        (_, true) => &["-m", "llamafactory.launcher", "llama_factory.yaml"],
        _ => &["llamafactory-cli", "train", "llama_factory.yaml"],
    };
    let python = tool == "trainer" && !spread;
    draft.line = launch.into_iter().chain(python.then(|| "python".to_owned())).collect();
    draft.line.extend(program.iter().map(|word| (*word).to_owned()));
    draft.files.insert(0, (name.into(), Value::Object(file)));
    if task::of(plan) != TaskKind::Sft && tool != "trl" {
        draft.own = Some(format!(
            "TRL's trainer of {}, which is what is simulated: it runs one of its own",
            task::of(plan).name()
        ));
    }
    Ok(draft)
}

/// transformers' name of an optimizer.
fn optim(plan: &Value) -> Option<&'static str> {
    let kind = at(plan, "optimizer.kind")?.as_str()?;
    Some(match kind {
        "adamw" if is(plan, "optimizer.implementation", "fused") => "adamw_torch_fused",
        "adamw" => "adamw_torch",
        "adamw8bit" => "adamw_bnb_8bit",
        "paged-adamw8bit" => "paged_adamw_8bit",
        "paged-adamw32" => "paged_adamw_32bit",
        "lion" => "lion_32bit",
        "lion8bit" => "lion_8bit",
        "paged-lion8bit" => "paged_lion_8bit",
        "paged-lion32" => "paged_lion_32bit",
        "adafactor" => "adafactor",
        "sgd" => "sgd",
        "adagrad" => "adagrad",
        "rmsprop" => "rmsprop",
        "muon" => "muon",
        _ => return None,
    })
}

fn torch_name(dtype: &Value) -> Value {
    match dtype.as_str() {
        Some("bf16") => json!("bfloat16"),
        Some("fp16") => json!("float16"),
        _ => json!("float32"),
    }
}

fn attention(plan: &Value) -> Option<Value> {
    Some(match at(plan, "attention")?.as_str()? {
        "flash2" => json!("flash_attention_2"),
        "flash3" => json!("flash_attention_3"),
        "flex" => json!("flex_attention"),
        other => json!(other),
    })
}

/// What all of transformers' trainers share.
fn shared(plan: &Value, put: &mut impl FnMut(&str, Option<Value>)) {
    let compute = at(plan, "autocast").or_else(|| mixed(plan));
    put("bf16", Some(json!(compute.is_some_and(|kind| kind == "bf16") || narrow(plan, "bf16"))));
    put("fp16", Some(json!(compute.is_some_and(|kind| kind == "fp16") || narrow(plan, "fp16"))));
    put("gradient_accumulation_steps", at(plan, "gradient_accumulation").cloned());
    put("gradient_checkpointing", Some(json!(is(plan, "checkpointing", "full"))));
    put("max_grad_norm", Some(json!(if at(plan, "clip") == Some(&json!(true)) { 1.0 } else { 0.0 })));
}

/// FSDP's own computing type.
fn mixed(plan: &Value) -> Option<&Value> {
    ["fsdp1", "fsdp2"]
        .iter()
        .find_map(|engine| at(plan, &format!("parallel.engine.{engine}.mixed_precision.parameters")))
}

/// DeepSpeed trains in 16 bits what the arguments call mixed.
fn narrow(plan: &Value, dtype: &str) -> bool {
    at(plan, "parallel.engine.deepspeed").is_some() && is(plan, "weights", dtype)
}

/// Whether checkpoints go to the host.
fn offloads(plan: &Value) -> bool {
    is(plan, "checkpointing", "full") && at(plan, "checkpoints.offload") == Some(&json!(true))
}

fn reentrant(plan: &Value) -> Option<Value> {
    is(plan, "checkpointing", "full")
        .then(|| json!({"use_reentrant": at(plan, "checkpoints.reentrant") == Some(&json!(true))}))
}

fn arguments(model: &str, plan: &Value, file: &mut Object, trl: bool) {
    let mut put = |key: &str, value: Option<Value>| drop(value.map(|value| file.insert(key.into(), value)));
    put("model_name_or_path", Some(json!(model)));
    put("per_device_train_batch_size", at(plan, "batch.batch_size").cloned());
    put(if trl { "max_length" } else { "model_max_length" }, at(plan, "batch.seq_len").cloned());
    shared(plan, &mut put);
    put("gradient_checkpointing_kwargs", reentrant(plan));
    put("optim", optim(plan).map(Into::into));
    put("dtype", at(plan, "weights").map(torch_name));
    put("attn_implementation", attention(plan));
    put("use_liger_kernel", is(plan, "kernels", "liger").then(|| json!(true)));
    if !trl {
        return;
    }
    if is(plan, "adapter.method", "lora") {
        put("use_peft", Some(json!(true)));
        put("lora_r", at(plan, "adapter.rank").cloned());
        put("lora_alpha", alpha(plan));
        put("lora_dropout", at(plan, "adapter.dropout").cloned());
        put("lora_target_modules", at(plan, "adapter.targets").filter(|targets| **targets != "default").cloned());
        put("lora_modules_to_save", at(plan, "adapter.modules_to_save").filter(|list| **list != json!([])).cloned());
        put("use_dora", (at(plan, "adapter.dora") == Some(&json!(true))).then(|| json!(true)));
    }
    match at(plan, "quantization.scheme").and_then(Value::as_str) {
        Some("int8") => put("load_in_8bit", Some(json!(true))),
        Some(kind) => {
            put("load_in_4bit", Some(json!(true)));
            put("bnb_4bit_quant_type", Some(json!(kind)));
            put("use_bnb_nested_quant", at(plan, "quantization.double").cloned());
        }
        None => {}
    }
    let packed = at(plan, "job.packing");
    put("packing", (packed.is_some() || at(plan, "batch.mask") == Some(&json!(false))).then(|| json!(true)));
    put("packing_strategy", packed.cloned());
    put("padding_free", at(plan, "job.padding_free").filter(|flat| **flat == true).cloned());
}

fn axolotl(model: &str, plan: &Value, file: &mut Object) {
    let mut put = |key: &str, value: Option<Value>| drop(value.map(|value| file.insert(key.into(), value)));
    put("base_model", Some(json!(model)));
    put("datasets", Some(json!([{"path": "your/data", "type": "alpaca"}])));
    // Its schema asks for one.
    put("learning_rate", Some(json!(2e-4)));
    put("micro_batch_size", at(plan, "batch.batch_size").cloned());
    put("sequence_len", at(plan, "batch.seq_len").cloned());
    shared(plan, &mut put);
    let pure = at(plan, "autocast").is_none() && mixed(plan).is_none() && !is(plan, "weights", "fp32");
    if pure && at(plan, "parallel.engine.deepspeed").is_none() {
        put(if is(plan, "weights", "fp16") { "float16" } else { "bfloat16" }, Some(json!(true)));
    }
    put("gradient_checkpointing", offloads(plan).then(|| json!("offload")));
    put("gradient_checkpointing_kwargs", reentrant(plan));
    put("optimizer", optim(plan).map(Into::into));
    put("attn_implementation", attention(plan));
    put("sample_packing", Some(json!(at(plan, "batch.mask") == Some(&json!(false)))));
    if is(plan, "kernels", "liger") {
        put("plugins", Some(json!(["axolotl.integrations.liger.LigerPlugin"])));
        put("liger_fused_linear_cross_entropy", Some(json!(true)));
    }
    if is(plan, "loss.kind", "cut-cross-entropy") {
        put("plugins", Some(json!(["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"])));
    }
    let quantised = at(plan, "quantization.scheme").and_then(Value::as_str);
    if is(plan, "adapter.method", "lora") {
        put("adapter", Some(json!(if quantised.is_some_and(|kind| kind != "int8") { "qlora" } else { "lora" })));
        put("lora_r", at(plan, "adapter.rank").cloned());
        put("lora_alpha", alpha(plan));
        put("lora_dropout", at(plan, "adapter.dropout").cloned());
        match at(plan, "adapter.targets") {
            Some(targets) if targets == "all-linear" => put("lora_target_linear", Some(json!(true))),
            targets => put("lora_target_modules", targets.filter(|targets| **targets != "default").cloned()),
        }
        put("lora_modules_to_save", at(plan, "adapter.modules_to_save").filter(|list| **list != json!([])).cloned());
        put("peft_use_dora", (at(plan, "adapter.dora") == Some(&json!(true))).then(|| json!(true)));
    }
    put("load_in_4bit", quantised.filter(|kind| *kind != "int8").map(|_| json!(true)));
    put("load_in_8bit", quantised.filter(|kind| *kind == "int8").map(|_| json!(true)));
}

fn llama_factory(model: &str, plan: &Value, file: &mut Object) {
    let mut put = |key: &str, value: Option<Value>| drop(value.map(|value| file.insert(key.into(), value)));
    put("model_name_or_path", Some(json!(model)));
    put("stage", Some(json!("sft")));
    put("do_train", Some(json!(true)));
    put("template", Some(json!("default")));
    put("dataset", Some(json!("alpaca_en_demo")));
    put("per_device_train_batch_size", at(plan, "batch.batch_size").cloned());
    put("cutoff_len", at(plan, "batch.seq_len").cloned());
    shared(plan, &mut put);
    let full = !is(plan, "checkpointing", "full");
    put("gradient_checkpointing", None);
    put("disable_gradient_checkpointing", Some(json!(full)));
    put("use_unsloth_gc", offloads(plan).then(|| json!(true)));
    put("use_reentrant_gc", at(plan, "checkpoints.reentrant").cloned());
    put("optim", optim(plan).map(Into::into));
    put(
        "flash_attn",
        at(plan, "attention").and_then(Value::as_str).map(|kind| match kind {
            "flash2" => json!("fa2"),
            "flash3" => json!("fa3"),
            "eager" => json!("disabled"),
            other => json!(other),
        }),
    );
    put("enable_liger_kernel", is(plan, "kernels", "liger").then(|| json!(true)));
    let pure = at(plan, "autocast").is_none() && mixed(plan).is_none() && is(plan, "weights", "bf16");
    put("pure_bf16", (pure && at(plan, "parallel.engine.deepspeed").is_none()).then(|| json!(true)));
    let lora = is(plan, "adapter.method", "lora");
    put("finetuning_type", Some(json!(if lora { "lora" } else { "full" })));
    if lora {
        put("lora_rank", at(plan, "adapter.rank").cloned());
        put("lora_alpha", alpha(plan));
        put("lora_dropout", at(plan, "adapter.dropout").cloned());
        let targets = at(plan, "adapter.targets").map(|targets| match targets {
            Value::Array(names) => json!(names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",")),
            _ => json!("all"),
        });
        put("lora_target", targets);
        let saved = at(plan, "adapter.modules_to_save").and_then(Value::as_array).filter(|names| !names.is_empty());
        let names = saved.map(|names| names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","));
        put("additional_target", names.map(Into::into));
        put("use_dora", (at(plan, "adapter.dora") == Some(&json!(true))).then(|| json!(true)));
    }
    match at(plan, "quantization.scheme").and_then(Value::as_str) {
        None => {}
        Some(kind) => {
            put("quantization_bit", Some(json!(if kind == "int8" { 8 } else { 4 })));
            put("quantization_method", Some(json!("bnb")));
            put("quantization_type", (kind != "int8").then(|| json!(kind)));
            put("double_quantization", at(plan, "quantization.double").cloned());
        }
    }
}

/// accelerate's file where cards are several, and DeepSpeed's beside it; whether there is one.
fn accelerate(plan: &Value, files: &mut Vec<(String, Value)>) -> bool {
    let Some(engine) = at(plan, "parallel.engine").and_then(Value::as_object).and_then(|one| one.iter().next()) else {
        return false;
    };
    let size = |axis: &str| at(plan, &format!("parallel.mesh.{axis}")).and_then(Value::as_u64).unwrap_or(1);
    let world = ["dp_replicate", "dp_shard", "tp", "sp", "cp", "pp"].iter().map(|axis| size(axis)).product::<u64>();
    let (name, options) = engine;
    let mut file = Object::new();
    let compute = at(plan, "autocast").or_else(|| mixed(plan)).cloned();
    let narrow = at(plan, "weights").filter(|dtype| name == "deepspeed" && **dtype != "fp32").cloned();
    let mut put = |key: &str, value: Value| drop(file.insert(key.into(), value));
    put("compute_environment", json!("LOCAL_MACHINE"));
    put("num_machines", json!(1));
    put("num_processes", json!(world));
    put("mixed_precision", compute.or(narrow).unwrap_or_else(|| json!("no")));
    match name.as_str() {
        "ddp" => put("distributed_type", json!("MULTI_GPU")),
        "fsdp1" | "fsdp2" => {
            put("distributed_type", json!("FSDP"));
            let mut fsdp = json!({"fsdp_version": if name == "fsdp1" { 1 } else { 2 },
                "fsdp_auto_wrap_policy": if options["wrap"] == "root" { "NO_WRAP" } else { "TRANSFORMER_BASED_WRAP" },
                "fsdp_offload_params": options["offload"] == true, "fsdp_state_dict_type": "SHARDED_STATE_DICT"});
            if name == "fsdp1" {
                fsdp["fsdp_reshard_after_forward"] = match options["strategy"].as_str() {
                    Some("grad-op") => json!("SHARD_GRAD_OP"),
                    Some("no") => json!("NO_SHARD"),
                    _ => json!("FULL_SHARD"),
                };
                fsdp["fsdp_use_orig_params"] = json!(options["flat_params"] != true);
                fsdp["fsdp_forward_prefetch"] = json!(options["forward_prefetch"] == true);
            } else {
                fsdp["fsdp_reshard_after_forward"] = json!(options["reshard_after_forward"] != false);
            }
            put("fsdp_config", fsdp);
            let axes = [("dp_replicate", "dp_replicate_size"), ("tp", "tp_size"), ("cp", "cp_size")];
            let mut mesh = Object::new();
            for (axis, key) in axes.into_iter().filter(|(axis, _)| size(axis) > 1) {
                mesh.insert(format!("parallelism_config_{key}"), json!(size(axis)));
            }
            if !mesh.is_empty() {
                mesh.insert("parallelism_config_dp_shard_size".into(), json!(size("dp_shard")));
                put("parallelism_config", Value::Object(mesh));
            }
        }
        "deepspeed" => {
            put("distributed_type", json!("DEEPSPEED"));
            put("deepspeed_config", json!({"deepspeed_config_file": "ds_config.json", "zero3_init_flag": false}));
            let mut zero = options["zero"].clone();
            zero.as_object_mut().into_iter().for_each(|zero| zero.retain(|_, value| !value.is_null()));
            let mut document = json!({"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
                "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"});
            if let Some(dtype) = options.get("grad_accum_dtype").filter(|dtype| !dtype.is_null()) {
                document["data_types"] = json!({"grad_accum_dtype": dtype});
            }
            files.push(("ds_config.json".into(), document));
        }
        _ => return false,
    }
    files.insert(0, ("accelerate.yaml".into(), Value::Object(file)));
    true
}
