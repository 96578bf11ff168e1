"""The other ways of making a sweep, each as its documentation shows it:
`python -m tests.bench.stock KIND TRIALS DIRECTORY`.

`tune` and `tune-warm` are Ray Tune with OptunaSearch and MLflowLoggerCallback, without and with
`reuse_actors`; `tune-bare` is the least that Ray Tune takes: warm actors, a random search that is
known beforehand, and nothing recorded. `optuna` is Optuna alone, one process for each CPU over one
SQLite study. Their versions are those that the project itself pins. None checkpoints. What must
not live here: anything of ours but the model and its data.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

EPOCHS, WIDTH, BATCH_SIZE = 5, 64, 64


def train(lr: float, warmup: float, max_norm: float) -> Iterator[float]:
    """Train the digits MLP by a loop written by hand; yields the validation loss of each epoch."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from trainable.find_task import load_task

    torch.set_num_threads(1)
    task = load_task("digits", {"model": "mlp", "width": WIDTH})
    data, model = task.build_data(), task.build_model()
    assert isinstance(data.train, tuple)
    assert isinstance(data.val, tuple)
    loader = DataLoader(TensorDataset(*data.train), batch_size=BATCH_SIZE, shuffle=True)
    inputs, targets = data.val
    total = EPOCHS * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def factor(step: int) -> float:
        first = warmup * total
        if step < first:
            return (step + 1) / (first + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - first) / (total - first)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(EPOCHS):
        model.train()
        for batch, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), classes)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            yield nn.functional.cross_entropy(model(inputs), targets).item()


def _trainable(config: dict[str, float]) -> None:
    from ray import tune

    for loss in train(**config):
        tune.report({"loss": loss})


def _tune(trials: int, directory: str, *, reuse: bool) -> None:
    from ray import tune
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.tune.search.optuna import OptunaSearch

    results = tune.Tuner(
        _trainable,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            search_alg=OptunaSearch(),
            num_samples=trials,
            max_concurrent_trials=len(os.sched_getaffinity(0)),  # else one after the other
            reuse_actors=reuse,
        ),
        run_config=tune.RunConfig(
            name="bench",
            storage_path=directory,
            callbacks=[
                MLflowLoggerCallback(
                    tracking_uri=f"sqlite:///{directory}/mlflow.db", experiment_name="bench"
                )
            ],
        ),
        param_space=_space(),
    ).fit()
    assert len(results) == trials
    assert not results.errors


def _bare(trials: int, directory: str) -> None:
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    from ray import tune

    results = tune.Tuner(
        tune.with_resources(_trainable, {"cpu": 1}),
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=trials, reuse_actors=True
        ),
        run_config=tune.RunConfig(name="bench", storage_path=directory, verbose=0),
        param_space=_space(),
    ).fit()
    assert len(results) == trials
    assert not results.errors


def _space() -> dict[str, Any]:
    from ray import tune

    return {
        "lr": tune.loguniform(1e-4, 1e-1),
        "warmup": tune.uniform(0.0, 0.3),
        "max_norm": tune.loguniform(0.1, 10),
    }


def _optuna(trials: int, directory: str) -> None:
    import optuna

    storage, processes = f"sqlite:///{directory}/study.db", len(os.sched_getaffinity(0))
    optuna.create_study(storage=storage, study_name="bench")
    shares = [trials // processes + (n < trials % processes) for n in range(processes)]
    workers = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, "work", str(share), directory])
        for share in shares
    ]
    assert [worker.wait() for worker in workers] == [0] * processes
    done = optuna.load_study(storage=storage, study_name="bench").trials
    assert len(done) == trials


def _work(trials: int, directory: str) -> None:
    import optuna

    def objective(trial: optuna.Trial) -> float:
        *_, last = train(
            lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            warmup=trial.suggest_float("warmup", 0.0, 0.3),
            max_norm=trial.suggest_float("max_norm", 0.1, 10, log=True),
        )
        return last

    optuna.load_study(storage=f"sqlite:///{directory}/study.db", study_name="bench").optimize(
        objective, n_trials=trials
    )


if __name__ == "__main__":
    _, _kind, _trials, _directory = sys.argv
    match _kind:
        case "tune" | "tune-warm":
            _tune(int(_trials), _directory, reuse=_kind == "tune-warm")
        case "tune-bare":
            _bare(int(_trials), _directory)
        case "optuna":
            _optuna(int(_trials), _directory)
        case "work":
            _work(int(_trials), _directory)
