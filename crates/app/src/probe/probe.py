"""Runs a job on this machine's device and writes down what torch held on it, phase by phase.

    python probe.py JOB.json ROWS.jsonl

A job is a ledger row without its measurements (see truth/ledger/FORMAT.md): a model by its config, and under `run`
what to do with it. Only torch is needed; transformers, peft, bitsandbytes, liger_kernel and deepspeed are imported by
the jobs that ask for them. Without a GPU, a job runs on the CPU and its storages are counted instead.

Lines on standard output are events for whoever started the probe: one JSON object each.
"""

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import sys
import time
import traceback
import weakref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "liger_kernel", "deepspeed", "accelerate", "triton")


def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


# ---- what is measured -----------------------------------------------------------------------------------------------


class CudaMeter:
    """torch's caching allocator, and the whole process by NVML."""

    device = "cuda"

    def __init__(self):
        local = int(os.environ.get("LOCAL_RANK", 0))
        visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip().isdigit()]
        # NVML numbers all cards, torch those that CUDA_VISIBLE_DEVICES lists.
        self.index, self.local = int(visible[local]) if local < len(visible) else local, local
        self.nvml = self.open_nvml()
        self.used_before = self.device_used()

    def start(self):
        torch.cuda.set_device(self.local)
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        return {"context": self.process_used()}

    @staticmethod
    def open_nvml():
        for name in ("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "nvml.dll"):
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(name)
                if library.nvmlInit_v2() == 0:
                    return library
        return None

    def device_used(self):
        if self.nvml is None:
            return 0
        handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        self.nvml.nvmlDeviceGetHandleByIndex_v2(self.index, ctypes.byref(handle))
        self.nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        return memory[2]

    def process_used(self):
        return self.device_used() - self.used_before if self.nvml else None

    def settle(self):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()

    def begin(self):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def end(self):
        torch.cuda.synchronize()
        return {
            "after": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }

    def card(self):
        return torch.cuda.get_device_name()


class CpuMeter:
    """Storages alive on the CPU: there is no caching allocator to ask, so every storage an operation makes is counted."""

    device = "cpu"

    def __init__(self):
        self.allocated = self.peak = 0
        self.known = weakref.WeakValueDictionary()

    def start(self):
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        meter = self

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor):
                        meter.count(leaf)
                return result

        self.mode = Count()
        self.mode.__enter__()
        return {"context": None}

    def count(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata in self.known or storage.nbytes() == 0:
            return
        self.known[storage._cdata] = storage
        size = storage.nbytes()
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self.gone, size)

    def gone(self, size):
        self.allocated -= size

    def settle(self):
        gc.collect()

    def begin(self):
        gc.collect()
        self.peak = self.allocated
        return self.allocated

    def end(self):
        gc.collect()
        return {"after": self.allocated, "peak": self.peak, "reserved": None, "peak_reserved": None}

    def process_used(self):
        return None

    def card(self):
        return "cpu"


class Record:
    """The phases of one job."""

    def __init__(self, job, meter):
        self.job, self.meter = job, meter
        self.measured = {"phases": []}

    @contextlib.contextmanager
    def phase(self, name):
        say("phase", id=self.job["id"], phase=name)
        before = self.meter.begin()
        try:
            yield
        finally:  # what a phase reached before it failed is worth knowing too
            self.measured["phases"].append({"phase": name, "before": before, **self.meter.end()})

    def loaded(self, model):
        parameters = list(model.parameters())
        size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
        self.measured["params"] = sum(p.numel() for p in parameters)
        self.measured["trainable"] = sum(p.numel() for p in parameters if p.requires_grad)
        self.measured["param_bytes"] = size(parameters)
        self.measured["buffer_bytes"] = size(model.buffers())

    def ready(self):
        self.meter.settle()
        self.measured["loaded"] = self.meter.begin()

    def close(self):
        for key, name in (("peak", "peak_allocated"), ("peak_reserved", "peak_reserved")):
            values = [phase[key] for phase in self.measured["phases"] if phase[key] is not None]
            if values:
                self.measured[name] = max(values)
        return self.measured


# ---- the model and its batch ----------------------------------------------------------------------------------------


def build_model(job, run, device):
    import transformers

    config = dict(job["config"])
    model_type = config.pop("model_type")
    for key in ("architectures", "torch_dtype", "dtype", "transformers_version"):
        config.pop(key, None)
    config = transformers.AutoConfig.for_model(model_type, **config)
    auto_class = getattr(transformers, job.get("auto_class") or "AutoModelForCausalLM")
    attention = {"attn_implementation": run.get("attn", "sdpa")}
    if run.get("pretrained"):
        return auto_class.from_pretrained(run["pretrained"], dtype=DTYPES[run.get("weights", "bf16")], **attention).to(device)
    with torch.device(device):
        model = auto_class.from_config(config, dtype=DTYPES[run.get("weights", "bf16")], **attention)
    note_ties(job, model)
    return model


