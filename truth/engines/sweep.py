#!/usr/bin/env python3
"""Draws runs of llama.cpp, runs them on a card that is pretended, and keeps the buffers its log names.
usage: sweep.py PROBE BUILD NUMBER SEED COUNT OUT.jsonl [users|popular]   (PROBE: llama.cpp linked with a stub of CUDA, see FORMAT.md; `users`: what people type, hybrids among it; `popular`: models that people load in 2026)"""
import json, os, random, re, struct, subprocess, sys, tempfile
T = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24), "q8_0": (8, 32, 34), "q2_K": (10, 256, 84), "q3_K": (11, 256, 110),
     "q4_K": (12, 256, 144), "q5_K": (13, 256, 176), "q6_K": (14, 256, 210), "iq4_nl": (20, 32, 18), "iq4_xs": (23, 256, 136), "bf16": (30, 1, 2), "mxfp4": (39, 32, 17)}
# name: architecture, layers, hidden, feed-forward, heads, kv heads, head, vocabulary, positions, more
M = {
 "llama-3b": ("llama", 28, 3072, 8192, 24, 8, 128, 128256, 131072, dict(tied=1, rope_freqs=1)),
 "llama-70b": ("llama", 80, 8192, 28672, 64, 8, 128, 128256, 131072, dict(rope_freqs=1)),
 "tinyllama": ("llama", 22, 2048, 5632, 32, 4, 64, 32000, 2048, {}),
 "mixtral": ("llama", 32, 4096, 14336, 32, 8, 128, 32000, 32768, dict(experts=8, used=2, eff=14336)),
 "qwen2-0.5b": ("qwen2", 24, 896, 4864, 14, 2, 64, 151936, 32768, dict(tied=1, bias=1)),
 "qwen2-72b": ("qwen2", 80, 8192, 29568, 64, 8, 128, 152064, 32768, dict(bias=1)),
 "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, dict(tied=1, qknorm=1)),
 "qwen3-32b": ("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 40960, dict(qknorm=1)),
 "qwen3moe-235b": ("qwen3moe", 94, 4096, 12288, 64, 4, 128, 151936, 40960, dict(qknorm=1, experts=128, used=8, eff=1536)),
 "qwen2moe-57b": ("qwen2moe", 28, 3584, 18944, 28, 4, 128, 151936, 32768, dict(bias=1, experts=64, used=8, eff=2560, shared=20480, shared_gate=1)),
 "gemma-2b": ("gemma", 18, 2048, 16384, 8, 1, 256, 256000, 8192, dict(tied=1)),
 "gemma2-9b": ("gemma2", 42, 3584, 14336, 16, 8, 256, 256000, 8192, dict(tied=1, post=1, window=4096, f={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})),
 "gemma3-1b": ("gemma3", 26, 1152, 6912, 4, 1, 256, 262144, 32768, dict(tied=1, post=1, qknorm=1, window=512)),
 "gemma3-27b": ("gemma3", 62, 5376, 21504, 32, 16, 128, 262208, 131072, dict(tied=1, post=1, qknorm=1, window=1024)),
 "phi2": ("phi2", 32, 2560, 10240, 32, 32, 80, 51200, 2048, dict(ln=1, fused_qkv=1, qkv_bias=1, o_bias=1, up_only=1, up_bias=1, no_ffn_norm=1, out_bias=1, rot=32)),
 "phi3-medium": ("phi3", 40, 5120, 17920, 40, 10, 128, 32064, 131072, dict(fused=1, long=1, orig=4096)),
 "glm4-9b": ("glm4", 40, 4096, 13696, 32, 2, 128, 151552, 32768, dict(fused_up=1, post=1, bias=1, rot=64)),
 "glm4-air": ("glm4moe", 46, 4096, 10944, 96, 8, 128, 151552, 131072, dict(renamed=1, qknorm=1, bias=1, experts=128, used=8, eff=1408, shared=1408, dense=1, probs=1, rot=64, f={"expert_weights_scale": 1.0}, b={"expert_weights_norm": True}, u={"expert_shared_count": 1, "expert_gating_func": 2})),
 "gpt-oss-20b": ("gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 131072, dict(renamed=1, bias=1, o_bias=1, sinks=1, window=128, experts=32, used=4, eff=2880, exp_bias=1)),
 "gpt-oss-120b": ("gpt-oss", 36, 2880, 2880, 64, 8, 64, 201088, 131072, dict(renamed=1, bias=1, o_bias=1, sinks=1, window=128, experts=128, used=4, eff=2880, exp_bias=1)),
 "deepseek-lite": ("deepseek2", 27, 2048, 10944, 16, 1, 576, 102400, 163840, dict(mla=(0, 512, 64, 192, 128), experts=64, used=6, eff=1408, shared=2816, dense=1, u={"expert_shared_count": 2})),
 "deepseek-v3": ("deepseek2", 61, 7168, 18432, 128, 1, 576, 129280, 163840, dict(mla=(1536, 512, 64, 192, 128), experts=256, used=8, eff=2048, shared=2048, dense=3, probs=1, u={"expert_shared_count": 1, "expert_gating_func": 2, "expert_group_count": 8, "expert_group_used_count": 4}, f={"expert_weights_scale": 2.5}, b={"expert_weights_norm": True})),
 "command-r": ("command-r", 40, 8192, 22528, 64, 64, 128, 256000, 131072, dict(ln=1, nobias=1, tied=1, no_ffn_norm=1, f={"logit_scale": 0.0625})),
 "command-r7b": ("cohere2", 32, 4096, 14336, 32, 8, 128, 256000, 8192, dict(ln=1, nobias=1, tied=1, no_ffn_norm=1, window=4096, f={"logit_scale": 0.25})),
 "olmo2-7b": ("olmo2", 32, 4096, 11008, 32, 32, 128, 100352, 4096, dict(whole_norms=1, post=1, no_norms=1)),
 "olmoe": ("olmoe", 16, 2048, 1024, 16, 16, 128, 50304, 4096, dict(whole_norms=1, experts=64, used=8, eff=1024)),
 "starcoder2-3b": ("starcoder2", 30, 3072, 12288, 24, 2, 128, 49152, 16384, dict(ln=1, bias=1, o_bias=1, up_only=1, up_bias=1, tied=1)),
 "stablelm-3b": ("stablelm", 32, 2560, 6912, 32, 32, 80, 50304, 4096, dict(ln=1, rot=20, b={"use_parallel_residual": False})),
 "falcon-7b": ("falcon", 32, 4544, 18176, 71, 1, 64, 65024, 2048, dict(ln=1, fused_qkv=1, up_only=1, no_ffn_norm=1)),
 "neox-20b": ("gptneox", 44, 6144, 24576, 64, 64, 96, 50432, 2048, dict(ln=1, fused_qkv=1, qkv_bias=1, o_bias=1, up_only=1, up_bias=1, rot=24, b={"use_parallel_residual": True})),
 "gpt2": ("gpt2", 12, 768, 3072, 12, 12, 64, 50257, 1024, dict(ln=1, fused_qkv=1, qkv_bias=1, o_bias=1, up_only=1, up_bias=1, pos=1, tied=1)),
 "smollm3-3b": ("smollm3", 36, 2048, 11008, 16, 4, 128, 128256, 65536, dict(tied=1)),
 "granite-8b": ("granite", 40, 4096, 12800, 32, 8, 128, 49155, 131072, dict(tied=1, f={"logit_scale": 16.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0078})),
 "granitemoe-3b": ("granitemoe", 32, 1536, 512, 24, 8, 64, 49155, 4096, dict(tied=1, experts=40, used=8, eff=512, ff_is_eff=1, f={"logit_scale": 6.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0156})),
 "exaone4-32b": ("exaone4", 64, 5120, 27392, 40, 8, 128, 102400, 131072, dict(qknorm=1, post=1, no_norms=1, window=4096)),
 "nemotron-8b": ("nemotron", 32, 4096, 16384, 32, 8, 128, 256000, 4096, dict(ln=1, up_only=1, rot=64)),
 "seed-36b": ("seed_oss", 64, 5120, 27648, 80, 8, 128, 155136, 524288, dict(renamed=1, bias=1)),
 "hunyuan-a13b": ("hunyuan-moe", 32, 4096, 3072, 32, 8, 128, 128167, 262144, dict(qknorm=1, tied=1, experts=64, used=8, eff=3072, shared=3072)),
 "llama4-scout": ("llama4", 48, 5120, 16384, 40, 8, 128, 202048, 10485760, dict(experts=16, used=1, eff=8192, shared=8192, rope_freqs=1, u={"interleave_moe_layer_step": 1})),
 "minimax-m2": ("minimax-m2", 62, 3072, 1536, 48, 8, 128, 200064, 196608, dict(whole_norms=1, experts=256, used=8, eff=1536, probs=1, rot=64, u={"expert_gating_func": 2})),
 "dots1": ("dots1", 62, 4096, 10944, 32, 32, 128, 152064, 32768, dict(qknorm=1, experts=128, used=6, eff=1408, shared=2816, dense=1, probs=1, f={"expert_weights_scale": 2.5}, b={"expert_weights_norm": True}, u={"expert_shared_count": 2, "expert_gating_func": 2})),
 "arcee-4.5b": ("arcee", 36, 2560, 18432, 20, 4, 128, 128128, 65536, dict(up_only=1)),
 "internlm2-7b": ("internlm2", 32, 4096, 14336, 32, 8, 128, 92544, 32768, {}),
 "qwen3-8b": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, dict(qknorm=1)),
 "qwen3-14b": ("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, 40960, dict(qknorm=1)),
 "qwen3-4b-2507": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 262144, dict(tied=1, qknorm=1)),
 "qwen3-30b-a3b": ("qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, 262144, dict(qknorm=1, experts=128, used=8, eff=768)),
 "qwen3-vl-8b": ("qwen3vl", 36, 4096, 12288, 32, 8, 128, 151936, 262144, dict(qknorm=1, u={"n_deepstack_layers": 3}, a={"rope.dimension_sections": [24, 20, 20, 0]})),
 "gemma3-4b": ("gemma3", 34, 2560, 10240, 8, 4, 256, 262208, 131072, dict(tied=1, post=1, qknorm=1, window=1024)),
 "gemma3-12b": ("gemma3", 48, 3840, 15360, 16, 8, 256, 262208, 131072, dict(tied=1, post=1, qknorm=1, window=1024)),
 "llama-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, dict(rope_freqs=1)),
 "mistral-small-24b": ("llama", 40, 5120, 32768, 32, 8, 128, 131072, 131072, {}),
 "ministral3-8b": ("mistral3", 34, 4096, 14336, 32, 8, 128, 131072, 262144, dict(f={"attention.temperature_scale": 0.1}, orig=16384)),
 "devstral2-123b": ("mistral3", 88, 12288, 28672, 96, 8, 128, 131072, 262144, dict(f={"attention.temperature_scale": 0.1}, orig=8192)),
 "r1-distill-qwen-32b": ("qwen2", 64, 5120, 27648, 40, 8, 128, 152064, 131072, dict(bias=1)),
 "phi4-14b": ("phi3", 40, 5120, 17920, 40, 10, 128, 100352, 16384, dict(fused=1)),
 "phi4-mini": ("phi3", 32, 3072, 8192, 24, 8, 128, 200064, 131072, dict(fused=1, long=1, orig=4096, tied=1, rot=96)),
 "glm47-flash": ("deepseek2", 47, 2048, 10240, 20, 1, 576, 154880, 202752, dict(mla=(768, 512, 64, 256, 256), experts=64, used=4, eff=1536, shared=1536, dense=1, probs=1, u={"expert_shared_count": 1, "expert_gating_func": 2, "expert_group_count": 1, "expert_group_used_count": 1}, f={"expert_weights_scale": 1.8}, b={"expert_weights_norm": True})),
 "granite4-micro": ("granite", 40, 2560, 8192, 40, 8, 64, 100352, 131072, dict(tied=1, f={"logit_scale": 10.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0156})),
 "ernie-21b-a3b": ("ernie4_5-moe", 28, 2560, 12288, 20, 4, 128, 103424, 131072, dict(tied=1, experts=64, used=6, eff=1536, shared=3072, dense=1, probs=1, u={"expert_shared_count": 2, "interleave_moe_layer_step": 1})),
 "bge-large": ("bert", 24, 1024, 4096, 16, 16, 64, 30522, 512, dict(bert=1)),
}
# Layers of several kinds: what a layer is, by its number.
HYBRIDS = {
 "qwen35-9b": ("qwen35", 32, 4096, 12288, 16, 4, 256, 248320, 262144, dict(delta=(4096, 128, 32, 16), rot=64)),
 "qwen35moe-35b": ("qwen35moe", 40, 2048, 512, 16, 2, 256, 248320, 262144, dict(delta=(4096, 128, 32, 16), rot=64, experts=256, used=8, eff=512, shared=512)),
 "granite-h-small": ("granitehybrid", 40, 4096, 768, 32, 8, 128, 100352, 131072, dict(tied=1, mamba=(8192, 128, 128, 1), full=(5, 15, 25, 35), experts=72, used=10, shared=1536, f={"logit_scale": 16.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0078})),
 "gemma4-31b": ("gemma4", 60, 5376, 21504, 32, 16, 256, 262144, 262144, dict(tied=1, gemma4=(512, 4, 0, 0), window=1024)),
 "qwen35-4b": ("qwen35", 32, 2560, 9216, 16, 4, 256, 248320, 262144, dict(tied=1, delta=(4096, 128, 32, 16), rot=64)),
 "qwen35-27b": ("qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 262144, dict(delta=(6144, 128, 48, 16), rot=64)),
 "qwen35moe-122b": ("qwen35moe", 48, 3072, 1024, 32, 2, 256, 248320, 262144, dict(delta=(8192, 128, 64, 16), rot=64, experts=256, used=8, eff=1024, shared=1024)),
 "qwen3next-80b": ("qwen3next", 48, 2048, 5120, 16, 2, 256, 151936, 262144, dict(delta=(4096, 128, 32, 16), rot=64, experts=512, used=10, eff=512, shared=512)),
 "granite-h-tiny": ("granitehybrid", 40, 1536, 512, 12, 4, 128, 100352, 131072, dict(tied=1, mamba=(3072, 128, 48, 1), b={"rope.scaling.finetuned": False}, full=(5, 15, 25, 35), experts=64, used=6, shared=1024, f={"logit_scale": 6.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0078})),
 "granite-h-micro": ("granitehybrid", 40, 2048, 8192, 32, 8, 64, 100352, 131072, dict(tied=1, mamba=(4096, 128, 64, 1), b={"rope.scaling.finetuned": False}, full=(5, 15, 25, 35), f={"logit_scale": 8.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0156})),
 "nemotron-nano-9b": ("nemotron_h", 56, 4480, 15680, 40, 8, 128, 131072, 131072, dict(mamba=(10240, 128, 128, 8), order="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-")),
 "nemotron3-nano-30b": ("nemotron_h_moe", 52, 2688, 1856, 32, 2, 128, 131072, 1048576, dict(mamba=(4096, 128, 64, 8), order="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", experts=128, used=6, eff=1856, shared=3712, f={"expert_weights_scale": 2.5}, b={"expert_weights_norm": True})),
 "lfm2-2.6b": ("lfm2", 30, 2048, 10752, 32, 8, 64, 65536, 128000, dict(tied=1, conv=3, full=(2, 6, 10, 14, 18, 22, 25, 28))),
 "lfm2-8b-a1b": ("lfm2moe", 24, 2048, 7168, 32, 8, 64, 65536, 128000, dict(tied=1, conv=3, full=(2, 6, 10, 14, 18, 21), dense=2, experts=32, used=4, eff=1792, u={"expert_gating_func": 2})),
 "gemma4-e2b": ("gemma4", 35, 1536, 6144, 8, 1, 256, 262144, 131072, dict(tied=1, gemma4=(512, 1, 256, 20), window=512, period=5)),
 "gemma4-26b-a4b": ("gemma4", 30, 2816, 2112, 16, 8, 256, 262144, 262144, dict(tied=1, gemma4=(512, 2, 0, 0), window=1024, experts=128, used=8, eff=704)),
 "gemma3n-e4b": ("gemma3n", 35, 2048, 16384, 8, 2, 256, 262400, 32768, dict(tied=1, gemma3n=(256, 15), window=512)),
 "gemma4-e4b": ("gemma4", 42, 2560, 10240, 8, 2, 256, 262144, 131072, dict(tied=1, gemma4=(512, 2, 256, 18), window=512)),
}
def hybrid(name, kinds):
    arch, L, d, ff, h, kv, hd, V, ctx, x = HYBRIDS[name]; w, w2, emb, out = kinds; md = {"general.architecture": arch, "general.name": name}; ts = []
    k = lambda key, v: md.__setitem__(f"{arch}.{key}", v)
    def t(n, shape, kind="f32"):
        if kind != "f32" and (shape[0] % T[kind][1] or T[kind][1] > shape[0]): kind = "q8_0" if shape[0] % 32 == 0 else "f16"
        ts.append([n, list(shape), kind])
    delta, mamba, g, n3, conv3, order = x.get("delta"), x.get("mamba"), x.get("gemma4"), x.get("gemma3n"), x.get("conv"), x.get("order")
    full = [(i + 1) % 4 == 0 for i in range(L)] if delta else [c == "*" for c in order] if order else [i in x["full"] for i in range(L)] if mamba or conv3 else [(i + 1) % x.get("period", 5 if n3 else 6) == 0 for i in range(L)]
    wide_ff = [ff if c in "-E" else 0 for c in order] if order else ff
    for key, v in (("block_count", L), ("context_length", ctx), ("embedding_length", d), ("feed_forward_length", wide_ff), ("attention.head_count", h), ("vocab_size", V), ("attention.layer_norm_rms_epsilon", 1e-6), ("rope.freq_base", 1e6)): k(key, v)
    md["tokenizer.ggml.model"] = "no_vocab"
    k("attention.head_count_kv", kv if delta or n3 else [g[1] if f else kv for f in full] if g else [kv if f else 0 for f in full])
    k("attention.key_length", g[0] if g else hd); k("attention.value_length", g[0] if g else hd); k("rope.dimension_count", x.get("rot", g[0] if g else hd))
    if delta or mamba:
        inner, state, rank, groups = delta or mamba
        for key, v in (("conv_kernel", 4), ("inner_size", inner), ("state_size", state), ("time_step_rank", rank), ("group_count", groups)): k("ssm." + key, v)
    if order: k("attention.layer_norm_epsilon", 1e-5)
    if conv3: k("shortconv.l_cache", conv3)
    if delta and arch != "qwen3next": k("rope.dimension_sections", [11, 11, 10, 0])
    if delta: k("full_attention_interval", 4)
    if g:
        k("attention.sliding_window", x["window"]); k("attention.sliding_window_pattern", [not f for f in full]); k("attention.key_length_swa", hd); k("attention.value_length_swa", hd); k("rope.dimension_count_swa", hd); k("rope.freq_base_swa", 1e4)
        k("embedding_length_per_layer_input", g[2]); k("attention.shared_kv_layers", g[3]); k("final_logit_softcapping", 30.0)
    if n3: k("attention.sliding_window", x["window"]); k("attention.shared_kv_layers", n3[1]); k("embedding_length_per_layer_input", n3[0])
    if x.get("experts"): k("expert_count", x["experts"]); k("expert_used_count", x["used"])
    if x.get("shared"): k("expert_shared_feed_forward_length", x["shared"])
    if x.get("eff"): k("expert_feed_forward_length", x["eff"])
    if x.get("dense"): k("leading_dense_block_count", x["dense"])
    for s in ("f", "u", "b"):
        for key, v in x.get(s, {}).items(): k(key, v)
    t("token_embd.weight", (d, V), emb); t("token_embd_norm.weight" if conv3 else "output_norm.weight", (d,))
    if not x.get("tied"): t("output.weight", (d, V), out)
    if g: t("rope_freqs.weight", (g[0] // 2,))
    if g and g[2]: t("per_layer_token_embd.weight", (g[2] * L, V), emb); t("per_layer_model_proj.weight", (d, g[2] * L), w); t("per_layer_proj_norm.weight", (g[2],))
    if n3: t("altup_proj.weight", (d, d, 3), "f16"); t("altup_unembd_proj.weight", (d, d, 3), "f16"); t("per_layer_token_embd.weight", (n3[0] * L, V), emb); t("per_layer_model_proj.weight", (d, n3[0] * L), "f16"); t("per_layer_proj_norm.weight", (n3[0],))
    for i in range(L):
        b = f"blk.{i}."; t(b + "attn_norm.weight", (d,)); cached = not (g or n3) or i < L - (g[3] if g else n3[1])
        if full[i] or g or n3:
            wide, keys = (g[0] if g and full[i] else hd), (g[1] if g and full[i] else kv); normed = not mamba
            t(b + "attn_q.weight", (d, h * wide * (2 if delta else 1)), w)
            if cached or n3:
                t(b + "attn_k.weight", (d, keys * wide), w)
                if not g or not full[i] or g[2]: t(b + "attn_v.weight", (d, keys * wide), w2)
                if normed: t(b + "attn_k_norm.weight", (wide,))
            t(b + "attn_output.weight", (h * wide, d), w)
            if normed: t(b + "attn_q_norm.weight", (wide,))
        elif delta:
            value, conv = rank * state, 2 * groups * state + rank * state
            t(b + "attn_qkv.weight", (d, conv), w); t(b + "attn_gate.weight", (d, value), w); t(b + "ssm_conv1d.weight", (4, conv)); t(b + "ssm_dt.bias", (rank,)); t(b + "ssm_a", (rank,))
            if arch == "qwen3next": t(b + "ssm_ba.weight", (d, 2 * rank), w)
            else: t(b + "ssm_beta.weight", (d, rank), w); t(b + "ssm_alpha.weight", (d, rank), w)
            t(b + "ssm_norm.weight", (state,)); t(b + "ssm_out.weight", (value, d), w)
        elif conv3: t(b + "shortconv.conv.weight", (conv3, d)); t(b + "shortconv.in_proj.weight", (d, 3 * d), w); t(b + "shortconv.out_proj.weight", (d, d), w)
        elif not order or order[i] == "M":
            conv = inner + 2 * groups * state
            t(b + "ssm_in.weight", (d, 2 * inner + 2 * groups * state + rank), w); t(b + "ssm_conv1d.weight", (4, conv)); t(b + "ssm_conv1d.bias", (conv,)); t(b + "ssm_dt.bias", (rank,)); t(b + "ssm_a", (1, rank)); t(b + "ssm_d", (1, rank)); t(b + "ssm_norm.weight", (inner // groups, groups)); t(b + "ssm_out.weight", (inner, d), w)
        if order and order[i] in "M*": continue
        if order and order[i] == "-": t(b + "ffn_up.weight", (d, ff), w); t(b + "ffn_down.weight", (ff, d), w2); continue
        if order:
            e, f, s = x["experts"], x["eff"], x["shared"]; t(b + "ffn_gate_inp.weight", (d, e)); t(b + "exp_probs_b.bias", (e,)); t(b + "ffn_up_exps.weight", (d, f, e), w); t(b + "ffn_down_exps.weight", (f, d, e), w2); t(b + "ffn_up_shexp.weight", (d, s), w); t(b + "ffn_down_shexp.weight", (s, d), w2); continue
        t(b + ("post_attention_norm.weight" if delta else "ffn_norm.weight"), (d,))
        if g or n3: t(b + "post_attention_norm.weight", (d,)); t(b + "post_ffw_norm.weight", (d,))
        if (g and g[2]) or n3: p = g[2] if g else n3[0]; t(b + "inp_gate.weight", (d, p)); t(b + "proj.weight", (p, d)); t(b + "post_norm.weight", (d,))
        if n3:
            t(b + "altup_correct_coef.weight", (4, 4)); t(b + "altup_correct_scale.weight", (d,)); t(b + "altup_predict_coef.weight", (4, 16)); t(b + "altup_router.weight", (d, 4)); t(b + "altup_router_norm.weight", (d,))
            t(b + "laurel_l.weight", (d, 64), w); t(b + "laurel_r.weight", (64, d), w); t(b + "laurel_post_norm.weight", (d,))
        if x.get("experts") and i >= x.get("dense", 0):
            e, f = x["experts"], x.get("eff", ff); t(b + "ffn_gate_inp.weight", (d, e))
            if g: t(b + "ffn_gate_inp.scale", (d,)); t(b + "pre_ffw_norm_2.weight", (d,)); t(b + "post_ffw_norm_1.weight", (d,)); t(b + "post_ffw_norm_2.weight", (d,)); t(b + "ffn_gate_up_exps.weight", (d, 2 * f, e), w); t(b + "ffn_down_exps.weight", (f, d, e), w2); t(b + "ffn_down_exps.scale", (e,))
            else: t(b + "ffn_gate_exps.weight", (d, f, e), w); t(b + "ffn_up_exps.weight", (d, f, e), w); t(b + "ffn_down_exps.weight", (f, d, e), w2)
            if conv3: t(b + "exp_probs_b.bias", (e,))
            if x.get("shared"): s = x["shared"]; t(b + "ffn_gate_shexp.weight", (d, s), w); t(b + "ffn_up_shexp.weight", (d, s), w); t(b + "ffn_down_shexp.weight", (s, d), w2)
            if delta: t(b + "ffn_gate_inp_shexp.weight", (d,))
        if not x.get("experts") or g or i < x.get("dense", 0): t(b + "ffn_gate.weight", (d, ff), w); t(b + "ffn_up.weight", (d, ff), w); t(b + "ffn_down.weight", (ff, d), w2)
    return md, ts
NEW = True # programs can say how many rows of logits they want since b9460
def model(name, kinds):
    if name in HYBRIDS: return hybrid(name, kinds)
    arch, L, d, ff, h, kv, hd, V, ctx, x = M[name]; w, w2, emb, out = kinds
    mla = x.get("mla"); md = {"general.architecture": arch, "general.name": name}
    k = lambda key, v: md.__setitem__(f"{arch}.{key}", v)
    for key, v in (("block_count", L), ("context_length", ctx), ("embedding_length", d), ("feed_forward_length", ff), ("attention.head_count", h), ("attention.head_count_kv", kv), ("vocab_size", V)): k(key, v)
    k("attention.key_length", hd); k("attention.value_length", 512 if mla else hd); k("rope.dimension_count", mla[2] if mla else x.get("rot", hd))
    k("attention.layer_norm_epsilon" if x.get("ln") or x.get("bert") else "attention.layer_norm_rms_epsilon", 1e-5); k("rope.freq_base", 500000.0); md["tokenizer.ggml.model"] = "no_vocab"
    if x.get("bert"): md["tokenizer.ggml.token_type_count"] = 2
    if x.get("window"): k("attention.sliding_window", x["window"])
    if x.get("experts"): k("expert_count", x["experts"]); k("expert_used_count", x["used"]); k("expert_feed_forward_length", x["eff"])
    if x.get("shared"): k("expert_shared_feed_forward_length", x["shared"])
    if x.get("dense") is not None: k("leading_dense_block_count", x.get("dense", 0))
    if x.get("orig"): k("rope.scaling.original_context_length", x["orig"])
    if mla:
        if mla[0]: k("attention.q_lora_rank", mla[0])
        k("attention.kv_lora_rank", mla[1]); k("attention.key_length_mla", mla[3]); k("attention.value_length_mla", mla[4])
    for s in ("f", "u", "b", "a"):
        for key, v in x.get(s, {}).items(): k(key, v)
    ts = []
    def t(n, shape, kind="f32"):
        if kind != "f32" and (shape[0] % T[kind][1] or T[kind][1] > shape[0]): kind = "q8_0" if shape[0] % 32 == 0 else "f16"
        ts.append([n, list(shape), kind])
    def norm(n, s): t(n + ".weight", (s,)); (x.get("ln") and not x.get("nobias") or x.get("bert")) and t(n + ".bias", (s,))
    t("token_embd.weight", (d, V), emb)
    if x.get("pos") or x.get("bert"): t("position_embd.weight", (d, ctx))
    if x.get("bert"): t("token_types.weight", (d, 2)); norm("token_embd_norm", d)
    else: norm("output_norm", d)
    if not x.get("tied") and not x.get("bert"): t("output.weight", (d, V), out)
    if x.get("out_bias"): t("output.bias", (V,))
    if x.get("rope_freqs"): t("rope_freqs.weight", (hd // 2,))
    if x.get("long"): t("rope_factors_long.weight", (hd // 2,)); t("rope_factors_short.weight", (hd // 2,))
    def block(r, moe):
        b = f"blk.{{{r}}}."; q, kk = h * hd, kv * hd
        if not x.get("no_norms") and not x.get("bert"): norm(b + "attn_norm", d)
        if mla:
            ql, kl, rot, kd, vd = mla; q = h * kd
            if ql: t(b + "attn_q_a.weight", (d, ql), w); t(b + "attn_q_a_norm.weight", (ql,)); t(b + "attn_q_b.weight", (ql, q), w)
            else: t(b + "attn_q.weight", (d, q), w)
            t(b + "attn_kv_a_mqa.weight", (d, kl + rot), w); t(b + "attn_kv_a_norm.weight", (kl,)); t(b + "attn_k_b.weight", (kd - rot, kl, h), "q8_0"); t(b + "attn_v_b.weight", (kl, vd, h), "q8_0"); q = h * vd
        elif x.get("fused") or x.get("fused_qkv"):
            t(b + "attn_qkv.weight", (d, q + 2 * kk), w)
            if x.get("qkv_bias"): t(b + "attn_qkv.bias", (q + 2 * kk,))
        else:
            for n, o in (("q", q), ("k", kk), ("v", kk)):
                t(b + f"attn_{n}.weight", (d, o), w2 if n == "v" else w)
                if x.get("bias") or x.get("bert"): t(b + f"attn_{n}.bias", (o,))
        t(b + "attn_output.weight", (q, d), w)
        if x.get("o_bias") or x.get("bert"): t(b + "attn_output.bias", (d,))
        if x.get("sinks"): t(b + "attn_sinks.weight", (h,))
        if x.get("qknorm"): t(b + "attn_q_norm.weight", (hd,)); t(b + "attn_k_norm.weight", (hd,))
        if x.get("whole_norms"): t(b + "attn_q_norm.weight", (h * hd,)); t(b + "attn_k_norm.weight", (kv * hd,))
        if x.get("post"): t(b + "post_attention_norm.weight", (d,)); t(b + "post_ffw_norm.weight", (d,))
        if x.get("bert"): norm(b + "attn_output_norm", d); norm(b + "layer_output_norm", d)
        elif x.get("renamed"): t(b + "post_attention_norm.weight", (d,))
        elif not x.get("no_ffn_norm") and not x.get("no_norms"): norm(b + "ffn_norm", d)
        if moe:
            e, f = x["experts"], x["eff"]; t(b + "ffn_gate_inp.weight", (d, e))
            if x.get("probs"): t(b + "exp_probs_b.bias", (e,))
            if x.get("exp_bias"): t(b + "ffn_gate_inp.bias", (e,))
            for n, s in (("gate", (d, f, e)), ("up", (d, f, e)), ("down", (f, d, e))):
                t(b + f"ffn_{n}_exps.weight", s, w2 if n == "down" else w)
                if x.get("exp_bias"): t(b + f"ffn_{n}_exps.bias", (s[1], e))
            if x.get("shared"):
                s = x["shared"]; t(b + "ffn_gate_shexp.weight", (d, s), w); t(b + "ffn_up_shexp.weight", (d, s), w); t(b + "ffn_down_shexp.weight", (s, d), w2)
                if x.get("shared_gate"): t(b + "ffn_gate_inp_shexp.weight", (d,))
        else:
            wide = 2 * ff if x.get("fused") or x.get("fused_up") else ff
            if not (x.get("up_only") or x.get("fused") or x.get("fused_up") or x.get("bert")): t(b + "ffn_gate.weight", (d, ff), w)
            t(b + "ffn_up.weight", (d, wide), w); t(b + "ffn_down.weight", (ff, d), w2)
            if x.get("up_bias") or x.get("bert"): t(b + "ffn_up.bias", (wide,)); t(b + "ffn_down.bias", (d,))
    dense = x.get("dense", 0) if x.get("experts") else L
    if dense: block(f"0..{dense - 1}", False)
    if dense < L: block(f"{dense}..{L - 1}", True)
    return md, ts
def expand(ts):
    out = []
    for at, (n, s, k) in enumerate(ts):
        m = re.match(r"blk\.\{(\d+)\.\.(\d+)\}\.(.*)", n)
        if m: out += [(i, at, f"blk.{i}.{m[3]}", s, k) for i in range(int(m[1]), int(m[2]) + 1)]
        else: out.append((-1, at, n, s, k))
    return [(n, s, k) for _, _, n, s, k in sorted(out, key=lambda r: r[:2])]
def write(md, ts, out):
    S = lambda s: struct.pack("<Q", len(s)) + s.encode(); kv = []
    for k, v in md.items():
        if isinstance(v, list): kv.append(S(k) + struct.pack("<IIQ", 9, 7 if isinstance(v[0], bool) else 4, len(v)) + b"".join(struct.pack("<?" if isinstance(v[0], bool) else "<I", one) for one in v)); continue
        kv.append(S(k) + (struct.pack("<I", 8) + S(v) if isinstance(v, str) else struct.pack("<I?", 7, v) if isinstance(v, bool) else struct.pack("<II", 4, v) if isinstance(v, int) else struct.pack("<If", 6, v)))
    infos, at = [], 0; ts = expand(ts)
    for n, s, k in ts:
        c, bl, by = T[k]; size = by * (s[0] // bl)
        for x in s[1:]: size *= x
        infos.append(S(n) + struct.pack("<I", len(s)) + b"".join(struct.pack("<Q", x) for x in s) + struct.pack("<IQ", c, at)); at += (size + 31) // 32 * 32
    h = b"GGUF" + struct.pack("<IQQ", 3, len(ts), len(kv)) + b"".join(kv) + b"".join(infos); h += b"\0" * (-len(h) % 32)
    with open(out, "wb") as f: f.write(h); f.truncate(len(h) + at)
def draw(r):
    name = r.choice(sorted(M)); arch, L, *_ , x = M[name]; ctx0 = M[name][8]
    kinds = r.choice([("q4_0",) * 4, ("q8_0",) * 4, ("q4_K", "q6_K", "q4_K", "q6_K"), ("q5_K", "q6_K", "q5_K", "q6_K"), ("iq4_xs", "q5_K", "iq4_xs", "q6_K"), ("q3_K", "q4_K", "q3_K", "q6_K"), ("f16",) * 4])
    a = {"ctx": r.choice([512, 2048, 4096, 6000, 8192, 16384, 32768])}
    if r.random() < .5: a["ubatch"] = r.choice([32, 128, 256, 1024, 2048])
    if r.random() < .2: a["batch"] = r.choice([256, 1024, 4096])
    if r.random() < .3: a["seqs"] = r.choice([2, 3, 4, 8]); a["unified"] = r.randint(0, 1)
    if r.random() < .45: a["fa"] = r.randint(0, 1)
    if r.random() < .3:
        a["ctk"] = r.choice(["q8_0", "q4_0", "bf16", "f32"]); a["ctv"] = a["ctk"] if r.random() < .8 else "f16"
        if T[a["ctv"]][1] > 1 and a.get("fa") == 0: a["fa"] = 1
    if r.random() < .5: a["ngl"] = r.choice([0, 1, r.randint(1, L), r.randint(1, L), L, L + 1])
    if r.random() < .1: a["kqv"] = 0
    if r.random() < .1: a["op_offload"] = 0
    if r.random() < .5 and NEW: a["outputs"] = a.get("seqs", 1)
    if x.get("experts") and r.random() < .5: a["cpu_moe"] = r.choice([r.randint(1, L), L])
    elif r.random() < .1: a["ot"] = r.choice(["ffn_down=CPU", "blk\\.(1|2|3)\\.ffn_.*=CPU", "attn_q\\.weight=CPU", "output\\.weight=CPU", "blk\\.[0-9]\\.=CPU"])
    if x.get("window") and r.random() < .2: a["swa_full"] = 1
    if r.random() < .2: a["ts"] = r.choice(["1/1", "3/1", "1/2", "1/1/1", "1/1/1/1"])
    return name, kinds, a
def users(r):
    """What people type at llama-server: slots, a card that is too small, experts on the host, several cards."""
    name = r.choice(sorted(HYBRIDS)) if r.random() < .35 else r.choice([n for n in sorted(M) if M[n][9].get("experts")]) if r.random() < .45 else r.choice(sorted(M))
    arch, L, *_, x = {**M, **HYBRIDS}[name]
    kinds = r.choice([("q4_K", "q6_K", "q4_K", "q6_K"), ("q5_K", "q6_K", "q5_K", "q6_K"), ("iq4_xs", "q5_K", "iq4_xs", "q6_K"), ("q8_0",) * 4, ("q3_K", "q4_K", "q3_K", "q6_K")])
    a = {"ctx": r.choice([4096, 8192, 16384, 32768, 65536]), "seqs": r.choice([1, 1, 1, 2, 4, 8])}; a["outputs"] = a["seqs"]
    if r.random() < .4: a["ubatch"] = r.choice([256, 1024, 2048, 4096]); a["batch"] = max(2048, a["ubatch"])
    if a["seqs"] > 1 and r.random() < .3: a["unified"] = 1
    if r.random() < .4: a["fa"] = r.choice([1, 1, 0])
    if r.random() < .35 and a.get("fa") != 0: a["ctk"] = a["ctv"] = r.choice(["q8_0", "q8_0", "q4_0"]); a["fa"] = 1
    if r.random() < .4: a["ngl"] = r.randint(1, L + 1)
    if x.get("experts") and r.random() < .6:
        how = r.random()
        if how < .5: a["cpu_moe"] = r.randint(1, L)
        else: a["ot"] = r.choice(["exps=CPU", "\\.ffn_.*_exps\\.=CPU", "blk\\.([0-9]|1[0-9])\\.ffn_.*_exps\\.=CPU", "ffn_(up|down)_exps=CPU", "ffn_up_exps=CPU"])
    if x.get("window") and r.random() < .15: a["swa_full"] = 1
    if r.random() < .25: a["ts"] = r.choice(["1/1", "3/1", "2/3", "1/1/1"])
    if r.random() < .08: a["kqv"] = 0
    return name, kinds, a
POPULAR = ["qwen3-8b", "qwen3-14b", "qwen3-4b-2507", "qwen3-30b-a3b", "qwen3-30b-a3b", "qwen3-32b", "qwen3moe-235b", "qwen3-vl-8b", "qwen35-4b", "qwen35-9b", "qwen35-27b", "qwen35moe-35b", "qwen35moe-35b", "qwen35moe-122b", "qwen3next-80b", "gpt-oss-20b", "gpt-oss-20b", "gpt-oss-120b", "gemma3-4b", "gemma3-12b",
  "gemma3-27b", "gemma3n-e4b", "gemma4-31b", "gemma4-e4b", "gemma4-e2b", "gemma4-26b-a4b", "gemma4-26b-a4b", "llama-8b", "llama-8b", "llama-70b", "llama4-scout", "mistral-small-24b", "ministral3-8b", "devstral2-123b", "glm4-air", "glm47-flash", "r1-distill-qwen-32b", "phi4-14b", "phi4-mini", "granite-h-tiny", "granite-h-small", "granite-h-micro",
  "granite4-micro", "nemotron-nano-9b", "nemotron3-nano-30b", "lfm2-2.6b", "lfm2-8b-a1b", "ernie-21b-a3b", "minimax-m2", "seed-36b", "deepseek-v3"]
def popular(r):
    """Models that people load in 2026, as they start them: whole on a card, in part, experts on the host, long contexts, two cards."""
    name = r.choice(POPULAR); arch, L, *_, x = {**M, **HYBRIDS}[name]; ctx0 = {**M, **HYBRIDS}[name][8]
    kinds = ("mxfp4", "mxfp4", "q8_0", "q8_0") if arch == "gpt-oss" else r.choice([("q4_K", "q6_K", "q4_K", "q6_K")] * 3 + [("q5_K", "q6_K", "q5_K", "q6_K"), ("iq4_xs", "q5_K", "iq4_xs", "q6_K"), ("q8_0",) * 4, ("q6_K",) * 4, ("q3_K", "q4_K", "q3_K", "q6_K")])
    a = {"ctx": min(ctx0, r.choice([4096, 8192, 8192, 16384, 32768, 32768, 65536, 131072, 262144])), "seqs": r.choice([1, 1, 1, 4, 4, 2])}; a["outputs"] = a["seqs"]
    if a["seqs"] == 4 and r.random() < .6: a["unified"] = 1
    if r.random() < .35: a["ubatch"] = r.choice([1024, 2048, 2048, 4096]); a["batch"] = max(2048, a["ubatch"])
    if r.random() < .5: a["fa"] = r.choice([1, 1, 1, 0])
    if r.random() < .4 and a.get("fa") != 0: a["ctk"] = a["ctv"] = r.choice(["q8_0", "q8_0", "q4_0"]); a["fa"] = 1
    if x.get("experts") and r.random() < .55:
        if r.random() < .6: a["cpu_moe"] = r.choice([L, r.randint(1, L)])
        else: a["ot"] = r.choice(["exps=CPU", ".ffn_.*_exps.=CPU", "\\.(1[0-9]|2[0-9])\\.ffn_.*_exps\\.=CPU", "ffn_(up|down)_exps=CPU"])
    elif r.random() < .35: a["ngl"] = r.randint(1, L)
    if r.random() < .2: a["ts"] = r.choice(["1/1", "3/2", "1/1"])
    if r.random() < .06: a["kqv"] = 0
    return name, kinds, a
def run(probe, name, kinds, a, folder):
    md, ts = model(name, kinds); path = os.path.join(folder, name + "-" + "-".join(kinds) + ".gguf")
    if not os.path.exists(path): write(md, ts, path)
    env = dict(os.environ, STUB_COUNT=str(len(a["ts"].split("/")) if "ts" in a else 1), STUB_GPU="h200")
    try: p = subprocess.run([probe, path, *[f"{k}={v}" for k, v in a.items()]], capture_output=True, text=True, timeout=120, env=env); log = p.stdout + p.stderr
    except subprocess.TimeoutExpired: return None, "timeout"
    found = [[m[2], m[1], float(m[3])] for m in re.finditer(r"(\S+)\s+(model|KV|compute|output|RS) buffer size\s*=\s*([\d.]+) MiB", log)]
    why = "" if p.returncode == 0 else (re.findall(r"(?:error|FAILED|failed|missing|GGML_ASSERT)[^\n]*", log) or [log[-200:]])[0]
    return dict(model=name, metadata=md, tensors=ts, args=a, buffers=found), why
if __name__ == "__main__":
    probe, build, number, seed, count, out = sys.argv[1:7]; NEW = int(number) == 0 or int(number) >= 9460; r = random.Random(int(seed)); folder = tempfile.mkdtemp(); done = 0; failed = {}
    with open(out, "w") as f:
        while done < int(count):
            name, kinds, a = {'users': users, 'popular': popular}.get((sys.argv[7:] or [''])[0], draw)(r); row, why = run(probe, name, kinds, a, folder)
            if why: failed.setdefault(({**M, **HYBRIDS}[name][0], why[:150]), []).append(a); continue
            f.write(json.dumps(dict(id=f"{seed}-{done:03}", engine="llama.cpp", build=build, **({"number": int(number)} if int(number) else {}), gpu="H200, pretended", **row), separators=(",", ":")) + "\n"); done += 1
    for (arch, why), n in sorted(failed.items()): print(len(n), arch, why, n[0])
