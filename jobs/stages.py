"""The six stages as jobs of one worker group: what each reads, where it runs, what it leaves."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from shutil import rmtree
from statistics import mean, stdev
from typing import Any

import ppo.stage
import pretrain.stage
import reward.stage
import sft.stage
from collect.stage import CollectConfig, collection_figures, label, make_tasks, write_rankings
from compare.stage import CompareConfig, best_of, best_of_n_curve, compare_policies, side_by_side
from evaluation.sampling import Sample, SamplingSpec
from jobs.run import SAMPLES, Run, sample_everywhere
from ppo.config import PPOConfig
from ppo.groups import ColocatedGroup, DisaggregatedGroup
from ppo.initial_models import InitialModels, ScoreScale, TokenStream
from preferences.store import LabelStore
from pretrain.stage import PretrainConfig
from reward.elsewhere import Elsewhere
from reward.stage import RewardConfig
from reward.world_measures import measure_reward_model
from sft.stage import SFTConfig
from stages.progress import StageProgress
from training.data import Prompt, read_prompts
from training.seeds import derive_seed

SCALE_PROMPTS = 512  # what the spread of an unknown reward model's scores is measured on


def run_pretrain(run: Run, config: PretrainConfig, _progress: StageProgress) -> None:
    run.group().run("pretrain", pretrain.stage.run, run.context("pretrain"), config, run.job.model, run.tokenizer)


def run_sft(run: Run, config: SFTConfig, _progress: StageProgress) -> None:
    run.group().run("sft", sft.stage.run, run.context("sft"), config, run.start("sft", "pretrain"))


def run_collect(run: Run, config: CollectConfig, progress: StageProgress) -> None:
    """Sample, put to labelers, export. Labels stay in the job's store for good; a new SFT policy opens a new batch."""
    folder, seed = run.stage_folder("collect"), run.job.seed
    prompts = read_prompts(config.prompts)
    spec = SamplingSpec(
        policy=run.model("sft"),
        num_samples=config.responses_per_prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=derive_seed(seed, "collect"),
        precision=run.job.engine.resolved_precision(),
    )
    samples = sample_everywhere(run, "collect", "sft", spec, prompts, progress)
    batch = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))["fingerprint"][:12]
    with LabelStore(run.folder / "labels.sqlite") as store:
        others = [other for other in store.batches() if other != batch]
        taken = {stored.task.task_id for other in others for stored in store.tasks(other)}
        tasks = make_tasks(batch, prompts, samples, "sft", taken=taken)
        rankings = label(
            store, run.world, tasks, config, batch=batch, seed=seed,
            on_progress=lambda state: progress.update(state.num_tasks - state.num_open, state.num_tasks, "labeled"),
        )  # fmt: skip
    write_rankings(folder / "rankings.jsonl", rankings)
    figures = collection_figures(
        rankings, len(prompts), len(prompts) - len(tasks), run.world, config.responses_per_prompt
    )
    run.context("collect").write_results(figures)


def run_reward(run: Run, config: RewardConfig, _progress: StageProgress) -> None:
    folder = run.stage_folder("reward")
    run.group().run("reward", reward.stage.run, run.context("reward"), config, run.start("reward", "sft"))
    if "collect" in run.job.parents("reward"):  # so the world knows what its labelers went by
        measured = measure_reward_model(folder, config, run.world, run.job.seed)
        run.context("reward").write_results({**read_results(folder), **measured})


def run_ppo(run: Run, config: PPOConfig, progress: StageProgress) -> None:
    prompts, policy = read_prompts(config.prompts), run.start("ppo", "sft")
    judge = config.elsewhere or run.start("ppo", "reward")
    stream = None
    if config.ptx_rows:
        assert run.job.pretrain is not None
        stream = TokenStream(run.stage_folder("pretrain") / "data" / "train.bin", run.job.pretrain.seq_len)
    scale = score_scale(run, policy, judge, prompts, config, progress)
    models = InitialModels(sft=policy, reward=judge, scale=scale, pretraining=stream)
    if config.placement == "colocated":
        roles = ColocatedGroup(run.group(), config, run.job.engine, models)
    else:
        others = (
            run.group.beside("generators", config.num_generators),
            run.group.beside("scorers", config.num_scorers),
        )
        roles = DisaggregatedGroup(run.group(), *others, config, run.job.engine, models)
    ppo.stage.run(run.context("ppo"), config, roles, models, prompts)
    roles.close()


