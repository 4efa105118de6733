"""What a convolution of videos takes beside its inputs and outputs: `python videos.py out.jsonl SECONDS`, one JSON row each.
`python videos.py out.jsonl SECONDS wan|hunyuan-video|ltx|qwen-image FRAMES HEIGHT WIDTH`: every convolution of an autoencoder's decoding, in order."""
import json, os, random, sys, time
import torch
F = torch.nn.functional
DT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
out = open(sys.argv[1], "a"); t0 = time.time()
m, p, reset = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats


def measure(c, o, size, k, s, pad, b, dt, cl, grad):
    torch.cuda.empty_cache()
    x = torch.randn(b, c, *size, device="cuda", dtype=DT[dt]); w = torch.randn(o, c, *k, device="cuda", dtype=DT[dt])
    if cl: x = x.to(memory_format=torch.channels_last_3d)
    row = {"c": c, "o": o, "size": size, "k": k, "s": s, "pad": pad, "b": b, "dtype": dt, "channels_last": cl}
    if grad: x.requires_grad_(); w.requires_grad_()
    a0 = m(); reset(); y = F.conv3d(x, w, None, s, pad); torch.cuda.synchronize()
    row |= {"fwd": p() - a0, "out": m() - a0, "format": y.is_contiguous(memory_format=torch.channels_last_3d), "y": list(y.shape)}
    if grad:
        g = torch.randn_like(y); a0 = m(); reset(); y.backward(g); torch.cuda.synchronize(); row |= {"bwd": p() - a0, "grads": m() - a0}
    return row


def drawn():
    r = random.Random(11); cases = []
    for c, o in [(3, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512), (16, 384), (384, 384), (192, 192), (96, 96), (96, 3), (128, 3), (16, 512), (3, 1152), (3, 1280), (48, 48), (33, 65), (1024, 1024)]:
        for k in [(3, 3, 3), (3, 1, 1), (1, 1, 1), (1, 3, 3), (1, 2, 2), (2, 14, 14)]:
            for n in (8, 16, 32, 60, 128, 256): cases.append((c, o, n, k))
    r.shuffle(cases)
    for c, o, n, k in cases:
        f = r.choice([1, 3, 5, 9, 13, 17, 33])
        if k[1] in (2, 14): f, size, s, pad = k[0], [max(k[0], 2) if k[0] > 1 else f, *r.choice([k[1:], (n // k[1] * k[1] or k[1],) * 2])], list(k), [0, 0, 0]
        else:
            s = r.choice([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 2, 2], [2, 2, 2]]); pad = r.choice([[0, 0, 0], [q // 2 for q in k], [0, k[1] // 2, k[2] // 2]]); size = [f + k[0] - 1, n, n]
        b = r.choice([1, 1, 2, 8]) if k[1] != 14 else r.choice([16, 256, 1024])
        for dt in r.sample(["bf16", "fp32", "fp16"], 2):
            if time.time() - t0 > float(sys.argv[2]): return
            if b * max(c, o) * size[0] * size[1] * size[2] > 2 ** 30: continue
            try: row = measure(c, o, list(size), list(k), s, pad, b, dt, r.random() < 0.12, r.random() < 0.6)
            except Exception as e: row = {"c": c, "o": o, "size": list(size), "k": list(k), "s": s, "pad": pad, "b": b, "dtype": dt, "error": repr(e)[:100]}
            out.write(json.dumps(row) + "\n"); out.flush()


def decoding(name, frames, height, width):
    sys.argv[1:] = ["none"]; sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "pipelines"))
    from configs import PIPELINES
    import copy, diffusers
    c = copy.deepcopy(PIPELINES[name]["vae"]); vae = getattr(diffusers, c.pop("_class_name")).from_config(c).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    along, apart, channels = {"wan": (4, 8, 16), "qwen-image": (4, 8, 16), "hunyuan-video": (4, 8, 16), "ltx": (8, 32, 128)}[name]
    z = torch.randn(1, channels, (frames - 1) // along + 1, height // apart, width // apart, device="cuda", dtype=torch.bfloat16)
    inner = F.conv3d
    def conv(x, w, bias=None, stride=1, padding=0, dilation=1, groups=1):
        had = p(); a0 = m(); reset(); y = inner(x, w, bias, stride, padding, dilation, groups); torch.cuda.synchronize()
        out.write(json.dumps({"of": name, "x": list(x.shape), "strides": list(x.stride()), "w": list(w.shape), "stride": stride, "pad": padding, "fwd": p() - a0, "out": m() - a0, "before": a0, "had": had}) + "\n"); return y
    F.conv3d = torch.nn.functional.conv3d = conv; torch.conv3d = conv
    with torch.no_grad(): vae.decode(z, return_dict=False)
    out.flush()


torch.zeros(1, device="cuda"); F.conv2d(torch.randn(1, 8, 8, 8, device="cuda", dtype=torch.bfloat16), torch.randn(8, 8, 3, 3, device="cuda", dtype=torch.bfloat16))
if len(sys.argv) > 3: decoding(sys.argv[3], *map(int, sys.argv[4:7]))
else: drawn()
