"""What the driver sends in an iteration of PPO, with the real controller."""

from benchmarks.driver_calls import controller_on


def test_bytes_do_not_grow_with_the_ranks() -> None:
    """Each call sends one message per rank; the digests of the weights and the test of draws take only one in total."""
    num_calls, num_bytes = list[int](), list[int]()
    for num_ranks in (1, 64):
        controller, ranks = controller_on(num_ranks, num_responses=128, num_tokens=128)
        controller.step(0)
        num_calls.append(ranks.num_calls)
        num_bytes.append(ranks.num_bytes)
    passes_and_updates = (5 + 4 * 2, 5 + 2 * 2)  # a minibatch has at least one response per rank
    assert num_calls == [2 + passes_and_updates[0], 2 + 64 * passes_and_updates[1]]
    assert num_bytes[1] < num_bytes[0] + num_calls[1] * 2048
