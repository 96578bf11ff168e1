# ruff: noqa: E501, because messages are compared whole, each on one line
"""Every way in which a spec's file is not one, and the whole message it gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sweeps.config.spec import load_spec
from sweeps.errors import SpecError
from tests.unit.sweeps.refused import HEAD, refusal

CASES = [
    pytest.param(
        "",
        [
            "s.yaml:1:1: the file is empty; a spec is a mapping of keys; `sweep init` writes one to start from",
        ],
        id="01 empty file",
    ),
    pytest.param(
        "# nothing\n",
        [
            "s.yaml:1:1: the file is empty; a spec is a mapping of keys; `sweep init` writes one to start from",
        ],
        id="01 comment only",
    ),
    pytest.param(
        "- a\n",
        [
            "s.yaml:1:1: the top level is a list; a spec is a mapping of keys; begin with `name: my_sweep`",
        ],
        id="02 top-level list",
    ),
    pytest.param(
        "digits\n",
        [
            "s.yaml:1:1: the top level is a single value; a spec is a mapping of keys; begin with `name: my_sweep`",
        ],
        id="02 top-level scalar",
    ),
    pytest.param(
        "name: a\nbudget:\n\tepochs: 3\n",
        [
            "s.yaml:3:1: there is a tab where YAML expects spaces; indentation is spaces only; replace the tab by two spaces",
        ],
        id="03 tab indent",
    ),
    pytest.param(
        HEAD + "train: {batch_size: [3\nseed: 0\n",
        [
            "s.yaml:6:21: '[' is opened here and not closed properly (expected ',' or ']', but got ':'); every bracket and quote must be closed; close it",
        ],
        id="04 unclosed bracket",
    ),
    pytest.param(
        HEAD + "tracking: 'val/loss\n",
        [
            "s.yaml:6:11: a quote is opened here and not closed properly (found unexpected end of stream); every bracket and quote must be closed; close it",
        ],
        id="04 unclosed quote",
    ),
    pytest.param(
        HEAD + "train:\n  batch_size: 3\n  batch_size: 4\n",
        [
            "s.yaml:8:3: train.batch_size: the key 'batch_size' is on line 7 and again on line 8; a key appears once; remove one of them",
        ],
        id="05 duplicate key",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {learning_rte: 1}}\n",
        [
            "s.yaml:6:21: train.optimizer.learning_rte: unknown key 'learning_rte'; did you mean 'lr'?",
        ],
        id="06 misspelt key",
    ),
    pytest.param(
        HEAD + "lr: 0.1\n",
        [
            "s.yaml:6:1: lr: unknown key 'lr' here; did you mean 'train.optimizer.lr'?",
        ],
        id="06 key of another section",
    ),
    pytest.param(
        HEAD + "train: {clip: {colour: red}}\n",
        [
            "s.yaml:6:16: train.clip.colour: unknown key 'colour'; valid keys: max_norm, value",
        ],
        id="06 nothing near",
    ),
    pytest.param(
        HEAD + "train:\n  optimizer:\n    lr: 1,5e-4\n",
        [
            "s.yaml:8:9: train.optimizer.lr: '1,5e-4' has the wrong type; expected a number above 0; did you mean 1.5e-4? The decimal mark is a point",
        ],
        id="08 decimal comma",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {lr: 1,5e-4}}\n",
        [
            "s.yaml:6:27: train.optimizer.5e-4: unknown key '5e-4'; valid keys: name, lr, weight_decay, betas, momentum, nesterov, eps",
        ],
        id="08 decimal comma in braces",
    ),
    pytest.param(
        HEAD + "seed: 012\n",
        [
            "s.yaml:6:7: seed: 012 begins with a zero; some readers take such a number as octal; write 12, or '012' in quotes for text",
        ],
        id="10 leading zero",
    ),
    pytest.param(
        HEAD + "time: 12:30:00\n",
        [
            "s.yaml:6:1: time: unknown key 'time'; valid keys: version, name, task, metric, mode, trials, seed, concurrency, budget, space, search, early_stopping, stop, resources, train, checkpoint, tracking, storage, failures",
        ],
        id="11 unknown time",
    ),
    pytest.param(
        HEAD + "seed: 12:30:00\n",
        [
            "s.yaml:6:7: seed: '12:30:00' has the wrong type; expected a whole number at least 0; write for example 0",
        ],
        id="11 sexagesimal is text",
    ),
    pytest.param(
        HEAD + "seed: !!python/object/apply:os.system [ls]\n",
        [
            "s.yaml:6:7: the tag !!python/object/apply:os.system is refused; a spec is plain data and holds no objects; remove the tag",
        ],
        id="12 python object",
    ),
    pytest.param(
        "a: " + "[" * 40 + "]" * 40,
        [
            "s.yaml:1:36: is nested deeper than 32 levels; a spec is flat; remove levels",
        ],
        id="13 nested too deep",
    ),
    pytest.param(
        HEAD + "train:\n  batch_size: ${BATCH}\n",
        [
            "s.yaml:7:15: train.batch_size: ${BATCH} is not set; variables come from the environment; run `export BATCH=...` first, or write the value",
        ],
        id="53 unset variable",
    ),
    pytest.param(
        HEAD + "train:\n  precision: ${API_TOKEN}\n",
        [
            "s.yaml:7:14: train.precision: ${API_TOKEN} looks like a secret; a spec is stored and tracked unencrypted; let the task read API_TOKEN from the environment",
        ],
        id="53 secret",
    ),
    pytest.param(
        "name: digits\ntask: {name: x, api_key: geheim, pad_token: 0, db: {password: geheim}, use_key: true, own_token: null}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            f"s.yaml:2:{column}: task.{key}: {name} looks like a secret; a spec is stored and tracked unencrypted; let the task read it from the environment, or give it another name"
            for column, key, name in (
                (17, "api_key", "api_key"),
                (34, "pad_token", "pad_token"),
                (53, "db.password", "password"),
            )
        ],
        id="53 secret arguments",
    ),
    pytest.param(
        HEAD
        + "space:\n  task.hub_token: {choice: [geheim, b]}\n  task.data: {choice: ['s3://u:geheim@b', c]}\nsearch: {sampler: 'm:S', arguments: {api_key: geheim}}\n",
        [
            "s.yaml:7:3: space.task.hub_token: hub_token looks like a secret; a spec is stored and tracked unencrypted; let the task read it from the environment, or give it another name",
            "s.yaml:8:24: space.task.data.choice[0]: the address holds credentials; a spec is stored and tracked unencrypted; let the task read them from the environment",
            "s.yaml:9:38: search.arguments.api_key: api_key looks like a secret; a spec is stored and tracked unencrypted; let the task read it from the environment, or give it another name",
        ],
        id="53 secrets elsewhere",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: ${a b}\nmode: min\ntrials: 24\n",
        [
            "s.yaml:3:9: metric: ${a b} names no variable; a name is letters, digits and '_'; write $${ for the characters ${",
        ],
        id="53 no variable's name",
    ),
    pytest.param(
        HEAD + "seed: 99999999999999999999\n",
        [
            "s.yaml:6:7: seed: 99999999999999999999 is too large; whole numbers have at most 63 bits; write a smaller number",
        ],
        id="huge number",
    ),
    pytest.param(
        HEAD + "---\na: 1\n",
        [
            "s.yaml:6:1: a second document begins; a spec is one document; remove the line '---'",
        ],
        id="two documents",
    ),
    pytest.param(
        HEAD + "seed: *x\n",
        [
            "s.yaml:6:7: *x refers to nothing; an alias needs an anchor &x before it; write the value, or put a text with * in quotes",
        ],
        id="alias of nothing",
    ),
    pytest.param(
        HEAD + "seed: @x\n",
        [
            "s.yaml:6:7: not YAML (found character '@' that cannot start any token); values with special characters need quotes; correct the line, or quote the text",
        ],
        id="special character",
    ),
    pytest.param(
        HEAD + " seed: 3\n",
        [
            "s.yaml:6:6: a second ':' in one value, or a wrong indentation; keys of one mapping start in one column; align it, or put the text in quotes",
        ],
        id="wrong indentation",
    ),
    pytest.param(
        "name: \x01\n",
        [
            "s.yaml:1:7: character 0x01 is not allowed; YAML is printable text; remove it, or write it as an escape in double quotes",
        ],
        id="control character",
    ),
    pytest.param(
        'name: digits\ntask: digits\nmetric: "\\ud800"\nmode: min\ntrials: 24\n',
        [
            "s.yaml:3:9: metric: '\\ud800' has half a character (a lone surrogate); text is Unicode; write the character itself",
        ],
        id="half a character",
    ),
    pytest.param(
        "name: digits\ntask:\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:2:1: task: null has the wrong type; expected a section with keys of its own; write for example digits",
        ],
        id="a section without defaults",
    ),
    pytest.param(
        'name: "\\U00110000"\n',
        [
            "s.yaml:1:1: not YAML (chr() arg not in range(0x110000)); see https://yaml.org for the rules",
        ],
        id="escape of no character",
    ),
    pytest.param(
        'name: "\\UFFFFFFFF"\n',
        [
            "s.yaml:1:1: not YAML (Python int too large to convert to C int); see https://yaml.org for the rules",
        ],
        id="escape of a number beyond all characters",
    ),
    pytest.param(
        HEAD + "seed: ${NO_1}${NO_1}${NO_2}\n",
        [
            "s.yaml:6:7: seed: ${NO_1} is not set; variables come from the environment; run `export NO_1=...` first, or write the value",
            "s.yaml:6:7: seed: ${NO_2} is not set; variables come from the environment; run `export NO_2=...` first, or write the value",
        ],
        id="a variable that is not set, twice",
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_the_whole_message(text: str, expected: list[str]) -> None:
    assert refusal(text) == expected


def test_14_a_file_over_the_size_limit() -> None:
    assert refusal(HEAD + "# " + "x" * 1024 * 1024) == [
        "s.yaml: is larger than 1048576 bytes; a spec is a short file; keep data in files of its own"
    ]


def test_15_a_file_that_is_not_utf8() -> None:
    assert refusal(b"name: caf\xe9\n") == [
        "s.yaml: byte 9 (0xe9) is not UTF-8; a spec is UTF-8 text; save the file as UTF-8"
    ]


def test_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"t\xe9st.yaml")
    path.write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == (
        f"{tmp_path}/t\\udce9st.yaml: a part of it is not UTF-8, which Ray requires of a command line; use a path that is UTF-8"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == (
        f"{path}: there is no such file; a spec is a YAML file; `sweep init` writes one to start from"
    )


def test_a_directory_is_not_a_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: cannot be read (Is a directory); a spec is a YAML file; name a readable one"
    )


def test_13_aliases_are_counted_in_full() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    assert refusal("\n".join(lines)) == [
        "s.yaml:1:35: holds more than 10000 values, aliases counted in full; a spec is a short file; remove aliases or keep data in files of its own"
    ]


def test_a_long_file_is_given_up_early() -> None:
    [message] = refusal(b"a: [" + b"1," * 400_000 + b"]")
    assert "holds more than 10000 values" in message
