"""The stages of a loop's rounds: those of a job with rounds, with four changes.

- [collect] chooses what to label, and writes all labels so far.
- A reward model starts from the SFT model in every round, not from the newest policy. It has never seen a label, so
  training on all labels passes over each as often in the last round as in the first, and training with rewards has not
  narrowed what it represents. Bai et al. (arXiv 2204.05862, 4.5) also train on all data again.
- A stage `gain` ends each round: it compares the round's policy with the one before.
- [compare], after the last round, also shows the loop.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evaluation.compare.folder import CompareConfig
from heed.loop.collect import COLLECT, TASKS, plan, preflight, run_round
from heed.loop.config import GAIN, LoopConfig, RoundConfig, name_of_round, round_settings
from heed.loop.gain import RESPONSES, run_gain
from heed.loop.gain import plan as plan_gain
from heed.loop.report import COLLECT_REPORTER, GAIN_REPORTER, with_loop
from stages.contract import Parent, Source, Stage
from stages.sizes import SourceSize

REWARD, COMPARE = "reward", "compare"
AnyStage = Stage[Any]


def loop_rounds(rounds: Sequence[Sequence[AnyStage]], loop: LoopConfig) -> list[list[AnyStage]]:
    """Returns the stages of each round of a loop. `rounds` are those of a job with rounds, a policy's stage last."""
    has_reward = any(stage.name == REWARD for stage in rounds[0])
    found: list[list[AnyStage]] = []
    for number, stages in enumerate(rounds, 1):
        own: list[AnyStage] = []
        for stage in stages:
            if stage.name == name_of_round(COLLECT, number):
                own.append(_collecting(stage, loop, number, has_reward=has_reward))
            elif stage.name == name_of_round(REWARD, number):
                own.append(_from_the_first_model(stage, rounds[0]))
            else:
                own.append(stage)
        found.append([*own, _comparing(stages[-1], number)])
    return found


def shown_in_loop(stage: AnyStage) -> AnyStage:
    """Returns a stage after the rounds, which shows the loop in the report if it is [compare]."""
    return replace(stage, report=with_loop(stage.report)) if stage.name == COMPARE and stage.report else stage


def _collecting(stage: AnyStage, loop: LoopConfig, number: int, *, has_reward: bool) -> AnyStage:
    settings = round_settings(loop, number, has_reward=has_reward)
    added = [name_of_round(REWARD, earlier) for earlier in loop.models_for(number, has_reward=has_reward)]
    if number > 1:
        added.append(name_of_round(COLLECT, number - 1))
    return replace(
        stage,
        config=RoundConfig,
        run=run_round,
        parents=(*stage.parents, *map(Parent[RoundConfig], added)),
        sections=() if loop.store else ("world",),
        optional_sections=("world",) if loop.store else (),
        also_required=(TASKS,),
        sources={
            "rankings": Source(
                "rankings.jsonl",
                lambda config, _: SourceSize(config.num_tasks(config.labels), config.responses_per_prompt),
            )
        },
        chooses=True,
        # Where labels come from, how long a round waits for them, and how many tasks people get ahead of their round.
        # The last round has none ahead until a round is added after it, and is finished all the same.
        layout_keys=frozenset({"store", "enough_share", "asked", "asked_before"}),
        preflight=preflight,
        plan=plan,
        report=COLLECT_REPORTER,
        repeats=COLLECT,
        settings=settings,
    )


def _from_the_first_model(stage: AnyStage, first: Sequence[AnyStage]) -> AnyStage:
    policy = first[-1].policy_from
    original = next(other for other in first if other.name == REWARD)
    reads = {name: own for name, own in stage.reads.items() if name != policy}
    parents = tuple(replace(parent, stage=reads.get(parent.stage, parent.stage)) for parent in original.parents)
    return replace(stage, reads=reads, parents=parents)


def _comparing(policy: AnyStage, number: int) -> Stage[CompareConfig]:
    before, reward = policy.policy_from, name_of_round(REWARD, number)
    return Stage(
        name=name_of_round(GAIN, number),
        config=CompareConfig,
        run=run_gain,
        parents=(
            Parent(name_of_round(COLLECT, number)),
            Parent(reward, is_read=lambda config, stages: config.judge_reward and reward in stages),
            Parent(policy.name),
            Parent("sft", is_read=lambda _, stages: "sft" in stages),  # the reference of the KL
            *((Parent[CompareConfig](name_of_round(GAIN, number - 1)),) if number > 1 else ()),
        ),
        optional_sections=("world",),
        model_fields=("judge_from",),
        function_fields=("judge_function",),
        output=RESPONSES,
        context_tokens=lambda config: {"max_new_tokens": config.max_new_tokens + 1},
        plan=plan_gain,
        report=GAIN_REPORTER,
        repeats=COMPARE,
        round=number,
        reads={"policy": policy.name, "before": before},
    )
