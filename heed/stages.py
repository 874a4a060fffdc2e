"""The six stages as jobs of one worker group: what each reads, where it runs, what it leaves."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ppo.stage
import pretrain.stage
import reward.stage
import sft.stage
from cluster.group import WorkerGroup
from cluster.ppo_group import ColocatedGroup
from evaluation.compare import best_of, best_of_n_curve, compare_policies, side_by_side
from evaluation.sampling import Sample, SamplingSpec, sample_policy
from heed.collect import collection_figures, label, make_tasks, write_rankings
from heed.job import JobConfig
from heed.measure import measure_reward_model
from heed.progress import StageProgress
from playground.world import World
from ppo.colocated import Parents
from ppo.controller import ScoreScale
from preferences.store import LabelStore
from training.config import Config
from training.data import Prompt, read_prompts
from training.seeds import derive_seed
from training.stage import StageContext

AnyConfig = TypeVar("AnyConfig", bound=Config)

PROMPTS_AT_ONCE = 64  # a worker's share between two steps of the progress bar


@dataclass(frozen=True)
class Run:
    """One run of a job: its folder, and the group that works for it."""

    job: JobConfig
    folder: Path
    world: World
    group: Callable[[], WorkerGroup]

    def stage_folder(self, stage: str) -> Path:
        return self.folder / stage

    def model(self, stage: str) -> Path:
        return self.folder / stage / "model"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer" / "data"

    def context(self, stage: str) -> StageContext:
        return StageContext(self.stage_folder(stage), self.job.seed, self.job.workers, self.job.engine)

    def resolve(self, config: AnyConfig) -> AnyConfig:
        """The config with "world:NAME" and "collect:rankings" turned into paths."""
        values = _replace_sources(config.model_dump(), self.path_of)
        return type(config).model_validate(values)

    def path_of(self, source: str) -> str:
        kind, separator, name = source.partition(":")
        if separator and kind == "world":
            return str(self.folder / "world" / "data" / f"{name}.jsonl")
        if source == "collect:rankings":
            return str(self.stage_folder("collect") / "rankings.jsonl")
        return source


def _replace_sources(value: Any, path_of: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {
            key: path_of(item) if key == "source" and isinstance(item, str) else _replace_sources(item, path_of)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_sources(item, path_of) for item in value]
    return value


def sources_in(value: Any) -> list[str]:
    """Every `source` of a dumped config."""
    if isinstance(value, dict):
        own = [value["source"]] if isinstance(value.get("source"), str) else []
        return own + [source for item in value.values() for source in sources_in(item)]
    if isinstance(value, list | tuple):
        return [source for item in value for source in sources_in(item)]
    return []


def run_pretrain(run: Run, _progress: StageProgress) -> None:
    config = run.resolve(run.job.pretrain)
    run.group().run("pretrain", pretrain.stage.run, run.context("pretrain"), config, run.job.model, run.tokenizer)


def run_sft(run: Run, _progress: StageProgress) -> None:
    config = run.resolve(run.job.sft)
    run.group().run("sft", sft.stage.run, run.context("sft"), config, run.model("pretrain"))


def run_collect(run: Run, progress: StageProgress) -> None:
    """Sample, put to labelers, export. Labels stay in the job's store for good; a new SFT policy opens a new batch."""
    config, folder, seed = run.resolve(run.job.collect), run.stage_folder("collect"), run.job.seed
    prompts = read_prompts(config.prompts)
    spec = SamplingSpec(
        policy=run.model("sft"),
        num_samples=config.responses_per_prompt,
        max_response_tokens=config.max_response_tokens,
        temperature=config.temperature,
        seed=derive_seed(seed, "collect"),
        precision=run.job.engine.resolved_precision(),
    )
    samples = sample_everywhere(run, "collect", spec, prompts, progress)
    batch = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))["fingerprint"][:12]
    tasks = make_tasks(batch, prompts, samples, "sft")
    with LabelStore(run.folder / "labels.sqlite") as store:
        rankings = label(
            store, run.world, tasks, config, batch=batch, seed=seed,
            on_progress=lambda state: progress.update(state.num_tasks - state.num_open, state.num_tasks, "labeled"),
        )  # fmt: skip
    write_rankings(folder / "rankings.jsonl", rankings)
    figures = collection_figures(
        rankings, len(prompts), len(prompts) - len(tasks), run.world, config.responses_per_prompt
    )
    run.context("collect").write_results(figures)


