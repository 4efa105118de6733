"""Learns the forward passes that come with vramcast: of types whose parameters are a learned table, by their class defaults.

    python tools/learn/shipped.py FOLDER [TYPE:CLASS…]   learns, one file for each type and class; what is refused, with the reason
                                                         (timm/NAME for one of timm)
    python tools/learn/shipped.py FOLDER --pack          puts them into crates/core/data/passes.jsonl.zz

A type is learned with four layers and written with as many as its class has: layers that do the same are one step of a
program. What comes out is compared with a pass of the whole model, recorded at one size; where they differ, the whole is learned.
"""

import json
import os
import re
import sys
import time
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../../crates/app/src/learn"), HERE]
DATA = os.path.join(HERE, "../../crates/core/data")

import runs
import tables
from runs import END, child

try:
    from zopfli.zlib import compress
except ImportError:
    compress = lambda data: zlib.compress(data, 9)

SECONDS = float(os.environ.get("LEARN_EACH", 60))
# Keys that change nothing a forward pass allocates.
NEVER = re.compile(
    r"^(transformers_version|architectures|_name_or_path|torch_dtype|dtype|id2label|label2id|problem_type|output_.*|return_dict|use_cache"
    r"|.*_token_id|.*_token_index|tokenizer_class|initializer_.*|.*_eps|rope_theta|chunk_size_feed_forward|_attn_implementation.*"
    r"|pruned_heads|is_encoder_decoder|finetuning_task|task_specific_params|max_position_embeddings_unused)$"
)


def harmful(tree):
    """What of a config decides a pass; what JSON cannot say is left out."""
    finite = lambda value: "Infinity" not in json.dumps(value, default=str) and "NaN" not in json.dumps(value, default=str)
    return {key: harmful(value) if isinstance(value, dict) else value for key, value in tree.items() if not NEVER.match(key) and finite(value)}


def shift(name, path, last, extra):
    """A name in the list `path`, whose layers from `last` on stand `extra` places later."""
    if not isinstance(name, str) or not name.startswith(path + "."):
        return name
    index, dot, rest = name[len(path) + 1 :].partition(".")
    if not index.isdigit() or int(index) < last:
        return name
    return f"{path}.{int(index) + extra}{dot}{rest}"


def made(steps):
    return sum(len(step[3]) for step in steps if step[0] not in ("in", "out", "free"))


def deeper(steps, path, extra):
    """The steps of a pass with more of the layers that `path` repeats; nothing, where they are no one repeat."""
    found = [step for step in steps if step[0] == "repeat" and step[3] == path]
    if len(found) != 1:
        return None
    result, count, moved = [], 0, None
    for step in steps:
        if step is found[0]:
            _, times, first, _, block = step
            each = made(block)
            begin, near, last = count, count + (times - 1) * each, first + times
            count += times * each
            moved = lambda v: v + extra * each if v >= near else v
            result.append(["repeat", times + extra, first, path, block])
            continue
        if moved is None:
            count += step[1] * made(step[4]) if step[0] == "repeat" else made([step])
            result.append(step)
            continue
        values = [step[1]] if step[0] == "free" else step[2] if step[0] not in ("in", "out", "repeat") else []
        if any(begin <= v < near for v in values):
            return None
        result.append(later(step, moved, path, last, extra))
    return result


def later(step, moved, path, last, extra):
    """A step that stands behind the layers."""
    name = lambda text: shift(text, path, last, extra)
    if step[0] == "free":
        return ["free", moved(step[1])]
    if step[0] in ("in", "out"):
        return [step[0], name(step[1])]
    if step[0] == "repeat":
        own = lambda v: str(moved(int(v))) if isinstance(v, str) else v
        block = []
        for inner in step[4]:
            if inner[0] == "free":
                block.append(["free", own(inner[1])])
            elif inner[0] in ("in", "out"):
                block.append(inner)
            else:
                block.append([*inner[:2], [own(v) for v in inner[2]], *inner[3:]])
        return [*step[:4], block]
    kind, module, inputs, outs, *rest = step
    return [kind, name(module), [moved(v) for v in inputs], outs, *map(name, rest)]


