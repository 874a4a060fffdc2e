"""Comparing policies by a judge that training never saw: gold scores, win rates, KL, best-of-n, diversity.

Arrays: P prompts, S samples of a prompt.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from evaluation.best_of_n import best_of_n_expected, best_of_n_kl
from evaluation.diversity import distinct_n
from evaluation.sampling import Sample, SamplingSpec
from evaluation.sampling_everywhere import sample_everywhere
from evaluation.statistics.means import bootstrap_mean, win_rate
from intervals.score import share_interval
from ppo.stage import STAGE as PPO
from stages.contract import Parent, Stage
from stages.planner import Planner, StagePlan
from stages.prompts import require_room
from stages.run import StageRun
from training.config import Config
from training.data import DataConfig, Prompt, read_prompts
from training.seeds import derive_seed

Floats = npt.NDArray[np.float64]
Gold = Callable[[Sequence[str], Sequence[str]], list[float]]


class CompareConfig(Config):
    """`num_samples` responses a prompt of every policy; the SFT policy gives a pool of `best_of` for best-of-n."""

    prompts: DataConfig
    num_samples: int = Field(ge=1)
    best_of: int = Field(ge=2)
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0)
    num_shown: int = Field(default=12, ge=0)  # prompts whose responses the report shows side by side


def best_of(samples: Sequence[Sample], n: int) -> list[Sample]:
    """Of each prompt's first n samples the one that the reward model scores highest."""
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    for prompt_id, pool in by_prompt.items():
        if len(pool) < n:
            raise ValueError(f"prompt {prompt_id!r} has {len(pool)} samples; best-of-{n} needs {n}")
    return [max(pool[:n], key=lambda sample: sample.score) for pool in by_prompt.values()]


def compare_policies(
    policies: Mapping[str, Sequence[Sample]], prompts: Sequence[Prompt], gold: Gold, *, pass_mark: float, seed: int
) -> dict[str, Any]:
    """Figures of every policy and the win rate of every ordered pair, with 95% intervals over prompts.

    Each policy has the same number of samples for every prompt, in the prompts' order. `pass_mark` is the gold score
    above which a response counts as good.
    """
    gold_PS = {name: gold_scores(samples, prompts, gold) for name, samples in policies.items()}
    return {
        "policies": {
            name: _figures(samples, gold_PS[name], prompts, pass_mark, seed) for name, samples in policies.items()
        },
        "pairs": {
            f"{first}/{second}": {"win_rate": win_rate(gold_PS[first], gold_PS[second]).as_dict()}
            for first, second in permutations(policies, 2)
        },
    }


def gold_scores(samples: Sequence[Sample], prompts: Sequence[Prompt], gold: Gold) -> Floats:
    """Gold scores [P, S] of samples that lie prompt after prompt."""
    text_of = {prompt.prompt_id: prompt.messages[-1]["content"] for prompt in prompts}
    scores = gold([text_of[sample.prompt_id] for sample in samples], [sample.response for sample in samples])
    return np.asarray(scores, dtype=np.float64).reshape(len(prompts), -1)


def _figures(
    samples: Sequence[Sample], gold_PS: Floats, prompts: Sequence[Prompt], pass_mark: float, seed: int
) -> dict[str, Any]:
    ratio_PS = np.array([sample.log_ratio for sample in samples]).reshape(gold_PS.shape)
    proxy_PS = np.array([sample.score for sample in samples]).reshape(gold_PS.shape)
    kinds = np.array([prompt.kind for prompt in prompts])
    # Diversity depends on how much text there is, so every policy shows one sample a prompt.
    firsts = [sample.response for sample in samples[:: gold_PS.shape[1]]]
    return {
        "gold_score": _mean(gold_PS, seed),
        "pass_share": share_interval((gold_PS > pass_mark).mean(axis=1)).as_dict(),
        "kl_nats": _mean(ratio_PS, seed),
        "proxy_score": _mean(proxy_PS, seed),
        "distinct_2": distinct_n(firsts, 2),
        "end_rate": float(np.mean([sample.finished for sample in samples])),
        "mean_tokens": float(np.mean([sample.num_tokens for sample in samples])),
        "by_kind": {str(kind): float(gold_PS[kinds == kind].mean()) for kind in np.unique(kinds)},
    }


def _mean(values_PS: Floats, seed: int) -> dict[str, Any] | None:
    """Mean with its interval; None where it was not measured."""
    return None if np.isnan(values_PS).all() else bootstrap_mean(list(values_PS), seed=seed).as_dict()


def best_of_n_curve(
    pool: Sequence[Sample], prompts: Sequence[Prompt], gold: Gold, *, seed: int
) -> list[dict[str, Any]]:
    """Gold and proxy score of best-of-n for n = 1, 2, 4, ... from one pool, with the KL bound of each n."""
    gold_PS = gold_scores(pool, prompts, gold)
    proxy_PS = np.array([sample.score for sample in pool]).reshape(gold_PS.shape)
    expected_gold, expected_proxy = best_of_n_expected(gold_PS, proxy_PS), best_of_n_expected(proxy_PS, proxy_PS)
    sizes = [2**power for power in range(gold_PS.shape[1].bit_length()) if 2**power <= gold_PS.shape[1]]
    return [
        {
            "n": n,
            "kl_bound_nats": best_of_n_kl(n),
            "gold_score": _mean(expected_gold[:, n - 1 : n], seed),
            "proxy_score": _mean(expected_proxy[:, n - 1 : n], seed),
        }
        for n in sizes
    ]


