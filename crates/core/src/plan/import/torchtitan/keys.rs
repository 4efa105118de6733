//! What every key of torchtitan means.

use super::super::table::{Row, Sense};

pub(super) const FLOAT8: &str =
    "such products in 8 bits and fewer are not simulated: those in bf16 are, which keep more";

pub(super) const EXPERTS: &str = "experts are simulated in FSDP's shards, gathered a whole layer at a time, which is more; --engine megatron \
                       deals them out over cards";

pub(super) const KEYS: &[Row] = &[
    Row(
        "model.name model.flavor model.hf_assets_path model_spec hf_assets_path hf_transformers.model hf_model",
        Sense::Read("the model"),
    ),
    Row(
        "training.local_batch_size training.batch_size training.num_tokens_per_microbatch_per_dp_rank \
         training.seq_len training.max_context_length",
        Sense::Read("batch.batch_size, batch.seq_len"),
    ),
    Row(
        "training.global_batch_size training.num_tokens_per_train_step parallelism.num_pp_microbatches \
         experimental.pipeline_parallel_microbatches",
        Sense::Read("gradient_accumulation"),
    ),
    Row("parallelism.pipeline_parallel_microbatch_size", Sense::Read("batch.batch_size, gradient_accumulation")),
    Row(
        "training.dtype training.mixed_precision_param training.mixed_precision_reduce",
        Sense::Read("weights, parallel.engine.fsdp2.mixed_precision"),
    ),
    Row("training.max_norm", Sense::Read("clip")),
    Row("training.enable_cpu_offload", Sense::Read("parallel.engine.fsdp2.offload")),
    Row(
        "parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree \
         parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree parallelism.context_parallel_degree \
         training.data_parallel_degree training.data_parallel_shard_degree training.data_parallel_replicate_degree \
         training.tensor_parallel_degree training.pipeline_parallel_degree experimental.pipeline_parallel_degree \
         experimental.context_parallel_degree parallelism.fsdp_reshard_after_forward \
         parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_first_stage_less_layers \
         parallelism.pipeline_parallel_last_stage_less_layers parallelism.disable_loss_parallel \
         parallelism.context_parallel_rotate_method",
        Sense::Read("parallel"),
    ),
    Row("parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree", Sense::Said(EXPERTS)),
    Row(
        "activation_checkpoint activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        Sense::Read("checkpointing, checkpoints.selective, checkpoints.every"),
    ),
    Row(
        "optimizer optimizer.name optimizer.implementation optimizer.early_step_in_backward optimizer.fused",
        Sense::Read("optimizer, optimizer_in_backward"),
    ),
    Row("loss", Sense::Read("loss.kind")),
    Row(
        "compile compile.enable training.compile compile.components",
        Sense::Read(
            "torch_compile, layer by layer; beside experts and other tensor parallel than Llama's what runs is eager",
        ),
    ),
    Row(
        "model.converters training.fp8_linear float8.enable_float8_linear quantize.linear.float8.* float8.*",
        Sense::Read("float8, parallel.engine.fsdp2.float8_gather"),
    ),
    Row("quantize.* mx.*", Sense::Said(FLOAT8)),
    Row(
        "parallelism.enable_async_tensor_parallel experimental.enable_async_tensor_parallel \
         parallelism.enable_fsdp_symm_mem",
        Sense::Said("symmetric memory is not simulated"),
    ),
    Row(
        "parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_layers_per_stage \
         parallelism.pipeline_parallel_split_points parallelism.pipeline_parallel_schedule_csv \
         experimental.pipeline_parallel_split_points",
        Sense::Refused(
            "stages are cut evenly: say what the ends have less by {parallel.engine.fsdp2.pipeline.first_less}",
        ),
    ),
    Row(
        "parallelism.* training.disable_cuda_graphs experimental.* override* training.gc_* activation_checkpoint.*",
        Sense::Harmless("how the same memory is reached"),
    ),
    Row(
        "encoder.* training.img_size training.classifier_free_guidance_prob inference.* data.max_patches_per_image",
        Sense::Refused("only models of text are trained here: another task"),
    ),
    Row("compile.*", Sense::Harmless("options of compile")),
    Row(
        "job.* profiling.* profiler* metrics* lr_scheduler* checkpoint* validation.* validator* comm* \
         fault_tolerance.* debug* dataloader* tokenizer* optimizer.* training.steps training.dataset* \
         training.warmup_steps training.deterministic training.seed memory_estimation.* model.norm_type \
         model.tokenizer_path model.print_after_conversion dump_folder hf_* data.* symm_mem* float8.scaling_type* \
         ema*",
        Sense::Harmless("which data, what is logged and saved, the course of training"),
    ),
];
