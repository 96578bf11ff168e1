"""What is hidden of what a user's code says, and what is left as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainable.masking import MOST_LOG_BYTES, MaskedLog, is_secret, mask


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach postgresql://ada:canary@db:5432/x", "cannot reach postgresql://[hidden]@db:5432/x"),
        ("http://tok-canary@host/p@th", "http://[hidden]@host/p@th"),
        ("API_KEY=canary was refused", "API_KEY=[hidden] was refused"),
        ("{'hub_token': 'ca nary', 'n': 1}", "{'hub_token': [hidden], 'n': 1}"),
        ('login(db_password="canary")', "login(db_password=[hidden])"),
        ("password: canary", "password: [hidden]"),
        ("said canary-in-env twice: canary-in-env", "said [hidden] twice: [hidden]"),
        ("longer: canary-in-env-and-more.", "longer: [hidden]."),
        ("KeyError: 'key'", "KeyError: 'key'"),
        ("the key is 3, token 5 of 7", "the key is 3, token 5 of 7"),
        ("short stays: abc", "short stays: abc"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "canary-in-env")
    monkeypatch.setenv("HUB_TOKEN", "canary-in-env-and-more")
    monkeypatch.setenv("SHORT_KEY", "abc")
    assert mask(text) == shown


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("DB_PASSWORD", True),
        ("password", True),
        ("hub_token", True),
        ("api-key", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("client_secret", True),
        ("key", False),
        ("tokens", False),
        ("monkey", False),
        ("AWS_ACCESS_KEY_ID", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_a_log_holds_what_is_printed_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "trial.log"
    path.write_text("before\n")
    with MaskedLog(path) as log:
        print("epoch", 1, "von s3://u:canary@bucket ä", file=log)
    assert path.read_text(encoding="utf-8") == "before\nepoch 1 von s3://[hidden]@bucket ä\n"


def test_what_is_no_text_is_told_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / "trial.log"
    with MaskedLog(path) as log:
        print(FileNotFoundError("caf\udce9.bin"), file=log)
    assert path.read_text() == "caf\\udce9.bin\n"
    assert mask("caf\udce9.bin \ud83d") == "caf\\udce9.bin \\ud83d"


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trial.log"
    for start in (0, 20):  # also where it was opened again
        with MaskedLog(path) as log:
            for number in range(start, start + 20):
                print(number, "x" * (1 << 20), number, file=log)
    text = path.read_text()
    assert len(text) <= MOST_LOG_BYTES
    assert text.startswith("0 xxx")
    assert text.endswith("xxx 39\n")
    [told] = re.findall(r"\n\[about (\d+) bytes were cut here: .*\]\n", text)
    printed = 40 * (2**20 + 6) - 2 * 10
    assert int(told) + len(text) == pytest.approx(printed, abs=1000)
