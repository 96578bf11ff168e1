"""A dry run of the search before a sweep exists: a few suggestions without training.

Samplers check many of their arguments only after trials have ended. Without a dry run, a wrong
argument would stop a sweep after its first trials. What must not live here: how a suggestion is
made (`suggest`), and how samplers are built (`samplers`).
"""

from __future__ import annotations

import warnings
from random import Random

import optuna

from sweeps.errors import Issue, UserError
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.sqlite import IN_MEMORY
from sweeps.ledger.warm_start import PriorTrial, WarmStart
from sweeps.search.samplers import SamplerRejected, check_sampler
from sweeps.search.suggest import Suggester
from sweeps.spec.sections import SAMPLERS
from sweeps.spec.spec import SweepSpec
from sweeps.spec.yaml_scalars import write_flow

_STARTUP = 3  # random trials before a named sampler learns, if the spec has more
_LEARNT = 3  # suggestions after them
_WARM = 12  # trials of a warm start, more than any sampler needs before it learns from them


def dry_run(spec: SweepSpec, warm: WarmStart | None = None) -> None:
    """Build the sampler of a sweep and let it suggest before and after trials have ended."""
    if (missing := spec.early_stopping.rule.missing_package()) is not None:
        raise UserError([Issue(("early_stopping", "scheduler"), missing)])
    check_sampler(spec)
    search = spec.search
    is_named = search.sampler in SAMPLERS
    if is_named:  # a sampler of the user may depend on the number, and on its trial attributes
        few = min(search.startup_trials, _STARTUP)
        search = search.model_copy(update={"startup_trials": few})
    search = search.model_copy(update={"try_first": []})
    random = Random(0)
    ledger = _invented_ledger(spec, warm, random)
    suggester = Suggester(spec.model_copy(update={"search": search}), ledger)
    space = spec.search_space()
    distributions = {key: one.to_optuna() for key, one in space.distributions.items()}
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it logs each new study
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a sampler that is only tried
            for number in range(min(max(search.startup_trials, 1) + _LEARNT, spec.num_trials)):
                if is_named and 0 < number < search.startup_trials:
                    point = space.draw(number) or {}
                    suggestion = Suggestion(point, {key: distributions[key] for key in point})
                else:
                    suggestion = suggester.propose(number)
                ledger.add(suggestion)
                value, *others = (random.random() for _ in spec.reported)
                last = spec.budget.reports
                ledger.report(number, epoch=last, step=last, value=value, others=others)
                ledger.finish(number, "complete")
    except SamplerRejected:
        raise
    except Exception as error:  # a sampler of the user may raise anything
        given = f" with {write_flow(search.arguments)}" if search.arguments else ""
        raise SamplerRejected(
            f"{search.sampler}{given} fails at trial {number} of a dry run "
            f"({type(error).__name__}: {error}); a sampler suggests a point whatever has ended; "
            f"change {'search.arguments' if given else 'the space'}, or choose another sampler",
            *(("arguments",) if given else ()),
        ) from error


def _invented_ledger(spec: SweepSpec, warm: WarmStart | None, random: Random) -> Ledger:
    """Return a ledger in memory with the trials of a warm start, if the sweep has one."""
    if warm is None:
        points = map(spec.search_space().draw, range(_WARM if spec.search.warm_start else 0))
        reports = spec.budget.reports
        taken = [PriorTrial(one or {}, random.random(), reports, True) for one in points]
    else:
        taken = sorted(warm.trials, key=lambda one: not one.complete)
    ledger = Ledger.create(
        IN_MEMORY, mode=spec.modes, sweep_id="dry run", select=spec.select, limits=spec.limits
    )
    ledger.store_warm_start(WarmStart(taken[:_WARM]))  # each one costs the sampler time
    return ledger
