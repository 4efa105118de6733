//! verl's and OpenRLHF's files and lines: their supervised fine-tuning is read; of their reinforcement learning, whose
//! models share cards in turns, it is said which questions answer each role (verl 0.7 trainer/config; OpenRLHF 0.9 cli).

use serde_json::{Value, json};

use super::reader::Reader;
use super::sharding;
use super::table::{Format, Row, Sense};
use super::trainer::attention;
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const VERL: Format = Format {
    title: "verl",
    version: "0.7",
    source: "verl, trainer/config/sft_trainer.yaml and trainer/fsdp_sft_trainer.py",
    keys: &[VERL_KEYS],
};

pub(super) const OPENRLHF: Format = Format {
    title: "OpenRLHF",
    version: "0.9",
    source: "openrlhf, cli/train_sft.py and utils/deepspeed/deepspeed_utils.py",
    keys: &[OPENRLHF_KEYS],
};

const VERL_KEYS: &[Row] = &[
    Row("model.partial_pretrain model.path", Sense::Read("the model")),
    Row("data.micro_batch_size_per_gpu data.micro_batch_size", Sense::Whole("batch.batch_size")),
    Row("data.max_length data.max_token_len_per_gpu", Sense::Whole("batch.seq_len")),
    Row("data.train_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row("model.enable_gradient_checkpointing", Sense::Read("checkpointing")),
    Row("model.use_liger", Sense::Read("kernels")),
    Row("model.lora_rank model.target_modules", Sense::Read("adapter")),
    Row(
        "model.strategy model.fsdp_config.model_dtype model.fsdp_config.cpu_offload model.fsdp_config.offload_params \
         trainer.n_gpus_per_node trainer.nnodes",
        Sense::Read("parallel"),
    ),
    Row("use_remove_padding model.use_remove_padding", Sense::Said("rows of full length are simulated")),
    Row(
        "ulysses_sequence_parallel_size",
        Sense::Said("Ulysses is not simulated: whole rows are kept on every card, which is more"),
    ),
    Row(
        "engine* model.override_config* model.external_lib model.tie_word_embedding model.fsdp_config.*",
        Sense::Said("the trainer's own are taken"),
    ),
    Row(
        "data.* optim.* trainer.* model.lora_alpha model.trust_remote_code checkpoint.* hydra.* custom_cls.*",
        Sense::Harmless("which data, what is saved, the course of training"),
    ),
];

const OPENRLHF_KEYS: &[Row] = &[
    Row("model.model_name_or_path pretrain", Sense::Read("the model")),
    Row("train.micro_batch_size micro_train_batch_size", Sense::Whole("batch.batch_size")),
    Row("data.max_len max_len", Sense::Whole("batch.seq_len")),
    Row("train.batch_size train_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row(
        "ds.zero_stage zero_stage ds.adam_offload adam_offload ds.zpg zpg ds.overlap_comm overlap_comm",
        Sense::Read("parallel.engine.deepspeed"),
    ),
    Row("ds.param_dtype param_dtype bf16", Sense::Read("weights")),
    Row("ds.attn_implementation attn_implementation flash_attn", Sense::Read("attention")),
    Row(
        "model.gradient_checkpointing_enable gradient_checkpointing model.gradient_checkpointing_reentrant \
         gradient_checkpointing_use_reentrant",
        Sense::Read("checkpointing"),
    ),
    Row(
        "ds.lora.rank model.lora.rank lora_rank lora.rank ds.lora.target_modules lora.target_modules target_modules \
         lora.dropout lora_dropout ds.lora.dropout",
        Sense::Read("adapter"),
    ),
    Row("ds.load_in_4bit load_in_4bit", Sense::Read("quantization")),
    Row("ds.packing_samples packing_samples", Sense::Said("rows of full length are simulated")),
    Row("ds.use_liger_kernel use_liger_kernel", Sense::Read("kernels")),
    Row(
        "ds.ring_attn_size ring_attn_size ds.ring.attn_size ds.tensor_parallel_size ds_tensor_parallel_size",
        Sense::Refused("sequence and tensor parallel under DeepSpeed are not simulated here"),
    ),
    Row("*", Sense::Harmless("which data, what is logged and saved, the course of training")),
];

/// verl's supervised fine-tuning: FSDP with fp32 shards, computed with in bf16.
pub(super) fn verl(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    if value.get("actor_rollout_ref").is_some() {
        return Err(vec![verl_roles(value)]);
    }
    let mut reader = Reader::new(&VERL, value, beside);
    let model = reader.text("model.partial_pretrain").or_else(|| reader.text("model.path")).map(str::to_owned);
    let at = match reader.text("model.strategy") {
        Some("fsdp") | None => "parallel.engine.fsdp1",
        Some("fsdp2") => "parallel.engine.fsdp2",
        Some(other) => {
            reader.refuse("model.strategy", other, "use fsdp or fsdp2");
            "parallel.engine.fsdp2"
        }
    };
    reader.set(at, json!({}));
    reader.set("weights", "fp32");
    reader.set("autocast", Value::Null);
    reader.set(&format!("{at}.mixed_precision"), json!({"parameters": "bf16", "reduce": "fp32"}));
    if reader.is_on("model.fsdp_config.cpu_offload") || reader.is_on("model.fsdp_config.offload_params") {
        reader.set(&format!("{at}.offload"), true);
    }
    let checkpoints = reader.switch("model.enable_gradient_checkpointing").unwrap_or(true);
    reader.set("checkpointing", if checkpoints { "full" } else { "off" });
    reader.set("attention", "flash2");
    reader.set("optimizer.kind", "adamw");
    reader.set("clip", true);
    if reader.is_on("model.use_liger") {
        reader.set("kernels", "liger");
    }
    if let Some(rank) = reader.number("model.lora_rank").filter(|rank| *rank > 0) {
        reader.set("adapter.method", "lora");
        reader.set("adapter.rank", rank);
        reader.targets_to("model.target_modules", "adapter.targets");
    }
    for (key, place) in [("trainer.n_gpus_per_node", "parallel.gpus"), ("trainer.nnodes", "parallel.nodes")] {
        if let Some(count) = reader.get(key).and_then(super::reader::whole).filter(|count| *count > 1) {
            reader.set(place, count);
        }
    }
    reader.finish(None, model)
}

/// OpenRLHF's supervised fine-tuning: DeepSpeed, in bf16.
pub(super) fn openrlhf(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&OPENRLHF, value, beside);
    fn either<'a>(reader: &mut Reader<'a>, keys: &[&str]) -> Option<&'a Value> {
        keys.iter().find_map(|key| reader.get(key))
    }
    fn on(reader: &mut Reader<'_>, keys: &[&str]) -> bool {
        keys.iter().any(|key| reader.is_on(key))
    }
    let model =
        either(&mut reader, &["model.model_name_or_path", "pretrain"]).and_then(Value::as_str).map(str::to_owned);
    let stage = either(&mut reader, &["ds.zero_stage", "zero_stage"]).and_then(super::reader::whole).unwrap_or(2);
    let mut zero = json!({"stage": stage, "overlap_comm": on(&mut reader, &["ds.overlap_comm", "overlap_comm"])});
    if on(&mut reader, &["ds.adam_offload", "adam_offload"]) {
        zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true});
    }
    let document = json!({"zero_optimization": zero, "bf16": {"enabled": true}, "gradient_clipping": 1.0});
    let checkpoints = on(&mut reader, &["model.gradient_checkpointing_enable", "gradient_checkpointing"]);
    reader.set("checkpointing", if checkpoints { "full" } else { "off" });
    if on(&mut reader, &["flash_attn"]) {
        reader.set("attention", "flash2");
    }
    for key in ["ds.attn_implementation", "attn_implementation"] {
        attention(&mut reader, key);
    }
    if on(&mut reader, &["ds.use_liger_kernel", "use_liger_kernel"]) {
        reader.set("kernels", "liger");
    }
    let rank = either(&mut reader, &["ds.lora.rank", "model.lora.rank", "lora.rank", "lora_rank"])
        .and_then(super::reader::whole);
    if let Some(rank) = rank.filter(|rank| *rank > 0) {
        reader.set("adapter.method", "lora");
        reader.set("adapter.rank", rank);
        reader.set("adapter.targets", "all-linear");
        for key in ["ds.lora.target_modules", "lora.target_modules", "target_modules"] {
            reader.targets_to(key, "adapter.targets");
        }
    }
    if on(&mut reader, &["ds.load_in_4bit", "load_in_4bit"]) {
        reader.set("quantization.scheme", "nf4");
    }
    let deepspeed = Some(sharding::deepspeed(&mut reader, document, Some("bf16")));
    reader.finish(None, model).map(|read| Imported { deepspeed, ..read })
}

