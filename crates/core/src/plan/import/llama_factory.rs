//! LLaMA-Factory's YAML (llamafactory 0.9.5, hparams), with the keys of `TrainingArguments` beside its own.

use serde_json::Value;

use super::reader::Reader;
use super::sharding::FSDP_KEYS;
use super::table::{Format, Row, Sense};
use super::trainer::{self, arguments, attention};
use super::{Beside, Imported, job, preference};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "LLaMA-Factory",
    version: "0.9.5",
    source: "llamafactory, hparams/*.py; transformers, training_args.py",
    keys: &[KEYS, EVALUATION, trainer::KEYS, FSDP_KEYS],
};

const EVALUATION: &[Row] = &[Row(
    "eval_strategy evaluation_strategy do_eval per_device_eval_batch_size prediction_loss_only batch_eval_metrics \
     eval_accumulation_steps predict_with_generate generation_max_length generation_num_beams compute_accuracy",
    Sense::Read("job.evaluation"),
)];

const NOT: &str = "leave it out: it is not simulated";

const KEYS: &[Row] = &[
    Row("model_name_or_path", Sense::Read("the model")),
    Row("stage finetuning_type", Sense::Read("what is trained")),
    Row("cutoff_len", Sense::Whole("batch.seq_len")),
    Row(
        "lora_rank lora_alpha lora_dropout lora_target additional_target use_dora oft_block_size oft_rank oft_target \
         freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        Sense::Read("adapter, frozen"),
    ),
    Row("quantization_bit quantization_method quantization_type double_quantization", Sense::Read("quantization")),
    Row("pure_bf16 infer_dtype", Sense::Read("weights, autocast")),
    Row("disable_gradient_checkpointing use_reentrant_gc use_unsloth_gc", Sense::Read("checkpointing, checkpoints")),
    Row("enable_liger_kernel flash_attn", Sense::Read("kernels, attention")),
    Row("packing neat_packing", Sense::Read("batch.mask")),
    Row(
        "use_galore galore_target galore_rank galore_layerwise use_apollo apollo_target apollo_rank apollo_layerwise \
         use_adam_mini use_muon",
        Sense::Read("optimizer"),
    ),
    Row(
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
        Sense::Read("frozen, adapter.exclude"),
    ),
    Row(
        "infer_backend vllm_maxlen vllm_gpu_util vllm_enforce_eager sglang_maxlen sglang_mem_fraction sglang_tp_size \
         max_new_tokens vllm_config* sglang_config*",
        Sense::Read("who generates, in files of inference"),
    ),
    Row("galore_* apollo_*", Sense::Harmless("how often and how gradients are projected")),
    Row(
        "use_badam badam_* use_llama_pro shift_attn mixture_of_depths use_mca use_hyper_parallel hyper_parallel_* \
         upcast_layernorm upcast_lmhead_output train_from_scratch",
        Sense::Refused(NOT),
    ),
    Row(
        "use_megatron_bridge tensor_model_parallel_size pipeline_model_parallel_size \
         virtual_pipeline_model_parallel_size expert_model_parallel_size context_parallel_size recompute_granularity \
         recompute_method recompute_num_layers sequence_parallel use_distributed_optimizer overlap_grad_reduce",
        Sense::Read("parallel.engine.megatron"),
    ),
    Row("megatron_bridge_args* extra_config", Sense::Refused("say it by flags beside --engine megatron")),
    Row(
        "overlap_param_gather bias_activation_fusion apply_rope_fusion moe_grouped_gemm masked_softmax_fusion \
         use_packed_sequences export_hf_on_finish mixed_precision moe_token_dispatcher_type moe_permute_fusion \
         megatron_pretrained_checkpoint cross_entropy_loss_fusion",
        Sense::Harmless("Megatron's kernels, which are simulated fused"),
    ),
    Row("use_kt kt_*", Sense::Refused("leave it out: experts on the host are not simulated")),
    Row("use_unsloth", Sense::Refused("use --framework unsloth beside flags")),
    Row(
        "use_dft_loss use_eaft_loss eaft_*",
        Sense::Said("the weighted loss is not simulated: the model's own is, which keeps as much"),
    ),
    Row("use_asft_loss asft_*", Sense::Refused("leave it out: its reference model is not simulated")),
    Row("fp8 fp8_*", Sense::Said("products in fp8 are not simulated: those in bf16 are, which keep more")),
    Row(
        "use_v1_kernels",
        Sense::Said("its own kernels are not simulated: transformers' code runs in their place, which keeps more"),
    ),
    Row("pref_loss", Sense::Read("objective, as TRL's trainer of it")),
    Row(preference::NUMBERS, Sense::Harmless("numbers in a loss")),
    Row("pref_ftx pref_bco_weight", Sense::Said("what is added to the loss of pairs is not simulated")),
    Row(
        "pref_* dpo_* kto_* simpo_* ppo_* ref_model* reward_model*",
        Sense::Refused("leave it out: what is simulated is supervised fine-tuning of one model"),
    ),
    Row(
        "image_* crop_to_patches video_* use_audio_in_video audio_*",
        Sense::Said(
            "a batch's images and sounds are not in the file: rows of text are simulated; give them by --images",
        ),
    ),
    Row(
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config init_special_tokens",
        Sense::Said("rows that are added to the embedding are not simulated"),
    ),
    Row(
        "rope_scaling moe_aux_loss_coef block_diag_attn model_max_length",
        Sense::Said("the model is taken as it is published"),
    ),
    Row(
        "loraplus_* use_rslora pissa_* create_new_adapter adapter_name_or_path adapter_folder \
         module_dropout offload_folder export_* print_param_status",
        Sense::Harmless("how adapters start, are scaled, loaded and merged"),
    ),
    Row(
        "template dataset eval_dataset dataset_* media_dir train_on_prompt mask_history streaming buffer_size \
         mix_strategy interleave_probs overwrite_cache preprocessing_* max_samples ignore_pad_token_for_loss val_size \
         eval_* tool_format default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system \
         disable_shuffling split_special_tokens",
        Sense::Harmless("which data, and how it is read"),
    ),
    Row(
        "trust_remote_code cache_dir use_fast_tokenizer model_revision low_cpu_mem_usage hf_hub_token ms_hub_token \
         om_hub_token compute_dtype device_map use_kv_cache quantization_device_map",
        Sense::Harmless("where the model comes from"),
    ),
    Row(
        "plot_loss early_stopping_steps include_effective_tokens_per_second use_swanlab swanlab_* \
         ray_* master_addr master_port enable_torch_profiler profile* resources_per_worker placement_strategy",
        Sense::Harmless("what is logged, and who starts the run"),
    ),
    Row(
        "do_sample temperature top_p top_k num_beams repetition_penalty length_penalty skip_special_tokens max_length",
        Sense::Harmless("how evaluation generates"),
    ),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    let model = reader.text("model_name_or_path").map(str::to_owned);
    if value.get("infer_backend").is_some() && ["stage", "do_train"].iter().all(|key| value.get(key).is_none()) {
        return generation(reader, model);
    }
    if value.get("export_dir").is_some() {
        reader.refuse("export_dir", "a merge", "`vramcast train MODEL --lora --merge` simulates one");
    }
    if reader.switch("do_train") == Some(false) || reader.is_on("do_predict") && reader.get("do_train").is_none() {
        reader.refuse("do_train", "off", "`vramcast infer` is for generation");
    }
    match reader.text("stage") {
        None | Some("sft" | "pt" | "dpo" | "kto" | "rm") => {}
        Some(other) => reader.refuse("stage", other, "another task: only sft, pt, dpo, kto and rm are simulated"),
    }
    let wanted = reader.text("stage").filter(|stage| ["dpo", "kto", "rm"].contains(stage)).map(str::to_owned);
    let loss = reader.text("pref_loss").map(str::to_owned);
    let adapter = match reader.text("finetuning_type") {
        None | Some("lora") => {
            reader.set("adapter.method", "lora");
            true
        }
        Some("oft") => {
            oft(&mut reader);
            true
        }
        Some("full") => false,
        Some(other) => {
            reader.refuse("finetuning_type", other, "use lora, oft or full");
            false
        }
    };
    if reader.was_set("adapter.method").is_some_and(|method| method == "lora") {
        lora(&mut reader);
    }
    vision(&mut reader, adapter);
    let _ = quantisation(&mut reader);
    optimizers(&mut reader);
    let deepspeed = arguments(&mut reader, adapter, None);
    megatron(&mut reader);
    // Steps inside backward leave nothing to clip.
    if reader.was_set("optimizer_in_backward").is_some() {
        reader.set("clip", false);
    }
    if reader.is_on("pure_bf16") {
        reader.set("weights", "bf16");
        reader.set("autocast", Value::Null);
        if adapter {
            reader.set("adapter.dtype", "bf16");
        }
    }
    if reader.is_on("disable_gradient_checkpointing") {
        reader.set("checkpointing", "off");
    }
    if let Some(reentrant) = reader.switch("use_reentrant_gc") {
        reader.set("checkpoints.reentrant", reentrant);
    }
    if reader.is_on("use_unsloth_gc") {
        reader.set("checkpoints.offload", true);
    }
    if reader.is_on("enable_liger_kernel") {
        reader.set("kernels", "liger");
    }
    if reader.is_on("packing") || reader.is_on("neat_packing") {
        reader.notes.push("packing: rows are taken to be full".into());
    }
    attention(&mut reader, "flash_attn");
    // Megatron's layers know nothing of the framework's checkpoints and types.
    let framework = Some("llama-factory").filter(|_| reader.was_set("parallel.engine.megatron").is_none());
    if framework.is_some() {
        job::evaluation(&mut reader);
        // Its metric keeps the likeliest tokens (train/sft/metric.py).
        if reader.is_on("compute_accuracy") && reader.was_set("job.evaluation.batch_size").is_some() {
            reader.set("job.evaluation.metrics", true);
            reader.set("job.evaluation.argmax", true);
        }
    }
    if let Some(stage) = wanted {
        preference::read(&mut reader, "stage", &stage, loss.as_deref());
    }
    reader.finish(framework, model).map(|read| Imported { deepspeed, ..read })
}