def note_ties(job, model):
    """Some classes tie their head whatever the config says, which holds for models made of a config alone: the row says so."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        nested = model.config.get_text_config() is not model.config
        section = (job["config"].get("text_config") or {}) if nested else job["config"]
        if tied != section.get("tie_word_embeddings", False):
            path = ("text_config." if nested else "") + "tie_word_embeddings"
            job["run"].setdefault("overrides", {})[path] = tied


def make_batch(job, config, run, device):
    batch, length = run["batch"], run.get("seq", 0)
    source = torch.Generator().manual_seed(0)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    highest = min(getattr(text, "vocab_size", 30000), 30000) - 10
    dtype = DTYPES[run.get("weights", "bf16")]
    ids = lambda count: torch.randint(min(10, highest - 1), highest, (batch, count), generator=source).to(device)
    noise = lambda *sizes: torch.randn(*sizes, generator=source).to(device).to(dtype)
    kind = job.get("kind", "causal")
    if kind == "image":
        pixels = noise(batch, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long, device=device)}
    if kind == "speech":
        return {"input_features": noise(batch, config.num_mel_bins, 3000), "labels": ids(length)}
    if kind == "seq2seq":
        return {"input_ids": ids(length), "labels": ids(run.get("target_seq", length))}
    tokens = ids(length)
    result = {"input_ids": tokens}
    if kind == "qwen_vl":
        height, width = run.get("grid", [32, 32])
        vision = config.vision_config
        count = height * width // vision.spatial_merge_size**2
        tokens[:, 1] = config.vision_start_token_id
        tokens[:, 2 : 2 + count] = config.image_token_id
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        result["pixel_values"] = noise(batch * height * width, patch)
        result["image_grid_thw"] = torch.tensor([[1, height, width]] * batch, device=device)
        result["mm_token_type_ids"] = (tokens == config.image_token_id).long()
    result["labels"] = tokens.clone()
    if run.get("mask") or kind == "qwen_vl":
        result["attention_mask"] = torch.ones_like(tokens)
    return result


# ---- adapters, quantised bases, optimizers, several cards -----------------------------------------------------------


def quantise(model, kind):
    """Puts bitsandbytes' linears in place, as `from_pretrained(quantization_config=…)` does; the head stays as it is."""
    import bitsandbytes as bnb

    def replaced(linear):
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        if kind == "int8":
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")
            new.weight = bnb.nn.Int8Params(linear.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
        else:
            options = {"quant_type": kind.split("-")[0], "compress_statistics": kind.endswith("-dq")}
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.bfloat16, device="meta", **options)
            new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **options)
        if linear.bias is not None:
            new.bias = torch.nn.Parameter(linear.bias.data)
        return new.to("cuda")

    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and "lm_head" not in f"{path}.{name}":
                setattr(module, name, replaced(child))
                del child
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind != "int8", kind == "int8"


def adapted(model, run):
    """The model under a peft adapter: `run.lora`, or any method of peft as `run.peft`."""
    import peft

    if run.get("lora"):
        lora = run["lora"]
        options = {"r": lora["r"], "lora_alpha": lora.get("alpha", 16), "lora_dropout": lora.get("dropout", 0.0)}
        config = peft.LoraConfig(target_modules=lora["targets"], task_type="CAUSAL_LM", **options, **lora.get("config", {}))
        return peft.get_peft_model(model, config, autocast_adapter_dtype=lora.get("fp32_adapter", True))
    method = run["peft"]["peft_type"]
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[method]
    return peft.get_peft_model(model, config(**{k: v for k, v in run["peft"].items() if k != "peft_type"}))


TORCH_OPTIMIZERS = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "amsgrad": ("AdamW", {"amsgrad": True}),
    "nadam": ("NAdam", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "torch-adafactor": ("Adafactor", {}),
}
BITSANDBYTES = {
    "adamw-bnb32": "AdamW32bit", "adamw8bit": "AdamW8bit", "paged-adamw32": "PagedAdamW32bit",
    "paged-adamw8bit": "PagedAdamW8bit", "adam8bit": "Adam8bit", "paged-adam32": "PagedAdam32bit",
    "paged-adam8bit": "PagedAdam8bit", "lion": "Lion", "lion8bit": "Lion8bit", "paged-lion32": "PagedLion32bit",
    "paged-lion8bit": "PagedLion8bit", "ademamix": "AdEMAMix", "ademamix8bit": "AdEMAMix8bit",
    "paged-ademamix32": "PagedAdEMAMix32bit", "paged-ademamix8bit": "PagedAdEMAMix8bit", "lamb": "LAMB",
    "lamb8bit": "LAMB8bit",
}  # fmt: skip
STEPS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "forloop": {"foreach": False}}


