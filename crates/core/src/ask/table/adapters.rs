//! Settings of adapters and of quantised bases.

use serde_json::{Value, json};

use crate::ask::runner::Scope;
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;

/// Where PEFT's adapters run.
const PEFT: Scope = Scope::TORCH;

pub(super) const ROWS: &[Setting] = &[
    setting("adapter", "lora", Kind::Spelled(LORA), "Train LoRA adapters as PEFT adds them")
        .on(Topic::Adapters, PEFT)
        .example("--lora"),
    setting(
        "adapter",
        "qlora",
        Kind::Spelled(QLORA),
        "LoRA on a base quantised to nf4, after prepare_model_for_kbit_training",
    )
    .on(Topic::Adapters, PEFT)
    .example("--qlora"),
    setting("adapter", "peft-method", Kind::Spelled(METHOD), "Which of PEFT's methods")
        .value("METHOD")
        .from("lora")
        .on(Topic::Adapters, PEFT)
        .example("--peft-method vera"),
    setting("adapter.rank", "lora-rank", Kind::Whole, "Rank of the adapters")
        .also(&["lora-r"])
        .value("R")
        .from("PEFT 0.21's default: 8, of VeRA 256")
        .on(Topic::Adapters, PEFT)
        .example("--lora-rank 64 --lora"),
    setting("adapter.alpha", "lora-alpha", Kind::Real, "Alpha of the adapters (no effect on memory)")
        .value("ALPHA")
        .from("PEFT 0.21's default")
        .on(Topic::Adapters, PEFT),
    setting("adapter.dropout", "lora-dropout", Kind::Real, "Dropout on the adapters' input")
        .value("P")
        .from("PEFT 0.21's default")
        .on(Topic::Adapters, PEFT)
        .example("--lora-dropout 0.1 --lora"),
    setting(
        "adapter.targets",
        "lora-target-modules",
        Kind::Spelled(TARGETS),
        "Modules to adapt: names separated by commas, a regular expression, or all-linear",
    )
    .value("TARGETS")
    .from("PEFT 0.21's for the model type")
    .on(Topic::Adapters, PEFT)
    .example("--lora-target-modules all-linear --lora"),
    setting("adapter.modules_to_save", "modules-to-save", Kind::Names, "Modules trained in full beside the adapters")
        .on(Topic::Adapters, PEFT)
        .example("--modules-to-save embed_tokens --lora"),
    setting("adapter.dora", "dora", Kind::Switch, "Weight-decomposed adapters (DoRA)")
        .on(Topic::Adapters, PEFT)
        .example("--dora --lora"),
    setting("adapter.dtype", "adapter-dtype", super::FLOATS, "The type adapters are held in")
        .value("TYPE")
        .from("PEFT 0.21's choice: fp32")
        .on(Topic::Adapters, PEFT)
        .example("--adapter-dtype bf16 --lora"),
    setting("adapter.virtual_tokens", "virtual-tokens", Kind::Whole, "Virtual tokens of prompt and prefix tuning")
        .from("20, as in PEFT's examples")
        .on(Topic::Adapters, PEFT)
        .example("--virtual-tokens 50 --peft-method prompt-tuning"),
    setting("quantization", "quantization", Kind::Spelled(SCHEME), "How bitsandbytes holds the base")
        .value("SCHEME")
        .on(Topic::Adapters, PEFT.and(Scope::GENERATE))
        .example("--quantization nf4-dq --lora"),
    setting(
        "quantization.storage",
        "quant-storage",
        Kind::Choice(&[("u8", ""), ("bf16", ""), ("fp16", ""), ("fp32", "")]),
        "The type packed 4-bit weights are stored as (bnb_4bit_quant_storage)",
    )
    .value("TYPE")
    .from("u8, and the weights' type under FSDP, which shards floats")
    .on(Topic::Adapters, Scope::FSDP),
    setting(
        "quantization.compute",
        "quant-compute",
        super::FLOATS,
        "The type 4-bit layers compute in (bnb_4bit_compute_dtype)",
    )
    .value("TYPE")
    .from("bf16, as QLoRA is run")
    .on(Topic::Adapters, PEFT.and(Scope::GENERATE)),
    setting(
        "quantization.experts",
        "quantize-moe-experts",
        Kind::Switch,
        "Experts that are one tensor are packed too (bitsandbytes' replace_parameter_4bit, axolotl's option of this name)",
    )
    .from("off: bitsandbytes packs linears")
    .on(Topic::Adapters, Scope::ONE_CARD)
    .example("--quantize-moe-experts --qlora --lora-target-modules q_proj"),
    setting("quantization.prepare", "no-prepare-kbit", Kind::Off, "prepare_model_for_kbit_training is not called")
        .from("as QLoRA is run")
        .on(Topic::Adapters, PEFT)
        .example("--no-prepare-kbit --qlora"),
];

