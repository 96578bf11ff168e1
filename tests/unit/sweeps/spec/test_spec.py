"""Valid specs: reading, overriding, resolving a trial, and writing."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from sweeps.errors import InvalidName, SpecError, UserError
from sweeps.paths import check_name
from sweeps.spec.priors import Prior
from sweeps.spec.space import LogUniform, Uniform
from sweeps.spec.spec import SweepSpec, load_with_positions, parse_spec, trial_yaml
from sweeps.spec.trial_run import TrialSeed
from tests.specs import with_overrides
from tests.unit.sweeps.spec_errors import HEAD
from trainable.config import Interval, TaskConfig
from trainable.seeding import derive_seed


def _parse(more: str = "", *overrides: str, **environ: str) -> SweepSpec:
    return parse_spec(HEAD + more, "s.yaml", overrides, environ=environ)


def test_the_example_that_ships_is_valid() -> None:
    example = Path(str(files("sweeps.examples") / "digits.yaml"))
    spec = load_with_positions(example)[0]
    assert spec.name == "digits"
    assert spec.space["train.optimizer.lr"] == LogUniform(1e-4, 0.1)
    assert spec.space["train.schedule.warmup"] == Uniform(0.0, 0.3)
    assert spec.checkpoint.every == Interval(count=1, unit="epoch")


def test_defaults_of_a_short_spec() -> None:
    spec = _parse()
    assert spec.early_stopping.scheduler == "none"
    assert _parse("early_stopping: {}\n").early_stopping.scheduler == "asha"
    assert spec.concurrency is None
    assert spec.space == {}
    assert spec.resources.gpu == "auto"


@pytest.mark.seeds("S8")
@pytest.mark.parametrize(
    ("given", "lr", "momentum", "nesterov", "weight_decay"),
    [
        ("{name: sgd}", 0.1, 0.9, False, 0.0),
        ("{name: sgd, nesterov: true}", 0.1, 0.9, True, 0.0),
        ("{name: adam}", 3e-4, 0.0, False, 0.0),
        ("{name: adamw}", 3e-4, 0.0, False, 0.01),
        ("{name: adafactor}", 1e-3, 0.0, False, 0.0),
        ("{name: lamb}", 1e-3, 0.0, False, 0.0),
        ("{name: lion}", 3e-4, 0.0, False, 0.0),
        ("{}", 3e-4, 0.0, False, 0.01),
        ("{name: sgd, lr: 0.5, momentum: 0.0, weight_decay: 1e-4}", 0.5, 0.0, False, 1e-4),
    ],
)
def test_omitted_options_use_the_optimizers_default(
    given: str, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> None:
    spec = _parse(f"train: {{optimizer: {given}}}\n")
    written = parse_spec(spec.to_yaml(), "again")
    for optimizer in (
        spec.train.optimizer,
        written.train.optimizer,
        spec.trial_config(0, {}).train.optimizer,
    ):
        found = optimizer.lr, optimizer.momentum, optimizer.nesterov, optimizer.weight_decay
        assert found == (lr, momentum, nesterov, weight_decay)
    assert f"lr: {lr!r}, weight_decay: {weight_decay!r}, betas: null" in spec.to_yaml()


@pytest.mark.parametrize(
    ("given", "rates"), [("{}", [0.1, 3e-4, 1e-3]), ("{lr: 0.02}", [0.02, 0.02, 0.02])]
)
def test_each_searched_optimizer_keeps_its_default_after_resume(
    given: str, rates: list[float]
) -> None:
    spec = _parse(
        f"train: {{optimizer: {given}}}\n"
        "space: {train.optimizer.name: {choice: [sgd, adamw, lamb]}}\n"
    )
    restarted = parse_spec(spec.to_yaml(), "again")
    assert restarted == spec
    assert restarted.to_yaml() == spec.to_yaml()
    for one in (spec, restarted):
        trials = [
            one.trial_config(0, {"train.optimizer.name": name})
            for name in ("sgd", "adamw", "lamb")
        ]
        assert [trial.train.optimizer.lr for trial in trials] == rates


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1.0e-4", 1e-4), (".5", 0.5), ("3", 3.0), ("+0.1", 0.1)]
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float) -> None:
    assert _parse(f"train: {{optimizer: {{lr: {text}}}}}\n").train.optimizer.lr == value


@pytest.mark.parametrize(
    "word", ["on", "off", "yes", "no", "y", "12:30:00", "2024-01-01", "1_000"]
)
def test_yaml_1_1_booleans_are_text(word: str) -> None:
    text = HEAD.replace("task: digits", f"task: {{name: a, word: {word}}}")
    assert parse_spec(text, "s.yaml").task.arguments == {"word": word}


def test_octal_and_hexadecimal_numbers() -> None:
    assert _parse("seed: 0o17\n").seed == 15
    assert _parse("seed: 0xff\n").seed == 255


def test_a_task_by_name_is_short_for_a_mapping() -> None:
    assert _parse().task == TaskConfig(name="digits")
    assert _parse("", "task=my.module:Task", "task.hidden=32").task.arguments == {"hidden": 32}


def test_a_sampler_is_imported_by_the_driver_alone() -> None:
    spec = _parse("search: {sampler: 'mine:Mine'}\n", "task=package.theirs:Theirs")
    assert (spec.modules, spec.trial_modules) == (["mine", "package.theirs"], ["package.theirs"])
    assert _parse().modules == []


def test_aliases_stand_for_values() -> None:
    text = HEAD.replace("task: digits", "task: {name: a, x: &x [1, 2], y: *x}")
    assert parse_spec(text, "s.yaml").task.arguments == {"x": [1, 2], "y": [1, 2]}


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    spec = _parse(
        "",
        "trials=40",
        "train.optimizer.lr=1e-2",
        "train.optimizer.lr=1e-3",
        "train.optimizer.betas=[0.9, 0.95]",
        "space.train.clip.max_norm={loguniform: [0.1, 10]}",
        "tracking.uri=http://127.0.0.1:5000",
        "concurrency=",
    )
    assert spec.trials == 40
    assert spec.train.optimizer.lr == 1e-3
    assert spec.train.optimizer.betas == (0.9, 0.95)
    assert spec.space == {"train.clip.max_norm": LogUniform(0.1, 10)}
    assert spec.tracking.uri == "http://127.0.0.1:5000"
    assert spec.concurrency is None


def test_override_reaches_into_a_distribution() -> None:
    text = "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 1.0], prior: 0.01}\n"
    changed = "space.train.optimizer.lr.prior=0.1", "space.train.optimizer.lr.loguniform=[0.01, 1]"
    found = _parse(text, *changed).space["train.optimizer.lr"]
    assert found == LogUniform(0.01, 1.0, prior=Prior(0.1))
    with pytest.raises(SpecError, match=r"lr\.prior: 5 is no value of"):
        _parse(text, "space.train.optimizer.lr.prior=5")


def test_an_override_mends_a_wrong_value() -> None:
    spec = _parse("seed: -1\ntrain:\n  batch_size: ${UNSET}\n", "seed=1", "train.batch_size=8")
    assert (spec.seed, spec.train.batch_size) == (1, 8)


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HEAD)
    spec = load_with_positions(path, name="5", tracking_uri="http://host")[0]
    assert (spec.name, spec.tracking.uri) == ("5", "http://host")


def test_variables_come_from_the_environment() -> None:
    spec = _parse("train:\n  batch_size: ${SIZE}\nseed: 1\n", SIZE="32")
    assert spec.train.batch_size == 32
    text = HEAD.replace("task: digits", 'task: {name: a, x: "${DIR}/x", y: "$${DIR}", z: "${N}"}')
    spec = parse_spec(text, "s.yaml", environ={"DIR": "/data", "N": "3"})
    assert spec.task.arguments == {"x": "/data/x", "y": "${DIR}", "z": "3"}


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode())
    assert load_with_positions(path)[0].trials == 24


def test_trial_has_its_parameters_and_its_own_seed() -> None:
    spec = _parse("seed: 7\nspace: {train.optimizer.lr: {uniform: [0.1, 0.2]}}\n")
    config = spec.trial_config(3, {"train.optimizer.lr": 0.15, "task.hidden": 64})
    assert config.train.optimizer.lr == 0.15
    assert config.task.arguments == {"hidden": 64}
    assert config.seed == derive_seed(7, "trial", 3)
    assert config.train.schedule == spec.train.schedule
    assert spec.trial_config(4, {}).seed != config.seed


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"train.optimizer.lr": -1.0},
            "trial 7: train.optimizer.lr: -1.0 is out of range; it must be above 0; "
            "write for example 0.001",
        ),
        (
            {"train.accumulation": 3},
            "trial 7: train.batch_size: batch_size 64 / accumulation 3 = 21.3333 samples per "
            "micro-batch; it must be whole; choose a batch_size that is a multiple of "
            "accumulation",
        ),
        (
            {"train.clip.nope": 3},
            "trial 7: train.clip.nope: unknown key 'nope'; valid keys: max_norm, value",
        ),
        (
            {"seed": 3},
            "trial 7: seed: is no parameter of a trial; they are below train. and task., and "
            "resources.workers",
        ),
    ],
)
def test_a_trial_that_does_not_fit_is_named(params: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        _parse().trial_config(7, params)
    assert str(caught.value) == message


def test_example_params_make_a_valid_trial() -> None:
    spec = _parse("space: {train.optimizer.lr: {uniform: [0.1, 1]}, task.a: {choice: [x, y]}}\n")
    assert spec.example_params() == {"train.optimizer.lr": 0.1, "task.a": "x"}
    assert spec.trial_config(0, spec.example_params()).task.arguments == {"a": "x"}


def test_two_searched_fields_may_need_each_other() -> None:
    # nesterov alone would be refused: momentum is 0 where it is not searched.
    _parse(
        "space: {train.optimizer.nesterov: {choice: [true]}, "
        "train.optimizer.momentum: {uniform: [0.5, 0.9]}}\n"
    )


@pytest.mark.parametrize("sizes", ["{logint: [16, 256]}", "{int: [16, 64]}"])
def test_a_constraint_may_leave_out_what_does_not_fit(sizes: str) -> None:
    spec = _parse(
        f"train: {{accumulation: 4}}\nspace: {{train.batch_size: {sizes}}}\n"
        "search: {constraints: ['train.batch_size % train.accumulation == 0']}\n"
    )
    for seed in range(20):
        point = spec.search_space().draw(seed)
        assert point is not None
        spec.trial_config(seed, point)


def test_constraint_on_two_numbers_limits_both() -> None:
    spec = _parse(
        "train: {accumulation: 4}\n"
        "space: {train.batch_size: {int: [16, 4096]}, task.views: {int: [1, 4]}}\n"
        "search: {constraints: ['train.batch_size % (4 * task.views) == 0']}\n"
    )
    point = spec.search_space().draw(0)
    assert point is not None
    spec.trial_config(0, point)


def test_to_yaml_is_stable_and_readable() -> None:
    spec = _parse("space: {train.optimizer.lr: {loguniform: [1e-4, 0.1]}}\nresources: {cpu: 2}\n")
    text = spec.to_yaml()
    assert text.startswith(
        "version: 1\nname: digits\ntask: digits\nmetric: val/loss\nmode: min\nselect: checkpoint\n"
        "trials: 24\nseed: 0\nconcurrency: null\nbudget: {epochs: 10}\n"
        "space:\n  train.optimizer.lr: {loguniform: [0.0001, 0.1]}\n"
    )
    assert "resources: {cpu: 2, gpu: auto}\n" in text
    assert "checkpoint: {every: 1 epoch, keep: 2, parameters: all}\n" in text
    again = parse_spec(text, "again")
    assert again == spec
    assert again.to_yaml() == text


def test_override_extends_a_sweep() -> None:
    spec = _parse("seed: 3\n")
    longer = with_overrides(spec, ["trials=40"])
    assert (longer.trials, longer.seed) == (40, 3)
    with pytest.raises(SpecError) as caught:
        with_overrides(spec, ["budget.epochs=1", "early_stopping.scheduler=asha"])
    assert str(caught.value).startswith(
        "digits/sweep.yaml:13:49: early_stopping.grace_epochs: 1 is not below budget.epochs (1); "
    )


def test_a_spec_built_in_python_keeps_the_same_rules() -> None:
    fields = {"name": "a", "task": "b", "metric": "m", "mode": "min", "trials": 1}
    spec = SweepSpec.model_validate({**fields, "space": {"task.x": Uniform(0.0, 1.0)}})
    assert spec.space == {"task.x": Uniform(0.0, 1.0)}
    with pytest.raises(ValueError, match="names no field of the spec"):
        SweepSpec.model_validate({**fields, "space": {"train.nope": Uniform(0.0, 1.0)}})


def test_credentials_reach_no_message() -> None:
    wrong = [
        "tracking: {uri: 'http://user:geheim@host', nope: 1}\n",
        "metric2: 'http://user:geheim@host'\n",
        "seed: 'http://user:geheim@host'\n",
    ]
    for more in wrong:
        with pytest.raises(SpecError) as caught:
            _parse(more)
        assert "geheim" not in str(caught.value) + repr(caught.value.problems)
    with pytest.raises(ValueError, match="tracking") as refused:
        SweepSpec.model_validate({"tracking": {"uri": "http://user:geheim@host"}})
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://ada@host:5432/runs",
        "postgresql+psycopg2://ada@/runs?host=/var/run/postgresql",
        "mysql+pymysql://ada@host/runs",
        "sqlite:////home/ada@work/runs.db",
    ],
)
def test_a_databases_user_may_stand_in_its_address(uri: str) -> None:
    assert _parse(f"tracking: {{uri: '{uri}'}}\n").tracking.uri == uri


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://ada:geheim@host/runs",
        "postgresql://ada:ge/heim@host/runs",
        "postgresql://ada@heim:geheim@host/runs",
        "postgresql://host/runs?user=ada&password=geheim",
        "postgresql://host/runs?sslpassword=geheim",
    ],
)
def test_database_password_is_refused(uri: str) -> None:
    with pytest.raises(SpecError, match="set PGPASSWORD or PGPASSFILE in the env") as refused:
        _parse(f"tracking: {{uri: '{uri}'}}\n")
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("name", ["a", "digits-2", "Größe", "a b", "v1.5", "x" * 100])
def test_names_that_may_become_directories(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "x" * 101,
        "ä" * 51,
        "mlflow.db",
        "MLARTIFACTS",
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "-a",
        ".a",
        "a..b",
        "a\x00",
        "a\u202eb",
        " a",
        "a ",
        "\ud800",
    ],
)
def test_names_that_may_not(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        check_name(name)
    assert isinstance(caught.value, UserError)
    assert str(caught.value).count("; ") == 2


def test_importing_the_spec_loads_nothing_heavy() -> None:
    code = (
        "import sys, sweeps.spec.spec, sweeps.engine.resources\n"
        "import sweeps.run.doctor, sweeps.run.starter\n"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'numpy', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_key_with_a_dollar_brace_survives_writing() -> None:
    spec = parse_spec(HEAD.replace("task: digits", 'task: {name: a, "${": 1}'), "s.yaml")
    assert spec.task.arguments == {"${": 1}
    assert parse_spec(spec.to_yaml(), "again") == spec


def test_line_break_in_a_key_keeps_the_message_whole() -> None:
    with pytest.raises(SpecError) as caught:
        _parse('"a\\nb": 1\n')
    assert str(caught.value).startswith("s.yaml:6:1: a\\nb: unknown key 'a\\nb'; valid keys: ")
    assert len(str(caught.value).splitlines()) == 1


def test_confirming_trials_share_all_seeds_but_not_those_of_the_search() -> None:
    spec = parse_spec(
        "name: split\ntask: {name: digits, split_seed: 5}\nmetric: val/loss\nmode: min\n"
        "trials: 4\nspace: {train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}}\n",
        "split.yaml",
    )
    one, other = (
        spec.trial_config(TrialSeed("confirm", 2, split=True), {"train.optimizer.lr": rate})
        for rate in (0.1, 0.01)
    )
    drawn = {**one.model_dump(mode="json"), "train": None}
    assert drawn == {**other.model_dump(mode="json"), "train": None}
    searched, next_seed = spec.trial_config(2, {}), spec.trial_config(TrialSeed("confirm", 3), {})
    assert len({c.seed for c in (one, searched, next_seed)}) == 3
    assert len({c.data_seed for c in (one, searched, next_seed)}) == 3
    assert 0 <= one.task.arguments["split_seed"] < 2**31
    assert searched.task.arguments["split_seed"] == next_seed.task.arguments["split_seed"] == 5
    assert spec.trial_config(TrialSeed("confirm", 2, split=True), {"task.split_seed": 9}).task == (
        spec.trial_config(2, {"task.split_seed": 9}).task  # what the sweep searches stays
    )


def test_each_trial_has_the_workers_of_the_resources() -> None:
    spec = _parse("resources: {workers: 2, placement: spread}\n")
    assert spec.trial_config(0, {}).workers == 2
    written = parse_spec(spec.to_yaml(), "again")
    assert (written.resources.workers, written.resources.placement) == (2, "spread")


def test_spec_of_one_worker_is_written_as_before() -> None:
    spec = _parse("resources: {workers: 1, placement: pack}\n")
    assert spec.trial_config(0, {}).workers == 1
    assert "workers: 1" not in spec.to_yaml() + trial_yaml(spec.trial_config(0, {}))
    assert "placement" not in spec.to_yaml()
