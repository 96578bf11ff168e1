"""The seeds of one configuration: which trials they are, how it stands, and what its value is.

With `repeats`, the search suggests a configuration once. Its trial is the first seed, and further
trials with the role `repeat` train it with the other seeds. All views take the value of the
configuration from its first trial, as `with_seeds` returns it. What must not live here: the
arithmetic (`statistics.over_seeds`), storing trials (`ledger`), and starting them (`search`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sweeps.errors import SearchChanged
from sweeps.formatting import format_number
from sweeps.spec.yaml_scalars import write_flow
from sweeps.statistics.over_seeds import SeedValue, combine, standard_error

if TYPE_CHECKING:
    from sweeps.ledger.trials import TrialSummary
    from sweeps.spec.spec import SweepSpec


class Repeats(NamedTuple):
    """The section `repeats` of a sweep, as its ledger keeps it."""

    seeds: int
    """With how many seeds each configuration trains, at least 2."""
    value: SeedValue
    """What the value of a configuration is."""
    word: str = "seed"
    """What one training of a configuration is called: `seed` or `fold`."""


def repeats_of(spec: SweepSpec) -> Repeats | None:
    """Return what the ledger of a new sweep keeps of `repeats`; None: one seed each."""
    repeats = spec.repeats
    if repeats.seeds == 1:
        return None
    return Repeats(repeats.seeds, repeats.value, repeats.word)


def check_repeats(before: SweepSpec, after: SweepSpec) -> None:
    """Refuse another section `repeats` in an edited spec."""
    if before.repeats != after.repeats:
        word = before.repeats.word
        raise SearchChanged(
            f"repeats is {_repeats(before)} in this sweep and cannot become {_repeats(after)}: "
            f"its trials have been trained and compared with their {word}s, and other {word}s "
            "would not be common to all configurations; start a new sweep with "
            "`sweep run FILE --name NAME`, or train the leaders with more seeds by "
            "`sweep confirm`"
        )


def _repeats(spec: SweepSpec) -> str:
    repeats = spec.repeats
    plain = repeats == type(repeats)(seeds=repeats.seeds)
    return (
        str(repeats.seeds)
        if plain
        else write_flow(repeats.model_dump(mode="json", exclude_none=True))
    )


class OverSeeds(NamedTuple):
    """A configuration with its seeds so far."""

    state: str
    """`complete` once all of its seeds are; `pruned` or `failed` if one of them is and none
    trains; `running` until then."""
    seeds: int
    """How many seeds it gets."""
    trials: tuple[int, ...]
    """The trials of its seeds so far, the first seed first."""
    values: tuple[float | None, ...]
    """The value of the (first) metric of each of these; None without one."""
    own: tuple[float, ...]
    """The value of each reported metric of the first seed alone."""
    standard_error: float | None
    """That of the configuration's value; None for fewer than two values."""
    value: SeedValue
    """What the value of the configuration is."""
    word: str = "seed"
    """What one of its trainings is called: `seed` or `fold`."""

    @property
    def num_values(self) -> int:
        """From how many seeds the configuration's value is."""
        return sum(value is not None for value in self.values)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "state": self.state,
            "seeds": self.seeds,
            "value": self.value,
            "standard_error": self.standard_error,
            "num_values": self.num_values,
            "trials": list(self.trials),
            "values": list(self.values),
            "weights_of": self.typical(),
        }

    def in_words(self) -> str:
        """Return from how many seeds the value is, and its standard error."""
        of = f" of {self.seeds}" * (self.num_values < self.seeds)
        seeds = f"{self.num_values}{of} {self.word}s"
        if self.standard_error is None:
            return seeds
        return f"{self.value} of {seeds}, standard error {format_number(self.standard_error)}"

    def typical(self) -> int:
        """Return the trial whose checkpoint stands for the configuration.

        Its value is the closest to the configuration's; of equal ones, that of the earlier seed.
        The best seed would look better than the configuration is.
        """
        known = [
            (value, number)
            for value, number in zip(self.values, self.trials, strict=True)
            if value is not None
        ]
        if not known:
            return self.trials[0]
        middle = combine([value for value, _ in known], self.value)
        return min(known, key=lambda one: abs(one[0] - middle))[1]


