//! ms-swift's arguments, of `swift sft` and of its files (ms-swift 4, swift/arguments).

use serde_json::{Value, json};

use super::reader::Reader;
use super::sharding::FSDP_KEYS;
use super::table::{Format, Row, Sense};
use super::trainer::{self, arguments, attention, dtype};
use super::{Beside, Imported, megatron_swift, preference};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "ms-swift",
    version: "4",
    source: "ms-swift, swift/arguments/*.py; transformers, training_args.py",
    keys: &[KEYS, trainer::KEYS, FSDP_KEYS],
};

const NOT: &str = "leave it out: it is not simulated";

pub(super) const KEYS: &[Row] = &[
    Row("model model_id_or_path", Sense::Read("the model")),
    Row("max_length", Sense::Whole("batch.seq_len")),
    Row(
        "train_type tuner_type sft_type lora_rank lora_alpha lora_dropout target_modules lora_target_modules modules_to_save \
         use_dora",
        Sense::Read("adapter"),
    ),
    Row(
        "quant_method quant_bits quantization_bit bnb_4bit_quant_type bnb_4bit_use_double_quant",
        Sense::Read("quantization"),
    ),
    Row(
        "torch_dtype dtype attn_impl packing padding_free deepspeed use_liger_kernel vit_gradient_checkpointing",
        Sense::Read("weights, attention, batch.mask, parallel.engine.deepspeed"),
    ),
    Row("freeze_vit freeze_aligner freeze_llm", Sense::Read("frozen")),
    Row(
        "sequence_parallel_size tuner_backend galore_* use_galore lisa_* optimizer freeze_parameters* \
         trainable_parameters* template_backend device_map quant_* adalora_* vera_* boft_* fourier_* reft_* \
         llamapro_* use_ray fsdp muon* channels moe_* init_strategy \
         use_logits_to_keep use_chat_template zero_hpz_partition_size",
        Sense::Refused(NOT),
    ),
    Row("new_special_tokens", Sense::Said("rows that are added to the embedding are not simulated")),
    Row("enable_dft_loss", Sense::Said("the weighted loss is not simulated: the model's own is, which keeps as much")),
    Row(
        "problem_type num_labels task_type loss_type",
        Sense::Refused("it is another task: only language modelling is simulated of ms-swift"),
    ),
    Row("rlhf_type", Sense::Read("objective, as TRL's trainer of it")),
    Row(preference::NUMBERS, Sense::Harmless("numbers in a loss")),
    Row("rpo_alpha", Sense::Said("what is added to the loss of pairs is not simulated")),
    Row(
        "reward_* ref_* teacher_* vllm_* num_generations",
        Sense::Refused("another task than is simulated of ms-swift"),
    ),
    Row(
        "use_rslora init_weights lora_bias lorap_* adapters resume_* bnb_4bit_compute_dtype \
         bnb_4bit_quant_storage merge_lora lora_dtype use_hf model_type template system dataset val_dataset dataset_* \
         split_dataset_ratio streaming* shuffle_* train_dataloader_shuffle model_author model_name output_dir \
         add_version create_checkpoint_symlink max_pixels truncation_strategy loss_scale load_from_cache_file columns \
         strict interleave_prob stopping_strategy custom_* external_plugins callbacks report_to swanlab_* \
         agent_template norm_bbox response_prefix padding_side cached_* lazy_tokenize enable_cache download_mode \
         remove_unused_columns ddp_* aligner_lr vit_lr acc_* metric* check_model hub_token ignore_args_error \
         load_args load_data_args packing_* is_training eval_* predict_with_generate enable_thinking save_* \
         max_new_tokens temperature group_by_length add_non_thinking_prefix experts_impl \
         router_aux_loss_coef rope_scaling max_model_len infer_backend generation_* num_beams stop_words stream \
         result_path early_stop_interval max_epochs lora_ga_* write_batch_size do_sample top_p top_k repetition_penalty use_cache ENV ENV.*",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    if megatron_swift::is_marked(value) {
        return megatron_swift::read(value, beside);
    }
    let mut reader = Reader::new(&FORMAT, value, beside);
    let model = reader.text("model").or_else(|| reader.text("model_id_or_path")).map(str::to_owned);
    // `tuner_type` is what `train_type` was called before 4.
    let kind = reader.text("tuner_type").or_else(|| reader.text("train_type")).or_else(|| reader.text("sft_type"));
    let adapter = match kind {
        None | Some("lora") => {
            reader.set("adapter.method", "lora");
            reader.number_to("lora_rank", "adapter.rank");
            reader.real_to("lora_alpha", "adapter.alpha");
            if reader.was_set("adapter.rank").is_none() {
                reader.set("adapter.rank", 8);
            }
            let dropout = reader.real("lora_dropout").unwrap_or(0.05);
            reader.set("adapter.dropout", dropout);
            for key in ["lora_target_modules", "target_modules"] {
                reader.targets_to(key, "adapter.targets");
            }
            if reader.was_set("adapter.targets").is_none() {
                reader.set("adapter.targets", "all-linear");
            }
            if let Some(names) = reader.get("modules_to_save").filter(|names| !super::table::is_off(names)) {
                let names = names.as_str().map_or_else(|| names.clone(), |one| json!([one]));
                reader.set("adapter.modules_to_save", names);
            }
            if reader.is_on("use_dora") {
                reader.set("adapter.dora", true);
            }
            true
        }
        Some("full") => {
            frozen(&mut reader);
            false
        }
        Some(other) => {
            reader.refuse("train_type", other, "use lora or full");
            false
        }
    };
    let bits = reader.number("quant_bits").or_else(|| reader.number("quantization_bit"));
    match (reader.text("quant_method"), bits) {
        (None, None) => {}
        (None | Some("bnb"), Some(8)) => reader.set("quantization.scheme", "int8"),
        (None | Some("bnb"), _) => {
            reader.set("quantization.scheme", "nf4");
            let double = reader.switch("bnb_4bit_use_double_quant").unwrap_or(true);
            reader.set("quantization.double", double);
        }
        (Some(other), _) => reader.refuse("quant_method", other, "use bnb"),
    }
    for key in ["torch_dtype", "dtype"] {
        dtype(&mut reader, key);
    }
    match reader.text("attn_impl") {
        Some("flash_attn" | "flash_attention_2") => reader.set("attention", "flash2"),
        Some("flash_attention_3" | "flash_attention_4") => reader.set("attention", "flash3"),
        _ => attention(&mut reader, "attn_impl"),
    }
    if reader.is_on("packing") || reader.is_on("padding_free") {
        reader.set("batch.mask", false);
        reader.notes.push("packing: the batch is simulated as full rows without a mask".into());
    }
    let compute =
        reader.was_set("weights").and_then(Value::as_str).and_then(trainer::short).filter(|name| *name != "fp32");
    let deepspeed = arguments(&mut reader, adapter, compute.or(Some("bf16")));
    // swift/trainers/arguments.py: 16 samples of all cards a step.
    if value.get("gradient_accumulation_steps").is_none_or(Value::is_null) {
        let (batch, cards) = (reader.number("per_device_train_batch_size").unwrap_or(1), beside.cards.unwrap_or(1));
        let steps = 16u64.div_ceil(batch.saturating_mul(cards).max(1)).max(1);
        reader.set("batch.batch_size", batch);
        reader.set("gradient_accumulation", steps);
        reader.notes.push(format!("gradient_accumulation_steps: {steps}, ms-swift's own on {cards} cards"));
    }
    if let Some(word) = reader.text("rlhf_type").map(str::to_owned) {
        preference::read(&mut reader, "rlhf_type", &word, None);
    }
    reader.finish(Some("ms-swift"), model).map(|read| Imported { deepspeed, ..read })
}

/// What reads images is not trained unless it is said (swift/arguments).
fn frozen(reader: &mut Reader<'_>) {
    let tower = reader.switch("freeze_vit").unwrap_or(true);
    let aligner = reader.switch("freeze_aligner").unwrap_or(true);
    if reader.is_on("freeze_llm") {
        reader.refuse("freeze_llm", "true", "leave it out: it is not simulated");
    }
    let mut parts = Vec::new();
    if tower {
        parts.push("vision-if-any");
    }
    if aligner {
        parts.push("projector-if-any");
    }
    if !parts.is_empty() {
        reader.set("frozen", json!(parts));
    }
}
