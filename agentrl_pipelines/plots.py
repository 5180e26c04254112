"""Pictures for the UI's metadata and for reports. matplotlib is imported when the first one is drawn."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BLUE, _ORANGE, _GREY = "#2f6fde", "#e8833a", "#9aa3ad"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def markdown_picture(png: bytes, title: str) -> str:
    """Markdown that shows the picture without any file or server behind it."""
    return f"![{title}](data:image/png;base64,{base64.b64encode(png).decode()})"


def score_histogram(scores: Sequence[float], *, title: str) -> bytes:
    """PNG of how many records got which score."""
    figure, axes = _figure(4.4, 2.3)
    low, high = min([0.0, *scores]), max([1.0, *scores])
    axes.hist(scores, bins=20, range=(low, high), color=_BLUE, edgecolor="white", linewidth=0.5)
    axes.set_xlabel("score")
    axes.set_ylabel("records")
    axes.set_title(title, fontsize=10)
    return _png(figure)


Points = Sequence[tuple[float, float]]


def learning_curve(rewards: Points, accuracies: Points, *, title: str, x_label: str = "policy version") -> bytes:
    """PNG of the training reward (line) and the greedy accuracy on unseen tasks (dots) over `x_label`."""
    figure, axes = _figure(6.4, 3.2)
    if rewards:
        x, y = zip(*rewards, strict=True)
        axes.plot(x, y, color=_BLUE, linewidth=1.4, marker="." if len(rewards) < 3 else "", label="training reward")
    if accuracies:
        x, y = zip(*accuracies, strict=True)
        axes.plot(x, y, color=_ORANGE, linewidth=1.0, linestyle="--", marker="o", markersize=4, label="greedy, unseen")
    values = [value for _, value in [*rewards, *accuracies]]
    axes.set_ylim(min([0.0, *values]), max([1.0, *values]) * 1.03)
    axes.set_xlabel(x_label)
    axes.set_title(title, fontsize=10)
    if rewards or accuracies:
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    else:
        axes.text(0.5, 0.5, "no points yet", transform=axes.transAxes, ha="center", color=_GREY)
    return _png(figure)


def write_png(png: bytes, path: Path) -> Path:
    """Write the picture so that `path` is always a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(png)
    partial.replace(path)
    return path
