#!/usr/bin/env python3
"""Runs `generate` of a model that a device map spreads, and keeps what every card had at most.

    vramcast weights MODEL --sparse FOLDER
    vramcast rehearse --gpu h200 --gpus 2 --no-sources -- python peaks.py FOLDER CASES.jsonl

A case: id, model, device_map, max_memory, prompt, new_tokens. One process each."""
import json, os, sys


def run(folder, case):
    import torch
    from transformers import AutoModelForCausalLM
    limits = {int(key) if key.isdigit() else key: value for key, value in case["max_memory"].items()}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=case["device_map"], max_memory=limits, offload_folder="/tmp/offloaded")
    cards = range(torch.cuda.device_count())
    ids = torch.ones((1, case["prompt"]), dtype=torch.long, device=model.device if model.device.type == "cuda" else 0)
    torch.cuda.empty_cache()
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    with torch.no_grad():
        if case["new_tokens"]:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=case["new_tokens"], min_new_tokens=case["new_tokens"], do_sample=False)
        else:
            model(ids)
    held = {str(card): torch.cuda.max_memory_allocated(card) for card in cards}
    reserved = {str(card): torch.cuda.max_memory_reserved(card) for card in cards}
    print("ROW " + json.dumps(case | {"allocated": held, "reserved": reserved}), flush=True)


for case in map(json.loads, open(sys.argv[2])):
    if os.fork() == 0:
        run(sys.argv[1], case)
        os._exit(0)
    os.wait()
