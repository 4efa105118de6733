"""Answers as objects: what a run takes by simulation, by a published formula, or by a serving engine's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from vramcast._core import Document

GIB = 1 << 30


class Answer:
    """An answer as the command line's `--json` gives it: `answer["gpu"]`, or all of it by `to_dict`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._seen: dict[str, Any] = {}

    @staticmethod
    def of(document: Document) -> Answer:
        """The object for a document."""
        if "terms" in document and "source" in document:
            return Formula(document)
        if "placement" in document:
            return Placement(document)
        return Report(document) if "totals" in document and "breakdown" in document else Answer(document)

    def to_dict(self) -> dict[str, Any]:
        """The whole document."""
        return self._document.to_dict()

    def __getitem__(self, key: str) -> Any:
        if key not in self._seen:
            self._seen[key] = self._document[key]
        return self._seen[key]

    def __contains__(self, key: str) -> bool:
        return key in self._document

    def keys(self) -> list[str]:
        """The names of the document's parts."""
        return self._document.keys()

    def __repr__(self) -> str:
        return f"<vramcast.{type(self).__name__} with {', '.join(self.keys())}>"


class Formula(Answer):
    """What a published formula says (`method="components"`, …): its terms, as its authors count them."""

    @property
    def method(self) -> str:
        """Which formula."""
        return str(self["method"])

    @property
    def total(self) -> float:
        """Bytes in all."""
        return float(self["total"])

    @property
    def total_gib(self) -> float:
        return self.total / GIB

    @property
    def terms(self) -> dict[str, float]:
        """Bytes by term."""
        return {term["name"]: term["bytes"] for term in self["terms"]}

    @property
    def fits(self) -> bool:
        """Whether the card holds that much."""
        return bool(self["fits"])

    @property
    def notes(self) -> list[str]:
        """What the formula leaves out."""
        return list(self["notes"])

    def to_frame(self) -> Any:
        """The terms as a pandas frame."""
        return frame_of([{"term": name, "bytes": size} for name, size in self.terms.items()])

    def __repr__(self) -> str:
        return f"<vramcast.Formula {self.method} for {self['model']['name']}: {self.total_gib:.2f} GiB>"

    def _repr_html_(self) -> str:
        words = "fits" if self.fits else "does not fit"
        caption = f"{self['model']['name']} by the formula “{self.method}”: {words} on {self['gpu']}"
        return table(caption, self.terms, [("total", self.total)], self.notes)


class Placement(Answer):
    """Several roles on shared cards (a file of verl or OpenRLHF): what each holds on a card, phase by phase."""

    @property
    def fits(self) -> bool:
        """Whether every group of cards holds its roles."""
        return bool(self["fits"])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Groups of cards: their roles, phases, the phase that decides."""
        return list(self["groups"])

    @property
    def notes(self) -> list[str]:
        """What was read in another sense."""
        return list(self["notes"])

    def to_frame(self) -> Any:
        """A row for every phase of every group, its bytes by role, as a pandas frame."""
        return frame_of(
            [
                {"cards": group["cards"], "phase": phase["name"], **dict(zip(group["roles"], phase["roles"], strict=True)),
                 "besides": phase["outside"], "bytes": phase["total"]}
                for group in self.groups
                for phase in group["phases"]
            ]
        )  # fmt: skip

    def __repr__(self) -> str:
        most = max((group["peak"] for group in self.groups), default=0) / GIB
        words = "fits" if self.fits else "does not fit"
        return f"<vramcast.Placement {self['placement']}: {most:.2f} GiB on a card; {words} {self['gpu']['name']}>"


class Report(Answer):
    """What a run takes. Bytes, unless a name says otherwise; `to_dict` is the whole document of `--json`."""

    @property
    def allocated(self) -> int:
        """Most bytes that tensors took at once."""
        return int(self["totals"]["allocated"])

    @property
    def reserved(self) -> int:
        """Most bytes that torch's caching allocator held."""
        return int(self["totals"]["reserved"])

    @property
    def process(self) -> int:
        """Most bytes of the whole process: what nvidia-smi shows."""
        return int(self["totals"]["process"])

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
        return {part["name"]: part["bytes"] for part in self["breakdown"]}

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """One entry per card that was asked for."""
        return list(self["verdicts"])

    @property
    def fits(self) -> bool:
        """Whether the card of the plan holds it."""
        return bool(self["verdicts"][0]["fits"])

    @property
    def suggestions(self) -> list[dict[str, Any]]:
        """Changes that would make it fit, where it does not."""
        return list(self["suggestions"] if "suggestions" in self else ())

    @property
    def notes(self) -> list[str]:
        """What was assumed."""
        return list(self["notes"])

    def to_frame(self, what: str = "breakdown") -> Any:
        """A part of the document as a pandas frame: breakdown, modules, largest, phases, timeline or verdicts."""
        parts = {"breakdown", "modules", "largest", "phases", "timeline", "verdicts"}
        if what not in parts:
            raise ValueError(f"to_frame: {what!r} is none of {', '.join(sorted(parts))}")
        if what == "breakdown":
            return frame_of([{"component": name, "bytes": size} for name, size in self.breakdown.items()])
        return frame_of(self[what])

    def __repr__(self) -> str:
        name = self["model"]["name"]
        levels = f"allocated {self.allocated_gib:.2f}, reserved {self.reserved_gib:.2f}, process {self.process_gib:.2f}"
        return f"<vramcast.Report {name}: {levels} GiB; {verdict_of(self)}>"

    def _repr_html_(self) -> str:
        totals = [("allocated", self.allocated), ("reserved", self.reserved), ("process", self.process)]
        caption = f"{self['model']['name']} {verdict_of(self)}"
        suggested = [f"fits with {change['change']} ({change['process'] / GIB:.2f} GiB)" for change in self.suggestions]
        return table(caption, self.breakdown, totals, [*self.notes, *suggested])


def verdict_of(report: Report) -> str:
    """Whether it fits, in words."""
    card = report.verdicts[0]
    left = card["headroom"] / GIB
    if card["fits"]:
        return f"fits {card['gpu']}, {left:.2f} GiB left"
    return f"does not fit {card['gpu']}: {-left:.2f} GiB too much"


def frame_of(rows: list[dict[str, Any]]) -> Any:
    """Rows as a pandas frame, with bytes in GiB beside."""
    import pandas

    frame = pandas.DataFrame(rows)
    if "bytes" in frame:
        frame["GiB"] = frame["bytes"] / GIB
    return frame


def table(caption: str, parts: Mapping[str, float], totals: Iterable[tuple[str, float]], notes: Iterable[str]) -> str:
    """Parts and totals as HTML, with a bar for every part."""
    most = max(parts.values(), default=0) or 1
    number = "<td style='text-align:right'>{:.2f}</td>"
    rows = "".join(
        f"<tr><td style='text-align:left'>{escape(name)}</td>{number.format(size / GIB)}<td style='text-align:left'>"
        f"<div style='background:#76b900;height:.7em;width:{120 * size / most:.0f}px'></div></td></tr>"
        for name, size in parts.items()
        if size
    )
    ends = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>{number.format(size / GIB).replace('td', 'th')}<th></th></tr>"
        for name, size in totals
    )
    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    heads = "<tr><th style='text-align:left'>component</th><th>GiB</th><th></th></tr>"
    return f"<table><caption>{escape(caption)}</caption>{heads}{rows}{ends}</table>{below}"
