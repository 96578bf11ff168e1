"""Run a Hugging Face `Trainer` as a custom loop (the extra `gradsweep[hugging-face]`).

    def run(config, context):
        args = training_arguments(context, learning_rate=config.train.optimizer.lr)
        yield from reports(Trainer(model, args, ...), context)

The trainer keeps its own loop: `reports` calls `train` once. Each of its evaluations is a report,
and each of its checkpoints that follows an evaluation is the state of the run. `train` blocks, so
it runs in a thread, which waits at each report until the run asks for the next one.
What must not live here: how the trainer trains.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from trainable.errors import CheckpointError, ConfigError
from trainable.loop_context import PER_RANK, Context

try:
    from transformers import TrainerCallback, TrainingArguments
    from transformers.utils.logging import disable_progress_bar
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed; it comes with an extra; "
        "pip install 'gradsweep[hugging-face]'"
    ) from missing

Report = tuple[dict[str, float], dict[str, Any] | None]

_NAMES = {"learning_rate": "train/lr"}
"""What the trainer logs under another name than this project."""
_MEASURED = ("_runtime", "_per_second", "_time")
"""The ends of names of measured times, which differ after a resume."""
_NOT_STORED = "training_args.bin"
"""A pickle, which the trainer does not read when it resumes."""


def training_arguments(context: Context, **options: Any) -> TrainingArguments:
    """Return `TrainingArguments` for a run; `options` replace and extend what is set here.

    The trainer evaluates and saves after each of the budget's epochs, with the run's seed and on
    the run's device, and sends its metrics to the run alone. To report within epochs, give
    `eval_strategy="steps"`, `eval_steps` and `max_steps`.

    Args:
        context: The run's context.
        options: Any other argument of `TrainingArguments`.
    """
    chosen: dict[str, Any] = {
        "output_dir": str(context.directory / "hugging_face"),
        "seed": context.seed % 2**32,  # NumPy takes no larger one
        "num_train_epochs": context.epochs,
        "eval_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": context.device.type == "cpu",
    } | options
    chosen.setdefault("save_strategy", chosen["eval_strategy"])
    if chosen["save_strategy"] == "steps" and "eval_steps" in chosen:
        chosen.setdefault("save_steps", chosen["eval_steps"])
    return TrainingArguments(**chosen)


def reports(trainer: Any, context: Context) -> Iterator[Report]:
    """Call `trainer.train()` once and yield a report for each of its evaluations.

    A report has the trainer's metrics: `eval_loss` is named `val/loss`, and `loss` is named
    `train/loss`. A checkpoint that the trainer saves at an evaluation becomes the state of the
    run, and a resumed run continues from it. The trainer's files are removed once they are read.
    With several ranks, the trainer uses all of them, and each keeps its own random states.

    Args:
        trainer: A `transformers.Trainer`. When the run is pruned, its `train` ends as if a
            callback had set `should_training_stop`.
        context: The run's context.

    Raises:
        ConfigError: An argument of the trainer does not fit a run that may be interrupted.
        CheckpointError: The state is not one that this function yielded.
    """
    _check_arguments(trainer.args, context)
    if trainer.args.disable_tqdm:
        disable_progress_bar()  # of each checkpoint that is written
    if context.rank:  # another rank's files are removed while this one still writes
        trainer.args.output_dir = f"{trainer.args.output_dir}/rank_{context.rank}"
    directory = Path(trainer.args.output_dir)
    _remove_checkpoints(directory)  # what an interrupted process left
    restored = context.restored or {}
    checkpoint = _write_checkpoint(restored, directory) if restored else None
    callback = ReportCallback(context.epochs, restored.get("learning_rate"), rank=context.rank)
    trainer.add_callback(callback)

    def train() -> None:
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # each thread has its own
        trainer.train(resume_from_checkpoint=checkpoint)

    try:
        yield from callback.run(train)
    finally:
        trainer.remove_callback(callback)
        _remove_checkpoints(directory)


class ReportCallback(TrainerCallback):  # type: ignore[misc]
    """Hand each evaluation of a trainer over as a report, and stop the trainer in between.

    Args:
        learning_rate: The learning rate with which the checkpoint was trained; None for a new
            run. If the trainer's differs, the schedule is scaled.
        rank: The process among those of the trial.
    """

    def __init__(
        self, num_reports: int, learning_rate: float | None = None, *, rank: int = 0
    ) -> None:
        self._rank = rank
        self._num_reports = num_reports
        self._learning_rate = learning_rate
        self._evaluated: dict[str, float] = {}
        self._logged: dict[str, list[float]] = {}
        self._reports: SimpleQueue[Report | BaseException | None] = SimpleQueue()
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._stopping = threading.Event()

    def run(self, train: Any) -> Iterator[Report]:
        """Call `train` in a thread and yield its reports; stop it when this is closed."""
        thread = threading.Thread(target=self._run, args=(train,), name="train", daemon=True)
        thread.start()
        try:
            while (report := self._reports.get()) is not None:
                if isinstance(report, BaseException):
                    raise report
                yield report
                self._asked.put(None)
        finally:
            self._stopping.set()
            self._asked.put(None)
            thread.join()

    def _run(self, train: Any) -> None:
        try:
            train()
        # of whatever kind, it is raised where the report would have been
        except BaseException as problem:
            self._reports.put(problem)
        else:
            self._reports.put(None)

    def _hand_over(self, args: Any, state: Any, control: Any, *, saved: bool = False) -> None:
        """Hand the last evaluation over, if there is one, and wait for the run's answer."""
        if self._stopping.is_set():
            _stop(control)
            return
        if not self._evaluated:
            return
        held = _read_checkpoint(args, state) if saved else None
        if held is not None and self._rank:  # the first rank's state has the rest
            held = {PER_RANK: {"files": held["files"]}}
        metrics = {name: _merged(name, values) for name, values in self._logged.items()}
        metrics |= self._evaluated
        self._logged, self._evaluated = {}, {}
        self._reports.put((metrics, held))
        self._asked.get()
        if self._stopping.is_set():
            _stop(control)

    def on_train_begin(self, args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Check the number of reports, and scale the schedule if the learning rate changed."""
        _check_reports(args, state, self._num_reports)
        before = self._learning_rate
        if before and args.learning_rate != before:
            _scale(kwargs["optimizer"], kwargs["lr_scheduler"], args.learning_rate / before)

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """Keep what the trainer logs about the training."""
        for key, value in (logs or {}).items():
            if key != "epoch" and not key.startswith(("eval_", "train_", "total_")):
                self._logged.setdefault(_NAMES.get(key, f"train/{key}"), []).append(value)

    def on_evaluate(
        self, _args: Any, _state: Any, _control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Keep the metrics of an evaluation; several data sets are evaluated one by one."""
        for key, value in (metrics or {}).items():
            if key.startswith("eval_") and isinstance(value, Real) and not key.endswith(_MEASURED):
                self._evaluated[f"val/{key.removeprefix('eval_')}"] = float(value)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand an evaluation over with its checkpoint."""
        self._hand_over(args, state, control, saved=True)
        _remove_checkpoints(Path(args.output_dir))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand an evaluation over that no checkpoint followed."""
        self._hand_over(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let each evaluation begin a new interval of the trainer's log."""
        self._hand_over(args, state, control)
        # A mean over an interval that contains a checkpoint would lack a part after a resume.
        control.should_log |= control.should_evaluate or control.should_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do the same as after a step."""
        self.on_step_end(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand over the last evaluation."""
        self._hand_over(args, state, control)


def _stop(control: Any) -> None:
    control.should_training_stop = True
    control.should_evaluate = control.should_save = control.should_log = False


def _merged(name: str, values: list[float]) -> float:
    return float(values[-1]) if name == "train/lr" else float(sum(values) / len(values))


def _scale(optimizer: Any, scheduler: Any, factor: float) -> None:
    """Scale the learning rates that a checkpoint restored."""
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] *= factor
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]


