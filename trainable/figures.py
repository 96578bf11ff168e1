"""Draw the figures of one run: gradient norms, learning rate, metrics, a decision boundary.

    python -m trainable.figures

draws figures from the rows of runs in a process of its own, so that the caller need not load
Matplotlib. Each line of its input is a request in JSON, `{"config": {...}, "directory":
"trials/0007", "target": "figures", "changed": false}`. Each line of its output is the answer to
one: `{"written": ["figures/grad_norm.png", ...]}`, or `{"refused": "why"}`.

Matplotlib is imported for the first figure, without a display and without its global state.
What must not live here: numbers that are not read from a run's rows or its model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable.store.metrics_file import Row, read_resumptions, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from torch import Tensor, nn

    from trainable.config import TrialConfig
    from trainable.custom_loop import CustomLoop
    from trainable.loop import Trainer

_BLUE, _ORANGE, _GREY = "#1f6feb", "#d9730d", "#6e7781"
_CLASSES = ("#1f6feb", "#d9730d", "#2da44e", "#8250df", "#bf3989", "#9a6700")
# Left, bottom, width and height of the axes, with space for tick labels of nine characters.
# Matplotlib's automatic layout would take a third of a figure's time for the axes, a third for the
# title and a fifth for the labels.
_AXES_BOX = (0.105, 0.12, 0.85, 0.78)
# In heights of the axes: the title above the axis' power of ten, the label below its ticks.
_TITLE, _X_LABEL = 1.045, -0.085
_Y_LABEL = 0.03  # in widths of the figure
_SMOOTH_FROM = 100  # a line with at least this many steps gets a running median
_CLIPPED = "train/clip_fraction"
_DPI = 120
_LONGEST_NAME = 60  # characters, each of four bytes at most; a file's name has 255


def norm_histogram(rows: Sequence[Row], path: Path, *, max_norm: float | None = None) -> Path:
    """Draw a histogram of the gradient norms, with the clipping norm marked.

    Norms are larger during the warmup, so the share of clipped steps is also shown for the second
    half of the run.
    """
    import numpy
    from matplotlib.ticker import LogLocator, NullFormatter

    norms = [value for _, value in _series(rows, "train/grad_norm")]
    figure, axes = _axes("Gradient norm before clipping")
    low = max(min(norms), 1e-12)
    drawn = [max(norm, low) for norm in norms]  # a logarithmic axis cannot show 0
    high = 1.01 * max(drawn)
    edges = 1 + min(40, max(8, 2 * round(len(norms) ** 0.5)))
    marked = (low, high) if max_norm is None else (low, high, max_norm)
    span = max(marked) / min(marked)
    if span > 20:  # below, a logarithmic axis would have almost no ticks
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1e3 else (1,)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        high = max(high, low * span**0.1)  # keeps the bars visible if all norms are alike
        bins = numpy.geomspace(low, high, edges)
    else:
        bins = numpy.linspace(low, high, edges)
    counts, _ = numpy.histogram(drawn, bins)
    axes.stairs(counts, bins, fill=True, color=_BLUE, alpha=0.85)  # one artist instead of forty
    axes.set_xlabel("global L2 norm of one step")
    axes.set_ylabel("steps")
    axes.yaxis.set_major_locator(_whole_numbers())
    if max_norm is not None:
        later = norms[len(norms) // 2 :]
        share, second = (sum(n > max_norm for n in part) / len(part) for part in (norms, later))
        axes.axvline(max_norm, color=_ORANGE, linewidth=2, label=f"max_norm = {max_norm:g}")
        axes.plot([], [], " ", label=f"clipped: {share:.1%} of {len(norms):,} steps")
        axes.plot([], [], " ", label=f"clipped: {second:.1%} in the second half")
        axes.legend(framealpha=0.8, edgecolor="none")
    return _save(figure, path)


def learning_rate(rows: Sequence[Row], scheduled: Sequence[float], path: Path) -> Path:
    """Draw the scheduled and the applied learning rate."""
    applied = _series(rows, "train/lr")
    off = sum(
        abs(value - scheduled[step - 1]) > 1e-6 * max(abs(value), abs(scheduled[step - 1]))
        for step, value in applied
        if step <= len(scheduled)
    )
    figure, axes = _axes("Learning rate")
    steps = range(1, len(scheduled) + 1)
    if scheduled:
        axes.plot(steps, scheduled, color=_GREY, linewidth=5, alpha=0.35, label="scheduled")
    label = "applied" if not scheduled else "applied: as scheduled at each step"
    if off:
        label = f"applied: not as scheduled at {off:,} of {len(applied):,} steps"
    axes.plot(*zip(*applied, strict=True), color=_BLUE, linewidth=1.5, label=label)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylim(bottom=0)
    axes.legend(framealpha=0.8, edgecolor="none")
    return _save(figure, path)


def curve(rows: Sequence[Row], path: Path, *, metric: str, resumed_at: Iterable[int] = ()) -> Path:
    """Draw a metric over the steps as one line, across interruptions."""
    steps, values = zip(*_series(rows, metric), strict=True)
    figure, axes = _axes(metric)
    # Metrics of evaluations are too sparse to smooth.
    many = len(steps) >= _SMOOTH_FROM and 2 * len(steps) > steps[-1] - steps[0]
    axes.plot(
        steps,
        values,
        color=_BLUE,
        linewidth=0.8 if many else 1.5,
        alpha=0.35 if many else 1.0,
        marker=None if len(steps) > 30 else "o",
        markersize=4,
        label="each step" if many else None,
    )
    if many:
        label = "running median"
        indices, medians = _running_median(values)
        at = [steps[index] for index in indices]
        axes.plot(at, medians, color=_BLUE, linewidth=1.8, label=label)
    marks = [step for step in resumed_at if step > 0]
    label = f"interrupted and resumed {len(marks)} times"
    if len(marks) == 1:
        label = f"interrupted; resumed after step {marks[0]:,}"
    for index, step in enumerate(marks):
        axes.axvline(
            step, color=_ORANGE, linestyle="--", linewidth=1.5, label=None if index else label
        )
    if all(value > 0 for value in values) and max(values) > 100 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(_whole_numbers())
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=0.8, edgecolor="none")
    return _save(figure, path)


def decision_boundary(
    model: nn.Module,
    path: Path,
    *,
    points: tuple[Tensor, Tensor] | None = None,
    resolution: int = 300,
) -> Path:
    """Draw the predicted class over the plane; stronger colours mean higher confidence."""
    import numpy
    import torch
    from matplotlib.colors import to_rgb

    reach = 1.1 if points is None else 1.1 * float(points[0].abs().max())
    line = torch.linspace(-reach, reach, resolution)
    grid = torch.cartesian_prod(line, line)
    parameter = next(model.parameters())
    training = model.training
    model.eval()
    with torch.inference_mode():
        shares = model(grid.to(parameter.device, parameter.dtype)).softmax(dim=1).float().cpu()
    model.train(training)
    classes = shares.shape[1]
    colours = numpy.array([to_rgb(_CLASSES[i % len(_CLASSES)]) for i in range(classes)])
    winner = shares.argmax(dim=1)
    # Nearly white where all classes are equally likely, half the colour where one is certain.
    confidence = ((shares.amax(dim=1) - 1 / classes) / (1 - 1 / classes)).numpy()[:, None]
    image = 1 - (0.05 + 0.4 * confidence) * (1 - colours[winner.numpy()])
    image = image.reshape(resolution, resolution, 3).transpose(1, 0, 2)

    figure, axes = _axes("Decision boundary", (6.4, 6.4))
    extent = (-reach, reach, -reach, reach)
    axes.imshow(image, origin="lower", extent=extent, interpolation="bilinear")
    for index in range(classes):
        rivals = shares[:, [other for other in range(classes) if other != index]].amax(dim=1)
        lead = (shares[:, index] - rivals).view(resolution, resolution).T.numpy()
        axes.contour(lead, levels=[0.0], extent=extent, colors="white", linewidths=1.2)
    if points is not None:
        for index in range(classes):
            chosen = points[0][points[1] == index]
            axes.scatter(
                chosen[:, 0].tolist(),
                chosen[:, 1].tolist(),
                s=14,
                color=_CLASSES[index % len(_CLASSES)],
                edgecolors="white",
                linewidths=0.4,
                label=f"class {index}",
            )
        axes.legend(loc="upper right", framealpha=0.9)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_xlabel("first coordinate")
    axes.set_ylabel("second coordinate")
    return _save(figure, path)


def draw_run(
    config: TrialConfig, trainer: Trainer | CustomLoop, directory: Path, target: Path
) -> list[Path]:
    """Draw all figures for the rows and the model of a run."""
    from trainable.find_task import load_task
    from trainable.loop import Trainer
    from trainable.tasks.spiral import Spiral

    written = draw_rows(config, directory, target)
    if config.task.name == "spiral" and isinstance(trainer, Trainer):
        task = load_task(config.task.name, config.task.arguments)
        assert isinstance(task, Spiral)
        file = target / "decision_boundary.png"
        written.append(decision_boundary(trainer.model, file, points=task.points()))
    return written


def draw_rows(
    config: TrialConfig, directory: Path, target: Path, *, changed: bool = False
) -> list[Path]:
    """Draw all figures for the rows of a run, without its task or its model."""
    rows, resumed_at = read_rows(directory), read_resumptions(directory)
    target.mkdir(parents=True, exist_ok=True)
    logged = {name for row in rows for name in row.metrics}
    written = []
    if {"train/grad_norm", "train/lr"} <= logged and _has_step_rows(rows):
        clip = None if changed else config.train.clip.max_norm
        written.append(norm_histogram(rows, target / "grad_norm.png", max_norm=clip))
        scheduled = [] if changed else _scheduled(config, *_extent(config, rows))
        written.append(learning_rate(rows, scheduled, target / "learning_rate.png"))
    for metric, name in _file_names(("train/loss", *config.metrics)).items():
        if metric in logged:
            file = target / f"{name}.png"
            written.append(curve(rows, file, metric=metric, resumed_at=resumed_at))
    return written


def _file_names(metrics: Iterable[str]) -> dict[str, str]:
    """Return a unique file name for each metric, valid in all file systems and in a URL."""
    names, taken = {}, {"grad_norm", "learning_rate"}
    for metric in dict.fromkeys(metrics):
        name = re.sub(r"^\.|[^\w.\- ]", "_", metric)[:_LONGEST_NAME]
        if name != metric.replace("/", "_") or name in taken:
            name += f"-{hashlib.sha256(metric.encode()).hexdigest()[:8]}"
        taken.add(name)
        names[metric] = name
    return names


def _has_step_rows(rows: Sequence[Row]) -> bool:
    """Whether `Trainer` wrote these rows.

    A custom loop may log metrics of the same names once an epoch, with other clipping and another
    schedule.
    """
    return any("epoch" not in row.metrics or _CLIPPED in row.metrics for row in rows)


def _steps_per_epoch(rows: Sequence[Row]) -> int:
    """Return the windows of an epoch: the most steps between two reports (fp16 skips some)."""
    ends = [0, *(row.step for row in rows if "epoch" in row.metrics)]
    if len(ends) == 1:  # interrupted in its first epoch
        return rows[-1].step
    return max(after - before for before, after in itertools.pairwise(ends))


def _extent(config: TrialConfig, rows: Sequence[Row]) -> tuple[int, int]:
    """Return the steps of an epoch and of the whole budget, as far as the rows show them."""
    budget = config.budget
    if budget.report_word == "epoch":
        steps = _steps_per_epoch(rows)
        return steps, steps * budget.total
    reports = [row for row in rows if row.metrics.get("epoch") and row.metrics.get("report")]
    if not reports:
        return len(rows), len(rows)
    last = reports[-1]
    total = round(last.step * budget.reports / last.metrics["report"])
    steps = max(1, round(last.step / last.metrics["epoch"]))
    return steps, budget.total if budget.unit == "steps" else total


def _scheduled(config: TrialConfig, steps_per_epoch: int, total: int) -> list[float]:
    """Return the learning rate of each step from the configuration alone.

    The list is empty for `plateau`, which depends on the metric, and for a user's own function,
    whose code does not run here.
    """
    from trainable.config import is_own
    from trainable.schedule import Schedule

    train = config.train
    if train.schedule.name == "plateau" or is_own(train.schedule.name):
        return []
    schedule = Schedule(
        train.schedule,
        peak=train.optimizer.lr,
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
    )
    return [train.optimizer.lr * schedule.factor(step) for step in range(total)]


def _series(rows: Iterable[Row], metric: str) -> list[tuple[int, float]]:
    found = [(row.step, row.metrics[metric]) for row in rows if metric in row.metrics]
    if not found:
        raise ValueError(f"no row has {metric!r}, so there is nothing to draw")
    return found


def _running_median(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return at most some hundred indices, enough for a line, and the median around each."""
    half, indices = max(2, len(values) // 50), range(0, len(values), max(1, len(values) // 400))
    medians = [statistics.median(values[max(0, i - half) : i + half + 1]) for i in indices]
    return list(indices), medians


def _whole_numbers() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def _axes(title: str, size: tuple[float, float] = (7.2, 4.2)) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=size, dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(_AXES_BOX)
    axes.set_title(title, loc="left", y=_TITLE, fontsize=12, fontweight="bold", parse_math=False)
    axes.xaxis.set_label_coords(0.5, _X_LABEL)
    axes.yaxis.set_label_coords(_Y_LABEL, 0.5, transform=figure.transFigure)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    # no version, so that the same run gives the same bytes
    options: dict[str, Any] = {"metadata": {"Software": None}} if path.suffix == ".png" else {}
    figure.savefig(path, **options)
    return path


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from trainable.config import TrialConfig

    try:
        config = TrialConfig.model_validate_json(json.dumps(request["config"]))
        written = draw_rows(
            config,
            Path(request["directory"]),
            Path(request["target"]),
            changed=request["changed"],
        )
    # An error in the figures of one run must not stop those of the next run.
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"written": [str(path) for path in written]}


def _main() -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
