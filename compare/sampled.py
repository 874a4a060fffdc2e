"""The comparison of a run's policies on samples that are there already, by the world's gold judge.

It leaves the folder that `heed compare` leaves, computed by the same code, so `heed judge` and `heed report` take it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from compare.comparing import Progress, counts_of, judged
from compare.config import CompareConfig
from compare.folder import BEST_OF_N, MEASURES, Settings, versions, write_files
from compare.judges import gold_judge
from compare.outcome import conclude
from compare.results import (
    CompareResults,
    JudgeResults,
    PairResults,
    PolicyResults,
    SampledPrompt,
    SampledText,
    WinRateResults,
)
from evaluation.measures.curves import BestOfN, best_of_n_scores
from evaluation.measures.policies import PolicyMeasures, Scores, response_scores
from evaluation.sampling import Sample
from evaluation.statistics.results import JudgeSummary, Summary
from evaluation.verdicts import Response
from files.atomic import write_json
from files.hashes import file_hash
from files.records import as_json, record_of
from intervals.estimates import Interval
from stages.world import World
from training.data import Prompt

MAX_FAILED_SHARE = 0.1


@dataclass(frozen=True)
class Sampled:
    """Samples by policy, in the order of the report. `pool` is the policy that best-of-n chooses from; `training` are
    PPO's (KL, score), iteration by iteration.
    """

    prompts: Sequence[Prompt]
    policies: Mapping[str, Sequence[Sample]]
    pool: str
    training: Sequence[tuple[float, float]]
    seed: int


@dataclass(frozen=True)
class _Measures:
    """The part of measures.json that the results hold."""

    policies: Mapping[str, PolicyMeasures]
    best_of_n: tuple[BestOfN, ...]


def best_of(samples: Sequence[Sample], n: int) -> list[Sample]:
    """Of each prompt's first n samples the one that the reward model scores highest."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    for prompt_id, pool in by_prompt.items():
        if len(pool) < n:
            raise ValueError(f"prompt {prompt_id!r} has {len(pool)} samples; best-of-{n} needs {n}")
    return [max(pool[:n], key=lambda sample: sample.score) for pool in by_prompt.values()]


def best_of_name(n: int) -> str:
    return f"best_of_{n}"


def compare_sampled(
    folder: Path, config: CompareConfig, sampled: Sampled, world: World, progress: Progress
) -> CompareResults:
    """Judge the samples, write the comparison's files and report into `folder`, which is there.

    Raises:
        ValueError: a prompt has too few samples to choose from, or the judge fails too often.
    """
    responses = _responses(sampled, config.best_of)
    judge = gold_judge(world.judge_names[0], "gold:../job.toml", world)
    entry, verdicts = judged(judge, sampled.prompts, responses, MAX_FAILED_SHARE, progress)
    settings = _settings(config, sampled, responses, entry)
    write_files(folder, settings, sampled.prompts, [row for own in responses.values() for row in own], verdicts)
    scores = response_scores(verdicts)[judge.name]
    write_json(folder / MEASURES, {"best_of_n": as_json(_best_of_n(sampled, responses, scores))})
    report = conclude(folder)
    summary = record_of(report["summary"], Summary, "report.json: summary")
    measures = record_of(report["measures"], _Measures, "report.json: measures")
    (by_gold,) = summary.judges
    return CompareResults(
        judge=JudgeResults(judge.name, world.describe()),
        num_prompts=len(sampled.prompts),
        num_samples=config.num_samples,
        temperature=config.temperature,
        policies={name: _policy(found, judge.name) for name, found in measures.policies.items()},
        pairs=dict(_pairs(by_gold)),
        best_of_n=measures.best_of_n,
        training_kl_nats=tuple(kl for kl, _ in sampled.training),
        training_scores=tuple(score for _, score in sampled.training),
        samples=_shown(sampled.prompts[: config.num_shown], responses, scores),
    )


def _responses(sampled: Sampled, n: int) -> dict[str, list[Response]]:
    """By policy, best-of-n after the policy that it chooses from."""
    found: dict[str, list[Response]] = {}
    for name, samples in sampled.policies.items():
        found[name] = [_response(name, sample) for sample in samples]
        if name == sampled.pool:
            own, chosen = best_of_name(n), best_of(samples, n)
            # The log-ratio of a chosen sample says nothing about the choosing policy; its KL is known by its bound.
            found[own] = [replace(_response(own, sample), log_ratio=nan) for sample in chosen]
    return found


