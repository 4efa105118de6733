//! axolotl's YAML (axolotl 0.19, utils/schemas and integrations/*/args.py).

use serde_json::Value;

use super::reader::Reader;
use super::sharding::{self, FSDP_KEYS, Types};
use super::table::{Format, Row, Sense, is_off, shown};
use super::trainer::{self, attention, optimizer, reentrant};
use super::{Beside, Imported, preference};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "axolotl",
    version: "0.19",
    source: "axolotl, utils/schemas/*.py and integrations/*/args.py",
    keys: &[KEYS, FSDP_KEYS],
};

const RL: &str = "leave it out: what is simulated is supervised fine-tuning of one model";
const TASK: &str = "leave it out: it is another task than language modelling";
const KERNELS: &str =
    "axolotl's own kernels are not simulated: transformers' code runs in their place, which keeps more";

const KEYS: &[Row] = &[
    Row("base_model", Sense::Read("the model")),
    Row("micro_batch_size", Sense::Read("batch.batch_size")),
    Row("gradient_accumulation_steps", Sense::Whole("gradient_accumulation")),
    Row("sequence_len", Sense::Whole("batch.seq_len")),
    Row("sample_packing pad_to_sequence_len multipack_real_batches pretrain_multipack_attn", Sense::Read("batch.mask")),
    Row(
        "adapter lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save \
         lora_target_parameters peft_layers_to_transform peft_use_dora peft_autocast_adapter_dtype",
        Sense::Read("adapter"),
    ),
    Row(
        "load_in_4bit load_in_8bit bnb_config_kwargs.bnb_4bit_use_double_quant bnb_config_kwargs.bnb_4bit_quant_type \
         bnb_config_kwargs quantize_moe_experts",
        Sense::Read("quantization"),
    ),
    Row("bf16 fp16 bfloat16 float16 float32 torch_dtype", Sense::Read("weights, autocast")),
    Row(
        "gradient_checkpointing gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant \
         activation_offloading",
        Sense::Read("checkpointing, checkpoints"),
    ),
    Row("optimizer optim_args optim_target_modules", Sense::Read("optimizer")),
    Row("max_grad_norm", Sense::Read("clip")),
    Row(
        "attn_implementation flash_attention sdp_attention eager_attention xformers_attention flex_attention \
         sage_attention",
        Sense::Read("attention"),
    ),
    Row("plugins cut_cross_entropy liger_*", Sense::Read("kernels, loss.kind")),
    Row("deepspeed deepspeed.*", Sense::Read("parallel.engine.deepspeed: the file it names")),
    Row("fsdp fsdp_config fsdp_version", Sense::Read("parallel.engine.fsdp1, parallel.engine.fsdp2")),
    Row(
        "tensor_parallel_size context_parallel_size dp_shard_size dp_replicate_size sequence_parallel_degree",
        Sense::Read("parallel.mesh"),
    ),
    Row(
        "unfrozen_parameters",
        Sense::Said("all parameters are trained in the simulation, which is more; --freeze leaves some out"),
    ),
    Row(
        "model_quantization_config model_quantization_config_kwargs.dequantize",
        Sense::Read("weights that are dequantised when they are loaded"),
    ),
    Row("freeze_mm_modules", Sense::Read("frozen")),
    Row("rl reward_model precompute_ref_log_probs cpo_alpha", Sense::Read("objective, as TRL's trainer of it")),
    Row(preference::NUMBERS, Sense::Harmless("numbers in a loss")),
    Row("trl.* trl ebft* kto_* dpo_* simpo_* cpo_* vllm vllm.* rpo_alpha nemo_gym_*", Sense::Refused(RL)),
    Row("process_reward_model num_labels diffusion diffusion.*", Sense::Refused(TASK)),
    Row("kd_* hatchery*", Sense::Refused("leave it out: a teacher beside the model is not simulated")),
    Row(
        "torch_compile",
        Sense::Said("torch.compile is not simulated: what runs is eager, which mostly keeps more for backward"),
    ),
    Row("torch_compile_* flex_attn_compile_kwargs.*", Sense::Harmless("options of a compiler")),
    Row(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel",
        Sense::Said("axolotl's fused LoRA kernels are not simulated; PEFT's keep more"),
    ),
    Row(
        "use_kernels use_scattermoe use_sonicmoe experts_implementation fused_attn_kernel expert_backend moe_* \
         use_dsv4_kernels use_glm_dsa_kernels dsv4_* gemma4_* nonexpert_quantization nvfp4_*",
        Sense::Said(KERNELS),
    ),
    Row(
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv s2_attention",
        Sense::Said("flash-attn's fused layers are not simulated: transformers' own keep more"),
    ),
    Row(
        "llama4_linearized_experts",
        Sense::Said("experts as separate linears are not simulated: one tensor of all is"),
    ),
    Row("tiled_mlp tiled_mlp_*", Sense::Said("tiled MLPs are not simulated: a whole one keeps more")),
    Row(
        "chunked_cross_entropy chunked_cross_entropy_*",
        Sense::Said("the chunked loss is not simulated: whole logits are, which are more"),
    ),
    Row(
        "layer_offloading selective_checkpointing* lisa_* relora relora_* use_onebitllms gptq* \
         model_quantization_config* quantization* mora* dense_mixer llmcompressor* unsloth_* spectrum_* \
         expert_parallel_*",
        Sense::Refused("leave it out: it is not simulated"),
    ),
    Row("max_packed_sequence_len", Sense::Refused("it is deprecated: use sample_packing")),
    Row(
        "resize_token_embeddings_to_32x added_tokens_overrides tokens tokens.* shrink_embeddings \
         mean_resizing_embeddings",
        Sense::Said("rows that are added to the embedding are not simulated"),
    ),
    Row(
        "overrides_of_model_config* model_config* overrides_of_model_kwargs* model_kwargs* rope_scaling* rope_theta \
         cls_model_config",
        Sense::Said("the model is taken as it is published"),
    ),
    Row("fp8 fp8_*", Sense::Said("products in fp8 are not simulated: those in bf16 are, which keep more")),
    Row("qat*", Sense::Said("fake quantisation is not simulated: the plain model keeps less")),
    Row("use_eaft eaft_*", Sense::Said("entropies of the loss are not simulated")),
    Row(
        "noisy_embedding_alpha neftune_noise_alpha",
        Sense::Said("noise on embeddings is not simulated: one tensor of the size of a layer's input more"),
    ),
    Row("embeddings_skip_upcast", Sense::Harmless("embeddings are simulated in the type of the weights")),
    Row("auto_find_batch_size", Sense::Said("the batch size that is written is taken")),
    Row(
        "batch_size",
        Sense::Said(
            "gradient_accumulation_steps follows from it and the number of cards: the file's, or one, is taken",
        ),
    ),
    Row(
        "reinit_weights peft.* loraplus_* lora_fan_in_fan_out lora_model_dir peft_use_rslora \
         peft_init_lora_weights lora_alpha_pattern qlora_sharded_model_loading lora_on_cpu merge_* \
         peft_ensure_weight_tying lora_out_dir",
        Sense::Harmless("how adapters start, are scaled, loaded and merged"),
    ),
    Row(
        "lora_rank_pattern peft_layers_pattern peft_layer_replication peft_trainable_token_indices",
        Sense::Refused("leave it out: adapters of several kinds are not simulated"),
    ),
    Row(
        "datasets pretraining_dataset dataset_* datasets.* shuffle_* push_dataset_to_hub \
         skip_prepare_dataset num_dataset_shards_to_save streaming* curriculum_sampling train_on_inputs \
         group_by_length sample_packing_* eval_sample_packing excess_length_strategy min_sample_len max_prompt_len \
         pad_to_multiple_of total_num_tokens total_supervised_tokens is_preprocess preprocess_iterable \
         remove_unused_columns dataloader_* data_* datasets_* sample_generation_*",
        Sense::Harmless("which data, and how it is read"),
    ),
    Row(
        "image_size image_resize_algorithm role_boundaries processor_kwargs*",
        Sense::Harmless("images of a batch are given by {batch.images}"),
    ),
    Row(
        "chat_template* special_tokens* tokenizer_* tokenizer* eot_tokens default_system_message fix_untrained_tokens \
         trust_remote_code processor_type model_type type_of_model revision_of_model base_model_config \
         base_model_ignore_patterns is_* experimental_skip_move_to_device low_cpu_mem_usage device device_map* \
         hf_use_auth_token branch force_download",
        Sense::Harmless("the tokenizer, and where the model comes from"),
    ),
    Row(
        "learning_rate lr_* cosine_* warmup_* weight_decay adam_* num_epochs max_steps eta_min embedding_lr* jagged_* \
         grokfast_* seed loss_watchdog_* early_stopping_patience full_finetune tf32 dion_*",
        Sense::Harmless("the course of training, not its memory"),
    ),
    Row("val_set_size test_datasets eval_batch_size eval_strategy evaluation_strategy", Sense::Read("job.evaluation")),
    Row(
        "eval_* evals_per_epoch do_* bench_* metric_for_best_model greater_is_better \
         load_best_model_at_end lm_eval_* include_tokens_per_second include_tkps",
        Sense::Harmless("evaluation, which a step does not see"),
    ),
    Row(
        "output_dir save_* saves_per_epoch saves_* hub_* resume_from_checkpoint auto_resume_from_checkpoints \
         dynamic_checkpoint* save_safetensors hf_*",
        Sense::Harmless("what is saved and where"),
    ),
    Row(
        "wandb_* use_wandb mlflow_* use_mlflow comet_* use_comet swanlab_* use_swanlab trackio_* use_trackio \
         use_tensorboard otel_* use_otel_metrics gradio_* logging_* debug profiler_steps* report_to use_ray ray_* \
         resources_per_worker project_name tensorboard_*",
        Sense::Harmless("what is logged, and who starts the run"),
    ),
    Row(
        "strict local_rank world_size ddp ddp_* accelerator_config* gc_steps gc_collect_steps torch_empty_cache_steps \
         torchdistx_path flash_optimum trainer_cls test_value axolotl_config_path capabilities env_capabilities \
         strategy lora_kernels*",
        Sense::Harmless("no memory of a step"),
    ),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    let model = reader.text("base_model").map(str::to_owned);
    let wanted = reader.text("rl").map(str::to_owned);
    let rewards = reader.get("reward_model").is_some_and(preference::rewards);
    packing(&mut reader);
    let (four, eight) = (reader.is_on("load_in_4bit"), reader.is_on("load_in_8bit"));
    if four && eight {
        reader.faults.add(super::both("load_in_4bit", "load_in_8bit"));
    }
    let adapter = match reader.text("adapter") {
        None | Some("") => false,
        Some("lora" | "qlora" | "dora") => true,
        Some(other) => {
            reader.refuse("adapter", other, "use lora or qlora");
            false
        }
    };
    if (four || eight) && !adapter {
        let key = if four { "load_in_4bit" } else { "load_in_8bit" };
        reader.say(
            key,
            "axolotl quantises under an adapter only (loaders/model.py): weights are whole here, and trained",
        );
    }
    if (four || eight) && adapter {
        reader.set("quantization.scheme", if eight { "int8" } else { "nf4" });
        if let Some(double) = reader.switch("bnb_config_kwargs.bnb_4bit_use_double_quant") {
            reader.set("quantization.double", double);
        }
        let spreads = ["fsdp", "fsdp_config", "deepspeed"].iter().any(|key| reader.has(key));
        match reader.is_on("quantize_moe_experts") {
            true if eight || spreads => reader.say(
                "quantize_moe_experts",
                "experts in 8 bits, or in 4 under an engine, are not simulated: they stay whole, which is far more",
            ),
            true => reader.set("quantization.experts", true),
            false => {}
        }
    }
    if adapter {
        lora(&mut reader);
    }
    if let Some(name) = reader.text("model_quantization_config")
        && !reader.is_on("model_quantization_config_kwargs.dequantize")
    {
        reader.refuse("model_quantization_config", name, "it is simulated with dequantize: true");
    }
    let compute = precision(&mut reader);
    checkpoints(&mut reader);
    if let Some(name) = reader.text("optimizer") {
        optimizer(&mut reader, "optimizer", name);
    }
    if let Some(norm) = reader.real("max_grad_norm") {
        reader.set("clip", norm > 0.0);
    }
    attentions(&mut reader);
    losses(&mut reader);
    if reader.is_on("freeze_mm_modules") && !adapter {
        reader.set("frozen", vec!["vision-if-any", "projector-if-any"]);
    }
    evaluation(&mut reader);
    match wanted {
        Some(word) => preference::read(&mut reader, "rl", &word, None),
        None if rewards => preference::read(&mut reader, "reward_model", "reward", None),
        None => {}
    }
    let deepspeed = spread(&mut reader, &Types { compute, adapter });
    reader.finish(Some("axolotl"), model).map(|read| Imported { deepspeed, ..read })
}