const LORA: Spelling = Spelling {
    words: &["true"],
    bare: Some("true"),
    read: |_| Ok(json!({"adapter": {"method": "lora"}})),
    write: |plan| (tree::get(plan, "adapter.method")? == "lora" && !is_qlora(plan)).then(|| "true".into()),
};

/// A quantised base of which nothing else is said.
/// LoRA on a base that is quantised as it usually is; other options of it have settings of their own.
fn is_qlora(plan: &Value) -> bool {
    let usual = plan["quantization"].as_object().is_some_and(|how| how.get("scheme").is_none_or(Value::is_null));
    usual && tree::get(plan, "adapter.method").is_some_and(|method| method == "lora")
}

const QLORA: Spelling = Spelling {
    words: &["true"],
    bare: Some("true"),
    read: |_| Ok(json!({"adapter": {"method": "lora"}, "quantization": {}})),
    write: |plan| is_qlora(plan).then(|| "true".into()),
};

/// PEFT's methods and what a plan holds for each.
const METHODS: [&str; 6] = ["lora", "ia3", "vera", "prompt-tuning", "prefix-tuning", "oft"];

const METHOD: Spelling = Spelling {
    words: &METHODS,
    bare: None,
    read: |text| match text.replace('_', "-").as_str() {
        "lora" => Ok(json!({"adapter": {"method": "lora"}})),
        known if METHODS.contains(&known) => Ok(json!({"adapter": {"method": "other", known: {}}})),
        _ => Err(format!("one of {}", METHODS.join(", "))),
    },
    write: |plan| {
        let adapter = plan.get("adapter")?.as_object()?;
        METHODS.iter().find(|name| adapter.contains_key(**name)).map(|name| (*name).to_owned())
    },
};

const TARGETS: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        // Plain names are a list; anything with the signs of a regular expression is one.
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,/ ".contains(c);
        let names = text != "all-linear" && text.chars().all(plain);
        let value = if names { json!(text.split(',').map(str::trim).collect::<Vec<_>>()) } else { json!(text) };
        Ok(tree::of("adapter.targets", value))
    },
    write: |plan| match tree::get(plan, "adapter.targets")? {
        Value::String(text) => Some(text.clone()),
        Value::Array(names) => {
            Some(names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",")).filter(|text| !text.is_empty())
        }
        _ => None,
    },
};

const SCHEME: Spelling = Spelling {
    words: &["nf4", "nf4-dq", "fp4", "fp4-dq", "int8"],
    bare: None,
    read: |text| {
        let (name, double) = text.strip_suffix("-dq").map_or((text, false), |name| (name, true));
        match (name, double) {
            ("nf4" | "fp4", _) | ("int8", false) => Ok(json!({"quantization": {"scheme": name, "double": double}})),
            _ => Err("nf4, nf4-dq, fp4, fp4-dq or int8".into()),
        }
    },
    write: |plan| {
        let quantization = plan.get("quantization")?;
        let scheme = quantization.get("scheme")?.as_str()?;
        Some(if quantization["double"] == true { format!("{scheme}-dq") } else { scheme.to_owned() })
    },
};
