"""Hits over capacity as a picture. The only module that imports matplotlib."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter

from kvtier.cli.replay_report import GIB, Units
from kvtier.errors import ConfigError
from kvtier.replay import Point

__all__ = ["check_format", "draw"]

_MARKERS = "os^Dv*PX"
_PANEL_INCHES = (8.0, 5.2)


def check_format(path: Path) -> None:
    """Raises `ConfigError` for a file name whose ending is no format of pictures."""
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ConfigError(
            f"--plot {path}: name a .png, .svg or .pdf file; {path.suffix or 'no ending'} is no "
            "picture"
        )


def draw(path: Path, points: Sequence[Point], unlimited: Mapping[str, float], units: Units) -> None:
    """Draws one panel a trace: prefix hits of every policy, and the optimum above them.

    `unlimited` gives each trace's rate with memory that evicts nothing. Raises `OSError` when
    the file can not be written.
    """
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width, height * len(unlimited)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(unlimited), 1, squeeze=False)[:, 0]
    for panel, (trace, limit) in zip(panels, unlimited.items(), strict=True):
        _draw_panel(panel, trace, [point for point in points if point.trace == trace], limit)
        _add_units(panel, units)
    figure.savefig(path, dpi=150)


def _draw_panel(panel: Axes, trace: str, points: Sequence[Point], limit: float) -> None:
    for number, policy in enumerate(dict.fromkeys(point.policy for point in points)):
        own = [point for point in points if point.policy == policy]
        panel.plot(
            [point.capacity for point in own],
            [point.prefix_hits for point in own],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            linewidth=1.5,
            label=policy,
        )
    ceiling = {point.capacity: point.optimum_hits for point in points}
    panel.plot(
        list(ceiling), list(ceiling.values()), "k--", linewidth=1.2, label="optimum (block hits)"
    )
    panel.axhline(limit, color="grey", linestyle=":", linewidth=1, label="unlimited memory")
    panel.set_title(trace)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("capacity, blocks")
    panel.set_ylabel("usable prefix hits, share of block accesses")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def _add_units(panel: Axes, units: Units) -> None:
    scales = [(float(units.block_tokens), "tokens")]
    if units.block_bytes is not None:
        scales.append((units.block_bytes / GIB, "GiB"))
    for number, (factor, name) in enumerate(scales):
        scale = functools.partial(operator.mul, factor)
        unscale = functools.partial(operator.mul, 1 / factor)
        axis = panel.secondary_xaxis(1 + 0.13 * number, functions=(scale, unscale))
        axis.set_xlabel(f"capacity, {name}")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(EngFormatter(sep="") if name == "tokens" else "{x:g}")