def _check_arguments(args: Any, context: Context) -> None:
    """Refuse arguments with which a resumed trainer would not continue as it began."""
    evaluates, saves = str(args.eval_strategy.value), str(args.save_strategy.value)
    own = context.directory.resolve()
    problems = {
        "output_dir": not Path(args.output_dir).resolve().is_relative_to(own)
        and "its checkpoints are removed once they are read, so it must be below the run's own "
        "directory; leave it out of training_arguments",
        "eval_strategy": evaluates == "no" and "the run would have no report; write 'epoch'",
        "save_strategy": saves not in ("no", evaluates)
        and f"a state is saved at an evaluation; write {evaluates!r}, or 'no' to keep no state",
        "save_steps": saves == evaluates == "steps"
        and args.save_steps % args.eval_steps != 0
        and f"a state is saved at an evaluation; write a multiple of eval_steps={args.eval_steps}",
        "save_only_model": args.save_only_model and "a run resumes with its optimizer; remove it",
        "ignore_data_skip": args.ignore_data_skip
        and "a resumed run would train on other samples; remove it",
        "load_best_model_at_end": args.load_best_model_at_end
        and "the run keeps its best checkpoint itself; remove it",
        "eval_on_start": args.eval_on_start
        and "each evaluation is a report, and none comes before the first step; remove it",
        "auto_find_batch_size": args.auto_find_batch_size
        and "trials with other batch sizes do not compare; write per_device_train_batch_size",
    }
    for name, problem in problems.items():
        if problem:
            value = getattr(args, name)
            raise ConfigError(
                f"TrainingArguments has {name}={getattr(value, 'value', value)!r}; {problem}",
                key="task",
            )


