"""Seed 004's estimator: Korthikanti's activations and ZeRO's model states, as its document prints them.

For a prediction, use `vramcast.train`: this formula is kept because people know its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramcast import _core


@dataclass(frozen=True)
class Estimator:
    """A decoder by its sizes; the default is a 7B model."""

    model_params: float = 7e9
    a: int = 32
    h: int = 4096
    L: int = 32
    v: int = 32000

    def estimate_gpu_memory_inference(self, precision: int = 2) -> float:
        """GiB of the weights, `precision` bytes each."""
        return self.model_params * precision / (1 << 30)

    def estimate_gpu_memory_training(
        self, stage: int = 0, gpu_num: int = 1, s: int = 512, b: int = 1
    ) -> tuple[float, float, float, float]:
        """GiB per GPU: in all, model states, activations, buffers."""
        sizes = (int(self.model_params), self.L, self.h, self.a, self.v)
        return _core.korthikanti(sizes, stage, gpu_num, s, b)
