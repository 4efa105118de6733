#!/usr/bin/env python3
"""Asks vramcast by the command lines of logs.jsonl and prints its figures beside the logs'. usage: score.py VRAMCAST [ID...]"""
import json, os, subprocess, sys
GIB, MIB = 2**30, 2**20
for row in map(json.loads, open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "logs.jsonl"))):
    if sys.argv[2:] and row["id"] not in sys.argv[2:]:
        continue
    words = row["command"].split()
    asked = subprocess.run([sys.argv[1], *words[1:], "--engine", row["engine"], "--json"], capture_output=True, text=True)
    answer = json.loads(asked.stdout or "{}")
    if "budgets" in answer:
        budget = answer["budgets"][0]
        ours = {"weights": budget["parts"][0]["bytes"] / GIB, "pool": budget["cache"] / GIB, "tokens": budget["cache_tokens"]}
    elif "buffers" in answer:
        estimate = answer["buffers"][0]["estimate"]
        ours = {kind: sum(device[kind] for device in estimate["devices"]) / MIB for kind in estimate["host"]}
        ours |= {"host_" + kind: size / MIB for kind, size in estimate["host"].items()}
    else:
        print(row["id"], "refused:", (asked.stderr or asked.stdout).strip().splitlines()[0])
        continue
    print(row["id"], *(f"{key} {ours[key]:.2f} of {size} ({100 * (ours[key] / size - 1):+.2f} %)" for key, size in row["measured"].items()))
