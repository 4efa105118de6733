"""torchtitan's own Llama of March 2024 on one card of eight: `titan_2024.py CHECKOUT ROWS.jsonl ID [STEPS]`.

CHECKOUT is torchtitan at 83c879f18 (when it was called torchtrain); a row is one of `cp…` in truth/ledger/replay-older.jsonl. Run by

    vramcast rehearse --gpu h200 --world 8 --rank 0 -- python titan_2024.py CHECKOUT ROWS.jsonl ID

with torch 2.3 or 2.4. Its `train.py` reads data and writes logs; here is what it does between those: parallelize, compile the
whole model, and a loop, which lets go of the logits unless the row keeps them (`keep_outputs`, as it did until June 2024).
"""
import json, os, sys, types

checkout, rows, name = sys.argv[1:4]
row = next(row for row in map(json.loads, open(rows)) if row["id"] == name)
run, config = row["run"], row["config"]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

# Its packages import data and checkpoints; only these two files are wanted.
for part in ("torchtrain", "torchtrain.parallelisms"):
    module = sys.modules[part] = types.ModuleType(part)
    module.__path__ = [os.path.join(checkout, *part.split("."))]
sys.modules["torchtrain.config_manager"] = types.SimpleNamespace(JobConfig=object)
from torchtrain.models.llama.model import ModelArgs, Transformer
from torchtrain.parallelisms.parallelize_llama import parallelize_llama

dist.init_process_group("nccl")
torch.cuda.set_device(0)
mesh = init_device_mesh("cuda", (run["dist"]["world"],), mesh_dim_names=("dp",))
with torch.device("meta"):
    model = Transformer.from_model_args(ModelArgs(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        vocab_size=config["vocab_size"]))
mode = "none" if not run.get("checkpointing") else "selective" if run.get("selective") else "full"
job = types.SimpleNamespace(training=types.SimpleNamespace(fp8_linear="", compile="compile" in run),
                            activation_checkpoint=types.SimpleNamespace(mode=mode, selective_ac_option="op"))
axes = types.SimpleNamespace(pp_enabled=False, tp_enabled=False, dp_enabled=True, loss_parallel_enabled=False)
model = parallelize_llama(model, mesh, axes, job)
torch.__future__.set_swap_module_params_on_conversion(True)
model.to_empty(device="cuda")
model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
if "compile" in run:
    torch._dynamo.config._experimental_support_context_fn_in_torch_utils_checkpoint = mode == "selective"
    model = torch.compile(model)
model.train()
for step in range(int(sys.argv[4]) if sys.argv[4:] else 3):
    ids = torch.randint(0, 1000, (run["batch"], run["seq"])).cuda()
    labels = ids.clone()
    optimizer.zero_grad()
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))
    if not run.get("keep_outputs"):
        del logits
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
peaks = {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved(), "phases": []}
print("RESULT " + json.dumps(dict(row, gpu="replay: NVIDIA H200", oom=False, measured=peaks)), flush=True)
os._exit(0)
