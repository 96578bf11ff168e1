# ruff: noqa: E501, because a spec stands on one line
"""Every invalid spec file is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sweeps.errors import SpecError
from sweeps.spec.spec import load_spec
from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

CASES = [
    pytest.param(
        "",
        id="01 empty file",
    ),
    pytest.param(
        "# nothing\n",
        id="01 comment only",
    ),
    pytest.param(
        "- a\n",
        id="02 top-level list",
    ),
    pytest.param(
        "digits\n",
        id="02 top-level scalar",
    ),
    pytest.param(
        "name: a\nbudget:\n\tepochs: 3\n",
        id="03 tab indent",
    ),
    pytest.param(
        HEAD + "train: {batch_size: [3\nseed: 0\n",
        id="04 unclosed bracket",
    ),
    pytest.param(
        HEAD + "tracking: 'val/loss\n",
        id="04 unclosed quote",
    ),
    pytest.param(
        HEAD + "train:\n  batch_size: 3\n  batch_size: 4\n",
        id="05 duplicate key",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {learning_rte: 1}}\n",
        id="06 misspelt key",
    ),
    pytest.param(
        HEAD + "lr: 0.1\n",
        id="06 key of another section",
    ),
    pytest.param(
        HEAD + "search: {seed: 1}\n",
        id="06 key of the top in a section",
    ),
    pytest.param(
        HEAD + "train: {clip: {colour: red}}\n",
        id="06 nothing near",
    ),
    pytest.param(
        HEAD + "train:\n  optimizer:\n    lr: 1,5e-4\n",
        id="08 decimal comma",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {lr: 1,5e-4}}\n",
        id="08 decimal comma in braces",
    ),
    pytest.param(
        HEAD + "seed: 012\n",
        id="10 leading zero",
    ),
    pytest.param(
        HEAD + "time: 12:30:00\n",
        id="11 unknown time",
    ),
    pytest.param(
        HEAD + "seed: 12:30:00\n",
        id="11 sexagesimal is text",
    ),
    pytest.param(
        HEAD + "seed: !!python/object/apply:os.system [ls]\n",
        id="12 python object",
    ),
    pytest.param(
        "a: " + "[" * 40 + "]" * 40,
        id="13 nested too deep",
    ),
    pytest.param(
        HEAD + "train:\n  batch_size: ${BATCH}\n",
        id="53 unset variable",
    ),
    pytest.param(
        HEAD + "train:\n  precision: ${API_TOKEN}\n",
        id="53 secret",
    ),
    pytest.param(
        "name: digits\ntask: {name: x, api_key: geheim, pad_token: 0, db: {password: geheim}, use_key: true, own_token: null}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="53 secret arguments",
    ),
    pytest.param(
        HEAD
        + "space:\n  task.hub_token: {choice: [geheim, b]}\n  task.data: {choice: ['s3://u:geheim@b', c]}\nsearch: {sampler: 'm:S', arguments: {api_key: geheim}}\n",
        id="53 secrets elsewhere",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: ${a b}\nmode: min\ntrials: 24\n",
        id="53 no variable's name",
    ),
    pytest.param(
        HEAD + "seed: 99999999999999999999\n",
        id="huge number",
    ),
    pytest.param(
        HEAD + "---\na: 1\n",
        id="two documents",
    ),
    pytest.param(
        HEAD + "seed: *x\n",
        id="alias of nothing",
    ),
    pytest.param(
        HEAD + "seed: @x\n",
        id="special character",
    ),
    pytest.param(
        HEAD + " seed: 3\n",
        id="wrong indentation",
    ),
    pytest.param(
        "name: \x01\n",
        id="control character",
    ),
    pytest.param(
        'name: digits\ntask: digits\nmetric: "\\ud800"\nmode: min\ntrials: 24\n',
        id="half a character",
    ),
    pytest.param(
        "name: digits\ntask:\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="a section without defaults",
    ),
    pytest.param(
        'name: "\\U00110000"\n',
        id="escape of no character",
    ),
    pytest.param(
        'name: "\\UFFFFFFFF"\n',
        id="escape of a number beyond all characters",
    ),
    pytest.param(
        HEAD + "seed: ${NO_1}${NO_1}${NO_2}\n",
        id="a variable that is not set, twice",
    ),
]


@pytest.mark.parametrize("text", CASES)
def test_invalid_file_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(text))


def test_14_a_file_over_the_size_limit(request: pytest.FixtureRequest) -> None:
    compare_messages(request, refusal(HEAD + "# " + "x" * 1024 * 1024))


def test_15_a_file_that_is_not_utf8(request: pytest.FixtureRequest) -> None:
    compare_messages(request, refusal(b"name: caf\xe9\n"))


def test_file_name_that_is_not_utf8(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"t\xe9st.yaml")
    path.write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    compare_messages(request, [str(caught.value).replace(str(tmp_path), "{tmp_path}")])


def test_a_file_that_is_not_there(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    compare_messages(request, [str(caught.value).replace(str(tmp_path), "{tmp_path}")])


def test_a_directory_is_not_a_spec(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path)
    compare_messages(request, [str(caught.value).replace(str(tmp_path), "{tmp_path}")])


def test_13_aliases_are_counted_in_full(request: pytest.FixtureRequest) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    compare_messages(request, refusal("\n".join(lines)))


def test_a_long_file_is_given_up_early() -> None:
    [message] = refusal(b"a: [" + b"1," * 400_000 + b"]")
    assert "holds more than 10000 values" in message
