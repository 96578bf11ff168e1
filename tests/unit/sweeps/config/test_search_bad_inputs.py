# ruff: noqa: E501, because messages are compared whole, each on one line
"""Every way to write a search wrong, and the whole message it gets."""

from __future__ import annotations

import pytest

from tests.unit.sweeps.refused import HEAD, refusal

OPT = """\
space:
  train.optimizer.name: {choice: [sgd, adamw]}
  train.optimizer.lr: {loguniform: [1e-4, 0.1]}
"""

CASES = [
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: sgd}\n",
        [
            "s.yaml:9:45: space.train.clip.value.when: 'sgd' is not a condition; `when` maps other keys of the space to the values with which this one exists; write when: {train.optimizer.name: sgd}",
        ],
        id="condition that is none",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {}}\n",
        [
            "s.yaml:9:45: space.train.clip.value.when: an empty mapping is not a condition; `when` maps other keys of the space to the values with which this one exists; write when: {train.optimizer.name: sgd}",
        ],
        id="empty condition",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: [[sgd]]}}\n",
        [
            "s.yaml:9:68: space.train.clip.value.when.train.optimizer.name: a list or a mapping is not a value of a key; `when` maps other keys of the space to the values with which this one exists; write one value, or [a, b]",
        ],
        id="condition on a list of lists",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: []}}\n",
        [
            "s.yaml:9:68: space.train.clip.value.when.train.optimizer.name: an empty list is not a value of a key; `when` maps other keys of the space to the values with which this one exists; write one value, or [a, b]",
        ],
        id="condition without values",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.nam: sgd}}\n",
        [
            "s.yaml:9:46: space.train.clip.value.when.train.optimizer.nam: 'train.optimizer.nam' is not searched; a condition names another key of the space; did you mean 'train.optimizer.name'?",
        ],
        id="condition on an unknown key",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {seed: 3}}\n",
        [
            "s.yaml:9:46: space.train.clip.value.when.seed: 'seed' is not searched; a condition names another key of the space; search it, or leave the condition out",
        ],
        id="condition on what is not searched",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.lr: 0.1}}\n",
        [
            "s.yaml:9:46: space.train.clip.value.when.train.optimizer.lr: 'train.optimizer.lr' is drawn by loguniform; a condition names a choice and some of its options; make it a choice, or leave the condition out",
        ],
        id="condition on a range",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: [sgd, adam]}}\n",
        [
            "s.yaml:9:74: space.train.clip.value.when.train.optimizer.name[1]: 'adam' is not an option of 'train.optimizer.name'; its options: sgd, adamw; write one of them",
        ],
        id="condition on what is no option",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: adam}}\n",
        [
            "s.yaml:9:68: space.train.clip.value.when.train.optimizer.name: 'adam' is not an option of 'train.optimizer.name'; its options: sgd, adamw; write one of them",
        ],
        id="condition on one that is no option",
    ),
    pytest.param(
        "space:\n  task.a: {choice: [x, y], when: {task.a: x}}\n",
        [
            "s.yaml:7:35: space.task.a.when.task.a: 'task.a' depends on itself (task.a -> task.a); remove one condition",
        ],
        id="condition on itself",
    ),
    pytest.param(
        "space:\n  task.a: {choice: [x, y], when: {task.b: x}}\n  task.b: {choice: [x, y], when: {task.a: x}}\n",
        [
            "s.yaml:7:35: space.task.a.when.task.b: 'task.a' depends on itself (task.a -> task.b -> task.a); remove one condition",
            "s.yaml:8:35: space.task.b.when.task.a: 'task.b' depends on itself (task.b -> task.a -> task.b); remove one condition",
        ],
        id="conditions in a circle",
    ),
    pytest.param(
        OPT
        + "  train.optimizer.momentum: {uniform: [0.5, 1.5], when: {train.optimizer.name: sgd}}\n",
        [
            "s.yaml:9:45: space.train.optimizer.momentum.uniform[1]: 1.5 is out of range; it must be at least 0 and below 1; write for example 0.9",
        ],
        id="a value that is wrong under its condition",
    ),
    pytest.param(
        OPT + "  train.clip.value: {when: {train.optimizer.name: sgd}}\n",
        [
            "s.yaml:9:21: space.train.clip.value: there are 0 distributions; a parameter has exactly one; write one of: uniform, loguniform, quniform, int, logint, powers, choice",
        ],
        id="a condition alone",
    ),
    pytest.param(
        OPT + "search: {constraints: [3]}\n",
        [
            "s.yaml:9:24: search.constraints[0]: 3 is not a constraint; `constraints` is a list of comparisons, each a text; write ['task.low < task.high']",
        ],
        id="a constraint that is no text",
    ),
    pytest.param(
        OPT + "search: {constraints: task.a < 3}\n",
        [
            "s.yaml:9:23: search.constraints: 'task.a < 3' is not a list; `constraints` is a list of comparisons, each a text; write ['task.low < task.high']",
        ],
        id="constraints that are no list",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.lr <']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: 'train.optimizer.lr <' cannot be read (invalid syntax); a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint that Python cannot read",
    ),
    pytest.param(
        OPT + "search: {constraints: [train.optimizer.lr + 1]}\n",
        [
            "s.yaml:9:24: search.constraints[0]: 'train.optimizer.lr + 1' compares nothing; a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint without a comparison",
    ),
    pytest.param(
        OPT + "search: {constraints: ['__import__(1) < train.optimizer.lr']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: '__import__(1)' is neither a number nor a key; a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint that calls",
    ),
    pytest.param(
        OPT + "search: {constraints: ['9 ** 9 < train.optimizer.lr']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: '9 ** 9' is neither a number nor a key; a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint with a power",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.name == \"sgd\"']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: '\"sgd\"' is neither a number nor a key; a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint with text",
    ),
    pytest.param(
        OPT + "search: {constraints: ['1 < 2']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: '1 < 2' names no key; a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint between no keys",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.lr in 3']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: 'train.optimizer.lr in 3' compares by 'in'; a constraint compares expressions of numbers, keys and + - * / // %; write for example train.batch_size * train.accumulation <= 512",
        ],
        id="a constraint by 'in'",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.ler < 1']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: 'train.optimizer.ler' is not searched and has no value; a constraint names keys of the space, or numbers below train. and task.; did you mean 'train.optimizer.lr'?",
        ],
        id="a constraint on an unknown key",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.name < 1']}\n",
        [
            "s.yaml:9:24: search.constraints[0]: 'sgd' is not a number; a constraint compares numbers; leave 'train.optimizer.name' out",
        ],
        id="a constraint on names",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.lr > 1']}\n",
        [
            "s.yaml:9:23: search.constraints: none of 10,000 random points satisfies them; a trial is drawn until its point does; loosen a constraint, or narrow the space to where they hold",
        ],
        id="constraints that nothing satisfies",
    ),
    pytest.param(
        OPT + "search: {sampler: tpee}\n",
        [
            "s.yaml:9:19: search.sampler: 'tpee' is not known here; valid: tpe, gp, cmaes, nsgaii, random, qmc, grid, or module:Class of an Optuna sampler; did you mean 'tpe'?",
        ],
        id="a sampler that is none",
    ),
    pytest.param(
        OPT + "search: {sampler: 3}\n",
        [
            "s.yaml:9:19: search.sampler: 3 is not known here; valid: tpe, gp, cmaes, nsgaii, random, qmc, grid, or module:Class of an Optuna sampler; write one of them",
        ],
        id="a sampler of another kind",
    ),
    pytest.param(
        OPT + "search: {sampler: 'optuna.samplers:'}\n",
        [
            "s.yaml:9:19: search.sampler: 'optuna.samplers:' is not known here; valid: tpe, gp, cmaes, nsgaii, random, qmc, grid, or module:Class of an Optuna sampler; write one of them",
        ],
        id="a sampler's class misspelt",
    ),
    pytest.param(
        OPT + "search: {sampler: grid}\n",
        [
            "s.yaml:8:24: space.train.optimizer.lr.loguniform: loguniform has no list of values, and the sampler is grid; a grid tries every value of choice, int and quniform; write choice: [...], or another sampler",
        ],
        id="a grid of ranges",
    ),
    pytest.param(
        "space:\n  train.batch_size: {logint: [1, 8]}\nsearch: {sampler: grid}\n",
        [
            "s.yaml:7:22: space.train.batch_size.logint: logint has no list of values, and the sampler is grid; a grid tries every value of choice, int and quniform; write choice: [...], or another sampler",
        ],
        id="a grid of weights",
    ),
    pytest.param(
        "space:\n  train.accumulation: {choice: [1, 2, 4]}\nsearch: {sampler: grid}\n",
        [
            "s.yaml:5:9: trials: there are 24 trials, and the grid has 3 points; each is tried once; write trials: 3, or add values to the space",
        ],
        id="a grid that is too small",
    ),
    pytest.param(
        "space:\n  train.accumulation: {choice: [1, 2, 4]}\nsearch: {sampler: grid, try_first: [{train.accumulation: 2}]}\n",
        [
            "s.yaml:5:9: trials: there are 24 trials, and the grid has 3 points beside the 1 of try_first; each is tried once; write trials: 4, or add values to the space",
        ],
        id="a grid that is too small beside points",
    ),
    pytest.param(
        OPT + "search: {try_first: {train.optimizer.lr: 0.1}}\n",
        [
            "s.yaml:9:21: search.try_first: a mapping is not a list; `try_first` is a list of points, each a mapping of keys of the space to values; write [{train.optimizer.lr: 0.01}]",
        ],
        id="points that are no list",
    ),
    pytest.param(
        OPT + "search: {try_first: [3, {}]}\n",
        [
            "s.yaml:9:22: search.try_first[0]: 3 is not a point; `try_first` is a list of points, each a mapping of keys of the space to values; write [{train.optimizer.lr: 0.01}]",
            "s.yaml:9:25: search.try_first[1]: an empty mapping is not a point; `try_first` is a list of points, each a mapping of keys of the space to values; write [{train.optimizer.lr: 0.01}]",
        ],
        id="a point that is none",
    ),
    pytest.param(
        OPT + "search: {try_first: [{train.optimizer.lr: [1]}]}\n",
        [
            "s.yaml:9:43: search.try_first[0].train.optimizer.lr: a list is not a single value; `try_first` is a list of points, each a mapping of keys of the space to values; write one value",
        ],
        id="a point with a list",
    ),
    pytest.param(
        OPT + "search: {try_first: [{train.optimizer.ler: 1}]}\n",
        [
            "s.yaml:9:23: search.try_first[0].train.optimizer.ler: 'train.optimizer.ler' is not searched; a point has keys of the space; did you mean 'train.optimizer.lr'?",
        ],
        id="a point with an unknown key",
    ),
    pytest.param(
        OPT
        + "search: {try_first: [{train.optimizer.lr: 1}, {train.optimizer.lr: fast}, {train.optimizer.name: adam}]}\n",
        [
            "s.yaml:9:43: search.try_first[0].train.optimizer.lr: 1 is outside {loguniform: [0.0001, 0.1]}; a point must be in the space; change the value, or widen the space",
            "s.yaml:9:68: search.try_first[1].train.optimizer.lr: 'fast' is outside {loguniform: [0.0001, 0.1]}; a point must be in the space; change the value, or widen the space",
            "s.yaml:9:98: search.try_first[2].train.optimizer.name: 'adam' is outside {choice: [sgd, adamw]}; a point must be in the space; change the value, or widen the space",
        ],
        id="a point outside",
    ),
    pytest.param(
        OPT
        + "  train.optimizer.momentum: {uniform: [0.5, 0.9], when: {train.optimizer.name: sgd}}\nsearch: {try_first: [{train.optimizer.momentum: 0.7}]}\n",
        [
            "s.yaml:10:23: search.try_first[0].train.optimizer.momentum: 'train.optimizer.momentum' exists only with train.optimizer.name: [sgd]; a point must have such a value; add one of these values to the point",
        ],
        id="a point with what does not exist",
    ),
    pytest.param(
        OPT
        + "search: {constraints: ['train.optimizer.lr < 0.01'], try_first: [{train.optimizer.lr: 0.1}]}\n",
        [
            "s.yaml:9:66: search.try_first[0]: the point violates search.constraints, whatever is drawn; change it, or a constraint",
        ],
        id="a point that violates a constraint",
    ),
    pytest.param(
        "space:\n  train.clip.value: {uniform: [1, 2]}\nsearch: {try_first: ["
        + ", ".join(["{train.clip.value: 1}"] * 25)
        + "]}\n",
        [
            "s.yaml:8:21: search.try_first: there are 25 points and 24 trials; each point is a trial; write trials: 25 or more",
        ],
        id="more points than trials",
    ),
    pytest.param(
        OPT + "search: {warm_start: 3}\n",
        [
            "s.yaml:9:22: search.warm_start: 3 is not a list; `warm_start` names earlier sweeps below the same root; write [first, second]",
        ],
        id="warm start of nothing",
    ),
    pytest.param(
        OPT + "search: {warm_start: ../x}\n",
        [
            "s.yaml:9:22: search.warm_start[0]: '../x' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        ],
        id="warm start of a path",
    ),
    pytest.param(
        OPT + "search: {warm_start: [a, a]}\n",
        [
            "s.yaml:9:26: search.warm_start[1]: 'a' is listed twice; list each sweep once",
        ],
        id="warm start twice",
    ),
    pytest.param(
        OPT + "search: {warm_start: digits}\n",
        [
            "s.yaml:9:22: search.warm_start: 'digits' is the name of this sweep; a warm start takes trials of earlier sweeps; give this sweep another name",
        ],
        id="warm start of itself",
    ),
    pytest.param(
        OPT + "search: {warm_start: a, sampler: random}\n",
        [
            "s.yaml:9:22: search.warm_start: random does not learn from trials, so it cannot use earlier ones; remove the key, or write sampler: tpe",
        ],
        id="warm start for chance",
    ),
]


@pytest.mark.parametrize(("text", "messages"), CASES)
def test_a_search_that_is_wrong_is_told_so(text: str, messages: list[str]) -> None:
    assert refusal(HEAD + text) == messages
