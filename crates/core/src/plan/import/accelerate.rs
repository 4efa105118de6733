//! accelerate's own configuration, as `accelerate config` writes it (accelerate 1.15, commands/config/config_args.py and
//! utils/dataclasses.py): who spreads a run, over how many cards, and what is computed in.

use serde_json::{Value, json};

use super::reader::Reader;
use super::sharding::{self, FSDP_KEYS, Types};
use super::table::{Format, Row, Sense, is_off};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "accelerate",
    version: "1.15",
    source: "accelerate, commands/config/config_args.py and utils/dataclasses.py",
    keys: &[KEYS, FSDP_KEYS],
};

const KEYS: &[Row] = &[
    Row("distributed_type", Sense::Read("parallel.engine")),
    Row("num_processes num_machines", Sense::Read("parallel.gpus, parallel.nodes")),
    Row("mixed_precision", Sense::Read("autocast, the engine's mixed precision")),
    Row("gradient_accumulation_steps", Sense::Whole("gradient_accumulation")),
    Row("fsdp_config", Sense::Read("the engine's options (parallel.engine)")),
    Row(
        "deepspeed_config deepspeed_config.zero_stage deepspeed_config.offload_optimizer_device \
         deepspeed_config.offload_param_device deepspeed_config.gradient_accumulation_steps \
         deepspeed_config.gradient_clipping deepspeed_config.deepspeed_config_file \
         deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path",
        Sense::Read("parallel.engine.deepspeed"),
    ),
    Row(
        "deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model \
         deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile \
         deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_inclusion_filter \
         deepspeed_config.deepspeed_moe_layer_cls_names",
        Sense::Harmless("how a model is loaded, saved and started"),
    ),
    Row(
        "deepspeed_config.seq_parallel_communication_data_type",
        Sense::Harmless("an option of Ulysses, which is refused by its size"),
    ),
    Row(
        "parallelism_config.parallelism_config_dp_replicate_size parallelism_config.parallelism_config_dp_shard_size \
         parallelism_config.parallelism_config_tp_size parallelism_config.parallelism_config_cp_size",
        Sense::Read("parallel.mesh"),
    ),
    Row(
        "parallelism_config.parallelism_config_sp_size",
        Sense::Refused("Ulysses is not simulated: use parallelism_config_cp_size"),
    ),
    Row(
        "parallelism_config.parallelism_config_sp_* parallelism_config.parallelism_config_cp_comm_strategy \
         parallelism_config.parallelism_config_cp_backend",
        Sense::Harmless("options of an axis that is refused or one card wide"),
    ),
    Row("megatron_lm_config megatron_lm_config.*", Sense::Read("parallel.engine.megatron")),
    Row("tp_config.tp_size", Sense::Read("parallel.mesh.tp")),
    Row("fp8_config fp8_config.*", Sense::Harmless("options of mixed_precision: fp8")),
    Row(
        "dynamo_config dynamo_config.* dynamo_backend",
        Sense::Said("torch.compile is not simulated: what runs is eager, which mostly keeps more for backward"),
    ),
    Row(
        "use_cpu tpu ipex_config* mpirun_config* tpu_* commands command_file tpu_name tpu_zone sagemaker_* \
         ec2_instance_type iam_role_name profile region transformers_version pytorch_version py_version image_uri \
         additional_args",
        Sense::Refused("only runs on cards of this kind are simulated"),
    ),
    Row(
        "compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids machine_rank main_process_ip \
         main_process_port main_training_function rdzv_backend same_network use_xpu numa_affinity config_version \
         cpu_affinity env log_dir tee",
        Sense::Harmless("how processes are started"),
    ),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    let deepspeed = spread(&mut reader);
    reader.finish(None, None).map(|read| Imported { deepspeed, ..read })
}

/// Who spreads the run; DeepSpeed's configuration where it is one.
fn spread(reader: &mut Reader<'_>) -> Option<Value> {
    let compute = match reader.text("mixed_precision").map(str::to_lowercase).as_deref() {
        Some("bf16") => Some("bf16"),
        Some("fp16") => Some("fp16"),
        Some("fp8") => {
            reader.say("mixed_precision", "products in fp8 are not simulated: those in bf16 are, which keep more");
            Some("bf16")
        }
        None | Some("no") => None,
        Some(other) => {
            reader.refuse("mixed_precision", other, "use bf16, fp16 or no");
            None
        }
    };
    // `num_processes` counts those of all machines.
    let (processes, machines) = (reader.number("num_processes"), reader.number("num_machines").unwrap_or(1).max(1));
    if let Some(processes) = processes {
        reader.set("parallel.gpus", (processes / machines).max(1));
        if machines > 1 {
            reader.set("parallel.nodes", machines);
        }
    }
    let axes = mesh(reader);
    let types = Types { compute, adapter: reader.beside.adapter };
    let kind = reader.text("distributed_type").unwrap_or("NO").to_uppercase();
    match kind.as_str() {
        "NO" => {
            autocast(reader, compute);
            if processes.is_none_or(|processes| processes == 1) && !axes {
                reader.changes.retain(|(place, _)| !place.starts_with("parallel."));
            } else {
                reader.set("parallel.engine.ddp", json!({}));
            }
            None
        }
        "MULTI_GPU" | "MULTI_XPU" | "MULTI_NPU" if !axes => {
            autocast(reader, compute);
            if kind != "MULTI_GPU" {
                reader.say("distributed_type", "other accelerators are simulated as CUDA's");
            }
            reader.set("parallel.engine.ddp", json!({}));
            None
        }
        "FSDP" | "MULTI_GPU" | "TP" => {
            sharding::fsdp(reader, if axes { 2 } else { 1 }, &types);
            None
        }
        "DEEPSPEED" => Some(deepspeed(reader, compute)),
        "MEGATRON_LM" => {
            megatron(reader, compute);
            None
        }
        other => {
            reader.refuse("distributed_type", other, "use MULTI_GPU, FSDP, DEEPSPEED or NO");
            None
        }
    }
}

