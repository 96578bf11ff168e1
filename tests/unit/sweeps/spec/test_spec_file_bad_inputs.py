# ruff: noqa: E501, because a spec stands on one line
"""Every invalid spec file is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sweeps.errors import SpecError
from sweeps.spec.spec import load_with_positions
from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

CASES = {
    "01 empty file": "",
    "01 comment only": "# nothing\n",
    "02 top-level list": "- a\n",
    "02 top-level scalar": "digits\n",
    "03 tab indent": "name: a\nbudget:\n\tepochs: 3\n",
    "04 unclosed bracket": HEAD + "train: {batch_size: [3\nseed: 0\n",
    "04 unclosed quote": HEAD + "tracking: 'val/loss\n",
    "05 duplicate key": HEAD + "train:\n  batch_size: 3\n  batch_size: 4\n",
    "06 misspelt key": HEAD + "train: {optimizer: {learning_rte: 1}}\n",
    "06 key of another section": HEAD + "lr: 0.1\n",
    "06 key of the top in a section": HEAD + "search: {seed: 1}\n",
    "06 nothing near": HEAD + "train: {clip: {colour: red}}\n",
    "08 decimal comma": HEAD + "train:\n  optimizer:\n    lr: 1,5e-4\n",
    "08 decimal comma in braces": HEAD + "train: {optimizer: {lr: 1,5e-4}}\n",
    "10 leading zero": HEAD + "seed: 012\n",
    "11 unknown time": HEAD + "time: 12:30:00\n",
    "11 sexagesimal is text": HEAD + "seed: 12:30:00\n",
    "12 python object": HEAD + "seed: !!python/object/apply:os.system [ls]\n",
    "13 nested too deep": "a: " + "[" * 40 + "]" * 40,
    "53 unset variable": HEAD + "train:\n  batch_size: ${BATCH}\n",
    "53 secret": HEAD + "train:\n  precision: ${API_TOKEN}\n",
    "53 secret arguments": "name: digits\ntask: {name: x, api_key: geheim, pad_token: 0, db: {password: geheim}, use_key: true, own_token: null}\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "53 secrets elsewhere": HEAD
    + "space:\n  task.hub_token: {choice: [geheim, b]}\n  task.data: {choice: ['s3://u:geheim@b', c]}\nsearch: {sampler: 'm:S', arguments: {api_key: geheim}}\n",
    "53 no variable's name": "name: digits\ntask: digits\nmetric: ${a b}\nmode: min\ntrials: 24\n",
    "huge number": HEAD + "seed: 99999999999999999999\n",
    "two documents": HEAD + "---\na: 1\n",
    "alias of nothing": HEAD + "seed: *x\n",
    "alias inside of its anchor": HEAD + "seed: &x [*x]\n",
    "special character": HEAD + "seed: @x\n",
    "wrong indentation": HEAD + " seed: 3\n",
    "control character": "name: \x01\n",
    "half a character": 'name: digits\ntask: digits\nmetric: "\\ud800"\nmode: min\ntrials: 24\n',
    "a section without defaults": "name: digits\ntask:\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "escape of no character": 'name: "\\U00110000"\n',
    "escape of a number beyond all characters": 'name: "\\UFFFFFFFF"\n',
    "a variable that is not set, twice": HEAD + "seed: ${NO_1}${NO_1}${NO_2}\n",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
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
        load_with_positions(path)[0]
    compare_messages(request, [str(caught.value).replace(str(tmp_path), "{tmp_path}")])


def test_a_file_that_is_not_there(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(SpecError) as caught:
        load_with_positions(path)[0]
    compare_messages(request, [str(caught.value).replace(str(tmp_path), "{tmp_path}")])


def test_a_directory_is_not_a_spec(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_with_positions(tmp_path)[0]
    compare_messages(request, [str(caught.value).replace(str(tmp_path), "{tmp_path}")])


def test_13_aliases_are_counted_in_full(request: pytest.FixtureRequest) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    compare_messages(request, refusal("\n".join(lines)))


def test_a_long_file_is_given_up_early() -> None:
    [message] = refusal(b"a: [" + b"1," * 400_000 + b"]")
    assert "holds more than 10000 values" in message