def deepened(program, path, extra):
    """A program with more layers in a list, or nothing."""
    result = dict(program)
    for what in ("forward", "training"):
        steps = deeper(program[what]["steps"], path, extra)
        if steps is None:
            return None
        result[what] = {**program[what], "steps": steps}
    first, last = next((s[2], s[2] + s[1]) for s in program["forward"]["steps"] if s[0] == "repeat" and s[3] == path)
    for what in ("modules", "parameters", "buffers"):
        entries, copies = [], [e for e in program[what] if (e[0] + ".").startswith(f"{path}.{last - 1}.")]
        for entry in program[what]:
            if entry[0] == f"{path}.{last}" or (entry[0].startswith(f"{path}.{last}.") and copies):
                for k in range(extra):
                    entries += [[shift(e[0], path, last - 1, k + 1), *e[1:]] for e in copies]
                copies = []
            entries.append([shift(entry[0], path, last, extra), *entry[1:]])
        result[what] = entries
    result["tied"] = [[shift(name, path, last, extra) for name in pair] for pair in program["tied"]]
    return result


def plain(steps, shape):
    """Steps without repeats, their sizes as numbers."""
    result, count = [], 0
    for step in steps:
        turns = [(step[2] + k, step[4]) for k in range(step[1])] if step[0] == "repeat" else [(None, [step])]
        for index, block in turns:
            start = count if index is not None else 0
            value = lambda v: int(v) if isinstance(v, str) else start + v
            name = lambda text: text.replace("{}", str(index), 1) if isinstance(text, str) and index is not None else text
            for inner in block:
                if inner[0] == "free":
                    result.append(["free", value(inner[1])])
                elif inner[0] in ("in", "out"):
                    result.append([inner[0], name(inner[1])])
                else:
                    kind, module, inputs, outs, *rest = inner
                    result.append([kind, name(module), [value(v) for v in inputs], [shape(o) for o in outs], *map(name, rest)])
                    count += len(outs)
    return result


def whole(job, point):
    """What a pass of the model does at one size: steps by mode, and parameters."""
    import learn
    from passes import run
    from recorder import DTYPE

    model, inputs_at, _, _ = learn.subject(job)
    model = model.to(DTYPE)
    found = {}
    for what, training in (("forward", False), ("training", True)):
        recorder = run(model, inputs_at(point, training), training, job.get("loss"))
        sizes = lambda out: [recorder.numbers[number] for _, number in out[0]]
        found[what] = plain(recorder.steps, sizes)
    lists = {}
    for name, _ in model.named_modules():
        path, _, index = name.rpartition(".")
        if index.isdigit():
            lists[path] = max(lists.get(path, 0), int(index) + 1)
    seen, parameters = set(), []
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                parameters.append([f"{path}.{name}" if path else name, list(tensor.shape)])
    return {**found, "lists": lists, "parameters": parameters}


def same(program, found, point):
    """Whether a program does at a point what was recorded there."""
    value = lambda text: int(eval(text.replace("/", "//").replace("^", "**"), {"__builtins__": {}}, dict(point)))
    for what in ("forward", "training"):
        shapes = [[value(part) for part in text.split(",") if part] for text in program[what]["shapes"]]
        # As JSON brings it back.
        if json.loads(json.dumps(plain(program[what]["steps"], lambda place: shapes[place]))) != json.loads(json.dumps(found[what])):
            return False
    return [row[:2] for row in program["parameters"]] == found["parameters"]


