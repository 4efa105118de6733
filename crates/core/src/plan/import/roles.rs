//! verl's and OpenRLHF's supervised fine-tuning (verl 0.7 trainer/config; OpenRLHF 0.9 and 0.11 cli). Their reinforcement
//! learning is in `verl` and `openrlhf`.

use serde_json::{Value, json};

use super::reader::{Reader, whole};
use super::sharding;
use super::table::{Format, Row, Sense};
use super::trainer::{attention, short};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const VERL: Format = Format {
    title: "verl",
    version: "0.7",
    source: "verl, trainer/config/sft_trainer.yaml and trainer/fsdp_sft_trainer.py",
    keys: &[VERL_KEYS, super::verl::KEYS],
};

pub(super) const OPENRLHF: Format = Format {
    title: "OpenRLHF",
    version: "0.9 and 0.11",
    source: "openrlhf, cli/train_sft.py and utils/deepspeed/deepspeed_utils.py",
    keys: &[OPENRLHF_KEYS, super::openrlhf::KEYS],
};

const VERL_KEYS: &[Row] = &[
    Row("model.partial_pretrain model.path", Sense::Read("the model")),
    Row("data.micro_batch_size_per_gpu data.micro_batch_size", Sense::Read("batch.batch_size")),
    Row("data.max_length data.max_token_len_per_gpu", Sense::Whole("batch.seq_len")),
    Row("data.train_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row("model.enable_gradient_checkpointing", Sense::Read("checkpointing")),
    Row("model.use_liger", Sense::Read("kernels")),
    Row("model.lora_rank model.lora_alpha model.target_modules", Sense::Read("adapter")),
    Row("model.fsdp_config.model_dtype", Sense::Read("weights")),
    Row(
        "model.strategy model.fsdp_config.cpu_offload model.fsdp_config.offload_params \
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
        "data.* optim.* trainer.* model.trust_remote_code checkpoint.* hydra.* custom_cls.*",
        Sense::Harmless("which data, what is saved, the course of training"),
    ),
];

const OPENRLHF_KEYS: &[Row] = &[
    Row("model.model_name_or_path pretrain", Sense::Read("the model")),
    Row("train.micro_batch_size micro_train_batch_size", Sense::Read("batch.batch_size")),
    Row("data.max_len max_len", Sense::Read("batch.seq_len")),
    Row("train.batch_size train_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row(
        "ds.zero_stage zero_stage ds.adam_offload adam_offload ds.zpg zpg ds.overlap_comm overlap_comm \
         ds.grad_accum_dtype grad_accum_dtype max_norm",
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
    Row("optim", Sense::Read("optimizer")),
    Row(
        "ds.deepcompile deepcompile torch_compile",
        Sense::Said("torch.compile is not simulated: what runs is eager, which mostly keeps more for backward"),
    ),
    Row("ds.experts_implementation", Sense::Said("transformers' own experts are simulated")),
    Row(
        "ckpt.* logger.* eval.* data.* muon.* adam.* lora.alpha ds.lora.alpha model.lora.alpha lora_alpha save_path \
         save_steps save_hf_ckpt disable_ds_ckpt logging_steps eval_steps eval_dataset eval_split ckpt_path \
         max_ckpt_num max_ckpt_mem load_checkpoint use_ds_universal_ckpt ds.use_universal_ckpt seed train.seed \
         full_determinism train.full_determinism_enable local_rank max_epochs train.max_epochs aux_loss_coef \
         model.aux_loss_coef learning_rate lr_warmup_ratio lr_warmup_steps lr_scheduler min_lr_ratio l2 adam_betas \
         pretrain_mode model.pretrain_mode_enable ring_head_stride ds.ring_attn_head_stride dataset dataset_probs \
         dataset_split train_split max_samples multiturn input_key output_key input_template apply_chat_template \
         tokenizer_chat_template disable_fast_tokenizer dataloader_num_workers use_wandb wandb_* use_tensorboard \
         use_ms disable_trace_cache",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];

/// verl's supervised fine-tuning: FSDP with fp32 shards, computed with in bf16.
pub(super) fn verl(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    if value.get("actor_rollout_ref").is_some() {
        return super::verl::placement(value, beside);
    }
    let mut reader = Reader::new(&VERL, value, beside);
    let model = reader.text("model.partial_pretrain").or_else(|| reader.text("model.path")).map(str::to_owned);
    let at = match reader.text("model.strategy") {
        Some("fsdp") => "parallel.engine.fsdp1",
        Some("fsdp2") | None => "parallel.engine.fsdp2",
        Some(other) => {
            reader.refuse("model.strategy", other, "use fsdp or fsdp2");
            "parallel.engine.fsdp2"
        }
    };
    reader.set(at, json!({}));
    let weights = match reader.text("model.fsdp_config.model_dtype") {
        None => "fp32",
        Some(name) => short(name).unwrap_or_else(|| {
            reader.refuse("model.fsdp_config.model_dtype", name, "use fp32 or bf16");
            "fp32"
        }),
    };
    reader.set("weights", weights);
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
        reader.real_to("model.lora_alpha", "adapter.alpha");
        reader.targets_to("model.target_modules", "adapter.targets");
    }
    for (key, place) in [("trainer.n_gpus_per_node", "parallel.gpus"), ("trainer.nnodes", "parallel.nodes")] {
        if let Some(count) = reader.get(key).and_then(whole).filter(|count| *count > 1) {
            reader.set(place, count);
        }
    }
    let said = |place: &str| reader.was_set(place).and_then(whole);
    let cards = beside.cards.or(said("parallel.gpus").map(|gpus| gpus * said("parallel.nodes").unwrap_or(1)));
    // sft_trainer.yaml's own. `micro_batch_size` counts the rows of all cards.
    let micro = reader.number("data.micro_batch_size").map(|rows| (rows / cards.unwrap_or(1).max(1)).max(1));
    let micro = reader.number("data.micro_batch_size_per_gpu").or(micro).unwrap_or(4);
    let rows = reader.number("data.train_batch_size").unwrap_or(256);
    reader.set("batch.seq_len", 1024);
    batch(&mut reader, (rows, micro), cards);
    reader.finish(None, model)
}

/// Cards of a node, where nobody says how many there are.
const USUAL_CARDS: u64 = 8;

/// Rows of a micro-batch, and how many of them a step has.
fn batch(reader: &mut Reader<'_>, (rows, micro): (u64, u64), cards: Option<u64>) {
    reader.set("batch.batch_size", micro);
    let taken = cards.unwrap_or(USUAL_CARDS);
    reader.set("gradient_accumulation", (rows / micro.saturating_mul(taken).max(1)).max(1));
    if cards.is_none() {
        let note = "micro-batches follow from the cards";
        reader.notes.push(format!("{note}: {rows} rows a step on {taken}; --gradient-accumulation says others"));
    }
}

/// OpenRLHF's supervised fine-tuning: DeepSpeed, in 16 bits.
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
    let mut number = |keys: &[&str], usual: u64| either(&mut reader, keys).and_then(whole).unwrap_or(usual);
    let stage = number(&["ds.zero_stage", "zero_stage"], 2);
    let second = number(&["ds.zpg", "zpg"], 1);
    // cli/train_sft.py's own.
    let micro = number(&["train.micro_batch_size", "micro_train_batch_size"], 8);
    let rows = number(&["train.batch_size", "train_batch_size"], 128);
    let length = number(&["data.max_len", "max_len"], 2048);
    let mut zero = json!({"stage": stage});
    if second > 1 {
        zero["zero_hpz_partition_size"] = json!(second);
    }
    if on(&mut reader, &["ds.overlap_comm", "overlap_comm"]) {
        zero["overlap_comm"] = json!(true);
    }
    if on(&mut reader, &["ds.adam_offload", "adam_offload"]) {
        zero["offload_optimizer"] = json!({"device": "cpu", "pin_memory": true});
    }
    let kind = either(&mut reader, &["ds.param_dtype", "param_dtype"]).and_then(Value::as_str).unwrap_or("bf16");
    let kind = match kind {
        "bf16" | "fp16" => kind,
        other => {
            reader.refuse("param_dtype", other, "use bf16 or fp16");
            "bf16"
        }
    };
    let norm = reader.real("max_norm").unwrap_or(1.0);
    let mut document = json!({"zero_optimization": zero, kind: {"enabled": true}, "gradient_clipping": norm});
    if let Some(sum) = either(&mut reader, &["ds.grad_accum_dtype", "grad_accum_dtype"]) {
        document["data_types"] = json!({"grad_accum_dtype": sum});
    }
    match reader.text("optim") {
        None | Some("adam") => {}
        Some(other) => reader.refuse("optim", other, "use adam"),
    }
    reader.set("batch.seq_len", length);
    batch(&mut reader, (rows, micro), beside.cards);
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
    let rank = either(&mut reader, &["ds.lora.rank", "model.lora.rank", "lora.rank", "lora_rank"]).and_then(whole);
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
    let deepspeed = Some(sharding::deepspeed(&mut reader, document, Some(kind)));
    reader.finish(None, model).map(|read| Imported { deepspeed, ..read })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(read: &Imported, place: &str) -> Value {
        read.changes.iter().rev().find(|(known, _)| known == place).map(|(_, value)| value.clone()).unwrap_or_default()
    }

    #[test]
    fn verls_defaults_and_types() {
        let cards = Beside { cards: Some(8), ..Beside::default() };
        for (file, beside, place, value) in [
            (json!({}), Beside::default(), "batch.batch_size", json!(4)),
            (json!({}), Beside::default(), "batch.seq_len", json!(1024)),
            (json!({}), Beside::default(), "weights", json!("fp32")),
            (json!({}), Beside::default(), "gradient_accumulation", json!(8)),
            (json!({}), cards, "gradient_accumulation", json!(8)),
            (json!({"data": {"train_batch_size": 64}}), cards, "gradient_accumulation", json!(2)),
            (json!({"data": {"micro_batch_size": 16}}), cards, "batch.batch_size", json!(2)),
            (json!({"data": {"max_length": 512}}), cards, "batch.seq_len", json!(512)),
            (
                json!({"trainer": {"n_gpus_per_node": 4, "nnodes": 2}}),
                Beside::default(),
                "gradient_accumulation",
                json!(8),
            ),
            (json!({"model": {"fsdp_config": {"model_dtype": "bf16"}}}), cards, "weights", json!("bf16")),
        ] {
            assert_eq!(at(&verl(&file, &beside).unwrap(), place), value, "{file}: {place}");
        }
        assert!(verl(&json!({"model": {"fsdp_config": {"model_dtype": "int3"}}}), &cards).is_err());
    }

    #[test]
    fn openrlhfs_defaults_and_refusals() {
        let cards = Beside { cards: Some(4), ..Beside::default() };
        let read = openrlhf(&json!({"pretrain": "a/b"}), &cards).unwrap();
        for (place, value) in [("batch.batch_size", 8), ("batch.seq_len", 2048), ("gradient_accumulation", 4)] {
            assert_eq!(at(&read, place), json!(value), "{place}");
        }
        let read = openrlhf(&json!({"param_dtype": "fp16", "zpg": 2, "zero_stage": 3, "max_norm": 0.5}), &cards);
        let read = read.unwrap();
        let document = read.deepspeed.clone().unwrap();
        assert_eq!((at(&read, "weights"), &document["gradient_clipping"]), (json!("fp16"), &json!(0.5)));
        assert_eq!(document["zero_optimization"]["zero_hpz_partition_size"], json!(2));
        for (file, said) in [
            (json!({"micro_train_batch_sise": 3}), "micro_train_batch_sise is no key"),
            (json!({"param_dtype": "fp32"}), "param_dtype: fp32"),
            (json!({"optim": "muon"}), "optim: muon"),
        ] {
            let faults = openrlhf(&file, &cards).unwrap_err();
            assert!(faults[0].to_string().contains(said), "{faults:?}");
        }
    }
}
