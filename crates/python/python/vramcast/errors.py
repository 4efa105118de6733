"""What goes wrong: the same words as the command line's."""

from __future__ import annotations


class VramcastError(Exception):
    """A question that could not be answered."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n\nhint: {hint}")
        self.message = message
        self.hint = hint


class InputError(VramcastError, ValueError):
    """The input is at fault."""


class FetchError(VramcastError, OSError):
    """The model could not be fetched."""
