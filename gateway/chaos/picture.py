"""The soak's picture: memory and descriptors of each process, the rings' rows, and when something struck.

Needs matplotlib, which comes with the extra `bench`. It draws what it is given and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.bench.plots import SERIES_COLOURS, new_figure, save
from gateway.chaos.soak import Soak

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_HEIGHT = 2.6
_MIB = 2**20


def plot_soak(path: Path, soak: Soak, struck_s: Sequence[float]) -> None:
    """`struck_s`: by perf_counter. Raises SetupError when the file cannot be written."""
    figure, (memory, descriptors, rows) = new_figure(3, 3 * _PANEL_HEIGHT)
    weights = [(each.role, each.at_s, each.weight) for each in soak.processes]
    _draw(
        memory,
        "Memory of each process (its own)",
        "MiB",
        ((r, t, w.uss_bytes / _MIB) for r, t, w in weights),
    )
    _draw(
        descriptors, "Open descriptors", "", ((r, t, float(w.descriptors)) for r, t, w in weights)
    )
    held = [(each.ring, each.at_s, each) for each in soak.rings]
    lanes = [(f"{name} lanes", at_s, float(each.lane_rows)) for name, at_s, each in held]
    stored = [(f"{name} store", at_s, float(each.stored_rows)) for name, at_s, each in held]
    _draw(rows, "Rows held", "rows", [*lanes, *stored])
    rows.set_xlabel("minutes; a grey line is a fault")
    for axes in (memory, descriptors, rows):
        for at_s in struck_s:
            axes.axvline((at_s - soak.begin_s) / 60, color="0.85", linewidth=0.8, zorder=0)
        axes.set_ylim(bottom=0)
    save(figure, path)


def _draw(axes: Axes, title: str, unit: str, points: Iterable[tuple[str, float, float]]) -> None:
    series = defaultdict[str, tuple[list[float], list[float]]](lambda: ([], []))
    for name, at_s, value in points:
        series[name][0].append(at_s / 60)
        series[name][1].append(value)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_ylabel(unit)
    for place, (name, (minutes, values)) in enumerate(series.items()):
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        axes.plot(minutes, values, color=colour, linewidth=1.2, label=name)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
