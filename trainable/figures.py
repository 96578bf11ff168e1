"""Draw the figures of one run into files: norms, learning rate, curves, a decision boundary.

    python -m trainable.figures

draws the figures of several runs in a program of its own, which keeps Matplotlib out of the
caller's memory. Each line of its input is a request in JSON, `{"config": {...}, "directory":
"trials/0007", "target": "figures", "changed": false}`, and each line of its output the answer to
one: `{"written": ["figures/grad_norm.png", ...]}`, or `{"refused": "why"}`.

Matplotlib is imported when the first figure is drawn, without a display and without its global
state. What must not live here: numbers that are not read from a run's rows or its model.
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

from trainable.metrics_file import Row, read_resumptions, read_rows

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
# Left, bottom, width and height of the axes: room for tick labels of nine characters. To look for
# places by what is drawn there takes longer than to draw it: a third of a picture's time for the
# axes, a third for the title and a fifth for the labels.
_PLACE = (0.105, 0.12, 0.85, 0.78)
_TITLE, _X_LABEL = (
    1.045,
    -0.085,
)  # in heights of the axes: above an axis' power of ten, below ticks
_Y_LABEL = 0.03  # in widths of the figure
# Below this many steps a per-step line is drawn as it is; above, its running median stands out.
_SMOOTH_FROM = 100
_CLIPPED = "train/clip_fraction"
_DPI = 120
_used: list[Figure] = []
"""Wiped, to be drawn on again."""
_LONGEST_NAME = 60  # characters, each of four bytes at most; a file's name has 255


def norm_histogram(rows: Sequence[Row], path: Path, *, max_norm: float | None = None) -> Path:
    """Draw how often each gradient norm occurred, with the clipping norm marked.

    The warmup's norms are large by nature, so the share of clipped steps is also given for the
    second half of the run, its steady state.

    Args:
        rows: A run's rows; those with `train/grad_norm` count.
        path: The file to write; its suffix decides the format.
        max_norm: Where gradients were clipped; None when they were not.

    Raises:
        ValueError: No row has a gradient norm.
    """
    import numpy
    from matplotlib.ticker import LogLocator, NullFormatter

    norms = [value for _, value in _series(rows, "train/grad_norm")]
    figure, axes = _axes("Gradient norm before clipping")
    low = max(min(norms), 1e-12)
    drawn = [max(norm, low) for norm in norms]  # no gradient at all has no place on such an axis
    high = 1.01 * max(drawn)
    edges = 1 + min(40, max(8, 2 * round(len(norms) ** 0.5)))
    marked = (low, high) if max_norm is None else (low, high, max_norm)
    span = max(marked) / min(marked)
    if span > 20:  # else a logarithmic axis has hardly a tick to show
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1e3 else (1,)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        high = max(high, low * span**0.1)  # norms that are all alike are seen nevertheless
        bins = numpy.geomspace(low, high, edges)
    else:
        bins = numpy.linspace(low, high, edges)
    counts, _ = numpy.histogram(drawn, bins)
    axes.stairs(counts, bins, fill=True, color=_BLUE, alpha=0.85)  # one shape, not forty
    axes.set_xlabel("global L2 norm of one step")
    axes.set_ylabel("steps")
    axes.yaxis.set_major_locator(_whole_numbers())
    if max_norm is not None:
        later = norms[len(norms) // 2 :]
        share, steady = (sum(n > max_norm for n in part) / len(part) for part in (norms, later))
        axes.axvline(max_norm, color=_ORANGE, linewidth=2, label=f"max_norm = {max_norm:g}")
        axes.plot([], [], " ", label=f"clipped: {share:.1%} of {len(norms):,} steps")
        axes.plot([], [], " ", label=f"clipped: {steady:.1%} in the second half")
        axes.legend(framealpha=0.8, edgecolor="none")
    return _save(figure, path)


def learning_rate(rows: Sequence[Row], scheduled: Sequence[float], path: Path) -> Path:
    """Draw the learning rate as scheduled against as applied.

    Args:
        rows: A run's rows; those with `train/lr` count.
        scheduled: What the schedule asks for at step 1, 2, and so on; empty when unknown.
        path: The file to write.

    Raises:
        ValueError: No row has a learning rate.
    """
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
    """Draw a metric over the steps as one line, across every interruption.

    Args:
        rows: A run's rows, as `read_rows` gives them.
        path: The file to write.
        metric: Such as `train/loss` or `val/accuracy`.
        resumed_at: Steps from which the run went on after it had been interrupted.

    Raises:
        ValueError: No row has the metric.
    """
    steps, values = zip(*_series(rows, metric), strict=True)
    figure, axes = _axes(metric)
    # Evaluations are too far apart, and too few, to be smoothed.
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
        places, medians = _running_median(values)
        at = [steps[place] for place in places]
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
    """Draw which class a model of the plane sees where: the stronger the colour, the surer.

    Args:
        model: Maps points (N, 2) to logits (N, C); left in the mode in which it was.
        path: The file to write.
        points: Points (N, 2) and their classes (N,) to draw on top.
        resolution: Points along each axis.
    """
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
    # From nearly white where all classes are as likely to half the colour where one is certain.
    sure = ((shares.amax(dim=1) - 1 / classes) / (1 - 1 / classes)).numpy()[:, None]
    image = 1 - (0.05 + 0.4 * sure) * (1 - colours[winner.numpy()])
    image = image.reshape(resolution, resolution, 3).transpose(1, 0, 2)

    figure = _paper((6.4, 6.4))
    axes = _titled(figure, "Decision boundary")
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
    """Draw every picture that the rows and the model of a run give.

    Args:
        config: The run's configuration.
        trainer: What trained it.
        directory: The run's directory, for its `metrics.jsonl`.
        target: Where the pictures go; made when missing.

    Returns:
        The files written.
    """
    from trainable.loop import Trainer
    from trainable.task import load_task
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
    """Draw every picture that the rows of a run give, without its task or its model.

    Args:
        config: The run's configuration.
        directory: The run's directory, for its curve and where that was interrupted.
        target: Where the pictures go; made when missing.
        changed: It was trained with other parameters before, as a member of a population: its
            clipping norm and its schedule are not those of all of its steps, and are left out.

    Returns:
        The files written.
    """
    rows, resumed_at = read_rows(directory), read_resumptions(directory)
    target.mkdir(parents=True, exist_ok=True)
    logged = {name for row in rows for name in row.metrics}
    written = []
    if {"train/grad_norm", "train/lr"} <= logged and _is_ours(rows):
        clip = None if changed else config.train.clip.max_norm
        written.append(norm_histogram(rows, target / "grad_norm.png", max_norm=clip))
        scheduled = [] if changed else _scheduled(config, _steps_per_epoch(rows))
        written.append(learning_rate(rows, scheduled, target / "learning_rate.png"))
    for metric, name in _file_names(("train/loss", *config.metrics)).items():
        if metric in logged:
            file = target / f"{name}.png"
            written.append(curve(rows, file, metric=metric, resumed_at=resumed_at))
    return written


def _file_names(metrics: Iterable[str]) -> dict[str, str]:
    """Names for the pictures of metrics, which every file system, and an address, takes, and of
    which no two are alike.
    """
    names, taken = {}, {"grad_norm", "learning_rate"}
    for metric in dict.fromkeys(metrics):
        name = re.sub(r"^\.|[^\w.\- ]", "_", metric)[:_LONGEST_NAME]
        if name != metric.replace("/", "_") or name in taken:
            name += f"-{hashlib.sha256(metric.encode()).hexdigest()[:8]}"
        taken.add(name)
        names[metric] = name
    return names


def _is_ours(rows: Sequence[Row]) -> bool:
    """Whether these rows are of steps. A loop of one's own may log what it likes under the same
    names, once in an epoch, and knows nothing of our clipping and our schedules.
    """
    return any("epoch" not in row.metrics or _CLIPPED in row.metrics for row in rows)


def _steps_per_epoch(rows: Sequence[Row]) -> int:
    """Windows of an epoch: the most steps between two reports, since fp16 skips some."""
    ends = [0, *(row.step for row in rows if "epoch" in row.metrics)]
    if len(ends) == 1:  # cut off within its first epoch
        return rows[-1].step
    return max(after - before for before, after in itertools.pairwise(ends))


def _scheduled(config: TrialConfig, steps_per_epoch: int) -> list[float]:
    """The learning rate of each step, from the configuration alone; none for `plateau`, which
    depends on what was measured.
    """
    from trainable.schedule import Schedule

    train = config.train
    if train.schedule.name == "plateau":
        return []
    total = steps_per_epoch * config.budget.epochs
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
        raise ValueError(f"no row has {metric!r}; there is nothing to draw")
    return found


def _running_median(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The median around some hundred places, which are more than a line shows, and these."""
    half, places = max(2, len(values) // 50), range(0, len(values), max(1, len(values) // 400))
    medians = [statistics.median(values[max(0, p - half) : p + half + 1]) for p in places]
    return list(places), medians


def _whole_numbers() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = _used.pop() if _used else _paper()
    return figure, _titled(figure, title)


def _titled(figure: Figure, title: str) -> Axes:
    (axes,) = figure.axes
    axes.set_title(title, loc="left", y=_TITLE, fontsize=12, fontweight="bold", parse_math=False)
    return axes


def _paper(size: tuple[float, float] = (7.2, 4.2)) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # the object alone: no pyplot, no window, no global state

    figure = Figure(figsize=size, dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(_PLACE)
    axes.xaxis.set_label_coords(0.5, _X_LABEL)
    axes.yaxis.set_label_coords(_Y_LABEL, 0.5, transform=figure.transFigure)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    if figure.axes[0].images:  # its shades are more than a palette has
        unnamed = {"Software": None}  # the same run gives the same bytes
        figure.savefig(path, metadata=unnamed, pil_kwargs={"compress_level": 1})
        return path
    if path.suffix == ".png":
        _write_png(figure, path)
    else:
        figure.savefig(path)
    _wipe(figure)
    _used.append(figure)
    return path


def _write_png(figure: Figure, path: Path) -> None:
    """Write a figure with a palette: half of the time, and a third of the bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    drawn = canvas.buffer_rgba()  # type: ignore[no-untyped-call]
    image = Image.frombuffer("RGBA", canvas.get_width_height(), drawn)
    packed = image.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    palette = packed.getpalette()
    assert palette is not None
    paper = 3 * packed.tobytes()[0]
    palette[paper : paper + 3] = (255, 255, 255)  # not the mean of what is nearly white
    packed.putpalette(palette)
    packed.save(path, compress_level=1)


def _wipe(figure: Figure) -> None:
    """Take off what was drawn; the axes, their ticks and the sizes of known texts stay."""
    (axes,) = figure.axes
    for artist in (*axes.lines, *axes.patches):
        artist.remove()
    if legend := axes.get_legend():
        legend.remove()
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        axis.set_label_text("")
        scale("linear")
    axes.relim()
    axes.autoscale(True)


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
    # A figure that cannot be drawn must not take those of the next run with it.
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"written": [str(path) for path in written]}


def _main() -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