def run_reward(run: Run, _progress: StageProgress) -> None:
    config = run.resolve(run.job.reward)
    run.group().run("reward", reward.stage.run, run.context("reward"), config, run.model("sft"))
    results = read_results(run.stage_folder("reward"))
    measured = measure_reward_model(run.stage_folder("reward"), config, run.world, run.job.seed)
    run.context("reward").write_results({**results, **measured})


def run_ppo(run: Run, _progress: StageProgress) -> None:
    config = run.resolve(run.job.ppo)
    scores = read_results(run.stage_folder("reward"))
    if not scores["sample_score_std"] > 0:
        raise ValueError(
            f"{run.stage_folder('reward') / 'results.json'}: sample_score_std is {scores['sample_score_std']}; a reward"
            " model that tells the SFT policy's samples apart was expected"
        )
    parents = Parents(
        sft=run.model("sft"),
        reward=run.model("reward"),
        scale=ScoreScale(scores["sample_score_mean"], scores["sample_score_std"]),
        pretraining_stream=run.stage_folder("pretrain") / "data" / "train.bin",
        pretraining_row_tokens=run.job.pretrain.row_tokens,
    )
    roles = ColocatedGroup(run.group(), config, run.job.engine, parents)
    ppo.stage.run(run.context("ppo"), config, roles, parents, read_prompts(config.prompts))
    roles.close()


def run_compare(run: Run, progress: StageProgress) -> None:
    """Sample every policy on held-out prompts, measure, judge."""
    config, folder, seed = run.resolve(run.job.compare), run.stage_folder("compare"), run.job.seed
    prompts = read_prompts(config.prompts)

    def samples_of(name: str, num_samples: int) -> list[Sample]:
        # The pretrained model has seen no chat template; it is asked in the one that SFT taught.
        spec = SamplingSpec(
            policy=run.model(name),
            num_samples=num_samples,
            max_response_tokens=config.max_response_tokens,
            temperature=config.temperature,
            seed=derive_seed(seed, "compare", name),
            precision=run.job.engine.resolved_precision(),
            reference=str(run.model("sft")),
            reward=str(run.model("reward")),
            template_of=str(run.model("sft")),
        )
        return sample_everywhere(run, f"compare {name}", spec, prompts, progress)

    pool = samples_of("sft", max(config.best_of, config.num_samples))
    policies: dict[str, Sequence[Sample]] = {
        "pretrained": samples_of("pretrain", config.num_samples),
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


def sample_everywhere(
    run: Run, phase: str, spec: SamplingSpec, prompts: Sequence[Prompt], progress: StageProgress
) -> list[Sample]:
    """`sample_policy`, the prompts dealt to all workers in turns; the result does not depend on how."""
    group, samples = run.group(), list[Sample]()
    per_turn = PROMPTS_AT_ONCE * group.num_workers
    for start in range(0, len(prompts), per_turn):
        turn = prompts[start : start + per_turn]
        shares = [turn[rank * PROMPTS_AT_ONCE : (rank + 1) * PROMPTS_AT_ONCE] for rank in range(group.num_workers)]
        for found in group.run_each(phase, sample_policy, [(spec, share) for share in shares]):
            samples += found
        progress.update(min(start + per_turn, len(prompts)), len(prompts), phase)
    return samples


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
    """A stage's parents, the job sections it depends on, and how it runs."""

    name: str
    parents: tuple[str, ...]
    sections: tuple[str, ...]
    run: Callable[[Run, StageProgress], None]


STAGES = (
    Stage("pretrain", ("tokenizer",), ("model", "pretrain"), run_pretrain),
    Stage("sft", ("pretrain",), ("sft",), run_sft),
    Stage("collect", ("sft",), ("collect", "world"), run_collect),
    Stage("reward", ("sft", "collect"), ("reward",), run_reward),
    Stage("ppo", ("pretrain", "sft", "reward"), ("ppo",), run_ppo),
    Stage("compare", ("pretrain", "sft", "reward", "ppo"), ("compare", "world"), run_compare),
)
