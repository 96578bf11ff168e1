"""`sweep audit` in words, in JSON, in `sweep status`, in the report and from Python."""

from __future__ import annotations

import json
import math
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sweeps import Sweep
from sweeps.cli.app import app
from sweeps.report.report import audit_section
from sweeps.trust.audit.read import audit_data, audit_sweep, read_num_validation
from sweeps.trust.audit.registry import CARDS
from sweeps.trust.confirm import find_confirmation
from tests.unit.sweeps.confirming_sweep import request, run
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.store.metrics_file import Row
from trainable.user_code.fingerprint import BUILT

LR, NORM = "train.optimizer.lr", "train.clip.max_norm"
SPACE = f"{{{LR}: {{loguniform: [1.0e-4, 1.0e-1]}}, {NORM}: {{loguniform: [0.1, 10]}}}}"


def _sweep(
    root: Path, more: str = "search: {sampler: random}", metric: str = "val/loss"
) -> MadeSweep:
    """A sweep of thirty trials whose best learning rates are at the upper end."""
    draw = random.Random(0)
    sweep = MadeSweep(root, space=SPACE, more=more, metric=metric)
    for _ in range(30):
        params = {LR: 10 ** draw.uniform(-4, -1), NORM: 10 ** draw.uniform(-1, 1)}
        level = 0.1 - 0.1 * math.log10(params[LR] * 10)
        sweep.add("complete", *(level + 0.1 / epoch for epoch in range(1, 11)), params=params)
    for number in range(30):
        rows = [Row(s, 0, {"train/grad_norm": 1 + s / 100}) for s in range(1, 100)]
        sweep.log(number, *rows, Row(100, 0, {"train/clip_fraction": 0.75}))
    return sweep


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> MadeSweep:
    return _sweep(tmp_path_factory.mktemp("template"))


@pytest.fixture
def sweep(template: MadeSweep, tmp_path: Path) -> MadeSweep:
    """A sweep of thirty trials, of this test's own."""
    return template.copy(tmp_path)


def _audit(sweep: MadeSweep, *words: str) -> str:
    line = ["audit", sweep.paths.name, "--root", str(sweep.paths.root), *words]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0
    return done.stdout


def _cards(sweep: MadeSweep) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in json.loads(_audit(sweep, "--json"))["cards"]}


def test_all_cards_are_in_words_and_in_json(sweep: MadeSweep) -> None:
    cards, said = _cards(sweep), _audit(sweep)
    assert list(cards) == list(CARDS)
    assert {card["verdict"] for card in cards.values()} == {
        "pass", "warn", "not enough data", "does not apply",
    }  # fmt: skip
    for name, card in cards.items():
        folded = card["verdict"] == "does not apply"
        assert card["evidence"] in said
        assert (f"{name} does not apply: {card['evidence']}" in said) == folded
        assert (card["question"] in said) == (not folded)
        assert card["command"] is None or card["command"] in said
    assert cards["bounds"]["verdict"] == "warn"
    assert cards["bounds"]["figure"]["bounds"][0]["key"] == LR
    assert cards["clipping"]["figure"]["share"] == pytest.approx(0.75)
    assert Sweep.open("small", root=sweep.paths.root).audit()["cards"] == list(cards.values())


def test_commands_of_cards_are_accepted(sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sweep.paths.root)
    cards = _cards(sweep)
    commands = [shlex.split(c["command"]) for c in cards.values() if c["command"]]
    clones = [words[1:] for words in commands if words[1] == "init"]
    assert clones
    for words in clones:
        if any("exempt" in word for word in words):
            continue
        Path("small-2.yaml").unlink(missing_ok=True)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    widened = shlex.split(cards["bounds"]["command"])
    assert widened[1:3] == ["resume", "small"]
    assert any(word.startswith(f"space.{LR}=") for word in widened)


def test_status_and_report_show_the_audit(sweep: MadeSweep) -> None:
    warned = [card["id"] for card in _cards(sweep).values() if card["verdict"] == "warn"]
    line = ["status", "small", "--root", str(sweep.paths.root)]
    folded = [c for c in _cards(sweep).values() if c["verdict"] == "does not apply"]
    of = len(CARDS) - len(folded)
    assert f"audit: {len(warned)} of {of} warn" in CliRunner().invoke(app, line).stdout
    status = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert [name for name, verdict in status["audit"].items() if verdict == "warn"] == warned
    section = audit_section(audit_sweep(sweep.view))
    assert section.title == "Audit"
    assert all(
        (c["question"] in section.body) == (c not in folded) for c in _cards(sweep).values()
    )
    assert all(f" does not apply: {c['evidence']}" in section.body for c in folded)
    assert "sweep resume small" in section.body
    sweep.add(None, 0.6)
    assert "audit:" not in CliRunner().invoke(app, line).stdout


def test_running_sweep_has_an_audit_but_no_resume(sweep: MadeSweep) -> None:
    sweep.add(None, 0.6)
    card = _cards(sweep)["bounds"]
    assert (card["verdict"], card["command"]) == ("warn", None)


def test_audit_and_confirm_say_the_same_noise_floor(sweep: MadeSweep) -> None:
    """Also while the seed after those that are compared is not complete."""
    leaders = request(sweep, top=3, until=0.99).leaders
    run(sweep, lambda n, seed: 0.3 + 0.01 * ((leaders.index(n) * 7 + seed * 3) % 5), most=7)
    confirmation = find_confirmation(sweep.view)
    assert confirmation is not None
    card = _cards(sweep)["noise"]["figure"]
    assert card["noise_floor"] == pytest.approx(confirmation.noise)
    assert (card["num_values"], card["num_configurations"]) == (confirmation.noise_runs, 3)
    assert card["num_values"] == 6
    assert 1 <= card["freedom"] <= 3  # common seeds are less evidence than own ones
    assert json.loads(_audit(sweep, "--json"))["num_trials"] == 30


def test_last_bracket_of_hyperband_is_exempt(tmp_path: Path) -> None:
    more = "early_stopping: {scheduler: hyperband, grace_epochs: 1, reduction: 3}"
    trials = audit_data(_sweep(tmp_path, more).view).trials
    assert 0 < sum(trial.exempt for trial in trials) < len(trials)


@pytest.mark.parametrize(
    ("built", "size"),
    [
        ({"val: its length": 360}, 360),
        ({"val: tensor 0": ["torch.float32", [128, 64], 1.0, []]}, 128),
        ({"val: its type": "Stream"}, None),
        ({"val: its length": "many"}, None),
        ([], None),
    ],
)
def test_validation_size_is_read_from_a_trial(
    tmp_path: Path, built: Any, size: int | None
) -> None:
    (tmp_path / BUILT).write_text(json.dumps(built))
    assert read_num_validation(tmp_path) == size
