"""Other libraries' objects as plain values, by what they look like: nothing of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """A config object as what JSON can hold."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    elif hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")


# What transformers calls its optimizers, and what they are here.
TRAINER_OPTIMIZERS = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_8bit": ("adamw8bit", None),
    "adamw_bnb_8bit": ("adamw8bit", None),
    "paged_adamw_8bit": ("paged-adamw8bit", None),
    "paged_adamw_32bit": ("paged-adamw32", None),
    "lion_8bit": ("lion8bit", None),
    "lion_32bit": ("lion", None),
    "adafactor": ("adafactor", None),
    "sgd": ("sgd", None),
    "adagrad": ("adagrad", None),
    "rmsprop": ("rmsprop", None),
}


def from_training_arguments(arguments: Any) -> dict[str, Any]:
    """The options that a TrainingArguments stands for, as transformers.Trainer runs them."""
    if arguments is None:
        return {}

    def get(name: str, default: Any = None) -> Any:
        return getattr(arguments, name, default)

    options: dict[str, Any] = {
        "batch_size": get("per_device_train_batch_size", 8),
        "gradient_accumulation": get("gradient_accumulation_steps", 1),
        "drop_outputs": True,
        "mask": True,
        "clip": bool(get("max_grad_norm", 1.0)),
        "gradient_checkpointing": bool(get("gradient_checkpointing", False)),
        "liger": bool(get("use_liger_kernel", False)),
    }
    if get("bf16"):
        options["precision"] = "bf16-mixed"
    elif get("fp16"):
        options["precision"] = "fp16-mixed"
    name = plain(get("optim", "adamw_torch_fused"))
    if name not in TRAINER_OPTIMIZERS:
        raise ValueError(f"training_arguments.optim: {name} is not an optimizer vramcast knows")
    kind, steps = TRAINER_OPTIMIZERS[name]
    options["optimizer"] = kind
    if steps:
        options["optimizer_implementation"] = steps
    return options
