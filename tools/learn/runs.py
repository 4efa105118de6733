"""Learned programs beside the real torch: types of transformers drawn by a seed, learned, and run on a pretend card.

    python runs.py draw SEED TYPES > jobs.jsonl      types, a class and a config for each, and runs of it
    python runs.py learn jobs.jsonl FOLDER           each type's program (no GPU; what is refused, with the reason)
    vramcast rehearse --gpu h200 -- python runs.py measure jobs.jsonl FOLDER rows.jsonl
    python runs.py pack rows.jsonl FOLDER FILE.zz    the programs of all rows in one file
    python runs.py families rows.jsonl FOLDER FILE.zz TYPE…   a run of each type with its program, for the test that both give the same bytes
    python runs.py score rows.jsonl FOLDER VRAMCAST  each row by `vramcast verify`, beside families written by hand

A run is `truth/ledger/measure.py`'s: three optimizer steps, or two forward passes without gradients. Rows hold the type's config; its
program is in FOLDER, or in a packed file (truth/learned/ has both). What was learned or measured already is left alone; LEARN_SECONDS ends a call early, with the rest left out.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../../crates/app/src/learn"), os.path.join(HERE, "../../truth/ledger")]
END = time.time() + float(os.environ.get("LEARN_SECONDS", "1e9"))

CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
DEPTH = re.compile(r"(^|_)(n_layers?|num_layers|depth)$|num_hidden_layers$|(encoder|decoder)_layers$")


def lines(path):
    return [json.loads(line) for line in open(path)] if os.path.exists(path) else []


def shallow(config, layers=3):
    """The keys that say how deep a model is, at fewer layers."""
    changed = {}
    for key, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > layers and DEPTH.search(key):
            changed[key] = layers
        elif isinstance(value, dict) and "model_type" in value and shallow(value, layers):
            changed[key] = {"model_type": value["model_type"], **shallow(value, layers)}
    return changed


def draw(seed, count):
    import transformers.models.auto.modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    pairs = {}
    for name, mapping in CLASSES.items():
        for model_type in getattr(auto, mapping):
            pairs.setdefault(model_type, []).append(name)
    types = sorted(pairs)
    random.Random(f"{seed}").shuffle(types)
    for model_type in types[: int(count)]:
        r = random.Random(f"{seed} {model_type}")
        try:
            usual = CONFIG_MAPPING[model_type]()
        except Exception as error:
            print(f"{model_type}: no config by itself: {error!r}"[:200], file=sys.stderr)
            continue
        whole = r.random() < 0.2
        config = {"model_type": model_type, **({} if whole else shallow(usual.to_dict()))}
        longest = getattr(usual.get_text_config(), "max_position_embeddings", None)
        longest = longest - 8 if isinstance(longest, int) and longest > 32 else 512
        runs = []
        for _ in range(4):
            weights = r.choice(["bf16", "fp32"])
            run = {"task": r.choice(["train", "train", "infer"]), "batch": r.choice([1, 2, 3, 4, 6]), "weights": weights,
                   "seq": min(r.choice([64, 96, 128, 200, 256, 333, 384, 512]), longest)}
            if run["task"] == "train":
                run |= {"optimizer": r.choice(["adamw", "adamw", "sgd"]), "clip": False, "mask": False}
                if weights == "fp32" and r.random() < 0.5:
                    run["autocast"] = "bf16"
            else:
                run["new_tokens"] = 0
            runs.append(run)
        auto_class = r.choice(pairs[model_type])
        print(json.dumps({"id": model_type, "auto_class": auto_class, "config": config, "whole": whole, "runs": runs}))


def child(work, seconds):
    """What a function returns in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            result = work()
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = ([f for f in frames if "/torch/" not in f.filename and "app/src/learn" not in f.filename] or frames)[-1]
            result = {"error": f"{own.filename.split('site-packages/')[-1]}:{own.lineno}: {type(error).__name__}: {str(error)[:200]}"}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(writer)
    import select

    data, end = b"", time.time() + seconds
    while True:
        if not select.select([reader], [], [], max(0.1, end - time.time()))[0]:
            os.kill(pid, 9)
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    os.close(reader)
    os.waitpid(pid, 0)
    return json.loads(data) if data.endswith(b"}") else {"error": f"no answer within {seconds} s"}


