"""What broke a run: `vramcast.explain(error)`."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

from vramcast.estimate import told


def explain(error: BaseException | str) -> list[dict[str, Any]]:
    """What an error or a log says about memory, what counts most first: each with `cause`, `because` and `cures`.

    An empty list: nothing in it speaks of memory.
    """
    text = error if isinstance(error, str) else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    found = told({"command": "doctor", "options": {"text": text}}).to_dict()["findings"]
    return list(found)


def annotate(error: BaseException) -> None:
    """Adds to an error what it says about memory, where it says something."""
    found = explain(error)
    if not found:
        return
    first = found[0]
    words = f"vramcast: {first['cause']}: {first['because']}"
    if first["cures"]:
        words += "; try " + ", or ".join(first["cures"])
    if hasattr(error, "add_note"):
        error.add_note(words)
    else:
        warnings.warn(words, stacklevel=3)