def score_scale(
    run: Run,
    policy: Path,
    judge: Path | Elsewhere,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    progress: StageProgress,
) -> ScoreScale:
    """Mean and standard deviation of the scores of the starting policy's own samples: the units of PPO's scores.

    Where [collect] sampled that policy, the reward stage has measured them. Else they are measured here, on one sample
    per prompt: published rankings hold responses of other policies, whose scores may lie elsewhere. The samples are
    kept until the stage is done, so a run that resumes has the same scale.

    Raises: ValueError for a reward that gives every sample the same score, and where too many fail.
    """
    if run.job.reward_stage_scores_policy and not config.objective_weights:
        where, scores = str(run.stage_folder("reward") / "results.json"), read_results(run.stage_folder("reward"))
        scale = ScoreScale(scores["sample_score_mean"], scores["sample_score_std"])
    else:
        where = run.job.substitute("ppo", "reward") or str(judge)
        spec = SamplingSpec(
            policy=policy,
            num_samples=1,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(run.job.seed, "ppo", "scale"),
            precision=run.job.engine.resolved_precision(),
            reward=str(judge) if isinstance(judge, Path) else "",
            objective_weights=config.objective_weights,
            elsewhere=None if isinstance(judge, Path) else judge,
        )
        samples = sample_everywhere(run, "ppo", "scale", spec, prompts[:SCALE_PROMPTS], progress)
        found = [sample.score for sample in samples if isfinite(sample.score)]
        num_failed = len(samples) - len(found)
        if len(found) < 2 or num_failed > config.max_failed_share * len(samples):
            rmtree(run.stage_folder("ppo") / SAMPLES / "scale")  # so that the next try asks again
            raise ValueError(
                f"{num_failed} of {len(samples)} samples of the SFT policy have no finite score; ppo.max_failed_share"
                f" allows {config.max_failed_share:.0%}, and two scores are needed at least."
                f" The first: {next(sample.failure for sample in samples if not isfinite(sample.score))}"
            )
        scale = ScoreScale(mean(found), stdev(found))
    if not scale.std > 0:
        raise ValueError(
            f"{where}: the scores of the SFT policy's samples have a spread of {scale.std}; a reward that tells them"
            " apart was expected"
        )
    return scale


def run_compare(run: Run, config: CompareConfig, progress: StageProgress) -> None:
    """Sample every policy on held-out prompts, measure, judge."""
    folder, seed = run.stage_folder("compare"), run.job.seed
    prompts, ppo_config = read_prompts(config.prompts), run.job.ppo
    assert ppo_config is not None, "the comparison is of PPO's policy"

    def samples_of(name: str, num_samples: int) -> list[Sample]:
        # The pretrained model has seen no chat template; it is asked in the one that SFT taught.
        spec = SamplingSpec(
            policy=run.model(name),
            num_samples=num_samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(seed, "compare", name),
            precision=run.job.engine.resolved_precision(),
            reference=str(run.model("sft")),
            reward=str(run.model("reward")),
            objective_weights=ppo_config.objective_weights,
            template_of=str(run.model("sft")),
        )
        return sample_everywhere(run, "compare", name, spec, prompts, progress)

    pool = samples_of("sft", max(config.best_of, config.num_samples))
    pretrained = {"pretrained": samples_of("pretrain", config.num_samples)} if run.job.pretrain else {}
    policies: dict[str, Sequence[Sample]] = {
        **pretrained,
        "sft": pool,
        f"best_of_{config.best_of}": best_of(pool, config.best_of),
        "ppo": samples_of("ppo", config.num_samples),
    }
    gold = run.world.gold_scores
    results = compare_policies(policies, prompts, gold, pass_mark=run.world.pass_mark, seed=seed)
    curve = best_of_n_curve(pool, prompts, gold, seed=seed)
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
    write_samples(folder / "samples.jsonl", policies)
    run.context("compare").write_results(results)


def write_samples(path: Path, policies: Mapping[str, Sequence[Sample]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name, samples in policies.items():
            for sample in samples:
                file.write(json.dumps({"policy": name, **sample.as_dict()}) + "\n")


def read_results(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return results


@dataclass(frozen=True)
class Stage:
    """The job sections that a stage depends on, its own first, and how it runs."""

    name: str
    sections: tuple[str, ...]
    run: Callable[[Run, Any, StageProgress], None]


STAGES = (
    Stage("pretrain", ("pretrain", "model"), run_pretrain),
    Stage("sft", ("sft",), run_sft),
    Stage("collect", ("collect", "world"), run_collect),
    Stage("reward", ("reward",), run_reward),
    Stage("ppo", ("ppo",), run_ppo),
    Stage("compare", ("compare", "world"), run_compare),
)
