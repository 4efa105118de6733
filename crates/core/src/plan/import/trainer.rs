//! Arguments of transformers' `Trainer` and of TRL's scripts (transformers 5.17 training_args.py; trl 1.16
//! trainer/{sft,model,base}_config.py and scripts/utils.py).

use serde_json::{Value, json};

use super::reader::Reader;
use super::sharding::{self, FSDP_KEYS, Types};
use super::table::{Format, Row, Sense};
use super::{Beside, Imported, job, trl};
use crate::plan::{Fault, TaskKind};

pub(super) const TRAINER: Format = Format {
    title: "TrainingArguments",
    version: "5.17",
    source: "transformers, training_args.py",
    keys: &[job::KEYS, KEYS, MODEL, FSDP_KEYS],
};

pub(super) const TRL: Format = Format {
    title: "TRL",
    version: "1.16",
    source: "trl, trainer/*_config.py, experimental/*/*_config.py and scripts/utils.py",
    keys: &[job::PACKING, TRL_KEYS, trl::TASK_KEYS, job::KEYS, KEYS, MODEL, FSDP_KEYS],
};

/// Keys of `TrainingArguments`, of 5.17 and of 4.x.
pub(super) const KEYS: &[Row] = &[
    Row("per_device_train_batch_size per_gpu_train_batch_size", Sense::Whole("batch.batch_size")),
    Row("gradient_accumulation_steps", Sense::Whole("gradient_accumulation")),
    Row("bf16 fp16", Sense::Read("autocast")),
    Row(
        "gradient_checkpointing gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant",
        Sense::Read("checkpointing, checkpoints.reentrant"),
    ),
    Row(
        "optim optim_args optim_target_modules adafactor",
        Sense::Read("optimizer.kind, optimizer.implementation, optimizer.rank"),
    ),
    Row("max_grad_norm", Sense::Read("clip")),
    Row("use_liger_kernel use_liger", Sense::Read("kernels")),
    Row("deepspeed", Sense::Read("parallel.engine.deepspeed: the file or object it names")),
    Row("deepspeed.*", Sense::Read("parallel.engine.deepspeed: the file or object it names")),
    Row("fsdp fsdp_config", Sense::Read("parallel.engine.fsdp1, parallel.engine.fsdp2")),
    Row("fsdp_transformer_layer_cls_to_wrap", Sense::Harmless("every layer is wrapped")),
    Row("ddp_bucket_cap_mb", Sense::Read("parallel.engine.ddp.bucket_cap_mb on several cards")),
    Row(
        "group_by_length train_sampling_strategy batch_sampler multi_dataset_batch_sampler prompts* router_mapping*",
        Sense::Harmless("which samples meet, where all are as long as the longest"),
    ),
    Row(
        "torch_compile",
        Sense::Read("torch_compile; eager code stands in beside Liger, quantised weights and engines"),
    ),
    Row("torch_compile_mode", Sense::Read("torch_compile: reduce-overhead records CUDA graphs")),
    Row("torch_compile_*", Sense::Harmless("options of torch_compile")),
    Row(
        "neftune_noise_alpha",
        Sense::Said("noise on embeddings is not simulated: one tensor of the size of a layer's input more"),
    ),
    Row("label_smoothing_factor", Sense::Refused("leave it out: its loss is another one")),
    Row("auto_find_batch_size", Sense::Said("the batch size that is written is taken")),
    Row("liger_kernel_config*", Sense::Said("all of Liger's kernels are taken")),
    Row(
        "parallelism_config*",
        Sense::Refused("say the mesh by {parallel.mesh.tp}, {parallel.mesh.cp} and {parallel.mesh.dp_replicate}"),
    ),
    Row("use_cpu no_cuda use_mps_device use_ipex tpu_num_cores", Sense::Refused("only runs on a card are simulated")),
    Row(
        "sharded_ddp fp16_backend half_precision_backend fp16_opt_level",
        Sense::Said("apex and fairscale are not simulated: torch's own autocast is"),
    ),
    Row(
        "output_dir overwrite_output_dir save_* hub_* push_* resume_* restore_callback_states_from_checkpoint \
         load_best_model_at_end metric_for_best_model greater_is_better enable_jit_checkpoint",
        Sense::Harmless("what is saved and where"),
    ),
    Row(
        "logging_* log_* disable_tqdm report_to run_name project trackio_* swanlab_* use_swanlab \
         include_num_input_tokens_seen include_tokens_per_second debug skip_memory_metrics",
        Sense::Harmless("what is logged"),
    ),
    Row(
        "eval_* evaluation_strategy per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only \
         include_for_metrics include_inputs_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval do_eval \
         do_predict predict_with_generate generation_* jit_mode_eval",
        Sense::Harmless("evaluation, which a step does not see (--eval-batch-size simulates it)"),
    ),
    Row(
        "num_train_epochs max_steps learning_rate embedding_learning_rate learning_rate_mapping* lr_* warmup_* \
         weight_decay adam_* seed data_seed full_determinism tf32 average_tokens_across_devices",
        Sense::Harmless("the course of training, not its memory"),
    ),
    Row(
        "dataloader_* remove_unused_columns label_names length_column_name ignore_data_skip data_* dispatch_batches \
         split_batches",
        Sense::Harmless("how batches are read"),
    ),
    Row(
        "accelerator_config accelerator_config.* ddp_* local_rank torchdistx_path torch_empty_cache_steps use_cache \
         do_train mp_parameters past_index",
        Sense::Harmless("no memory of a step"),
    ),
];

