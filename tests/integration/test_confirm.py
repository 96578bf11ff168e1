"""`sweep confirm NAME`: leaders are raced under common seeds, and a kill changes no decision."""

from __future__ import annotations

import signal

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import SMALL, CommandLine, no_process_of, wait_until
from tests.time_limits import scaled

pytestmark = pytest.mark.usefixtures("store")

SPEC = SMALL.replace("epochs: 4", "epochs: 6") + "train: {batch_size: 16}\nconcurrency: 1\n"


@pytest.mark.chaos
def test_killed_confirmation_ends_as_an_uninterrupted_one(cli: CommandLine) -> None:
    options = ("--top", "3", "--seeds", "3", "--until", "0.99")
    for name in ("small", "whole"):
        cli.write(f"{name}.yaml", SPEC.replace("name: small", f"name: {name}"))
        cli.ok("run", f"{name}.yaml")
    cli.ok("confirm", "whole", *options)
    expected = cli.json("confirm", "whole")
    searched = cli.json("trials", "small")

    driver = cli.start("confirm", "small", *options)

    def in_the_middle() -> bool:
        done = [t for t in cli.json("trials", "small") if t["state"] == "complete"]
        return sum(one["role"] == "confirm" for one in done) >= 4

    wait_until(lambda: driver.poll() is not None or in_the_middle(), every=0.05)
    assert driver.poll() is None, driver.communicate()
    token = cli.token("small")
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=scaled(60))
    assert cli.json("status", "small")["state"] == "interrupted"
    cli.ok("resume", "small")
    assert no_process_of(token)
    found = cli.json("confirm", "small")
    for one in (*found["leaders"], *expected["leaders"]):
        del one["seconds"]
    assert found == expected
    after = cli.json("trials", "small")
    assert after[: len(searched)] == searched
    runs = [(one["origin"], one["seed_index"]) for one in after if one["role"] == "confirm"]
    assert len(runs) == len(set(runs)) == found["num_runs"]

    winner = found["winner"]
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    leader = client.get_run(after[winner]["mlflow_run_id"]).data
    assert leader.metrics["confirm/num_seeds"] == len(found["leaders"][0]["values"])
    assert leader.tags["confirm"].startswith("best with probability")
    confirming = client.get_run(after[-1]["mlflow_run_id"]).data.tags
    assert confirming["gradsweep.confirms"] == str(after[-1]["origin"])
    # The search continues as if nobody had asked.
    cli.ok("resume", "small", "-s", "trials=5")
    cli.ok("resume", "whole", "-s", "trials=5")
    one, other = (cli.json("trials", name)[-1] for name in ("small", "whole"))
    assert one["params"] == other["params"]
