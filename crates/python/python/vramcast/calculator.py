"""Seed 002's calculator: a job in five parts, answered by simulation (or, with `method`, by a published formula)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vramcast.estimate import told


@dataclass
class ModelConfig:
    """A decoder by its sizes; `num_parameters` may be a number or a text such as "7B"."""

    num_parameters: int | str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    name: str = "model"
    vocab_size: int = 32000
    max_seq_len: int = 2048


@dataclass
class TrainingConfig:
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    activation_checkpointing: int = 0


@dataclass
class ParallelismConfig:
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel: bool = False


@dataclass
class EngineConfig:
    type: str = "pytorch_ddp"
    zero_stage: int | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"


@dataclass
class GPUConfig:
    num_gpus: int = 1
    gpu_memory_gb: float = 80


@dataclass(frozen=True)
class MemoryResult:
    """What every GPU holds."""

    total_memory_per_gpu_gb: float
    fits_on_gpu: bool
    memory_utilization_percent: float
    breakdown: dict[str, int]
    method: str
    notes: list[str]
    document: dict[str, Any] = field(repr=False)


@dataclass
class GPUMemoryCalculator:
    """The five parts of a job file, and its answer."""

    model_config: ModelConfig
    training_config: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism_config: ParallelismConfig = field(default_factory=ParallelismConfig)
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    gpu_config: GPUConfig = field(default_factory=GPUConfig)

    def to_dict(self) -> dict[str, Any]:
        """The job file."""
        engine = {key: value for key, value in asdict(self.engine_config).items() if value is not None}
        return {
            "model": asdict(self.model_config),
            "training": asdict(self.training_config),
            "parallelism": asdict(self.parallelism_config),
            "engine": engine,
            "hardware": asdict(self.gpu_config),
        }

    def calculate(self, method: str = "simulate") -> MemoryResult:
        """Memory per GPU; raises InputError where a part contradicts another."""
        document = told({"command": "calculate", "job": self.to_dict(), "options": {"method": method}}).to_dict()
        return MemoryResult(
            total_memory_per_gpu_gb=document["total_memory_per_gpu_gb"],
            fits_on_gpu=document["fits_on_gpu"],
            memory_utilization_percent=document["memory_utilization_percent"],
            breakdown={part["name"]: part["bytes"] for part in document["breakdown"]},
            method=document["method"],
            notes=document["notes"],
            document=document,
        )
