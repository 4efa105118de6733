"""Records the forward pass of a model as torch runs it, on tensors without data, and writes it down as a program.

    python learn.py JOB.json OUT.json

A job names the model (`module`: FILE.py:NAME; `config`: a config.json of transformers; `timm`; `diffusers`), its inputs and its
loss. The pass runs on torch's meta device at several sizes; every size in it becomes an expression of the batch and the
other dimensions, found from some of the points and checked at the others. What comes again layer by layer is written once.

What cannot be learned is said with the line of code that it is: values that decide what runs, operations without a rule.
"""

import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import traceback
import warnings
from math import gcd

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
warnings.filterwarnings("ignore")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch

from passes import fold, kind_of, layers_of, run, written
from recorder import DTYPE, HERE, NAMES, Refused


def main():
    job = json.load(open(sys.argv[1]))
    try:
        document = learn(job)
    except Refused as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__)]
        own = [f for f in frames if "/torch/" not in f.filename and os.path.dirname(f.filename) != HERE]
        where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        print(json.dumps({"refused": f"{where}{type(error).__name__}: {str(error)[:300]}"}), flush=True)
        return
    with open(sys.argv[2], "w") as file:
        json.dump(document, file, separators=(",", ":"))
    print(json.dumps({"learned": {"parameters": len(document["parameters"]), "steps": len(document["forward"]["steps"])}}), flush=True)


ODD = {"seq": (37, 59, 39), "height": (77, 91, 71), "width": (77, 91, 71), "frames": (5, 7, 9)}


def learn(job):
    model, inputs_at, names, title = subject(job)
    model = model.to(DTYPE)
    layers = layers_of(model)
    base = {"batch": 2, "seq": 24, "height": 64, "width": 64, "frames": 4, **job.get("at", {})}
    steps = {"batch": (3, 5, 7), "seq": (40, 56, 72), "height": (96, 128, 160), "width": (96, 128, 160), "frames": (6, 8, 10)}
    for name, values in job.get("values", {}).items():
        base[name], steps[name] = values[0], tuple(values[1:])
    points = [base]
    for name in names:
        points += [{**base, name: other} for other in steps[name][:2]]
    points.append({name: steps[name][1] if name in names else base[name] for name in base})
    points.append({name: steps[name][2] if name in names else base[name] for name in base})
    if not names:
        points = points[:1]
    record = lambda point, training: run(model, inputs_at(point, training), training, job.get("loss"))
    recorders = {training: [record(point, training) for point in points] for training in (False, True)}
    # Sizes that nothing divides: where the pass does the same there, any size will do, else those like the others.
    multiples = {}
    for name in names:
        for odd in ODD.get(name, ()):
            point = {**base, name: odd}
            try:
                more = {training: record(point, training) for training in (False, True)}
                if any(more[training].steps != recorders[training][0].steps for training in more):
                    raise Refused("other steps")
            except Exception:
                multiples[name] = gcd(*(point[name] for point in points))
                break
            points.append(point)
            for training in more:
                recorders[training].append(more[training])
    passes = {}
    for what, training in (("forward", False), ("training", True)):
        shapes, steps_of = written(recorders[training], points, names)
        passes[what] = {"shapes": shapes, "steps": fold(steps_of, layers)}
    parameters, tied, seen = [], [], {}
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if id(tensor) in seen:
                tied.append([full, seen[id(tensor)]])
                continue
            seen[id(tensor)] = full
            parameters.append([full, list(tensor.shape), "frozen" if not tensor.requires_grad else ""])
    buffers = [[name, list(b.shape), NAMES.get(b.dtype, "f32")] for name, b in model.named_buffers()]
    modules = [[path, *kind_of(path, module, layers)] for path, module in model.named_modules()]
    versions = {}
    for package in ("torch", "transformers", "diffusers", "timm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"model_type": "learned_program", "name": title, "learned_from": versions, "dimensions": names, "multiples": multiples,
            "points": [{name: point[name] for name in names} for point in points], "modules": modules,
            "parameters": parameters, "tied": tied, "buffers": buffers, **passes}


