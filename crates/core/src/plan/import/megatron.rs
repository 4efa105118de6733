//! Arguments of Megatron-LM's `pretrain_*.py` (Megatron-LM core 0.17, training/arguments.py).

use serde_json::{Value, json};

use super::reader::Reader;
use super::table::{Format, Row, Sense};
use super::{Beside, Imported};
use crate::plan::Fault;

pub(super) const FORMAT: Format = Format {
    title: "Megatron-LM",
    version: "core 0.17",
    source: "Megatron-LM, megatron/training/arguments.py",
    keys: &[KEYS],
};

const KEYS: &[Row] = &[
    Row("micro_batch_size", Sense::Whole("batch.batch_size")),
    Row("seq_length max_position_embeddings", Sense::Read("batch.seq_len")),
    Row("global_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row(
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size \
         expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage sequence_parallel",
        Sense::Read("parallel.mesh"),
    ),
    Row(
        "use_distributed_optimizer overlap_grad_reduce recompute_granularity recompute_method recompute_num_layers \
         recompute_activations bf16 fp16 optimizer make_vocab_size_divisible_by mtp_num_layers recompute_modules",
        Sense::Read("parallel.engine.megatron, weights, optimizer.kind"),
    ),
    Row(
        "fp8_format fp8_recipe fp8_param_gather first_last_layers_bf16 num_layers_at_start_in_bf16 \
         num_layers_at_end_in_bf16",
        Sense::Read("parallel.engine.megatron.fp8"),
    ),
    Row("grad_reduce_in_bf16", Sense::Read("parallel.engine.megatron.main_gradients")),
    // Under bf16 it is on unless gradients are reduced in bf16 (validate_args).
    Row("accumulate_allreduce_grads_in_fp32", Sense::Read("parallel.engine.megatron.main_gradients")),
    Row(
        "num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups group_query_attention \
         kv_channels vocab_size swiglu normalization untie_embeddings_and_output_weights position_embedding_type \
         num_experts moe_router_topk moe_ffn_hidden_size disable_bias_linear add_qkv_bias qk_layernorm rotary_* \
         use_rotary_position_embeddings moe_* multi_latent_attention norm_epsilon squared_relu no_position_embedding \
         kv_lora_rank q_lora_rank qk_* v_head_dim mscale* use_rope_scaling",
        Sense::Harmless("the model's shape: it is given by its name or its config.json"),
    ),
    Row(
        "use_torch_fsdp2 use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy optimizer_cpu_offload \
         optimizer_offload_fraction cpu_offloading* use_precision_aware_optimizer main_grads_dtype exp_avg_dtype \
         exp_avg_sq_dtype decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers \
         pipeline_model_parallel_layout",
        Sense::Refused("say it by flags beside --engine megatron"),
    ),
    Row(
        "train_* lr* min_lr weight_decay adam_* clip_grad init_method_std seed attention_dropout hidden_dropout split \
         data_* tokenizer_* vocab_file merge_file save* load* eval_* log_* tensorboard_* wandb_* num_workers \
         distributed_* transformer_impl use_flash_attn attention_backend overlap_param_gather no_* \
         attention_softmax_in_fp32 use_mcore_models exit_* ckpt_* dist_ckpt* mock_data empty_unused_memory_level \
         manual_gc* use_cpu_initialization start_weight_decay end_weight_decay override_opt_param_scheduler tp_comm_* \
         cross_entropy_* timing_* rampup_batch_size step_batch_size_schedule fp8_amax_* fp8_margin fp8_interval apply_* masked_softmax_fusion \
         tiktoken_* reset_* cache_dir finetune use_checkpoint* te_rng_tracker calculate_per_token_loss check_for_* \
         decoupled_* enable_experimental ddp_* use_tp_pp_dp_mapping bias_* per_split_data_args_path valid_data_path \
         test_data_path",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];

pub(super) fn read(value: &Value, beside: &Beside<'_>) -> Result<Imported, Vec<Fault>> {
    let mut reader = Reader::new(&FORMAT, value, beside);
    reader.set("parallel.engine.megatron", json!({}));
    for (key, place) in [
        ("seq_length", "batch.seq_len"),
        ("tensor_model_parallel_size", "parallel.mesh.tp"),
        ("pipeline_model_parallel_size", "parallel.mesh.pp"),
        ("context_parallel_size", "parallel.mesh.cp"),
        ("expert_model_parallel_size", "parallel.mesh.ep"),
        ("expert_tensor_parallel_size", "parallel.mesh.etp"),
        ("make_vocab_size_divisible_by", "parallel.engine.megatron.make_vocab_size_divisible_by"),
        ("mtp_num_layers", "parallel.engine.megatron.mtp_layers"),
    ] {
        if let Some(size) = reader.number(key).filter(|size| *size > 0) {
            reader.set(place, size);
        }
    }
    let tensor = reader.number("tensor_model_parallel_size").unwrap_or(1);
    let sequence = reader.is_on("sequence_parallel") && tensor > 1;
    reader.set("parallel.mesh.sequence_parallel", sequence);
    let distributed = reader.is_on("use_distributed_optimizer");
    reader.set("parallel.engine.megatron.distributed_optimizer", distributed);
    if reader.is_on("overlap_grad_reduce") {
        reader.set("parallel.engine.megatron.overlap_grad_reduce", true);
    }
    let weights = if reader.is_on("fp16") { "fp16" } else { "bf16" };
    reader.set("weights", weights);
    match reader.text("recompute_granularity") {
        Some("full") => {
            let how = reader.text("recompute_method").unwrap_or("uniform").to_owned();
            let layers = reader.number("recompute_num_layers").unwrap_or(1);
            reader.set("parallel.engine.megatron.recompute", json!({how: layers}));
        }
        Some("selective") => selective(&mut reader),
        _ if reader.is_on("recompute_activations") => selective(&mut reader),
        _ => {}
    }
    if reader.get("fp8_format").is_some() {
        let recipe = reader.text("fp8_recipe").unwrap_or("delayed").to_owned();
        reader.set("parallel.engine.megatron.fp8.recipe", recipe);
        if reader.is_on("fp8_param_gather") {
            reader.set("parallel.engine.megatron.fp8.param_gather", true);
        }
        let ends = reader.is_on("first_last_layers_bf16");
        for end in ["start", "end"] {
            let layers = reader.number(&format!("num_layers_at_{end}_in_bf16")).unwrap_or(1);
            if ends && layers > 0 {
                reader.set(&format!("parallel.engine.megatron.fp8.layers_at_{end}_in_bf16"), layers);
            }
        }
    }
    if reader.is_on("grad_reduce_in_bf16") {
        reader.set("parallel.engine.megatron.main_gradients", "bf16");
    } else if weights == "fp16" && !reader.is_on("accumulate_allreduce_grads_in_fp32") {
        reader.say("fp16", "gradients are summed in fp32 in the simulation, which is more than fp16");
    }
    match reader.text("optimizer") {
        None | Some("adam") => {}
        Some(other) => reader.refuse("optimizer", other, "use adam"),
    }
    if reader.get("global_batch_size").is_some() {
        reader
            .notes
            .push("global_batch_size: micro-batches follow from the cards; --gradient-accumulation says them".into());
    }
    reader.finish(None, None)
}

fn selective(reader: &mut Reader<'_>) {
    let parts: Vec<&str> = match reader.get("recompute_modules") {
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        Some(Value::String(one)) => vec![one],
        _ => vec!["core_attn"],
    };
    reader.set("parallel.engine.megatron.recompute", json!({"selective": parts}));
}