/// What scripts say of their model.
const MODEL: &[Row] = &[
    Row("model_name_or_path model", Sense::Read("the model")),
    Row("dtype torch_dtype", Sense::Read("weights")),
    Row("attn_implementation", Sense::Read("attention")),
    Row(
        "model_revision revision trust_remote_code tokenizer_name tokenizer_* config_name cache_dir \
         use_fast_tokenizer token use_auth_token low_cpu_mem_usage",
        Sense::Harmless("where the model comes from"),
    ),
    Row(
        "dataset_* train_file validation_file test_file validation_split_percentage max_train_samples \
         max_eval_samples preprocessing_num_workers overwrite_cache streaming",
        Sense::Harmless("which data"),
    ),
    Row(
        "block_size model_max_length max_seq_len max_seq_length max_length max_source_length",
        Sense::Whole("batch.seq_len"),
    ),
];

/// TRL's own.
const TRL_KEYS: &[Row] = &[
    Row("max_length max_seq_length", Sense::Whole("batch.seq_len")),
    Row(
        "use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save use_dora",
        Sense::Read("adapter"),
    ),
    Row(
        "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        Sense::Read("quantization"),
    ),
    Row("loss_type", Sense::Read("loss.kind")),
    Row(
        "model_init_kwargs model_init_kwargs.dtype model_init_kwargs.torch_dtype \
         model_init_kwargs.attn_implementation",
        Sense::Read("weights, attention"),
    ),
    Row("model_init_kwargs.*", Sense::Harmless("how the model is loaded")),
    Row("lora_task_type use_rslora", Sense::Harmless("how adapters are scaled")),
    Row(
        "completion_only_loss assistant_only_loss train_on_*",
        Sense::Harmless("which positions count: every one is taken to"),
    ),
    Row(
        "dataset_* datasets chat_template_path eos_token pad_token truncation_mode shuffle_dataset packing_strategy \
         eval_packing ignore_bias_buffers max_samples streaming test_split_size columns",
        Sense::Harmless("which data, and how it is read"),
    ),
    Row("pad_to_multiple_of", Sense::Harmless("rows are as long as the longest already")),
    Row("router_aux_loss_coef", Sense::Said("the routers' loss is not simulated")),
    Row("activation_offloading", Sense::Said("what forward keeps stays on the card in the simulation, which is more")),
];

