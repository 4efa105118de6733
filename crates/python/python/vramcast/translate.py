"""Other libraries' objects as plain values, by what they look like: nothing of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
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


def training_plan(arguments: Any) -> dict[str, Any]:
    """A TrainingArguments as the plan file that it could have been read from: what decides memory, and what differs
    from its class's defaults."""
    told = {**vars(arguments)} if hasattr(arguments, "__dict__") else plain(arguments)
    fields = getattr(arguments, "__dataclass_fields__", {})

    def is_default(name: str, value: Any) -> bool:
        field = fields.get(name)
        if field is None:
            return bool(fields)  # what a dataclass holds beside its fields are its own notes
        default = field.default if field.default_factory is MISSING else field.default_factory()
        return bool(value == default)

    # How batches are handed out changes nothing of a step, and is never what its default says.
    told.pop("accelerator_config", None)
    says = DECIDING | TELLING
    kept = {name: value for name, value in told.items() if name in says or not is_default(name, value)}
    return {name: plain(value) for name, value in kept.items() if not name.startswith("_")}


DECIDING = frozenset({
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "optim",
    "max_grad_norm",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "use_liger_kernel",
    "max_length",
    "max_seq_length",
    "packing",
})
"""Settings whose defaults matter too: they differ between versions and trainers."""


TELLING = frozenset({
    "beta",
    "center_rewards_coefficient",
    "cpo_alpha",
    "desirable_weight",
    "kl_coef",
    "lmbda",
    "max_completion_length",
    "max_prompt_length",
    "missing_eos_penalty",
    "num_generations",
    "num_ppo_epochs",
    "precompute_ref_log_probs",
    "reward_model_path",
    "rloo_k",
    "step_separator",
})
"""Settings that only trainers beside supervised fine-tuning have: they tell whose config it is by being there."""


def adapted(model: Any) -> tuple[Any, Any]:
    """A model of peft as the model below and its adapter's config; any other model as it is."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not hasattr(model, "get_base_model"):
        return model, None
    active = getattr(model, "active_adapter", None)
    return model.get_base_model(), adapters.get(active) or next(iter(adapters.values()), None)


def name_of(model: Any, config: Any) -> str:
    """What to call a model: the last part of where it came from, else its class or its type."""

    def get(key: str) -> Any:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    path = str(get("_name_or_path") or get("name_or_path") or "")
    name = path.replace("\\", "/").rstrip("/").rpartition("/")[2]
    kind = f"{get('model_type')} config" if get("model_type") else "config"
    return name.strip(". ") or (kind if config is model else type(model).__name__)


def dtype_of(model: Any) -> str | None:
    """The type of a model's weights: fp32, bf16 or fp16."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return names.get(str(getattr(model, "dtype", "")).removeprefix("torch."))


def auto_class_of(name: str) -> str:
    """The auto class that makes models of a class of transformers, by the end of its name."""
    endings = {
        "ForCausalLM": "AutoModelForCausalLM",
        "LMHeadModel": "AutoModelForCausalLM",
        "ForMaskedLM": "AutoModelForMaskedLM",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForImageClassification": "AutoModelForImageClassification",
        "ForSpeechSeq2Seq": "AutoModelForSpeechSeq2Seq",
        "ForImageTextToText": "AutoModelForImageTextToText",
    }
    for ending, auto_class in endings.items():
        if name.endswith(ending):
            return auto_class
    return ""
