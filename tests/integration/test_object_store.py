"""Checkpoints in an object store over HTTP: complete or absent, and clear errors for an
unavailable store.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray import cloudpickle
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from sweeps.artifacts import export
from sweeps.cli import messages
from sweeps.cli.app import app
from sweeps.engine.cluster import _make_check, fault_of
from sweeps.paths import TRIAL_CONFIG
from sweeps.reconcile.repairs import close_store
from sweeps.run.finalize import finalize_attempt
from sweeps.stores import best_generation, trial_files
from tests.integration.commandline import TINY
from tests.memory_recorder import MemoryRecorder
from tests.message_parts import assert_parts
from tests.object_store import BUCKET, ObjectStore, named_by_environment
from tests.time_limits import scaled
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import StorageError, WriterReplaced
from trainable.store import objects
from trainable.store.generations import MANIFEST, STATE
from trainable.store.objects import StoreUnusable, connect, files_of, probe

PREFIX = f"s3://{BUCKET}/team/sweeps"
RUN = f"{PREFIX}/digits/trials/0007/checkpoints"
STORED = f'{TINY}storage: {{checkpoints: "{PREFIX}"}}\n'


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with (
        ObjectStore() as made,
        named_by_environment(made),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(objects, "_ATTEMPTS", 1)  # of a store that is away: seconds for each
        yield made


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    """The server with nothing in it, on a wire that is whole."""
    yield server
    if server.wire.is_cut.is_set():
        server.wire.mend()
    server.empty()


def _open(run: Path) -> CheckpointStore:
    config = CheckpointConfig(keep=2)
    return CheckpointStore(run, config, metric="val/loss", files=files_of(run, RUN))


def _reader(run: Path) -> CheckpointStore:
    return CheckpointStore(run, files=files_of(run, RUN))


def _save(store: CheckpointStore, step: int, value: float, size: int = 4):
    state = {"step": step, "model": {"weight": torch.arange(float(size)) + step}}
    store.save(lambda: state, step=step, reports=step, value=value)
    store.wait()
    return store.pointer


def _names(store: ObjectStore) -> list[str]:
    """The bucket's objects, without what comes before a generation's name."""
    prefix = RUN.removeprefix(f"s3://{BUCKET}/")
    assert all(key.startswith(f"{prefix}/") for key in store.objects())
    return sorted(key.rpartition("/")[2] for key in store.objects())


def test_checkpoints_in_bucket_and_curve_in_directory(store, tmp_path):
    writer = _open(tmp_path)
    for step, value in ((1, 0.1), (2, 0.3), (3, 0.2)):
        _save(writer, step, value)
    assert _names(store) == [MANIFEST] * 3 + [STATE] * 3 + ["writer"]
    reader = _reader(tmp_path)
    assert (reader.best().step, reader.newest().step) == (1, 3)
    assert reader.newest().address.startswith(f"{RUN}/step-00000003-")
    assert files_of(tmp_path, RUN).has_writer()
    writer.close()
    assert not files_of(tmp_path, RUN).has_writer()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert _names(store) == [MANIFEST] * 3 + [STATE] * 3


@pytest.mark.usefixtures("store")
def test_replaced_writer_changes_neither_bucket_nor_curve(tmp_path):
    files = files_of(tmp_path, RUN)
    stale = CheckpointStore(tmp_path, CheckpointConfig(), metric="val/loss", files=files)
    _save(stale, 1, 0.1)
    successor = _open(tmp_path)
    with pytest.raises(WriterReplaced, match="another process has taken over"):
        _save(stale, 2, 0.1)
    with pytest.raises(WriterReplaced):
        files.replace(tmp_path / "metrics.jsonl", b"")
    stale.close()
    _save(successor, 3, 0.1)
    successor.close()
    assert [g.step for g in _reader(tmp_path).generations()] == [1, 3]


def test_upload_of_killed_worker_is_removed(store, tmp_path):
    writer = _open(tmp_path)
    first = _save(writer, 1, 0.1)
    half = f"{first.address.removeprefix('s3://').replace('step-00000001', 'step-00000002')}"
    connect().pipe_file(f"{half}/{STATE}", b"half")
    close_store(files_of(tmp_path, RUN))
    assert _names(store) == [MANIFEST, STATE]
    assert _reader(tmp_path).newest().pointer == first
    assert not files_of(tmp_path, RUN).has_writer()


def test_damaged_state_is_set_aside_in_the_bucket(store, tmp_path):
    writer = _open(tmp_path)
    _save(writer, 1, 0.1)
    newest = _save(writer, 2, 0.2)
    writer.close()
    connect().pipe_file(f"{newest.address.removeprefix('s3://')}/{STATE}", b"x" * 100)
    again = _open(tmp_path)
    assert again.resume()["step"] == 1
    again.close()
    (told,) = again.set_aside
    assert f"{newest.address}/{STATE} has 100 bytes" in told
    assert sum("/quarantine/step-00000002-" in key for key in store.objects()) == 2


def test_interrupted_upload_keeps_committed_state(store, tmp_path):
    writer = _open(tmp_path)
    first = _save(writer, 1, 0.1)
    store.wire.cut_within_upload(f"/{STATE}", after=5000)
    failed = rf"step 2 \(\d+ bytes\) could not be written to {RUN}/step-00000002-\w+: .*untouched"
    with pytest.raises(StorageError, match=failed) as refused:
        _save(writer, 2, 0.05, size=10_000)
    assert "geheim-of-tests" not in str(refused.value)
    writer.close()  # does not wait for a store that is away
    # Whatever cannot be asked is not damaged: nobody falls back, and nothing is set aside.
    for read in (_reader(tmp_path).best, _reader(tmp_path).newest):
        with pytest.raises(StorageError, match=f"{RUN} cannot be read: .*untouched; check that"):
            read()
    with pytest.raises(StorageError, match="no checkpoints can be written"):
        _open(tmp_path)
    assert not files_of(tmp_path, RUN).has_writer()

    store.wire.mend()
    assert _reader(tmp_path).best().pointer == _reader(tmp_path).newest().pointer == first
    again = _open(tmp_path)
    assert (again.resume()["step"], again.set_aside) == (1, [])
    second = _save(again, 2, 0.05, size=10_000)
    again.close()
    assert _names(store) == [MANIFEST] * 2 + [STATE] * 2
    target = tmp_path / "model.safetensors"
    command = [sys.executable, "-m", "trainable.export", second.address, str(target)]
    subprocess.run(command, check=True)
    assert torch.equal(load_file(target)["weight"], torch.arange(10_000.0) + 2)


@pytest.mark.chaos
def test_multipart_state_appears_with_its_last_part(store, tmp_path):
    size = 3 * 2**20  # 12 MiB of floats; what goes in one request is at most 10
    writer = _open(tmp_path)
    first = _save(writer, 1, 0.1)
    store.wire.cut_within_upload(rf"/{STATE}\?partNumber=2[^ ]*", after=100_000)
    with pytest.raises(StorageError, match=r"step 2 .* could not be written"):
        _save(writer, 2, 0.05, size)
    writer.close()
    store.wire.mend()
    begun = store.ask("GET", f"/{BUCKET}?uploads").decode()
    assert re.search(rf"<Key>\S+/step-00000002-\w+/{STATE}</Key>", begun), "one part is there"
    assert _names(store) == [MANIFEST, STATE, "writer"]
    assert _reader(tmp_path).newest().pointer == _reader(tmp_path).best().pointer == first

    again = _open(tmp_path)
    assert (again.resume()["step"], again.set_aside) == (1, [])
    second = _save(again, 2, 0.05, size)
    again.close()
    assert _names(store) == [MANIFEST] * 2 + [STATE] * 2
    assert [g.pointer for g in _reader(tmp_path).generations()] == [first, second]
    weight = _reader(tmp_path).load(second)["model"]["weight"]
    assert torch.equal(weight, torch.arange(float(size)) + 2)


def test_usable_store_passes_and_stays_empty(store):
    probe(PREFIX)
    probe(PREFIX, empty="digits")
    assert store.objects() == []


@pytest.mark.usefixtures("store")
def test_new_sweep_is_refused_where_objects_lie(tmp_path):
    writer = _open(tmp_path)
    _save(writer, 1, 0.1)
    writer.close()
    probe(PREFIX)
    with pytest.raises(StoreUnusable, match=f"^{PREFIX}/digits holds objects already; .*--name"):
        probe(PREFIX, empty="digits")


def _probed(prefix: str = PREFIX) -> str:
    """What is said about a store that cannot be used, which must be said soon."""
    began = time.monotonic()
    with pytest.raises(StoreUnusable) as refused:
        probe(prefix)
    assert time.monotonic() - began < scaled(15), "some 10 s where nothing else runs"
    assert "geheim-of-tests" not in str(refused.value)
    return str(refused.value)


@pytest.mark.chaos
def test_unavailable_store_is_refused(store):
    store.wire.cut()
    assert re.match(
        rf"{PREFIX} cannot be listed: .*NETWORK_CONNECTION"
        r".*; trials must list, write, read and remove objects there; correct the address, "
        r"AWS_ENDPOINT_URL, or the credentials in the environment$",
        _probed(),
    )


def test_missing_bucket_is_refused(store):
    assert "NO_SUCH_BUCKET" in _probed("s3://no-bucket-of-ours/sweeps")
    assert store.objects() == []


def test_unknown_credentials_are_refused(store):
    with store.letting_nobody_in():
        assert re.search("cannot be listed: .*(ACCESS_KEY|ACCESS_DENIED)", _probed())


def test_invalid_endpoint_is_refused(monkeypatch):
    for address, shown in (
        ("127.0.0.1:9000", "'127.0.0.1:9000'"),
        ("http://ada:geheim@host:9000", "'http://[hidden]@host:9000'"),
        ("https://host/bucket", "'https://host/bucket'"),
        ("http://[::1", "'http://[::1'"),
        ("http://host:90000", "'http://host:90000'"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
        with pytest.raises(StoreUnusable) as refused:
            probe(PREFIX)
        remedy = "write for example https://minio.example.org:9000"
        assert_parts(str(refused.value), f"AWS_ENDPOINT_URL_S3 is {shown};", remedy)


def _refused(*words: str) -> str:
    """What a command that nothing is made by says, in one line."""
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 2, done.output
    assert [path.name for path in Path().iterdir()] == ["s.yaml"]
    return re.sub(r" \(Request ID: \w+\)", "", done.stderr.removesuffix("\n"))


@pytest.mark.usefixtures("store")
def test_error_names_location_before_anything_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = "s3://no-bucket-of-ours/team/sweeps"
    Path("s.yaml").write_text(STORED.replace(PREFIX, elsewhere))
    told = (
        f"storage.checkpoints: {elsewhere} cannot be listed: When listing objects under key "
        "'team/sweeps/small/' in bucket 'no-bucket-of-ours': AWS Error NO_SUCH_BUCKET during "
        "ListObjectsV2 operation: The specified bucket does not exist; trials must list, write, "
        "read and remove objects there; correct the address, AWS_ENDPOINT_URL, or the "
        "credentials in the environment"
    )
    assert _refused("run", "s.yaml") == f"s.yaml:16:24: {told}"
    # Known here already, so that the nodes of a cluster are not asked.
    assert _refused("run", "s.yaml", "--address", "127.0.0.1:1") == f"s.yaml:16:24: {told}"

    asked = f"storage.checkpoints={PREFIX}"
    connect().pipe_file(f"{PREFIX.removeprefix('s3://')}/small/trials/0000/x", b"a stranger's")
    place = f"-s {asked}: storage.checkpoints: {PREFIX}/small"
    assert_parts(_refused("run", "s.yaml", "-s", asked), place, "; remove", "another --name")


def _seen_from_a_node(place: Path) -> str | None:
    """What is said of a node after its look, which travels by value."""
    (place / "driver").write_text("mark")
    ours = version("gradsweep")
    look = cloudpickle.loads(cloudpickle.dumps(_make_check()))
    answer = look(str(place), "node", "mark", ours, PREFIX)
    assert "geheim-of-tests" not in str(answer)
    return fault_of(answer, ours, place)


@pytest.mark.chaos
def test_node_reports_whether_it_reaches_the_store(store, tmp_path, monkeypatch):
    assert _seen_from_a_node(tmp_path) is None
    assert store.objects() == []
    store.wire.cut()
    assert re.match(
        rf"storage.checkpoints: {PREFIX} cannot be listed: .*NETWORK_CONNECTION.*; correct the "
        r"address, AWS_ENDPOINT_URL, or the credentials in the environment; a trial there has the "
        r"environment that `ray start` had$",
        str(_seen_from_a_node(tmp_path)),
    )
    objects._connect.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    remedy = f"pip install gradsweep=={version('gradsweep')}"
    seen = str(_seen_from_a_node(tmp_path))
    assert_parts(seen, f"storage.checkpoints: {PREFIX}", "(import of pyarrow.fs halted", remedy)


class _Delivered(MemoryRecorder):
    """A recorder whose server takes everything at once."""

    silence = 0.0

    def flush(self, timeout: float) -> int:
        del timeout
        return 0

    close = flush


@pytest.mark.parametrize("lost", ["before the weights are looked for", "before they are read"])
def test_store_unavailable_at_the_end_is_published_later(store, tmp_path, monkeypatch, lost):
    made = MadeSweep(tmp_path, more=f'storage: {{checkpoints: "{PREFIX}"}}')
    made.spec = made.spec.model_copy(update={"trials": 1})
    number = made.add("complete", 0.5)
    directory = made.paths.trial(number)
    directory.mkdir(parents=True)
    (directory / TRIAL_CONFIG).write_text("task: digits\n")
    config = CheckpointConfig(keep=2)
    files = trial_files(made.paths, made.spec, number)
    writer = CheckpointStore(directory, config, metric="val/loss", files=files)
    _save(writer, 10, 0.5)
    writer.close()

    def found_and_cut(*given):
        best = best_generation(*given)
        store.wire.cut()
        return best

    def ended():
        recorder = _Delivered()
        sweep = made.session(recorder)
        made.ledger.add_attempt({})
        return finalize_attempt(sweep, uninterrupted, None), recorder.runs[None]

    uninterrupted = SimpleNamespace(requested=False, exit_code=0)
    with monkeypatch.context() as patch:
        if lost == "before they are read":
            patch.setattr(export, "best_generation", found_and_cut)
        else:
            store.wire.cut()
        outcome, run = ended()
    said = str(outcome.waiting.weights)
    where = f"{PREFIX}/small/trials/0000/checkpoints"
    assert re.match(rf"the checkpoints at {where}\S* cannot be read: .*untouched; .*resume$", said)
    assert (outcome.exit_code, outcome.failure, outcome.best[0].number) == (0, None, number)
    assert (run.status, run.tags["best_checkpoint"]) == ("FINISHED", f"waiting: {said}")
    assert run.artifacts == {}
    assert not made.view.ledger.num_published, "the next resume has something to do"
    told = io.StringIO()
    monkeypatch.setattr("sys.argv", ["sweep", "run", "s.yaml"])
    messages.outcome(Console(file=io.StringIO()), Console(file=told), outcome, made.paths)
    assert told.getvalue() == (
        f"the best weights are not published: {said}; when the store answers again, publish "
        "them with:\n"
        f"sweep resume small --root {tmp_path}\n"
    )

    store.wire.mend()
    outcome, run = ended()
    assert (outcome.exit_code, outcome.waiting.weights) == (0, None)
    assert (run.status, run.tags["best_checkpoint"]) == ("FINISHED", "")
    assert "best/model.safetensors" in run.artifacts
    assert made.view.ledger.num_published == 1
