//! NeMo Automodel's YAML (nemo_automodel of August 2026: recipes/llm/train_ft.py, components/distributed).

use serde_json::{Value, json};

use super::reader::{Reader, whole};
use super::table::{Format, Row, Sense, is_off};
use super::trainer::{attention, short};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "NeMo Automodel",
    version: "0.4",
    source: "nemo_automodel, recipes/llm/train_ft.py and components/distributed/*.py",
    keys: &[KEYS],
};

const KERNELS: &str = "its own kernels are not simulated: transformers' code runs in their place";

const KEYS: &[Row] = &[
    Row(
        "model.pretrained_model_name_or_path model.config.pretrained_model_name_or_path model.config",
        Sense::Read("the model"),
    ),
    Row("step_scheduler.local_batch_size", Sense::Whole("batch.batch_size")),
    Row("step_scheduler.global_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row(
        "packed_sequence.packed_sequence_size dataset.seq_length dataset.seq_len dataset.max_length \
         dataset.max_seq_length dataloader.collate_fn.max_length",
        Sense::Read("batch.seq_len"),
    ),
    Row("model.torch_dtype model.dtype", Sense::Read("weights")),
    Row("model.attn_implementation", Sense::Read("attention")),
    Row(
        "peft peft.dim peft.alpha peft.dropout peft.target_modules peft.match_all_linear peft.use_dora",
        Sense::Read("adapter"),
    ),
    Row(
        "quantization.load_in_4bit quantization.load_in_8bit quantization.bnb_4bit_quant_type \
         quantization.bnb_4bit_use_double_quant",
        Sense::Read("quantization"),
    ),
    Row(
        "distributed.strategy distributed._target_ distributed.dp_size distributed.dp_replicate_size \
         distributed.tp_size distributed.cp_size distributed.pp_size distributed.activation_checkpointing \
         distributed.mp_policy.* distributed.pipeline.pp_schedule distributed.offload_policy*",
        Sense::Read("parallel, checkpointing"),
    ),
    Row(
        "distributed.ep_size",
        Sense::Said("experts are simulated in FSDP's shards, gathered a whole layer at a time, which is more"),
    ),
    Row("distributed.sequence_parallel", Sense::Said("transformers' plan is simulated, without sequence parallel")),
    Row("optimizer._target_ optimizer.foreach optimizer.fused", Sense::Read("optimizer")),
    Row(
        "optimizer.master_weights optimizer.store_param_remainders optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype \
         optimizer.master_weight_dtype",
        Sense::Said("Transformer Engine's optimizer is simulated as torch's on the types of the weights"),
    ),
    Row("loss_fn._target_", Sense::Read("loss.kind")),
    Row("clip_grad_norm.max_norm max_grad_norm", Sense::Read("clip")),
    Row("freeze_config.*", Sense::Read("frozen")),
    Row("model.use_liger_kernel", Sense::Read("kernels")),
    Row(
        "compile.enabled",
        Sense::Said("torch.compile is not simulated: what runs is eager, which mostly keeps more for backward"),
    ),
    Row("compile.*", Sense::Harmless("options of compile")),
    Row("model.backend.* peft.use_triton", Sense::Said(KERNELS)),
    Row("fp8.enabled", Sense::Said("products in 8 bits are not simulated: those in bf16 are, which keep more")),
    Row("fp8.* qat*", Sense::Harmless("options of fp8")),
    Row(
        "model.num_hidden_layers model.config.num_* model.text_config.* model.*",
        Sense::Said("the model is taken as it is published"),
    ),
    Row("peft.exclude_modules peft.moe_rank_scaling", Sense::Said("adapters stand on every module that is targeted")),
    Row(
        "distributed.pipeline.* distributed.moe.* distributed.defer_* distributed.enable_* distributed.timeout*",
        Sense::Harmless("how the same memory is reached"),
    ),
    Row("kd_ratio teacher_model* recipe_args.* flow_matching.*", Sense::Refused("another task")),
    Row(
        "recipe* step_scheduler.* dist_env* rng* seed ci.* checkpoint.* dataset* dataloader* validation_* optimizer* \
         lr_scheduler* wandb* mlflow* comet* processor* tokenizer* benchmark* packed_sequence* peft.* loss_fn.* \
         logger* slurm* profil* autonvtx* nvtx* data.* distributed.* model._target_ model.trust_remote_code \
         model.use_cache model.output_hidden_states model.use_sdpa_patching model.backend._target_ parallelizer* \
         autopipeline* skypilot* prewarm* _* neftune* tool_call* quantization.* moe_metrics* garbage_collection* \
         te_fp8* launcher* tensorboard* rope_fusion enable_*",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];

pub(super) fn is_marked(file: &super::Object) -> bool {
    let target =
        |part: &str| file.get(part).and_then(|part| part.get("_target_")).and_then(Value::as_str).unwrap_or_default();
    target("model").contains("nemo_automodel")
        || target("model").contains("NeMoAuto")
        || file.contains_key("step_scheduler") && file.contains_key("dist_env")
        || file.contains_key("recipe") && file.contains_key("dist_env")
}

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let recipe = value.get("recipe").and_then(|recipe| recipe.as_str().or_else(|| recipe.get("_target_")?.as_str()));
    let recipe = recipe.and_then(|name| name.rsplit('.').next()).unwrap_or_default();
    let known = [
        "",
        "TrainFinetuneRecipeForNextTokenPrediction",
        "BenchmarkingRecipeForNextTokenPrediction",
        "FinetuneRecipeForVLM",
    ];
    if !known.contains(&recipe) || value.get("flow_matching").is_some() {
        let what =
            format!("Automodel's recipe {}, another task,", if recipe.is_empty() { "for diffusion" } else { recipe });
        return Err(vec![Fault::unsupported("", what).or("its recipes for language models are read")]);
    }
    let mut reader = Reader::new(&FORMAT, value, beside);
    let model = ["model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config"]
        .iter()
        .find_map(|key| reader.text(key))
        .map(str::to_owned);
    let lengths = KEYS[3].keys().find_map(|key| reader.get(key).and_then(whole).filter(|length| *length > 0));
    if let Some(length) = lengths {
        reader.set("batch.seq_len", length);
    }
    let adapter = reader.get("peft").is_some_and(|peft| !is_off(peft));
    if adapter {
        lora(&mut reader);
    } else if let Some(key) =
        ["quantization.load_in_4bit", "quantization.load_in_8bit"].into_iter().find(|key| reader.is_on(key))
    {
        reader.refuse(key, "true, without peft", "quantised weights are not trained: add peft, or leave it out");
    }
    spread(&mut reader);
    let weights = ["model.torch_dtype", "model.dtype"].iter().find_map(|key| reader.text(key).and_then(short));
    reader.set("weights", weights.unwrap_or("bf16"));
    reader.set("autocast", Value::Null);
    attention(&mut reader, "model.attn_implementation");
    optimizer(&mut reader);
    let norm = reader.real("clip_grad_norm.max_norm").or_else(|| reader.real("max_grad_norm"));
    reader.set("clip", norm.unwrap_or(1.0) > 0.0);
    reader.set("loss.kind", "standard");
    match reader.text("loss_fn._target_").and_then(|name| name.rsplit('.').next()) {
        Some("MaskedCrossEntropy" | "TEParallelCrossEntropy") | None => {}
        Some(_) => reader.say("loss_fn._target_", "the model's own loss is simulated, which keeps whole logits"),
    }
    if reader.is_on("model.use_liger_kernel") {
        reader.set("kernels", "liger");
    }
    frozen(&mut reader, adapter);
    steps(&mut reader);
    reader.finish(None, model)
}