/// There is one where rows are held back for it, unless it is switched off; without metrics of its own, on micro-batches
/// (core/builders/base.py).
fn evaluation(reader: &mut Reader<'_>) {
    let held = reader.real("val_set_size").is_some_and(|share| share > 0.0)
        || reader.get("test_datasets").is_some_and(|list| !is_off(list));
    let off = ["eval_strategy", "evaluation_strategy"].iter().any(|key| reader.text(key) == Some("no"));
    reader.number_to("micro_batch_size", "batch.batch_size");
    let micro = reader.was_set("batch.batch_size").and_then(super::reader::whole).unwrap_or(1);
    let rows = reader.number("eval_batch_size").unwrap_or(micro);
    if held && !off {
        reader.set("job.evaluation.batch_size", rows);
    }
}

/// Who spreads the model, and over which axes.
fn spread(reader: &mut Reader<'_>, types: &Types<'_>) -> Option<Value> {
    let said = |reader: &mut Reader<'_>, key: &str| reader.get(key).is_some_and(|value| !is_off(value));
    let degree = |key: &str, place: &str, reader: &mut Reader<'_>| {
        let size = reader.number(key).filter(|size| *size > 1);
        if let Some(size) = size {
            reader.set(place, size);
        }
        size.is_some()
    };
    let split = degree("tensor_parallel_size", "parallel.mesh.tp", reader)
        | degree("context_parallel_size", "parallel.mesh.cp", reader)
        | degree("sequence_parallel_degree", "parallel.mesh.cp", reader)
        | degree("dp_shard_size", "parallel.mesh.dp_shard", reader)
        | degree("dp_replicate_size", "parallel.mesh.dp_replicate", reader);
    if reader.was_set("parallel.mesh.cp").is_some() && reader.was_set("attention").is_some_and(|kind| kind != "sdpa") {
        // integrations/ring_flash_attn: rings of flash attention, whose blocks are as large.
        reader.set("attention", "sdpa");
        reader.say("context_parallel_size", "rings of flash attention are simulated as torch's ring of SDPA");
    }
    if said(reader, "fsdp") || said(reader, "fsdp_config") || split {
        let newer = ["reshard_after_forward", "fsdp_reshard_after_forward"];
        let two = newer.iter().any(|key| said(reader, &format!("fsdp_config.{key}"))) || split;
        let version = reader.number("fsdp_version").unwrap_or(if two { 2 } else { 1 });
        sharding::fsdp(reader, version, types);
    }
    let document = said(reader, "deepspeed").then(|| reader.referred("deepspeed")).flatten()?;
    Some(sharding::deepspeed(reader, document, types.compute))
}