/// A place in nested objects, as text.
fn text(value: &Value, path: &str) -> Option<String> {
    let found = value.get(path).or_else(|| path.split('.').try_fold(value, |value, part| value.get(part)))?;
    match found {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The questions that answer a run of several roles, with what the file says of each.
fn questions(who: &str, model: &str, actor: &[(&str, Option<String>)], rollout: &[(&str, Option<String>)]) -> Fault {
    let line = |flags: &[(&str, Option<String>)]| {
        flags.iter().filter_map(|(flag, value)| Some(format!(" {flag} {}", value.as_ref()?))).collect::<String>()
    };
    let problem = format!("{who}'s roles on shared cards (actor, rollout, reference, critic), as one run,");
    Fault::unsupported("", problem).or(format!(
        "ask for each: `vramcast train {model}{}` for the actor (a critic is the same), `vramcast infer {model}{}` for the rollout; \
         `--task grpo` is TRL's, on one card or under DDP",
        line(actor),
        line(rollout)
    ))
}

fn verl_roles(value: &Value) -> Fault {
    let at = |path: &str| text(value, &format!("actor_rollout_ref.{path}"));
    let sum = |one: &str, other: &str| {
        let number = |path: &str| text(value, path)?.parse::<u64>().ok();
        Some((number(one)? + number(other)?).to_string())
    };
    let length = sum("data.max_prompt_length", "data.max_response_length");
    let model = at("model.path").unwrap_or_else(|| "MODEL".into());
    let checkpoints =
        (at("model.enable_gradient_checkpointing").as_deref() != Some("false")).then(|| "full".to_owned());
    let engine = match at("actor.strategy").as_deref() {
        Some("megatron") => "megatron",
        Some("fsdp2") => "fsdp2",
        _ => "fsdp1",
    };
    let actor = [
        ("--engine", Some(engine.to_owned())),
        ("--gpus", text(value, "trainer.n_gpus_per_node")),
        ("--batch-size", at("actor.ppo_micro_batch_size_per_gpu")),
        ("--seq-len", length.clone()),
        ("--gradient-checkpointing", checkpoints),
    ];
    let rollout = [
        ("--engine", Some(at("rollout.name").filter(|name| name == "sglang").unwrap_or_else(|| "vllm".into()))),
        ("--tensor-parallel-size", at("rollout.tensor_model_parallel_size")),
        ("--max-model-len", length),
    ];
    questions("verl", &model, &actor, &rollout)
}

/// OpenRLHF's lines of several roles.
pub(crate) fn openrlhf_roles(value: &Value) -> Fault {
    let either = |paths: &[&str]| paths.iter().find_map(|path| text(value, path));
    let model =
        either(&["actor.model_name_or_path", "pretrain", "model.model_name_or_path"]).unwrap_or_else(|| "MODEL".into());
    let actor = [
        ("--zero", either(&["ds.zero_stage", "zero_stage"]).or(Some("2".into()))),
        ("--gpus", either(&["actor.num_gpus_per_node", "actor_num_gpus_per_node"])),
        ("--batch-size", either(&["train.micro_batch_size", "micro_train_batch_size"])),
        ("--seq-len", either(&["data.max_len", "max_len"])),
    ];
    let rollout = [
        ("--engine", Some("vllm".to_owned())),
        ("--tensor-parallel-size", either(&["vllm.tensor_parallel_size", "vllm_tensor_parallel_size"])),
    ];
    questions("OpenRLHF", &model, &actor, &rollout)
}
