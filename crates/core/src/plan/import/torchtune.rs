//! torchtune's YAML (torchtune 0.7 nightly: recipes/configs and the recipes that read them).

use serde_json::{Value, json};

use super::reader::Reader;
use super::table::{Format, Row, Sense, is_off};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "torchtune",
    version: "0.7",
    source: "torchtune, recipes/*.py, recipes/configs and torchtune/models/*/_model_builders.py",
    keys: &[KEYS],
};

const NOT: &str = "leave it out: it is not simulated";

const KEYS: &[Row] = &[
    Row("model._component_", Sense::Read("the model, adapter, quantization")),
    Row("batch_size", Sense::Whole("batch.batch_size")),
    Row("gradient_accumulation_steps", Sense::Whole("gradient_accumulation")),
    Row("tokenizer.max_seq_len dataset.packed dataset.max_seq_len", Sense::Read("batch.seq_len")),
    Row("dtype", Sense::Read("weights")),
    Row(
        "model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output model.lora_rank model.lora_alpha \
         model.lora_dropout model.use_dora model.quantize_base",
        Sense::Read("adapter, quantization"),
    ),
    Row("optimizer._component_ optimizer.fused optimizer_in_bwd", Sense::Read("optimizer, optimizer_in_backward")),
    Row("loss._component_ loss.num_output_chunks", Sense::Read("loss.kind, loss.chunks")),
    Row("clip_grad_norm", Sense::Read("clip")),
    Row("enable_activation_checkpointing ac_mode ac_option", Sense::Read("checkpointing, checkpoints")),
    Row(
        "fsdp_cpu_offload fsdp.cpu_offload custom_sharded_layers fsdp_sharding_strategy fsdp.* tensor_parallel_dim \
         data_parallel_shard_dim data_parallel_replicate_dim context_parallel_dim",
        Sense::Read("parallel"),
    ),
    Row(
        "enable_activation_offloading",
        Sense::Read(
            "save_on_cpu, of recomputed layers on one card; else what forward keeps stays there, which is more",
        ),
    ),
    Row(
        "compile compile.*",
        Sense::Read("torch_compile, layer by layer, of packed rows on one card; else what runs is eager"),
    ),
    Row("enable_fp8_training fp8_recipe_name use_grouped_mm use_flex enable_expert_parallel", Sense::Refused(NOT)),
    Row(
        "model.attn_dropout model.image_size model.max_seq_len model.norm_eps",
        Sense::Harmless("the model is taken as it is published"),
    ),
    Row(
        "model.decoder_trainable model.encoder_trainable model.fusion_trainable",
        Sense::Said("which of its parts are trained is not simulated: all are, or have adapters"),
    ),
    Row("model.*", Sense::Refused("a model of one's own: give its config.json as the model")),
    Row(
        "quantizer quantizer.* fake_quant_after_n_steps",
        Sense::Said("fake quantisation is not simulated: the plain model keeps less"),
    ),
    Row("tensor_parallel_plan.* tensor_parallel_plan", Sense::Harmless("how layers are split over {parallel.mesh.tp}")),
    Row("teacher_* kd_*", Sense::Refused("distillation is not simulated")),
    Row(
        "ref_* reward_* value_* policy_model* ppo_* grpo_* kl_* loss.beta loss.label_smoothing loss.epsilon \
         loss.value_* forward_batch_size base_model_path inference.* orchestration.* training.* postprocessing.*",
        Sense::Refused("only supervised fine-tuning is simulated"),
    ),
    Row(
        "max_new_tokens prompt.* tasks limit enable_kv_cache temperature top_k",
        Sense::Refused("a file of generation or evaluation: `vramcast infer` is for those"),
    ),
    Row(
        "optimizer.* lr_scheduler* epochs max_steps_per_epoch num_steps seed shuffle save_* resume_from_checkpoint \
         checkpointer.* output_dir metric_logger.* log_* profiler.* device cudnn_deterministic_mode dataset* \
         batch_size_val run_val_every_n_steps tokenizer.* collate_fn dataloader.* datasets low_cpu_ram \
         memory_efficient_fsdp_wrap use_distributed_state_dict name debug_* stop_token_ids checkpoint* \
         enable_async_checkpointing keep_last_n_checkpoints",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];

/// Builders and the models they make, longest beginnings first; LoRA's and QLoRA's have a word before them.
const MODELS: &[(&str, &str)] = &[
    ("llama2_7b", "meta-llama/Llama-2-7b-hf"),
    ("llama2_13b", "meta-llama/Llama-2-13b-hf"),
    ("llama2_70b", "meta-llama/Llama-2-70b-hf"),
    ("code_llama2_7b", "codellama/CodeLlama-7b-hf"),
    ("llama3_8b", "meta-llama/Meta-Llama-3-8B"),
    ("llama3_70b", "meta-llama/Meta-Llama-3-70B"),
    ("llama3_1_8b", "meta-llama/Llama-3.1-8B"),
    ("llama3_1_70b", "meta-llama/Llama-3.1-70B"),
    ("llama3_1_405b", "meta-llama/Llama-3.1-405B"),
    ("llama3_2_1b", "meta-llama/Llama-3.2-1B"),
    ("llama3_2_3b", "meta-llama/Llama-3.2-3B"),
    ("llama3_3_70b", "meta-llama/Llama-3.3-70B-Instruct"),
    ("llama3_2_vision_11b", "meta-llama/Llama-3.2-11B-Vision"),
    ("llama3_2_vision_90b", "meta-llama/Llama-3.2-90B-Vision"),
    ("llama4_scout_17b_16e", "meta-llama/Llama-4-Scout-17B-16E"),
    ("llama4_maverick_17b_128e", "meta-llama/Llama-4-Maverick-17B-128E"),
    ("mistral_7b", "mistralai/Mistral-7B-v0.1"),
    ("gemma_2b", "google/gemma-2b"),
    ("gemma_7b", "google/gemma-7b"),
    ("gemma2_2b", "google/gemma-2-2b"),
    ("gemma2_9b", "google/gemma-2-9b"),
    ("gemma2_27b", "google/gemma-2-27b"),
    ("phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
    ("phi4_14b", "microsoft/phi-4"),
    ("qwen2_0_5b", "Qwen/Qwen2-0.5B"),
    ("qwen2_1_5b", "Qwen/Qwen2-1.5B"),
    ("qwen2_7b", "Qwen/Qwen2-7B"),
    ("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B"),
    ("qwen2_5_1_5b", "Qwen/Qwen2.5-1.5B"),
    ("qwen2_5_3b", "Qwen/Qwen2.5-3B"),
    ("qwen2_5_7b", "Qwen/Qwen2.5-7B"),
    ("qwen2_5_14b", "Qwen/Qwen2.5-14B"),
    ("qwen2_5_32b", "Qwen/Qwen2.5-32B-Instruct"),
    ("qwen2_5_72b", "Qwen/Qwen2.5-72B-Instruct"),
    ("qwen3_0_6b", "Qwen/Qwen3-0.6B"),
    ("qwen3_1_7b", "Qwen/Qwen3-1.7B"),
    ("qwen3_4b", "Qwen/Qwen3-4B"),
    ("qwen3_8b", "Qwen/Qwen3-8B"),
    ("qwen3_14b", "Qwen/Qwen3-14B"),
    ("qwen3_32b", "Qwen/Qwen3-32B"),
];

/// The builder of a model, for those who write.
pub(crate) fn builder(model: &str) -> Option<&'static str> {
    let plain = |name: &str| {
        name.rsplit('/').next().unwrap_or(name).to_lowercase().replace("-instruct", "").replace("meta-", "")
    };
    MODELS.iter().find(|(_, id)| plain(id) == plain(model)).map(|(builder, _)| *builder)
}

/// Builders whose model code of torchtune's own is simulated.
const OWN_CODE: [&str; 5] = ["llama2_", "llama3_", "code_llama2_", "mistral_", "qwen2_"];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    let component = reader.text("model._component_").unwrap_or_default();
    let builder = component.rsplit('.').next().unwrap_or_default();
    let (builder, adapter, mut quantised) = match builder {
        name if name.starts_with("qlora_") => (&name[6..], true, true),
        name if name.starts_with("lora_") => (&name[5..], true, false),
        name => (name, false, false),
    };
    let plain = builder.trim_end_matches("_instruct").trim_end_matches("_base");
    let model = MODELS.iter().find(|(name, _)| *name == plain).map(|(_, id)| (*id).to_owned());
    if model.is_none() && reader.faults.is_empty() {
        let problem = format!("model._component_: {component} is no builder of torchtune that is known here");
        reader
            .faults
            .add(Fault::new("", problem).or("give the model by its name, beside flags and --framework torchtune"));
    }
    quantised |= reader.is_on("model.quantize_base");
    if adapter {
        lora(&mut reader);
    }
    if quantised {
        reader.set("quantization.scheme", "nf4");
    }
    let many = cards(&mut reader, beside);
    let dora = reader.is_on("model.use_dora");
    let own = !dora && OWN_CODE.iter().any(|start| plain.starts_with(start)) && !plain.contains("vision");
    if !own && !many {
        reader.set("model_code", "transformers");
        reader.say(
            "model._component_",
            "torchtune's code of this model is not simulated: transformers' runs in its place",
        );
    }
    step(&mut reader);
    reader.finish(Some("torchtune"), model)
}

