"""Times of padded and plain products of heads, as torch/_inductor/fx_passes/pad_mm.py takes them, alone on the card. usage: pad_probe.py OUT.jsonl SECONDS"""
import json, sys, time, torch
from torch._inductor.fx_passes import pad_mm as P
from torch._inductor.runtime.benchmarking import benchmarker
t0 = time.time(); bench = lambda f: benchmarker.benchmark_gpu(f, warmup=5); out = open(sys.argv[1], "w")
ROWS = [1000, 2048, 4000, 4096, 6000, 8192, 512, 1024, 2000, 3000, 6144, 16384, 1536, 3072, 8000, 12288]
SHAPES = [(r, h, 50257) for r in ROWS for h in (768, 1024, 1280, 1600)] + [(r, h, v) for r in (1024, 4096, 2048, 8192) for h, v in ((768, 30522), (1024, 30522), (768, 28996), (768, 50265), (1024, 50265), (2048, 49155), (1024, 151669), (4096, 32001), (2048, 32003), (768, 250002), (768, 50265))]
def pads(x, d): return P.get_padded_length(x, P.get_alignment_size_dtype(d))
def timed(a, b, pre_a, pre_b, bias=None):
    m, k, n = pads(a.shape[0], a.dtype), pads(a.shape[1], a.dtype), pads(b.shape[1], b.dtype); fns = []; x, y = a, b
    if pre_a and (m or k):
        x = P.pad_mat1(a, m_padded_length=m, k_padded_length=k); fns.append(lambda: x[-m:, -k:].fill_(0))
    if pre_b and (k or n):
        y = P.pad_mat2(b, k_padded_length=k, n_padded_length=n); fns.append(lambda: y[-k:, -n:].fill_(0))
    if bias is None: fns.append(lambda: P.pad_mm(x, y, m, k, n, mat1_pre_padded=pre_a, mat2_pre_padded=pre_b)); plain = lambda: torch.mm(a, b)
    else: fns.append(lambda: P.pad_addmm(bias, x, y, m, k, n, mat1_pre_padded=pre_a, mat2_pre_padded=pre_b)); plain = lambda: torch.addmm(bias, a, b)
    return [round(bench(plain), 5), round(bench(lambda: [f() for f in fns]), 5)]
with torch.no_grad():
    for d in (torch.bfloat16, torch.float32):
        for r, h, v in SHAPES if d is torch.bfloat16 else SHAPES[:24]:
            if time.time() - t0 > float(sys.argv[2]): break
            R = lambda *s: torch.randn(*s, dtype=d, device="cuda"); x, w, g, bias = R(r, h), R(v, h), R(r, v), R(v)
            row = {"rows": r, "hidden": h, "vocab": v, "dtype": str(d)[6:], "balanced": P.is_mm_compute_bound(r, h, v, d)}
            row["forward"] = timed(x, w.t(), False, False); row["input"] = timed(g, w, True, False); row["input cast"] = timed(g, w, True, True); row["weight"] = timed(g.t(), x, False, False)
            if v in (30522, 28996, 50265, 250002): row["forward bias"] = timed(x, w.t(), False, False, bias)
            out.write(json.dumps(row) + "\n"); out.flush(); x = w = g = bias = None
print("probe", round(time.time() - t0, 1))
