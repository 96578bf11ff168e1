"""Seeds derived from names and numbers, the same on every machine and in every process."""

from __future__ import annotations

import hashlib

_SEED_BITS = 63  # torch takes 64-bit seeds; one bit less stays a positive signed integer everywhere


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part and on nothing else.

    Args:
        parts: What the seed belongs to, such as `derive_seed(sweep_seed, trial_number)` or
            `derive_seed(seed, "epoch", 3)`.
    """
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)