/// Micro-batches of a step, out of the rows of all replicas (recipes/llm/train_ft.py); a pipeline cuts its batch otherwise.
fn steps(reader: &mut Reader<'_>) {
    let Some(all) = reader.number("step_scheduler.global_batch_size") else { return };
    let micro = reader.number("step_scheduler.local_batch_size").unwrap_or(1).max(1);
    reader.set("batch.batch_size", micro);
    let set = |place: &str| reader.was_set(place).and_then(whole);
    let axis = |name: &str| set(&format!("parallel.mesh.{name}")).unwrap_or(1).max(1);
    if axis("pp") > 1 {
        let note = "global_batch_size: micro-batches follow from the cards; --gradient-accumulation says them";
        return reader.notes.push(note.into());
    }
    let said = reader.beside.cards.or(set("parallel.gpus"));
    let cards = said.unwrap_or(if reader.spreads() { USUAL_CARDS } else { 1 });
    let replicas = (cards / (axis("tp") * axis("cp"))).max(1);
    reader.set("gradient_accumulation", (all / micro.saturating_mul(replicas)).max(1));
}

/// Cards of a node, where nobody says how many there are.
const USUAL_CARDS: u64 = 8;

fn lora(reader: &mut Reader<'_>) {
    reader.set("adapter.method", "lora");
    reader.number_to("peft.dim", "adapter.rank");
    reader.real_to("peft.alpha", "adapter.alpha");
    if let Some(dropout) = reader.real("peft.dropout") {
        reader.set("adapter.dropout", dropout);
    }
    if reader.is_on("peft.use_dora") {
        reader.set("adapter.dora", true);
    }
    // Its stars stand for any beginning: PEFT's names match the end of a path as well.
    let names: Vec<String> = match reader.get("peft.target_modules") {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let all = reader.is_on("peft.match_all_linear")
        || names.is_empty()
        || names.iter().any(|name| ["*", "*_proj"].contains(&name.as_str()));
    let plain: Vec<&str> = names.iter().map(|name| name.trim_start_matches(['*', '.'])).collect();
    if all {
        reader.set("adapter.targets", "all-linear");
    } else if plain.iter().any(|name| name.contains('*')) {
        reader.refuse("peft.target_modules", &names.join(", "), "name modules without stars inside");
    } else {
        reader.set("adapter.targets", json!(plain));
    }
    if reader.is_on("quantization.load_in_8bit") {
        reader.set("quantization.scheme", "int8");
    } else if reader.is_on("quantization.load_in_4bit") {
        let kind = reader.text("quantization.bnb_4bit_quant_type").unwrap_or("nf4").to_owned();
        reader.set("quantization.scheme", kind);
        let double = reader.is_on("quantization.bnb_4bit_use_double_quant");
        reader.set("quantization.double", double);
    }
}

fn spread(reader: &mut Reader<'_>) {
    // Up to 0.2 a manager's class stood in the place of a strategy's name.
    let class = reader.text("distributed._target_").and_then(|name| name.rsplit('.').next()).map(str::to_lowercase);
    let strategy = reader.text("distributed.strategy").map(str::to_lowercase);
    let strategy = strategy.or(class.map(|name| name.trim_end_matches("manager").to_owned()));
    match strategy.as_deref() {
        None | Some("fsdp2") => reader.set("parallel.engine.fsdp2", json!({})),
        Some("ddp") => reader.set("parallel.engine.ddp", json!({})),
        Some(other) => {
            reader.refuse("distributed", other, "use fsdp2 or ddp");
            return;
        }
    }
    match reader.part("distributed.offload_policy").filter(|policy| !is_off(policy)) {
        None => {}
        Some(policy) => {
            let name = policy["_target_"].as_str().and_then(|name| name.rsplit('.').next()).unwrap_or("it").to_owned();
            match name.as_str() {
                "OffloadPolicy" => {}
                "CPUOffloadPolicy" if strategy.as_deref() != Some("ddp") => {
                    reader.set("parallel.engine.fsdp2.offload", true);
                }
                other => reader.refuse("distributed.offload_policy", other, "use CPUOffloadPolicy, with fsdp2"),
            }
        }
    }
    for (key, place) in [("dp_replicate_size", "dp_replicate"), ("tp_size", "tp"), ("cp_size", "cp"), ("pp_size", "pp")]
    {
        if let Some(size) = reader.get(&format!("distributed.{key}")).and_then(whole).filter(|size| *size > 1) {
            reader.set(&format!("parallel.mesh.{place}"), size);
        }
    }
    if let Some(size) = reader.get("distributed.dp_size").and_then(whole).filter(|size| *size > 1) {
        reader.set("parallel.dp", size);
    }
    match reader.get("distributed.activation_checkpointing") {
        Some(Value::Bool(on)) => reader.set("checkpointing", if *on { "full" } else { "off" }),
        Some(Value::String(how)) if how == "selective" => {
            reader.set("checkpointing", "full");
            reader.set("checkpoints.selective", "alternate-matmuls");
        }
        _ => {}
    }
    if strategy.as_deref() == Some("ddp") {
        return;
    }
    let dtype = |reader: &mut Reader<'_>, key: &str, usual: &'static str| {
        reader.text(&format!("distributed.mp_policy.{key}")).and_then(short).unwrap_or(usual)
    };
    // FSDP2Config's own policy.
    let (parameters, reduce) = (dtype(reader, "param_dtype", "bf16"), dtype(reader, "reduce_dtype", "fp32"));
    reader.set("parallel.engine.fsdp2.mixed_precision", json!({"parameters": parameters, "reduce": reduce}));
    if let Some(name) =
        reader.text("distributed.pipeline.pp_schedule").filter(|_| reader.was_set("parallel.mesh.pp").is_some())
    {
        let known = if name.to_lowercase().starts_with("interleaved") { "interleaved-1f1b" } else { "1f1b" };
        reader.set("parallel.engine.fsdp2.pipeline.schedule", known);
    }
}

fn optimizer(reader: &mut Reader<'_>) {
    let name = reader.text("optimizer._target_").and_then(|name| name.rsplit('.').next()).unwrap_or("AdamW");
    let kind = match name {
        "Adam" | "FusedAdam" => "adam",
        "AdamW" => "adamw",
        "SGD" => "sgd",
        other => {
            reader.refuse("optimizer._target_", other, "use torch.optim.AdamW or Adam");
            return;
        }
    };
    reader.set("optimizer.kind", kind);
    let fused = name == "FusedAdam" || reader.is_on("optimizer.fused");
    let forloop = reader.switch("optimizer.foreach") == Some(false);
    reader.set(
        "optimizer.implementation",
        if fused {
            "fused"
        } else if forloop {
            "forloop"
        } else {
            "foreach"
        },
    );
}

/// Towers that stay as they are; with adapters nothing else is trained anyway.
fn frozen(reader: &mut Reader<'_>, adapter: bool) {
    let mut parts = Vec::new();
    if reader.is_on("freeze_config.freeze_vision_tower") {
        parts.push("vision-if-any");
    }
    if reader.is_on("freeze_config.freeze_embeddings") && !adapter {
        reader.say("freeze_config.freeze_embeddings", "embeddings are trained in the simulation, which is more");
    }
    if reader.is_on("freeze_config.freeze_language_model") {
        reader.refuse("freeze_config.freeze_language_model", "true", "say what is not trained by {frozen}");
    }
    if !parts.is_empty() && !adapter {
        reader.set("frozen", json!(parts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(part: &str, value: Value) -> Result<Imported, Vec<Fault>> {
        let mut file = json!({"model": {"pretrained_model_name_or_path": "a/b"}});
        file[part] = value;
        read(&file, &Beside::default())
    }

    #[test]
    fn managers_and_policies_are_read() {
        const AT: &str = "nemo_automodel.components.distributed";
        let offload =
            json!({"strategy": "fsdp2", "offload_policy": {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}});
        for (value, place) in [
            (json!({"_target_": format!("{AT}.ddp.DDPManager")}), "parallel.engine.ddp"),
            (json!({"_target_": format!("{AT}.fsdp2.FSDP2Manager")}), "parallel.engine.fsdp2"),
            (offload, "parallel.engine.fsdp2.offload"),
        ] {
            let read = of("distributed", value.clone()).unwrap();
            assert!(read.changes.iter().any(|(known, _)| known == place), "{value}: {place}");
        }
        let megatron = json!({"_target_": format!("{AT}.megatron_fsdp.MegatronFSDPManager")});
        for (part, value, said) in
            [("distributed", megatron, "megatronfsdp"), ("quantization", json!({"load_in_4bit": true}), "without peft")]
        {
            let faults = of(part, value).unwrap_err();
            assert!(faults[0].to_string().contains(said), "{faults:?}");
        }
    }
}
