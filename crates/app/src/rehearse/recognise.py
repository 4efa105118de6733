"""Which run of the simulator a program is, and what its memory is for. Part of `vramcast rehearse`; standard library only.

A model of transformers, its batch, types, optimizer and adapters are put into the words of the ledger
(truth/ledger/FORMAT.md). What cannot be said in them is named, and then there is no comparison.
"""
import sys, weakref

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
TORCH_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "Adagrad": "adagrad", "RMSprop": "rmsprop", "NAdam": "nadam", "Adafactor": "torch-adafactor", "Muon": "muon"}
BITSANDBYTES = {"AdamW8bit": "adamw8bit", "PagedAdamW8bit": "paged-adamw8bit", "Lion8bit": "lion8bit", "AdamW32bit": "adamw-bnb32", "Lion": "lion", "Adam8bit": "adam8bit"}
KINDS = {"input_features": "speech", "pixel_values": "image", "decoder_input_ids": "seq2seq"}


class Unknown(Exception):
    """Why a run cannot be recognised."""


def unwrap(module):
    """The model inside what was put around it."""
    for _ in range(8):
        for name in ("_orig_mod", "module", "_fsdp_wrapped_module"):
            inner = module.__dict__.get("_modules", {}).get(name)
            if inner is not None:
                module = inner
                break
        else:
            return module
    return module


