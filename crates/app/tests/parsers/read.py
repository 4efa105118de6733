"""Reads what was written for other tools with the tools' own parsers, and prints what they made of it."""

import dataclasses
import importlib.util
import json
import sys
import types
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from axolotl.utils.schemas.config import AxolotlInputConfig
from transformers import HfArgumentParser, TrainingArguments
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig

folder = Path(sys.argv[1])


def plain(value):
    kept = isinstance(value, (bool, int, float, str, list, dict, type(None)))
    return getattr(value, "value", value) if kept else str(getattr(value, "value", value))


def attributes(*objects):
    return {key: plain(value) for one in objects for key, value in vars(one).items()}


def arguments(path):
    return attributes(*HfArgumentParser(TrainingArguments).parse_json_file(path, allow_extra_keys=True))


def trl(path):
    return attributes(*HfArgumentParser((SFTConfig, ModelConfig)).parse_yaml_file(path))


def axolotl(path):
    return json.loads(AxolotlInputConfig(**yaml.safe_load(Path(path).read_text())).model_dump_json())


def torchtitan(path):
    # Its package imports kernels; its configuration needs none.
    bare = types.ModuleType("torchtitan")
    bare.__path__ = importlib.util.find_spec("torchtitan").submodule_search_locations
    sys.modules["torchtitan"] = bare
    from torchtitan.config import ConfigManager

    config = dataclasses.asdict(ConfigManager().parse_args(["--job.config_file", path]))
    return {f"{part}.{key}": plain(value) for part, keys in config.items() for key, value in keys.items()}


READERS = {
    "torchtitan.toml": torchtitan,
    "arguments.json": arguments,
    "sft.yaml": trl,
    "accelerate.yaml": lambda path: attributes(load_config_from_file(path)),
    "axolotl.yml": axolotl,
}
found = {}
for path in sorted(folder.rglob("*")):
    if path.name in READERS:
        found[str(path.relative_to(folder))] = READERS[path.name](str(path))
print("READ " + json.dumps(found))
