//! LLaMA-Factory's new trainer (v1; llamafactory 0.9.5, v1/config and examples/v1).

use serde_json::{Value, json};

use super::reader::Reader;
use super::sharding::{self, Types};
use super::table::{Format, Row, Sense};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "LLaMA-Factory v1",
    version: "0.9.5",
    source: "llamafactory, v1/config/*.py and examples/v1",
    keys: &[KEYS],
};

const KEYS: &[Row] = &[
    Row("model", Sense::Read("the model")),
    Row("micro_batch_size", Sense::Whole("batch.batch_size")),
    Row("cutoff_len", Sense::Whole("batch.seq_len")),
    Row("gradient_accumulation_steps", Sense::Whole("gradient_accumulation")),
    Row(
        "peft_config.name peft_config.r peft_config.lora_alpha peft_config.lora_dropout peft_config.target_modules",
        Sense::Read("adapter"),
    ),
    Row("quant_config.name quant_config.quantization_bit", Sense::Read("quantization")),
    Row("dist_config.name dist_config.config_file", Sense::Read("parallel.engine")),
    Row("kernel_config.name optim_config.name flash_attn", Sense::Read("kernels, optimizer.kind, attention")),
    Row("bf16 enable_activation_checkpointing max_grad_norm", Sense::Read("weights, checkpointing, clip")),
    Row("cp_size cp_mode", Sense::Read("parallel.mesh.cp")),
    Row(
        "dist_config.ep_size dist_config.ep_dispatcher",
        Sense::Refused("experts over cards are simulated under --engine megatron"),
    ),
    Row(
        "peft_config.export_dir peft_config.export_size peft_config.infer_dtype",
        Sense::Refused("a merge: `vramcast train MODEL --lora --merge` simulates one"),
    ),
    Row("peft_config.freeze_*", Sense::Refused("say what is not trained by {frozen}")),
    Row("batching_strategy", Sense::Said("rows of full length are simulated")),
    Row(
        "kernel_config.include_kernels kernel_config.chunk_size",
        Sense::Said("kernels of its own are not simulated: transformers' code runs in their place"),
    ),
    Row(
        "init_config.* dist_config.dcp_path peft_config.adapter_name_or_path optim_config.* \
         model_class train_dataset eval_dataset output_dir learning_rate max_steps num_train_epochs sample_backend \
         max_new_tokens trust_remote_code template seed batching_workers save_* logging_* report_to stage resume_* \
         lr_* warmup_* global_batch_size dataloader_*",
        Sense::Harmless("which data, what is saved, the course of training"),
    ),
    Row("pref_* ref_*", Sense::Refused("only supervised fine-tuning is simulated")),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    let model = reader.text("model").map(str::to_owned);
    if beside.name.contains("dpo") || reader.text("train_dataset").is_some_and(|name| name.contains("dpo")) {
        reader.refuse("train_dataset", "preferences", "only supervised fine-tuning is simulated");
    }
    let adapter = match reader.text("peft_config.name") {
        None => false,
        Some("lora") => {
            reader.set("adapter.method", "lora");
            reader.number_to("peft_config.r", "adapter.rank");
            reader.real_to("peft_config.lora_alpha", "adapter.alpha");
            if let Some(dropout) = reader.real("peft_config.lora_dropout") {
                reader.set("adapter.dropout", dropout);
            }
            reader.targets_to("peft_config.target_modules", "adapter.targets");
            true
        }
        Some(other) => {
            reader.refuse("peft_config.name", other, "use lora");
            false
        }
    };
    match (reader.text("quant_config.name"), reader.number("quant_config.quantization_bit")) {
        (None, _) => {}
        (Some("bnb"), Some(8)) => reader.set("quantization.scheme", "int8"),
        (Some("bnb"), _) => reader.set("quantization.scheme", "nf4"),
        (Some(other), _) => reader.refuse("quant_config.name", other, "use bnb"),
    }
    match reader.text("optim_config.name") {
        None | Some("adamw") => {}
        Some("muon") => reader.set("optimizer.kind", "muon"),
        Some(other) => reader.refuse("optim_config.name", other, "use adamw or muon"),
    }
    match reader.text("kernel_config.name") {
        None | Some("auto") => {}
        Some("liger_kernel") => reader.set("kernels", "liger"),
        Some(other) => reader.say("kernel_config.name", &format!("{other}: transformers' code runs in its place")),
    }
    super::trainer::attention(&mut reader, "flash_attn");
    let deepspeed = spread(&mut reader, adapter);
    reader.finish(Some("llama-factory"), model).map(|read| Imported { deepspeed, ..read })
}

/// Who spreads the run: `fully_shard` over bf16 weights, or DeepSpeed's file.
fn spread(reader: &mut Reader<'_>, adapter: bool) -> Option<Value> {
    let types = Types { compute: Some("bf16"), adapter };
    match reader.text("dist_config.name") {
        None => None,
        Some("fsdp2") => {
            reader.set("parallel.engine.fsdp2", json!({}));
            sharding::mixed(reader, "parallel.engine.fsdp2", &types);
            if let Some(size) = reader.number("cp_size").filter(|size| *size > 1) {
                if reader.text("cp_mode") == Some("ulysses") {
                    reader.refuse("cp_mode", "ulysses", "leave it out: it is not simulated");
                } else {
                    reader.set("parallel.mesh.cp", size);
                }
            }
            None
        }
        Some("deepspeed") => {
            let document = reader.referred("dist_config.config_file")?;
            Some(sharding::deepspeed(reader, document, types.compute))
        }
        Some(other) => {
            reader.refuse("dist_config.name", other, "use fsdp2 or deepspeed");
            None
        }
    }
}
