"""One request to a webhook: which addresses are accepted, and which answers count."""

from __future__ import annotations

import shlex
import socket
import ssl
import subprocess
import threading
import traceback
from pathlib import Path

import pytest

from tests.webhook_server import SECRET, webhook_server
from tracking.notifications import NotTaken, address_fault, post


def _refusal(address: str, *, timeout: float = 10.0) -> NotTaken:
    with pytest.raises(NotTaken) as refused:
        post(address, b"{}", key="one", timeout=timeout)
    error = refused.value
    assert SECRET not in "".join(traceback.format_exception(error))
    for part in (SECRET, "127.0.0.1", "services"):
        assert part not in str(error)
    return error


@pytest.mark.parametrize(
    "address",
    [
        "https://hooks.example/services/a?b=c",
        "https://hooks.example:8443",
        "https://10.1.2.3/inside",
        "http://127.0.0.1:8000/hook",
        "http://localhost/hook",
        "http://[::1]:8000/hook",
    ],
)
def test_address_is_accepted(address: str) -> None:
    assert address_fault(address) is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "hooks.example/services",
        "file:///etc/passwd",
        "ftp://hooks.example/x",
        "https://",
        "https:///services",
        "https://hooks.example:port/x",
        "https://hooks.example/x y",
        "https://hooks.example/x\r\nHost: other",
        "https://hooks.exämple/x",
        "https://ada:pass@hooks.example/x",
        "http://hooks.example/services",
        "http://10.0.0.1/services",
        "http://127.0.0.1.hooks.example/x",
        "http://127.0.0.1@hooks.example/x",
        "http://%2Fx.hooks.example/x",
        "http://127.0.0.1\\.hooks.example/x",
    ],
)
def test_address_is_refused(address: str) -> None:
    assert address_fault(address) is not None


def test_body_and_key_arrive() -> None:
    with webhook_server() as webhook:
        post(webhook.url, b'{"n": 1}', key="one")
    (one,) = webhook.received
    assert one.body == {"n": 1}
    assert one.headers["Idempotency-Key"] == "one"
    assert one.headers["Content-Type"] == "application/json"
    assert one.path == f"/services/{SECRET}?key={SECRET}"


@pytest.mark.parametrize(
    ("status", "is_final"),
    [(400, True), (403, True), (404, True), (429, False), (500, False), (503, False)],
)
def test_status_decides_if_it_is_tried_again(status: int, is_final: bool) -> None:
    with webhook_server() as webhook:
        webhook.answer = lambda _: status
        error = _refusal(webhook.url)
    assert error.is_final == is_final
    assert str(status) in str(error)


@pytest.mark.parametrize(("after", "seconds"), [("7", 7.0), ("99999", 300.0), ("soon", 0.0)])
def test_webhook_says_when_to_try_again(after: str, seconds: float) -> None:
    with webhook_server() as webhook:
        webhook.answer, webhook.headers = lambda _: 429, {"Retry-After": after}
        assert _refusal(webhook.url).seconds == seconds


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_not_followed(status: int) -> None:
    with webhook_server() as webhook, webhook_server() as other:
        webhook.answer, webhook.headers = lambda _: status, {"Location": other.url}
        assert _refusal(webhook.url).is_final
    assert len(webhook.received) == 1
    assert other.received == []


def test_request_to_slow_webhook_ends() -> None:
    answers = threading.Event()

    def wait(_: object) -> int:
        answers.wait(60)
        return 204

    with webhook_server() as webhook:
        webhook.answer = wait
        try:
            assert not _refusal(webhook.url, timeout=0.2).is_final
        finally:
            answers.set()


def test_answer_that_is_not_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(f"{SECRET} services\r\n\r\n".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        _refusal(f"http://127.0.0.1:{listener.getsockname()[1]}/services/{SECRET}")
        thread.join()


def test_no_proxy_is_between_this_machine_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook_server() as webhook, webhook_server() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        post(webhook.url, b"{}", key="one")
    assert (len(webhook.received), proxy.received) == (1, [])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that no authority has signed, with its key."""
    directory = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here "
            "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
        ),
        cwd=directory,
        check=True,
        capture_output=True,
    )
    both = directory / "both.pem"
    both.write_bytes((directory / "cert.pem").read_bytes() + (directory / "key.pem").read_bytes())
    return both


def test_certificate_is_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook_server(certificate=certificate) as webhook:
        error = _refusal(webhook.url)
        assert "certificate" in str(error)
        assert not error.is_final
        assert webhook.received == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ssl.get_default_verify_paths().cafile == str(certificate)
        post(webhook.url, b"{}", key="one")
    assert len(webhook.taken) == 1


def test_certificate_of_another_host_is_refused(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with webhook_server(certificate=certificate) as webhook:
        error = _refusal(webhook.url.replace("127.0.0.1", "localhost"))
    assert "certificate" in str(error)
    assert webhook.received == []
