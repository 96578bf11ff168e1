"""A configuration's value over seeds is shown wherever a trial's value is."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest

from sweeps.cli import render
from sweeps.cli.plain_console import PlainConsole
from sweeps.cli.run_console import PlainLines
from sweeps.errors import SearchChanged, SpecError
from sweeps.ledger.over_seeds import check_repeats
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.warm_start import collect_warm_start
from sweeps.reconcile.stop_criteria import active_stop_criterion
from sweeps.recording.notifications import Notifier
from sweeps.recording.tags import end_tags, record_configuration
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.trial_run import TrialSeed
from sweeps.statistics.over_seeds import combine, standard_error
from sweeps.trust.audit.read import audit_sweep
from sweeps.trust.confirm import training_digest
from sweeps.trust.findings import find
from sweeps.view.observer import TrialStart
from sweeps.view.sweep_progress import SweepProgress, best_with_value
from sweeps.view.tables import trials_frame
from tests.memory_recorder import MemoryRecorder
from tests.unit.sweeps.sweep_factory import MadeSweep


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    """Return three configurations: 0 was lucky once, 3 is the best, 6 was stopped."""
    sweep = MadeSweep(tmp_path, more="repeats: 3")
    sweep.add("complete", 0.5, 0.1)
    sweep.repeat(0, "complete", 0.9)
    sweep.repeat(0, "complete", 0.8)
    sweep.add("complete", 0.3)
    sweep.repeat(3, "complete", 0.4)
    sweep.repeat(3, "complete", 0.2, 0.21)
    sweep.add("pruned", 0.05)
    return sweep


def test_best_configuration_is_that_with_the_best_mean(made: MadeSweep) -> None:
    view = made.view
    [best] = view.front()
    assert best.number == 3
    assert best.value == pytest.approx(0.3)
    assert best.over_seeds.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert best.own_value == 0.3
    assert [row["value"] for row in view.rows()][:3] == [pytest.approx(0.6), 0.9, 0.8]
    assert view.rows()[0]["over_seeds"]["values"] == [0.1, 0.9, 0.8]
    assert "mean of 3 seeds" in find(view).sentences[0].sentence


def test_weights_are_those_of_the_typical_seed(made: MadeSweep) -> None:
    view = made.view
    assert view.select_weights(None).number == 3  # 0.3 is the mean itself
    assert view.weights_of(view.record(0)).number == 2  # 0.8 is closer to 0.6 than 0.9
    assert view.select_weights(0).number == 0
    assert view.weights_of(view.record(5)).number == 5


def test_folds_are_called_folds_wherever_a_user_reads_of_them(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="repeats: {folds: 3}")
    for lr, values in ((0.01, (0.3, 0.4, 0.2)), (0.02, (0.5, 0.4, 0.6))):
        first = made.add("complete", values[0], params={"train.optimizer.lr": lr})
        for value in values[1:]:
            made.repeat(first, "complete", value)
    made.add("failed")
    view = made.view
    shown = io.StringIO()
    console = PlainConsole(file=shown, width=200)
    console.print(render.status(view.status(), view, find(view)))
    console.print(render.trials(view.rows(), view.spec))
    for number in (0, 1):
        console.print(render.trial(view.details(number), view.spec))
    console.print(render.best(view.best() | {"best_checkpoint": "c"}, view.spec, [], None))
    lines = PlainLines(console, SweepProgress(made.spec))
    lines.started(TrialStart(5, {}, 1, role="repeat", origin=4))
    text = shown.getvalue()
    cards = {card.id: card.evidence for card in audit_sweep(view).cards}
    for said in (
        "3 configurations of 3 folds: 2 complete, 1 failed",
        "mean of 3 folds, standard error",
        "it is that of the fold whose value is closest to this one",
        "trial 5 started, a further fold of trial 4",
    ):
        assert said in text
    assert re.search(r"\+- +folds", text)
    assert re.search(r"^fold +1 of trial 0", text, re.MULTILINE)
    assert "over 3 common folds" in cards["noise"]
    assert "standard deviation over folds" in cards["noise"]
    assert training_digest(made.spec), "what a confirmation stores"
    assert "seed" not in text.replace("random_seed", "") + cards["noise"]
    with pytest.raises(SearchChanged, match="compared with their folds, and other folds"):
        check_repeats(made.spec, MadeSweep(tmp_path, "one").spec)


def test_both_readers_return_the_same_configurations(made: MadeSweep) -> None:
    read = LedgerReader(made.paths.ledger).records()
    assert [(t.value, t.over_seeds) for t in read] == [
        (t.value, t.over_seeds) for t in made.ledger.trials()
    ]


def test_waiting_trials_are_those_that_are_listed(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="repeats: 3")
    sweep.add("complete", 0.5)
    sweep.add(None)
    view = sweep.view
    listed = [row["state"] for row in view.rows()]
    status = view.status()
    assert (listed.count("waiting"), status["trials"]["waiting"]) == (1, 8)
    said = view.counts_in_words(status["trials"])
    assert said == "1 waiting, 1 complete, 7 not started"
    shown = io.StringIO()
    PlainConsole(file=shown, width=200).print(render.status(status, view))
    assert f"small: interrupted, 9 trials: {said}\n" in shown.getvalue()
    assert "3 configurations of 3 seeds: 1 not started, 2 running" in shown.getvalue()


def test_status_counts_trials_and_configurations(made: MadeSweep) -> None:
    status = made.view.status()
    assert status["num_trials"] == 7  # the stopped configuration gets no further seeds
    assert status["trials"]["complete"] == 6
    assert status["configurations"]["complete"] == 2
    assert status["configurations"]["pruned"] == 1
    assert status["state"] == "finished"


def test_missing_seeds_are_waited_for(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="repeats: 3")
    assert made.view.num_trials == 9
    made.add("complete", 0.5)
    made.repeat(0, "complete", 0.4)
    view = made.view
    assert (view.num_trials, view.num_left) == (9, 7)
    assert view.status()["configurations"] == {
        **dict.fromkeys(["complete", "pruned", "failed"], 0),
        "running": 1,
        "waiting": 2,
    }
    assert view.ledger.front() == []
    assert view.records[0].value == pytest.approx(0.45)  # over the seeds so far


def test_progress_counts_as_the_status_does(made: MadeSweep) -> None:
    progress = SweepProgress(made.spec, made.ledger.trials())
    assert progress.total == 7
    row, value = best_with_value(progress.rows, made.spec)
    assert (row.number, value) == (3, pytest.approx(0.3))
    fresh = SweepProgress(made.spec)
    assert fresh.total == 9
    fresh.started(TrialStart(0, {}))
    fresh.ended(0, "complete")
    fresh.started(TrialStart(1, {}, role="repeat", origin=0))
    assert fresh.total == 9
    fresh.ended(1, "failed")
    assert fresh.total == 8


def test_stop_value_waits_for_all_seeds(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="repeats: 2\nstop: {value: 0.3}")
    made.add("complete", 0.1)
    assert active_stop_criterion(made.spec, made.ledger.trials(), 0.0) is None
    made.repeat(0, "complete", 0.2)
    assert active_stop_criterion(made.spec, made.ledger.trials(), 0.0).key == "stop.value"


def test_new_best_is_notified_once_all_seeds_ended(tmp_path: Path) -> None:
    made, events = MadeSweep(tmp_path, more="repeats: 2"), []
    notifier = Notifier(
        made.paths, made.spec, "id", 1, made.ledger, lambda _, body: events.append(body)
    )
    made.add("complete", 0.1)
    notifier.trial_ended(0)
    assert events == []
    made.repeat(0, "complete", 0.3)
    notifier.trial_ended(1)
    [event] = events
    assert (event["event"], event["trial"], event["value"]) == ("new_best", 0, pytest.approx(0.2))


def test_run_of_the_first_seed_has_the_value(made: MadeSweep) -> None:
    recorder = MemoryRecorder()
    for number in (3, 6):
        recorder.start(number, {}, {})
        record_configuration(made.ledger.trials()[number], recorder)
    run, stopped = recorder.runs[3], recorder.runs[6]
    assert run.tags["over_seeds.num_seeds"] == "3 of 3"
    assert float(run.tags["over_seeds.value"]) == pytest.approx(0.3)
    assert run.points["over_seeds/value", 10] == pytest.approx(0.3)
    assert stopped.tags["over_seeds.state"] == "pruned"
    assert stopped.points == {}


def test_verification_expects_the_tags_that_a_run_got(made: MadeSweep) -> None:
    """The driver writes them from the single trial, and `sync --verify` from all trials."""
    together = LedgerReader(made.paths.ledger).records()
    for number, record in enumerate(together):
        alone = made.ledger.trial(number)
        tags = end_tags(alone, made.spec, made.paths)
        assert end_tags(record, made.spec, made.paths) == tags


def test_later_sweep_learns_the_value_over_seeds(made: MadeSweep) -> None:
    made.add("complete", 0.2)  # without its further seeds
    text = made.spec.model_copy(update={"name": "later"}).to_yaml()
    spec = parse_spec(text, "later.yaml", (f"search.warm_start={made.spec.name}",))
    warm = collect_warm_start(made.paths.root, spec)
    assert [one.value for one in warm.trials] == [
        pytest.approx(0.6),
        pytest.approx(0.3),
        0.05,
    ]
    assert "1 unfinished" in warm.summary


def test_frame_has_one_row_for_each_seed(made: MadeSweep) -> None:
    frame = trials_frame(made.view)
    assert list(frame["configuration"]) == [0, 0, 0, 3, 3, 3, 6]
    assert frame.loc[3, "over_seeds"] == pytest.approx(0.3)
    assert list(frame["val/loss"])[:3] == [0.1, 0.9, 0.8]


@pytest.mark.parametrize(
    ("values", "how", "value", "error"),
    [
        ([1.0, 2.0, 6.0], "mean", 3.0, math.sqrt(7 / 3)),
        ([1.0, 2.0, 6.0], "median", 2.0, math.sqrt(math.pi / 2 * 7 / 3)),
        ([1.0], "mean", 1.0, None),
    ],
)
def test_value_and_standard_error(
    values: list[float], how: str, value: float, error: float | None
) -> None:
    assert combine(values, how) == value
    assert standard_error(values, how) == (None if error is None else pytest.approx(error))
    assert math.isnan(combine([*values, math.inf], how))


BASE = "name: a\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 4\n"
SPACE = "space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}\n"


def _spec(text: str, *overrides: str) -> SweepSpec:
    return parse_spec(BASE + SPACE + text, "a.yaml", overrides)


def test_number_is_short_for_the_section() -> None:
    expected = _spec("repeats: {seeds: 3, value: mean}").repeats
    assert _spec("repeats: 3").repeats == expected
    assert _spec("", "repeats=3").repeats == expected
    assert _spec("repeats: 3", "repeats.value=median").repeats.value == "median"
    assert "repeats" not in _spec("repeats: 1").to_yaml()  # as earlier releases wrote it
    spec = _spec("repeats: 3")
    assert parse_spec(spec.to_yaml(), "a.yaml") == spec


def test_each_seed_trains_another_fold() -> None:
    spec = _spec("repeats: {folds: 3}")
    assert spec.max_runs == 4 * 3
    configs = [spec.trial_config(TrialSeed("repeat", seed), {}) for seed in range(3)]
    assert [one.task.arguments for one in configs] == [{"fold": n, "folds": 3} for n in range(3)]
    assert spec.trial_config(TrialSeed("confirm", 4), {}).task.arguments["fold"] == 1
    assert spec.trial_config(0, {}).task.arguments["fold"] == 0  # what `sweep check` trains
    assert parse_spec(spec.to_yaml(), "a.yaml") == spec
    assert parse_spec(spec.to_yaml(), "a.yaml", ["repeats.folds=4"]).repeats.seeds == 4
    with pytest.raises(SearchChanged, match=r"seeds: 3, folds: 3.* cannot become 3"):
        check_repeats(spec, _spec("repeats: 3"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("repeats: {folds: 1}", "at least 2"),
        ("repeats: {folds: 3, seeds: 2}", "seeds is 2 beside 3 folds"),
        ("repeats: {folds: 3}\nspace: {task.fold: {choice: [0, 1]}}", "decided by repeats.folds"),
        ("repeats: {folds: 2}\nspace: {}", "the space is empty"),
        ("repeats: 0", "at least 1"),
        ("repeats: {seeds: 3, value: max}", "valid: mean, median"),
        ("repeats: 2\nearly_stopping: {scheduler: pbt}\nbudget: {epochs: 9}", "population"),
        ("repeats: 2\nspace: {}", "the space is empty"),
    ],
)
def test_wrong_repeats_are_refused(text: str, part: str) -> None:
    space = "" if "space" in text else SPACE
    with pytest.raises(SpecError, match=part):
        parse_spec(f"{BASE}{space}{text}\n", "a.yaml")


@pytest.mark.parametrize(("before", "after"), [("1", "3"), ("3", "4")])
def test_resume_cannot_change_the_seeds(before: str, after: str) -> None:
    with pytest.raises(SearchChanged, match=f"repeats is {before} .* cannot become {after}"):
        check_repeats(_spec(f"repeats: {before}"), _spec(f"repeats: {after}"))
