"""Rollouts and batches against loops over rows and columns."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

from ppo.rollout import PolicyBatch, Rollout, ValueBatch

PROMPTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42]]
RESPONSES = [[14, 15], [22, 23, 24, 25], [36], [43, 44, 45]]
FINISHED = [True, False, True, False]
LOGPROBS = [[-0.5, -1.5], [-0.25, -0.75, -1.25, -3.0], [-2.5], [-4.0, -0.125, -2.0]]
ROWS = [70, 30, 30, 10]
PAD, R = 99, 4


@pytest.fixture
def rollout() -> Rollout:
    return Rollout.of(ROWS, PROMPTS, RESPONSES, FINISHED, LOGPROBS, max_new_tokens=R, pad_id=PAD)


def rows_hold(rollout: Rollout, rows: list[int]) -> None:
    """The rollout is that of these rows of the lists above, in this order."""
    assert len(rollout) == len(rows)
    assert rollout.max_new_tokens == R
    for place, row in enumerate(rows):
        whole = PROMPTS[row] + RESPONSES[row]
        assert rollout.tokens_BT[place, : len(whole)].tolist() == whole
        assert int(rollout.prompt_rows_B[place]) == ROWS[row]
        assert int(rollout.prompt_tokens_B[place]) == len(PROMPTS[row])
        assert int(rollout.response_tokens_B[place]) == len(RESPONSES[row])
        assert bool(rollout.finished_B[place]) == FINISHED[row]
        mask = rollout.response_mask_BR[place]
        assert mask.tolist() == [t < len(RESPONSES[row]) for t in range(R)]
        assert rollout.response_BR[place][mask].tolist() == RESPONSES[row]
        assert rollout.behaviour_logprobs_BR[place].tolist() == LOGPROBS[row] + [0.0] * (R - len(RESPONSES[row]))
        first = len(PROMPTS[row])
        for column in range(rollout.tokens_BT.shape[1]):
            # A state is the position before a response token: the prompt's last token predicts the first.
            predicts = first <= column + 1 < len(whole)
            assert bool(rollout.states_BT[place, column]) == predicts


def test_of_lays_prompts_and_responses_side_by_side(rollout: Rollout) -> None:
    rows_hold(rollout, [0, 1, 2, 3])
    assert rollout.tokens_BT[1].tolist() == [21, 22, 23, 24, 25, PAD, PAD, PAD, PAD]
    assert rollout.response_BR.shape == rollout.response_mask_BR.shape == (4, R)


def test_a_response_as_long_as_allowed_reaches_the_last_column() -> None:
    full = Rollout.of([7], [[1, 2]], [[3, 4, 5]], [False], [[-1.0, -1.0, -1.0]], max_new_tokens=3, pad_id=0)
    assert full.response_BR.tolist() == [[3, 4, 5]]


def test_lists_are_without_padding(rollout: Rollout) -> None:
    assert rollout.token_lists() == (PROMPTS, RESPONSES)


def test_spread_puts_flat_numbers_where_the_states_are(rollout: Rollout) -> None:
    # Number each position by row and column; picking the states must give each response token its predecessor.
    numbered = torch.arange(4)[:, None] * 100.0 + torch.arange(rollout.tokens_BT.shape[1])
    spread = rollout.spread(numbered[rollout.states_BT])
    for row in range(4):
        for t in range(R):
            expected = row * 100 + len(PROMPTS[row]) - 1 + t if t < len(RESPONSES[row]) else 0
            assert float(spread[row, t]) == expected


def test_spread_lets_gradients_through(rollout: Rollout) -> None:
    flat = torch.arange(10.0, requires_grad=True)
    (rollout.spread(flat) * 3).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [3.0] * 10


@pytest.mark.parametrize(
    ("index", "rows", "width"),
    [(slice(0, 2), [0, 1], 5), (slice(1, 2), [1], 5), (slice(2, 4), [2, 3], 6), (torch.tensor([3, 0]), [3, 0], 5)],
)
def test_rows_trim_columns_and_keep_r(
    rollout: Rollout, index: slice | torch.Tensor, rows: list[int], width: int
) -> None:
    part = rollout.rows(index)
    rows_hold(part, rows)
    assert part.tokens_BT.shape[1] == width
    assert part.response_BR.shape == (len(rows), R)


def test_join_of_parts_of_different_widths(rollout: Rollout) -> None:
    narrow, wide = rollout.rows(slice(0, 2)), rollout.rows(slice(2, 4))
    assert narrow.tokens_BT.shape[1] < wide.tokens_BT.shape[1]
    rows_hold(Rollout.join([narrow, wide]), [0, 1, 2, 3])
    rows_hold(Rollout.join([wide, narrow]), [2, 3, 0, 1])


def test_a_saved_rollout_comes_back_as_it_was(rollout: Rollout, tmp_path: Path) -> None:
    for number, part in enumerate((rollout, rollout.rows(slice(0, 2)))):  # of rows cut narrower, too
        (tmp_path / f"{number}.safetensors").write_bytes(part.as_bytes())
        found = Rollout.load(tmp_path / f"{number}.safetensors")
        for field in fields(Rollout):
            saved, loaded = getattr(part, field.name), getattr(found, field.name)
            assert saved.dtype == loaded.dtype
            assert torch.equal(saved, loaded)


def numbered() -> torch.Tensor:
    return torch.arange(4)[:, None] * 10.0 + torch.arange(R)


def test_rows_of_a_policy_batch(rollout: Rollout) -> None:
    batch = PolicyBatch(
        rollout, numbered(), numbered() + 0.5, rollout.response_mask_BR, num_tokens=10,
        ptx_rows=torch.tensor([5, 6, 7, 8]), num_ptx_rows=8,
    )  # fmt: skip
    part = batch.rows(slice(1, 3), slice(2, 4))
    rows_hold(part.rollout, [1, 2])
    assert part.logprobs_BR.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert part.advantages_BR.tolist() == [[10.5, 11.5, 12.5, 13.5], [20.5, 21.5, 22.5, 23.5]]
    assert part.mask_BR.tolist() == [[True] * 4, [True, False, False, False]]
    assert part.ptx_rows.tolist() == [7, 8]
    # Counts are of the whole batch: they divide the loss.
    assert (part.num_tokens, part.num_ptx_rows) == (10, 8)


def test_rows_of_a_value_batch(rollout: Rollout) -> None:
    batch = ValueBatch(rollout, numbered(), numbered() + 0.5, rollout.response_mask_BR, num_tokens=10)
    part = batch.rows(slice(3, 4))
    rows_hold(part.rollout, [3])
    assert part.values_BR.tolist() == [[30, 31, 32, 33]]
    assert part.returns_BR.tolist() == [[30.5, 31.5, 32.5, 33.5]]
    assert part.mask_BR.tolist() == [[True, True, True, False]]
    assert part.num_tokens == 10


def sent_bytes(num_ranks: int) -> int:
    """What a driver pickles for one iteration of 1,024 responses: four passes over them, an update of each model."""
    rows, prompt, response = 1024, 256, 256
    tokens_BT = torch.zeros(rows, prompt + response, dtype=torch.int64)
    lengths_B = torch.full((rows,), response)
    mask_BR, table_BR = torch.ones(rows, response, dtype=torch.bool), torch.zeros(rows, response)
    rollout = Rollout(
        tokens_BT,
        torch.arange(rows),
        torch.full((rows,), prompt),
        lengths_B,
        torch.ones(rows, dtype=torch.bool),
        table_BR,
    )
    ptx_rows = torch.arange(rows)
    policy = PolicyBatch(rollout, table_BR.clone(), table_BR.clone(), mask_BR, rows * response, ptx_rows, rows)
    value = ValueBatch(rollout, table_BR.clone(), table_BR.clone(), mask_BR, rows * response)
    total, share = 0, rows // num_ranks
    for rank in range(num_ranks):
        part = slice(rank * share, (rank + 1) * share)
        total += 4 * len(cloudpickle.dumps(rollout.rows(part)))
        total += len(cloudpickle.dumps(policy.rows(part, part))) + len(cloudpickle.dumps(value.rows(part)))
    return total


@pytest.mark.parametrize("num_ranks", [8, 512])
def test_what_is_sent_to_all_ranks_together_is_the_batch_once(num_ranks: int) -> None:
    """A view is pickled with the whole tensor that it looks into; slices sent to 512 ranks came to 512 batches."""
    per_message_bytes = 4096  # names of classes and fields
    assert sent_bytes(num_ranks) < 1.01 * sent_bytes(1) + 6 * num_ranks * per_message_bytes


def test_one_of_eight_ranks_is_sent_an_eighth() -> None:
    rows = Rollout(
        torch.zeros(1024, 2048, dtype=torch.int64),
        torch.arange(1024),
        torch.full((1024,), 1024),
        torch.full((1024,), 1024),
        torch.ones(1024, dtype=torch.bool),
        torch.zeros(1024, 1024),
    )
    share, whole = (len(cloudpickle.dumps(rows.rows(slice(0, size)))) for size in (128, 1024))
    assert share == pytest.approx(whole / 8, rel=0.01)