/// Which adapters.
fn lora(reader: &mut Reader<'_>) {
    reader.set("adapter.method", "lora");
    reader.number_to("model.lora_rank", "adapter.rank");
    reader.real_to("model.lora_alpha", "adapter.alpha");
    if let Some(dropout) = reader.real("model.lora_dropout") {
        reader.set("adapter.dropout", dropout);
    }
    let mut names: Vec<String> = match reader.get("model.lora_attn_modules") {
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => vec!["q_proj".into(), "v_proj".into()],
    };
    names.iter_mut().filter(|name| *name == "output_proj").for_each(|name| *name = "o_proj".into());
    if reader.is_on("model.apply_lora_to_mlp") {
        names.extend(["gate_proj", "up_proj", "down_proj"].map(str::to_owned));
    }
    if reader.is_on("model.apply_lora_to_output") {
        names.push("lm_head".into());
    }
    reader.set("adapter.targets", json!(names));
    if reader.is_on("model.use_dora") {
        reader.set("adapter.dora", true);
    }
}

/// Files of recipes for one device say so by their names alone; whether it is one for several.
fn cards(reader: &mut Reader<'_>, beside: &Beside<'_>) -> bool {
    let degree = |key: &str, place: &str, reader: &mut Reader<'_>| {
        let size = reader.get(key).and_then(super::reader::whole).filter(|size| *size > 1);
        if let Some(size) = size {
            reader.set(place, size);
        }
    };
    let marks = [
        "fsdp_cpu_offload",
        "custom_sharded_layers",
        "tensor_parallel_dim",
        "data_parallel_shard_dim",
        "fsdp.cpu_offload",
    ];
    let marked = marks.iter().any(|key| reader.get(key).is_some());
    let many = match beside.recipe {
        Some(recipe) => recipe.contains("distributed"),
        None => !beside.name.contains("single_device") && (marked || is_distributed(beside.name)),
    };
    if !many {
        return false;
    }
    let share = |reader: &mut Reader<'_>, key: &str| {
        reader.get(key).and_then(super::reader::whole).is_some_and(|size| size > 1)
    };
    // Tensor parallel alone, as far as the file says how many cards there are.
    let tensor = reader.get("tensor_parallel_dim").and_then(super::reader::whole).unwrap_or(1);
    let alone = tensor >= beside.cards.unwrap_or(8);
    let split = tensor > 1 && alone && !share(reader, "data_parallel_shard_dim");
    reader.set(if split { "parallel.engine.tp" } else { "parallel.engine.fsdp2" }, json!({}));
    degree("tensor_parallel_dim", "parallel.mesh.tp", reader);
    degree("data_parallel_replicate_dim", "parallel.mesh.dp_replicate", reader);
    degree("data_parallel_shard_dim", "parallel.mesh.dp_shard", reader);
    degree("context_parallel_dim", "parallel.mesh.cp", reader);
    if (reader.is_on("fsdp_cpu_offload") || reader.is_on("fsdp.cpu_offload")) && !split {
        reader.set("parallel.engine.fsdp2.offload", true);
    }
    if reader.get("custom_sharded_layers").is_some_and(|layers| !is_off(layers)) {
        reader.say("custom_sharded_layers", "embedding and head are simulated as part of the root");
    }
    true
}

