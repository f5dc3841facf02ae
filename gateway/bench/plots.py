"""The bench's two pictures: time to first token per turn, and how busy each stage was.

Needs matplotlib, which comes with the extra `bench`. It draws what it is given and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.errors import SetupError
from gateway.bench.watch import Sample, busy_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by all eyes, and in grey.
_WARM, _COLD, _CONTROL, _LOADED = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
SERIES_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_DPI = 150
# Points of an occupancy curve, at most; each averages over several frames, of which a long one takes half a second.
_POINTS, _POINT_S = 120, 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A span of a run, named."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TtftCurves:
    """Milliseconds by turn, from the first on; a control has no turn."""

    loaded_p50: Sequence[float]  # sessions beside one another
    loaded_p95: Sequence[float]
    warm: Sequence[float]  # one session alone
    cold: Sequence[float]
    control: float | None


def check_plotting() -> None:
    """Before anything is measured. Raises SetupError."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise SetupError("plots need matplotlib: pip install 'ringserve[bench]'") from error


def plot_multiturn(
    path: Path, curves: TtftCurves, samples: Sequence[Sample], phases: Sequence[Phase]
) -> None:
    """Raises SetupError when the file cannot be written."""
    panels = 2 if samples and samples[0].busy_s else 1
    figure, axes = new_figure(panels, 3.7 * panels)
    _draw_ttft(axes[0], curves)
    if panels == 2:
        _draw_occupancy(axes[1], samples, phases)
    save(figure, path)


def plot_occupancy(path: Path, samples: Sequence[Sample], phases: Sequence[Phase]) -> None:
    """Raises SetupError when the file cannot be written."""
    figure, axes = new_figure(1, 3.9)
    _draw_occupancy(axes[0], samples, phases)
    save(figure, path)


def new_figure(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels below one another, in the bench's looks."""
    # No pyplot: it keeps figures in a global and may look for a display.
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(8.5, height), layout="constrained")
    axes = [figure.add_subplot(panels, 1, 1 + index) for index in range(panels)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="0.9")
        each.set_axisbelow(True)
    return figure, axes


def _draw_ttft(axes: Axes, curves: TtftCurves) -> None:
    """A logarithmic scale: warm and cold are an order of magnitude apart."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_title("Time to first token by turn", loc="left", fontweight="bold")
    turns = list(range(1, 1 + len(curves.loaded_p50)))
    axes.fill_between(
        turns,
        curves.loaded_p50,
        curves.loaded_p95,
        color=_LOADED,
        alpha=0.3,
        linewidth=0,
    )
    axes.plot(turns, curves.loaded_p50, ".-", color=_LOADED, label="all sessions\n(p50 to p95)")
    axes.plot(turns[: len(curves.warm)], curves.warm, "o-", color=_WARM, label="one alone, warm")
    if curves.cold:
        axes.plot(turns, curves.cold, "s-", color=_COLD, label="one alone, cold")
    if curves.control is not None:
        axes.axhline(curves.control, color=_CONTROL, linestyle="--", label="unseen prefix")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(turns)
    axes.set_xlabel("turn")
    axes.set_ylabel("ms")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_occupancy(axes: Axes, samples: Sequence[Sample], phases: Sequence[Phase]) -> None:
    axes.set_title("Share of time that each stage computes", loc="left", fontweight="bold")
    zero, end = samples[0].at_s, samples[-1].at_s
    points = max(1, min(_POINTS, int((end - zero) / _POINT_S)))
    width = (end - zero) / points
    begins = [zero + width * index for index in range(points)]
    shares = [busy_shares(samples, begin, begin + width) for begin in begins]
    middles = [begin + width / 2 - zero for begin in begins]
    for stage in range(len(samples[0].busy_s)):
        colour = SERIES_COLOURS[stage % len(SERIES_COLOURS)]
        line = [share[stage] * 100 for share in shares]
        axes.plot(middles, line, color=colour, linewidth=1.3, label=samples[0].stages[stage])
    for index, phase in enumerate(phases):
        left, right = phase.begin_s - zero, phase.end_s - zero
        axes.axvspan(left, right, color="0.96" if index % 2 else "0.91", linewidth=0, zorder=0)
        # Two heights, so that the names of short phases do not meet.
        axes.text(left, 104 + 7 * (index % 2), f" {phase.name}", ha="left", fontsize="x-small")
    axes.set_xlim(0, end - zero)
    axes.set_ylim(0, 118)
    axes.set_yticks(range(0, 101, 25))
    axes.set_xlabel("seconds")
    axes.set_ylabel("%")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def save(figure: Figure, path: Path) -> None:
    """Raises SetupError when the file cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be written: {error}") from error
