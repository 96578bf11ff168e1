"""Is the clipping norm in the range of the gradients' norms?

What must not live here: reading the trials' metrics (`read`).
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from sweeps.formatting import counted
from sweeps.trust.audit.card import RUN_MORE, Card
from sweeps.trust.audit.data import AuditData, Clipping

_card = partial(Card, "clipping", "Is the clipping norm in the range of the gradient norms?")
_TOO_MANY = 0.5
"""If more than this part of all steps is clipped, most steps have the length of the bound."""
_FEWEST_STEPS = 100
_KEY = "train.clip.max_norm"


def clipping(data: AuditData) -> Card:
    """Warn if more than half of the best trials' steps are clipped, or none of them."""
    found = [t.clipping for t in data.ranked if t.clipping is not None]
    if not data.ranked:
        return _card("not enough data", "No trial has a result.", remedy=RUN_MORE)
    if not found:
        return _card("does not apply", "no trial tells how many of its steps were clipped.")
    clipped = [one for one in found if one.max_norm is not None]
    if not clipped:
        text = f"Gradients are not clipped by their norm ({counted(len(found), 'trial')})."
        return _card("pass", text, {"num_trials": len(found)})
    steps = sum(one.steps for one in clipped)
    share = sum(one.share * one.steps for one in clipped) / steps if steps else 0.0
    figure: dict[str, Any] = {
        "num_trials": len(clipped),
        "num_steps": steps,
        "share": share,
        "usual_norm": _usual(clipped),
        "max_norm": sorted({one.max_norm for one in clipped if one.max_norm is not None}),
    }
    what = "trial" if len(clipped) == 1 else f"{len(clipped)} trials"
    evidence = f"{share:.1%} of {steps:,} steps of the best {what} were clipped{_norms(clipped)}."
    if steps < _FEWEST_STEPS:
        text = f"{evidence} The card needs {_FEWEST_STEPS} steps."
        return _card("not enough data", text, figure, RUN_MORE)
    if share > _TOO_MANY:
        remedy = "raise the clipping norm: such a bound sets the length of most steps"
    elif share == 0:
        remedy = "lower the clipping norm, or switch it off: such a bound does nothing"
    else:
        return _card("pass", evidence, figure)
    return _card("warn", evidence, figure, remedy, _command(data, clipped))


def _usual(clipped: list[Clipping]) -> float | None:
    norms = [one.usual_norm for one in clipped if one.usual_norm is not None]
    return median(norms) if norms else None


def _norms(clipped: list[Clipping]) -> str:
    usual, bounds = _usual(clipped), sorted({one.max_norm or 0.0 for one in clipped})
    most = f"{bounds[0]:.3g}" if len(bounds) == 1 else f"{bounds[0]:.3g} to {bounds[-1]:.3g}"
    norm = "" if usual is None else f"; nine of ten gradient norms are below {usual:.2g}"
    return f", at max_norm {most}{norm}"


def _command(data: AuditData, clipped: list[Clipping]) -> list[str] | None:
    """Return the command for a new sweep with a bound that clips about one step of ten."""
    usual = _usual(clipped)
    if not usual:
        return None
    if _KEY in data.space:
        searched = f"space.{_KEY}={{loguniform: [{usual / 3:.2g}, {usual * 3:.2g}]}}"
        return ["init", "-s", searched]
    return ["init", "-s", f"{_KEY}={usual:.2g}"]
