"""Record the value of a configuration over its seeds on the run of its first seed.

The runs of the further seeds are shown below that run. What must not live here: the tags of single
trials (`tags`), and what the value is (`ledger.over_seeds`).
"""

from __future__ import annotations

from sweeps.ledger.trials import TrialRecord
from tracking.recorder import Recorder
from trainable.store.metrics_file import Row


def record_configuration(first: TrialRecord, recorder: Recorder) -> None:
    """Record the value of a configuration, its standard error and from how many seeds it is.

    Tags have the state so far. The metrics are recorded once all seeds are complete, at the step
    of the first seed's last report.
    """
    seeds = first.over_seeds
    if seeds is None:
        return
    figures = {
        "over_seeds.value": first.value,
        "over_seeds.standard_error": seeds.standard_error,
    }
    known = {key: one for key, one in figures.items() if one is not None}
    tags = {
        "over_seeds.state": seeds.state,
        "over_seeds.num_seeds": f"{seeds.num_values} of {seeds.seeds}",
        **{key: repr(one) for key, one in known.items()},
    }
    recorder.tag(first.number, tags)
    if seeds.state == "complete":
        metrics = {key.replace(".", "/"): one for key, one in known.items()}
        recorder.log(first.number, [Row(first.step, first.ended_ms or 0, metrics)])