/// Keys only TRL has.
const MARKS: [&str; 8] = [
    "max_length",
    "max_seq_length",
    "use_peft",
    "packing",
    "padding_free",
    "loss_type",
    "lora_r",
    "dataset_text_field",
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let task =
        trl::task(value.as_object().unwrap_or(&Default::default()), beside.recipe).map_err(|fault| vec![fault])?;
    let mark = MARKS.iter().find(|key| value.get(key).is_some() && beside.tool != Some("trainer"));
    let is_trl = task.is_some() || beside.tool == Some("trl") || mark.is_some();
    let mut reader = Reader::new(if is_trl { &TRL } else { &TRAINER }, value, beside);
    if let Some(mark) = mark.filter(|_| beside.script && task.is_none() && beside.tool.is_none()) {
        let note = "the script is taken for one with TRL's SFTTrainer, whose own key it is: --framework hf-trainer takes the Trainer";
        reader.notes.push(format!("{mark}: {note}"));
    }
    // TRL's counts beside `use_peft` alone; scripts of all kinds have a rank that asks for adapters by itself.
    let asks = ["use_peft", "load_in_4bit", "load_in_8bit"].iter().any(|key| value.get(key).is_some());
    if let Some(rank) = reader.get("lora_r").filter(|rank| beside.script && !asks && !super::table::is_off(rank)) {
        reader.own("lora_r", rank);
    }
    let called = value.get("task").or_else(|| value.get("trainer")).and_then(Value::as_str).filter(|_| is_trl);
    if let Some(name) = called.filter(|name| beside.recipe.is_none() && TaskKind::called(name).is_none()) {
        let known = TaskKind::ALL.map(|(_, name, _)| name).join(", ");
        reader.faults.add(Fault::new("", format!("task: {name} is not one of {known}")));
    }
    // trl's script of PPO takes `model_name_or_path` for its tokenizer alone.
    let policy = reader.text("sft_model_path").or_else(|| reader.text("model_name_or_path"));
    let model = policy.or_else(|| reader.text("model")).map(str::to_owned);
    // A file may say them, and a program that hands over its model and its arguments knows them.
    for key in ["dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"] {
        dtype(&mut reader, key);
    }
    for key in ["attn_implementation", "model_init_kwargs.attn_implementation"] {
        attention(&mut reader, key);
    }
    job::around(&mut reader);
    if !is_trl {
        let deepspeed = arguments(&mut reader, false, None);
        return reader.finish(Some("hf-trainer"), model).map(|read| Imported { deepspeed, ..read });
    }
    let quantised = quantisation(&mut reader);
    let adapter = reader.is_on("use_peft") || quantised;
    if adapter {
        lora(&mut reader, "use_dora");
        // ModelConfig's own (trainer/model_config.py), which are not PEFT's.
        for (place, usual) in
            [("adapter.rank", 16.into()), ("adapter.alpha", 32.into()), ("adapter.dropout", json!(0.05))]
        {
            if reader.is_on("use_peft") && reader.was_set(place).is_none() {
                reader.set(place, usual);
            }
        }
    }
    // bf16 is on unless fp16 is (base_config.py).
    let deepspeed = arguments(&mut reader, adapter, Some("bf16"));
    match task {
        Some(task) => trl::read(&mut reader, task),
        None => job::packing(&mut reader),
    }
    reader.text("loss_type");
    reader.finish(Some("trl"), model).map(|read| Imported { deepspeed, ..read })
}

/// LoRA in the words of TRL's `ModelConfig`, which axolotl shares.
pub(super) fn lora(reader: &mut Reader<'_>, dora: &str) {
    reader.set("adapter.method", "lora");
    reader.number_to("lora_r", "adapter.rank");
    reader.real_to("lora_alpha", "adapter.alpha");
    if let Some(dropout) = reader.real("lora_dropout") {
        reader.set("adapter.dropout", dropout);
    }
    reader.targets_to("lora_target_modules", "adapter.targets");
    for (key, place) in
        [("lora_modules_to_save", "adapter.modules_to_save"), ("lora_target_parameters", "adapter.target_parameters")]
    {
        if let Some(names) = reader.get(key).filter(|names| !super::table::is_off(names)) {
            reader.set(place, names.clone());
        }
    }
    if reader.is_on(dora) {
        reader.set("adapter.dora", true);
    }
}

