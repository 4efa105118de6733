"""How much GPU memory will this job need, and what do I change if it does not fit?

    >>> import vramcast
    >>> report = vramcast.train("meta-llama/Meta-Llama-3-8B", batch_size=4, gradient_checkpointing=True)
    >>> report.process > report.reserved > report.allocated
    True
    >>> report.fits
    True

Options are the flags of the command line, with underscores: `vramcast train --help` lists them.
"""

from vramcast.calculator import (
    EngineConfig,
    GPUConfig,
    GPUMemoryCalculator,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from vramcast.doctor import explain
from vramcast.errors import FetchError, InputError, VramcastError
from vramcast.estimate import infer, inspect, plan, train
from vramcast.estimator import Estimator
from vramcast.guard import MemoryGuard, WillNotFit, guard
from vramcast.rehearsal import phase
from vramcast.report import Answer, Formula, Placement, Report

__all__ = [
    "Answer",
    "EngineConfig",
    "Estimator",
    "FetchError",
    "Formula",
    "GPUConfig",
    "GPUMemoryCalculator",
    "InputError",
    "MemoryGuard",
    "ModelConfig",
    "ParallelismConfig",
    "Placement",
    "Report",
    "TrainingConfig",
    "VramcastError",
    "WillNotFit",
    "explain",
    "guard",
    "infer",
    "inspect",
    "phase",
    "plan",
    "train",
]
