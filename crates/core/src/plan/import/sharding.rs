//! FSDP and DeepSpeed as files of several tools ask for them (accelerate 1.15, utils/dataclasses.py and
//! utils/fsdp_utils.py; transformers 5.17, training_args.py).

use serde_json::{Value, json};

use super::reader::Reader;
use super::table::{Row, Sense};
use crate::plan::Fault;

const READ: &str = "the engine's options (parallel.engine)";

/// Options of FSDP under `fsdp_config`.
pub(super) const FSDP_KEYS: &[Row] = &[
    Row(
        "fsdp_config.fsdp_version fsdp_config.version fsdp_config.offload_params fsdp_config.fsdp_offload_params \
         fsdp_config.cpu_offload fsdp_config.reshard_after_forward fsdp_config.fsdp_reshard_after_forward \
         fsdp_config.sharding_strategy fsdp_config.fsdp_sharding_strategy fsdp_config.activation_checkpointing \
         fsdp_config.fsdp_activation_checkpointing fsdp_config.backward_prefetch fsdp_config.fsdp_backward_prefetch \
         fsdp_config.fsdp_backward_prefetch_policy fsdp_config.forward_prefetch fsdp_config.fsdp_forward_prefetch \
         fsdp_config.use_orig_params fsdp_config.fsdp_use_orig_params fsdp_config.auto_wrap_policy \
         fsdp_config.fsdp_auto_wrap_policy fsdp_config.transformer_layer_cls_to_wrap \
         fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        Sense::Read(READ),
    ),
    Row(
        "fsdp_config.cpu_ram_efficient_loading fsdp_config.fsdp_cpu_ram_efficient_loading \
         fsdp_config.sync_module_states fsdp_config.fsdp_sync_module_states fsdp_config.state_dict_type \
         fsdp_config.fsdp_state_dict_type fsdp_config.final_state_dict_type fsdp_config.fsdp_final_state_dict_type \
         fsdp_config.fsdp_save_optimizer_state",
        Sense::Harmless("how weights are loaded and saved"),
    ),
    Row(
        "fsdp_config.limit_all_gathers fsdp_config.fsdp_limit_all_gathers",
        Sense::Harmless("the rate limiter is always on"),
    ),
    Row(
        "fsdp_config.fsdp_cpu_offload_pin_memory fsdp_config.cpu_offload_pin_memory fsdp_config.xla*",
        Sense::Harmless("nothing of the card's memory"),
    ),
    Row(
        "fsdp_config.min_num_params fsdp_config.fsdp_min_num_params fsdp_config.fsdp_ignored_modules \
         fsdp_config.ignored_modules",
        Sense::Refused("say what is wrapped by {parallel.engine.fsdp2.wrap}"),
    ),
    Row(
        "fsdp_config.mixed_precision_policy fsdp_config.fsdp_mixed_precision_policy",
        Sense::Refused("say it by {parallel.engine.*.mixed_precision}"),
    ),
];

/// Types of a run before an engine is chosen.
pub(super) struct Types<'t> {
    /// What autocast, and so FSDP's policy, computes in.
    pub(super) compute: Option<&'t str>,
    /// Whether an adapter is trained.
    pub(super) adapter: bool,
}