def side_by_side(
    policies: Mapping[str, Sequence[Sample]], prompts: Sequence[Prompt], gold: Gold, num_shown: int
) -> list[dict[str, Any]]:
    """The first sample of every policy on the first prompts, with gold and reward-model scores."""
    shown = prompts[:num_shown]
    rows: list[dict[str, Any]] = [
        {"prompt_id": p.prompt_id, "kind": p.kind, "prompt": p.messages[-1]["content"], "responses": {}} for p in shown
    ]
    for name, samples in policies.items():
        first_of: dict[str, Sample] = {}
        for sample in samples:
            first_of.setdefault(sample.prompt_id, sample)
        chosen = [first_of[prompt.prompt_id] for prompt in shown]
        scores = gold([row["prompt"] for row in rows], [sample.response for sample in chosen])
        for row, sample, score in zip(rows, chosen, scores, strict=True):
            row["responses"][name] = {"text": sample.response, "gold_score": score, "proxy_score": sample.score}
    return rows


def run_compare(run: StageRun, config: CompareConfig) -> None:
    """Sample every policy on held-out prompts, measure, judge."""
    prompts, ppo_config = read_prompts(config.prompts), run.job.section(PPO)
    assert ppo_config is not None, "the comparison is of PPO's policy"

    def samples_of(name: str, num_samples: int) -> list[Sample]:
        # The pretrained model has seen no chat template; it is asked in the one that SFT taught.
        spec = SamplingSpec(
            policy=run.model_of(name),
            num_samples=num_samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(run.seed, "compare", name),
            precision=run.engine.resolved_precision(),
            reference=str(run.model_of("sft")),
            reward=str(run.model_of("reward")),
            objective_weights=ppo_config.objective_weights,
            template_of=str(run.model_of("sft")),
        )
        return sample_everywhere(run, name, spec, prompts)

    pool = samples_of("sft", max(config.best_of, config.num_samples))
    pretrained = {"pretrained": samples_of("pretrain", config.num_samples)} if "pretrain" in run.parents else {}
    policies: dict[str, Sequence[Sample]] = {
        **pretrained,
        "sft": pool,
        f"best_of_{config.best_of}": best_of(pool, config.best_of),
        "ppo": samples_of("ppo", config.num_samples),
    }
    gold = run.world.gold_scores
    results = compare_policies(policies, prompts, gold, pass_mark=run.world.pass_mark, seed=run.seed)
    curve = best_of_n_curve(pool, prompts, gold, seed=run.seed)
    # The log-ratio of a chosen sample says nothing about the choosing policy; its KL is known by its bound.
    results["policies"][f"best_of_{config.best_of}"]["kl_nats"] = None
    results |= {
        "judge": {"name": run.world.judge_names[0], "description": run.world.describe()},
        "num_prompts": len(prompts),
        "num_samples": config.num_samples,
        "temperature": config.temperature,
        "best_of_n": curve,
        "samples": side_by_side(policies, prompts, gold, config.num_shown),
    }
    write_samples(run.folder / "samples.jsonl", policies)
    run.write_results(results)


def write_samples(path: Path, policies: Mapping[str, Sequence[Sample]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name, samples in policies.items():
            for sample in samples:
                file.write(json.dumps({"policy": name, **sample.as_dict()}) + "\n")


def preflight(run: StageRun, config: CompareConfig) -> None:
    """Check that every prompt leaves room for its responses."""
    require_room(run, run.tokenizer_of("sft"), config.prompts, config.max_new_tokens)


def plan(planner: Planner, config: CompareConfig) -> StagePlan:
    pool = max(config.best_of, config.num_samples)
    per_prompt = pool + config.num_samples * (1 + ("pretrain" in planner.job.stage_names))
    # The reference that samples are measured against; reward models of this stage stay in fp32.
    measured_by = {"reference": planner.layout.compute_bytes, "reward model": 4}
    return planner.sampling(
        planner.sizes.num_rows(config.prompts),
        per_prompt,
        config.max_new_tokens,
        at_once=pool,
        measured_by=measured_by,
    )


STAGE = Stage(
    name="compare",
    config=CompareConfig,
    run=run_compare,
    parents=(
        Parent("pretrain", is_read=lambda _, stages: "pretrain" in stages),
        Parent("sft"),
        Parent("reward"),
        Parent("ppo"),
    ),
    sections=("world",),
    model_fields=(),
    output="results.json",
    context_tokens=lambda config: {"max_new_tokens": config.max_new_tokens + 1},
    preflight=preflight,
    plan=plan,
)
