"""Whole pipelines of diffusers, made of configs with weights that were never written, on a card or a pretend one.

    python measure.py draw SEED COUNT NAMES > jobs.jsonl     (before the simulator is looked at)
    python measure.py run jobs.jsonl out.jsonl [ID ...]      (one process for each)
"""
import copy, gc, json, os, random, subprocess, sys, time, traceback
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from configs import PIPELINES, shallow

VIDEO = {"wan": 4, "ltx": 8, "hunyuan-video": 4}


def draw(seed, count, names):
    r = random.Random(int(seed)); names = names.split(",")
    for at in range(int(count)):
        name = names[at % len(names)]
        j = {"id": f"p{seed}{at:02}", "pipeline": name, "weights": r.choice(["bf16", "bf16", "fp16"]), "batch": r.choice([1, 1, 2, 3]), "offload": r.choice(["none", "none", "model", "model", "sequential"]), "vae_tiling": r.random() < 0.35, "vae_slicing": r.random() < 0.35}
        if name in VIDEO:
            j |= {"weights": "bf16", "batch": 1, "frames": VIDEO[name] * r.choice([2, 4, 6, 8]) + 1, "height": r.choice([256, 320, 480]), "width": r.choice([256, 416, 480])}
            j["height"] -= j["height"] % 32; j["width"] -= j["width"] % 32
        elif name == "sd15": j |= {"height": r.choice([384, 512, 768]), "width": r.choice([448, 512, 768]), "attention_slicing": r.random() < 0.3}
        else: j |= {"height": r.choice([512, 768, 1024, 1216]), "width": r.choice([640, 1024, 1024])}
        if name in ("sd15", "sdxl", "sd3") and r.random() < 0.25: j["guidance"] = False
        print(json.dumps(j))


def tokenizer(length, vocab=2000):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)} | {"<unk>": vocab, "<pad>": vocab + 1}, unk_token="<unk>")); t.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>", pad_token="<pad>", eos_token="<pad>", bos_token="<pad>", model_max_length=length)


def part(config, dtype):
    """A part on the host; its weights are room without values, its buffers are as it makes them."""
    import torch, diffusers, transformers
    from accelerate import init_empty_weights
    c = copy.deepcopy(config)
    for name in dir(torch.nn.init):  # nobody looks at values, and to draw billions takes minutes
        if name.endswith("_") and not name.startswith("_"): setattr(torch.nn.init, name, lambda tensor, *a, **k: tensor)
    with init_empty_weights(include_buffers=False):
        if "_class_name" in c: m = getattr(diffusers, c.pop("_class_name")).from_config(c)
        else:
            cls = getattr(transformers, c.pop("_class")); kind = c.pop("model_type")
            m = cls(transformers.AutoConfig.for_model(kind, **c))
    m = m.to(dtype); made = {}
    for owner in m.modules():
        for name, p in owner._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made: made[id(p)] = (torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False), p)
                owner._parameters[name] = made[id(p)][0]
    if "_class" in config: m.tie_weights()
    return m.eval().requires_grad_(False)


