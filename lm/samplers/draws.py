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

Shape letters: C tested tokens, V vocabulary, T tokens of a text, N bets.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
AT_ONCE = 2**22  # probabilities in memory at once
# Probabilities that a rank tests per iteration of PPO. The test takes less than 1% of an iteration's time.
TESTED = {"cpu": 2**24, "cuda": 2**27}


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

    def __getitem__(self, part: slice) -> "Draws":
        return Draws(*(getattr(self, name)[part] for name in self.__dataclass_fields__))


# Returns the probabilities [C, V] from which a faulty sampler draws, given the policy's logits at its temperature.
Fault = Callable[[Tensor, Draws], Tensor]


@dataclass(frozen=True)
class Feature:
    """A feature f of tokens: its value for the sampled token and its mean under π.

    `gains_CN` are the logs of the factors of the stakes, for each λ. Where `counts_C` is False, the bets on the feature
    keep their stake.
    """

    name: str
    value_C: Tensor
    mean_C: Tensor
    gains_CN: Tensor
    counts_C: Tensor


@dataclass(frozen=True)
class _Policy:
    """The policy at the tested tokens. With `drawn_CV`, values and gains are expectations over tokens that are drawn
    with these probabilities; otherwise they are those of the sampled tokens.
    """

    logprobs_CV: Tensor
    draws: Draws
    drawn_CV: Tensor | None = None

    @cached_property
    def probs_CV(self) -> Tensor:
        return self.logprobs_CV.exp()

    def _gain(self, tilt: Tensor) -> Tensor:
        """Returns the log of a stake's factor where q / π of the token is `tilt`, [C] or [C, V]."""
        weights = self.draws.weights_C.clamp(max=LARGEST_WEIGHT)
        return torch.log1p((weights if tilt.ndim == 1 else weights[:, None]) / 2 * (tilt - 1))

    def _indicator(
        self,
        name: str,
        has_C: Tensor,
        chance: Callable[[Tensor], Tensor],
        tilts: Collection[float],
        counts_C: Tensor | None = None,
    ) -> Feature:
        """Returns a feature that is 1 or 0. `chance` returns the probability [C] of a 1 under probabilities [C, V]."""
        value_C = has_C.float() if self.drawn_CV is None else chance(self.drawn_CV).clamp(0, 1)
        chance_C = chance(self.probs_CV).clamp(0, 1)
        gains = list[Tensor]()
        for tilt in tilts:
            norm_C = (1 - chance_C).clamp(min=LEAST_CHANCE) if tilt == NEVER else 1 + chance_C * math.expm1(tilt)
            with_C, without_C = self._gain(math.exp(tilt) / norm_C), self._gain(1 / norm_C)
            gains.append(value_C * with_C + (1 - value_C) * without_C)
        counts_C = self.all_C if counts_C is None else counts_C
        return Feature(name, value_C, chance_C, torch.stack(gains, dim=1), counts_C)

    @cached_property
    def chosen_C(self) -> Tensor:
        return self.logprobs_CV.gather(1, self.draws.tokens_C[:, None])[:, 0]

    @cached_property
    def all_C(self) -> Tensor:
        return torch.ones_like(self.draws.tokens_C, dtype=torch.bool)

    def features(self, end_ids: Collection[int]) -> Iterator[list[Feature]]:
        """Yields groups of features; each group has the same share of the stakes."""
        draws, ends = self.draws, torch.tensor(sorted(end_ids), device=self.draws.tokens_C.device)
        is_end_C, end_tilts = torch.isin(draws.tokens_C, ends), (NEVER, -1, -0.3, 0.3, 1, 2)
        yield [self._indicator("end tokens", is_end_C, lambda probs_CV: probs_CV[:, ends].sum(dim=1), end_tilts)]
        yield [self._likeliest("", (NEVER, -1, -0.3, 0.3, 1), self.all_C)]
        yield [self._repeats()]
        yield [self._rare(below) for below in RARE]
        yield [self._likelihood("", TEMPERATURES, self.all_C)]
        yield self._classes()
        before_C1 = draws.before_C.clamp(min=0)[:, None]
        yield [
            self._indicator(
                "the token that the row before has at this place",
                draws.tokens_C == draws.before_C,
                lambda probs_CV: probs_CV.gather(1, before_C1)[:, 0],
                (NEVER, 0.5, 2),
                draws.before_C >= 0,
            )
        ]
        places = {" at the first place": draws.steps_C == 0}
        parts = {f" in part {part + 1} of {PARTS} of the rows": draws.parts_C == part for part in range(PARTS)}
        for group in (places, parts):
            yield [self._likeliest(where, (-1, 1), counts_C) for where, counts_C in group.items()] + [
                self._likelihood(where, (-0.2, 0.2), counts_C) for where, counts_C in group.items()
            ]

    @cached_property
    def _best_C1(self) -> Tensor:
        return self.probs_CV.argmax(dim=1, keepdim=True)

    def _likeliest(self, where: str, tilts: Collection[float], counts_C: Tensor) -> Feature:
        has_C = self.draws.tokens_C == self._best_C1[:, 0]
        name = f"the likeliest token{where}"
        return self._indicator(name, has_C, lambda probs_CV: probs_CV.gather(1, self._best_C1)[:, 0], tilts, counts_C)

    def _repeats(self) -> Feature:
        text_CT = self.draws.text_CT.sort(dim=1).values
        is_new_CT = F.pad(text_CT[:, 1:] != text_CT[:, :-1], (1, 0), value=True) & (text_CT >= 0)

        def chance(probs_CV: Tensor) -> Tensor:
            return (probs_CV.gather(1, text_CT.clamp(min=0)) * is_new_CT).sum(dim=1)

        has_C = (text_CT == self.draws.tokens_C[:, None]).any(dim=1)
        return self._indicator("tokens that the text already has", has_C, chance, (-1, -0.3, 0.3, 1))

    def _rare(self, below: float) -> Feature:
        is_rare_CV = self.probs_CV < below
        has_C, name = self.chosen_C.exp() < below, f"tokens of a probability below {below:g}"
        return self._indicator(name, has_C, lambda probs_CV: (probs_CV * is_rare_CV).sum(dim=1), (NEVER, -0.5, 0.5))

    def _likelihood(self, where: str, tilts: Collection[float], counts_C: Tensor) -> Feature:
        """Returns log π as a feature, for which q is π at the temperature 1 / (1 + λ)."""
        value_C = self.chosen_C if self.drawn_CV is None else _mean(self.drawn_CV, self.logprobs_CV.clamp(min=-1e4))
        gains_CN = torch.stack([self._of_temperature[tilt] for tilt in tilts], dim=1)
        return Feature(f"sum of log-probs{where}", value_C, self._mean_C, gains_CN, counts_C)

    @cached_property
    def _of_temperature(self) -> dict[float, Tensor]:
        gains = dict[float, Tensor]()
        for tilt in TEMPERATURES:
            norm_C = torch.logsumexp((1 + tilt) * self.logprobs_CV, dim=1)
            if self.drawn_CV is None:
                gains[tilt] = self._gain((tilt * self.chosen_C - norm_C).exp())
            else:
                gains_CV = self._gain((tilt * self.logprobs_CV - norm_C[:, None]).exp())
                gains[tilt] = _mean(self.drawn_CV, gains_CV)
        return gains

    @cached_property
    def _mean_C(self) -> Tensor:
        return _mean(self.probs_CV, self.logprobs_CV.clamp(min=-1e4))

    def _classes(self) -> list[Feature]:
        own_C, sums = self.draws.tokens_C % CLASSES, _of_classes(self.probs_CV)
        drawn = sums if self.drawn_CV is None else _of_classes(self.drawn_CV)

        def indicator(number: int) -> Feature:
            def chance(probs_CV: Tensor) -> Tensor:
                return (drawn if probs_CV is self.drawn_CV else sums)[number]

            return self._indicator(f"tokens with id % {CLASSES} = {number}", own_C == number, chance, (-0.5, 0.5))

        return [indicator(number) for number in range(CLASSES)]


