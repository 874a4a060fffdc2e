"""The compare stage: policies of the run on held-out prompts, by a judge that training never saw."""

from collections.abc import Callable

from compare.config import CompareConfig
from compare.report.stage import REPORTER
from compare.sampled import Sampled, compare_sampled
from evaluation.sampling import Sample, SamplingSpec
from evaluation.sampling_everywhere import sample_everywhere
from ppo.stage import STAGE as PPO
from stages.contract import Parent, Stage
from stages.planner import Planner, StagePlan
from stages.prompts import require_room
from stages.run import StageRun
from training.data import read_prompts
from training.metrics import read_metrics
from training.seeds import derive_seed


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
    metrics = read_metrics(run.folder_of("ppo") / "metrics.jsonl")
    sampled = Sampled(
        prompts=prompts,
        policies={**pretrained, "sft": pool, "ppo": samples_of("ppo", config.num_samples)},
        pool="sft",
        training=[(line["kl_nats"], line["score"]) for line in metrics if {"kl_nats", "score"} <= line.keys()],
        seed=run.seed,
    )

    def progress(step: str) -> Callable[[int, int], None]:
        return lambda done, total: run.show(done, total, step)

    run.write_results(compare_sampled(run.folder, config, sampled, run.world, progress))


def preflight(run: StageRun, config: CompareConfig) -> None:
    """Check that every prompt leaves room for its responses."""
    require_room(run, run.tokenizer_of("sft"), config.prompts, config.max_new_tokens)


def plan(planner: Planner, config: CompareConfig) -> StagePlan:
    pool = max(config.best_of, config.num_samples)
    per_prompt = pool + config.num_samples * (1 + ("pretrain" in planner.job.stage_names))
    # Reward models of this stage are bf16 on a GPU, else fp32 (`lm.inference`).
    measured_by = {"reference": planner.layout.compute_bytes, "reward model": 2 if planner.layout.is_gpu else 4}
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
    report=REPORTER,
)
