"""What the storm did: a table with a row for each kind of fault, and one JSON object.

Decides only how findings are added up and shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from gateway.bench.figures import median, p95
from gateway.chaos.book import Book, Hit
from gateway.chaos.checker import Wrong
from gateway.chaos.faults import Struck
from gateway.chaos.storm import Fault
from gateway.chaos.traffic import Ask


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """Of all faults of a kind. Seconds; None where nothing was measured. `answers_again_s` counts from the strike to
    the ring's first reply behind it; detection, load and the way from whole to the first reply are parts of it.
    """

    fault: str
    count: int
    in_moment: int  # struck while what the moment was seen by was under way
    streams_hit: int
    streams_told: int  # that their ring heals
    wrong: int
    lost: int
    pause_s_p50: float | None
    pause_s_p95: float | None
    detection_s_p50: float | None
    load_s_p50: float | None
    opened_s_p50: float | None
    answers_again_s_p50: float | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """`pause_s`: of streams that went on behind a fault. Streams are turns, each with its answer."""

    kills: int
    streams: int
    wrong_streams: int
    lost_streams: int
    pause_s_p50: float | None
    pause_s_p95: float | None
    faults: tuple[FaultFigures, ...]
    problems: tuple[str, ...]
    asked_again: int  # turns that no ring took at first, or whose gateway died
    reused_share: float | None
    elsewhere_pause_s_p95: float | None  # of streams on rings that were not struck

    @property
    def is_clean(self) -> bool:
        problems = self.problems or any(kind.problems for kind in self.faults)
        return not (self.wrong_streams or self.lost_streams or problems)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def report(
    book: Book, struck: Sequence[Struck], wrong: Sequence[Wrong], problems: Sequence[str]
) -> ChaosReport:
    here = [hit for hit in book.hits if not hit.elsewhere]
    bad = {(each.ask, each.tokens) for each in wrong}
    kinds = [fault for fault in Fault if any(each.planned.fault is fault for each in struck)]
    return ChaosReport(
        kills=sum(each.kills for each in struck),
        streams=book.streams,
        wrong_streams=sum(each.streams for each in wrong),
        lost_streams=len(book.lost),
        pause_s_p50=median(hit.pause_s for hit in here),
        pause_s_p95=p95(hit.pause_s for hit in here),
        faults=tuple(_figures(kind, struck, here, bad) for kind in kinds),
        problems=tuple([*problems, *map(str, wrong), *book.lost]),
        asked_again=book.refused,
        reused_share=_share(book.reused_tokens, book.prompt_tokens),
        elsewhere_pause_s_p95=p95(hit.pause_s for hit in book.hits if hit.elsewhere),
    )


def _figures(
    kind: Fault,
    struck: Sequence[Struck],
    hits: Sequence[Hit],
    bad: set[tuple[Ask, tuple[int, ...]]],
) -> FaultFigures:
    ours = [each for each in struck if each.planned.fault is kind]
    numbers = {each.planned.number for each in ours}
    met = [hit for hit in hits if hit.number in numbers]
    return FaultFigures(
        fault=kind,
        count=len(ours),
        in_moment=sum(each.hit for each in ours),
        streams_hit=len(met),
        streams_told=sum(hit.told for hit in met),
        wrong=sum((hit.ask, hit.tokens) in bad and not hit.lost for hit in met),
        lost=sum(hit.lost for hit in met),
        pause_s_p50=median(hit.pause_s for hit in met),
        pause_s_p95=p95(hit.pause_s for hit in met),
        detection_s_p50=median(each.detected_s for each in ours),
        load_s_p50=median(each.load_s for each in ours),
        opened_s_p50=median(each.opened_s for each in ours),
        answers_again_s_p50=median(each.answered_s for each in ours),
        problems=tuple(f"{each.planned}: {each.problem}" for each in ours if each.problem),
        notes=tuple(f"{each.planned}: {each.note}" for each in ours if each.note),
    )


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def show(told: ChaosReport, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("fault", "struck", "hit", "wrong", "lost", "pause", "noticed", "answers"):
        table.add_column(head, no_wrap=True)
    for kind in told.faults:
        table.add_row(
            *(kind.fault, f"{kind.count} ({kind.in_moment})", str(kind.streams_hit)),
            *(str(kind.wrong), str(kind.lost), _both(kind.pause_s_p50, kind.pause_s_p95)),
            *(_s(kind.detection_s_p50), _s(kind.answers_again_s_p50)),
        )
    console.print(table)
    for line in _lines(told):
        console.print(line, markup=False, highlight=False)


def _both(p50: float | None, p95: float | None) -> str:
    return "" if p50 is None or p95 is None else f"{p50:.2f} / {p95:.2f}"


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _lines(told: ChaosReport) -> list[str]:
    lines = [
        "struck: how often, and how often in the midst of the moment; hit: streams that were running; in seconds "
        "their pause (p50 / p95) and the medians from the strike until the ring noticed and answered again",
        f"{told.kills} kills, {told.streams} streams: {told.wrong_streams} wrong, {told.lost_streams} lost; "
        f"pause p50 {_s(told.pause_s_p50) or '-'} s, p95 {_s(told.pause_s_p95) or '-'} s",
        f"{told.asked_again} turns were asked again; {told.reused_share} of the prompts' tokens "
        "were reused",
    ]
    if told.elsewhere_pause_s_p95 is not None:
        lines.append(
            f"streams on other rings: pause p95 {_s(told.elsewhere_pause_s_p95)} s around the same faults"
        )
    lines += [note for kind in told.faults for note in kind.notes]
    told_problems = [*told.problems, *(line for kind in told.faults for line in kind.problems)]
    return lines + [f"PROBLEM: {problem}" for problem in told_problems]
