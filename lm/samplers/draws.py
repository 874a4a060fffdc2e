"""Tests whether sampled tokens are draws from the policy, by betting that they are not.

An engine may report the policy's log-probs but draw its tokens from something else: for instance, it never draws the
end token, penalises repetition, or gives two rows the same random numbers. Each bet is on one such distribution q. It
starts with a stake of 1, and every sampled token v multiplies the stake by

    1 + w/2 (q(v) / π(v) - 1),    w = π(v) / π_sampler(v)

where w corrects for rounding differences between learner and sampler. For draws from π_sampler this factor is 1 on
average, so the probability that the mean of all stakes ever reaches 1/α is at most α (Ville's inequality; arXiv
1903.06991), however many bets there are and however often one looks. If the tokens follow q, the stake of that bet
grows exponentially.

Each q is π tilted by a feature f of tokens: q ∝ π exp(λ f). With λ = -∞, tokens with the feature are never drawn.

Shape letters: C tested tokens, V vocabulary, T tokens of a text, F bets on features of FEATURES, K bets on log π,
N all bets, E end tokens.
"""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm.transfer import upload

FALSE_ALARM = 1e-5  # upper bound on the probability of a false alarm, over all tokens of a run
ALARM = -math.log(FALSE_ALARM)  # nats of evidence
NEVER = -math.inf
# Lower bound on the probability without the feature, for `NEVER`: where that is mostly rounding, it limits the gain.
LEAST_CHANCE = 1e-4
LARGEST_WEIGHT = 1.9  # upper bound on w, which keeps every factor above 0; rounding stays far below it
CLASSES = 61  # token ids are grouped by remainder: a token that is never drawn shows in its class
RARE = (1e-2, 1e-3, 1e-4)  # probabilities below which tokens count as unlikely
PARTS = 8  # a rollout's rows are split into these: one broken rank of several shows in its part
TEMPERATURES = (-0.6, -0.2, -0.05, 0.05, 0.2, 0.6)  # λ of bets on log π; each means a temperature of 1 / (1 + λ)
AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # probabilities in memory at once
TESTED = {"cpu": 2**24, "cuda": 2**27}  # probabilities that a rank tests per iteration of PPO


