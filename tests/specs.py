"""Small specs, and specs with overrides. What must not live here: whole sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.spec.spec import SweepSpec, parse_spec


def make_spec(more: str = "", **keys: object) -> SweepSpec:
    """Return a spec of three trials of the digits, with other keys and further lines of YAML."""
    head = {
        "name": "small",
        "task": "digits",
        "metric": "val/loss",
        "mode": "min",
        "trials": 3,
        **keys,
    }
    lines = "".join(f"{key}: {value}\n" for key, value in head.items())
    return parse_spec(f"{lines}{more}", "s.yaml")


def with_overrides(spec: SweepSpec, overrides: Sequence[str]) -> SweepSpec:
    """Return a spec with `KEY=VALUE` overrides applied, as a resume does with `trials=40`."""
    return parse_spec(spec.to_yaml(), f"{spec.name}/sweep.yaml", overrides)
