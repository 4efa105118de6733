//! Every argument of Megatron-LM (core 0.17: training/arguments.py and the configs that it makes arguments of), by what it means.

use super::super::table::{Row, Sense};

pub(in super::super) const KEYS: &[Row] = &[
    Row("micro_batch_size", Sense::Read("batch.batch_size")),
    Row("seq_length max_position_embeddings", Sense::Read("batch.seq_len")),
    Row("global_batch_size", Sense::Read("gradient_accumulation, with the cards")),
    Row(
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size \
         expert_tensor_parallel_size sequence_parallel",
        Sense::Read("parallel.mesh"),
    ),
    Row(
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank \
         virtual_pipeline_model_parallel_size",
        Sense::Read("parallel.engine.megatron.virtual_pipeline"),
    ),
    Row(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split \
         account_for_loss_in_pipeline_split pipeline_model_parallel_layout num_layers_in_first_pipeline_stage \
         num_layers_in_last_pipeline_stage",
        Sense::Read("parallel.engine.megatron.split"),
    ),
    Row(
        "use_distributed_optimizer overlap_grad_reduce recompute_granularity recompute_method recompute_num_layers \
         recompute_activations bf16 fp16 optimizer make_vocab_size_divisible_by mtp_num_layers recompute_modules \
         cross_entropy_loss_fusion cross_entropy_fusion_impl gradient_accumulation_fusion cpu_offloading_num_layers \
         cp_comm_type checkpoint_activations moe_layer_recompute",
        Sense::Read("parallel.engine.megatron, weights, optimizer.kind"),
    ),
    Row(
        "moe_token_dispatcher_type moe_router_dtype moe_shared_expert_overlap moe_expert_capacity_factor \
         moe_pad_expert_input_to_capacity moe_flex_dispatcher_backend",
        Sense::Read("parallel.engine.megatron.moe"),
    ),
    Row(
        "fp8_format fp8 fp8_recipe fp8_param_gather first_last_layers_bf16 num_layers_at_start_in_bf16 \
         num_layers_at_end_in_bf16",
        Sense::Read("parallel.engine.megatron.fp8"),
    ),
    // Under bf16 it is on unless gradients are reduced in bf16 (validate_args).
    Row(
        "grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32",
        Sense::Read("parallel.engine.megatron.main_gradients"),
    ),
    Row(
        "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
        Sense::Read("parallel.engine.megatron.precision_aware"),
    ),
    Row(
        "optimizer_cpu_offload optimizer_offload_fraction",
        Sense::Read("parallel.engine.megatron.optimizer_cpu_offload_percent"),
    ),
    Row(
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy fsdp_double_buffer",
        Sense::Read("parallel.engine.megatron.fsdp"),
    ),
    Row("attention_dropout hidden_dropout", Sense::Read("0; others are said")),
    Row(
        "num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups group_query_attention \
         kv_channels vocab_size padded_vocab_size swiglu normalization untie_embeddings_and_output_weights \
         position_embedding_type num_experts moe_router_topk moe_ffn_hidden_size disable_bias_linear add_bias_linear \
         add_qkv_bias qk_layernorm use_rotary_position_embeddings multi_latent_attention squared_relu \
         moe_shared_expert_intermediate_size moe_layer_freq tokenizer_type tokenizer_model position_embedding",
        Sense::Read("the model, where none is named"),
    ),
    Row(
        "rotary_* moe_* norm_epsilon no_position_embedding kv_lora_rank q_lora_rank qk_* v_head_dim mscale* \
         use_rope_scaling rope_* yarn_* original_max_position_embeddings beta_fast beta_slow openai_gelu quick_geglu \
         relative_attention_* softmax_scale softmax_type attention_output_gate attn_output_gate glu_linear_offset \
         activation_func_clamp_value mla_down_proj_fusion cache_mla_latents",
        Sense::Harmless("the model's shape: where it is not all here it is given by its name or its config.json"),
    ),
    Row(
        "window_size window_attn_skip_freq",
        Sense::Said("attention looks at every position in the simulation, which keeps as much"),
    ),
    Row(
        "enable_cuda_graph cuda_graph* external_cuda_graph optimizer_cuda_graph inference_cuda_graph_scope",
        Sense::Said("CUDA graphs are not simulated: their pools are more"),
    ),
    Row(
        "overlap_param_gather_with_optimizer_step overlap_moe_expert_parallel_comm delay_wgrad_compute use_nccl_ub nccl_ub \
         reuse_grad_buf_for_mxfp8_param_ag defer_embedding_wgrad_compute wgrad_deferral_limit \
         fp32_residual_connection num_distributed_optimizer_instances use_layer_wise_distributed_optimizer \
         distribute_saved_activations keep_fp8_transpose_cache reduce_scatter_with_fp32_accumulation sharp*",
        Sense::Said("its buffers are not simulated: those of the plain way are"),
    ),
    Row("rampup_batch_size step_batch_size_schedule", Sense::Said("the batch of the last step is taken")),
    Row(
        "use_torch_fsdp2 torch_fsdp2_* init_model_with_meta_device",
        Sense::Refused("torch's own FSDP is: `vramcast train MODEL --engine fsdp2`"),
    ),
    Row(
        "cpu_offloading cpu_offloading_activations cpu_offloading_weights fine_grained_activation_offloading \
         offload_modules main_params_dtype outer_dp_sharding_strategy megatron_fsdp_* hybrid_context_parallel \
         hierarchical_context_parallel_sizes gtp_* expert_gtp_* tensor_parallel_num_weight_shards \
         expert_tensor_parallel_num_weight_shards freeze_all_layers fp4* kitchen_* use_kitchen* te_precision_config_file \
         quant_recipe store_param_remainders pin_cpu_* enable_full_sharding_in_hsdp model_parallel_size batch_size warmup",
        Sense::Refused("leave it out: it is not simulated; `vramcast list settings` shows what is, under megatron"),
    ),
    Row(
        "hybrid_* mamba_* spec linear_attention_freq linear_* experimental_attention_variant dsa_* heterogeneous_* \
         enable_mhc_connections mhc_* encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length \
         is_hybrid_model export_*",
        Sense::Refused("only decoders of attention and feed-forwards are: give one by --model, without this"),
    ),
    Row(
        "language_model_type vision_* img_* image_* patch_dim num_channels num_classes dino_* swin_* disable_vision_class_token \
         pixel_shuffle use_tiling max_num_tiles freeze_LM freeze_ViT bert_* biencoder_* ict_* retriever_* \
         mask_* model_provider dataset_provider task guess_file answer_file sample_* out_seq_length temperature top_k \
         top_p num_tokens_to_generate termination_id prompt_file prompt_type use_coordinator num_samples greedy",
        Sense::Refused("another task: only models of text are simulated under Megatron"),
    ),
    Row(
        "rl_* grpo_* perform_rl_step langrl_* refit_method teacher_* kd_* logits_load_* logits_save_*",
        Sense::Refused("another task: only language modelling is simulated under Megatron"),
    ),
    Row(
        "train_* lr* min_lr weight_decay* adam_* lion_* muon_* sgd_* soap_* adaptive_muon_* clip_grad init_method_* seed split data_* tokenizer_* vocab_* merge_file \
         null_tokenizer_* special_tokens chat_template trust_remote_code use_gigatoken \
         save* load* eval_* log_* logging_level tensorboard_* wandb_* one_logger_* app_tag_* num_workers \
         distributed_* transformer_impl use_te use_flash_attn flash_attention_version attention_backend overlap_param_gather \
         overlap_p2p_* align_* no_* high_priority_* \
         attention_softmax_in_fp32 use_mcore_models use_legacy_models exit_* ckpt_* dist_ckpt* use_dist_ckpt mock_data \
         empty_unused_memory_level manual_gc* use_cpu_initialization perform_initialization start_* end_weight_decay \
         override_* tp_comm_* cross_entropy_* timing_* timers fp8_* apply_* masked_softmax_fusion \
         tiktoken_* reset_* cache_dir finetune use_checkpoint* use_mp_args_* use_tokenizer_* te_rng_tracker use_te_* \
         calculate_per_token_loss check_for_* check_weight_* decoupled_* enable_experimental ddp_* use_tp_pp_dp_mapping bias_* \
         per_split_data_args_path valid_data_path test_data_path create_attention_mask_in_dataloader mmap_bin_files \
         profile* use_pytorch_profiler use_nsys_profiler pytorch_profiler_* nvtx_ranges record_* memory_snapshot_path \
         eod_mask_loss dataloader_* fim_* sft sft_* loss_scale* initial_loss_scale min_loss_scale hysteresis \
         fp16_lm_cross_entropy onnx_safe inference_* use_legacy_static_engine enable_chunked_prefill \
         decode_only_cuda_graphs flash_decode num_speculative_tokens async_* non_persistent_* replication* auto_detect_* \
         local_rank lazy_mpu_init nccl_* create_all_gather_group use_gloo_process_groups use_ring_exchange_p2p use_sharp \
         adlr_* result_rejected_* rerun_* error_injection_* straggler_* disable_* enable_msc enable_ft_package \
         enable_gloo_process_groups calc_ft_timeouts ft_* inprocess_* otel_* gpu_sniff_* flight_recorder_* run_workload_* \
         suggested_communication_unit_size mtp_* batch_p2p_* deallocate_pipeline_outputs deterministic_mode \
         batch_invariant_* persist_layer_norm memory_efficient_layer_norm use_fused_* rope_fusion fused_* \
         use_transformer_engine_op_fuser use_grouped_gemm_* symmetric_* object_storage_* num_dataset_builder_threads mid_level_* \
         per_dataset_* phase_transition_iterations iterations_to_skip skip_train full_validation multiple_validation_sets \
         validation_set_names grad_norm_skip_threshold wd_incr_* wsd_* yaml_cfg use_mup mup_* embedding_init_* \
         use_same_sampling_seed_across_dp_ranks allow_ambiguous_pad_tokens iter_per_epoch sample_rate config_logger_dir \
         dump_param_* filter_warnings modules_to_filter set_level_* throughput_* runtime_time_unit \
         variable_seq_lengths microbatch_group_size_per_vp_stage overlap_cpu_optimizer_d2h_h2d \
         use_torch_optimizer_for_cpu_offload use_persistent_ckpt_worker verify_integrity pretrained_checkpoint \
         average_in_collective bucket_size pad_buckets_* grad_reduce_in_fp32 max_tokens_to_oom fake_process_group \
         use_one_sent_docs short_seq_prob head_lr_mult tp_only_amax_red pipeline_model_parallel_comm_backend \
         clone_scatter_output_in_embedding DDP_impl embedding_path block_data_path titles_data_path evidence_data_path local_*",
        Sense::Harmless("which data, what is logged and saved, how ranks talk, the course of training"),
    ),
];
