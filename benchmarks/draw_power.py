"""How often wrong draws with right log-probs are found: `python -m benchmarks.draw_power MODEL ... [--seeds 30]`.

Plants each fault in Heed's sampler, gives its samples the policy's true log-probs, and runs the test of draws of
`heed verify-sampler` on them. Prints, per model, with how many seeds the fault is found, and the median evidence in
nats. The row "nothing" counts false alarms.
"""

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from lm.generation import Batch, Generated, Limits
from lm.samplers.draws import ALARM, Evidence
from lm.samplers.engine import SamplingEngine, SentWeights
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import NUM_VERSIONS, Trial, more_draws
from lm.sampling import Choice, draw_uniforms, token_logprobs

# Changes the logits [B, V] of a step, given the step and the texts so far; the result is drawn from at temperature 1.
Change = Callable[[Tensor, int, Sequence[list[int]]], Tensor]
Reseed = Callable[[Sequence[int]], Sequence[int]]


class Faulty(SamplingEngine):
    """Passes all calls on to a sampler; each fault overrides what it breaks."""

    def __init__(self, sampler: SamplingEngine, trial: Trial) -> None:
        self.sampler, self.trial = sampler, trial

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        return self.sampler.sample(prompts, seeds, max_new_tokens=max_new_tokens, temperature=temperature)

    def receive(self, sent: Iterable[SentWeights]) -> None:
        self.sampler.receive(sent)

    @property
    def digests(self) -> Mapping[str, int]:
        return self.sampler.digests

    def slots(self) -> Iterator[Mapping[str, Tensor]]:
        return self.sampler.slots()

    def sleep(self) -> None:
        self.sampler.sleep()

    def wake(self) -> None:
        self.sampler.wake()

    def close(self) -> None:
        self.sampler.close()


class WrongDraws(Faulty):
    """Draws from changed logits or with other random numbers, but reports the policy's log-probs."""

    def __init__(self, engine: HeedSampler, trial: Trial, change: Change, reseed: Reseed, uniform_bits: int) -> None:
        super().__init__(engine, trial)
        self.engine, self.change, self.reseed, self.uniform_bits = engine, change, reseed, uniform_bits

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        assert isinstance(max_new_tokens, int), "this benchmark has one limit for all prompts"
        policy, texts = self.engine.policy, [list(prompt) for prompt in prompts]
        batch = Batch.start(policy, range(len(prompts)), prompts, max_new_tokens + 1)
        uniforms_BR = torch.from_numpy(draw_uniforms(self.reseed(seeds), max_new_tokens))
        if self.uniform_bits:
            uniforms_BR = (uniforms_BR * 2**self.uniform_bits).floor() / 2**self.uniform_bits
        drawn = list[tuple[Tensor, Tensor]]()
        for place in range(max_new_tokens):
            changed_BV = self.change(batch.logits_BV / temperature, place, texts)
            tokens_B, _ = Choice(1.0).draw(changed_BV, uniforms_BR[:, place])
            drawn.append((tokens_B, token_logprobs(batch.logits_BV, tokens_B, temperature)))
            for text, token in zip(texts, tokens_B.tolist(), strict=True):
                text.append(token)
            batch.feed(tokens_B)
        return until_end(drawn, self.engine.end_ids)


def until_end(drawn: Sequence[tuple[Tensor, Tensor]], end_ids: Collection[int]) -> Generated:
    """Returns responses made of the tokens and log-probs [B] of each step. Tokens after an end token are dropped."""
    responses, logprobs = (torch.stack(side, dim=1).tolist() for side in zip(*drawn, strict=True))
    places = ([place for place, token in enumerate(row) if token in end_ids] for row in responses)
    ends = [found[0] + 1 if found else len(drawn) for found in places]
    responses = [row[:end] for row, end in zip(responses, ends, strict=True)]
    return Generated(
        responses,
        [row[-1] in end_ids for row in responses],
        [row[:end] for row, end in zip(logprobs, ends, strict=True)],
    )


