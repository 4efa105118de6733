"""Parts of pipelines of diffusers, as their repositories have them (from memory of the published files; each part's parameters are checked by measure.py)."""
import copy

CLIP_L = {"_class": "CLIPTextModel", "model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "projection_dim": 768, "vocab_size": 49408, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "bos_token_id": 0, "eos_token_id": 2}
CLIP_LP = {**CLIP_L, "_class": "CLIPTextModelWithProjection", "architectures": ["CLIPTextModelWithProjection"]}
CLIP_G = {**CLIP_LP, "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32, "projection_dim": 1280, "hidden_act": "gelu"}
T5 = {"_class": "T5EncoderModel", "model_type": "t5", "architectures": ["T5EncoderModel"], "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "num_decoder_layers": 24, "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32, "tie_word_embeddings": False, "dropout_rate": 0.1}
UMT5 = {**T5, "_class": "UMT5EncoderModel", "model_type": "umt5", "architectures": ["UMT5EncoderModel"], "vocab_size": 256384}
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 4, "norm_num_groups": 32, "sample_size": 512, "scaling_factor": 0.18215}
VAE_XL = {**VAE, "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True}
VAE_16 = {**VAE, "sample_size": 1024, "latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False, "use_post_quant_conv": False, "force_upcast": True}
UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4, "block_out_channels": [320, 640, 1280, 1280], "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3, "layers_per_block": 2, "cross_attention_dim": 768, "attention_head_dim": 8}
UNET_XL = {"_class_name": "UNet2DConditionModel", "sample_size": 128, "in_channels": 4, "out_channels": 4, "block_out_channels": [320, 640, 1280], "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "layers_per_block": 2, "transformer_layers_per_block": [1, 2, 10], "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20], "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}
SD3 = {"_class_name": "SD3Transformer2DModel", "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 192}
FLUX = {"_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True}
WAN = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-06, "rope_max_seq_len": 1024}
WAN_VAE = {"_class_name": "AutoencoderKLWan", "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True], "dropout": 0.0}
QWEN = {"_class_name": "QwenImageTransformer2DModel", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584, "guidance_embeds": False, "axes_dims_rope": [16, 56, 56]}
QWEN_VAE = {"_class_name": "AutoencoderKLQwenImage", "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True], "dropout": 0.0}
QWEN_VL = {"_class": "Qwen2_5_VLForConditionalGeneration", "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {"model_type": "qwen2_5_vl_text", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}}, "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}, "tie_word_embeddings": False}
LTX = {"_class_name": "LTXVideoTransformer3DModel", "in_channels": 128, "out_channels": 128, "patch_size": 1, "patch_size_t": 1, "num_attention_heads": 32, "attention_head_dim": 64, "cross_attention_dim": 2048, "num_layers": 28, "caption_channels": 4096}
LTX_VAE = {"_class_name": "AutoencoderKLLTXVideo", "latent_channels": 128, "block_out_channels": [128, 256, 512, 512], "layers_per_block": [4, 3, 3, 3, 4], "spatio_temporal_scaling": [True, True, True, False], "patch_size": 4, "patch_size_t": 1}
HUNYUAN = {"_class_name": "HunyuanVideoTransformer3DModel", "in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 20, "num_single_layers": 40, "num_refiner_layers": 2, "mlp_ratio": 4.0, "patch_size": 2, "patch_size_t": 1, "qk_norm": "rms_norm", "guidance_embeds": True, "text_embed_dim": 4096, "pooled_projection_dim": 768, "rope_axes_dim": [16, 56, 56]}
HUNYUAN_VAE = {"_class_name": "AutoencoderKLHunyuanVideo", "latent_channels": 16, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4, "mid_block_add_attention": True}
LLAMA = {"_class": "LlamaModel", "model_type": "llama", "architectures": ["LlamaModel"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128320, "rope_theta": 500000.0, "max_position_embeddings": 8192}

PIPELINES = {
    "sd15": {"_class_name": "StableDiffusionPipeline", "text_encoder": CLIP_L, "unet": UNET, "vae": VAE},
    "sdxl": {"_class_name": "StableDiffusionXLPipeline", "text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "unet": UNET_XL, "vae": VAE_XL},
    "sd3": {"_class_name": "StableDiffusion3Pipeline", "text_encoder": CLIP_LP, "text_encoder_2": CLIP_G, "text_encoder_3": T5, "transformer": SD3, "vae": VAE_16},
    "flux": {"_class_name": "FluxPipeline", "text_encoder": CLIP_L, "text_encoder_2": T5, "transformer": FLUX, "vae": {**VAE_16, "scaling_factor": 0.3611, "shift_factor": 0.1159}},
    "qwen-image": {"_class_name": "QwenImagePipeline", "text_encoder": QWEN_VL, "transformer": QWEN, "vae": QWEN_VAE},
    "wan": {"_class_name": "WanPipeline", "text_encoder": UMT5, "transformer": WAN, "vae": WAN_VAE},
    "ltx": {"_class_name": "LTXPipeline", "text_encoder": T5, "transformer": LTX, "vae": LTX_VAE},
    "hunyuan-video": {"_class_name": "HunyuanVideoPipeline", "text_encoder": LLAMA, "text_encoder_2": CLIP_L, "transformer": HUNYUAN, "vae": HUNYUAN_VAE},
}


def shallow(config, layers):
    """The same with few layers, for a machine with little memory."""
    c = copy.deepcopy(config)
    for key in ("num_layers", "num_single_layers", "num_hidden_layers", "num_decoder_layers", "num_refiner_layers"):
        for inner in (c, c.get("text_config", {})):
            if key in inner and c.get("_class_name", "").startswith("Autoencoder") is False: inner[key] = min(inner[key], layers)
    if "vision_config" in c: c["vision_config"]["depth"] = layers; c["vision_config"]["fullatt_block_indexes"] = [0]
    return c
