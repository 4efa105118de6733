#!/usr/bin/env python3
"""draw.py SEED CATALOGUE LEDGER.jsonl JOBS.jsonl [wide]: draws runs whose memory does not depend on data, before anything is predicted or measured.

Twenty training steps and ten of `generate` for measure.py, twenty post-training steps and ten whole jobs for ../jobs/jobs.py, of catalogue models cut to a few layers.
`wide` draws what those leave out: hybrids, pictures, speech, encoder-decoders, flex attention, quantised bases, further trainers and options.
"""
import copy, json, random, sys

PLAIN = """llama qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 granite olmo olmo2 olmo3 gpt2 gpt_neox gptj opt bloom falcon mpt stablelm starcoder2 cohere cohere2
 mistral mixtral qwen2_moe qwen3_moe olmoe granitemoe phimoe deepseek_v2 deepseek_v3 glm glm4 glm4_moe exaone4 smollm3 nemotron arcee apertus ernie4_5 seed_oss gpt_bigcode
 gpt_neo codegen lfm2 mamba mamba2 falcon_mamba gpt_oss dbrx helium qwen3_next""".split()
OTHERS = {"mlm": "bert roberta xlm-roberta distilbert modernbert albert".split(), "seq2seq": "bart mbart m2m_100 t5 mt5".split()}
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
CARDS = ["NVIDIA H200"] * 6 + ["NVIDIA A100-SXM4-80GB"] * 2 + ["NVIDIA GeForce RTX 4090", "Tesla T4"]
LINEAR = "llama qwen2 qwen3 gemma gemma2 gemma3_text granite olmo2 mistral cohere2 smollm3 exaone4 arcee ernie4_5 seed_oss stablelm opt starcoder2".split()
HARD = {"dbrx", "seed_oss", "deepseek_v3", "glm4_moe", "nemotron", "mixtral", "gpt_oss", "phimoe", "qwen3_moe", "bloom"}  # too large for a model on the host


def cut(entry, layers):
    """A model with fewer layers: its lists that go by layers are cut with it."""
    config, depth = copy.deepcopy(entry["config"]), max(entry["config"].get(k) or 0 for k in DEPTH)
    for key, value in config.items():
        if key in DEPTH: config[key] = min(layers, value)
        if isinstance(value, list) and len(value) == depth: config[key] = value[:layers]
    for key in ("quantization_config", "auto_map", "max_window_layers"): config.pop(key, None)
    return {"model": f"{entry['id']}, {layers} layers", "auto_class": entry.get("auto_class") or "AutoModelForCausalLM", "config": config}


def maybe(share, value): return value if r.random() < share else None
def keep(**values): return {k: v for k, v in values.items() if v not in (None, {})}
def smallest(kind): return min(types[kind], key=lambda e: (e["config"].get("hidden_size") or e["config"].get("n_embd") or e["config"].get("d_model") or 9999, e["id"]))


