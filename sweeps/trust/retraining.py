"""The configurations with which a trial trained, for `sweep train --trial` and `sweep reproduce`.

What must not live here: training, and comparing what was trained.
"""

from __future__ import annotations

from typing import NamedTuple

from sweeps.errors import UserError
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import TRIAL_CONFIG
from sweeps.recording.trial_config import read_config
from sweeps.spec.trial_run import with_accumulation
from sweeps.view.sweep_view import SweepView
from trainable.config import TrialConfig
from trainable.store.notes import read_earlier


class Stage(NamedTuple):
    """A part of a trial with one configuration.

    Attributes:
        config: The configuration.
        until: The step at which it ends; None: at the trial's end.
    """

    config: TrialConfig
    until: int | None


def check_single(view: SweepView, record: TrialSummary) -> None:
    """Check that one run can train a trial."""
    if record.lineage:
        last = record.lineage[-1]
        raise UserError(
            f"trial {record.number} copied the weights of trial {last.donor} after "
            f"{view.spec.budget.report_word} {last.epoch}, as members of a population do; no "
            "single run trains it; train a trial that copied none, or use its checkpoint"
        )


def last_config(view: SweepView, record: TrialSummary) -> TrialConfig:
    """Return the configuration that a trial trained with last.

    A trial that never started has none; then it is the one that it would start with.
    """
    try:
        config = read_config(view.paths.trial(record.number) / TRIAL_CONFIG)
    except FileNotFoundError:
        config = view.spec.trial_config(record.seed, record.params)
    except ValueError as error:
        raise UserError(
            f"the configuration of trial {record.number} cannot be read ({error}); only with the "
            "same configuration the training is the same; restore the file from a backup"
        ) from None
    return with_accumulation(config, record.accumulation)


def stages(view: SweepView, record: TrialSummary) -> list[Stage]:
    """Return the parts of a trial, one for each configuration that it had."""
    earlier = read_earlier(view.paths.trial(record.number))
    found = [Stage(one.config, one.until) for one in earlier]
    return [*found, Stage(last_config(view, record), None)]


def lost_stage(record: TrialSummary, found: list[Stage]) -> str | None:
    """Return a sentence if a trial had another configuration at first that was not kept."""
    if record.accumulation is None:
        return None
    if any(one.config.train.accumulation < record.accumulation for one in found):
        return None
    return (
        f"trial {record.number} ran out of memory, and trained on with {record.accumulation} "
        "micro-batches for each step; this run has them from its beginning"
    )