def paths(folder, job):
    base = os.path.join(folder, f"{job['id']}-{job['auto_class'].removeprefix('AutoModelFor')}")
    return base + ".json", base + ".refused"


def learn_all(jobs, folder):
    import learn

    import transformers.modeling_utils  # noqa: F401 (once for all)

    os.makedirs(folder, exist_ok=True)
    for job in lines(jobs):
        program, refused = paths(folder, job)
        if os.path.exists(program) or os.path.exists(refused) or time.time() > END:
            continue
        config = f"{program}.config"
        json.dump(job["config"], open(config, "w"))
        started = time.time()
        found = child(lambda: learn.learn({"config": config, "auto_class": job["auto_class"], "loss": "cross-entropy", "inputs": []}), 45)
        os.remove(config)
        with open(refused if "error" in found else program, "w") as file:
            file.write(found["error"] if "error" in found else json.dumps(found, separators=(",", ":")))
        print(job["id"], job["auto_class"], found.get("error", "learned"), f"{time.time() - started:.0f} s", flush=True)


def measured(job, run):
    """One run on the card, by measure.py; its inputs are those that learn.py gives."""
    import tempfile

    import torch

    import learn
    import measure

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job["config"], file)
        file.flush()
        _, inputs_at, _, _ = learn.transformers_subject({"config": file.name, "auto_class": job["auto_class"]})

    def batch(model, config, run, device="cuda"):
        made = {}
        for name, (shape, dtype, _) in inputs_at({"batch": run["batch"], "seq": run["seq"]}, run["task"] == "train").items():
            if dtype.is_floating_point:
                made[name] = torch.zeros(shape).to(device).to(measure.DT[run["weights"]])
            else:
                made[name] = torch.ones(shape, dtype=dtype).to(device)
        return made

    build = measure.build_model

    def without_cache(model, run, device="cuda"):
        built, config = build(model, run, device)
        text = built.config.get_text_config()
        if "pad_token_id" in text.to_dict() and text.pad_token_id is None:
            text.pad_token_id = built.config.pad_token_id = 0
        for part in (config, built.config):
            learn.without_cache(part)
        # torch.normal does not ask which device is meant.
        return built.to(device), config

    measure.make_batch, measure.build_model = batch, without_cache
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    recorder, result = measure.Recorder(), {}
    model = {"config": job["config"], "auto_class": job["auto_class"], "kind": "other"}
    if run["task"] == "train":
        measure.run_train(model, {**run, "attn": None}, recorder, result)
    else:
        built, config = measure.build_model(model, {**run, "attn": None})
        built.eval()
        inputs = batch(model, config, run)
        with recorder.phase("generate"), torch.no_grad():
            for _ in range(2):
                built(**inputs)
    result |= {"phases": recorder.phases, "peak_allocated": recorder.peak(), "peak_reserved": recorder.peak("peak_reserved")}
    return result


def measure_all(jobs, folder, rows):
    import torch
    import transformers
    import transformers.modeling_utils  # noqa: F401

    known = {row["id"] for row in lines(rows)}
    out = open(rows, "a")
    for job in lines(jobs):
        if not os.path.exists(paths(folder, job)[0]):
            continue
        for number, run in enumerate(job["runs"]):
            name = f"{job['id']}-{number}"
            if name in known or time.time() > END:
                continue
            result = child(lambda: measured(job, run), 100)
            row = {"id": name, "model": job["id"], "kind": "causal", "auto_class": job["auto_class"], "config": job["config"], "run": run,
                   "gpu": "replay: NVIDIA H200", "oom": False, "measured": result,
                   "software": {"torch": torch.__version__, "transformers": transformers.__version__}}
            out.write(json.dumps(row, separators=(",", ":")) + "\n")
            out.flush()
            print(name, result.get("error") or f"{result['peak_allocated'] / 2**20:.1f} MiB", flush=True)


