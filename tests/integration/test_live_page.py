"""The page of `sweep ui NAME`, from the real command in a real browser, while a sweep changes.

What must not live here: what the figures show (`test_report_page.py`), MLflow's pages
(`test_sweep.py`), and attacks on the server (`test_ui_attacks.py`).
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from sweeps.sweep_lock import SweepLock
from tests.integration.browser import Seen, open_page, photograph, require_chromium
from tests.integration.commandline import CommandLine
from tests.time_limits import Deadline, scaled
from tests.unit.sweeps.sweep_factory import MadeSweep

pytestmark = [pytest.mark.integration, pytest.mark.browser]

RATE, OPTIMIZER = "train.optimizer.lr", "train.optimizer.name"
SPACE = f"{{{RATE}: {{loguniform: [1.0e-4, 1.0e-1]}}, {OPTIMIZER}: {{choice: [adamw, sgd]}}}}"
RATES = (0.05, 0.002, 0.0005)


@pytest.fixture
def sweep(cli: CommandLine, store: None) -> MadeSweep:
    del store
    made = MadeSweep(cli.root, space=SPACE)
    for number, rate in enumerate(RATES):
        params = {RATE: rate, OPTIMIZER: ("adamw", "sgd")[number % 2]}
        made.add("complete", 0.9, 0.5 + 0.1 * number, params=params)
    return made


@pytest.fixture
def lock(sweep: MadeSweep) -> Iterator[SweepLock]:
    """The sweep's lock, held as by its driver."""
    held = SweepLock(sweep.paths.lock)
    held.acquire()
    yield held
    held.release()


@pytest.fixture
def server(cli: CommandLine, sweep: MadeSweep, lock: SweepLock) -> subprocess.Popen[str]:
    require_chromium()
    del lock
    return cli.start("ui", sweep.paths.name, "--no-open", "--port", "0")


@pytest.fixture
def link(server: subprocess.Popen[str]) -> str:
    """What `sweep ui` prints."""
    assert server.stdout is not None
    lines = iter(server.stdout.readline, "")
    return next(line for line in lines if line.startswith("http://127.0.0.1:")).strip()


def _column(page: Page, name: str) -> list[str]:
    """What a column of the table of trials shows, from above."""
    index = page.locator("#trials th").all_inner_texts().index(name) + 1
    return page.locator(f"#trials tr:not([hidden]) td:nth-child({index})").all_inner_texts()


def _wait_for_trials(page: Page, shown: str) -> None:
    page.locator("#trials output", has_text=shown).wait_for()


def test_page_follows_a_sweep_and_keeps_what_a_reader_chose(
    sweep: MadeSweep, lock: SweepLock, server: subprocess.Popen[str], link: str
) -> None:
    seen, fields = Seen(), "#trials input"
    with open_page(link, height=600, seen=seen) as page:
        page.wait_for_url(lambda url: url.endswith("/sweep"))
        assert page.locator(".state").inner_text() == "running"
        assert page.locator(".command code").all_inner_texts() == ["sweep stop small"]
        assert "best: trial 0 with val/loss 0.5 (lr 0.05" in page.locator("header").inner_text()
        assert _column(page, "trial") == ["0", "1", "2"], "the best first"

        head = page.locator("#trials th", has_text="lr")
        head.click()
        assert _column(page, "lr") == ["0.0005", "0.002", "0.05"]
        head.click()
        assert _column(page, "lr") == ["0.05", "0.002", "0.0005"]
        for condition, numbers in {
            "lr<0.01": ["1", "2"],
            "lr<=0.002 optimizer.name=adamw": ["2"],
            "optimizer.name!=adamw": ["1"],
            "SGD": ["1"],
            "lr>1": [],
        }.items():
            page.fill(fields, condition)
            assert _column(page, "trial") == numbers, condition
        page.fill(fields, "rate<1")
        _wait_for_trials(page, "there is no column for rate<1")
        page.fill(fields, "lr<0.01")
        _wait_for_trials(page, "2 of 3")

        plot = page.locator("#history .js-plotly-plot")
        plot.evaluate("plot => Plotly.relayout(plot, {'yaxis.range': [0, 2]})")
        page.evaluate("window.isTheFirst = true")
        page.locator(fields).focus()
        sweep.add("complete", 0.3, params={RATE: 0.001, OPTIMIZER: "sgd"})
        sweep.add("failed", reason="a <b>bold</b> error", params={RATE: 0.01, OPTIMIZER: "sgd"})
        _wait_for_trials(page, "3 of 5")
        assert _column(page, "trial") == ["1", "3", "2"], "sorted by the learning rate, filtered"
        assert "best: trial 3" in page.locator("header").inner_text()
        assert plot.evaluate("plot => plot._fullLayout.yaxis.range") == [0, 2]
        assert plot.evaluate("plot => plot.data.at(-1).y.at(-1)") == 0.3
        assert page.evaluate("window.isTheFirst && document.activeElement.matches('input')")
        page.fill(fields, "error")
        assert _column(page, "reason") == ["a <b>bold</b> error"]
        photograph(page, "live-page")

        assert seen.complaints == []
        assert {url.partition("?")[0] for url in seen.requests} == {link.partition("?")[0]}
        page.locator("a.mlflow").click()
        page.get_by_text("Experiments").first.wait_for()
        page.goto(link.partition("?")[0])
        sweep.add(None, 0.6)
        lock.release()
        page.locator(".state.interrupted").wait_for()
        assert page.locator(".command code").first.inner_text() == "sweep resume small"
        server.send_signal(signal.SIGINT)
        page.get_by_text("no longer live: sweep ui has ended").wait_for()
        server.communicate(timeout=scaled(20))
        assert server.returncode == 0


@pytest.mark.chaos
def test_server_ends_with_a_command_that_is_killed(
    server: subprocess.Popen[str], link: str
) -> None:
    port = urlsplit(link).port
    assert port is not None
    socket.create_connection(("127.0.0.1", port)).close()
    server.kill()
    deadline = Deadline(10)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        assert not deadline.passed, "the server outlives sweep ui"
        time.sleep(0.2)
