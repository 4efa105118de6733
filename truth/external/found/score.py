#!/usr/bin/env python3
"""Asks vramcast by the command lines of logs.jsonl and prints its figures beside the logs'. usage: score.py VRAMCAST [ID...]"""
import json, os, subprocess, sys
GIB, MIB = 2**30, 2**20
scores = {}
for row in map(json.loads, open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "logs.jsonl"))):
    if sys.argv[2:] and row["id"] not in sys.argv[2:]:
        continue
    words = row["command"].split()
    asked = subprocess.run([sys.argv[1], *words[1:], "--engine", row["engine"], "--json"], capture_output=True, text=True)
    answer = json.loads(asked.stdout or "{}")
    if "budgets" in answer:
        budget = answer["budgets"][0]
        part = {part["name"]: part["bytes"] / GIB for part in budget["parts"]}
        # "Model loading took" counts all three.
        loaded = sum(part.get(name, 0) for name in ("weights", "LoRA slots", "draft model"))
        ours = {"weights": loaded, "pool": budget["cache"] / GIB, "tokens": budget["cache_tokens"]}
        ours |= {"activations": part["activations while profiling"], "outside": part["outside torch"], "graphs": part.get("CUDA graphs")}
    elif "buffers" in answer:
        estimate = answer["buffers"][0]["estimate"]
        ours = {kind: sum(device[kind] for device in estimate["devices"]) / MIB for kind in estimate["host"]}
        ours |= {"host_" + kind: size / MIB for kind, size in estimate["host"].items()}
    else:
        print(row["id"], "refused:", (asked.stderr or asked.stdout).strip().splitlines()[0])
        continue
    off = {key: 100 * (ours[key] / size - 1) for key, size in row["measured"].items() if ours.get(key) is not None}
    print(row["id"], *(f"{key} {ours[key]:.2f} of {row['measured'][key]} ({error:+.2f} %)" for key, error in off.items()))
    for key, error in off.items():
        scores.setdefault((row["engine"], key), []).append(abs(error))
for (engine, key), errors in sorted(scores.items()):
    errors.sort()
    print(engine, key, f"{len(errors)} logs, median {errors[len(errors) // 2]:.3f} %, worst {errors[-1]:.2f} %")