/// The keys that LLaMA-Factory shares; DeepSpeed's configuration where there is one. `usual`: what autocast computes in
/// where the file is silent.
pub(super) fn arguments(reader: &mut Reader<'_>, adapter: bool, usual: Option<&'static str>) -> Option<Value> {
    let (bf16, fp16) = (reader.switch("bf16"), reader.is_on("fp16"));
    if fp16 && bf16 == Some(true) {
        reader.faults.add(super::both("bf16", "fp16"));
    }
    let compute = match bf16 {
        _ if fp16 => Some("fp16"),
        Some(true) => Some("bf16"),
        Some(false) => None,
        None => usual,
    };
    if bf16.is_some() || fp16 {
        reader.set("autocast", compute.map_or(Value::Null, Into::into));
    }
    if let Some(on) = reader.switch("gradient_checkpointing") {
        reader.set("checkpointing", if on { "full" } else { "off" });
    }
    reentrant(reader);
    if let Some(name) = reader.text("optim") {
        optimizer(reader, "optim", name);
    } else if reader.is_on("adafactor") {
        optimizer(reader, "optim", "adafactor");
    }
    if let Some(norm) = reader.real("max_grad_norm") {
        reader.set("clip", norm > 0.0);
    }
    if reader.is_on("use_liger_kernel") || reader.is_on("use_liger") {
        reader.set("kernels", "liger");
        reader.set("loss.kind", "standard");
    }
    compiled(reader);
    let types = Types { compute, adapter };
    if reader.get("fsdp").is_some_and(|value| !super::table::is_off(value)) {
        if let Some(document) = reader.text("fsdp_config").map(str::to_owned) {
            reader.refuse("fsdp_config", &document, "write its options into this file");
        }
        sharding::fsdp(reader, 2, &types);
        words(reader);
    } else {
        reader.part("fsdp_config");
    }
    reader.get("deepspeed").filter(|value| !super::table::is_off(value))?;
    let builtin = reader.text("deepspeed").filter(|_| reader.title() == "ms-swift").and_then(super::shipped::swift);
    let document = builtin.or_else(|| reader.referred("deepspeed"))?;
    Some(sharding::deepspeed(reader, document, compute))
}

/// `torch_compile`, as far as a compiled graph is modelled.
fn compiled(reader: &mut Reader<'_>) {
    if !reader.is_on("torch_compile") {
        return;
    }
    let spread =
        ["fsdp", "deepspeed"].iter().any(|key| reader.get(key).is_some_and(|value| !super::table::is_off(value)));
    let liger = reader.was_set("kernels").is_some_and(|kernels| kernels == "liger");
    if spread || liger || reader.was_set("quantization.scheme").is_some() {
        return reader.say("torch_compile", "what runs is eager, which mostly keeps more for backward");
    }
    let graphs = reader.text("torch_compile_mode").is_some_and(|mode| mode == "reduce-overhead");
    reader.set("torch_compile", if graphs { "reduce-overhead" } else { "model" });
}

/// `fsdp: full_shard auto_wrap offload`, as it was written up to transformers 4.
fn words(reader: &mut Reader<'_>) {
    let one = reader.was_set("parallel.engine.fsdp1").is_some();
    let said = match reader.get("fsdp") {
        Some(Value::String(text)) => text.to_lowercase(),
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ").to_lowercase(),
        _ => String::new(),
    };
    for word in said.split([' ', ',']).filter(|word| !word.is_empty()) {
        match word {
            "full_shard" | "auto_wrap" | "true" => {}
            "offload" if one => reader.set("parallel.engine.fsdp1.offload", true),
            "offload" => reader.set("parallel.engine.fsdp2.offload", true),
            "shard_grad_op" if one => reader.set("parallel.engine.fsdp1.strategy", "grad-op"),
            "shard_grad_op" => reader.set("parallel.engine.fsdp2.reshard_after_forward", false),
            other => reader.refuse("fsdp", other, "use full_shard, shard_grad_op, offload and auto_wrap"),
        }
    }
}

