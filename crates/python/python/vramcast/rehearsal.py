"""Phases that a program names for `vramcast rehearse`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what the block does, for the report of a rehearsal: `with vramcast.phase("warm-up"): …`. Elsewhere it does nothing."""
    hook = sys.modules.get("vramcast_hook")
    if hook is None:
        yield
        return
    with hook.phase(name):
        yield
