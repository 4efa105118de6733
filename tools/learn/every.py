"""Every type and class of transformers beside what vramcast knows: names and shapes of parameters by class defaults.

    python tools/learn/every.py FOLDER make [CLASS…]      builds each on the meta device; FOLDER/CLASS/TYPE.json is a truth file (truth/types)
    python tools/learn/every.py FOLDER score VRAMCAST     exact, wrong and refused by class, and each that is not exact
    python tools/learn/every.py FOLDER lacking VRAMCAST   heads that transformers lacks for a type and vramcast answers for

What was made already is left alone; what transformers cannot build by its class defaults is FOLDER/CLASS/TYPE.refused, with the reason.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import runs
from classes import COUNTED, mapping, needed

def built(model_type, auto_class):
    """A truth file of one type and class."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = needed(model_type, auto_class)
    config = CONFIG_MAPPING[model_type](**given)
    # Of several classes, the first.
    config.architectures = []
    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(config)
    tensors = [[name, list(tensor.shape)] for name, tensor in model.named_parameters()]
    plain = {**CONFIG_MAPPING[model_type](**given).to_dict(), "architectures": [type(model).__name__]}
    text = json.dumps(plain, default=str).replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null")
    return {"id": f"{auto_class}/{model_type}", "model_type": model_type, "config": json.loads(text), "source": "class defaults",
            "auto_class": auto_class, "model_class": type(model).__name__, "transformers_version": transformers.__version__,
            "total_params": sum(p.numel() for p in model.parameters()), "n_tensors": len(tensors), "tied": [], "active_params": None,
            "kv_cache_bytes_per_token_bf16": None, "kv_cache": None, "tensors": tensors}


def make(folder, *classes):
    import transformers.modeling_utils  # noqa: F401 (once for all)

    for auto_class in classes or COUNTED:
        os.makedirs(f"{folder}/{auto_class}", exist_ok=True)
        for model_type in mapping(auto_class):
            base = f"{folder}/{auto_class}/{model_type}"
            if os.path.exists(base + ".json") or os.path.exists(base + ".refused"):
                continue
            found = runs.child(lambda: built(model_type, auto_class), 120)
            with open(base + (".refused" if "error" in found else ".json"), "w") as file:
                file.write(found["error"] if "error" in found else json.dumps(found))
            if "error" in found:
                print(auto_class, model_type, found["error"], flush=True)


def score(folder, vramcast):
    for auto_class in COUNTED:
        at = f"{folder}/{auto_class}"
        names = os.listdir(at) if os.path.isdir(at) else []
        types = [name for name in names if name.endswith(".json")]
        if not types:
            continue
        answer = subprocess.run([vramcast, "verify", at, "--json"], capture_output=True, text=True)
        rows = json.loads(answer.stdout)["sets"][0]["rows"]
        exact = [row for row in rows if row.get("ok")]
        refused = [row for row in rows if not row.get("ok") and row.get("error")]
        print(f"{auto_class}: {len(names)} types, {len(types)} can be built; {len(exact)} exact, "
              f"{len(rows) - len(exact) - len(refused)} wrong, {len(refused)} refused")
        for row in rows:
            if not row.get("ok"):
                parts = [f"{what}: {len(names)} ({names[0]})" for what, names in row["tensors"].items() if names]
                print("   ", row["model_type"], row.get("error") or f"{row['params']}, {'; '.join(parts)}")


def lacking(folder, vramcast):
    every = {auto_class: set(mapping(auto_class)) for auto_class in COUNTED}
    asked = []
    for model_type in sorted(set().union(*every.values())):
        path = next((p for c in COUNTED if os.path.exists(p := f"{folder}/{c}/{model_type}.json")), None)
        if path:
            config = f"{folder}/{model_type}.config.json"
            with open(config, "w") as file:
                json.dump({**json.load(open(path))["config"], "architectures": None}, file)
            asked += [(model_type, c, config) for c in COUNTED if model_type not in every[c]]

    def ask(case):
        run = subprocess.run([vramcast, "inspect", case[2], "--auto-class", case[1]], capture_output=True, text=True)
        return case, run.returncode, run.stderr

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, asked))
    answered = [case for case, code, _ in answers if code == 0]
    print(f"{len(asked)} heads that transformers lacks: {len(answered)} are answered for")
    for model_type, auto_class, _ in answered:
        print("   ", auto_class, model_type)
    for case, code, text in answers:
        if code not in (0, 2):
            print("   ", *case, "ends with", code, text[:200])


if __name__ == "__main__":
    folder, command, *rest = sys.argv[1:]
    {"make": make, "score": score, "lacking": lacking}[command](folder, *rest)
