#!/usr/bin/env python3
"""Asks vramcast by the command lines of logs.jsonl and prints its figures beside the logs'. usage: score.py VRAMCAST [ID or letter...]"""
import json, os, subprocess, sys
GIB, MIB = 2**30, 2**20
scores = {}


def ask(row, *more):
    words = row["command"].split()[1:]
    asked = subprocess.run([sys.argv[1], *words, *more, "--engine", row["engine"], "--json"], capture_output=True, text=True)
    answer = json.loads(asked.stdout or "{}")
    return answer, asked.stderr.strip() or answer.get("message") or str(answer.get("error"))


def bytes_per_token(row):
    """How far the tokens of the log are from those in a pool of the log's size, which is rounded to 0.01 GiB."""
    pool, tokens = row["measured"]["pool"], row["measured"]["tokens"]
    ends = [ask(row, "--kv-cache-memory-bytes", str(round((pool + half) * GIB)))[0]["budgets"][0]["cache_tokens"] for half in (-0.005, 0.005)]
    nearest = min(max(tokens, ends[0]), ends[1])
    return 100 * (nearest / tokens - 1)


for row in map(json.loads, open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "logs.jsonl"))):
    if sys.argv[2:] and not {row["id"], row["id"][0]} & set(sys.argv[2:]):
        continue
    answer, error = ask(row)
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
        print(row["id"], "refused:", error.splitlines()[0])
        continue
    asked = {key: size for key, size in row["measured"].items() if ours.get(key) is not None and key not in row.get("unasked", [])}
    off = {key: 100 * (ours[key] / size - 1) for key, size in asked.items()}
    told = [f"{key} {ours[key]:.2f} of {row['measured'][key]} ({error:+.2f} %)" for key, error in off.items()]
    if {"pool", "tokens"} <= set(row["measured"]):
        off["bytes per token"] = bytes_per_token(row)
        told.append(f"bytes per token {off['bytes per token']:+.3f} %")
    print(row["id"], *told)
    for key, error in off.items():
        for group in ("all", "inferred" if row.get("inferred") else "stated"):
            scores.setdefault((row["engine"], key, group), []).append(abs(error))
for (engine, key, group), errors in sorted(scores.items()):
    errors.sort()
    print(engine, key, f"{group}: {len(errors)} logs, median {errors[len(errors) // 2]:.3f} %, worst {errors[-1]:.2f} %")
