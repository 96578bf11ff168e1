"""Open the notifications of a sweep: their queue, the webhook's address, and the delivery.

The address is read from the environment each time, and stored nowhere. What must not live here:
what is notified (`recording.notifications`), and HTTP (`tracking.notifications`).
"""

from __future__ import annotations

import os

from sweeps.errors import Issue, UserError
from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec
from sweeps.store_access import check_owner
from tracking.notifications import (
    NotificationDelivery,
    NotificationQueue,
    Undelivered,
    address_fault,
)
from tracking.outbox_status import read_outbox


def check_webhook(spec: SweepSpec) -> str | None:
    """Return the address of a sweep's webhook without contacting it; None if it has no webhook."""
    name = spec.notify.variable
    if name is None:
        return None
    without = "or turn notifications off with -s notify.webhook=null"
    address = os.environ.get(name, "")
    if not address:
        raise _refused(
            f"the variable {name} is not set; it holds the address that gets notifications; set "
            f"it in the environment, {without}"
        )
    if fault := address_fault(address):
        raise _refused(
            f"the value of {name} {fault}; notifications go to an https:// address, or to an "
            f"http:// address of this machine; correct the variable, {without}"
        )
    return address


def _refused(message: str) -> UserError:
    return UserError([Issue(("notify", "webhook"), message)])


def open_notifications(
    paths: SweepPaths, spec: SweepSpec, *, offline: bool
) -> tuple[NotificationQueue, NotificationDelivery]:
    """Open the queue of a sweep's notifications and start to deliver it."""
    address = check_webhook(spec)
    queue = NotificationQueue(paths.outbox)
    return queue, NotificationDelivery(queue, None if offline else address)


def deliver_waiting(paths: SweepPaths, spec: SweepSpec, *, seconds: float) -> Undelivered | None:
    """Deliver the notifications that a driver left behind."""
    before = read_outbox(paths.outbox).notifications
    if not before or spec.notify.variable is None:
        return None
    check_owner(paths.directory)
    try:
        address = check_webhook(spec)
    except UserError as error:
        return Undelivered(before, error.faults[0].message)
    return NotificationDelivery(NotificationQueue(paths.outbox), address).close(seconds)
