"""Rollouts and batches against loops over rows and columns."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle

from ppo.rank import PackedRollout
from ppo.rollout import (
    FAILURES,
    Dialogue,
    Drawn,
    PolicyBatch,
    ResponseKL,
    Rollout,
    ValueBatch,
    joined,
    shares_by_update,
    shares_of,
)
from training.config import BatchConfig

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
    """Returns the rollout of these rows of the lists above, in this order."""
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


def test_of_lays_prompts_and_responses_side_by_side(rollout: Rollout) -> None:
    rows_hold(rollout, [0, 1, 2, 3])
    assert rollout.tokens_BT[1].tolist() == [21, 22, 23, 24, 25, PAD, PAD, PAD, PAD]
    assert rollout.response_BR.shape == rollout.response_mask_BR.shape == (4, R)


def test_a_response_as_long_as_allowed_reaches_the_last_column() -> None:
    full = Rollout.of([7], [[1, 2]], [[3, 4, 5]], [False], [[-1.0, -1.0, -1.0]], max_new_tokens=3, pad_id=0)
    assert full.response_BR.tolist() == [[3, 4, 5]]


def test_lists_are_without_padding(rollout: Rollout) -> None:
    assert rollout.token_lists() == (PROMPTS, RESPONSES)


def test_packed_by_hand(rollout: Rollout) -> None:
    """21 tokens fit a row, longest first; two rows of 16 would be wider. On a CPU it ends with the last of them."""
    packed = PackedRollout.of(rollout, torch.device("cpu"))
    row = [31, 32, 33, 34, 35, 36, 11, 12, 13, 14, 15, 21, 22, 23, 24, 25, 41, 42, 43, 44, 45]
    assert packed.tokens_LT.tolist() == [row]
    assert packed.segments_LT.tolist() == [[1] * 6 + [2] * 5 + [3] * 5 + [4] * 5]
    # A state is the position before a response token: the prompt's last token predicts the first.
    states = [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert packed.states_LT.int().tolist() == [states]
    assert packed.targets_C.tolist() == [36, 14, 15, 22, 23, 24, 25, 43, 44, 45]


def test_of_an_environments_tokens_none_is_the_policys(tmp_path: Path) -> None:
    """Two turns of the policy around two tokens of an environment; the second response is the policy's alone."""
    rollout = Rollout.of(
        [7, 8], [[1, 2], [3]], [[10, 11, 50, 51, 12], [13]], [True, True], [[-1.0, -2.0, 0.0, 0.0, -3.0], [-4.0]],
        max_new_tokens=6, pad_id=0, environment_seconds=2.5,
        dialogues=[
            Dialogue([True, True, False, False, True], [0.0, 0.5, 0.0, 0.0, 1.0]), Dialogue([True], [0.0], "deadline")
        ],
    )  # fmt: skip
    written = [[True, True, False, False, True, False], [True, False, False, False, False, False]]
    assert rollout.response_mask_BR.tolist() == written
    assert rollout.turn_rewards_BR.tolist() == [[0.0, 0.5, 0.0, 0.0, 1.0, 0.0], [0.0] * 6]
    assert rollout.response_tokens_B.tolist() == [5, 1]
    assert rollout.num_written_B.tolist() == [3, 1]
    assert rollout.num_turns_B.tolist() == [2, 1]
    assert [FAILURES[failure] for failure in rollout.failure_B.tolist()] == ["", "deadline"]
    assert rollout.turns(0) == [(True, [10, 11]), (False, [50, 51]), (True, [12])]
    packed = PackedRollout.of(rollout, torch.device("cpu"))
    assert packed.tokens_LT.tolist() == [[1, 2, 10, 11, 50, 51, 12, 3, 13]]
    assert packed.states_LT.int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 1, 0]]
    assert packed.targets_C.tolist() == [10, 11, 12, 13]
    spread = packed.spread(packed.targets_C.float())
    assert spread.tolist() == [[10.0, 11.0, 0.0, 0.0, 12.0, 0.0], [13.0] + [0.0] * 5]
    assert Drawn.of(rollout).before_BR[1].tolist() == [10, 11, -1, -1, 12, -1]
    path = tmp_path / "rollout.safetensors"
    path.write_bytes(rollout.as_bytes())
    joined_twice = Rollout.join([Rollout.load(path), rollout])
    for field in fields(rollout):
        expected = getattr(rollout, field.name)
        assert torch.equal(getattr(joined_twice, field.name), torch.cat([expected, expected])), field.name


def test_spread_puts_flat_numbers_where_the_responses_are(rollout: Rollout) -> None:
    for rows in ([0, 1, 2, 3], [3, 1], [2]):
        packed = PackedRollout.of(rollout.rows(torch.tensor(rows)), torch.device("cpu"))
        spread = packed.spread(packed.targets_C.float())
        assert spread.tolist() == [RESPONSES[row] + [0] * (R - len(RESPONSES[row])) for row in rows]


def test_spread_lets_gradients_through(rollout: Rollout) -> None:
    flat = torch.arange(10.0, requires_grad=True)
    (PackedRollout.of(rollout, torch.device("cpu")).spread(flat) * 3).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [3.0] * 10


def test_a_pass_without_responses_reads_one_and_counts_none(rollout: Rollout) -> None:
    batch = ValueBatch(rollout, numbered(), numbered(), rollout.response_mask_BR, 10, pass_sizes=(3, 1, 0))
    parts = batch.parts()
    for part, rows in zip(parts, ([0, 1, 2], [3], [0]), strict=True):
        rows_hold(part.rollout, rows)
    assert [int(part.mask_BR.sum()) for part in parts] == [7, 3, 0]


