"""One card of a mesh, as torchtitan lays one out, around transformers' layers: `titan.py ROWS.jsonl ID [STEPS]`.

A row is one of truth/ledger with `run.dist` of engine `mesh` and, beside what FORMAT.md lists, `compile` (`layers`,
`layers-and-loss`), `float8` (`tensorwise`, `rowwise`) and `dist.float8_gather`. Run by

    vramcast rehearse --gpu h200 --world W --rank R -- python titan.py ROWS.jsonl ID

with the rank that `titan.py ROWS.jsonl ID rank` prints. Order of the mesh and of what is applied: pipeline, tensor
parallel, checkpoints, torch.compile, fully_shard (torchtitan/models/llama3/infra/parallelize.py). What a neighbour in the
pipeline would send of shapes is made here.
"""
import functools, inspect, json, os, sys

row = next(row for row in map(json.loads, open(sys.argv[1])) if row["id"] == sys.argv[2])
run, dist_ = row["run"], row["run"]["dist"]
world, tp, cp, pp = (dist_.get(key, 1) for key in ("world", "tp", "cp", "pp"))
shard = world // (tp * cp * pp)
rank = (dist_.get("pp_rank", 0) * shard * cp + dist_.get("cp_rank", 0)) * tp
if sys.argv[3:] == ["rank"]:
    print(f"--world {world} --rank {rank}")
    raise SystemExit

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate, Shard
except ImportError:  # up to torch 2.5
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed._tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module,
)
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

DT = {"bf16": torch.bfloat16, "fp32": torch.float32}
weights = DT[run["weights"]]
narrow = torch.bfloat16 if dist_.get("mp") else weights
float8 = run.get("float8")


class Part(nn.Module):
    """Some layers of a decoder, with what is before or after them at the ends."""

    def __init__(self, model, first, last, layers):
        super().__init__()
        self.embed_tokens = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList([model.model.layers[index] for index in layers])
        self.rotary_emb = model.model.rotary_emb
        self.norm = model.model.norm if last else None
        self.lm_head = model.lm_head if last else None
        self.positions = None

    def forward(self, x, labels=None, loss=None):
        hidden = self.embed_tokens(x) if self.embed_tokens is not None else x
        positions = self.positions
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        angles = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=angles)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # up to transformers 4.53
        if self.norm is None:
            return hidden
        logits = self.lm_head(self.norm(hidden))
        # In the model as in transformers, outside of it in a pipeline.
        return logits if labels is None else loss(logits, labels)