class Run:
    """What was seen of the program's run."""

    def __init__(self, torch):
        self.torch = torch
        self.calls = 0  # of the model, without gradients
        self.outer = None  # the model as it is called; the program alone decides how long it lives
        self.run, self.row = {}, {}
        self.problem = "no model of transformers was called"
        self.inner = False  # whether the next call inside the model is to be looked at
        self.clipped = False
        self.addresses = []  # (time, what, addresses of it)
        self.optimizers = set()

    # --- what is seen ---------------------------------------------------------------------------------------------------

    def called(self, module, args, kwargs):
        """The program calls a model."""
        if self.outer is not None:
            same = module is self.outer()
            self.calls += same and not self.torch.is_grad_enabled()
            return
        model = unwrap(module)
        if not hasattr(getattr(model, "config", None), "to_dict"):
            return
        self.outer, self.inner = weakref.ref(module), True
        try:
            self.problem = None
            self.describe(module, model, args, kwargs)
        except Unknown as problem:
            self.problem = str(problem)
        except Exception as problem:
            self.problem = f"{type(problem).__name__}: {problem}"

    def inside(self):
        """A module inside the model is called: autocast is on now, if ever."""
        self.inner = False
        if self.torch.is_autocast_enabled():
            self.run["autocast"] = DTYPES.get(str(self.torch.get_autocast_gpu_dtype()))

    def describe(self, outer, model, args, kwargs):
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        config = base.config.to_dict()
        tokens = kwargs.get("input_ids", args[0] if args else None)
        kind = next((kind for key, kind in KINDS.items() if kwargs.get(key) is not None), "causal")
        if type(base).__name__.endswith("ForMaskedLM"):
            kind = "mlm"
        if kind != "causal" and kind != "mlm" or tokens is None or tokens.dim() != 2:
            raise Unknown(f"{type(base).__name__} is called with {', '.join(sorted(kwargs)) or 'positional arguments'}, not with tokens alone")
        self.row = {"model": config.get("_name_or_path") or type(base).__name__, "kind": kind, "config": plain(config), "auto_class": self.auto_class(base)}
        training = self.torch.is_grad_enabled()
        quant = self.quantised(base)
        self.run |= {"task": "train" if training else "infer", "batch": tokens.shape[0], "seq": tokens.shape[1], "weights": self.weights(base),
                     "attn": base.config._attn_implementation, "mask": kwargs.get("attention_mask") is not None, "quant": quant,
                     "checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
                     "liger": any(type(part).__module__.startswith("liger_kernel") or getattr(part.forward, "__module__", "").startswith("liger_kernel") for part in base.modules())}
        if training and kwargs.get("labels") is None:
            raise Unknown("the loss is computed outside the model")
        if hasattr(model, "peft_config"):
            self.run["peft"] = plain(model.peft_config[model.active_adapter].to_dict())
        self.trainer()
        self.shards(outer, model)
        self.run = {key: value for key, value in self.run.items() if value not in (None, False)}
        self.remember("weights", (part for part in model.parameters() if not part.requires_grad or "peft" not in self.run))
        self.remember("adapters", (part for part in model.parameters() if part.requires_grad and "peft" in self.run))
        self.remember("buffers", model.buffers())
        self.remember("batch", (value for value in kwargs.values() if isinstance(value, self.torch.Tensor)))

    def auto_class(self, model):
        name = type(model).__name__
        for ending in ("ForCausalLM", "LMHeadModel", "ForMaskedLM"):
            if name.endswith(ending):
                return "AutoModelForMaskedLM" if ending == "ForMaskedLM" else "AutoModelForCausalLM"
        raise Unknown(f"{name} is not a language model of transformers")

    def weights(self, model):
        """The type of most parameters; of quantised ones, of the rest."""
        sizes = {}
        for part in model.parameters():
            if str(part.dtype) in DTYPES and not (part.requires_grad and hasattr(model, "peft_config")):
                sizes[str(part.dtype)] = sizes.get(str(part.dtype), 0) + part.numel()
        if not sizes:
            raise Unknown("no parameters of a type that the simulator knows")
        return DTYPES[max(sizes, key=sizes.get)]

    def quantised(self, model):
        for part in model.modules():
            if type(part).__name__ == "Linear4bit":
                state = part.weight.quant_type + ("-dq" if part.weight.compress_statistics else "")
                return state
            if type(part).__name__ == "Linear8bitLt":
                return "int8"
        return None

    def trainer(self):
        """Whether transformers' or TRL's Trainer is what calls."""
        frame = sys._getframe()
        while frame:
            if frame.f_code.co_name == "training_step" and "self" in frame.f_locals:
                trainer = frame.f_locals["self"]
                names = {kind.__name__ for kind in type(trainer).__mro__}
                if "Trainer" in names:
                    self.run["task"] = "sft" if "SFTTrainer" in names else "trainer"
                    if not names <= {"Trainer", "SFTTrainer", "_BaseTrainer", "BaseTrainer", "object"}:
                        raise Unknown(f"{type(trainer).__name__} computes its loss in its own way")
                    self.run["trainer_optim"] = str(getattr(trainer.args.optim, "value", trainer.args.optim))
                    return
            frame = frame.f_back

    def shards(self, outer, model):
        distributed = self.torch.distributed
        world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if world == 1 and type(outer).__name__ != "DeepSpeedEngine":
            return
        from vramcast_hook import import_beside

        self.run["dist"] = import_beside("vramcast_shards").of(outer, model, world)
        if self.run["dist"] is None:
            raise Unknown(f"{world} ranks with {type(outer).__name__}")
        if self.run["dist"]["engine"] == "deepspeed" and self.run["task"] == "train":
            self.run["task"] = "deepspeed"

    def stepping(self, optimizer, micro):
        """An optimizer is about to step."""
        if self.outer is None:
            return
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        self.remember("gradients", (part.grad for part in parts if part.grad is not None))
        name, module, settings = type(optimizer).__name__, type(optimizer).__module__, optimizer.defaults
        self.optimizers.add(name)
        if len(self.optimizers) > 1:
            self.problem = self.problem or "several optimizers: " + ", ".join(sorted(self.optimizers))
        if name == "SGD" and module.startswith("torch."):
            known = "nesterov" if settings.get("nesterov") else "sgd-momentum" if settings.get("momentum") else "sgd"
        elif module.startswith("torch."):
            known = "amsgrad" if settings.get("amsgrad") else TORCH_OPTIMIZERS.get(name)
        elif module.startswith("transformers."):
            known = "adafactor" if name == "Adafactor" else None
        else:
            known = BITSANDBYTES.get(name) if module.startswith("bitsandbytes.") else None
        if known is None:
            self.problem = self.problem or f"optimizer {module}.{name}"
        implementation = "fused" if settings.get("fused") else "forloop" if settings.get("foreach") is False else None
        self.run |= {"optimizer": known, "grad_accum": micro} | ({"impl": implementation} if implementation else {})
        if self.clipped:
            self.run["clip"] = True

    def stepped(self, optimizer):
        if self.outer is not None:
            values = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
            self.remember("optimizer state", (value for value in values if isinstance(value, self.torch.Tensor)))

    def remember(self, what, tensors, steps=4):
        """Which addresses are what, for the first steps; the allocator's clock says when."""
        import time

        if sum(kind == what for _, kind, _ in self.addresses) < steps:
            own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)  # of a DTensor, what this rank holds
            found = {tensor.untyped_storage().data_ptr() for tensor in own if tensor.is_cuda}
            self.addresses.append((time.time_ns() // 1000, what, found))

    # --- what is said ---------------------------------------------------------------------------------------------------

    def answer(self):
        """The row, or why there is none."""
        if self.problem:
            return {"row": None, "problem": self.problem}
        if self.run["task"] == "infer":
            if any(name in self.row["kind"] for name in ("seq2seq",)):
                return {"row": None, "problem": "generation of encoder-decoder models"}
            self.run["new_tokens"] = self.calls + 1
        return {"row": {**self.row, "run": self.run}, "problem": None}

    def parts(self, alive):
        """Bytes at the peak by what they are for; `alive` is address to (size, time of birth, time of death)."""
        sums = {}
        for address, (size, born, died) in alive.items():
            for time, what, addresses in self.addresses:
                # The same address at another time is another tensor: this one must live when the addresses were noted.
                if address in addresses and born <= time <= died:
                    sums[what] = sums.get(what, 0) + size
                    break
            else:
                sums["everything else"] = sums.get("everything else", 0) + size
        return sums


def plain(config):
    """What JSON can hold; sets are lists."""
    if isinstance(config, dict):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, (set, frozenset, list, tuple)):
        return [plain(value) for value in (sorted(config) if isinstance(config, (set, frozenset)) else config)]
    return config if config is None or isinstance(config, (bool, int, float, str)) else str(getattr(config, "value", config))
