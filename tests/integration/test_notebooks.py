"""The notebooks of the docs are executed, and kernels are interrupted and killed for real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pandas as pd
import psutil
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from sweeps import Sweep
from sweeps.run.sync import deliver
from sweeps.sweep_lock import is_held
from sweeps.view.sweep_view import SweepView
from tests.integration.commandline import wait_until
from tests.time_limits import scaled

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.md"))
KEYS = """
from sweeps import Sweep
sweep = Sweep(
    name="long", root="runs", task={"name": "digits", "model": "mlp", "width": 32},
    metric="val/loss", mode="min", trials=1, seed=3, budget={"epochs": 200},
)
"""


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_notebook_runs(page: Path, tmp_path: Path) -> None:
    notebook = jupytext.read(page)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 4
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=int(scaled(180)), resources=resources).execute()


class _Listening(NotebookClient):
    """Keeps the HTML that a cell has replaced."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.shown: list[str] = []

    def process_message(self, msg: dict[str, Any], *where: Any) -> Any:
        if msg["header"]["msg_type"] == "update_display_data":
            self.shown.append(msg["content"]["data"].get("text/html", ""))
        return super().process_message(msg, *where)


def test_notebook_shows_progress_and_plain_errors(tmp_path: Path) -> None:
    source = KEYS.replace('"epochs": 200', '"epochs": 2').replace("trials=1", "trials=2")
    source = source.replace("seed=3,", 'seed=3, search="auto",')
    cells = [nbformat.v4.new_code_cell(code) for code in (source + "sweep.run()", "sweep.run()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = _Listening(
        notebook,
        timeout=int(scaled(180)),
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    best = Sweep.open("long", root=tmp_path / "runs").best
    assert best.value is not None
    shown = "".join(str(output) for output in notebook.cells[0].outputs)
    assert f"{best.value:.4g} (trial {best.number})" in shown
    assert "2/2" in shown
    assert "auto takes sampler random, as tpe would draw all 2 trials at random, too" in shown
    *while_it_ran, at_the_end = client.shown
    assert any("val/loss" in one and f"{best.value:.6f}" in one for one in while_it_ran)
    assert at_the_end == ""  # the sweep itself is the cell's result, with the same table
    refused = notebook.cells[1].outputs[-1].evalue.splitlines()
    assert refused[0].endswith("exit code 2:")
    assert refused[2].startswith("sweep 'long' exists already")  # after what `auto` takes
    assert len(refused) == 3  # the kernel's FORCE_COLOR does not reach the command


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelManager]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=scaled(60))
    client.execute(KEYS + "sweep.run()")
    wait_until(lambda: len(list(tmp_path.glob("runs/long/trials/*/checkpoints/step-*"))) > 1)
    yield manager
    client.stop_channels()
    manager.shutdown_kernel(now=True)  # frees what belongs to a dead kernel, too
    manager.context.destroy()


@pytest.mark.chaos  # of Python without a kernel: `test_ctrl_c_drains_and_is_raised`
def test_interrupted_kernel_drains_the_sweep(kernel: KernelManager, tmp_path: Path) -> None:
    kernel.interrupt_kernel()
    sweep = Sweep.open("long", root=tmp_path / "runs")
    wait_until(lambda: not is_held(sweep.paths.lock))
    assert sweep.status["state"] == "interrupted"
    assert kernel.is_alive()
    assert sweep.trial(0).epochs > 0


@pytest.mark.chaos
@pytest.mark.fault(6, "the notebook's kernel is killed")
def test_row_06_killed_kernel_is_a_killed_driver(kernel: KernelManager, tmp_path: Path) -> None:
    process = psutil.Process(kernel.provisioner.pid)
    drivers = [child for child in process.children() if "--child-of" in child.cmdline()]
    process.kill()
    wait_until(lambda: not any(_lives(driver) for driver in drivers))
    sweep = Sweep.open("long", root=tmp_path / "runs").resume()
    text = sweep.to_yaml()
    (tmp_path / "again.yaml").write_text(text)
    undisturbed = Sweep.from_file(tmp_path / "again.yaml", {"name": "again"}, root=tmp_path).run()
    expected = undisturbed.curves("train/loss", "val/loss")
    pd.testing.assert_frame_equal(sweep.curves("train/loss", "val/loss"), expected)
    assert sweep.status["trials"]["complete"] == 1
    delivered = deliver(SweepView(sweep.paths), verify=True)
    assert delivered.num_runs == 2  # the trial's and the sweep's own
    assert not delivered.left
    assert not delivered.missing


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