def _of_classes(probs_CV: Tensor) -> Sequence[Tensor]:
    padded_CV = F.pad(probs_CV, (0, -probs_CV.shape[1] % CLASSES))
    return padded_CV.unflatten(1, (-1, CLASSES)).sum(dim=1).unbind(dim=1)


def _mean(probs_CV: Tensor, values_CV: Tensor) -> Tensor:
    """Returns the expectation [C] of the values; one of an impossible token may be infinite."""
    return torch.where(probs_CV > 0, probs_CV * values_CV, 0.0).sum(dim=1)


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
    logits_CV: Tensor,
    draws: Draws,
    temperature: float,
    end_ids: Collection[int],
    rows_C: Tensor | None = None,
    fault: Fault | None = None,
) -> Evidence:
    """Bet against the policy softmax(logits / temperature) on the sampled tokens.

    With `rows_C`, only these rows of the logits predict a token to test, and `draws` has the tokens of these rows. With
    `fault`, returns the evidence to expect where a sampler with this fault draws the tokens instead.
    """
    size, total = max(1, AT_ONCE // logits_CV.shape[1]), NO_EVIDENCE
    for first in range(0, max(1, len(draws.tokens_C)), size):
        part = slice(first, first + size)
        logits = logits_CV[part] if rows_C is None else logits_CV[rows_C[part]]
        logits = logits.float() / temperature
        drawn_CV = None if fault is None else fault(logits, draws[part])
        total += _evidence(_Policy(torch.log_softmax(logits, dim=1), draws[part], drawn_CV), end_ids)
    return total


def _evidence(policy: _Policy, end_ids: Collection[int]) -> Evidence:
    names, shares, sums, num_groups = list[str](), list[float](), list[Tensor](), 0
    for features in policy.features(end_ids):
        num_groups += 1
        num_bets = sum(feature.gains_CN.shape[1] for feature in features)
        for feature in features:
            n, counted = feature.gains_CN.shape[1], feature.counts_C.double()
            totals = [feature.gains_CN.double().mul(counted[:, None]).sum(dim=0)]
            totals += [(values * counted).sum().expand(n) for values in (feature.value_C, feature.mean_C)]
            names += [feature.name] * n
            shares += [1 / num_bets] * n
            sums.append(torch.stack(totals))
    shares_N = torch.tensor(shares, dtype=torch.float64) / num_groups
    return Evidence(tuple(names), shares_N, torch.cat(sums, dim=1).cpu())
