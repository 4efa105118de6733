"""The answer to a question, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

GIB = 1 << 30


class Report:
    """What a run takes. Bytes, unless a name says otherwise; `to_dict` is the whole document of `--json`."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = dict(document)

    @property
    def allocated(self) -> int:
        """Most bytes that tensors took at once."""
        return int(self._document["totals"]["allocated"])

    @property
    def reserved(self) -> int:
        """Most bytes that torch's caching allocator held."""
        return int(self._document["totals"]["reserved"])

    @property
    def process(self) -> int:
        """Most bytes of the whole process: what nvidia-smi shows."""
        return int(self._document["totals"]["process"])

    @property
    def allocated_gib(self) -> float:
        return self.allocated / GIB

    @property
    def reserved_gib(self) -> float:
        return self.reserved / GIB

    @property
    def process_gib(self) -> float:
        return self.process / GIB

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by component; they sum to `process`."""
        return {part["name"]: part["bytes"] for part in self._document["breakdown"]}

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """One entry per card that was asked for."""
        return list(self._document["verdicts"])

    @property
    def fits(self) -> bool:
        """Whether the card of the plan holds it."""
        return bool(self._document["verdicts"][0]["fits"])

    @property
    def notes(self) -> list[str]:
        """What was assumed."""
        return list(self._document["notes"])

    def to_dict(self) -> dict[str, Any]:
        """The whole document."""
        return dict(self._document)

    def to_frame(self) -> Any:
        """The breakdown as a pandas frame."""
        import pandas

        parts = self._document["breakdown"]
        frame = pandas.DataFrame({"component": [p["name"] for p in parts], "bytes": [p["bytes"] for p in parts]})
        frame["GiB"] = frame["bytes"] / GIB
        return frame

    def __repr__(self) -> str:
        name = self._document["model"]["name"]
        levels = f"allocated {self.allocated_gib:.2f}, reserved {self.reserved_gib:.2f}, process {self.process_gib:.2f}"
        return f"<vramcast.Report {name}: {levels} GiB>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td style='text-align:right'>{size / GIB:.2f}</td></tr>"
            for name, size in self.breakdown.items()
            if size
        )
        verdict = self._document["verdicts"][0]
        words = "fits" if verdict["fits"] else "does not fit"
        total = f"<tr><th>process</th><th style='text-align:right'>{self.process_gib:.2f}</th></tr>"
        caption = f"{escape(self._document['model']['name'])} {words} on {escape(verdict['gpu'])}"
        return f"<table><caption>{caption}</caption><tr><th>component</th><th>GiB</th></tr>{rows}{total}</table>"