@dataclass(frozen=True)
class Draws:
    """Sampled tokens with their contexts."""

    tokens_C: Tensor
    weights_C: Tensor  # π / π_sampler of the token
    steps_C: Tensor  # position in the response, from 0
    parts_C: Tensor  # 0 .. PARTS - 1, from first to last row of the rollout
    text_CT: Tensor  # prompt and response before the token; -1 = padding
    before_C: Tensor  # token at the same position of the previous row; -1 = none

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        rows: Sequence[int],
        tokens_C: Tensor,
        weights_C: Tensor,
    ) -> Self:
        """Describe all tokens of these rows of a rollout, row after row."""
        device = tokens_C.device
        texts, before, steps, parts = list[Tensor](), list[int](), list[int](), list[int]()
        for row in rows:
            n = len(responses[row])
            steps += range(n)
            parts += [row * PARTS // len(prompts)] * n
            earlier = responses[row - 1][:n] if row else ()
            before += [*earlier, *[-1] * (n - len(earlier))]
            text_T = torch.tensor([*prompts[row], *responses[row]])
            texts += [text_T[: len(prompts[row]) + step] for step in range(n)]
        text_CT = pad_sequence(texts, batch_first=True, padding_value=-1).to(device)
        steps_C, parts_C, before_C = (torch.tensor(numbers, device=device) for numbers in (steps, parts, before))
        return cls(tokens_C, weights_C, steps_C, parts_C, text_CT, before_C)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        longest = max(part.text_CT.shape[1] for part in parts)
        padded = [
            replace(part, text_CT=F.pad(part.text_CT, (0, longest - part.text_CT.shape[1]), value=-1)) for part in parts
        ]
        return cls(*(torch.cat([getattr(part, name) for part in padded]) for name in cls.__dataclass_fields__))

    def __getitem__(self, part: slice) -> Self:
        return type(self)(*(getattr(self, name)[part] for name in self.__dataclass_fields__))


# Returns the probabilities [C, V] from which a faulty sampler draws, given the policy's logits at its temperature.
Fault = Callable[[Tensor, Draws], Tensor]


class Bet(NamedTuple):
    """A bet that tokens follow π tilted by a feature."""

    name: str  # of the feature
    column: int  # of the feature, in FEATURES; or of the tilt in TEMPERATURES, where the feature is log π
    tilt: float  # λ
    where: int  # the column of PLACES that says which tokens count; the others leave the stake as it is
    share: float  # of the stakes


FEATURES = (
    "end tokens",
    "the likeliest token",
    "tokens that the text already has",
    *(f"tokens of a probability below {below:g}" for below in RARE),
    "the token that the row before has at this place",
    *(f"tokens with id % {CLASSES} = {number}" for number in range(CLASSES)),
)  # each is 1 or 0
LOG_PROB = "sum of log-probs"
PLACES = ("", "", " at the first place", *(f" in part {part + 1} of {PARTS} of the rows" for part in range(PARTS)))
ANYWHERE, AFTER_A_ROW, FIRST, PART = 0, 1, 2, 3


def _bets() -> tuple[list[Bet], list[Bet]]:
    """Returns the bets on FEATURES and those on log π. Each group of them has the same share of the stakes."""
    end, likeliest, repeats, rare, before, classes = 0, 1, 2, 3, 3 + len(RARE), 4 + len(RARE)
    # (features, tilts of each, where their tokens count, tilts of log π there)
    groups: list[tuple[Iterable[int], Collection[float], Iterable[int], Collection[float]]] = [
        ([end], (NEVER, -1, -0.3, 0.3, 1, 2), [ANYWHERE], ()),
        ([likeliest], (NEVER, -1, -0.3, 0.3, 1), [ANYWHERE], ()),
        ([repeats], (-1, -0.3, 0.3, 1), [ANYWHERE], ()),
        (range(rare, before), (NEVER, -0.5, 0.5), [ANYWHERE], ()),
        ([], (), [ANYWHERE], TEMPERATURES),
        (range(classes, classes + CLASSES), (-0.5, 0.5), [ANYWHERE], ()),
        ([before], (NEVER, 0.5, 2), [AFTER_A_ROW], ()),
        ([likeliest], (-1, 1), [FIRST], (-0.2, 0.2)),
        ([likeliest], (-1, 1), range(PART, PART + PARTS), (-0.2, 0.2)),
    ]
    on_features, on_log_prob = list[Bet](), list[Bet]()
    for features, tilts, places, temperatures in groups:
        of_features = [*itertools.product(features, tilts, places)]
        of_log_prob = [*itertools.product(temperatures, places)]
        share = 1 / (len(groups) * (len(of_features) + len(of_log_prob)))
        on_features += [Bet(FEATURES[of] + PLACES[at], of, tilt, at, share) for of, tilt, at in of_features]
        on_log_prob += [
            Bet(LOG_PROB + PLACES[at], TEMPERATURES.index(tilt), tilt, at, share) for tilt, at in of_log_prob
        ]
    return on_features, on_log_prob


ON_FEATURES, ON_LOG_PROB = _bets()
BETS = (*ON_FEATURES, *ON_LOG_PROB)


@dataclass(frozen=True)
class Evidence:
    """What the bets have gained so far. Evidence from separate sets of tokens adds up, in any order."""

    names: tuple[str, ...]  # of each bet's feature
    shares_N: Tensor  # of the stakes; they sum to 1
    sums_3N: Tensor  # log of the stake, the feature's sum over the sampled tokens, and the expected sum

    @property
    def nats(self) -> float:
        """The log of the mean stake. Draws from the policy reach `ALARM` in at most one of 100,000 runs."""
        return float((self.sums_3N[0] + self.shares_N.log()).logsumexp(dim=0))

    @property
    def is_alarm(self) -> bool:
        return not self.nats < ALARM  # written so that NaN is an alarm too

    def __add__(self, other: "Evidence") -> "Evidence":
        if not (self.names and other.names):
            return self if self.names else other
        if self.names != other.names:  # a checkpoint of another version, whose bets are not continued
            return other
        return Evidence(self.names, self.shares_N, self.sums_3N + other.sums_3N)

    def __mul__(self, times: float) -> "Evidence":
        """Returns the evidence that so many times as many tokens would have, if they were like these."""
        return Evidence(self.names, self.shares_N, self.sums_3N * times)

    def as_bytes(self) -> bytes:
        """Returns the evidence as a JSON file, which `load` reads."""
        return json.dumps({"names": self.names, **{name: getattr(self, name).tolist() for name in _TENSORS}}).encode()

    @classmethod
    def load(cls, path: Path) -> Self:
        found = json.loads(path.read_bytes())
        return cls(tuple(found["names"]), *(torch.tensor(found[name], dtype=torch.float64) for name in _TENSORS))

    def __str__(self) -> str:
        """Describes the bet with the largest gain."""
        best = int((self.sums_3N[0] + self.shares_N.log()).argmax())
        _, found, expected = self.sums_3N[:, best].tolist()
        return f"{self.names[best]}: {found:,.1f}, where draws from the policy have {expected:,.1f}"


_TENSORS = ("shares_N", "sums_3N")
NO_EVIDENCE = Evidence((), torch.ones(1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))


@torch.no_grad()
def evidence(
    logits_CV: Tensor, draws: Draws, temperature: float, end_ids: Collection[int], fault: Fault | None = None
) -> Evidence:
    """Bet against the policy softmax(logits / temperature) on the sampled tokens. With `fault`, returns the evidence to
    expect where a sampler with this fault draws the tokens instead.

    On a GPU, `TESTED` probabilities take about 150 kernels and one wait for the result.
    """
    device = logits_CV.device
    sizes = logits_CV.shape[1], 8 * len(BETS), 2 * draws.text_CT.shape[1]  # the largest tensors, in numbers per token
    at_once = max(1, AT_ONCE[device.type] // max(sizes))
    sums_3N = torch.zeros(3, len(BETS), dtype=torch.float64, device=device)
    for first in range(0, len(draws.tokens_C), at_once):
        part = slice(first, first + at_once)
        sums_3N += _sums(logits_CV[part].float() / temperature, draws[part], end_ids, fault)
    shares_N = torch.tensor([bet.share for bet in BETS], dtype=torch.float64)
    return Evidence(tuple(bet.name for bet in BETS), shares_N, sums_3N.cpu())


def _sums(logits_CV: Tensor, draws: Draws, end_ids: Collection[int], fault: Fault | None) -> Tensor:
    """Returns `Evidence.sums_3N`."""
    device, num_temperatures = logits_CV.device, len(ON_LOG_PROB)
    logprobs_CV = torch.log_softmax(logits_CV, dim=1)
    probs_CV, ends_E = logprobs_CV.exp(), upload(torch.tensor(sorted(end_ids), dtype=torch.long), device)
    # Where the tokens are not given, each value is an expectation over what the fault draws.
    drawn_CV = None if fault is None else fault(logits_CV, draws)
    chance_CF = _chances(probs_CV, probs_CV, draws, ends_E)
    has_CF = _has(probs_CV, draws, ends_E) if drawn_CV is None else _chances(drawn_CV, probs_CV, draws, ends_E)
    of_F, of_K, where_N = (
        upload(torch.tensor(columns), device)
        for columns in (
            [bet.column for bet in ON_FEATURES], [bet.column for bet in ON_LOG_PROB], [bet.where for bet in BETS]
        )
    )  # fmt: skip
    odds_F = upload(torch.tensor([bet.tilt for bet in ON_FEATURES]), device).exp()
    has_CF, chance_CF = has_CF[:, of_F], chance_CF[:, of_F]
    norm_CF = (1 + chance_CF * (odds_F - 1)).clamp(min=LEAST_CHANCE)
    gains_CF = has_CF * _gain(odds_F / norm_CF, draws) + (1 - has_CF) * _gain(1 / norm_CF, draws)
    value_C1, gains_CK = _on_log_prob(logprobs_CV, draws, drawn_CV)
    gains_CN = torch.cat([gains_CF, gains_CK[:, of_K]], dim=1)
    values_CN = torch.cat([has_CF, value_C1.expand(-1, num_temperatures)], dim=1)
    means_CN = torch.cat([chance_CF, _mean(probs_CV, logprobs_CV)[:, None].expand(-1, num_temperatures)], dim=1)
    return (torch.stack([gains_CN, values_CN, means_CN]).double() * _places(draws)[:, where_N]).sum(dim=1)


def _gain(ratio: Tensor, draws: Draws) -> Tensor:
    """Returns the log of a stake's factor where q / π of the token is `ratio` [C, ...]."""
    return (draws.weights_C.clamp(max=LARGEST_WEIGHT)[:, None] / 2 * (ratio - 1)).log1p()


def _mean(of_CV: Tensor, values_CV: Tensor) -> Tensor:
    """Returns the expectation [C] of values under probabilities; a value may be infinite where they are 0."""
    return (of_CV * values_CV.clamp(-1e4, 1e4)).sum(dim=1)


def _on_log_prob(logprobs_CV: Tensor, draws: Draws, drawn_CV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the tokens' log π [C, 1], and the gains of bets at each of TEMPERATURES [C, K].

    Each term of a norm is a probability to a power between .4 and 1.6, so it neither overflows nor vanishes.
    """
    chosen_C1 = logprobs_CV.gather(1, draws.tokens_C[:, None])
    norms_CK = torch.stack([((1 + tilt) * logprobs_CV).exp().sum(dim=1).log() for tilt in TEMPERATURES], dim=1)
    if drawn_CV is None:
        tilts_K = upload(torch.tensor(TEMPERATURES), logprobs_CV.device)
        return chosen_C1, _gain((tilts_K * chosen_C1 - norms_CK).exp(), draws)
    gains = [
        _mean(drawn_CV, _gain((tilt * logprobs_CV - norm_C[:, None]).exp(), draws))
        for tilt, norm_C in zip(TEMPERATURES, norms_CK.unbind(dim=1), strict=True)
    ]
    return _mean(drawn_CV, logprobs_CV)[:, None], torch.stack(gains, dim=1)


def _has(probs_CV: Tensor, draws: Draws, ends_E: Tensor) -> Tensor:
    """Returns whether each sampled token has each of FEATURES, 1 or 0 [C, features]."""
    tokens_C1 = draws.tokens_C[:, None]
    chosen_C1 = probs_CV.gather(1, tokens_C1)
    has = [
        (tokens_C1 == ends_E).any(dim=1, keepdim=True),
        tokens_C1 == probs_CV.argmax(dim=1, keepdim=True),
        (tokens_C1 == draws.text_CT).any(dim=1, keepdim=True),
        *(chosen_C1 < below for below in RARE),
        tokens_C1 == draws.before_C[:, None],
        tokens_C1 % CLASSES == torch.arange(CLASSES, device=probs_CV.device),
    ]
    return torch.cat(has, dim=1).float()


def _chances(of_CV: Tensor, probs_CV: Tensor, draws: Draws, ends_E: Tensor) -> Tensor:
    """Returns the probability of each of FEATURES [C, features] under `of_CV`. π decides what is likely or rare."""
    text_CT = draws.text_CT.sort(dim=1).values
    is_new_CT = F.pad(text_CT[:, 1:] != text_CT[:, :-1], (1, 0), value=True) & (text_CT >= 0)
    chances = [
        of_CV[:, ends_E].sum(dim=1, keepdim=True),
        of_CV.gather(1, probs_CV.argmax(dim=1, keepdim=True)),
        (of_CV.gather(1, text_CT.clamp(min=0)) * is_new_CT).sum(dim=1, keepdim=True),
        *((of_CV * (probs_CV < below)).sum(dim=1, keepdim=True) for below in RARE),
        of_CV.gather(1, draws.before_C.clamp(min=0)[:, None]),
        F.pad(of_CV, (0, -of_CV.shape[1] % CLASSES)).unflatten(1, (-1, CLASSES)).sum(dim=1),
    ]
    return torch.cat(chances, dim=1).clamp(0, 1)


def _places(draws: Draws) -> Tensor:
    """Returns whether each token counts for the bets in each of PLACES [C, places]."""
    first_C1, before_C1, parts_C1 = draws.steps_C[:, None], draws.before_C[:, None], draws.parts_C[:, None]
    is_part_CP = parts_C1 == torch.arange(PARTS, device=parts_C1.device)
    return torch.cat([first_C1 >= 0, before_C1 >= 0, first_C1 == 0, is_part_CP], dim=1)