def programs(folder):
    """Programs by type and class."""
    if not folder.endswith(".zz"):
        names = [name[:-5] for name in os.listdir(folder) if name.endswith(".json")]
        return {name: json.load(open(f"{folder}/{name}.json")) for name in names}
    return {row["id"]: row["program"] for row in map(json.loads, zlib.decompress(open(folder, "rb").read()).decode().splitlines())}


def key(row):
    return f"{row['model']}-{row['auto_class'].removeprefix('AutoModelFor')}"


def pack(rows, folder, out):
    known = programs(folder)
    names = sorted({key(row) for row in lines(rows)})
    text = "".join(json.dumps({"id": name, "program": known[name]}, separators=(",", ":")) + "\n" for name in names)
    packed = zlib.compress(text.encode(), 9)
    open(out, "wb").write(packed)
    print(f"{len(names)} programs, {len(text)} bytes as text, {len(packed)} packed")


def families(rows, folder, out, *types):
    known, text = programs(folder), ""
    for model_type in types:
        runs = [row for row in lines(rows) if row["model"] == model_type and row["run"]["task"] == "train"]
        text += json.dumps({**runs[0], "program": known[key(runs[0])]}, separators=(",", ":")) + "\n"
    open(out, "wb").write(zlib.compress(text.encode(), 9))


def verified(vramcast, path, rows):
    """Rows as `vramcast verify` scores them, by id."""
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    answer = subprocess.run([vramcast, "verify", path, "--json"], capture_output=True, text=True)
    os.remove(path)
    document = json.loads(answer.stdout)
    return {row["id"]: row for row in (document["sets"][0]["rows"])}


def score(rows, folder, vramcast):
    """Percent off, allocated and reserved, of each row by its program; beside it what a family written by hand says, in bytes."""
    rows = [row for row in lines(rows) if "error" not in row["measured"]]
    known = programs(folder)
    learned = [{**row, "config": known[key(row)], "auto_class": None} for row in rows]
    path = f"{folder}.tmp.jsonl"
    own, by_hand = verified(vramcast, path, learned), verified(vramcast, path, rows)
    scored, left, equal = [], [], {}
    trains = {row["id"]: row["run"]["task"] == "train" for row in rows}
    for name, row in own.items():
        if "skipped" in row:
            left.append((name, row["skipped"]))
            continue
        percent = [100 * (row[level]["predicted"] / row[level]["measured"] - 1) for level in ("allocated", "reserved")]
        # In inference families fill the cache that programs do without.
        other = by_hand[name].get("allocated", {}).get("predicted") if trains[name] else None
        apart = None if other is None else row["allocated"]["predicted"] - other
        if apart is not None:
            equal.setdefault(name.rpartition("-")[0], []).append(apart)
        scored.append((name, *percent, apart))
    for name, allocated, reserved, apart in sorted(scored, key=lambda row: -abs(row[1])):
        print(f"{name:34s} {allocated:+9.4f} % {reserved:+9.4f} %" + ("" if apart is None else f"  by hand {-apart:+d} bytes"))
    for name, why in left:
        print(f"{name:34s} not scored: {why[:160]}")
    for level, place in (("allocated", 1), ("reserved", 2)):
        errors = sorted(abs(row[place]) for row in scored)
        at = lambda share: errors[min(len(errors) - 1, int(share * len(errors)))]
        print(f"{level}: {len(errors)} rows of {len({row[0].rpartition('-')[0] for row in scored})} types, "
              f"median {at(0.5):.4f} %, p95 {at(0.95):.3f} %, worst {errors[-1]:.2f} %")
    same = [name for name, apart in equal.items() if not any(apart)]
    print(f"families written by hand: {len(same)} of {len(equal)} give the same bytes in all runs: {', '.join(sorted(same))}")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    {"draw": draw, "learn": learn_all, "measure": measure_all, "pack": pack, "families": families, "score": score}[command](*rest)
