"""One run of torchtune's single-device recipes: what they do in order, without data and checkpoints."""
import argparse, contextlib, json, os, sys, functools
a = argparse.ArgumentParser()
a.add_argument("--model", default="llama3_2.llama3_2_3b")
a.add_argument("--rank", type=int, default=64)
a.add_argument("--batch", type=int, default=2); a.add_argument("--seq", type=int, default=4096)
for f in "ac offload compile inbwd plain nopack dropout".split(): a.add_argument("--" + f, action="store_true")
a.add_argument("--optim", default="adamw"); a.add_argument("--steps", type=int, default=2); a.add_argument("--accum", type=int, default=1)
a.add_argument("--layers", type=int); a.add_argument("--dump")
o = a.parse_args()
import torch, torchtune
from torchtune import training, modules, models
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params
import importlib
module, name = o.model.rsplit(".", 1)
build = getattr(importlib.import_module("torchtune.models." + module), name)
dev = torch.device("cuda")
lora = "lora" in name
kw = dict(lora_attn_modules=["q_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=o.rank, lora_alpha=2 * o.rank, lora_dropout=0.0) if lora else {}
def gib(): 
    s = torch.cuda.memory_stats()
    return {k: round(s[k] / 2**30, 3) for k in ("active_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak")} | {"now": round(s["allocated_bytes.all.current"] / 2**30, 3)}
with training.set_default_dtype(torch.bfloat16), dev:
    model = build(**kw)
if o.layers: del model.layers[o.layers:]
if lora: set_trainable_params(model, get_adapter_params(model))
if o.compile: training.compile_model(model)
if o.ac: training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
if hasattr(training, 'get_act_offloading_ctx_manager'): ctx = training.get_act_offloading_ctx_manager(model, o.offload)
else:
    ctx = contextlib.nullcontext()
    if o.offload:
        from torchtune.training._activation_offloading import OffloadActivations, NoOpManager
        ctx = OffloadActivations(); noop = NoOpManager()
        model.output.register_forward_pre_hook(lambda *a: noop.__enter__()); model.output.register_forward_hook(lambda *a: noop.__exit__(), always_call=True)
def optimizer(ps):
    if o.optim == "adamw": return torch.optim.AdamW(ps, lr=2e-5, fused=True)
    if o.optim == "ao8": 
        from torchao.prototype.low_bit_optim import AdamW8bit; return AdamW8bit(ps, lr=2e-5)
    import bitsandbytes as bnb
    return {"bnb8": bnb.optim.AdamW8bit, "paged8": bnb.optim.PagedAdamW8bit}[o.optim](ps, lr=2e-5)
if o.inbwd:
    opt = None; d = {p: optimizer([p]) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=d)
else: opt = optimizer(model.parameters())
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-100) if o.plain else CEWithChunkedOutputLoss()
if o.compile: loss_fn = training.compile_loss(loss_fn)
if not o.plain: model.set_num_output_chunks(8)
cache = torch.full((o.batch, 1), -100, device=dev)
print("built", json.dumps(gib()), flush=True)
torch.cuda.reset_peak_memory_stats()
from torchtune.modules.attention_utils import packed_block_causal_mask
def batch():
    t = torch.randint(0, 1000, (o.batch, o.seq)); 
    out = {"tokens": t, "labels": t.clone()}
    if not o.nopack:
        out["input_pos"] = torch.arange(o.seq).repeat(o.batch, 1)
        out["mask"] = packed_block_causal_mask([torch.tensor([o.seq // 2, o.seq - o.seq // 2]) for _ in range(o.batch)])
    return {k: v.to(dev) for k, v in out.items()}
if o.dump: torch.cuda.memory._record_memory_history(max_entries=1000000)
idx = 0; num = 0; running = 0
for step in range(o.steps * o.accum):
    b = batch()
    n = (b["labels"] != -100).sum(); num += n
    labels = b.pop("labels")
    with ctx: logits = model(**b)
    labels = torch.hstack((labels[..., 1:], cache[: labels.shape[0]]))
    if not isinstance(logits, list): labels = labels.reshape(-1); logits = logits.reshape(-1, logits.size(-1))
    loss = loss_fn(logits, labels); del logits
    loss = loss * n; running += loss
    if step >= 0: print(step, "fwd", json.dumps(gib()), flush=True)
    loss.backward()
    print(step, "bwd", json.dumps(gib()), flush=True)
    if (step + 1) % o.accum == 0 and opt is not None:
        training.scale_grads(model, 1 / num); opt.step(); opt.zero_grad(set_to_none=True); num = 0; running = 0
    print(step, "opt", json.dumps(gib()), flush=True)
if o.dump:
    import pickle; pickle.dump(torch.cuda.memory._snapshot(), open(o.dump, "wb"))
