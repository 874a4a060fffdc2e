"""Weights broadcast to generators, by calls and bytes, over gloo. Ranks are threads here."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.samplers.engine import SentWeights, chunks, digests_of, held_tensors, whole_digest
from lm.samplers.heed_engine import HeedSampler
from lm.tensor_parallel import Rendezvous, Team, process_group
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.rank import WeightBroadcast

Result = TypeVar("Result")
CPU = torch.device("cpu")


class Counted:
    """A process group that notes the bytes of each broadcast."""

    def __init__(self, group: Any) -> None:
        self.group, self.sizes = group, list[int]()

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        self.sizes.append(tensor.nbytes)
        return self.group.broadcast(tensor, root)


def on_ranks(num_ranks: int, work: Callable[[int, str, int], Result]) -> list[Result]:
    """Calls `work(rank, host, port)` on each rank; the port is that of a store, as `WorkerGroup.free_address` makes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: work(rank, "127.0.0.1", store.port), range(num_ranks)))


def opened(rank: int, host: str, port: int, num_ranks: int, num_parts: int) -> tuple[WeightBroadcast, list[Counted]]:
    end = WeightBroadcast(host, port, rank, num_ranks, device=CPU, timeout_seconds=60.0, num_parts=num_parts)
    end._groups = [Counted(group) for group in end._groups]
    return end, end._groups


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_of_weights_is_one_broadcast(dtype: torch.dtype) -> None:
    """Of odd sizes, so that tensors do not begin at multiples of their element's size."""
    weights = {f"w{number}": torch.randn(number, 3).to(dtype) for number in (5, 1, 7)} | {"bias": torch.tensor(2.0)}

    def work(rank: int, host: str, port: int) -> tuple[list[int], Mapping[str, Tensor], Mapping[str, int]]:
        end, groups = opened(rank, host, port, 3, 1)
        if rank == 0:
            end.send(weights, digests_of(weights))
            return groups[0].sizes, weights, digests_of(weights)
        found = end.receive({name: torch.empty_like(weight) for name, weight in weights.items()})
        assert found.part_digests is None
        return groups[0].sizes, found.weights, found.digests

    expected = sum(weight.nbytes for weight in weights.values()) + 8 * len(weights)
    for sizes, found, digests in on_ranks(3, work):
        assert sizes == [expected]
        assert digests == digests_of(weights) == digests_of(found)
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("model"), Tokenizer.train(["the cat sat on a mat"] * 20, 301, "chat")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=48, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    model = LanguageModel(config)
    init_weights(model, 1)
    save_model(path, model, model.state_dict(), tokenizer)
    return path


def test_each_rank_of_a_team_receives_only_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two teams of two: the sender makes one call per chunk and part, of half the bytes, and the digests stay those of
    the whole weights."""
    whole = HeedSampler.load(folder, "fp32")
    sent = LanguageModel(whole.policy.config)
    init_weights(sent, 9)
    weights = {name: tensor.detach() for name, tensor in held_tensors(sent).items()}
    whole.receive([SentWeights.of(weights)])

    def in_chunks(tensors: Any, chunk_bytes: int = 20_000) -> Iterator[dict[str, Tensor]]:
        return chunks(tensors, chunk_bytes)

    monkeypatch.setattr("lm.samplers.heed_engine.chunks", in_chunks)
    num_chunks = len([*in_chunks(weights.items())])
    assert num_chunks > 2

    def work(rank: int, host: str, port: int) -> tuple[list[list[int]], object]:
        if rank == 0:
            end, groups = opened(rank, host, port, 5, 2)
            for chunk in in_chunks(weights.items()):
                end.send(chunk, digests_of(chunk), sent.config)
            return [group.sizes for group in groups], None
        place = rank - 1
        team_of_two = Rendezvous("127.0.0.1", meeting.port, 2, 60.0)
        team = Team(process_group(team_of_two, place, 4, CPU), place % 2, 2)
        sampler = HeedSampler.load(folder, "fp32", team=team)
        end, groups = opened(rank, host, port, 5, 2)
        sampler.receive(map(end.receive, sampler.slots()))
        assert whole_digest(sampler.digests) == whole_digest(whole.digests) == whole_digest(digests_of(weights))
        found = sampler.sample([[5, 6], [7]], [1, 2], max_new_tokens=6, temperature=0.7)
        return [group.sizes for group in groups], found.responses

    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)  # type: ignore[attr-defined]
    (of_sender, _), *receivers = on_ranks(5, work)
    num_bytes = sum(weight.nbytes for weight in weights.values())
    expected = whole.sample([[5, 6], [7]], [1, 2], max_new_tokens=6, temperature=0.7).responses
    for place, (sizes, responses) in enumerate(receivers):
        assert sizes == [of_sender[place % 2]]
        assert len(sizes[0]) == num_chunks
        assert sum(sizes[0]) < 0.7 * num_bytes  # half of the matrices, and whole embeddings
        assert responses == expected
