"""The examples of docs/python.md, run as they stand."""

import doctest
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import vramcast

PAGE = Path(__file__).parents[4] / "docs" / "python.md"


class GPT2LMHeadModel:
    dtype = "torch.bfloat16"
    config = SimpleNamespace(to_dict=lambda: {"model_type": "gpt2", "n_layer": 2, "n_embd": 768, "n_head": 12})


class Trainer:
    """As much of transformers' as the page calls."""

    def __init__(self, model=None, arguments=None, callbacks=()):
        self.model, self.arguments, self.callbacks = model, arguments, callbacks

    def train(self):
        for callback in self.callbacks:
            callback.on_train_begin(self.arguments, None, None, model=self.model)


def test_every_block_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    names = {
        "config": GPT2LMHeadModel.config.to_dict(), "model": GPT2LMHeadModel(), "Trainer": Trainer, "trainer": Trainer(),
        "arguments": SimpleNamespace(per_device_train_batch_size=1, optim="adamw_torch", bf16=True),
        "lora": {"peft_type": "LORA", "r": 8, "target_modules": ["c_attn"]},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the page shows fits, and nothing of it is deprecated
        for block in blocks:
            exec(block, names)
        names["trainer"].train()
    assert names["trainer"].callbacks[0].report.fits


def test_the_packages_own_examples():
    assert doctest.testmod(vramcast).failed == 0 and doctest.testmod(vramcast).attempted > 2
