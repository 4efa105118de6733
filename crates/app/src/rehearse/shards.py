"""How a model is spread over ranks, in the ledger's words (`run.dist`). Part of `vramcast rehearse`; standard library only."""

TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
STRATEGIES = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "NO_SHARD": "no"}


def of(outer, model, world):
    """What is around the model; none where it is not known."""
    name, found = type(outer).__name__, None
    if name == "DistributedDataParallel":
        found = {"engine": "ddp", "bucket_view": outer.gradient_as_bucket_view, "static_graph": outer.static_graph}
    elif name == "DeepSpeedEngine":
        found = deepspeed(outer)
    elif name == "FullyShardedDataParallel":
        found = fsdp1(outer)
    elif hasattr(outer, "_get_fsdp_state"):
        found = fsdp2(outer, model)
    return found and {**found, "world": world}


def deepspeed(engine):
    settings = dict(engine.config.get("zero_optimization") or {})
    settings.pop("stage", None)
    return {"engine": "deepspeed", "zero": engine.zero_optimization_stage()} | ({"zero_config": settings} if settings else {})


def mixed(policy):
    """Types of parameters and of gradients on their way; torch reduces in the parameters' type where none is named."""
    parameters = policy and policy.param_dtype
    if parameters is None:
        return {}
    return {"mp": {"param": TYPES[str(parameters)], "reduce": TYPES[str(policy.reduce_dtype or parameters)]}}


def fsdp1(outer):
    strategy = STRATEGIES.get(outer.sharding_strategy.name)
    found = {"engine": "fsdp1", "strategy": strategy, "orig_params": outer._use_orig_params, **mixed(outer.mixed_precision)}
    if outer.cpu_offload.offload_params:
        found["offload"] = True
    return found if strategy else None


def fsdp2(outer, model):
    """`fully_shard` on every decoder layer and on the root, which is what the simulator knows."""
    layers = max((part for part in model.modules() if type(part).__name__ == "ModuleList"), key=len, default=())
    if not layers or not all(hasattr(layer, "_get_fsdp_state") for layer in layers):
        return None
    root, layer = outer._get_fsdp_state(), layers[0]._get_fsdp_state()
    again = layer._fsdp_param_group.post_forward_mesh_info is not None
    # torch leaves the root whole after forward unless told otherwise, and decides that in the first call.
    root_again = root._fsdp_param_group.post_forward_mesh_info is not None and not getattr(root, "_auto_reshard_after_forward", False)
    return {"engine": "fsdp2", "reshard": again, "reshard_root": root_again, **mixed(layer._mp_policy)}
