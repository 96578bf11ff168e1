"""`TuneTrial`: a Tune class Trainable, whose trials train in processes of their own.

The actor stays for the next trial, because a new one takes seconds. Each attempt is a fresh
process (`attempt_process.py`), which with `reuse` trains the next trial, too. Ray persists no
state of a trial. A run that fails *reports* its failure instead of raising it. So the actor can
serve the next trial, and Ray retries only trials of lost workers. What must not live here:
training (`trial_run.py`), recording, or any knowledge of ledgers and tracking.
"""

from __future__ import annotations

import os
from typing import Any

from trainable.adapters.ray_ranks import exit_with_raylet, nodes_of_trial
from trainable.errors import NodeLeaves, RankLost
from trainable.process_start import without_collection
from trainable.processes import trial_run
from trainable.processes.attempt_process import AttemptProcess, template_command
from trainable.processes.trial_run import OBJECTIVE as OBJECTIVE
from trainable.processes.trial_run import OBJECTIVES as OBJECTIVES
from trainable.user_code.task_import import prepare_process

with without_collection():
    from ray import tune
    from ray.tune.result import DONE, SHOULD_CHECKPOINT

    from trainable.adapters.ray_ranks import OtherRanks, RankProcess


class TuneTrial(tune.Trainable):
    """One trial as a Ray actor.

    Its Tune configuration is a dict with these keys:

    - `number`: the trial's number.
    - `directory`: the trial's directory.
    - `params`: the suggested values by key.
    - `checkpoints`: the address of its checkpoints; None: they are in `directory`.
    - `config`: a dumped `TrialConfig`.
    - `pause_at_epoch`: the epoch after which the trial saves and pauses, or None.
    - `threads`: the number of CPU threads.
    - `drain`, `stop`: files. When one exists, the trial saves and ends after its next step; it
      may be resumed after `drain`, and not after `stop`.
    - `leaves`: what the name of a file begins with that ends with the id of a node. When one
      exists for a node of the trial, `step` raises `NodeLeaves` after the trial has saved.
    - `halve_batch`: whether a trial that runs out of memory resumes with smaller micro-batches.
    - `report_buffer_seconds`: how long reports are collected before Tune receives them; 0 where a
      stopping rule decides after each one.
    - `heartbeat`: the file to which the run's progress is written.
    - `rank_timeout`: for how many seconds a rank waits for the others in a step.
    - `reuse`: whether its process trains the next trial, too.

    A trial of several ranks has one bundle of resources for each; the first rank is on this one.
    """

    rank_process: type[RankProcess] = RankProcess
    """The class of the actors that train the other ranks."""
    template_command = staticmethod(template_command)
    """Returns the command that starts the template of the trials' processes."""
    before_trial: str | None = None
    """A function without arguments that a trial's process calls first, `module:name`."""

    _process: AttemptProcess | None = None
    _waits = False
    """Whether the process has trained a trial, and waits for the next one."""
    _others: OtherRanks | None = None
    """The processes of the other ranks, which are kept for the next trial."""

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare for a trial; its process begins with the first `step`.

        Tune may set up an actor and then give the trial to a reused one. If both opened the run,
        only the later one could write.
        """
        exit_with_raylet()
        prepare_process()
        resources = self.trial_resources
        bundles = [{}] if resources is None else resources.bundles
        nodes = nodes_of_trial(len(bundles)) if "leaves" in config else set()
        self._leaves = [config["leaves"] + node for node in nodes]
        self._config = config | {"bundles": bundles, "leaves": self._leaves}
        self._lost: RankLost | None = None
        if self._process is None:
            self._process = AttemptProcess(self.template_command(), self.before_trial)

    def step(self) -> dict[str, Any]:
        """Train up to the next report; the first call opens the run at its newest checkpoint."""
        assert self._process is not None
        if not self._process.is_running:
            self._begin()
        elif self._waits:
            self._begin_others()
            self._process.send(self._config)
        self._waits = False
        self._process.send(trial_run.STEP)
        result = self._receive()
        if result.get(DONE):
            self._end_trial()
        if result.get("ending") == trial_run.LEFT_NODE:
            if self._others is not None:
                self._others.close()
            raise NodeLeaves(NodeLeaves.text)  # so that Tune places the trial again
        result[SHOULD_CHECKPOINT] = trial_run.POINTER in result
        result.pop(trial_run.POINTER, None)
        return result

    def _begin(self) -> None:
        assert self._process is not None
        self._begin_others()
        self._process.begin("trainable.processes.trial_run:train", self._config)

    def _begin_others(self) -> None:
        if len(self._config["bundles"]) > 1:
            self._others = self._others or OtherRanks(self.rank_process)
            self._others.begin(self._config)

    def _receive(self) -> dict[str, Any]:
        """Return the next result of the trial's process, and answer its calls before."""
        assert self._process is not None
        while True:
            kind, *message = self._process.receive()
            if kind == trial_run.RESULT:
                result: dict[str, Any] = message[0]
                return result
            if kind == trial_run.RESTART:
                self._process.end()
                self._config |= message[0]
                self._begin()
                self._process.send(trial_run.STEP)
                continue
            if kind == trial_run.LOST:
                self._process.end()
                if self._others is not None:
                    self._others.close()
                raise self._lost or RankLost(message[0])
            self._process.send(self._answer(*message))

    def _answer(self, method: str, *arguments: Any) -> Any:
        """Call a method of the other ranks for the trial's process."""
        assert self._others is not None
        try:
            answer = getattr(self._others, method)(*arguments)
        except RankLost as error:
            answer = error
        # What Ray raises otherwise, such as a node's error, is a failure of the trial.
        except Exception as error:
            return RuntimeError(f"{type(error).__name__}: {error}")
        if isinstance(answer, RankLost):  # Ray's id of the lost actor stays here
            if self._lost is None or hasattr(answer, "actor_id"):
                self._lost = answer
            if method == "cause":
                self._others.close()  # else the first rank would wait for them as it closes
                return str(answer)
            return RankLost(str(answer))
        return answer

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: the run commits its own generations; Ray only counts that there is one."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing: the run opens its newest generation."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Reuse this actor for another trial."""
        self.cleanup()
        self.setup(new_config)
        if any(map(os.path.exists, self._leaves)):
            raise NodeLeaves(NodeLeaves.text)
        return True

    def cleanup(self) -> None:
        """Close the run, if it has not ended, and wait until its process has ended."""
        if self._process is not None and self._process.is_running and not self._waits:
            self._process.send(trial_run.CLOSE)
            self._receive()
            self._end_trial()

    def _end_trial(self) -> None:
        """Wait until the process has ended, unless it is to train the next trial."""
        assert self._process is not None
        self._waits = self._config.get("reuse", False)
        if not self._waits:
            self._process.end()
