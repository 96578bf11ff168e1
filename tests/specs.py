"""Specs with overrides. What must not live here: whole sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.spec.spec import SweepSpec, parse_spec


def with_overrides(spec: SweepSpec, overrides: Sequence[str]) -> SweepSpec:
    """Return a spec with `KEY=VALUE` overrides applied, as a resume does with `trials=40`."""
    return parse_spec(spec.to_yaml(), f"{spec.name}/sweep.yaml", overrides)
