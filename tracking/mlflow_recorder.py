"""The recorder that ends in MLflow: verbs that append to the outbox, one thread that drains it.

No verb waits for the server, and no error of the server reaches a caller. What must not live here:
how a record becomes calls (see `tracking.delivery`) and mlflow itself (see
`tracking.mlflow_server`).
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tracking.delivery import Delivery, Server, logger
from tracking.limits import MAX_PARAM_VALUE, MAX_TAG_VALUE, clean_key, clip_text
from tracking.outbox import SWEEP, Kind, Outbox
from tracking.outbox_status import read_outbox
from tracking.points import Row
from tracking.provenance import redact, redact_value
from tracking.recorder import Status

_LINGER_SECONDS = 0.5
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 30.0
_SWEEP_ID = re.compile(r"[\w.-]{1,200}")


class MlflowRecorder:
    """Records a sweep as one MLflow run, and each trial as one child of it.

    Args:
        uri: An MLflow tracking URI, such as `sqlite:///runs/mlflow.db` or a server's address.
        artifact_root: Where a new experiment keeps artifacts; None leaves that to the server.
        experiment: The experiment's name; created when missing, restored when deleted.
        sweep_id: The sweep's identity, by which its runs are found again.
        outbox: Directory of the durable queue.
        tags: Tags of the sweep's run.
        params: Parameters of the sweep's run.
        inherited: Tags of the driver, of which trials' runs are given some; default `tags`.
        experiment_tags: Tags of the experiment.
        name: The name of the sweep's run; default the experiment's.
        announce: Open the sweep's run and tag the experiment; False only delivers what waits.
        offline: Queue only: no server is asked, `sync` delivers later.
        open_server: Builds the server in the draining thread; for tests.

    Raises:
        ValueError: The sweep id cannot be searched for.
        OutboxError: The outbox cannot be written.
    """

    def __init__(
        self,
        uri: str,
        artifact_root: Path | None,
        experiment: str,
        sweep_id: str,
        outbox: Path,
        tags: Mapping[str, str],
        params: Mapping[str, object],
        *,
        inherited: Mapping[str, str] | None = None,
        experiment_tags: Mapping[str, str] | None = None,
        name: str | None = None,
        announce: bool = True,
        offline: bool = False,
        open_server: Callable[[], Server] | None = None,
    ) -> None:
        if not _SWEEP_ID.fullmatch(sweep_id):
            raise ValueError(
                f"sweep_id is {sweep_id!r}; it must be 1 to 200 letters, digits, '_', '-' or '.'; "
                "use uuid4().hex"
            )
        self._outbox = Outbox(outbox)
        if self._outbox.moved_aside is not None:
            logger.warning(
                "the outbox was damaged and is now %s; a new one is used", self._outbox.moved_aside
            )

        def open_mlflow() -> Server:
            from tracking.mlflow_server import MlflowServer

            return MlflowServer(uri, artifact_root, experiment, sweep_id)

        self._open_server = open_server or open_mlflow
        self._sweep_id = sweep_id
        self._name = name or experiment
        self._inherited = _clean_tags(tags if inherited is None else inherited)
        self._work = threading.Event()
        self._closing = threading.Event()
        self._awaited = threading.Event()
        self._ready = threading.Event()
        self._deadline = float("inf")
        self._is_down = False
        self._heard = time.monotonic()  # when the server last did what it was asked
        if announce:
            self._start(SWEEP, params, tags)
            if experiment_tags:
                self._append(None, "experiment", experiment_tags)
        self._thread: threading.Thread | None = None
        if not offline:
            self._thread = threading.Thread(target=self._run, name="tracking-outbox", daemon=True)
            self._thread.start()

    # -- the five verbs ---------------------------------------------------------------------------

    def start(self, trial: int, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Open a trial's run, or open it again."""
        self._start(trial, params, tags)

    def log(self, trial: int, rows: Iterable[Row]) -> None:
        """Queue metrics; steps that were recorded before are dropped."""
        if self._outbox.append_rows(trial, rows):
            self._work.set()

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Queue tags."""
        if tags:
            self._append(trial, "tags", _clean_tags(tags))

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        """Copy the file beside the queue and queue its upload."""
        self._outbox.append_artifact(_number(trial), path, name)
        self._work.set()

    def finish(self, trial: int | None, status: Status, tags: Mapping[str, str]) -> None:
        """Queue the terminal status, with the present time as the run's end."""
        self._append(
            trial, "finish", {"status": status, "time": _now_ms(), "tags": _clean_tags(tags)}
        )

    # -- what is known ----------------------------------------------------------------------------

    @property
    def experiment_id(self) -> str | None:
        """The experiment's id, once the server was reached (in this process or an earlier one)."""
        return self._outbox.experiment_id

    @property
    def parent_run_id(self) -> str | None:
        """The id of the sweep's run, once it exists."""
        return self._outbox.run_id(SWEEP)

    def run_id(self, trial: int) -> str | None:
        """The id of a trial's run, once it exists."""
        return self._outbox.run_id(trial)

    def pending(self) -> int:
        """How many records wait."""
        return self._outbox.pending

    @property
    def silence(self) -> float:
        """For how many seconds the server has done nothing that it was asked; 0 while it does,
        infinite when none is asked.
        """
        if self._thread is None:
            return math.inf
        return time.monotonic() - self._heard if self._is_down else 0.0

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the server was reached and the sweep's run exists; False if it did not."""
        return self._ready.wait(timeout)

    def flush(self, timeout: float) -> int:
        """Wait until nothing is left, for at most `timeout` seconds; returns what still waits."""
        deadline = time.monotonic() + timeout
        self._work.set()
        self._awaited.set()
        while (
            (left := self._outbox.pending)
            and time.monotonic() < deadline
            and self._thread is not None
            and self._thread.is_alive()
        ):
            time.sleep(0.01)
        if not self._closing.is_set():
            self._awaited.clear()
        return left

    def close(self, timeout: float) -> int:
        """Deliver for at most `timeout` seconds, then stop.

        Returns:
            How many records still wait; `sync` or the next recorder on the outbox delivers them.
        """
        deadline = time.monotonic() + max(timeout, 0.0)
        self._deadline = min(self._deadline, deadline)
        self._closing.set()
        self._awaited.set()
        self._work.set()
        if self._thread is None:
            self._outbox.close()
            return self._outbox.pending
        # A request under way cannot be cut off; its thread ends, and closes the file, when the
        # answer is there.
        self._thread.join(max(deadline - time.monotonic(), 0.0) + 0.05)
        return self._outbox.pending

    # -- the draining thread ----------------------------------------------------------------------

    def _run(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        delivery: Delivery | None = None
        try:
            while not self._is_over():
                try:
                    if not self._outbox.own():
                        self._pause(
                            _FIRST_DELAY_SECONDS
                        )  # another process delivers, or has not quite ended
                        continue
                    if delivery is None:
                        delivery = Delivery(
                            self._outbox,
                            self._open_server(),
                            sweep_id=self._sweep_id,
                            name=self._name,
                            tags=self._inherited,
                        )
                    delivery.connect()
                    self._work.clear()
                    delivery.drain(self._is_over_between_batches)
                except Exception as error:
                    # Whatever went wrong between here and the server's disk, the records are safe
                    # in the outbox and the sweep goes on: the only right thing is to try again
                    # later.
                    if delivery is not None:
                        delivery.disconnect()
                    level = logging.DEBUG if self._is_down else logging.WARNING
                    logger.log(
                        level,
                        "%d records wait, the tracking server does not answer (%s: %s)",
                        self._outbox.pending,
                        type(error).__name__,
                        redact(str(error)).strip().split("\n")[0][:300],
                    )
                    self._is_down = True
                    self._pause(delay)
                    delay = min(2 * delay, _MAX_DELAY_SECONDS)
                    continue
                if self._is_down:
                    logger.info("the tracking server answers again")
                self._is_down, delay = False, _FIRST_DELAY_SECONDS
                if self.parent_run_id is not None:
                    self._ready.set()
                if self._closing.is_set():
                    continue
                self._work.wait()
                # Let more come together, unless somebody waits: a request costs more than a point.
                self._awaited.wait(_LINGER_SECONDS)
        finally:
            self._outbox.close()

    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline or (
            self._closing.is_set() and not self._outbox.pending
        )

    def _is_over_between_batches(self) -> bool:
        self._heard = time.monotonic()
        return self._is_over()

    def _pause(self, seconds: float) -> None:
        """Wait, but while somebody waits for the delivery no longer than makes sense."""
        if not self._awaited.wait(seconds):
            return
        time.sleep(max(min(_FIRST_DELAY_SECONDS, self._deadline - time.monotonic()), 0.0))

    def _start(self, trial: int, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        texts = {name: redact_value(name, str(value)) for name, value in params.items()}
        payload = {
            "params": {
                clean_key(name): clip_text(text, MAX_PARAM_VALUE) for name, text in texts.items()
            },
            "tags": _clean_tags(tags),
            "time": _now_ms(),
            "step": self._outbox.last_step(trial),
        }
        self._outbox.append(trial, "start", payload)
        self._work.set()

    def _append(self, trial: int | None, kind: Kind, payload: Mapping[str, object]) -> None:
        self._outbox.append(_number(trial), kind, payload)
        self._work.set()


def sync(
    uri: str,
    artifact_root: Path | None,
    experiment: str,
    sweep_id: str,
    outbox: Path,
    *,
    patience: float,
) -> int:
    """Deliver what an earlier process left behind, without starting or changing anything else.

    Args:
        patience: Seconds without a single delivery after which it gives up; it takes as long as
            it takes otherwise.

    Returns:
        How many records still wait. With nothing to deliver mlflow is not even imported.
    """
    left = read_outbox(outbox).pending
    if not left:
        return 0
    recorder = MlflowRecorder(
        uri, artifact_root, experiment, sweep_id, outbox, {}, {}, announce=False
    )
    while 0 < (now := recorder.flush(patience)) < left:
        left = now
    return recorder.close(0.0)


def _number(trial: int | None) -> int:
    return SWEEP if trial is None else trial


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {
        clean_key(name): clip_text(redact_value(name, str(value)), MAX_TAG_VALUE)
        for name, value in tags.items()
    }
