"""A trial's output reaches its log line by line, without secrets and control characters."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainable.processes.trial_log import (
    LONGEST_LINE,
    MOST_COPIED_BYTES,
    MOST_LOG_BYTES,
    DescriptorOutput,
    TrialLog,
)


def test_log_keeps_its_beginning_and_end(tmp_path: Path) -> None:
    path = tmp_path / "trial.log"
    for start in (0, 20):  # also where it was opened again
        with TrialLog(path) as log:
            for number in range(start, start + 20):
                print(number, "x" * (1 << 20), number, file=log)
    text = path.read_text()
    assert len(text) <= MOST_LOG_BYTES
    assert text.startswith("0 xxx")
    assert text.endswith("xxx 39\n")
    [told] = re.findall(r"\n\[about (\d+) bytes were cut here: .*\]\n", text)
    printed = 40 * (2**20 + 6) - 2 * 10
    assert int(told) + len(text) == pytest.approx(printed, abs=1000)


CANARY = "canary-in-env"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialLog:
    monkeypatch.setenv("DB_PASS", CANARY)
    return TrialLog(tmp_path / "trial.log")


def _text(log: TrialLog) -> str:
    log.close()
    return Path(log._path).read_bytes().decode()


@pytest.mark.parametrize("size", [1, 2, 5, len(CANARY)])
def test_value_split_over_many_writes_is_hidden(log: TrialLog, size: int) -> None:
    text = f"as {CANARY}, API_KEY='a b'\nthen"
    for start in range(0, len(text), size):
        log.write(text[start : start + size])
        log.flush()
    assert _text(log) == "as [hidden], API_KEY=[hidden]\nthen"


def test_bytes_are_redacted_too(log: TrialLog) -> None:
    for byte in f"é {CANARY}".encode():
        log.buffer.write(bytes([byte]))
    log.buffer.write(b"\xff\n")
    print(FileNotFoundError("caf\udce9.bin"), file=log)
    assert _text(log) == "é [hidden]\\xff\ncaf\\udce9.bin\n"


def test_lines_survive_the_end_of_the_process(tmp_path: Path) -> None:
    program = (
        "import os, sys; from trainable.processes.trial_log import TrialLog; "
        "log = TrialLog(sys.argv[1]); "
        "print('said', file=log); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "trial.log")], check=False)
    assert (tmp_path / "trial.log").read_text() == "said\n"


def test_progress_bar_states_become_lines(log: TrialLog) -> None:
    for percent in (10, 20):
        log.write(f"\r{percent}% |##\x1b[A")
    log.write("\r\ndone\r")
    log.write("\nagain\x9b2J\u202e\n")
    assert _text(log) == "\n10% |##\\x1b[A\n20% |##\\x1b[A\ndone\nagain\\x9b2J\\u202e\n"


@pytest.mark.parametrize("before", [0, 3])
def test_endless_line_is_bounded_and_redacted(log: TrialLog, before: int) -> None:
    for _ in range(3):
        log.write("-" * (LONGEST_LINE - before))
        for character in CANARY:
            log.write(character)
    log.write("\n")
    text = _text(log)
    assert "canary" not in text
    assert text == ("-" * (LONGEST_LINE - before) + "[hidden]") * 3 + "\n"


def _say(log: TrialLog) -> None:
    log.write(f"child {CANARY}")
    log.flush()  # as multiprocessing does at a child's end
    os._exit(0)


def test_forked_process_writes_only_its_own_lines(log: TrialLog) -> None:
    log.write("parent ")
    child = multiprocessing.get_context("fork").Process(target=_say, args=(log,))
    child.start()
    child.join()
    log.write("again\n")
    assert _text(log) == "child [hidden]parent again\n"


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A file of Ray's that has the output of an earlier trial."""
    number = os.open(tmp_path / "worker.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, b"of an earlier trial\n")
    yield number
    with contextlib.suppress(OSError):
        os.close(number)


def test_output_below_python_reaches_the_log(log: TrialLog, descriptor: int) -> None:
    output = DescriptorOutput([descriptor])
    os.write(descriptor, f":actor_name:TuneTrial\nfrom C, {CANARY}\n".encode())
    subprocess.run(["echo", "of a child"], stdout=descriptor, check=True)
    output.copy_to(log)
    print("from Python", file=log)
    os.write(descriptor, b"\xff no line end")
    output.copy_to(log)
    output.copy_to(log)
    assert _text(log) == ("from C, [hidden]\nof a child\nfrom Python\n\\xff no line end\n")


def test_much_output_below_python_is_cut_and_said(log: TrialLog, descriptor: int) -> None:
    output = DescriptorOutput([descriptor])
    os.write(descriptor, b"first\n" + b"x" * MOST_COPIED_BYTES + b"\nlast\n")
    output.copy_to(log)
    text = _text(log)
    assert text.startswith(f"[12 bytes to descriptor {descriptor} are left out here]\nx")
    assert text.endswith("x\nlast\n")
    assert "first" not in text


def test_descriptors_that_are_no_file_are_left_alone(
    log: TrialLog, descriptor: int, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    output = DescriptorOutput([writer, descriptor, 987])
    os.write(writer, b"piped")
    with (tmp_path / "own").open("wb") as own:
        own.write(b"x" * 1000)
        own.flush()
        os.dup2(own.fileno(), descriptor)  # as a task may do
        output.copy_to(log)
    os.close(descriptor)
    output.copy_to(log)
    assert os.read(reader, 100) == b"piped"
    os.close(reader)
    os.close(writer)
    assert _text(log) == ""
