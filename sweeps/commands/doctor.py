"""`sweep doctor`: print what would make a sweep fail on this machine.

What must not live here: the checks (`operations.doctor`).
"""

from __future__ import annotations

import typer

from sweeps.commands.console import AsJson, Root, input_errors, show_found


def doctor(root: Root = None, as_json: AsJson = False) -> None:
    """Check versions, GPUs, disks and sweeps; remove what dead drivers left behind."""
    from sweeps.commands import render
    from sweeps.operations.doctor import diagnose
    from sweeps.paths import resolve_root

    with input_errors():
        findings = diagnose(resolve_root(root))
    show_found(
        [finding.as_dict() for finding in findings], as_json, lambda: render.findings(findings)
    )
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)
