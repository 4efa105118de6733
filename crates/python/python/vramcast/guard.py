"""A prediction before a run begins: a callback for transformers.Trainer, and a context manager for any loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vramcast.doctor import annotate
from vramcast.estimate import train
from vramcast.report import Report


class WillNotFit(UserWarning):
    """The run is predicted not to fit."""


def check(report: Report, action: str) -> Report:
    """Warns, or raises MemoryError with `action="raise"`, when a report says that a run will not fit."""
    if action not in ("warn", "raise"):
        raise ValueError(f"action: {action!r} is neither 'warn' nor 'raise'")
    if not report.fits:
        card = report.verdicts[0]
        over = -card["headroom"] / (1 << 30)
        words = f"vramcast predicts {report.process_gib:.2f} GiB, {over:.2f} GiB more than {card['gpu']} holds"
        changes = [change["change"] for change in report.suggestions[:3]]
        if changes:
            words += "; it would fit with " + ", or with ".join(changes)
        if action == "raise":
            raise MemoryError(words)
        warnings.warn(words, WillNotFit, stacklevel=3)
    return report


@contextmanager
def guard(model: Any, *, action: str = "warn", **options: Any) -> Iterator[Report]:
    """Predicts a run before the block begins: `with vramcast.guard(model, batch_size=8): …`. Where memory runs out in it,
    the error says what happened."""
    report = check(train(model, **options), action)
    try:
        yield report
    except Exception as error:
        annotate(error)
        raise


class MemoryGuard:
    """A TrainerCallback that predicts before the first step; pass it as `callbacks=[MemoryGuard(seq_len=2048)]`.

    Trainer calls callbacks by name, so no class of transformers is needed.
    """

    def __init__(self, *, action: str = "warn", **options: Any) -> None:
        self.action, self.options = action, options
        self.report: Report | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # On the host there is nothing to guard.
        if getattr(args, "use_cpu", False):
            return
        model = kwargs.get("model")
        self.report = check(train(model, training_arguments=args, **self.options), self.action)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)