/// `llamafactory-cli chat` and `api`.
fn generation(mut reader: Reader<'_>, model: Option<String>) -> Result<Imported, Vec<Fault>> {
    let (vllm, sglang) = match reader.text("infer_backend") {
        Some("vllm") => (true, false),
        Some("sglang") => (false, true),
        Some("huggingface") | None => (false, false),
        Some(other) => {
            reader.refuse("infer_backend", other, "use huggingface, vllm or sglang");
            (false, false)
        }
    };
    let name = if vllm { "vllm" } else { "sglang" };
    if vllm || sglang {
        reader.set("engine", name);
        reader.number_to(&format!("{name}_maxlen"), "context");
        let share = if vllm { "vllm_gpu_util" } else { "sglang_mem_fraction" };
        if let Some(share) = reader.real(share) {
            reader.set("gpu_memory_utilization", share);
        }
        reader.number_to("sglang_tp_size", "tensor_parallel_size");
        if reader.is_on("vllm_enforce_eager") {
            reader.set("enforce_eager", true);
        }
        if let Some(options) = reader.part(&format!("{name}_config")) {
            reader.refuse(&format!("{name}_config"), &super::table::shown(options), "say it by flags");
        }
    } else {
        // `GeneratingArguments` begins with 1,024 and with sampling.
        let tokens = reader.number("max_new_tokens").unwrap_or(1024);
        reader.set("new_tokens", tokens);
        if reader.switch("do_sample").unwrap_or(true) {
            reader.set("choice", "sample");
        }
        let _ = quantisation(&mut reader);
    }
    reader.finish(None, model).map(|read| Imported { generates: true, ..read })
}