def _response(policy: str, sample: Sample) -> Response:
    return Response(
        policy=policy,
        prompt_id=sample.prompt_id,
        index=sample.index,
        text=sample.response,
        num_tokens=sample.num_tokens,
        finished=sample.finished,
        log_ratio=sample.log_ratio,
        proxy_score=sample.score,
    )


def _settings(
    config: CompareConfig, sampled: Sampled, responses: Mapping[str, Sequence[Response]], judge: dict[str, Any]
) -> Settings:
    data, path = config.prompts, Path(config.prompts.source)
    chosen = {"name": best_of_name(config.best_of), "kind": BEST_OF_N, "n": config.best_of, "of": sampled.pool}
    sampling = config.model_dump(include={"num_samples", "temperature", "max_new_tokens"})
    return {
        "policies": [
            chosen if name == chosen["name"] else {"name": name, "kind": "stage", "sampling": sampling}
            for name in responses
        ],
        "prompts": {
            **data.model_dump(include={"split", "subset", "max_rows"}),
            "source": path.name,
            "category": "",
            "sha256": file_hash(path) if path.is_file() else "",
            "num_prompts": len(sampled.prompts),
        },
        "seed": sampled.seed,
        "responses": {name: counts_of(own) for name, own in responses.items()},
        "judges": [judge],
        "versions": versions(),
    }


def _best_of_n(sampled: Sampled, responses: Mapping[str, Sequence[Response]], gold: Scores) -> tuple[BestOfN, ...]:
    """From the whole pool, which lies prompt after prompt."""
    pool = responses[sampled.pool]
    gold_R = np.array([gold[row.policy, row.prompt_id, row.index] for row in pool])
    proxy_R = np.array([row.proxy_score for row in pool])
    shape = (len(sampled.prompts), -1)
    return best_of_n_scores(gold_R.reshape(shape), proxy_R.reshape(shape))


def _policy(found: PolicyMeasures, judge: str) -> PolicyResults:
    gold, diversity = found.scores[judge], found.diversity
    assert diversity.tokens is not None, "a sampled response has a number of tokens"
    return PolicyResults(
        gold_score=gold.mean,
        pass_share=gold.pass_share,
        kl_nats=_known(found.kl_nats),
        proxy_score=_known(found.proxy_score),
        distinct_2=diversity.across.distinct_2,
        end_rate=diversity.finished.mean,
        mean_tokens=diversity.tokens.mean.mean,
        by_kind=gold.by_category,
    )


def _known(found: Interval) -> Interval | None:
    return None if np.isnan(found.mean) else found


def _pairs(judge: JudgeSummary) -> Iterator[tuple[str, PairResults]]:
    """Each two policies from both sides."""
    for pair in judge.pairs:
        rate, holm_p = pair.win_rate, pair.significance.holm_p
        one = WinRateResults(rate.mean, rate.low, rate.high, rate.num_prompts, holm_p)
        other = WinRateResults(1 - rate.mean, 1 - rate.high, 1 - rate.low, rate.num_prompts, holm_p)
        yield f"{pair.policy_a}/{pair.policy_b}", PairResults(one)
        yield f"{pair.policy_b}/{pair.policy_a}", PairResults(other)


def _shown(
    prompts: Sequence[Prompt], responses: Mapping[str, Sequence[Response]], scores: Scores
) -> tuple[SampledPrompt, ...]:
    """The first sample of every policy on each prompt, with gold and reward model scores."""
    firsts: dict[tuple[str, str], Response] = {}
    for row in (row for own in responses.values() for row in own):
        firsts.setdefault((row.policy, row.prompt_id), row)
    return tuple(
        SampledPrompt(
            prompt_id=prompt.prompt_id,
            kind=prompt.kind,
            prompt=prompt.messages[-1]["content"],
            responses={name: _text(firsts[name, prompt.prompt_id], scores) for name in responses},
        )
        for prompt in prompts
    )


def _text(row: Response, scores: Scores) -> SampledText:
    return SampledText(row.text, scores[row.policy, row.prompt_id, row.index], row.proxy_score)
