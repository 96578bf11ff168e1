"""Writes the golden files anew: `python -m tests.golden.regenerate`.

Only when the arithmetic of a step is meant to change. The difference of the file then belongs into
the same commit as the reason for it.
"""

from __future__ import annotations

import json

import torch

from tests.golden.accumulation import FILE, curves


def main() -> None:
    """Write `accumulation.json` from the float64 run of one micro-batch."""
    content = {
        "comment": "float64, 8x1; written by python -m tests.golden.regenerate",
        "torch": torch.__version__,
        **curves("float64", "8x1"),
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