# ---- what is learned -------------------------------------------------------------------------------------------------


def sizes(text, point):
    """`batch,3,height,width` at a point."""
    result = []
    for part in text.split(","):
        result.append(int(part) if part.strip().isdigit() else int(eval(part, {"__builtins__": {}}, dict(point))))
    return result


def subject(job):
    if "module" in job:
        path, _, name = job["module"].partition(":")
        spec = importlib.util.spec_from_file_location("learned", path)
        code = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        spec.loader.exec_module(code)
        with torch.device("meta"):
            model = getattr(code, name)()
        title = f"{os.path.basename(path)}:{name}"
        given = job["inputs"]
    elif "timm" in job:
        import timm

        with torch.device("meta"):
            model = timm.create_model(job["timm"], pretrained=False, num_classes=job.get("classes"))
        title = f"timm/{job['timm']}"
        given = job.get("inputs") or [["x", "float", f"batch,{','.join(map(str, model.default_cfg['input_size']))}"]]
    elif "diffusers" in job:
        import diffusers

        config = json.load(open(job["config"]))
        with torch.device("meta"):
            model = getattr(diffusers, job["diffusers"]).from_config(config)
        title, given = f"diffusers/{job['diffusers']}", job["inputs"]
    else:
        return transformers_subject(job)
    types = {"float": DTYPE, "int64": torch.int64, "bool": torch.bool, "int32": torch.int32, "float32": torch.float32}
    used = [n for n in ("batch", "seq", "height", "width", "frames") if any(n in shape for _, _, shape in given)]

    def inputs_at(point, training):
        kinds = lambda dtype, name: "tokens" if dtype == "int64" else "pixels" if dtype == "float" else "other"
        return {name: (sizes(shape, point), types[dtype], kinds(dtype, name)) for name, dtype, shape in given}

    return model, inputs_at, used, title


def without_cache(config):
    """A program knows no cache, so none is made."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if hasattr(part, "use_cache"):
            part.use_cache = False


def transformers_subject(job):
    import transformers

    config = json.load(open(job["config"]))
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    auto = job.get("auto_class") or "AutoModelForCausalLM"
    without_cache(config)
    if auto == "AutoModelForSequenceClassification" and getattr(config.get_text_config(), "pad_token_id", 0) is None:
        # Without one it takes single samples alone.
        config.get_text_config().pad_token_id = config.pad_token_id = 0
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    # It only warns, by what stands in the batch.
    transformers.PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
    signature = inspect.signature(model.forward).parameters
    text = "input_ids" in signature

    def inputs_at(point, training):
        result = {}
        batch, seq = point["batch"], point["seq"]
        if "pixel_values" in signature and not text:
            size = getattr(config, "image_size", 224) or 224
            height, width = (size, size) if isinstance(size, int) else size
            result["pixel_values"] = ((batch, getattr(config, "num_channels", 3), height, width), DTYPE, "pixels")
        if text:
            # Four answers to a question, as in SWAG.
            each = (batch, 4, seq) if auto == "AutoModelForMultipleChoice" else (batch, seq)
            result["input_ids"] = (each, torch.int64, "tokens")
            # With labels the model makes them itself.
            if config.is_encoder_decoder and not (training and "labels" in signature):
                result["decoder_input_ids"] = ((batch, seq), torch.int64, "decoder_tokens")
        if training and "labels" in signature:
            one = auto in ("AutoModelForImageClassification", "AutoModelForSequenceClassification", "AutoModelForAudioClassification",
                           "AutoModelForMultipleChoice")
            result["labels"] = ((batch,) if one else (batch, seq), torch.int64, "labels")
        if training and "start_positions" in signature and "labels" not in signature:
            result |= {name: ((batch,), torch.int64, "labels") for name in ("start_positions", "end_positions")}
        return result

    names = ["batch", "seq"] if text else ["batch"]
    return model, inputs_at, names, f"{config.model_type} ({type(model).__name__})"


if __name__ == "__main__":
    main()
