"""Seeds derived from names."""

from files.hashes import derive_seed


def test_seeds_differ_by_every_name_and_fit_63_bits() -> None:
    seeds = [
        derive_seed(seed, stage, step, rank) for seed in (0, 1) for stage in ("ppo", "sft") for step in range(20)
        for rank in range(4)
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all bits are used


def test_a_seed_is_the_same_in_every_process() -> None:
    # hashlib.blake2b(b"7/sft/order", digest_size=8), read big-endian, without its lowest bit.
    import hashlib

    digest = hashlib.blake2b(b"7/sft/order", digest_size=8).hexdigest()
    assert derive_seed(7, "sft", "order") == int(digest, 16) // 2
