"""Questions: `train`, `plan`, `infer`, `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from vramcast import _core
from vramcast.errors import FetchError, InputError
from vramcast.report import Answer, Formula, Placement, Report
from vramcast.translate import adapted, auto_class_of, dtype_of, name_of, plain, training_plan

COULD_NOT_FETCH = 3


@overload
def train(model: Any = None, *, method: str, **options: Any) -> Report | Formula: ...
@overload
def train(model: Any = None, *, plan: Any, **options: Any) -> Report | Placement: ...
@overload
def train(model: Any = None, **options: Any) -> Report: ...
def train(model: Any = None, **options: Any) -> Answer:
    """Predict a training run.

    `model` is an id, a path, a config (dict, or a transformers config object) or a model object, also on the meta
    device and also under peft. Options are the flags of `vramcast train`, with underscores. Besides:
    `training_arguments` takes a TrainingArguments (or TRL's SFTConfig), `peft_config` a LoraConfig, `deepspeed`
    DeepSpeed's settings as a dict. With `method` a published formula answers instead; a `plan` of verl or OpenRLHF, which
    has several roles, with a `Placement`.
    """
    return Answer.of(ask("train", model, options))


@overload
def infer(model: Any = None, *, engine: str, **options: Any) -> Report | Answer: ...
@overload
def infer(model: Any = None, **options: Any) -> Report: ...
def infer(model: Any = None, **options: Any) -> Answer:
    """Predict generation; options are the flags of `vramcast infer`. With `engine` a serving engine's own account."""
    return Answer.of(ask("infer", model, options))


def plan(model: Any = None, **options: Any) -> dict[str, Any]:
    """Plans that fit, memory against cost: what is given stays, the rest is looked for; options as `vramcast plan` has them."""
    return ask("plan", model, options).to_dict()


def inspect(model: Any, **options: Any) -> dict[str, Any]:
    """What a model consists of: parameters, tensors, cache."""
    return ask("inspect", model, options).to_dict()


def ask(name: str, model: Any, options: Mapping[str, Any]) -> _core.Document:
    """Asks a question and returns its document."""
    return told(question(name, model, options))


def question(name: str, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """A question as a tree of plain values: the model, objects of other libraries, and options."""
    options = {key: simple(value) for key, value in options.items()}
    parts: dict[str, Any] = {"command": name}
    for option, part in (("peft_config", "adapter"), ("deepspeed", "deepspeed"), ("training_arguments", "plan")):
        value = options.pop(option, None)
        if isinstance(value, str):
            options[part] = value
        elif value is not None:
            parts[part] = training_plan(value) if part == "plan" else plain(value)
    model, adapter = adapted(model)
    if adapter is not None:
        parts.setdefault("adapter", plain(adapter))
    if isinstance(model, (str, Path)):
        parts["model"] = str(model)
    elif model is not None:
        config = getattr(model, "config", model)
        parts["config"], parts["title"] = plain(config), name_of(model, config)
        if config is not model:
            parts["auto_class"] = auto_class_of(type(model).__name__) or None
            as_it_is(name, model, options, parts)
    plan = parts.get("plan")
    if plan is not None and plan.get("deepspeed"):
        parts.setdefault("deepspeed", plan.pop("deepspeed"))
        options.setdefault("engine", "deepspeed")
    parts["options"] = options
    return parts


def as_it_is(name: str, model: Any, options: dict[str, Any], parts: dict[str, Any]) -> None:
    """The type and the attention that a model object already has, where nobody asks for others."""
    dtype, plan = dtype_of(model), parts.get("plan")
    attention = getattr(model.config, "_attn_implementation", None)
    if plan is not None:
        plan.setdefault("dtype", dtype)
        plan.setdefault("attn_implementation", attention)
        return
    if name == "train" and dtype is not None and not {"precision", "dtype", "weights"} & options.keys():
        options["precision"] = dtype
    if name == "infer" and dtype is not None:
        options.setdefault("dtype", dtype)
    if name == "train" and attention in ("eager", "sdpa"):
        options.setdefault("attention", attention)


def simple(value: Any) -> Any:
    """An option as a plain value; paths are texts. Objects of other libraries are left for who knows them."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def told(parts: dict[str, Any]) -> _core.Document:
    """The answer to a question; what is wrong with it is raised."""
    document, code, error, hint = _core.ask(parts)
    if error is not None:
        raise (FetchError if code == COULD_NOT_FETCH else InputError)(error, hint)
    assert document is not None
    return document
