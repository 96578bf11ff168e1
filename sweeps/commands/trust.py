"""`sweep trust`: list and edit the stores to which credentials may be sent.

What must not live here: the check before a connection to a store (`store_access`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.console import AsJson, input_errors, out, show_found


def trust(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Stores to allow, or file:// and a directory; none: list them.",
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the addresses from the list instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Allow sending credentials to a store, or writing to a directory outside of a root."""
    from sweeps.commands import messages
    from sweeps.errors import UserError
    from tracking import store_origin, trusted_stores

    with input_errors():
        for address in addresses or ():
            if not trusted_stores.can_be_trusted(address):
                raise UserError(
                    "the address is not valid; it is SCHEME://HOST:PORT, without a password, as "
                    "tracking.uri has it; write for example https://mlflow.example or "
                    "postgresql://db.example"
                )
        for address in addresses or ():
            origin = store_origin.origin_of(address)
            if not forget:
                trusted_stores.add_trusted(address, explicit=True)
                what = (
                    "sweeps may write to"
                    if origin.startswith("file:")
                    else "credentials may be sent to"
                )
                message = f"{what} {origin}"
            elif trusted_stores.remove_trusted(address):
                message = f"{origin} is removed from {trusted_stores.trust_file()}"
            else:
                message = f"{origin} was not in {trusted_stores.trust_file()}"
            if not as_json:
                messages.sentence(out, message, style="")
        found = trusted_stores.trusted()
    if as_json or not addresses:
        show_found(found, as_json, lambda: "\n".join(found) or "no store is trusted yet")
