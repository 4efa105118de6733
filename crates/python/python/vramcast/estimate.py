"""Questions: `train`, `infer`, `inspect`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramcast import _core
from vramcast.errors import FetchError, InputError
from vramcast.report import Report
from vramcast.translate import from_training_arguments, plain

COULD_NOT_FETCH = 3


def train(model: Any = None, **options: Any) -> Report:
    """Predict a training run.

    `model` is an id, a path, a config (dict, or a transformers config object) or a model object, also on the meta
    device. Options are the flags of `vramcast train`. Besides: `training_arguments` takes a TrainingArguments,
    `peft_config` a LoraConfig, `deepspeed` DeepSpeed's settings as a dict.
    """
    return Report(ask("train", model, options))


def infer(model: Any = None, **options: Any) -> Report:
    """Predict generation; options are the flags of `vramcast infer`."""
    return Report(ask("infer", model, options))


def inspect(model: Any, **options: Any) -> dict[str, Any]:
    """What a model consists of: parameters, tensors, cache."""
    return ask("inspect", model, options)


def ask(name: str, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a command and returns its document."""
    options = dict(options)
    given = from_training_arguments(options.pop("training_arguments", None))
    options = {**given, **options}
    objects = {flag: options.pop(option, None) for option, flag in (("peft_config", "adapter"), ("deepspeed", "deepspeed"))}
    # A folder costs more than an answer; a question in plain words needs none.
    plain_words = model is None or isinstance(model, (str, Path))
    if plain_words and all(value is None for value in objects.values()):
        return command([name, *([] if model is None else [str(model)]), *option_words(options)])
    with tempfile.TemporaryDirectory(prefix="vramcast-") as folder:
        files = Path(folder)
        words = [name]
        if model is not None:
            words += model_words(model, files)
        for flag, value in objects.items():
            if value is not None:
                path = files / f"{flag}.json"
                path.write_text(json.dumps(plain(value)), encoding="utf-8")
                words += [f"--{flag}", str(path)]
        return command([*words, *option_words(options)])


def option_words(options: Mapping[str, Any]) -> list[str]:
    """All options as the command line takes them."""
    return [word for option, value in options.items() for word in flag_words(option, value)]


def command(words: Sequence[str]) -> dict[str, Any]:
    """Runs a command line with `--json`; its errors are raised."""
    text, code, error, hint = _core.command(["vramcast", *words, "--json"])
    if error is not None:
        raise (FetchError if code == COULD_NOT_FETCH else InputError)(error, hint)
    document: dict[str, Any] = json.loads(text)
    return document


def model_words(model: Any, files: Path) -> list[str]:
    """A model as the command line takes it; configs are handed over as a file."""
    if isinstance(model, (str, Path)):
        return [str(model)]
    words: list[str] = []
    config = getattr(model, "config", model)
    if config is not model:
        words = ["--auto-class", auto_class_of(type(model).__name__)]
    path = files / "config.json"
    path.write_text(json.dumps(plain(config), default=str), encoding="utf-8")
    return [str(path), *words]


def auto_class_of(name: str) -> str:
    """The auto class that makes models of a class of transformers, by the end of its name."""
    endings = {
        "ForCausalLM": "AutoModelForCausalLM",
        "LMHeadModel": "AutoModelForCausalLM",
        "ForMaskedLM": "AutoModelForMaskedLM",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForImageClassification": "AutoModelForImageClassification",
        "ForSpeechSeq2Seq": "AutoModelForSpeechSeq2Seq",
    }
    for ending, auto_class in endings.items():
        if name.endswith(ending):
            return auto_class
    return "AutoModelForCausalLM"


def flag_words(name: str, value: Any) -> list[str]:
    """`batch_size=4` is `--batch-size 4`; `True` a flag alone; a list a flag for each, or one with commas."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple, set)):
        return [flag, ",".join(map(str, value))] if name in COMMA_LISTS else repeated(flag, value)
    return [flag, str(value)]


COMMA_LISTS = frozenset({"lora_target_modules", "modules_to_save"})


def repeated(flag: str, values: Iterable[Any]) -> list[str]:
    return [word for value in values for word in (flag, str(value))]