/// Megatron-Core below it, by Megatron-Bridge or mcore_adapter.
fn megatron(reader: &mut Reader<'_>) {
    let sizes = [
        ("tensor_model_parallel_size", "parallel.mesh.tp"),
        ("pipeline_model_parallel_size", "parallel.mesh.pp"),
        ("context_parallel_size", "parallel.mesh.cp"),
        ("expert_model_parallel_size", "parallel.mesh.ep"),
        ("virtual_pipeline_model_parallel_size", "parallel.engine.megatron.virtual_pipeline"),
    ];
    if sizes.iter().all(|(key, _)| reader.get(key).is_none()) && !reader.is_on("use_megatron_bridge") {
        return;
    }
    let adapter = reader.was_set("adapter.method").is_some();
    reader.changes.retain(|(place, _)| {
        !["adapter", "autocast", "clip", "check", "frozen"].iter().any(|start| place.starts_with(start))
    });
    reader.set("parallel.engine.megatron", serde_json::json!({}));
    if adapter {
        let rank = reader.number("lora_rank").unwrap_or(8);
        reader.set("parallel.engine.megatron.lora.dim", rank);
    }
    reader.set("weights", "bf16");
    for (key, place) in sizes {
        if let Some(size) = reader.number(key).filter(|size| *size > 1) {
            reader.set(place, size);
        }
    }
    for (key, place) in [
        ("sequence_parallel", "parallel.mesh.sequence_parallel"),
        ("use_distributed_optimizer", "parallel.engine.megatron.distributed_optimizer"),
        ("overlap_grad_reduce", "parallel.engine.megatron.overlap_grad_reduce"),
    ] {
        if let Some(on) = reader.switch(key) {
            reader.set(place, on);
        }
    }
    if reader.text("recompute_granularity") == Some("full") {
        let layers = reader.number("recompute_num_layers").unwrap_or(1);
        let how = reader.text("recompute_method").unwrap_or("uniform").to_owned();
        reader.set("parallel.engine.megatron.recompute", serde_json::json!({how: layers}));
    } else if reader.text("recompute_granularity") == Some("selective") {
        reader.set("parallel.engine.megatron.recompute", serde_json::json!({"selective": ["core_attn"]}));
    }
}