def build(name, dtype, layers=None):
    import diffusers as D
    spec = {k: shallow(v, layers) if layers and isinstance(v, dict) else v for k, v in PIPELINES[name].items()}; parts = {k: part(v, dtype) for k, v in spec.items() if k != "_class_name"}
    clip, t5 = tokenizer(77), tokenizer(512)
    more = {"tokenizer": clip}
    flow = D.FlowMatchEulerDiscreteScheduler()
    if name == "sd15": more |= {"scheduler": D.PNDMScheduler(skip_prk_steps=True, beta_schedule="scaled_linear"), "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if name == "sdxl": more |= {"tokenizer_2": clip, "scheduler": D.EulerDiscreteScheduler()}
    if name == "sd3": more |= {"tokenizer_2": clip, "tokenizer_3": t5, "scheduler": flow}
    if name == "flux": more |= {"tokenizer_2": t5, "scheduler": flow}
    if name == "qwen-image": more = {"tokenizer": tokenizer(1024), "scheduler": flow}
    if name in ("wan", "ltx"): more = {"tokenizer": t5, "scheduler": flow}
    if name == "hunyuan-video": more = {"tokenizer": tokenizer(512), "tokenizer_2": clip, "scheduler": flow}
    return getattr(D, spec["_class_name"])(**parts, **more), parts


def child(j, out):
    import torch
    res = {"id": j["id"], "job": j, "ok": False}; t = time.time(); phases = []
    try:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[j["weights"]]
        pipe, parts = build(j["pipeline"], dtype, j.get("layers")); res["params"] = {k: sum(p.numel() for p in m.parameters()) for k, m in parts.items()}
        torch.zeros(1, device="cuda"); pipe.set_progress_bar_config(disable=True)
        if j["offload"] == "none": pipe.to("cuda")
        elif j["offload"] == "model": pipe.enable_model_cpu_offload()
        elif j["offload"] == "sequential": pipe.enable_sequential_cpu_offload()
        elif j["offload"].startswith("group"):
            kind, *rest = j["offload"][6:].split("-"); pipe.enable_group_offload(onload_device=torch.device("cuda"), offload_type=f"{kind}_level", num_blocks_per_group=int(rest[0]) if rest and rest[0].isdigit() else None, use_stream="stream" in rest)
        if j.get("vae_tiling"): pipe.vae.enable_tiling()
        if j.get("vae_slicing"): pipe.vae.enable_slicing()
        if j.get("attention_slicing"): pipe.enable_attention_slicing()
        res["loaded"] = torch.cuda.memory_allocated()
        now = {"name": None}

        def begin(name):
            if now["name"] == name: return
            end(); torch.cuda.reset_peak_memory_stats(); now.update(name=name, before=torch.cuda.memory_allocated())

        def end():
            if now["name"]: phases.append({"phase": now["name"], "before": now["before"], "after": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()})
            now["name"] = None

        def watched(name, inner):
            def call(*a, **k): begin(name); return inner(*a, **k)
            return call
        begin("start")
        for name, m in parts.items():
            if name == "vae": m.decode = watched(name, m.decode)
            else: m.forward = watched(name, m.forward)
        kw = dict(prompt=["w1 w2 w3 w4 w5"] * j["batch"], height=j["height"], width=j["width"], num_inference_steps=j.get("steps", 3), output_type="pt")
        if j.get("guidance") is False: kw["guidance_scale"] = 1.0
        if "frames" in j: kw["num_frames"] = j["frames"]
        if j["pipeline"] == "qwen-image": kw.update(true_cfg_scale=j.get("true_cfg", 1.0), **({"negative_prompt": ["w1"] * j["batch"]} if j.get("true_cfg") else {}))
        with torch.no_grad(): o = pipe(**kw)
        end(); res["ok"] = True
    except torch.OutOfMemoryError as e: res["error"] = "OOM " + str(e)[:150]
    except Exception as e: res["error"] = repr(e)[:300]; res["trace"] = traceback.format_exc()[-1500:]
    res["phases"] = phases; res["retries"] = torch.cuda.memory_stats().get("num_alloc_retries")
    if phases: res["peak_allocated"] = max(p["peak"] for p in phases); res["peak_reserved"] = max(p["peak_reserved"] for p in phases)
    import accelerate, diffusers, transformers
    res["software"] = {"torch": torch.__version__, "transformers": transformers.__version__, "accelerate": accelerate.__version__, "diffusers": diffusers.__version__}; res["gpu"] = torch.cuda.get_device_name(0)
    res["seconds"] = round(time.time() - t, 1); open(out, "a").write(json.dumps(res) + "\n")


def main():
    if sys.argv[1] == "draw": return draw(*sys.argv[2:])
    if sys.argv[1] == "one": return child(json.loads(sys.argv[2]), sys.argv[3])
    for line in open(sys.argv[2]):
        j = json.loads(line)
        if len(sys.argv) > 4 and j["id"] not in sys.argv[4:]: continue
        p = subprocess.run([sys.executable, __file__, "one", json.dumps(j), sys.argv[3]], timeout=None, capture_output=True, text=True)
        print(j["id"], p.returncode, p.stderr[-300:] if p.returncode else "", flush=True)
    for line in open(sys.argv[3]):
        r = json.loads(line); print(r["id"], r["job"]["pipeline"], r["ok"], r.get("seconds"), round(r.get("peak_allocated", 0) / 2**30, 3), round(r.get("peak_reserved", 0) / 2**30, 3), (r.get("error") or "")[:200])


main()
