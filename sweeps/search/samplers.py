"""Build a sampler for each trial: Optuna's by name, any other by `module:Class`.

The seed of the sweep and the number of the trial determine the seed of the sampler. Its
suggestions then depend on the ledger alone, however often the driver was restarted. What must not
live here: which trials a sampler receives (`shown_trials`), and how its suggestions are
used (`suggest`).
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import optuna
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler
from optuna.trial import FrozenTrial, TrialState

from sweeps.errors import Issue, UserError
from sweeps.optuna_compat.samplers import (
    AllowingGPSampler,
    IndexedQMCSampler,
    KernelFit,
    kernel_fits,
    set_kernel_fits,
    set_trial_attribute,
)
from sweeps.optuna_compat.tpe import ArrayTPESampler
from sweeps.spec.search_space import PointKey
from sweeps.spec.sections import SearchConfig
from sweeps.spec.space import Choice
from sweeps.spec.spec import SweepSpec
from sweeps.spec.yaml_scalars import write_flow
from trainable.errors import ConfigError
from trainable.seeding import derive_seed
from trainable.user_code.module_names import hidden_by
from trainable.user_code.task_import import import_own

KERNEL = "gradsweep:kernel"
"""The trial attribute with the kernel of each metric.

A kernel is a list: the inverse squared length scales, the kernel scale and the noise variance.
"""


class NotingGPSampler(AllowingGPSampler):
    """Start each fit from the kernels stored in the newest trial, and store its own in the trial.

    The suggestions then depend on the trials alone, however often the sampler is built.
    """

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Suggest as Optuna's sampler does."""
        trials = study.get_trials(deepcopy=False)
        noted = [one.system_attrs[KERNEL] for one in trials if KERNEL in one.system_attrs]
        if noted and len(noted[-1]) == len(study.directions):
            set_kernel_fits(self, [_restored(values) for values in noted[-1]])
        suggested = super().sample_relative(study, trial, search_space)
        if fits := kernel_fits(self):
            note = [
                [
                    *one.inverse_squared_lengthscales.tolist(),
                    one.kernel_scale.item(),
                    one.noise_var.item(),
                ]
                for one in fits
            ]
            set_trial_attribute(study, trial, KERNEL, note)
        return suggested


def _restored(values: list[float]) -> KernelFit:
    import torch  # Optuna has imported it by now

    *scales, scale, noise = torch.tensor(values, dtype=torch.float64)
    return KernelFit(torch.stack(scales), scale, noise)


_SEEDS = 2**32  # NumPy's legacy generator takes 32 bits
_OWN_ARGUMENTS = {"seed": "seed", "n_startup_trials": "search.startup_trials"}
"""Arguments of samplers that have their own key in a spec."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PLAIN = {"Any", "Literal", "Mapping", "None", "Optional", "Sequence", "Union"}
"""Capitalized names in annotations of types that YAML can express."""
_FEWEST_SOURCES = 10  # CMA-ES takes the best tenth of them
_TPE_EVERY = 2
"""With `gp`, one suggestion in so many is one of TPE. It finds another optimum where GP's model
believes in a wrong one."""
_PACKAGES = {"cmaes": "cmaes", "gp": "torch", "qmc": "scipy"}
"""The package that a sampler needs besides Optuna."""


class SamplerRejected(UserError):
    """A sampler cannot be built from the spec."""

    def __init__(self, message: str, *key: str) -> None:
        super().__init__([Issue(("search", *(key or ("sampler",))), message)])


def check_sampler(spec: SweepSpec) -> None:
    """Build the sampler of a sweep's first trial."""
    package = _PACKAGES.get(spec.search.sampler)
    if package is not None and importlib.util.find_spec(package) is None:
        raise SamplerRejected(
            f"{spec.search.sampler} needs the package '{package}', which is not installed; run "
            f"`pip install {package}`, or choose another sampler"
        )
    Samplers(spec).of(0)


