//! Adapters and quantised weights of a program: PEFT's configs, bitsandbytes', Unsloth's.

use serde_json::{Value, json};

use super::model::{Run, all, meant, shown};
use super::{Call, argument, is_unsloth, keywords, name, unknown};
use crate::ask::file::Content;
use crate::ask::tree;
use crate::plan::Fault;
use crate::plan::import;
use crate::source::python::{self, CALL};

/// PEFT's configs, and Unsloth's `get_peft_model`.
pub(super) fn adapter(run: &mut Run<'_>, content: &mut Content) -> Result<(), Vec<Fault>> {
    const KINDS: [(&str, &str); 8] = [
        ("LoraConfig", "LORA"),
        ("AdaLoraConfig", "ADALORA"),
        ("IA3Config", "IA3"),
        ("LoHaConfig", "LOHA"),
        ("LoKrConfig", "LOKR"),
        ("PromptTuningConfig", "PROMPT_TUNING"),
        ("PrefixTuningConfig", "PREFIX_TUNING"),
        ("VeraConfig", "VERA"),
    ];
    let program = run.program;
    let kind = |call: &Call| {
        let kind = KINDS.iter().find(|(class, _)| *class == name(call)).map(|(_, kind)| *kind);
        kind.or_else(|| (name(call) == "get_peft_model" && call.contains_key("r")).then_some("LORA"))
    };
    let mut found = all(program, |call| kind(call).is_some());
    found.retain(|at| name(&program.calls[*at]) == "get_peft_model" || run.counts(*at, &["peft_config"]));
    let takes = |at: &usize| ["get_peft_model", "add_adapter"].contains(&name(&program.calls[*at]));
    let taker = (0..program.calls.len()).find(takes).or(run.trainer);
    let Some(at) = meant(program, &found, taker, &["peft_config", "1", "0"], run.without)? else { return Ok(()) };
    run.say_if_unsure(at);
    let call = &program.calls[at];
    let Some(kind) = kind(call) else { return Ok(()) };
    let unsloth = name(call) == "get_peft_model";
    let mut object = json!({"peft_type": kind});
    let mut faults = Vec::new();
    for (key, value) in keywords(call) {
        // How Unsloth recomputes, and what it takes beside PEFT's own.
        let own = [
            "use_gradient_checkpointing",
            "random_state",
            "max_seq_length",
            "task_type",
            "finetune_vision_layers",
            "finetune_language_layers",
            "finetune_attention_modules",
            "finetune_mlp_modules",
            "peft_config",
            "model",
        ];
        if own.contains(&key.as_str()) {
            continue;
        }
        // LoftQ and the like hold configs of their own: how weights start.
        let harmless =
            ["loftq_config", "init_lora_weights", "revision", "base_model_name_or_path", "lora_alpha", "alpha"];
        match unknown(key, value).filter(|_| !harmless.contains(&key.as_str())) {
            Some(fault) => faults.push(fault),
            None if harmless.contains(&key.as_str()) && unknown(key, value).is_some() => {}
            None => object[key] = value.clone(),
        }
    }
    if unsloth && object.get("target_modules").is_none() {
        // `_DEFAULT_TARGET_MODULES` of its models/llama.py.
        object["target_modules"] = json!(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]);
    }
    if let Some(how) = call.get("use_gradient_checkpointing").filter(|_| unsloth) {
        let (on, off) = (*how == true || *how == "unsloth" || *how == "true", *how == false);
        if on || off {
            tree::set(&mut content.tree, "checkpointing", json!(if on { "full" } else { "off" }));
            tree::set(&mut content.tree, "checkpoints.offload", json!(*how == "unsloth"));
        }
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    let read = Content::of_adapter(&object)?;
    tree::lay(&mut content.tree, &read.tree);
    Ok(())
}

/// `BitsAndBytesConfig`, or `load_in_4bit` where the model is loaded.
pub(super) fn quantisation(run: &mut Run<'_>, content: &mut Content) -> Result<(), Vec<Fault>> {
    const KEY: &str = "quantization_config";
    let (program, model) = (run.program, run.call(run.model));
    let mut found = all(program, |call| name(call) == "BitsAndBytesConfig");
    found.retain(|at| run.counts(*at, &[KEY]));
    let config = meant(program, &found, run.model, &[KEY], run.without)?;
    config.into_iter().for_each(|at| run.say_if_unsure(at));
    let config = run.call(config);
    let given = model.and_then(|call| argument(call, &[KEY])).filter(|_| !run.without.iter().any(|key| key == KEY));
    match given.and_then(Value::as_object) {
        Some(other) if python::words(&json!(other)).is_some() && config.is_none() => {
            return Err(unknown(KEY, &json!(other)).into_iter().collect());
        }
        Some(other) if other.contains_key(CALL) && name(other) != "BitsAndBytesConfig" => {
            let cure = match other.get("dequantize") {
                Some(Value::Bool(true)) => "say it by --dequantize, and leave it out: --without quantization_config",
                _ => "where the checkpoint itself is quantised, leave it out: --without quantization_config",
            };
            return Err(vec![Fault::unsupported("", format!("{KEY}: {}(…)", shown(other))).or(cure)]);
        }
        _ => {}
    }
    let Some(call) = config.or(model) else { return Ok(()) };
    let unsloth = config.is_none() && is_unsloth(call);
    let unread: Vec<Fault> =
        ["load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"]
            .iter()
            .filter_map(|key| unknown(key, call.get(*key)?))
            .collect();
    if !unread.is_empty() {
        return Err(unread);
    }
    let on = |key: &str| call.get(key) == Some(&json!(true));
    if on("load_in_4bit") && on("load_in_8bit") {
        return Err(vec![import::both("load_in_4bit", "load_in_8bit")]);
    }
    // Unsloth loads in 4 bits unless it is told otherwise (models/loader.py).
    let usual = unsloth
        && ["load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning"]
            .iter()
            .all(|key| call.get(*key).is_none());
    let mut set = |place: &str, value: Value| tree::set(&mut content.tree, &format!("quantization.{place}"), value);
    if on("load_in_8bit") {
        set("scheme", json!("int8"));
    } else if on("load_in_4bit") || usual {
        // BitsAndBytesConfig's own are fp4 and one level of scales.
        let kind =
            call.get("bnb_4bit_quant_type").and_then(Value::as_str).unwrap_or(if unsloth { "nf4" } else { "fp4" });
        set("scheme", json!(kind));
        if !unsloth {
            set("double", json!(on("bnb_4bit_use_double_quant")));
        }
    }
    Ok(())
}
