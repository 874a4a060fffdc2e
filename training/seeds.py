"""Seeds derived from names, so that no random draw depends on what was drawn before it."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed for one purpose, such as `derive_seed(run_seed, "ppo", step, rank)`."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