def test_log_probs_are_measured_in_the_passes_of_the_updates() -> None:
    """Two minibatches of eight responses on two ranks: each rank's passes are those of the two updates."""
    lengths_B = torch.tensor([30, 50, 20, 41, 33, 27, 60, 18])
    minibatches = torch.tensor([6, 1, 4, 7, 0, 2, 5, 3]).split(4)
    config = BatchConfig(batch_size=4, micro_batch_tokens=64)
    shares = shares_by_update(lengths_B, 2, config, minibatches)
    for rank, share in enumerate(shares):
        expected = [
            rows[shares_of(lengths_B[rows], 2, config, with_gradients=True)[rank].rows].tolist() for rows in minibatches
        ]
        assert share.rows.tolist() == [row for rows in expected for row in rows]
        assert sum(share.pass_sizes) == len(share.rows)
    assert sorted(torch.cat([share.rows for share in shares]).tolist()) == list(range(8))
    assert len({len(share.pass_sizes) for share in shares}) == 1
    parts = [lengths_B[share.rows] * 1.0 for share in shares]
    assert joined(lambda: parts, shares)().tolist() == lengths_B.tolist()


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
    assert part.weight_BR.tolist() == [[True] * 4, [True, False, False, False]]
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


def test_a_share_without_rows_can_be_sent(rollout: Rollout) -> None:
    nothing = Drawn.of(rollout).rows(torch.zeros(0, dtype=torch.int64))
    found = cloudpickle.loads(cloudpickle.dumps(nothing))
    assert (found.rows_B.shape, found.before_BR.shape, found.num_rows) == ((0,), (0, R), len(rollout))
    whole = cloudpickle.loads(cloudpickle.dumps(Drawn.of(rollout)))
    assert whole.before_BR.tolist()[:2] == [[-1] * R, [14, 15, -1, -1]]


def sent_bytes(num_ranks: int) -> int:
    """Returns what a driver pickles for one iteration of 1,024 responses: four passes, and an update of each model."""
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
        torch.zeros(rows, dtype=torch.int64),
        table_BR,
        mask_BR,
        table_BR.clone(),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows),
        torch.zeros(rows, prompt + response, 0, 0, dtype=torch.uint8),
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
    """Pickling a view pickles its whole storage, so slices for 512 ranks used to weigh as much as 512 batches."""
    per_message_bytes = 4096  # names of classes and fields
    assert sent_bytes(num_ranks) < 1.01 * sent_bytes(1) + 6 * num_ranks * per_message_bytes


def test_one_of_eight_ranks_is_sent_an_eighth() -> None:
    rows = Rollout(
        torch.zeros(1024, 2048, dtype=torch.int64),
        torch.arange(1024),
        torch.full((1024,), 1024),
        torch.full((1024,), 1024),
        torch.ones(1024, dtype=torch.bool),
        torch.zeros(1024, dtype=torch.int64),
        torch.zeros(1024, 1024),
        torch.ones(1024, 1024, dtype=torch.bool),
        torch.zeros(1024, 1024),
        torch.zeros(1024, dtype=torch.int64),
        torch.zeros(1024),
        torch.zeros(1024, 2048, 0, 0, dtype=torch.uint8),
    )
    share, whole = (len(cloudpickle.dumps(rows.rows(slice(0, size)))) for size in (128, 1024))
    assert share == pytest.approx(whole / 8, rel=0.01)


def test_a_share_is_sent_as_one_buffer_of_its_own_rows() -> None:
    """Pickles as Ray does, with separate buffers. The receiver gets the same tensors in memory that it may write to."""
    rows, mask_BR = 64, torch.arange(64 * 7).reshape(64, 7) % 3 == 0
    rollout = Rollout(
        torch.arange(rows * 33).reshape(rows, 33),
        torch.arange(rows),
        torch.full((rows,), 20),
        torch.full((rows,), 7),
        torch.arange(rows) % 2 == 0,
        torch.arange(rows),
        torch.rand(rows, 7),
        torch.ones(rows, 7, dtype=torch.bool),
        torch.zeros(rows, 7),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows),
        torch.zeros(rows, 33, 0, 0, dtype=torch.uint8),
    )
    kl = ResponseKL(torch.rand(rows), torch.rand(rows))
    batch = PolicyBatch(rollout, torch.rand(rows, 7), torch.rand(rows, 7), mask_BR, 99, torch.arange(8), 8, (), kl)
    shares = shares_of(rollout.num_tokens_B, 8, BatchConfig(batch_size=64, micro_batch_size=4), with_gradients=True)
    for share, part in zip(shares, batch.shares(shares), strict=True):
        buffers = list[Any]()
        sent = cloudpickle.dumps(part, protocol=5, buffer_callback=buffers.append)
        assert (len(buffers), len(sent)) == (1, pytest.approx(500, abs=500))
        assert buffers[0].raw().nbytes < 8 * (27 * 8 + 6 * 8 + 8 + 5 * 7 * 4 + 7 + 8 + 16) + 24 * 16
        got = cloudpickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers])
        assert (got.num_tokens, got.num_ptx_rows, got.pass_sizes) == (99, 8, share.pass_sizes)
        assert torch.equal(got.rollout.tokens_BT, rollout.tokens_BT[share.rows][:, :27])
        assert torch.equal(got.rollout.finished_B, rollout.finished_B[share.rows])
        assert torch.equal(got.rollout.behaviour_logprobs_BR, rollout.behaviour_logprobs_BR[share.rows])
        assert torch.equal(got.weight_BR, mask_BR[share.rows])
        assert torch.equal(got.kl.weight_B, kl.weight_B[share.rows])
        got.logprobs_BR.zero_()
        assert torch.equal(got.advantages_BR, batch.advantages_BR[share.rows])
    assert torch.equal(torch.cat([part.ptx_rows for part in batch.shares(shares)]), batch.ptx_rows)
