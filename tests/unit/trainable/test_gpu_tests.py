"""The tests of `tests/gpu` on a CPU and with few packages installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# What a machine that only trains need not have: imported late or not, it is not there.
_ABSENT = (
    "accelerate", "alembic", "cmaes", "hypothesis", "lightning", "matplotlib", "mlflow", "optuna",
    "pandas", "PIL", "playwright", "plotly", "psutil", "psycopg2", "pyarrow", "pynvml",
    "pytest_timeout", "pytorch_optimizer", "ray", "requests", "rich", "ruamel", "safetensors",
    "scipy", "sklearn", "sqlalchemy", "torchvision", "typer", "xdist", "yaml",
)  # fmt: skip


def test_gpu_tests_pass_on_cpu_with_few_packages():
    script = (
        "import sys, pytest\n"
        f"for name in {_ABSENT}: sys.modules[name] = None\n"
        "sys.exit(pytest.main(['-q', 'tests/gpu']))"
    )
    environment = {
        "GPU_TESTS_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (passed, skipped) = re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups()
    assert int(passed) >= 15
    assert int(skipped) == 4 + 6 + 6, (
        "CUDA's own answers and caps, and ranks on GPUs, are left out"
    )
