"""The reference's log-probs: those of the policy before its first step, computed once and kept in a file.

So there is never a second model in memory. The file has log π_ref(y|x) of every response, training comparisons first.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpo.objective import Floats, PolicyLearner, PreferenceObjective, packed_comparisons
from files.atomic import atomic_file
from lm.progress import note_progress
from reward.comparisons import Comparison
from training.config import BatchConfig
from training.engine import Engine
from training.packing import IntArray, pass_tokens, split_passes

REFERENCE = "reference.safetensors"
LOGPROBS, COMPARISONS = "logprobs", "comparisons"  # in the file: the tensor's name, and the key of the digest
AT_ONCE = 1024  # comparisons that are split into passes together
# How far a log-ratio before the first step may be from 0: nats per square root of the response's tokens, since the
# rounding of tokens adds up like independent errors.
ROUNDING = {"fp32": 1e-4, "bf16": 0.03}


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


@torch.no_grad()
def check_first_loss(
    engine: Engine[PolicyLearner], objective: PreferenceObjective, rows: IntArray, batch: BatchConfig
) -> None:
    """Check that policy and reference agree before the first step, on the first batch; a collective call.

    Every log-ratio is then 0 up to rounding, so the loss of an untied pair is log 2. A reference from another model,
    another template, dropout, counted padding or a truncated row would change that.
    Raises: ValueError naming the loss that it measured.
    """
    reference = objective.reference
    assert reference is not None, f"loss {objective.config.loss} has no reference"
    engine.model.eval()
    ratios, tokens = list[Tensor](), list[Tensor]()
    with engine.cache_weight_casts():
        shares = objective.rank_passes(rows, batch, engine.data_parallel_size, with_gradients=True)
        for mine in shares[engine.data_rank]:
            note_progress()
            taken = mine if len(mine) else rows[:1]
            packed = packed_comparisons([objective.comparisons[row] for row in taken], engine.device)
            policy_logprobs, _ = packed.logprobs(engine.model)
            if len(mine):
                ratios.append(policy_logprobs.cpu() - torch.from_numpy(np.concatenate([reference[r] for r in mine])))
                tokens.append(packed.tokens_N.cpu())
    everything = [pair for of_rank in engine.gather((ratios, tokens)) for pair in zip(*of_rank, strict=True)]
    ratios_N, tokens_N = (torch.cat(part) for part in zip(*everything, strict=True))
    refuse_wrong_reference(ratios_N, tokens_N, objective.config.beta, engine.config.resolved_precision())


def refuse_wrong_reference(log_ratios_N: Tensor, tokens_N: Tensor, beta: float, precision: str) -> None:
    """Check that log-ratios are 0 up to the rounding of this precision. Raises: ValueError if they are not."""
    error = float((log_ratios_N.abs() / tokens_N.clamp(min=1).sqrt()).mean())
    if not error <= ROUNDING[precision]:
        worst = float(log_ratios_N.abs().max())
        loss = float(torch.nn.functional.softplus(beta * log_ratios_N.abs()).mean())
        raise ValueError(
            f"before the first step, policy and reference differ by up to {worst:.3g} nats per response: DPO's loss"
            f" would start near {loss:.4f} per untied pair; log 2 = {math.log(2):.4f} was expected. {REFERENCE} in the"
            " stage's folder belongs to another model; delete it and run the same command again"
        )