Seed = TypeVar("Seed", bound="TrialSummary")


def configurations(trials: Iterable[Seed]) -> dict[int, list[Seed]]:
    """Return the seeds of each configuration, the first one first, by the number of that one."""
    found: dict[int, list[Seed]] = {}
    for trial in trials:
        if trial.role == "search":
            found.setdefault(trial.number, []).append(trial)
        elif trial.role == "repeat" and trial.origin is not None:
            found.setdefault(trial.origin, []).append(trial)
    for seeds in found.values():
        seeds.sort(key=lambda trial: trial.seed_index or 0)
    return found


def state_of(states: Sequence[str], seeds: int) -> str:
    """Return how a configuration stands; see `OverSeeds.state`."""
    if any(state in ("waiting", "running") for state in states):
        return "running"
    for state in ("failed", "pruned"):
        if state in states:
            return state
    return "complete" if len(states) >= seeds else "running"


def missing_seeds(states: Sequence[str], seeds: int) -> int:
    """Return how many further seeds of a configuration still have to be started, now or later.

    None, once a seed was stopped or has failed: such a configuration is not the best.
    """
    if "failed" in states or "pruned" in states:
        return 0
    return max(0, seeds - len(states))


def next_seed(trials: Iterable[Seed], seeds: int) -> tuple[int, int] | None:
    """Return the configuration that gets its next seed now, and the index of that seed.

    A further seed starts once the first one has trained to its end, so that early stopping saves
    all seeds of a bad configuration but one. The rest may then run in parallel.
    """
    for number, mine in configurations(trials).items():
        states = [trial.state for trial in mine]
        if states[0] == "complete" and missing_seeds(states, seeds):
            return number, len(mine)
    return None


def num_missing(trials: Iterable[TrialSummary], seeds: int) -> int:
    """Return how many trials the configurations so far still get, if nothing stops one of them."""
    return sum(
        missing_seeds([trial.state for trial in mine], seeds)
        for mine in configurations(trials).values()
    )


def origins(trials: Iterable[TrialSummary]) -> dict[int, int]:
    """Return the configuration of each trial that repeats one, by the trial's number."""
    return {t.number: t.origin for t in trials if t.role == "repeat" and t.origin is not None}


def weights_of(trial: Seed, trials: Sequence[Seed]) -> Seed:
    """Return the trial whose checkpoint stands for a configuration; see `OverSeeds.typical`."""
    return trial if trial.over_seeds is None else trials[trial.over_seeds.typical()]


def alone(trial: Seed) -> Seed:
    """Return a trial with the value of its own training, without its configuration."""
    if trial.over_seeds is None:
        return trial
    value, *rest = trial.over_seeds.own or (None,)
    split = len(trial.others)
    return dataclasses.replace(
        trial,
        value=value,
        others=tuple(rest[:split]),
        limited=tuple(rest[split:]),
        over_seeds=None,
    )


def with_seeds(trials: Sequence[Seed], repeats: Repeats | None) -> list[Seed]:
    """Return the trials; the first seed of each configuration has the configuration's value."""
    if repeats is None:
        return list(trials)
    found = list(trials)
    for number, mine in configurations(trials).items():
        found[number] = dataclasses.replace(found[number], **_combined(mine, repeats))
    return found


def _combined(mine: Sequence[TrialSummary], repeats: Repeats) -> Mapping[str, Any]:
    every = [trial.judged for trial in mine if trial.values]
    each = [combine(metric, repeats.value) for metric in zip(*every, strict=True)]
    firsts = [values[0] for values in every]
    num_metrics = max((len(trial.values) for trial in mine), default=0)
    return {
        "value": each[0] if each else None,
        "others": tuple(each[1:num_metrics]),
        "limited": tuple(each[num_metrics:]),
        "over_seeds": OverSeeds(
            state=state_of([trial.state for trial in mine], repeats.seeds),
            seeds=repeats.seeds,
            trials=tuple(trial.number for trial in mine),
            values=tuple(trial.values[0] if trial.values else None for trial in mine),
            own=mine[0].judged,
            standard_error=standard_error(firsts, repeats.value),
            value=repeats.value,
            word=repeats.word,
        ),
    }