fn autocast(reader: &mut Reader<'_>, compute: Option<&str>) {
    reader.set("autocast", compute.map_or(Value::Null, Into::into));
}

/// `parallelism_config`; whether it has an axis.
fn mesh(reader: &mut Reader<'_>) -> bool {
    let mut any = false;
    for (key, place) in [
        ("parallelism_config.parallelism_config_dp_replicate_size", "parallel.mesh.dp_replicate"),
        ("parallelism_config.parallelism_config_dp_shard_size", "parallel.mesh.dp_shard"),
        ("parallelism_config.parallelism_config_tp_size", "parallel.mesh.tp"),
        ("tp_config.tp_size", "parallel.mesh.tp"),
        ("parallelism_config.parallelism_config_cp_size", "parallel.mesh.cp"),
    ] {
        if let Some(size) = reader.number(key).filter(|size| *size > 1) {
            reader.set(place, size);
            any = true;
        }
    }
    any
}

/// The plugin's own options, or the file that it names.
fn deepspeed(reader: &mut Reader<'_>, compute: Option<&str>) -> Value {
    if reader.get("deepspeed_config.deepspeed_config_file").is_some() {
        let document = reader.referred("deepspeed_config.deepspeed_config_file").unwrap_or_else(|| json!({}));
        return sharding::deepspeed(reader, document, compute);
    }
    // accelerate's own default.
    let stage = reader.number("deepspeed_config.zero_stage").unwrap_or(2);
    let mut zero = json!({"stage": stage});
    for (key, name) in [("offload_optimizer_device", "offload_optimizer"), ("offload_param_device", "offload_param")] {
        if let Some(device) = reader.text(&format!("deepspeed_config.{key}")).filter(|device| *device != "none") {
            zero[name] = json!({"device": device});
        }
    }
    if stage == 3 {
        zero["stage3_gather_16bit_weights_on_model_save"] = json!(true);
    }
    let mut document = json!({"zero_optimization": zero});
    for key in ["gradient_accumulation_steps", "gradient_clipping"] {
        if let Some(value) = reader.get(&format!("deepspeed_config.{key}")).filter(|value| !is_off(value)) {
            document[key] = value.clone();
        }
    }
    document["bf16"] = json!({"enabled": compute != Some("fp16")});
    document["fp16"] = json!({"enabled": compute == Some("fp16")});
    if compute.is_none() {
        reader.say("mixed_precision", "DeepSpeed is simulated with 16-bit weights only: bf16 stands in for fp32");
    }
    sharding::deepspeed(reader, document, compute)
}

/// `megatron_lm_config`, which Megatron-LM itself reads.
fn megatron(reader: &mut Reader<'_>, compute: Option<&str>) {
    reader.set("parallel.engine.megatron", json!({}));
    reader.set("weights", compute.unwrap_or("bf16"));
    for (key, place) in [("megatron_lm_tp_degree", "parallel.mesh.tp"), ("megatron_lm_pp_degree", "parallel.mesh.pp")] {
        if let Some(size) = reader.number(&format!("megatron_lm_config.{key}")) {
            reader.set(place, size);
        }
    }
    reader.number_to("megatron_lm_config.megatron_lm_num_micro_batches", "gradient_accumulation");
    for (key, place) in [
        ("megatron_lm_sequence_parallelism", "parallel.mesh.sequence_parallel"),
        ("megatron_lm_use_distributed_optimizer", "parallel.engine.megatron.distributed_optimizer"),
    ] {
        if let Some(on) = reader.switch(&format!("megatron_lm_config.{key}")) {
            reader.set(place, on);
        }
    }
    match reader.text("megatron_lm_config.megatron_lm_recompute_activations") {
        Some("true") => reader.set("parallel.engine.megatron.recompute", json!({"selective": ["core_attn"]})),
        _ if reader.is_on("megatron_lm_config.megatron_lm_recompute_activations") => {
            reader.set("parallel.engine.megatron.recompute", json!({"selective": ["core_attn"]}));
        }
        _ => {}
    }
}