/// `fsdp_config`, with or without `fsdp_` before its keys; `version` where it is not said.
pub(super) fn fsdp(reader: &mut Reader<'_>, version: u64, types: &Types<'_>) {
    let option = |reader: &mut Reader<'_>, name: &str| -> Option<Value> {
        let plain = reader.get(&format!("fsdp_config.{name}")).cloned();
        reader.get(&format!("fsdp_config.fsdp_{name}")).cloned().or(plain)
    };
    let flag = |value: Option<Value>| {
        value.and_then(|value| value.as_bool().or_else(|| value.as_str().map(|text| text.to_lowercase() == "true")))
    };
    let word = |value: &Option<Value>| match value {
        Some(Value::String(text)) => text.to_uppercase().replace('-', "_"),
        Some(Value::Number(number)) => number.to_string(),
        _ => String::new(),
    };
    let version = option(reader, "version").as_ref().and_then(super::reader::whole).unwrap_or(version);
    if !(1..=2).contains(&version) {
        reader.faults.add(Fault::new("", format!("fsdp_config.fsdp_version: {version} is not 1 or 2")));
        return;
    }
    let at = format!("parallel.engine.fsdp{version}");
    reader.set(&at, json!({}));
    let offload = option(reader, "offload_params").or_else(|| reader.get("fsdp_config.cpu_offload").cloned());
    if flag(offload) == Some(true) {
        reader.set(&format!("{at}.offload"), true);
    }
    if flag(option(reader, "activation_checkpointing")) == Some(true) {
        reader.set("checkpointing", "full");
    }
    let (strategy, reshard) = (option(reader, "sharding_strategy"), option(reader, "reshard_after_forward"));
    if version == 2 {
        match reshard {
            Some(Value::Bool(false)) => reader.set(&format!("{at}.reshard_after_forward"), false),
            _ if ["SHARD_GRAD_OP", "2"].contains(&word(&strategy).as_str()) => {
                reader.set(&format!("{at}.reshard_after_forward"), false)
            }
            _ => {}
        }
    } else {
        // Newer files say FSDP1's strategy by this name.
        let name = if strategy.is_some() { word(&strategy) } else { word(&reshard) };
        match name.as_str() {
            "" | "FULL_SHARD" | "1" => {}
            "SHARD_GRAD_OP" | "2" => reader.set(&format!("{at}.strategy"), "grad-op"),
            "NO_SHARD" | "3" => reader.set(&format!("{at}.strategy"), "no"),
            "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2" | "4" | "5" => {
                let zero2 = matches!(name.as_str(), "HYBRID_SHARD_ZERO2" | "5");
                reader.set(&format!("{at}.strategy"), if zero2 { "grad-op" } else { "full" });
                reader.set("parallel.hybrid", true);
                // Copies are one a node.
                let nodes = reader.was_set("parallel.nodes").and_then(Value::as_u64).unwrap_or(1);
                reader.set("parallel.mesh.dp_replicate", nodes);
            }
            other => reader.refuse("fsdp_config.sharding_strategy", other, "use FULL_SHARD or SHARD_GRAD_OP"),
        }
        match word(&option(reader, "backward_prefetch").or(option(reader, "backward_prefetch_policy"))).as_str() {
            "BACKWARD_POST" => reader.set(&format!("{at}.backward_prefetch"), "post"),
            "NO_PREFETCH" => reader.set(&format!("{at}.backward_prefetch"), "none"),
            _ => {}
        }
        if flag(option(reader, "forward_prefetch")) == Some(true) {
            reader.set(&format!("{at}.forward_prefetch"), true);
        }
        if flag(option(reader, "use_orig_params")) == Some(false) {
            reader.set(&format!("{at}.flat_params"), true);
        }
    }
    match word(&option(reader, "auto_wrap_policy")).as_str() {
        "" | "TRANSFORMER_BASED_WRAP" => {}
        "NO_WRAP" => reader.set(&format!("{at}.wrap"), "root"),
        other => reader.refuse("fsdp_config.auto_wrap_policy", other, "use TRANSFORMER_BASED_WRAP or NO_WRAP"),
    }
    mixed(reader, &at, types);
}

/// accelerate trains fp32 shards where it computes in 16 bits, and reduces in 16 bits too.
pub(super) fn mixed(reader: &mut Reader<'_>, at: &str, types: &Types<'_>) {
    if let Some(compute) = types.compute.filter(|_| !types.adapter) {
        reader.set("weights", "fp32");
        reader.set("autocast", Value::Null);
        let policy = json!({"parameters": compute, "reduce": compute, "upcast": true});
        reader.set(&format!("{at}.mixed_precision"), policy);
    }
    losses(reader);
}

/// Losses of their own are simulated on one card; TRL's where cards share data alone.
pub(super) fn losses(reader: &mut Reader<'_>) {
    let split = ["tp", "cp", "pp", "sp"].iter().any(|axis| reader.was_set(&format!("parallel.mesh.{axis}")).is_some());
    let known = |kind: &Value| kind == "standard" || kind == "trl-fused" && !split;
    if reader.was_set("loss.kind").is_some_and(|kind| !known(kind)) {
        reader.changes.retain(|(place, _)| !place.starts_with("loss."));
        reader.set("loss.kind", "standard");
        reader.say("the loss", "under an engine the model's own loss is simulated, which keeps whole logits");
    }
}

/// DeepSpeed's configuration with what `auto` stands for, as transformers fills it in from its own arguments.
pub(super) fn deepspeed(reader: &mut Reader<'_>, mut document: Value, compute: Option<&str>) -> Value {
    let auto = |part: &Value| part.get("enabled").is_some_and(|on| on == "auto");
    for (key, name) in [("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")] {
        if document.get(key).is_some_and(auto) {
            document[key]["enabled"] = json!(compute == Some(name));
        }
    }
    // accelerate adds what the arguments ask for and the file does not speak of (utils/deepspeed.py).
    let on = |key: &str| document.get(key).and_then(|part| part.get("enabled")) == Some(&json!(true));
    let wide = !(on("bf16") || on("bfloat16") || on("fp16"));
    if let Some(name) = compute.filter(|name| wide && document.get(*name).is_none()) {
        document[name] = json!({"enabled": true});
    }
    // Accumulation, clipping and sizes of batches are the arguments' own.
    for key in
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
    {
        if document.get(key).is_some_and(|value| value == "auto") {
            document.as_object_mut().map(|object| object.shift_remove(key));
        }
    }
    let on = |key: &str| document.get(key).and_then(|part| part.get("enabled")) == Some(&json!(true));
    if on("bf16") || on("bfloat16") || on("fp16") {
        reader.set("weights", if on("fp16") { "fp16" } else { "bf16" });
        reader.set("autocast", Value::Null);
    }
    losses(reader);
    document
}