def same(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
    return logits_BV


def shifted(tokens: Sequence[int], by: float) -> Change:
    def change(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
        logits_BV = logits_BV.clone()
        logits_BV[:, list(tokens)] += by
        return logits_BV

    return change


def repetition_penalty(penalty: float) -> Change:
    def change(logits_BV: Tensor, _place: int, texts: Sequence[list[int]]) -> Tensor:
        logits_BV = logits_BV.clone()
        for row, text in zip(logits_BV, texts, strict=True):
            seen = torch.tensor(sorted(set(text)))
            row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        return logits_BV

    return change


def exchanged(token: int, other: int) -> Change:
    def change(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
        logits_BV = logits_BV.clone()
        logits_BV[:, [token, other]] = logits_BV[:, [other, token]]
        return logits_BV

    return change


def top_k(k: int) -> Change:
    return lambda logits_BV, _place, _texts: logits_BV.masked_fill(
        logits_BV < logits_BV.topk(k, dim=1).values[:, -1:], -torch.inf
    )


def top_p(p: float) -> Change:
    def change(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
        ranked_BV, order_BV = logits_BV.softmax(dim=1).sort(dim=1, descending=True)
        cut_BV = ranked_BV.cumsum(dim=1) - ranked_BV >= p
        return logits_BV.masked_fill(torch.zeros_like(cut_BV).scatter(1, order_BV, cut_BV), -torch.inf)

    return change


def min_p(share: float) -> Change:
    def change(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
        probs_BV = logits_BV.softmax(dim=1)
        return logits_BV.masked_fill(probs_BV < share * probs_BV.amax(dim=1, keepdim=True), -torch.inf)

    return change


def every_tenth_greedy(logits_BV: Tensor, place: int, _texts: Sequence[list[int]]) -> Tensor:
    return logits_BV * 1e4 if place % 10 == 9 else logits_BV


def likeliest_banned(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
    return logits_BV.scatter(1, logits_BV.argmax(dim=1, keepdim=True), -torch.inf)


def one_row_of_32_colder(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
    factor_B = torch.where(torch.arange(len(logits_BV)) % 32 == 0, 1.5, 1.0)
    return logits_BV * factor_B[:, None]


def last_eighth_colder(factor: float) -> Change:
    def change(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
        factor_B = torch.where(torch.arange(len(logits_BV)) >= len(logits_BV) * 7 // 8, factor, 1.0)
        return logits_BV * factor_B[:, None]

    return change


def as_they_are(seeds: Sequence[int]) -> Sequence[int]:
    return seeds


def in_pairs(seeds: Sequence[int]) -> Sequence[int]:
    return [seeds[place - place % 2] for place in range(len(seeds))]


def faults(trial: Trial) -> Mapping[str, tuple[Change, Reseed, int]]:
    ends, size = trial.tokenizer.end_ids, trial.shape.vocab_size
    common = trial.tokenizer.encode(" the")[:1]
    changes: dict[str, Change] = {
        "nothing": same,
        "never the end token": shifted(ends, -torch.inf),
        "end token's logit - 1": shifted(ends, -1),
        "end token's logit + 1": shifted(ends, 1),
        "end token exchanged with its neighbour": exchanged(ends[0], ends[0] - 1),
        f"token {common[0]} banned": shifted(common, -torch.inf),
        "likeliest token banned": likeliest_banned,
        "every tenth token greedy": every_tenth_greedy,
        "repetition penalty 1.02": repetition_penalty(1.02),
        "repetition penalty 1.1": repetition_penalty(1.1),
        "temperature x 1.05": lambda logits_BV, _place, _texts: logits_BV / 1.05,
        "temperature x .97": lambda logits_BV, _place, _texts: logits_BV / 0.97,
        f"top_k {size // 4} of {size}": top_k(size // 4),
        f"top_k {size // 8} of {size}": top_k(size // 8),
        "top_p .99": top_p(0.99),
        "top_p .95": top_p(0.95),
        "min_p .01": min_p(0.01),
        "last eighth of the rows: temperature / 1.1": last_eighth_colder(1.1),
        "last eighth of the rows: temperature / 1.2": last_eighth_colder(1.2),
        "one row of 32: temperature / 1.5": one_row_of_32_colder,
    }
    found = {name: (change, as_they_are, 0) for name, change in changes.items()}
    return found | {
        "rows share random numbers in pairs": (same, in_pairs, 0),
        "uniform numbers of 4 bits": (same, as_they_are, 4),
        "uniform numbers of 8 bits": (same, as_they_are, 8),
    }


def planted(trial: Trial, name: str) -> WrongDraws:
    """Returns Heed's sampler of the trial's last policy, with a fault."""
    engine = HeedSampler(trial.policy(NUM_VERSIONS - 1), trial.tokenizer.end_ids)
    return WrongDraws(engine, trial, *faults(trial)[name])


def gained(trial: Trial, name: str) -> Evidence:
    """Returns the evidence of the test of draws against Heed's sampler with a fault."""
    usual, last = more_draws(planted(trial, name), trial)
    return usual.evidence() + last.evidence()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=30)
    arguments = parser.parse_args()
    for folder in arguments.models:
        print(f"\n| {folder} | found, of {arguments.seeds} | evidence (nats) |\n|---|---|---|")
        for name in faults(Trial(folder, "fp32")):
            found = [gained(Trial(folder, "fp32", seed), name).nats for seed in range(arguments.seeds)]
            print(f"| {name} | {sum(nats >= ALARM for nats in found)} | {median(found):.0f} |", flush=True)


if __name__ == "__main__":
    main()
