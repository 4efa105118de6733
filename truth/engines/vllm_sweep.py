#!/usr/bin/env python3
"""Draws runs of vLLM, runs its worker on a card that is pretended, and keeps what it loads, profiles and has left.

    vllm_sweep.py draw SEED COUNT CASES.jsonl
    vramcast rehearse --gpu a100-80gb --gpus 8 --no-sources -- python vllm_sweep.py run a100-80gb CASES.jsonl ROWS.jsonl

One process per run, forked before CUDA is begun. Needs vLLM 0.32 (`pip install --no-deps vllm` and what it imports) and the catalogue beside this repository."""
import contextlib, importlib, json, os, random, signal, sys, tempfile
CATALOGUE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../crates/core/data/catalogue.jsonl")
# Imported once, not in every process.
SLOW = ["vllm.engine.arg_utils", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner"]
CARDS = {"t4": ("T4", 15), "l4": ("L4", 23), "rtx4090": ("RTX 4090", 24), "rtx5090": ("RTX 5090", 31), "l40s": ("L40S", 45), "a100-80gb": ("A100-80GB", 80), "h100": ("H100-80GB", 80),
         "h200": ("H200", 140), "b200": ("B200-180GB", 180)}
# Gigabytes of weights in 16 bits, or as stored.
MODELS = {
 "dense": {"Qwen/Qwen3-0.6B": 1.5, "Qwen/Qwen3-8B": 16.4, "Qwen/Qwen3-14B": 29.5, "Qwen/Qwen3-32B": 65, "meta-llama/Llama-3.1-8B-Instruct": 16, "meta-llama/Llama-3.1-70B": 141,
  "meta-llama/Llama-3.2-3B-Instruct": 6.4, "Qwen/Qwen2.5-7B-Instruct": 15.2, "Qwen/Qwen2.5-72B-Instruct": 145, "mistralai/Mistral-7B-v0.1": 14.5, "mistralai/Mistral-Nemo-Base-2407": 24.5,
  "microsoft/Phi-3-mini-4k-instruct": 7.6, "microsoft/phi-4": 29.3, "google/gemma-2-9b-it": 18.5, "google/gemma-7b": 17, "google/gemma-3-1b-it": 2, "allenai/Olmo-3-1025-7B": 14.6,
  "THUDM/GLM-4-9B-0414": 18.8, "HuggingFaceTB/SmolLM3-3B": 6.2, "bigcode/starcoder2-7b": 14.6, "facebook/opt-1.3b": 2.6, "EleutherAI/pythia-2.8b": 5.6, "bigscience/bloom-3b": 6,
  "ibm-granite/granite-3.3-8b-instruct": 16.3, "CohereForAI/c4ai-command-r7b-12-2024": 16, "LGAI-EXAONE/EXAONE-4.0-32B": 64, "swiss-ai/Apertus-8B-2509": 16.1, "microsoft/phi-2": 5.6},
 "experts": {"Qwen/Qwen3-30B-A3B": 61, "mistralai/Mixtral-8x7B-v0.1": 93, "allenai/OLMoE-1B-7B-0924": 14, "ibm-granite/granite-3.0-3b-a800m-instruct": 6.8, "Qwen/Qwen1.5-MoE-A2.7B": 28.6,
  "zai-org/GLM-4.5-Air": 221, "openai/gpt-oss-20b": 14, "openai/gpt-oss-120b": 65, "Qwen/Qwen3-235B-A22B": 470},
 "latent": {"deepseek-ai/DeepSeek-V2-Lite": 31.4, "deepseek-ai/DeepSeek-V3": 690, "deepseek-ai/DeepSeek-V2": 470},
 "hybrid": {"Qwen/Qwen3-Next-80B-A3B-Instruct": 163, "ibm-granite/granite-4.0-h-micro": 6.4, "ibm-granite/granite-4.0-h-tiny": 14, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 63,
  "ai21labs/Jamba-v0.1": 104, "LiquidAI/LFM2-1.2B": 2.4, "Zyphra/Zamba2-2.7B": 5.4, "state-spaces/mamba-2.8b-hf": 5.6, "mistralai/Mamba-Codestral-7B-v0.1": 14.6},
}
QUANTISED = {"awq": (.33, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
             "gptq": (.33, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}), "fp8": (.55, {"quant_method": "fp8", "activation_scheme": "dynamic"})}


def catalogue():
    return {entry["id"]: entry["config"] for entry in map(json.loads, open(CATALOGUE))}


def draw(seed, count, out):
    dice, configs = random.Random(int(seed)), catalogue()
    while count:
        kind = dice.choices(sorted(MODELS), [5, 2.6, 1.6, 1])[0]
        model, card = dice.choice(sorted(MODELS[kind])), dice.choice(sorted(CARDS))
        size, memory, cards, share = MODELS[kind][model], CARDS[card][1], dice.choice([1, 1, 1, 2, 4, 8]), dice.choice([None, None, .8, .85, .9, .95])
        quantised = dice.choice([None, None, *sorted(QUANTISED)]) if kind == "dense" else None
        size *= QUANTISED[quantised][0] if quantised else 1
        if not .02 * memory < size / cards < .72 * memory * (share or .9) or (configs[model].get("num_attention_heads") or 32) % cards or (card == "t4" and quantised == "fp8"):
            continue
        args = {"enforce_eager": True, "gpu_memory_utilization": share, "tensor_parallel_size": cards if cards > 1 else None, "dtype": "half" if card == "t4" else None,
                "max_model_len": min(configs[model].get("max_position_embeddings") or 2048, dice.choice([2048, 8192, 32768, 131072])) if dice.random() < .7 else None,
                "max_num_seqs": dice.choice([1, 16, 64, 128, 256, 512]) if dice.random() < .4 else None, "max_num_batched_tokens": dice.choice([512, 2048, 8192, 16384]) if dice.random() < .35 else None,
                "kv_cache_dtype": "fp8" if dice.random() < .15 and card != "t4" else None, "enable_expert_parallel": kind == "experts" and cards > 1 and dice.random() < .4 or None,
                "enable_lora": kind == "dense" and not quantised and dice.random() < .12 or None}
        case = {"id": f"v{seed}-{int(count):03}", "card": card, "model": model, "args": {key: value for key, value in args.items() if value is not None}}
        if quantised:
            case["config"] = {"quantization_config": QUANTISED[quantised][1]}
        print(json.dumps(case), file=out)
        count -= 1


def alone(world):
    """One rank: groups whose collectives do nothing."""
    import torch.distributed as distributed
    from torch.testing._internal.distributed import fake_pg
    import vllm.distributed.device_communicators.shm_broadcast as shared
    import vllm.distributed.parallel_state as state
    begin, group = distributed.init_process_group, distributed.new_group
    whole = lambda backend=None, **_: begin("fake", rank=0, world_size=world, store=fake_pg.FakeStore())
    part = lambda ranks=None, *_, **__: group(ranks, backend="fake")
    distributed.init_process_group = distributed.distributed_c10d.init_process_group = whole
    distributed.new_group = distributed.distributed_c10d.new_group = part
    distributed.broadcast_object_list = distributed.distributed_c10d.broadcast_object_list = lambda *_, **__: None
    state.in_the_same_node_as, state._node_count = lambda *_: [True] * world, lambda _: 1
    shared.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)