def shipped(model_type, auto_class):
    import tempfile

    import learn
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    usual = CONFIG_MAPPING[model_type]().to_dict()
    point = {"batch": 2, "seq": 24, "height": 64, "width": 64, "frames": 4}

    def job(config):
        file = tempfile.NamedTemporaryFile("w", suffix=".json", delete=False)
        with file:
            json.dump(config, file)
        return {"config": file.name, "auto_class": auto_class, "loss": "cross-entropy", "inputs": []}

    few = runs.shallow(usual, 4)
    full = job({"model_type": model_type})
    found = child(lambda: whole(full, point), SECONDS)
    if "error" in found:
        return found
    program = None
    if few:
        program = child(lambda: learn.learn(job({"model_type": model_type, **few})), SECONDS)
        program = None if "error" in program else program
        while program:
            repeats = {step[3] for step in program["forward"]["steps"] if step[0] == "repeat"}
            present = lambda path: len({m[0].split(".")[path.count(".") + 1] for m in program["modules"] if m[0].startswith(path + ".")})
            short = next((p for p in sorted(repeats) if present(p) != found["lists"].get(p, 0)), None)
            if short is None:
                break
            program = deepened(program, short, found["lists"].get(short, 0) - present(short))
        if program and not same(program, found, point):
            program = None
    if program is None:
        program = child(lambda: learn.learn(full), SECONDS)
        if "error" in program:
            return program
        if not same(program, found, point):
            return {"error": "its program is not what it runs"}
    return {"type": model_type, "class": auto_class, "defaults": harmful(usual), "program": program}


# A number of classes that nothing else in a model of timm has as its size.
CLASSES = 1009


def of_timm(name):
    """The pass of a model of timm, in which CLASSES stands for the number of classes."""
    import learn

    program = child(lambda: learn.learn({"timm": name, "classes": CLASSES, "loss": "cross-entropy"}), SECONDS)
    if "error" in program:
        return program
    return {"type": f"timm/{name}", "class": "AutoModelForImageClassification", "defaults": {}, "classes": CLASSES, "program": program}


def known():
    for row in tables.unpacked(zlib.decompress(open(f"{DATA}/learned.jsonl.zz", "rb").read()).decode()):
        for auto_class in row["classes"]:
            yield row["type"], auto_class


def main():
    folder, *names = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    if names == ["--pack"]:
        learned = [json.load(open(f"{folder}/{name}")) for name in sorted(os.listdir(folder)) if name.endswith(".json")]
        # What was packed before stays, where it was not learned anew.
        packed = map(json.loads, zlib.decompress(open(f"{DATA}/passes.jsonl.zz", "rb").read()).decode().splitlines())
        found = {(row["type"], row["class"]): row for row in [*packed, *learned]}
        learned = [found[name] for name in sorted(found)]
        rows = [json.dumps({**row, "defaults": harmful(row["defaults"])}, separators=(",", ":"), allow_nan=False) for row in learned]
        packed = compress(("\n".join(rows) + "\n").encode())
        open(f"{DATA}/passes.jsonl.zz", "wb").write(packed)
        print(f"{len(rows)} passes, {sum(map(len, rows))} bytes as text, {len(packed)} packed")
        return
    import transformers.modeling_utils  # noqa: F401 (once for all)

    for model_type, auto_class in [name.split(":") if ":" in name else (name, "") for name in names] or known():
        base = f"{folder}/{model_type.replace('/', '-')}-{auto_class.removeprefix('AutoModelFor')}"
        if os.path.exists(base + ".json") or os.path.exists(base + ".refused") or time.time() > END:
            continue
        started = time.time()
        try:
            found = of_timm(model_type.removeprefix("timm/")) if model_type.startswith("timm/") else shipped(model_type, auto_class)
        except Exception as error:
            found = {"error": repr(error)[:300]}
        with open(base + (".refused" if "error" in found else ".json"), "w") as file:
            file.write(found["error"] if "error" in found else json.dumps(found, separators=(",", ":")))
        print(model_type, auto_class, found.get("error", "learned"), f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
