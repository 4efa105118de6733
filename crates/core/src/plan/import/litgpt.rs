//! LitGPT's YAML (litgpt 0.5.12: finetune/{lora,full,adapter,adapter_v2}.py, pretrain.py, args.py, as jsonargparse reads them).

use serde_json::{Value, json};

use super::reader::Reader;
use super::table::{Format, Row, Sense};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "LitGPT",
    version: "0.5.12",
    source: "litgpt, finetune/*.py, pretrain.py and args.py",
    keys: &[KEYS],
};

const KEYS: &[Row] = &[
    Row("checkpoint_dir model_name initial_checkpoint_dir", Sense::Read("the model")),
    Row("model_config*", Sense::Refused("give the model as a config.json")),
    Row("train.micro_batch_size", Sense::Whole("batch.batch_size")),
    Row("train.global_batch_size", Sense::Read("gradient_accumulation")),
    Row("train.max_seq_length data.init_args.max_seq_length", Sense::Read("batch.seq_len")),
    Row("train.max_norm", Sense::Read("clip")),
    Row("precision", Sense::Read("weights, autocast")),
    Row("quantize", Sense::Read("quantization")),
    Row("devices num_nodes", Sense::Read("parallel.gpus, parallel.nodes; FSDP on several")),
    Row(
        "lora_r lora_alpha lora_dropout lora_query lora_key lora_value lora_projection lora_mlp lora_head",
        Sense::Read("adapter"),
    ),
    Row("optimizer optimizer.class_path", Sense::Read("optimizer.kind")),
    Row("optimizer.init_args.fused optimizer.init_args.foreach", Sense::Read("optimizer.implementation")),
    Row("optimizer.init_args.*", Sense::Harmless("the course of training, not its memory")),
    Row("train.tie_embeddings", Sense::Refused("ties of weights are the model's config's")),
    Row(
        "train.* eval* seed resume out_dir logger_name log.* access_token tokenizer_dir data* kv_cache*",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    let place = reader.text("checkpoint_dir").or_else(|| reader.text("initial_checkpoint_dir"));
    let plain = |path: &str| path.trim_start_matches("./").trim_start_matches("checkpoints/").to_owned();
    let pretrained = reader.text("model_name").map(str::to_owned);
    let model = place.map(plain).or(pretrained);
    let cards = cards(&mut reader);
    let pretrains = beside.recipe == Some("pretrain")
        || reader.get("model_name").is_some()
        || reader.get("initial_checkpoint_dir").is_some();
    // `TrainArgs` that pretrain.py and finetune/*.py begin with; `gradient_accumulation_iters` of args.py.
    let (all, micro) = if pretrains { (512, 4) } else { (16, 1) };
    let micro = reader.number("train.micro_batch_size").unwrap_or(micro);
    let all = reader.number("train.global_batch_size").unwrap_or(all);
    reader.set("batch.batch_size", micro);
    reader.set("gradient_accumulation", (all / cards.max(1) / micro.max(1)).max(1));
    reader.number_to("train.max_seq_length", "batch.seq_len");
    if let Some(norm) = reader.real("train.max_norm") {
        reader.set("clip", norm > 0.0);
    }
    match reader.text("precision") {
        None if reader.get("quantize").is_some() => {
            let fault = Fault::new("", "quantize without precision: LitGPT's default is bf16-mixed, which it refuses");
            reader.faults.add(fault.or("add precision: bf16-true"));
        }
        // `get_default_supported_precision(training=True)` of utils.py.
        None => mixed(&mut reader, "bf16"),
        Some("bf16-true") => pure(&mut reader, "bf16"),
        Some("16-true") => pure(&mut reader, "fp16"),
        Some("32-true" | "32") => pure(&mut reader, "fp32"),
        Some("bf16-mixed") => mixed(&mut reader, "bf16"),
        Some("16-mixed") => mixed(&mut reader, "fp16"),
        Some(other) => reader.refuse("precision", other, "use bf16-true, bf16-mixed, 16-true, 16-mixed or 32-true"),
    }
    let quantised = match reader.text("quantize") {
        None => false,
        Some(name) => {
            let (scheme, double) = match name {
                "bnb.nf4" => ("nf4", false),
                "bnb.nf4-dq" => ("nf4", true),
                "bnb.fp4" => ("fp4", false),
                "bnb.fp4-dq" => ("fp4", true),
                "bnb.int8-training" | "bnb.int8" => ("int8", false),
                other => {
                    reader.refuse(
                        "quantize",
                        other,
                        "use bnb.nf4, bnb.nf4-dq, bnb.fp4, bnb.fp4-dq or bnb.int8-training",
                    );
                    ("nf4", false)
                }
            };
            reader.set("quantization.scheme", scheme);
            reader.set("quantization.double", double);
            true
        }
    };
    // `litgpt finetune` is `finetune_lora` (__main__.py).
    let adapts = matches!(beside.recipe, Some("finetune" | "finetune_lora"));
    match beside.recipe {
        Some("finetune_adapter") => own_adapter(&mut reader, "litgpt-adapter"),
        Some("finetune_adapter_v2") => own_adapter(&mut reader, "litgpt-adapter-v2"),
        _ if value.get("lora_r").is_some() || quantised || adapts => lora(&mut reader),
        _ => {}
    }
    optimizer(&mut reader, quantised);
    if pretrains {
        reader.notes.push("pretraining: LitGPT's model code as for full fine-tuning".into());
    }
    reader.finish(Some("litgpt"), model)
}

/// `devices` and `num_nodes`; LitGPT shards with FSDP (finetune/full.py, pretrain.py).
fn cards(reader: &mut Reader<'_>) -> u64 {
    let auto = reader.text("devices") == Some("auto");
    let devices = if auto { None } else { reader.number("devices") };
    let nodes = reader.number("num_nodes").unwrap_or(1).max(1);
    let cards = devices.unwrap_or(1).saturating_mul(nodes);
    if cards > 1 || auto {
        reader.set("parallel.engine.fsdp1", json!({}));
        if let Some(devices) = devices {
            reader.set("parallel.gpus", devices);
        }
        if nodes > 1 {
            reader.set("parallel.nodes", nodes);
        }
    }
    cards
}

fn pure(reader: &mut Reader<'_>, weights: &str) {
    reader.set("weights", weights);
    reader.set("autocast", Value::Null);
}

fn mixed(reader: &mut Reader<'_>, compute: &str) {
    if reader.spreads() {
        reader.set("weights", "fp32");
        reader.set("parallel.engine.fsdp1.mixed_precision", json!({"parameters": compute, "reduce": compute}));
    } else {
        reader.set("weights", "fp32");
        reader.set("autocast", compute);
    }
}

/// Its adapters are in the model that such a recipe builds.
fn own_adapter(reader: &mut Reader<'_>, code: &str) {
    if reader.spreads() {
        let fault = Fault::unsupported("parallel", "LitGPT's own adapters on several cards");
        reader.faults.add(fault.or("use finetune_lora, or devices: 1"));
    }
    reader.set("model_code", code);
}

fn lora(reader: &mut Reader<'_>) {
    reader.set("adapter.method", "lora");
    let rank = reader.number("lora_r").unwrap_or(8);
    reader.set("adapter.rank", rank);
    reader.real_to("lora_alpha", "adapter.alpha");
    if let Some(dropout) = reader.real("lora_dropout") {
        reader.set("adapter.dropout", dropout);
    }
    // Queries and values unless it is said otherwise (finetune/lora.py).
    let mut names = Vec::new();
    for (key, usual) in
        [("query", true), ("key", false), ("value", true), ("projection", false), ("mlp", false), ("head", false)]
    {
        if reader.switch(&format!("lora_{key}")).unwrap_or(usual) {
            names.push(key);
        }
    }
    if !reader.spreads() {
        return reader.set("adapter.targets", json!(names));
    }
    // On several cards transformers' code stands in, whose modules have other names.
    let theirs = names.iter().map(|name| match *name {
        "query" => "q_proj|query_key_value|qkv_proj",
        "key" => "k_proj|query_key_value|qkv_proj",
        "value" => "v_proj|query_key_value|qkv_proj",
        "projection" => "o_proj|dense|out_proj",
        "mlp" => "gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|dense_h_to_4h|dense_4h_to_h",
        _ => "lm_head|embed_out",
    });
    reader.set("adapter.targets", format!(".*({})", theirs.collect::<Vec<_>>().join("|")));
}

fn optimizer(reader: &mut Reader<'_>, quantised: bool) {
    let name = reader.text("optimizer").or_else(|| reader.text("optimizer.class_path")).map(str::to_owned);
    let Some(name) = name.filter(|_| !quantised) else { return };
    let kind = match name.rsplit('.').next().unwrap_or_default() {
        "AdamW" => "adamw",
        "Adam" => "adam",
        "SGD" => "sgd",
        "AdamW8bit" => "adamw8bit",
        "PagedAdamW8bit" => "paged-adamw8bit",
        "PagedAdamW" => "paged-adamw32",
        "Adafactor" => "torch-adafactor",
        other => {
            reader.refuse("optimizer", other, "`vramcast list optimizers` names what is simulated");
            return;
        }
    };
    reader.set("optimizer.kind", kind);
    if reader.is_on("optimizer.init_args.fused") {
        reader.set("optimizer.implementation", "fused");
    }
}