fn lora(reader: &mut Reader<'_>) {
    reader.number_to("lora_rank", "adapter.rank");
    // Twice the rank where it is not said (hparams/finetuning_args.py).
    let rank = reader.number("lora_rank").unwrap_or(8);
    let alpha = reader.real("lora_alpha").unwrap_or(rank as f64 * 2.0);
    reader.set("adapter.alpha", alpha);
    if let Some(dropout) = reader.real("lora_dropout") {
        reader.set("adapter.dropout", dropout);
    }
    reader.targets_to("lora_target", "adapter.targets");
    if let Some(saved) = reader.text("additional_target") {
        let names: Vec<Value> = saved.split(',').map(|name| name.trim().into()).collect();
        reader.set("adapter.modules_to_save", names);
    }
    if reader.is_on("use_dora") {
        reader.set("adapter.dora", true);
    }
}

fn oft(reader: &mut Reader<'_>) {
    reader.set("adapter.method", "other");
    // Its own default where neither is said (hparams/finetuning_args.py).
    let block = reader.number("oft_block_size").unwrap_or(32);
    reader.set("adapter.oft.block_size", block);
    let rank = reader.number("oft_rank").unwrap_or(0);
    reader.set("adapter.oft.rank", rank);
    reader.targets_to("oft_target", "adapter.oft.targets");
    if reader.was_set("adapter.oft.targets").is_none() {
        reader.set("adapter.oft.targets", "all-linear");
    }
}

fn optimizers(reader: &mut Reader<'_>) {
    for (key, kind, usual) in [("galore", "galore-adamw", 16), ("apollo", "apollo-adamw", 16)] {
        if !reader.is_on(&format!("use_{key}")) {
            continue;
        }
        let targets = reader.text(&format!("{key}_target")).unwrap_or("all");
        if targets != "all" {
            reader.refuse(&format!("{key}_target"), targets, "use all");
        }
        reader.set("optimizer.kind", kind);
        reader.set("optimizer.implementation", "foreach");
        let rank = reader.number(&format!("{key}_rank")).unwrap_or(usual);
        reader.set("optimizer.rank", rank);
        if reader.is_on(&format!("{key}_layerwise")) {
            reader.set("optimizer_in_backward", true);
        }
    }
    for (key, kind) in [("use_adam_mini", "adam-mini"), ("use_muon", "muon")] {
        if reader.is_on(key) {
            reader.set("optimizer.kind", kind);
            reader.set("optimizer.implementation", "foreach");
        }
    }
}

/// What reads images: its tower and the projector behind it are not trained unless the file says so (hparams,
/// finetuning_args.py), and adapters stay out of them.
fn vision(reader: &mut Reader<'_>, adapter: bool) {
    let tower = reader.switch("freeze_vision_tower").unwrap_or(true);
    let projector = reader.switch("freeze_multi_modal_projector").unwrap_or(true);
    if reader.is_on("freeze_language_model") {
        reader.refuse("freeze_language_model", "true", "leave it out: it is not simulated");
    }
    match (tower, projector) {
        (true, true) if adapter && reader.was_set("adapter.method").is_some_and(|method| method == "lora") => {
            reader.set("adapter.exclude", OUTSIDE_TEXT);
        }
        (true, true) if adapter => {}
        (true, true) => reader.set("frozen", vec!["vision-if-any", "projector-if-any"]),
        (false, false) => {}
        (tower, projector) => {
            let what = format!("{tower} with freeze_multi_modal_projector: {projector}");
            reader.refuse("freeze_vision_tower", &what, "freeze both or none");
        }
    }
}

/// Modules of what reads images, as a pattern of PEFT.
const OUTSIDE_TEXT: &str =
    r".*(^|\.)(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|mm_projector|connector)\..*";

fn quantisation(reader: &mut Reader<'_>) -> bool {
    let (method, kind) = (reader.text("quantization_method"), reader.text("quantization_type"));
    let double = reader.switch("double_quantization");
    let Some(bits) = reader.number("quantization_bit") else { return false };
    let scheme = match (method.unwrap_or("bnb"), bits) {
        ("bnb" | "bitsandbytes", 4) => kind.unwrap_or("nf4"),
        ("bnb" | "bitsandbytes", 8) => "int8",
        (method, bits) => {
            reader.refuse("quantization_method", &format!("{method} with {bits} bits"), "use bnb with 4 or 8 bits");
            return true;
        }
    };
    reader.set("quantization.scheme", scheme);
    if bits == 8 {
        reader.set("quantization.double", false);
    } else if let Some(double) = double {
        reader.set("quantization.double", double);
    }
    true
}