def _check_reports(args: Any, state: Any, expected: int) -> None:
    """Refuse a trainer that evaluates more or less often than the budget has reports."""
    if args.eval_strategy == "epoch":
        planned = sum(epoch >= args.eval_delay for epoch in range(1, state.num_train_epochs + 1))
        written = "num_train_epochs"
    else:
        every, last = int(state.eval_steps), state.max_steps
        steps = {*range(every, last + 1, every), last}
        planned = sum(step >= args.eval_delay for step in steps)
        written = "max_steps and eval_steps"
    if planned != expected:
        raise ConfigError(
            f"the budget has {expected} epochs, and the trainer is to evaluate {planned} times; "
            f"each evaluation is a report, and counts as an epoch of the budget; change {written} "
            "of TrainingArguments, or budget.epochs",
            key="budget.epochs",
        )


def _checkpoint_of(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step}"


def _read_checkpoint(args: Any, state: Any) -> dict[str, Any]:
    """Return the files of the checkpoint that the trainer has just saved."""
    saved = _checkpoint_of(Path(args.output_dir), state.global_step)
    files = {
        path.relative_to(saved).as_posix(): _content(path)
        for path in sorted(saved.rglob("*"))
        if path.is_file() and path.name != _NOT_STORED
    }
    return {"step": state.global_step, "learning_rate": args.learning_rate, "files": files}


def _content(path: Path) -> Tensor:
    # frombuffer takes no empty buffer
    content = bytearray(path.read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()


def _write_checkpoint(restored: Mapping[str, Any], directory: Path) -> str:
    """Write the files of a state for the trainer to resume from; return their directory."""
    try:
        target = _checkpoint_of(directory, int(restored["step"]))
        own: Mapping[str, Any] = restored.get(PER_RANK, {})
        files: dict[str, Tensor] = {**restored["files"], **own.get("files", {})}
        for name, content in files.items():
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts:
                raise ValueError(f"{name!r} leads out of its directory")
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointError(
            f"the state is not that of a Hugging Face trainer ({problem}); continue with the "
            "loop that wrote it"
        ) from problem
    return str(target)


def _remove_checkpoints(directory: Path) -> None:
    for found in directory.glob("checkpoint-*"):
        shutil.rmtree(found, ignore_errors=True)
