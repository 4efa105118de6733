#!/usr/bin/env python3
"""Asks transformers where `device_map` puts a model, on the meta device.

    placement.py draw SEED COUNT > CASES.jsonl
    placement.py run CASES.jsonl > ROWS.jsonl

Needs torch, transformers 5.17 and accelerate, and the catalogue beside this repository; no GPU."""
import json, os, random, sys
CATALOGUE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../crates/core/data/catalogue.jsonl")
# Gigabytes of weights in 16 bits.
MODELS = {"openai-community/gpt2": .25, "facebook/opt-1.3b": 2.6, "meta-llama/Meta-Llama-3-8B": 16, "Qwen/Qwen3-0.6B": 1.2, "google/gemma-2-9b-it": 18.5, "mistralai/Mixtral-8x7B-v0.1": 93,
          "bigscience/bloom-3b": 6, "tiiuae/falcon-7b": 14.4, "microsoft/phi-2": 5.6, "EleutherAI/pythia-2.8b": 5.6, "Qwen/Qwen3-30B-A3B": 61, "deepseek-ai/DeepSeek-V2-Lite": 31.4,
          "google/gemma-3-4b-it": 8.6, "meta-llama/Llama-3.1-70B": 141, "Qwen/Qwen2.5-VL-7B-Instruct": 16.6, "google-t5/t5-large": 1.5, "openai/whisper-large-v3": 3.1,
          "state-spaces/mamba-2.8b-hf": 5.6, "Qwen/Qwen2.5-1.5B": 3.1, "microsoft/Phi-3-mini-4k-instruct": 7.6, "openai/gpt-oss-20b": 42}
# Drawn from the second seed on.
MORE = {"llava-hf/llava-1.5-7b-hf": 14, "facebook/bart-large": .8, "Qwen/Qwen3-Next-80B-A3B-Instruct": 163, "ibm-granite/granite-4.0-h-tiny": 14, "ai21labs/Jamba-v0.1": 104, "google/gemma-3n-E2B-it": 11,
        "allenai/OLMoE-1B-7B-0924": 14, "THUDM/GLM-4-9B-0414": 18.8, "bigcode/starcoder2-7b": 14.6, "google/gemma-7b": 17, "microsoft/phi-4": 29.3, "mistralai/Mistral-7B-v0.1": 14.5,
        "Qwen/Qwen3.5-9B": 19, "google/gemma-4-E4B-it": 16, "zai-org/GLM-4.5-Air": 221, "google-bert/bert-large-uncased": .7, "mosaicml/mpt-7b": 13.3, "EleutherAI/gpt-j-6b": 12.1}
# From the third seed on, alone.
LATER = {"Qwen/Qwen3.5-35B-A3B": 71, "openai/gpt-oss-120b": 234, "google/gemma-4-26B-A4B-it": 52, "google/gemma-4-31B-it": 62, "Qwen/Qwen3-VL-8B-Instruct": 17.5, "meta-llama/Llama-4-Scout-17B-16E-Instruct": 217,
         "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 48, "CohereForAI/c4ai-command-r7b-12-2024": 16, "LiquidAI/LFM2-1.2B": 2.3, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 63, "Zyphra/Zamba2-2.7B": 5.4,
         "microsoft/Phi-3.5-MoE-instruct": 84, "baidu/ERNIE-4.5-21B-A3B-PT": 44, "meta-llama/Llama-3.2-11B-Vision-Instruct": 21, "google/paligemma2-3b-pt-224": 6, "Qwen/Qwen2-57B-A14B": 115, "allenai/Olmo-3-1025-7B": 14.6,
         "HuggingFaceTB/SmolLM3-3B": 6.2, "google/mt5-large": 2.4, "mistral-community/pixtral-12b": 25, "LGAI-EXAONE/EXAONE-4.0-32B": 64, "ibm-granite/granite-3.3-8b-instruct": 16.3, "mistralai/Voxtral-Mini-3B-2507": 9.4}


def entries():
    return {entry["id"]: entry for entry in map(json.loads, open(CATALOGUE))}


def draw(seed, count):
    dice, known = random.Random(int(seed)), entries()
    sizes = {"1": MODELS, "2": MODELS | MORE}.get(seed, LATER)
    names = sorted(name for name in sizes if name in known)
    for number in range(int(count)):
        model, cards = dice.choice(names), dice.choice([1, 1, 2, 2, 3, 4, 8])
        size = sizes[model] * 1e9
        share = dice.choice([.3, .6, .9, 1.1, 1.3, 2])
        limits = {str(card): int(size * share / cards * dice.choice([1, 1, 1, .5, 1.5])) for card in range(cards)}
        if dice.random() < .8:
            limits["cpu"] = int(size * dice.choice([.2, .5, 2]))
        yield {"id": f"p{seed}-{number:03}", "model": model, "device_map": dice.choice(["auto", "balanced", "balanced_low_0", "sequential"]), "max_memory": limits}


def run(case, entry):
    import torch, transformers
    from transformers.integrations.accelerate import _get_device_map, expand_device_map
    config = transformers.AutoConfig.for_model(**{"model_type": entry["config"]["model_type"], **entry["config"]})
    for attribute in ("quantization_config",):
        if hasattr(config, attribute):
            delattr(config, attribute)
    kind = getattr(transformers, entry.get("auto_class") or "AutoModelForCausalLM")
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    limits = {int(key) if key.isdigit() else key: value for key, value in case["max_memory"].items()}
    found = _get_device_map(model, case["device_map"], limits, None)
    tied = model.all_tied_weights_keys
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}
    held = {}
    for name, device in expand_device_map(found, list(sizes)).items():
        held[str(device)] = held.get(str(device), 0) + sizes[name]
    return case | {"held": held, "map": {name: str(device) for name, device in found.items()}}


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        for case in draw(*sys.argv[2:]):
            print(json.dumps(case))
    else:
        known = entries()
        for case in map(json.loads, open(sys.argv[2])):
            try:
                print(json.dumps(run(case, known[case["model"]])), flush=True)
            except Exception as problem:
                print(case["id"], case["model"], repr(problem)[:300], file=sys.stderr, flush=True)