def lora(kind):
    config = keep(use_dora=maybe(.25, True), use_rslora=maybe(.2, True), bias=maybe(.15, "all"), layers_to_transform=maybe(.15, [1]), modules_to_save=maybe(.15, ["lm_head"]))
    targets = r.choice([["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear"]) if kind in LINEAR else "all-linear"
    return {"r": r.choice([4, 8, 16, 64]), "alpha": 16, "dropout": r.choice([0.0, 0.05, 0.1]), "targets": targets, "fp32_adapter": r.random() < .7, "config": config}


def training(n):
    group = r.choices(["causal", "mlm", "seq2seq"], [16, 2, 2])[0]
    kind = r.choice([k for k in (PLAIN if group == "causal" else OTHERS[group]) if k in types])
    row = {"id": f"dt{n:02d}", "kind": group, **cut(r.choice(types[kind]), r.choice([2, 3, 4])), "gpu": "replay: " + r.choice(CARDS)}
    causal, linear = group == "causal", kind in LINEAR
    weights, autocast = r.choice([("bf16", None)] * 3 + [("fp32", None), ("fp32", "bf16"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16")])
    optimizer = r.choice("adamw adamw adamw amsgrad nadam adagrad rmsprop sgd-momentum adafactor torch-adafactor adamw8bit paged-adamw8bit lion8bit lion ademamix8bit adamw-bnb32 muon".split())
    run = {"task": "train", "batch": r.choice([1, 2, 3, 4, 6, 8]), "seq": r.choice([96, 200, 256, 384, 512, 777, 1024]), "weights": weights, "attn": r.choices(["sdpa", "eager"], [3, 1])[0], "optimizer": optimizer}
    adapter = causal and r.random() < .55
    form = r.choice([{}, {}, {}, {"checkpointing": True}, {"checkpointing": True, "reentrant": True}, {"checkpointing": True, "every": 2}, {"checkpointing": True, "selective": "matmul"}, {"save_on_cpu": True}])
    run.update(form, **keep(autocast=autocast, clip=r.choice([None, True, "value", "forloop"]), grad_accum=r.choice([None, None, 2, 3])))
    run.update(r.choice([{}, {"mask": True}, {"padded": True}]) if group != "seq2seq" else {"target_seq": r.choice([64, 128, 300])})
    if optimizer in ("adamw", "amsgrad"): run.update(keep(impl=r.choice([None, "foreach", "forloop", "fused"])))
    if adapter and r.random() < .3: run["peft"] = r.choice([{"peft_type": "IA3"}, {"peft_type": "VERA", "r": 128}, {"peft_type": "OFT", "oft_block_size": 32, "r": 0}, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 16}, {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 16}]) | {"task_type": "CAUSAL_LM"}
    elif adapter:
        run["lora"] = lora(kind)
        if r.random() < .35 and weights == "bf16": run["quant"] = r.choice(["nf4", "nf4-dq"])
    elif r.random() < .15: run["opt_in_backward"] = True; run.pop("clip", None); run.pop("grad_accum", None)
    if linear and not adapter and r.random() < .3: run["liger" if kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2") else "loss"] = True if kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2") else "chunked"
    return {**row, "run": run}


def generate(n):
    kind = r.choice([k for k in PLAIN if k in types and k not in ("mamba", "mamba2", "falcon_mamba", "lfm2", "qwen3_next")])
    row = {"id": f"dg{n:02d}", "kind": "causal", **cut(r.choice(types[kind]), r.choice([2, 3, 4])), "gpu": "replay: " + r.choice(CARDS)}
    run = {"task": "infer", "batch": r.choice([1, 2, 4, 8]), "seq": r.choice([64, 200, 512, 1000]), "weights": r.choice(["bf16", "bf16", "fp16", "fp32"]), "attn": r.choice(["sdpa", "sdpa", "eager"]), "new_tokens": r.choice([8, 20, 40]), "all_tokens": True}
    how = ["static", "quanto", "offloaded", "beams", "assistant", "hqq", "static-sample", "beams", "lookup", "quanto"][n]
    if how.startswith("static"): run["cache"] = "static"
    if how == "offloaded": run["cache"] = "offloaded"
    if how in ("quanto", "hqq"): run.update(cache="quantized", cache_config={"backend": how, "nbits": r.choice([2, 4] if how == "quanto" else [2, 4, 8]), "q_group_size": r.choice([32, 64]), "residual_length": r.choice([16, 128])} | ({"axis_key": 1, "axis_value": 1} if how == "hqq" else {}))
    if how == "beams": run.update(beams=r.choice([2, 3, 5]), **keep(cache=maybe(.3, "static"), sample=maybe(.4, True)))
    if how == "static-sample": run["sample"] = True
    if how == "assistant":
        run.update(batch=1, assistant={"model": row["model"] + ", drafting", "config": cut({"id": "", "config": row["config"]}, 1)["config"], "tokens": r.choice([3, 6]), "schedule": "constant"}, accepted="all")
    if how == "lookup": run.update(batch=1, prompt_lookup=r.choice([3, 8]), accepted="all")
    return {**row, "run": run}


def small():
    kind = r.choice([k for k in PLAIN if k in types and k not in HARD and not k.startswith(("mamba", "falcon_mamba", "deepseek"))])
    return kind, cut(smallest(kind), r.choice([2, 3]))


def post(n):
    how = (["sft"] * 6 + ["dpo"] * 4 + ["kto", "orpo", "cpo", "reward", "grpo"] * 2)[:20 - 2][n] if n < 18 else "rloo"
    (kind, row), batch = small(), r.choice([2, 4])
    arguments = {"gradient_checkpointing": r.random() < .5, "bf16": r.random() < .7, "fp16": False, "optim": r.choice(["adamw_torch_fused", "adamw_torch", "adafactor", "adamw_8bit", "lion_32bit", "sgd"]), "gradient_accumulation_steps": r.choice([1, 1, 2])}
    job = {"kind": "trl", "how": how, "batch": batch, "seq": r.choice([128, 200, 384, 640]), "weights": r.choice(["bf16", "fp32"]), "steps": 3, "seed": r.randrange(1000)}
    if r.random() < .4: job["lora"] = {"r": r.choice([8, 32]), "targets": "all-linear" if kind not in LINEAR else r.choice([["q_proj", "v_proj"], "all-linear"])} | ({"task": "SEQ_CLS"} if how == "reward" else {})
    more = keep(max_grad_norm=maybe(.2, 0.0), torch_empty_cache_steps=maybe(.2, 2))
    if how == "sft":
        form = ["packing", "completion", "packing", "padding_free", "completion", "eval"][n]
        if form in ("packing", "padding_free"): more[form] = True; job.update(vary=True, rows=48, mu=4.6, sigma=.7)
        if form == "packing": more["packing_strategy"] = r.choice(["bfd", "bfd_split", "wrapped"])
        if form == "completion": job.update(prompt=r.choice([.3, .6]), vary=True, rows=48, mu=4.9, sigma=.6)
        if form == "eval": job.update(vary=True, rows=48, mu=4.8, sigma=.6, eval_rows=12, eval_batch=r.choice([2, 8]))
        more.update(keep(use_liger_kernel=maybe(.2, True)) if kind in ("llama", "qwen2", "qwen3", "mistral") else {})
    if how == "dpo":
        more.update(keep(loss_type=r.choice([None, ["ipo"], ["sigmoid", "sft"], ["robust"], ["hinge"]]), precompute_ref_log_probs=maybe(.3, True), use_weighting=maybe(.2, True), padding_free=maybe(.2, True)))
        if more.get("loss_type") == ["robust"]: more["label_smoothing"] = .1
    if how == "kto": job["batch"] = 4; more.update(keep(loss_type=maybe(.4, "apo_zero_unpaired"), precompute_ref_log_probs=maybe(.3, True)))
    if how == "cpo": more.update(keep(loss_type=maybe(.6, "simpo"), cpo_alpha=maybe(.5, 0.0)))
    if how in ("dpo", "kto", "orpo", "cpo"): job.update(keep(prompt=maybe(.5, job["seq"] // 4), answer=maybe(.5, job["seq"] // 3)))
    if how in ("grpo", "rloo"):
        job.update(generations=2, completion=r.choice([12, 30]), batch=4); more.update(keep(beta=r.choice([None, 0.0, .04]), num_iterations=maybe(.4, 2), temperature=maybe(.3, .7)))
        if how == "grpo": more.update(keep(loss_type=r.choice([None, "bnpo", "dr_grpo", "grpo"])))
    return {"id": f"dp{n:02d}", **row, "job": {**job, "args": {**arguments, **more}}, "arguments": {**arguments, **more}, "gpu": "replay: " + r.choice(CARDS[:8])}


def whole(n):
    kind, row = small()
    how = ["varlen", "varlen", "varlen", "trainer", "trainer", "trainer", "trainer", "load", "load", "load"][n]
    job = {"kind": how, "weights": r.choice(["bf16", "fp32"]), "seed": r.randrange(1000)}
    targets = ["q_proj", "v_proj"] if kind in LINEAR else "all-linear"
    if how != "load": job.update(batch=r.choice([2, 4]), seq=r.choice([400, 800]), steps=8, mu=5.2, sigma=.7, checkpointing=r.random() < .4, **keep(lora=maybe(.4, {"r": 16, "targets": targets, "dropout": r.choice([0.0, .05])})))
    if how == "varlen": job.update(keep(fused=maybe(.5, True), attn=maybe(.3, "eager"), alloc_conf=maybe(.3, "expandable_segments:True")))
    if how == "trainer": job.update(vary=True, **keep(autocast=maybe(.5, "bf16"), grad_accum=maybe(.4, 2), eval_rows=maybe(.7, 20), eval_batch=r.choice([2, 4]), metrics=maybe(.5, True), eval_accumulation=maybe(.3, 2), optim=maybe(.5, r.choice(["adamw_torch", "adafactor", "adamw_8bit"])), empty_cache_steps=maybe(.3, 3), **({"save": True, "resume": True} if n % 2 else {})))
    if how == "load": job.update(keep(quant=maybe(.6, r.choice(["nf4", "nf4-dq"])), lora=maybe(.6, {"r": 16, "targets": targets}), device_map=maybe(.3, "none")))
    if job.get("device_map"): job["move"] = True
    return {"id": f"dj{n:02d}", **row, "job": job, "gpu": "replay: " + r.choice(CARDS[:8])}


WIDE = """gemma3n gemma4 deepseek_v32 kimi_k2 minimax_m2 granitemoehybrid jamba nemotron_h zamba2 recurrent_gemma qwen3_5 qwen3_next llama4 mllama lfm2 ernie4_5_moe
 glm4_moe_lite glm_moe_dsa bitnet gemma3 mistral3 llava paligemma""".split()


def wide_training(n):
    """Further families, and pictures, speech and encoder-decoders, with the same settings."""
    row = training(n); run = row["run"]
    for key in ("lora", "peft", "liger", "loss", "padded", "mask", "attn", "quant", "target_seq", "selective"): run.pop(key, None)
    group = ["causal"] * 9 + ["qwen_vl"] * 3 + ["speech", "image", "seq2seq", "mlm"]
    group = group[n % len(group)]
    kind = r.choice([k for k in {"causal": WIDE, "qwen_vl": ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], "speech": ["whisper"], "image": ["vit"], "seq2seq": OTHERS["seq2seq"], "mlm": OTHERS["mlm"] + ["deberta-v2"]}[group] if k in types])
    row.update(id=f"dw{n:02d}", kind=group, **shallow(r.choice(types[kind]), r.choice([2, 4])))
    run.update(attn=r.choice(["sdpa", "eager"] + ["flex_attention"] * (group == "causal")), batch=r.choice([1, 2, 4]))
    if group == "qwen_vl": run.update(grid=r.choice([[16, 24], [32, 32]]), seq=r.choice([400, 640]))
    if group == "speech": run["seq"] = r.choice([64, 200])
    if group == "causal": run.update(r.choice([{}, {"mask": True}, {"padded": True}]), **keep(lora=maybe(.4, {"r": 16, "alpha": 16, "dropout": .05, "targets": "all-linear", "fp32_adapter": True})))
    return row


def wide_generate(n):
    row = generate(n % 10); run = row["run"]
    for key in ("assistant", "prompt_lookup", "accepted", "cache", "cache_config", "beams", "sample"): run.pop(key, None)
    group = ["causal", "seq2seq", "causal", "speech", "qwen_vl"][n % 5]
    kind = r.choice([k for k in {"causal": WIDE + PLAIN, "qwen_vl": ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], "speech": ["whisper"], "seq2seq": OTHERS["seq2seq"]}[group] if k in types])
    row.update(id=f"dv{n:02d}", kind=group, **shallow(r.choice(types[kind]), r.choice([2, 4])))
    run.update(r.choice([{}, {"cache": "static"}, {"beams": 3}, {"quant": r.choice(["nf4", "nf4-dq"])}, {"sample": True}, {"mask": True}]))
    if group == "qwen_vl": run.update(grid=[16, 24], seq=r.choice([200, 400]), batch=r.choice([1, 2]))
    if group == "speech": run["seq"] = 4
    return row


def wide_post(n):
    how = ["sft", "sft", "dpo", "dpo", "dpo", "kto", "reward", "grpo", "grpo", "grpo", "rloo", "orpo", "online_dpo", "distillation", "gkd", "cpo"][n]
    kind, row = small()
    plain = {"gradient_checkpointing": r.random() < .5, "bf16": r.random() < .6, "fp16": False, "optim": r.choice(["adamw_torch_fused", "adamw_torch", "adamw_8bit", "ademamix", "rmsprop", "adagrad"]), "gradient_accumulation_steps": r.choice([1, 2])}
    if not plain["bf16"]: plain["fp16"] = r.random() < .3
    job = {"kind": "trl", "how": how, "batch": 4, "seq": r.choice([150, 256, 500]), "weights": "bf16" if plain["bf16"] else "fp32", "steps": 3, "seed": r.randrange(1000)}
    if r.random() < .5: job["lora"] = {"r": 16, "targets": ["q_proj", "v_proj"] if kind in LINEAR else "all-linear"} | ({"task": "SEQ_CLS"} if how == "reward" else {})
    if job.get("lora") and how in ("dpo", "kto", "grpo") and r.random() < .5: job["quant"] = r.choice(["nf4", "nf4-dq"]); job["weights"] = "bf16"
    more = keep(max_grad_norm=maybe(.2, 0.0), gradient_checkpointing_kwargs=maybe(.3, {"use_reentrant": True}) if plain["gradient_checkpointing"] else None, use_liger_kernel=maybe(.5, True) if kind in ("llama", "qwen2", "qwen3", "mistral") and how in ("dpo", "grpo", "sft") else None)
    if how == "sft": more.update(keep(loss_type=maybe(.5, "dft"), pad_to_multiple_of=maybe(.5, 64), activation_offloading=maybe(.3, True)))
    if how in ("dpo", "kto", "orpo", "cpo"): job["vary"] = r.random() < .6
    if how == "dpo": more.update(keep(loss_type=maybe(.6, [r.choice(["nca_pair", "bco_pair", "aot", "discopop", "exo_pair", "apo_zero"])]), ld_alpha=maybe(.3, .5)))
    if more.get("loss_type") == ["exo_pair"]: more["label_smoothing"] = .001
    if how in ("grpo", "rloo"): job.update(generations=r.choice([2, 4]), completion=r.choice([10, 24])); more.update(keep(beta=r.choice([0.0, .04]), num_iterations=maybe(.4, 2), mask_truncated_completions=maybe(.3, True), top_entropy_quantile=maybe(.3, .2) if how == "grpo" else None, importance_sampling_level=maybe(.3, "sequence") if how == "grpo" else None, steps_per_generation=maybe(.3, 2)))
    if how in ("online_dpo", "distillation", "gkd"): job["completion"] = 16
    if how in ("distillation", "gkd"): job["teacher"] = row["model"]
    if how == "gkd": job["lmbda"] = r.choice([0.0, 1.0])
    return {"id": f"dq{n:02d}", **row, "job": {**job, "args": {**plain, **more}}, "arguments": {**plain, **more}, "gpu": "replay: NVIDIA H200"} | ({"others": {row["model"]: row["config"]}} if job.get("teacher") else {})


def wide_whole(n):
    """Encoder-decoders that generate in evaluation, batches without padding of all lengths, larger checkpoints in shards."""
    row = whole(n % 10); job = row["job"]; row["id"] = f"dk{n:02d}"
    if n < 2: row.update(cut(smallest(r.choice(["bart", "t5", "mt5", "m2m_100"])), 2)); job.pop("lora", None); job.update(kind="trainer", batch=2, seq=200, steps=4, vary=True, eval_rows=8, eval_batch=4, metrics=True, generate=r.choice([12, 30]), **keep(beams=maybe(.5, 2)))
    elif job["kind"] == "trainer": job.update(optim=r.choice(["adamw_8bit", "ademamix", "lion_8bit"]), **keep(batch_eval=maybe(.4, True) if job.get("eval_rows") and job.get("metrics") else None, preprocess=maybe(.4, True) if job.get("metrics") else None))
    elif job["kind"] == "load": job.update(shard=r.choice(["100MB", "1GB"])); job.pop("lora", None)
    return row


def shallow(entry, layers):
    """`cut`, also of the sections of a model of several parts."""
    made = cut(entry, layers)
    for name in ("text_config", "vision_config"):
        section = made["config"].get(name)
        if isinstance(section, dict):
            made["config"][name] = cut({"id": "", "config": section | ({"depth": layers} if section.get("depth") else {})}, layers)["config"]
            if "deepstack_visual_indexes" in section: made["config"][name]["deepstack_visual_indexes"] = [0, 1]
            if "fullatt_block_indexes" in section: made["config"][name]["fullatt_block_indexes"] = [1]
    return made


seed, catalogue, ledger, jobs, *wide = sys.argv[1:]
r, types = random.Random(int(seed)), {}
for entry in map(json.loads, open(catalogue)): types.setdefault(entry["config"].get("model_type"), []).append(entry)
steps = [wide_training(n) for n in range(16)] + [wide_generate(n) for n in range(10)] if wide else [training(n) for n in range(20)] + [generate(n) for n in range(10)]
runs = [wide_post(n) for n in range(16)] + [wide_whole(n) for n in range(8)] if wide else [post(n) for n in range(20)] + [whole(n) for n in range(10)]
for path, rows in ((ledger, steps), (jobs, runs)):
    open(path, "w").write("".join(json.dumps(row) + "\n" for row in rows))