def make_optimizer(run, parameters):
    name, rate = run.get("optimizer", "adamw"), {"lr": 1e-5}
    if name in TORCH_OPTIMIZERS:
        kind, options = TORCH_OPTIMIZERS[name]
        return getattr(torch.optim, kind)(parameters, **rate, **options, **STEPS.get(run.get("impl"), {}))
    if name == "muon":
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], **rate)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, **rate, relative_step=False, scale_parameter=False, warmup_init=False)
    if name in BITSANDBYTES:
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, BITSANDBYTES[name])(parameters, **rate)
    raise ValueError(f"run.optimizer: {name} is not an optimizer this probe knows")


def join_world(run):
    """One rank of a world: a real one under torchrun, else a group whose collectives do nothing and whose buffers are real."""
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        return
    world = run["dist"]["world"]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    if run["dist"]["engine"] == "ddp":  # the fake group cannot drive DDP's reducer; buckets do not depend on the world
        os.environ["WORLD_SIZE"] = "1"
        card = {"backend": "nccl", "device_id": torch.device("cuda:0")} if on_gpu else {"backend": "gloo"}
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **card)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def layers_of(model):
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)


def sharded(model, run):
    where = run["dist"]
    card = torch.cuda.current_device() if torch.cuda.is_available() else None
    engine, mixed = where["engine"], where.get("mp")
    if engine == "ddp":
        options = {"gradient_as_bucket_view": where.get("bucket_view", False), "static_graph": where.get("static_graph", False)}
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=None if card is None else [card], **options)
    if engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"mesh": init_device_mesh("cpu" if card is None else "cuda", (where["world"],)), "reshard_after_forward": where.get("reshard", True)}
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers_of(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return model
    if engine == "fsdp1":
        import functools

        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        strategies = {"full": ShardingStrategy.FULL_SHARD, "grad_op": ShardingStrategy.SHARD_GRAD_OP, "no": ShardingStrategy.NO_SHARD}
        half = MixedPrecision(*[torch.bfloat16] * 3) if mixed else None
        wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers_of(model)[0])})
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=wrap,
            sharding_strategy=strategies[where.get("strategy", "full")],
            device_id=card,
            use_orig_params=True,
            mixed_precision=half,
        )
    raise ValueError(f"run.dist.engine: {engine} is not an engine this probe knows")


# ---- the loops ------------------------------------------------------------------------------------------------------


class Training:
    """A plain training loop. What the ledger's own program does otherwise, it does by overriding a method."""

    def __init__(self, job, run, record):
        self.job, self.run, self.record, self.device = job, run, record, record.meter.device

    def checkpoint(self, model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self.checkpointing())
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False

    def checkpointing(self):
        return {"use_reentrant": self.run.get("reentrant", False)}

    def freeze(self, model):
        """Nothing: what trains is the model's own affair, or its adapter's."""

    def prepare(self):
        """The model as it goes into the loop."""
        run, adapts = self.run, self.run.get("lora") or self.run.get("peft")
        model = build_model(self.job, run, self.device)
        if run.get("quant"):
            quantise(model, run["quant"])
            if run.get("prepare_kbit", True):
                from peft import prepare_model_for_kbit_training

                use = {"use_gradient_checkpointing": run.get("checkpointing", False)}
                model = prepare_model_for_kbit_training(model, **use, gradient_checkpointing_kwargs=self.checkpointing())
        if run.get("liger"):
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        model.train()
        checkpoints = run.get("checkpointing") and not run.get("quant")
        if checkpoints:
            self.checkpoint(model)
        self.freeze(model)
        if adapts:
            if checkpoints:
                model.enable_input_require_grads()
            model = adapted(model, run)
            model.train()
        return model

    def batch(self, config):
        return make_batch(self.job, config, self.run, self.device)

    def optimizer(self, model, parameters):
        return make_optimizer(self.run, parameters)

    def forward(self, model, batch, options):
        """The loss, and whatever else stays alive beside it until backward is done."""
        output = model(**batch, **options)
        return output.loss, output if self.run.get("keep_outputs", True) else None

    def clip(self, parameters):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    def measure(self):
        run, record = self.run, self.record
        if run.get("dist"):
            join_world(run)
        model = self.prepare()
        config = model.config
        record.loaded(model)
        if run.get("dist"):
            model = sharded(model, run)
        batch = self.batch(config)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = self.optimizer(model, parameters)
        record.ready()
        half = DTYPES.get(run.get("autocast"))
        scaler = torch.amp.GradScaler(self.device) if run.get("autocast") == "fp16" else None
        options = {"use_cache": False} if self.job.get("kind", "causal") in ("causal", "qwen_vl") else {}
        for step in range(run.get("steps", 3)):
            for micro in range(run.get("grad_accum", 1)):
                with record.phase(f"{step}.{micro}.fwd"):
                    with torch.autocast(self.device, dtype=half) if half else contextlib.nullcontext():
                        loss, output = self.forward(model, batch, options)
                with record.phase(f"{step}.{micro}.bwd"):
                    (scaler.scale(loss) if scaler else loss).backward()
                loss = output = None
            if run.get("clip"):
                with record.phase(f"{step}.clip"):
                    self.clip(parameters)
            with record.phase(f"{step}.opt"):
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            with record.phase(f"{step}.zero"):
                optimizer.zero_grad(set_to_none=True)