class Samplers:
    """The samplers of one sweep."""

    def __init__(self, spec: SweepSpec, warm: Sequence[FrozenTrial] = ()) -> None:
        self._warm = warm
        self._search = spec.search
        self._sampler = _short(spec.search.sampler)
        self._seed = spec.seed
        self._trials = spec.trials
        self._space = spec.search_space()

    def of(self, number: int, attempt: int = 0, tried: Set[PointKey] = frozenset()) -> BaseSampler:
        """Build the sampler of a trial."""
        return self._of(number, self._seed_of(number, attempt), tried)

    def of_priors(self, number: int, attempt: int) -> BaseSampler:
        """Build the sampler of the parameters without a prior, in a trial drawn around priors.

        Its seed is that of no other trial, and of a sequence of points it takes none.
        """
        place = 0 if self._sampler == "qmc" else number
        return self._of(place, self._seed_of("prior", number, attempt), frozenset())

    def _seed_of(self, *parts: str | int) -> int:
        # The seed of a first attempt leaves the attempt out; most trials have only one.
        kept = parts if parts[-1] else parts[:-1]
        return derive_seed(self._seed, "sampler", *kept) % _SEEDS

    def _of(self, number: int, seed: int, tried: Set[PointKey]) -> BaseSampler:
        with warnings.catch_warnings():
            # Some samplers are experimental; the pinned version of Optuna bounds their changes.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.simplefilter("ignore", FutureWarning)
            if self._sampler == "grid":
                return self._of_grid(number, seed, tried)
            name, search = self._sampler, self._search
            if name == "gp" and number % _TPE_EVERY == _TPE_EVERY - 1:
                name, search = "tpe", search.model_copy(update={"arguments": {}})
            return self._build(name, search, number, seed)

    def _of_grid(self, number: int, seed: int, tried: Set[PointKey]) -> BaseSampler:
        _checked(PartialFixedSampler, self._search, "fixed_params", "base_sampler")
        left = (point for key, point in self._grid.items() if key not in tried)
        point = next(left, {}) if number >= len(self._search.points) else {}
        # Drawn are parameters that try_first leaves out, or all if the grid has no free point.
        return PartialFixedSampler(dict(point), optuna.samplers.RandomSampler(seed=seed))

    def _sources(self) -> list[FrozenTrial]:
        """Return complete trials of earlier sweeps with the parameters that CMA-ES models."""
        unconditional = self._space.unconditional()
        numbers = [key for key, one in unconditional.items() if not isinstance(one, Choice)]
        return [
            optuna.trial.create_trial(
                value=trial.value,
                params={key: trial.params[key] for key in numbers},
                distributions={key: trial.distributions[key] for key in numbers},
            )
            for trial in self._warm
            if trial.state == TrialState.COMPLETE
        ]

    @cached_property
    def _grid(self) -> Mapping[PointKey, Mapping[str, Any]]:
        # As many points as there are trials, so at least one of them is free.
        points = itertools.islice(self._space.grid(), self._trials)
        return {self._space.point_key(point): point for point in points}

    def _build(self, name: str, search: SearchConfig, number: int, seed: int) -> BaseSampler:
        given: dict[str, Any] = {"seed": seed, "n_startup_trials": search.startup_trials}
        own: dict[str, Any] = {}
        match name:
            case "tpe" if self._space.conditional and search.arguments.get("multivariate", True):
                given["group"] = True  # parameters of the same trials get a joint model
            case "gp":
                given["warn_independent_sampling"] = False  # for conditional parameters
            case "cmaes":
                given["warn_independent_sampling"] = (
                    False  # for choices and conditional parameters
                )
                if len(sources := self._sources()) >= _FEWEST_SOURCES:
                    given["source_trials"] = sources
            case "nsgaii":
                given["population_size"] = search.startup_trials
            case "qmc":
                given["seed"] = derive_seed(self._seed, "sampler") % _SEEDS
                unconditional = self._space.unconditional().items()
                own = {
                    "number": number,
                    "space": {k: d.to_optuna() for k, d in unconditional},
                    "rest": optuna.samplers.RandomSampler(seed=seed),
                }
        kind = _CLASSES.get(name) or _load(name)
        taken = inspect.signature(kind).parameters
        given = {key: value for key, value in given.items() if key in taken}
        arguments = _checked(kind, search, *own)
        try:
            built = kind(**given | arguments | own)
        except (TypeError, ValueError) as error:
            what, fix = write_flow(given | search.arguments), "or search.startup_trials"
            if "source_trials" in given:
                what = f"{write_flow(search.arguments)} beside trials of search.warm_start"
                fix = "or leave search.warm_start out"
            raise SamplerRejected(
                f"{search.sampler} refuses {what}: {error}; change search.arguments {fix}"
            ) from error
        return built


