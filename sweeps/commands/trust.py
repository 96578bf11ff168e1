"""`sweep trust`: to which stores this user lets credentials go.

What must not live here: what is asked before a store is connected to (`store_access`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.console import AsJson, input_errors, out, show_found


def trust(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS]...", help="Stores to allow.", show_default=False),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget the addresses instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let credentials go to a tracking server, database or bucket; without ADDRESS, list them."""
    from sweeps.commands import messages
    from sweeps.errors import UserError
    from tracking import store_origin, trusted_stores

    with input_errors():
        for address in addresses or ():
            if not trusted_stores.can_be_trusted(address):
                raise UserError(
                    "the address is not valid; it is SCHEME://HOST:PORT, without a password, as "
                    "tracking.uri or storage.ledger has it; write for example "
                    "https://mlflow.example or postgresql://db.example"
                )
        for address in addresses or ():
            origin = store_origin.origin_of(address)
            if not forget:
                trusted_stores.remember(address, explicit=True)
                said = f"credentials may go to {origin}"
            elif trusted_stores.forget(address):
                said = f"{origin} is forgotten"
            else:
                said = f"{origin} was not in {trusted_stores.trust_file()}"
            if not as_json:
                messages.sentence(out, said, style="")
        found = trusted_stores.trusted()
    if as_json or not addresses:
        show_found(found, as_json, lambda: "\n".join(found) or "no store is trusted yet")
