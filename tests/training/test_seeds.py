"""Seeds derived from names."""

import torch

from training.seeds import derive_seed, seed_step


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


def test_a_steps_draws_do_not_depend_on_what_was_drawn_before() -> None:
    seed_step(3, "sft", 5, 0)
    first = torch.rand(4)
    torch.rand(17)
    seed_step(3, "sft", 5, 0)
    assert torch.equal(torch.rand(4), first)
    for other in ((3, "sft", 6, 0), (3, "sft", 5, 1), (3, "rm", 5, 0), (4, "sft", 5, 0)):
        seed_step(*other)
        assert not torch.equal(torch.rand(4), first)
