"""Questions: `train`, `infer`, `inspect`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from vramcast import _core
from vramcast.errors import FetchError, InputError, VramcastError
from vramcast.report import Answer, Formula, Report
from vramcast.translate import adapted, auto_class_of, dtype_of, name_of, plain, training_plan

COULD_NOT_FETCH = 3


@overload
def train(model: Any = None, *, method: str, **options: Any) -> Report | Formula: ...
@overload
def train(model: Any = None, **options: Any) -> Report: ...
def train(model: Any = None, **options: Any) -> Answer:
    """Predict a training run.

    `model` is an id, a path, a config (dict, or a transformers config object) or a model object, also on the meta
    device and also under peft. Options are the flags of `vramcast train`, with underscores. Besides:
    `training_arguments` takes a TrainingArguments (or TRL's SFTConfig), `peft_config` a LoraConfig, `deepspeed`
    DeepSpeed's settings as a dict. With `method` a published formula answers instead.
    """
    return Answer.of(ask("train", model, options))


@overload
def infer(model: Any = None, *, engine: str, **options: Any) -> Report | Answer: ...
@overload
def infer(model: Any = None, **options: Any) -> Report: ...
def infer(model: Any = None, **options: Any) -> Answer:
    """Predict generation; options are the flags of `vramcast infer`. With `engine` a serving engine's own account."""
    return Answer.of(ask("infer", model, options))


def inspect(model: Any, **options: Any) -> dict[str, Any]:
    """What a model consists of: parameters, tensors, cache."""
    return ask("inspect", model, options).to_dict()


def ask(name: str, model: Any, options: Mapping[str, Any]) -> _core.Document:
    """Runs a command and returns its document."""
    options = dict(options)
    objects: dict[str, Any] = {}
    for option, flag in (("peft_config", "adapter"), ("deepspeed", "deepspeed"), ("training_arguments", "plan")):
        value = options.pop(option, None)
        if isinstance(value, (str, Path)):
            options[flag] = value
        elif value is not None:
            objects[flag] = training_plan(value) if flag == "plan" else plain(value)
    # A folder costs more than an answer; a question in plain words needs none.
    if not objects and (model is None or isinstance(model, (str, Path))):
        return command([name, *([] if model is None else [str(model)]), *option_words(options)])
    with tempfile.TemporaryDirectory(prefix="vramcast-") as folder:
        words = model_words(name, model, options, objects, Path(folder))
        try:
            return command([name, *words, *option_words(options)])
        except VramcastError as error:  # where the files lay for a moment helps nobody
            raise type(error)(error.message.replace(f"{folder}/", ""), error.hint) from None


def model_words(name: str, model: Any, options: dict[str, Any], objects: dict[str, Any], folder: Path) -> list[str]:
    """A model and other objects as the command line takes them: files in a folder."""
    words: list[str] = []
    model, adapter = adapted(model)
    if adapter is not None:
        objects.setdefault("adapter", plain(adapter))
    if isinstance(model, (str, Path)):
        words.append(str(model))
    elif model is not None:
        config = getattr(model, "config", model)
        words.append(write(folder / name_of(model, config) / "config.json", plain(config)))
        if config is not model:
            auto_class = auto_class_of(type(model).__name__)
            words += ["--auto-class", auto_class] if auto_class else []
            as_it_is(name, model, options, objects)
    plan = objects.get("plan")
    if plan is not None and plan.get("deepspeed"):
        objects.setdefault("deepspeed", plan.pop("deepspeed"))
        options.setdefault("engine", "deepspeed")
    for flag, value in objects.items():
        words += [f"--{flag}", write(folder / f"{flag}.json", value)]
    return words


def as_it_is(name: str, model: Any, options: dict[str, Any], objects: dict[str, Any]) -> None:
    """The type and the attention that a model object already has, where nobody asks for others."""
    dtype, plan = dtype_of(model), objects.get("plan")
    attention = getattr(model.config, "_attn_implementation", None)
    if plan is not None:
        plan.setdefault("dtype", dtype)
        plan.setdefault("attn_implementation", attention)
        return
    if name == "train" and dtype is not None and not {"precision", "dtype"} & options.keys():
        options["precision"] = dtype
    if name == "infer" and dtype is not None:
        options.setdefault("dtype", dtype)
    if name == "train" and attention in ("eager", "sdpa"):
        options.setdefault("attention", attention)


def write(path: Path, value: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, default=str), encoding="utf-8")
    return str(path)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """All options as the command line takes them."""
    return [word for option, value in options.items() for word in flag_words(option, value)]


def command(words: Sequence[str]) -> _core.Document:
    """Runs a command line with `--json`; its errors are raised."""
    document, code, error, hint = _core.command(["vramcast", *words, "--json"])
    if error is not None:
        raise (FetchError if code == COULD_NOT_FETCH else InputError)(error, hint)
    assert document is not None
    return document


def flag_words(name: str, value: Any) -> list[str]:
    """`batch_size=4` is `--batch-size 4`; `True` a flag alone; a list a flag for each, or one with commas."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool) and name in SWITCHES:
        return [flag, str(value).lower()]
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple, set)):
        return [flag, ",".join(map(str, value))] if name in COMMA_LISTS else repeated(flag, value)
    return [flag, str(value)]


COMMA_LISTS = frozenset({"lora_target_modules", "modules_to_save"})
SWITCHES = frozenset({"flashattn", "grad_checkpoint", "gradient_checkpointing", "kv_cache"})
"""Options of which `False` says something: not to do what a default or a file asks for."""


def repeated(flag: str, values: Iterable[Any]) -> list[str]:
    return [word for value in values for word in (flag, str(value))]
