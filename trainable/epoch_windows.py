"""The windows of the present epoch: where a run stands in them, and whether all of them came.

What must not live here: how samples become windows (`data.py`), and what is done with one
(`loop.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainable.data import Source
from trainable.epoch_start import EpochStart
from trainable.errors import TaskError
from trainable.rank_checks import check_orders_alike, order_of
from trainable.ranks import Ranks
from trainable.task import Batch
from trainable.train_state import TrainState


class EpochWindows:
    """The windows of an epoch, opened once: an evaluation in between leaves them as they are.

    Args:
        source: Windows to train on.
        state: Its progress has the position.
        ranks: This rank of the trial.
    """

    def __init__(self, source: Source, state: TrainState, ranks: Ranks) -> None:
        self._source, self._state, self._ranks = source, state, ranks
        self.most: int | None = None
        """Windows of an epoch that a rehearsal cuts short; None: all."""
        self._windows: Iterator[Iterable[Batch]] | None = None
        self._start = state.epoch_start or EpochStart(source)
        self._remap_position(source.plan.batch_size)

    @property
    def are_open(self) -> bool:
        """Whether the epoch has begun in this process."""
        return self._windows is not None

    def open(self) -> None:
        """Begin the epoch, or resume within it.

        Raises:
            TaskError: The ranks' samplers choose other samples, or there are none.
            CheckpointError: There are fewer samples than when the epoch began.
        """
        progress = self._state.progress
        source, epoch = self._source, progress.epoch
        with self._ranks.together() as message:
            if progress.epoch_samples:
                source.resume(epoch, progress.epoch_samples)
            elif progress.window == 0:  # else an earlier version saved the state
                progress.epoch_samples = source.begin(epoch)
                self._start.take()
            if self._ranks.size > 1:
                message.own = order_of(source.plan, epoch, progress.epoch_samples)
        if self._ranks.size > 1:
            check_orders_alike(message.of_ranks, epoch)
        self._windows = self._start.windows(epoch, progress.window)

    def next(self) -> Iterable[Batch] | None:
        """Return the next window, None after the last one.

        With several ranks, an error of its data is raised by its micro-batches instead: within the
        exchange, on every rank.
        """
        assert self._windows is not None
        try:
            return next(self._windows, None)
        except Exception as error:
            if self._ranks.size == 1:
                raise
            return _raising(error)

    @property
    def are_over(self) -> bool:
        """Whether the epoch's last window is trained; a stream does not say."""
        progress = self._state.progress
        if self.most is not None and progress.window >= self.most:
            return True
        return 0 < self._source.plan.num_windows(progress.epoch) <= progress.window

    def end(self) -> None:
        """End the epoch.

        Raises:
            TaskError: It ended before its last window.
        """
        assert self._windows is not None
        progress = self._state.progress
        is_cut = self.most is not None and progress.window >= self.most
        for _ in () if is_cut else self._windows:  # a loader's processes must hear of the end
            break
        self._windows = None
        self._start.forget()
        promised = self._source.plan.num_windows(progress.epoch)
        if progress.window < promised and not is_cut:
            raise TaskError(
                f"train: {progress.window} of {promised} windows of epoch {progress.epoch + 1} "
                "came; an epoch has as many windows as len(dataset) promises; return a sample for "
                "every index below len(dataset)"
            )

    def _remap_position(self, batch_size: int) -> None:
        """Convert the position in the epoch after a change of `batch_size`.

        No sample is left out; those of a partly trained window are trained again.
        """
        progress = self._state.progress
        before = progress.batch_size or batch_size
        progress.window = progress.window * before // batch_size
        progress.batch_size = batch_size


def _raising(error: Exception) -> Iterator[Batch]:
    raise error
    yield
