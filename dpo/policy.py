"""The policy in training, and its log-probs of whole responses, which are packed with their prompts into few rows.

The reference's log-probs are those of the policy before its first step, computed once and kept in a file, so there is
never a second model in memory. The file has log π_ref(y|x) of every response, training comparisons first.

Shape letters: N responses of all comparisons, R response tokens, L rows, T tokens of a row, C tokens of all responses.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import atomic_file
from lm.dropout import sequence_keys
from lm.model import LanguageModel
from lm.progress import note_progress
from lm.source import ModelSource
from lm.transfer import upload
from reward.comparisons import Comparison
from reward.objective import NETWORK
from training.config import BatchConfig
from training.engine import Engine
from training.packing import IntArray, packed_rows, pass_tokens, split_passes
from training.tokens import Sequences

Floats = NDArray[np.float32]

REFERENCE = "reference.safetensors"
LOGPROBS, COMPARISONS = "logprobs", "comparisons"  # in the file: the tensor's name, and the key of the digest
AT_ONCE = 1024  # comparisons that are split into passes together


class PolicyLearner(nn.Module):
    """Log-probs and log ν from one forward pass, so that every backend gathers what it shards.

    log ν = start + hidden_size · θ, where θ starts at 0, as in a reward model's training (`reward.objective`).
    """

    def __init__(self, network: LanguageModel, starting_log_nu: float | None) -> None:
        super().__init__()
        self.network, self.starting_log_nu = network, starting_log_nu
        self.nu = nn.Parameter(torch.zeros(1)) if starting_log_nu is not None else None

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the policy's config says so (`lm.source.load`)."""
        self.network.tie()

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor,
        selected_BT: Tensor,
        sequence_keys_BT: Tensor | None,
        targets_C: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the targets' log-probs [C], nats, at the positions where `selected_BT` is True, and log ν, None if it
        is not learned.
        """
        logprobs_C = self.network(tokens_BT, segments_BT, selected_BT, sequence_keys_BT, targets_C)
        if self.nu is None or self.starting_log_nu is None:
            return logprobs_C, None
        return logprobs_C, self.starting_log_nu + self.network.config.hidden_size * self.nu.float()


@dataclass(frozen=True)
class PolicySource:
    """A source of a `PolicyLearner`, from a source of its network."""

    network: ModelSource[LanguageModel]
    starting_log_nu: float | None = None

    def build(self) -> PolicyLearner:
        return PolicyLearner(self.network.build(), self.starting_log_nu)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.starting_log_nu is not None:
            yield "nu", torch.zeros(1)
        for name, tensor in self.network.tensors():
            yield NETWORK + name, tensor


@dataclass(frozen=True)
class PackedResponses:
    """A policy's inputs. `targets_C` are the responses' tokens, row by row; `places_C` are their indices in a flat
    [N, R].

    `predicts_LT` is True where the next token is a response's. It and the segments stay in CPU memory, where counting
    does not wait for a GPU. `tokens_N` counts each response's tokens.
    """

    tokens_LT: Tensor
    segments_LT: Tensor
    predicts_LT: Tensor
    sequence_LT: IntArray
    targets_C: Tensor
    places_C: Tensor
    tokens_N: Tensor
    num_columns: int

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], response_tokens: Sequence[int], device: torch.device) -> Self:
        """Pack sequences. Each is a prompt with its response, which is the last `response_tokens` of it."""
        held = Sequences.of(
            (tokens, [False] * (len(tokens) - num) + [True] * num)
            for tokens, num in zip(sequences, response_tokens, strict=True)
        )
        rows = packed_rows(held, device)
        sequence_LT, counted_LT = rows.sequence_of_tokens(), rows.counted
        owners_C = sequence_LT[counted_LT]
        tokens_N = held.num_counted.astype(np.int64)
        # A row holds a response's tokens in order, one response after another.
        starts = np.flatnonzero(np.diff(owners_C, prepend=-1))
        number_in_response_C = np.arange(len(owners_C)) - np.repeat(starts, np.diff(starts, append=len(owners_C)))
        num_columns = max(1, int(tokens_N.max(initial=0)))  # R
        return cls(
            upload(torch.from_numpy(rows.tokens[:, :-1].copy()), device),
            torch.from_numpy(rows.segments[:, :-1]),
            torch.from_numpy(counted_LT[:, 1:]),
            sequence_LT[:, :-1],
            upload(torch.from_numpy(rows.tokens[counted_LT]), device),
            upload(torch.from_numpy(owners_C * num_columns + number_in_response_C), device),
            upload(torch.from_numpy(tokens_N), device),
            num_columns,
        )

    def keys(self, seed: int, numbers_N: IntArray) -> Tensor:
        """Returns dropout keys [L, T], derived from each response's number in the data set."""
        return sequence_keys(seed, numbers_N[self.sequence_LT], self.tokens_LT.device)

    def logprobs(self, model: PolicyLearner, keys_LT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns log π(response | prompt), [N] nats, summed over its tokens in fp32; and log ν, None if not learned.

        Log-probs are first arranged as [N, R], so a response's sum adds in the same order wherever it was packed.
        """
        logprobs_C, log_nu = model(self.tokens_LT, self.segments_LT, self.predicts_LT, keys_LT, self.targets_C)
        N, R = len(self.tokens_N), self.num_columns
        return logprobs_C.new_zeros(N * R).scatter(0, self.places_C, logprobs_C).view(N, R).sum(dim=1), log_nu


def packed_comparisons(comparisons: Sequence[Comparison], device: torch.device) -> PackedResponses:
    """Pack all responses of the comparisons, in order."""
    return PackedResponses.of(
        [sequence for comparison in comparisons for sequence in comparison.sequences],
        [num for comparison in comparisons for num in comparison.response_tokens],
        device,
    )


def reference_logprobs(
    engine: Engine[PolicyLearner], folder: Path, comparisons: Sequence[Comparison], batch: BatchConfig
) -> list[Floats]:
    """Returns log π_ref of each comparison's responses, in nats. A collective call.

    Reads them from the stage's folder. If they are not there, computes them with the engine's weights, which no step
    has changed yet, and rank 0 writes them.

    Raises: ValueError if the file is of other comparisons.
    """
    path = folder / REFERENCE
    logprobs: Tensor | None = None
    if engine.is_main and path.is_file():
        logprobs = read_reference(path, comparisons)
    logprobs = engine.gather(logprobs)[0]
    if logprobs is None:
        logprobs = torch.from_numpy(np.concatenate(logprobs_on_all_ranks(engine, comparisons, batch)))
        if engine.is_main:
            with atomic_file(path) as temporary:
                save_file({LOGPROBS: logprobs}, temporary, {COMPARISONS: digest(comparisons)})
    return split_by_comparison(logprobs.numpy(), comparisons)


def read_reference(path: Path, comparisons: Sequence[Comparison]) -> Tensor:
    """Read the log-probs in a file. Raises: ValueError unless they are of these comparisons."""
    with safe_open(path, "pt") as file:
        metadata, logprobs = file.metadata() or {}, file.get_tensor(LOGPROBS)
    if metadata.get(COMPARISONS) != digest(comparisons):
        raise ValueError(
            f"{path}: these reference log-probabilities belong to other comparisons; delete the file and run the same"
            " command again"
        )
    return logprobs


def digest(comparisons: Sequence[Comparison]) -> str:
    """Returns the SHA-256 of all sequences' tokens, and of where each response begins."""
    sha256 = hashlib.sha256()
    for comparison in comparisons:
        for tokens, num in zip(comparison.sequences, comparison.response_tokens, strict=True):
            sha256.update(np.array([len(tokens), num, *tokens], dtype="<i4").tobytes())
    return sha256.hexdigest()


def split_by_comparison(values: Floats, comparisons: Sequence[Comparison]) -> list[Floats]:
    """Split one value per response into one array per comparison."""
    ends = np.cumsum([len(comparison.sequences) for comparison in comparisons])
    return np.split(values, ends[:-1])


@torch.no_grad()
def logprobs_on_all_ranks(
    engine: Engine[PolicyLearner], comparisons: Sequence[Comparison], batch: BatchConfig
) -> list[Floats]:
    """Returns log π of each comparison's responses under the current weights, in nats, on every rank. A collective
    call.
    """
    engine.model.eval()
    logprobs = []
    with engine.cache_weight_casts():
        for start in range(0, len(comparisons), AT_ONCE):
            logprobs += _of_some(engine, comparisons[start : start + AT_ONCE], batch)
    return logprobs


def _of_some(engine: Engine[PolicyLearner], comparisons: Sequence[Comparison], batch: BatchConfig) -> list[Floats]:
    units = [[len(sequence) for sequence in comparison.sequences] for comparison in comparisons]
    shares = split_passes(units, engine.data_parallel_size, pass_tokens(batch, units, with_gradients=False))
    starts = np.cumsum([0, *map(len, units)])
    logprobs = torch.zeros(int(starts[-1]), device=engine.device)
    # ZeRO-3 gathers weights in every pass, so all ranks run the same number of passes. A pass without comparisons reads
    # the first one and discards the result.
    for places in shares[engine.data_rank]:
        note_progress()
        policy_logprobs, _ = packed_comparisons(
            [comparisons[place] for place in places or [0]], engine.device
        ).logprobs(engine.model)
        if places:
            logprobs[np.concatenate([np.arange(starts[p], starts[p + 1]) for p in places])] = policy_logprobs.float()
    return split_by_comparison(engine.sum_over_shares(logprobs).cpu().numpy(), comparisons)