def split_modules(part, mesh):
    """torchtitan's plan for Llama."""
    column, rows, prepare = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    ends = {}
    if part.embed_tokens is not None:
        ends["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if part.norm is not None:
        apart = dist_.get("loss_parallel", False)
        ends["norm"] = SequenceParallel()
        ends["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1) if apart else Replicate(),
                                          use_local_output=not apart)
    parallelize_module(part, mesh, ends)
    if float8 == "tensorwise":
        from torchao.float8.float8_tensor_parallel import (
            Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput,
        )
        column, rows, prepare = Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
    for layer in part.layers:
        parallelize_module(layer, mesh, {
            "input_layernorm": SequenceParallel(),
            "self_attn": prepare(input_kwarg_layouts={"hidden_states": Shard(1)},
                                 desired_input_kwarg_layouts={"hidden_states": Replicate()}),
            "self_attn.q_proj": column(), "self_attn.k_proj": column(), "self_attn.v_proj": column(),
            "self_attn.o_proj": rows(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": prepare(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": column(), "mlp.up_proj": column(),
            "mlp.down_proj": rows(output_layouts=Shard(1)),
        })


def selective():
    """Keeps attention, what is scattered, and every second product."""
    from collections import defaultdict
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    aten = torch.ops.aten
    kept = {aten.mm.default, aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default,
            torch.ops._c10d_functional.reduce_scatter_tensor.default, aten.max.default}
    count = defaultdict(int)

    def policy(ctx, func, *args, **kwargs):
        mode = "again" if ctx.is_recompute else "forward"
        if func == aten.mm.default:
            count[mode] += 1
        keep = func in kept and not (func == aten.mm.default and count[mode] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def parallelize(part, mesh):
    if tp > 1:
        split_modules(part, mesh["tp"])
    for index, layer in enumerate(part.layers):
        if run.get("checkpointing"):
            extra = {"context_fn": selective} if run.get("selective") == "torchtitan" else {}
            layer = checkpoint_wrapper(layer, preserve_rng_state=False, **extra)
        if run.get("compile"):
            layer.compile(fullgraph=True)
        part.layers[index] = layer
    if shard * cp > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dist_.get("mp") else MixedPrecisionPolicy()
        if "shard_cp" not in flat:  # `_flatten` is newer than torch 2.4
            flat["shard_cp"] = mesh["shard", "cp"]._flatten("shard_cp") if cp > 1 or pp > 1 or tp > 1 else mesh["shard"]
        own = {"mesh": flat["shard_cp"], "mp_policy": policy, "reshard_after_forward": dist_.get("reshard", True)}
        for layer in part.layers:
            fully_shard(layer, **own)
        fully_shard(part, **own)
    part.to_empty(device="cuda")
    part.train()
    return part


flat = {}


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (pp, shard, cp, tp), mesh_dim_names=("pp", "shard", "cp", "tp"))
    config = dict(row["config"], **run.get("overrides", {}))
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        named = "torch_dtype" if transformers.__version__ < "4.56" else "dtype"
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **{named: weights})
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        if float8 == "rowwise":
            how = Float8LinearConfig.from_recipe_name("rowwise")
        else:
            how = Float8LinearConfig(enable_fsdp_float8_all_gather=bool(dist_.get("float8_gather")))
        convert_to_float8_training(model, config=how, module_filter_fn=lambda _, name: "lm_head" not in name)
    count, batch, seq = config.num_hidden_layers, run["batch"], run["seq"]
    micro = dist_.get("microbatches", 1)
    entropy = functools.partial(ForCausalLMLoss, vocab_size=config.vocab_size)
    if run.get("compile") == "layers-and-loss":
        entropy = torch.compile(entropy)
    schedule, parts = None, []
    if pp > 1:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
        place, per_rank = dist_.get("pp_rank", 0), dist_.get("stages_per_rank", 2 if "Interleaved" in dist_["schedule"] else 1)
        total = pp * per_rank
        # The embedding and the head count as a layer each.
        base, more = divmod(count + 2, total)
        sizes = [base + (index < more) for index in range(total)]
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
        starts = [sum(sizes[:index]) for index in range(total)]
        sent = torch.empty(batch // micro, seq // cp // tp, config.hidden_size, dtype=narrow, device="meta")
        dist.recv_object_list = lambda objects, *_, **__: objects.__setitem__(0, (sent,))
        dist.send_object_list = lambda *_, **__: None
        stages = []
        for index in range(place, total, pp):
            layers = range(starts[index], starts[index] + sizes[index])
            part = parallelize(Part(model, index == 0, index == total - 1, layers), mesh)
            parts.append(part)
            stages.append(PipelineStage(part, index, total, torch.device("cuda"), group=mesh["pp"].get_group()))
        loss_fn = lambda logits, labels: entropy(logits, labels)
        classes = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe, "Interleaved1F1B": ScheduleInterleaved1F1B}
        own = classes[dist_["schedule"]]
        schedule = own(stages if "Interleaved" in dist_["schedule"] else stages[0], n_microbatches=micro, loss_fn=loss_fn)
    else:
        parts = [parallelize(Part(model, True, True, range(count)), mesh)]
    del model
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **({"fused": True} if run.get("impl") == "fused" else {"foreach": True}))
    loaded = torch.cuda.memory_allocated()
    phases = []
    for step in range(int(sys.argv[3]) if sys.argv[3:] else 3):
        ids = torch.randint(10, 1000, (batch, seq)).cuda()
        labels, positions = ids.clone(), torch.arange(seq).cuda().unsqueeze(0)
        if cp > 1 or tp > 1:
            for part in parts:
                part.positions = positions
        torch.cuda.reset_peak_memory_stats()
        context = functools.partial(_context, mesh, [ids, labels, positions])
        with context():
            if schedule is None:
                loss = parts[0](ids, labels, entropy)
                phases.append(_phase(f"{step}.0.fwd"))
                loss.backward()
                phases.append(_phase(f"{step}.0.bwd"))
                del loss
            else:
                first, last = dist_.get("pp_rank", 0) == 0, dist_.get("pp_rank", 0) == pp - 1
                # Before torch 2.10 outputs are returned whether they are wanted or not.
                alone = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
                schedule.step(*([ids] if first else []), **({"target": labels, "losses": []} if last else {}), **alone)
                phases.append(_phase(f"{step}.0.pipe"))
        optimizer.step()
        phases.append(_phase(f"{step}.opt"))
        optimizer.zero_grad()
        del ids, labels, positions
    result = {"loaded": loaded, "phases": phases,
              "peak_allocated": max(phase["peak"] for phase in phases),
              "peak_reserved": max(phase["peak_reserved"] for phase in phases)}
    print("RESULT " + json.dumps(dict(row, gpu="replay: NVIDIA H200", oom=False, measured=result)), flush=True)
    os._exit(0)


def _context(mesh, buffers):
    import contextlib
    stack = contextlib.ExitStack()
    if dist_.get("loss_parallel"):
        stack.enter_context(loss_parallel())
    if cp > 1:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        set_rotate_method(dist_.get("rotate", "allgather"))
        stack.enter_context(context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1],
                                             no_restore_buffers=set(buffers)))
    return stack


def _phase(name):
    torch.cuda.synchronize()
    phase = {"phase": name, "after": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(),
             "reserved": torch.cuda.memory_reserved(), "peak_reserved": torch.cuda.max_memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    return phase


main()
