"""A webhook: check its address, and post JSON to it.

The address is a secret: who knows it can post. No message and no exception here contains any part
of it. What must not live here: queues and retries (`tracking.notification_delivery`), and what is
posted.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from tracking.store_origin import is_local

SECONDS = 10.0
"""How long one step of a request may take: to connect, to send, to receive."""
_MOST_SECONDS = 300.0
_VISIBLE = re.compile(r"[!-~]+")
_TEMPORARY = {408, 425, 429}
"""Answers below 500 that another attempt may change."""


class NotTaken(Exception):
    """The webhook did not take a notification; the message says why."""

    def __init__(self, reason: str, *, is_final: bool = False, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.seconds = seconds


def address_fault(address: str) -> str | None:
    """Return what is wrong with a webhook's address; None if nothing is."""
    try:
        parts = urlsplit(address)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not (has_host and _VISIBLE.fullmatch(address)):
        return "is not an address"
    if parts.scheme not in ("http", "https"):
        return "does not start with https://"
    if "@" in parts.netloc:
        return "has a user name or password before its host"
    if parts.scheme == "http" and not _is_on_this_machine(address):
        return "is an http:// address on another machine, which would receive it unencrypted"
    return None


def post(address: str, body: bytes, *, key: str, timeout: float = SECONDS) -> None:
    """Post JSON to a webhook once.

    The certificate of an https server is checked. A redirect is not followed, because it could
    lead the notification elsewhere. Proxies of the environment are used, but not to this machine.
    """
    opener = urllib.request.OpenerDirector()  # of these handlers, none follows a redirect
    opener.add_handler(urllib.request.ProxyHandler({} if _is_on_this_machine(address) else None))
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler(context=ssl.create_default_context()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "gradsweep",
        "Idempotency-Key": key,
    }
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    try:
        with opener.open(request, timeout=timeout) as response:
            status, wait = response.status, response.headers.get("Retry-After", "")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotTaken(_describe(error)) from None  # the error's text may have the address
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise NotTaken(
            f"it redirects (status {status}), and no redirect is followed", is_final=True
        )
    seconds = min(float(wait), _MOST_SECONDS) if re.fullmatch(r"\d{1,6}", wait) else 0.0
    is_final = status < 500 and status not in _TEMPORARY
    raise NotTaken(f"it answers with status {status}", is_final=is_final, seconds=seconds)


def _is_on_this_machine(address: str) -> bool:
    parts = urlsplit(address)
    return is_local(f"{parts.scheme}://{parts.netloc}")


def _describe(error: Exception) -> str:
    """Return why a request failed, without a text that may have part of the address."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    match cause:
        case ssl.SSLCertVerificationError():
            return "its certificate is not valid"
        case ssl.SSLError():
            return "no encrypted connection can be made"
        case TimeoutError():
            return "it does not answer in time"
        case socket.gaierror():
            return "its host is not found"
        case ConnectionRefusedError():
            return "it refuses connections"
        case OSError():
            return "the connection failed"
    return "it gives no valid answer"