/// torchtune calls its recipes' files `8B_full.yaml` for several devices and `8B_full_single_device.yaml` for one.
fn is_distributed(name: &str) -> bool {
    let file = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
    ["_full", "_lora", "_qlora"].iter().any(|ending| stem.ends_with(ending)) || stem.contains("distributed")
}

/// The step: types, optimizer, loss, checkpoints.
fn step(reader: &mut Reader<'_>) {
    super::trainer::dtype(reader, "dtype");
    reader.number_to("tokenizer.max_seq_len", "batch.seq_len");
    let kind = reader.text("optimizer._component_").map(|name| name.rsplit('.').next().unwrap_or_default());
    let known = match kind {
        None => None,
        Some("AdamW") => Some("adamw"),
        Some("Adam") => Some("adam"),
        Some("SGD") => Some("sgd"),
        Some("PagedAdamW8bit") => Some("paged-adamw8bit"),
        Some("PagedAdamW") => Some("paged-adamw32"),
        Some("AdamW8bit") => Some("adamw8bit"),
        Some(other) => {
            reader.refuse("optimizer._component_", other, "`vramcast list optimizers` names what is simulated");
            None
        }
    };
    if let Some(kind) = known {
        reader.set("optimizer.kind", kind);
        let fused = reader.is_on("optimizer.fused");
        reader.set("optimizer.implementation", if fused { "fused" } else { "foreach" });
    }
    if reader.is_on("optimizer_in_bwd") {
        if reader.spreads() {
            reader.say(
                "optimizer_in_bwd",
                "on several cards the step is simulated after backward, which keeps all gradients",
            );
        } else {
            reader.set("optimizer_in_backward", true);
        }
    }
    if let Some(norm) = reader.real("clip_grad_norm") {
        reader.set("clip", norm > 0.0);
    }
    let loss = reader.text("loss._component_").map(|name| name.rsplit('.').next().unwrap_or_default());
    match loss {
        Some("CEWithChunkedOutputLoss" | "LinearCrossEntropyLoss") | None => {
            if reader.spreads() {
                reader.set("loss.kind", "standard");
                reader.say("loss", "on several cards the loss is simulated on whole logits, which are more");
            } else {
                reader.set("loss.kind", "chunked");
                reader.number_to("loss.num_output_chunks", "loss.chunks");
            }
        }
        Some("CrossEntropyLoss") => reader.set("loss.kind", "standard"),
        Some(other) => reader.refuse("loss._component_", other, "only supervised fine-tuning is simulated"),
    }
    if let Some(on) = reader.switch("enable_activation_checkpointing") {
        reader.set("checkpointing", if on { "full" } else { "off" });
    }
    if reader.text("ac_mode") == Some("selective") {
        reader.refuse("ac_mode", "selective", "use enable_activation_checkpointing");
    }
    if reader.is_on("enable_activation_offloading") {
        if reader.is_on("enable_activation_checkpointing") && !reader.spreads() {
            reader.set("save_on_cpu", true);
        } else {
            let said = "what forward keeps stays on the card in the simulation, which is more";
            reader.say("enable_activation_offloading", said);
        }
    }
    compiled(reader);
    if reader.is_on("dataset.packed") {
        reader.notes.push("packed: rows are taken to be full".into());
    }
}