/// Packed batches are one row of `micro_batch_size * sequence_len` tokens with positions for each sample.
fn packing(reader: &mut Reader<'_>) {
    if reader.is_on("sample_packing") {
        reader.set("batch.mask", false);
        reader.notes.push("sample_packing: the batch is simulated as full rows without a mask".into());
    }
}

/// What axolotl has besides PEFT's own words.
fn lora(reader: &mut Reader<'_>) {
    trainer::lora(reader, "peft_use_dora");
    if reader.is_on("lora_target_linear") {
        reader.set("adapter.targets", "all-linear");
    }
    if let Some(layers) = reader.get("peft_layers_to_transform").filter(|layers| !is_off(layers)) {
        reader.set("adapter.layers_to_transform", layers.clone());
    }
    if reader.text("adapter") == Some("dora") {
        reader.set("adapter.dora", true);
    }
    if reader.switch("peft_autocast_adapter_dtype") == Some(false) {
        reader.set("adapter.dtype", Value::Null);
        reader.notes.push("peft_autocast_adapter_dtype: false is read as the type of the weights".into());
    }
}

/// What is computed in; `auto` is bf16 where the card has it (utils/config/__init__.py).
fn precision(reader: &mut Reader<'_>) -> Option<&'static str> {
    let (bf16, fp16) = (reader.get("bf16"), reader.is_on("fp16"));
    let (pure_bf16, pure_fp16) = (reader.is_on("bfloat16"), reader.is_on("float16"));
    let off = bf16.is_some_and(|value| *value == false || value == "false");
    if fp16 && bf16.is_some_and(|value| *value == true || value == "true" || value == "full") {
        reader.faults.add(super::both("bf16", "fp16"));
    }
    if pure_bf16 || pure_fp16 {
        reader.set("weights", if pure_bf16 { "bf16" } else { "fp16" });
        reader.set("autocast", Value::Null);
        return Some(if pure_bf16 { "bf16" } else { "fp16" });
    }
    if fp16 {
        reader.set("weights", "fp16");
        reader.set("autocast", "fp16");
        return Some("fp16");
    }
    if off {
        reader.set("weights", "fp32");
        reader.set("autocast", Value::Null);
        return None;
    }
    if bf16.is_some_and(|how| how == "full") {
        reader.set("autocast", Value::Null);
    }
    Some("bf16")
}

fn checkpoints(reader: &mut Reader<'_>) {
    match reader.get("gradient_checkpointing") {
        Some(Value::Bool(on)) => reader.set("checkpointing", if *on { "full" } else { "off" }),
        Some(Value::String(how)) if ["offload", "unsloth", "offload_disk"].contains(&how.as_str()) => {
            reader.set("checkpointing", "full");
            reader.set("checkpoints.offload", true);
        }
        Some(other) => reader.refuse("gradient_checkpointing", &shown(other), "use true, false or offload"),
        None => {}
    }
    reentrant(reader);
    match reader.get("activation_offloading") {
        None | Some(Value::Bool(false)) => {}
        Some(_) => {
            reader.say("activation_offloading", "what forward keeps stays on the card in the simulation, which is more")
        }
    }
}

fn attentions(reader: &mut Reader<'_>) {
    attention(reader, "attn_implementation");
    for (key, how) in [
        ("flash_attention", "flash2"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
        ("flex_attention", "flex"),
    ] {
        if reader.is_on(key) {
            reader.set("attention", how);
        }
    }
    if reader.is_on("xformers_attention") {
        reader.set("attention", "sdpa");
        reader.say(
            "xformers_attention",
            "it is simulated as SDPA's memory-efficient kernel, which torch took over from it",
        );
    }
    if reader.is_on("sage_attention") {
        reader.refuse("sage_attention", "true", "use sdpa or flash_attention_2");
    }
}

fn losses(reader: &mut Reader<'_>) {
    let mut liger = false;
    for key in
        ["liger_fused_linear_cross_entropy", "liger_rms_norm", "liger_glu_activation", "liger_rope", "liger_swiglu"]
    {
        liger |= reader.is_on(key);
    }
    let plugins: Vec<&str> = match reader.get("plugins") {
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let has = |name: &str| plugins.iter().any(|plugin| plugin.contains(name));
    let cut = reader.switch("cut_cross_entropy");
    if has("CutCrossEntropy") && cut != Some(false) {
        reader.set("loss.kind", "cut-cross-entropy");
    }
    if liger || has("LigerPlugin") {
        reader.set("kernels", "liger");
        reader.set("loss.kind", "standard");
    }
    const KNOWN: [&str; 4] = ["CutCrossEntropy", "LigerPlugin", "KernelsPlugin", "SwanLabPlugin"];
    const IDLE: [&str; 3] = ["LMEval", "SpectrumPlugin", "GrokfastPlugin"];
    for plugin in plugins.iter().filter(|name| !KNOWN.iter().chain(&IDLE).any(|known| name.contains(known))) {
        reader.refuse("plugins", plugin, "leave it out: it is not simulated");
    }
}