class _NumberedSequence(IndexedQMCSampler):
    """A low-discrepancy sequence in which the number of a trial is its index.

    All trials share one sequence, so the seed of its scrambling is that of the sweep. The sampler
    `rest` draws the other parameters, with a seed for each trial.
    """

    def __init__(
        self,
        number: int,
        space: dict[str, BaseDistribution],
        rest: BaseSampler,
        *,
        seed: int,
        scramble: bool = True,
        qmc_type: str = "sobol",
    ) -> None:
        super().__init__(
            scramble=scramble,
            seed=seed,
            qmc_type=qmc_type,
            independent_sampler=rest,
            warn_independent_sampling=False,
        )
        self.index = number - 1
        self._space = space

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters of every trial; none for trial 0, which is drawn independently."""
        del study, trial
        return self._space if self.index >= 0 else {}


_CLASSES: dict[str, type[BaseSampler]] = {
    "tpe": ArrayTPESampler,
    "gp": NotingGPSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
    "nsgaii": optuna.samplers.NSGAIISampler,
    "random": optuna.samplers.RandomSampler,
    "qmc": _NumberedSequence,
}


_NAMES: dict[type[BaseSampler], str] = {
    optuna.samplers.QMCSampler: "qmc",
    optuna.samplers.GPSampler: "gp",
    optuna.samplers.TPESampler: "tpe",
    **{kind: name for name, kind in _CLASSES.items()},
}


def _short(sampler: str) -> str:
    """Return the name of a sampler, also if the spec has it as `module:Class`.

    Optuna's own QMC sampler, built for each trial, would always return the first point. Its GP
    sampler would start each fit from the defaults.
    """
    return _NAMES.get(_load(sampler), sampler) if ":" in sampler else sampler


def _load(name: str) -> type[BaseSampler]:
    here, package = os.getcwd(), name.partition(":")[0].partition(".")[0]
    if hidden := hidden_by(package, here):
        raise SamplerRejected(
            f"'{name}': the name '{package}' is the trouble: {hidden[1]} has it, and {hidden[0]} "
            "is not what is imported under it; a module of yours has a name that neither Python "
            "nor an installed package has; rename the file"
        )
    if here not in sys.path:
        sys.path.append(here)  # last, as for the module of a task
    try:
        kind = import_own(name, "search.sampler")
    except ConfigError as error:
        raise SamplerRejected(error.message) from error
    if not (isinstance(kind, type) and issubclass(kind, BaseSampler)):
        raise SamplerRejected(
            f"'{name}' is no optuna.samplers.BaseSampler; a sampler is a class of that kind; "
            "derive a class from it, or write one of Optuna's, such as optuna.samplers:TPESampler"
        )
    return kind


def _checked(kind: type[BaseSampler], search: SearchConfig, *hidden: str) -> dict[str, Any]:
    """Return the arguments of the user if the class takes all of them."""
    parameters = inspect.signature(kind).parameters.values()
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters)
    taken = {
        one.name: one
        for one in parameters
        if one.kind in _BY_NAME and one.name not in (*hidden, *_OWN_ARGUMENTS)
    }
    written = [name for name, one in taken.items() if _is_plain(one)]
    for key in search.arguments:
        if key in _OWN_ARGUMENTS:
            raise SamplerRejected(
                f"it has a key of its own; set {_OWN_ARGUMENTS[key]}", "arguments", key
            )
        if key not in taken and not anything:
            raise SamplerRejected(
                f"{search.sampler.rpartition(':')[2]} takes no such argument; valid: "
                f"{', '.join(written) or 'none'}; remove it",
                "arguments",
                key,
            )
    return search.arguments


def _is_plain(parameter: inspect.Parameter) -> bool:
    """Return whether YAML can express an argument, by its annotation: no function, no object."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return set(re.findall(r"\b[A-Z]\w*", text)) <= _PLAIN