/// `gradient_checkpointing_kwargs`.
pub(super) fn reentrant(reader: &mut Reader<'_>) {
    if let Some(reentrant) = reader.get("gradient_checkpointing_kwargs").and_then(|k| k.get("use_reentrant")) {
        reader.set("checkpoints.reentrant", reentrant.clone());
    }
}

/// `load_in_4bit` and its companions; whether there is any quantisation.
pub(super) fn quantisation(reader: &mut Reader<'_>) -> bool {
    let (four, eight) = (reader.is_on("load_in_4bit"), reader.is_on("load_in_8bit"));
    if four && eight {
        reader.faults.add(super::both("load_in_4bit", "load_in_8bit"));
    }
    let (kind, nested) = (reader.text("bnb_4bit_quant_type"), reader.switch("use_bnb_nested_quant"));
    if eight {
        reader.set("quantization.scheme", "int8");
    } else if four {
        reader.set("quantization.scheme", kind.unwrap_or("nf4"));
        if let Some(nested) = nested {
            reader.set("quantization.double", nested);
        }
        if let Some(storage) = reader.text("bnb_4bit_quant_storage").and_then(short).filter(|_| reader.spreads()) {
            reader.set("quantization.storage", storage);
        }
    }
    four || eight
}

/// A type of torch as plans spell it.
pub(super) fn short(name: &str) -> Option<&'static str> {
    match name.trim_start_matches("torch.").to_lowercase().as_str() {
        "bfloat16" | "bf16" => Some("bf16"),
        "float16" | "fp16" | "half" => Some("fp16"),
        "float32" | "fp32" | "float" => Some("fp32"),
        _ => None,
    }
}

/// The type a model is loaded in.
pub(super) fn dtype(reader: &mut Reader<'_>, key: &str) {
    if let Some(name) = reader.text(key).and_then(short) {
        reader.set("weights", name);
    }
}

/// How attention is computed.
pub(super) fn attention(reader: &mut Reader<'_>, key: &str) {
    let Some(name) = reader.text(key) else { return };
    match name {
        "sdpa" | "auto" | "disabled" | "flash_attention_torch" => reader.set("attention", "sdpa"),
        "eager" => reader.set("attention", "eager"),
        "fa2" | "flash_attention_2" => reader.set("attention", "flash2"),
        "fa3" | "flash_attention_3" => reader.set("attention", "flash3"),
        "flex_attention" | "flex" => reader.set("attention", "flex"),
        "xformers" => {
            reader.set("attention", "sdpa");
            reader.say(
                key,
                "xformers' kernel is simulated as SDPA's memory-efficient one, which torch took over from it",
            );
        }
        // Kernels of the hub by these names are flash attention, built elsewhere.
        hub if hub.starts_with("kernels-community/") && hub.contains("flash-attn3") => {
            reader.set("attention", "flash3")
        }
        hub if hub.starts_with("kernels-community/") && hub.contains("flash-attn") => reader.set("attention", "flash2"),
        other => reader.refuse(key, other, "use sdpa, eager, flash_attention_2 or flash_attention_3"),
    }
}