def train(job, run, record):
    Training(job, run, record).measure()


def train_deepspeed(job, run, record):
    os.environ["DS_ACCELERATOR"] = "cuda"
    join_world(run)
    import deepspeed

    model = Training(job, run, record).prepare()
    record.loaded(model)
    where = run["dist"]
    settings = {
        "train_micro_batch_size_per_gpu": run["batch"],
        "gradient_accumulation_steps": run.get("grad_accum", 1),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": where["zero"], **where.get("zero_config", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0 if run.get("clip") else 0.0,
    }
    optimizer = make_optimizer(run, [p for p in model.parameters() if p.requires_grad])
    config = model.config
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    batch = make_batch(job, config, run, "cuda")
    del model, optimizer
    record.ready()
    for step in range(run.get("steps", 3)):
        for micro in range(run.get("grad_accum", 1)):
            with record.phase(f"{step}.{micro}.fwd"):
                output = engine(**batch, use_cache=False)
                loss = output.loss
            with record.phase(f"{step}.{micro}.bwd"):
                engine.backward(loss)
            loss = output = None
            with record.phase(f"{step}.opt" if micro + 1 == run.get("grad_accum", 1) else f"{step}.{micro}.step"):
                engine.step()


def infer(job, run, record):
    device = record.meter.device
    model = build_model(job, run, device)
    if run.get("quant"):
        quantise(model, run["quant"])
    model.eval()
    record.loaded(model)
    batch = make_batch(job, model.config, run, device)
    batch.pop("labels", None)
    record.ready()
    with torch.inference_mode():
        if not run.get("new_tokens"):
            output = None
            for name in ("forward", "forward2"):
                with record.phase(name):
                    output = None
                    output = model(**batch)
            return
        tokens = run["new_tokens"]
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        named = {"cache": "cache_implementation", "cache_config": "cache_config", "beams": "num_beams", "use_cache": "use_cache"}
        for key, name in named.items():
            if run.get(key) is not None:
                options[name] = run[key]
        if "input_ids" in batch and "attention_mask" not in batch:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        with record.phase("generate"):
            model.generate(**batch, disable_compile=True, **options)


TASKS = {"train": train, "deepspeed": train_deepspeed, "infer": infer}


# ---- one job, one process -------------------------------------------------------------------------------------------


def versions():
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def measure(job, rows, shown=None):
    """Runs a job and appends its row; `shown` are parts of the row that are not those of the job."""
    run = job["run"]
    if run.get("alloc_conf"):
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = run["alloc_conf"]
    started = time.time()
    meter = CudaMeter() if torch.cuda.is_available() else CpuMeter()
    record = Record(job, meter)
    row = {**job, **(shown or {}), "oom": False, "error": None}
    try:
        torch.manual_seed(0)
        record.measured.update(meter.start())
        if run["task"] not in TASKS:
            raise ValueError(f"run.task: {run['task']} is not one of {', '.join(TASKS)}")
        TASKS[run["task"]](job, run, record)
        record.measured["nvml_used_end"] = meter.process_used()
    except torch.OutOfMemoryError as problem:
        row.update(oom=True, error=str(problem)[:300])
    except ModuleNotFoundError:
        raise
    except Exception as problem:
        row["error"] = "".join(traceback.format_exception_only(problem)).strip()[:600]
        row["trace"] = traceback.format_exc()[-2000:]
    row.update(gpu=meter.card(), versions=versions(), measured=record.close(), seconds=round(time.time() - started, 2))
    if row["error"] is None:
        del row["error"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        row["rank"] = int(os.environ["RANK"])
    # One call, so that ranks do not write into each other's lines.
    file = os.open(rows, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (json.dumps(row) + "\n").encode())
    os.close(file)
    say("done", id=job["id"], seconds=row["seconds"], error=row.get("error"))


def main():
    job, rows = sys.argv[1:3]
    with open(job, encoding="utf-8") as file:
        measure(json.load(file), rows)


if __name__ == "__main__":
    main()