def run(case, config):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker import gpu_worker
    args = dict(case["args"])
    if args.get("tensor_parallel_size", 1) > 1:
        alone(args["tensor_parallel_size"])
        args["disable_custom_all_reduce"] = True
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    profiling, seen = gpu_worker.memory_profiling, []

    @contextlib.contextmanager
    def watched(*arguments, **options):
        with profiling(*arguments, **options) as result:
            yield result
        seen.append(result)

    gpu_worker.memory_profiling = watched
    with tempfile.TemporaryDirectory() as folder:
        json.dump(config, open(os.path.join(folder, "config.json"), "w"))
        settings = EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", **args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        with set_current_vllm_config(settings):
            worker = gpu_worker.Worker(vllm_config=settings, local_rank=0, rank=0, distributed_init_method=f"tcp://127.0.0.1:{get_open_port()}", is_driver_worker=True)
            worker.init_device()
            worker.load_model()
            # What the executor and the engine do between loading and profiling.
            current_platform.update_block_size_for_backend(settings)
            layers = worker.get_kv_cache_spec()
            names = worker.get_supported_kv_cache_layouts() if hasattr(worker, "get_supported_kv_cache_layouts") else worker.model_runner.get_supported_kv_cache_layouts()
            layout = resolve_kv_cache_layout(settings, [names], list(layers.values()))
            holder = next(one for one in (worker, worker.model_runner) if hasattr(one, "set_kv_cache_layout"))
            holder.set_kv_cache_layout(layout.name)
            pool, profile = int(worker.determine_available_memory()), seen[0]
            groups = kv_cache_utils.get_kv_cache_configs(settings, [layers], [pool])[0]
            at_once = kv_cache_utils.get_max_concurrency_for_kv_cache_config(settings, groups)
    weights, outside = int(worker.model_runner.model_memory_usage), profile.non_torch_increase
    scheduler, cache = settings.scheduler_config, settings.cache_config
    resolved = {"max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": scheduler.max_num_batched_tokens, "max_model_len": settings.model_config.max_model_len,
                "gpu_memory_utilization": cache.gpu_memory_utilization, "enable_prefix_caching": cache.enable_prefix_caching}
    row = {"id": case["id"], "engine": "vLLM", "version": __import__("vllm").__version__, "gpu": CARDS[case["card"]][0], "model": case["model"]}
    row |= {"config": case["config"]} if "config" in case else {}
    held = int(worker.requested_memory) - pool - weights - outside
    row |= {"args": case["args"] | resolved, "buffers": [["weights", "", weights], ["activations", "", held], ["cache", "", pool + outside]] + [["sequence", "", round(pool / at_once)]] * (at_once > 1.5)}
    return row | {"parts": {"peak": profile.torch_peak_increase, "transient": profile.transient_peak_headroom, "allocated_before": profile.before_profile.torch_allocated,
                            "allocated_after": profile.after_profile.torch_allocated, "reserved_after": profile.after_profile.torch_memory}}


def main(what, *rest):
    if what == "draw":
        return draw(rest[0], int(rest[1]), open(rest[2], "w"))
    card, cases, out = rest
    configs = catalogue()
    from vllm.model_executor.models import registry  # a model's class is looked at here, not in a process of its own
    for name in SLOW:
        importlib.import_module(name)
    done = {json.loads(line)["id"] for line in open(out)} if os.path.exists(out) else ()
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    for case in map(json.loads, open(cases)):
        if case["card"] != card or case["id"] in done:
            continue
        if os.fork() == 0:
            signal.alarm(300)
            row = run(case, configs[case["model"]] | case.get("config", {}))
            print(json.dumps(row), file=open(out, "a"), flush=True)
            os._exit(0)
        print(case["id"], os.wait()[1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