/// Names of optimizers as transformers spells them: which one, and how it steps.
pub(crate) fn trainer_optimizer(name: &str) -> Option<(&str, &'static str)> {
    Some(match name {
        "adamw_torch" | "adamw_hf" => ("adamw", "foreach"),
        "adamw_torch_fused" => ("adamw", "fused"),
        "adamw_8bit" | "adamw_bnb_8bit" => ("adamw8bit", "foreach"),
        "paged_adamw" | "paged_adamw_32bit" => ("paged-adamw32", "foreach"),
        "paged_adamw_8bit" => ("paged-adamw8bit", "foreach"),
        "lion_32bit" | "lion" => ("lion", "foreach"),
        "lion_8bit" => ("lion8bit", "foreach"),
        "paged_lion" | "paged_lion_32bit" => ("paged-lion32", "foreach"),
        "paged_lion_8bit" => ("paged-lion8bit", "foreach"),
        "ademamix_8bit" => ("ademamix8bit", "foreach"),
        "paged_ademamix_32bit" => ("paged-ademamix32", "foreach"),
        "paged_ademamix_8bit" => ("paged-ademamix8bit", "foreach"),
        "adamw_anyprecision" => ("adamw-anyprecision", "foreach"),
        "galore_adamw" | "galore_adamw_layerwise" => ("galore-adamw", "foreach"),
        "apollo_adamw" | "apollo_adamw_layerwise" => ("apollo-adamw", "foreach"),
        "adafactor" | "ademamix" | "sgd" | "adagrad" | "rmsprop" | "muon" => (name, "foreach"),
        _ => return None,
    })
}

/// `optim_target_modules` and `optim_args` of GaLore and APOLLO (transformers, trainer.py).
fn low_rank(reader: &mut Reader<'_>, name: &str) {
    let targets: Vec<&str> = match reader.get("optim_target_modules") {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let names = |part: &str| targets.iter().any(|target| target.contains(part));
    // What is simulated: every matrix but embeddings and the head.
    if !(names("all-linear") || names("attn") && names("mlp")) {
        let what = match targets.as_slice() {
            [] => format!("{name} without optim_target_modules"),
            _ => format!("{name} with optim_target_modules {}", targets.join(", ")),
        };
        reader.refuse("optim", &what, "use all-linear, or attn and mlp");
    }
    // transformers' own defaults.
    let mut rank = if name.starts_with("galore") { 128 } else { 1 };
    for pair in reader.text("optim_args").unwrap_or_default().split(',') {
        match pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("rank", value)) => match value.parse::<u64>() {
                Ok(number) => rank = number,
                Err(_) => {
                    let problem = format!("optim_args: {pair} is not a whole number as its rank");
                    reader.faults.add(Fault::new("", problem));
                }
            },
            Some(("update_proj_gap" | "scale" | "proj_type" | "proj" | "scale_type", _)) | None => {}
            Some((other, _)) => reader.refuse("optim_args", other, "leave it out"),
        }
    }
    reader.set("optimizer.rank", rank);
    if name.ends_with("layerwise") {
        reader.set("optimizer_in_backward", true);
    }
}

pub(super) fn optimizer(reader: &mut Reader<'_>, key: &str, name: &str) {
    if let "adamw_torch_8bit" | "ao_adamw_8bit" | "adamw_torch_4bit" | "ao_adamw_4bit" = name {
        reader.set("optimizer.kind", "adamw8bit");
        reader.set("optimizer.implementation", "foreach");
        reader.set("optimizer.wide_embeddings", false);
        let instead = match name.contains('4') {
            true => "torchao's optimizer is simulated as bitsandbytes' 8-bit one: its states are half of that",
            false => "torchao's optimizer is simulated as bitsandbytes' 8-bit one, whose states are as large",
        };
        reader.say(&format!("{key}: {name}"), instead);
        return;
    }
    let Some((kind, implementation)) = trainer_optimizer(name) else {
        reader.refuse(key, name, "`vramcast list optimizers` names what is simulated");
        return;
    };
    reader.set("optimizer.kind", kind);
    reader.set("optimizer.implementation", implementation);
    match kind {
        "galore-adamw" | "apollo-adamw" => low_rank(reader, name),
        _ => {
            for key in ["optim_target_modules", "optim_args"] {
                if let Some(value) = reader.get(key).filter(|value| !super::table::is_off(value)) {
                    reader.refuse(key, &super::table::shown(value), "only GaLore's and APOLLO's are read");
                }
            }
        }
    }
}