/// `compile`: each layer and the loss (or each of its chunks), as far as compiled graphs are modelled.
fn compiled(reader: &mut Reader<'_>) {
    if !reader.is_on("compile") && !reader.is_on("compile.model") {
        return;
    }
    let adapted = ["model.use_dora", "model.lora_dropout"]
        .iter()
        .any(|key| reader.get(key).is_some_and(|value| !super::table::is_off(value) && value.as_f64() != Some(0.0)));
    let offloaded = reader.is_on("enable_activation_offloading") && !reader.is_on("enable_activation_checkpointing");
    let known = reader.is_on("dataset.packed") && !reader.spreads() && !adapted && !offloaded;
    // Quantised weights are compiled in torchtune's own code alone.
    let foreign = reader.was_set("model_code").is_some() && reader.was_set("quantization.scheme").is_some();
    if known && !foreign {
        // Logits that are not in chunks its model widens itself, before the loss.
        let chunked = reader.text("loss._component_").is_some_and(|name| name.contains("Chunked"));
        let loss = chunked && (reader.is_on("compile") || reader.is_on("compile.loss"));
        reader.set("torch_compile", if loss { "layers-and-loss" } else { "layers" });
    } else {
        reader.say("compile", "what runs is eager, which mostly keeps more for backward");
    }
}

#[cfg(test)]
mod tests {
    /// Sizes have dots too.
    #[test]
    fn recipes_for_several_devices_are_told_by_the_names_of_their_files() {
        for (name, many) in
            [("a/1.5B_lora.yaml", true), ("8B_full.yaml", true), ("0.5B_lora_single_device.yaml", false)]
        {
            assert_eq!(super::is_distributed(name), many, "{name}");
        }
    }
}
