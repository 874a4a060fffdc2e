"""A round's labels: a rule makes tasks of the newest policy's samples, for the world's labelers or for people.

Tasks of all rounds stay open until they are answered. A round writes the rankings of all labels that have come so far,
whichever round asked for them, and its reward model is trained on those.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from files.atomic import write_json
from files.hashes import derive_seed, json_hash
from files.records import as_json, read_record
from heed.loop.config import RoundConfig, name_of_round
from ppo.stage import STAGE as PPO
from preferences.database import STORE_AWAY, reason_of, require_locks
from preferences.records import Coverage, Message, Ranking, Task
from preferences.statistics.agreement import accuracy_against, pairwise_agreement
from preferences.statistics.estimates import Share
from preferences.task_selection import RULES, PromptCandidates, choose_tasks
from reward.collect import candidates_of, let_world_label, scores_of, write_rankings
from reward.sampling import SamplingSpec, sample_everywhere
from stages.contract import StageWaitsError
from stages.data import fitting_prompts
from stages.plan import Planner, Sampling
from stages.run import StageRun
from stages.world import Labels, OpenLabels, World, label_truth
from training.data import Overlong, Prompt, SourceRows, untold

COLLECT = "collect"
TASKS = "tasks.json"  # the tasks that a round has added to the store


@dataclass(frozen=True)
class AddedTask:
    """A task that a round added. `weight` is 1/(propensity · sets of its prompt), as in `uniform_mean`."""

    task_id: str
    prompt_id: str
    num_labelers: int
    weight: float


@dataclass(frozen=True)
class AddedTasks:
    """The contents of tasks.json: the batch of the store that the tasks are in, and the tasks."""

    batch: str
    tasks: tuple[AddedTask, ...]
    num_prompts: int  # that were sampled
    policy: str  # that was sampled; "" if the round adds no task


@dataclass(frozen=True)
class RoundResults:
    """Results of a round's collecting. Labels are counted over this and all earlier rounds.

    `effective_tasks` is (Σw)²/Σw², for the weights that undo the rule's choice: how many uniformly chosen tasks tell as
    much about the average task as this round's tasks do. It is NaN if the round added none.
    """

    round: int
    rule: str
    models: tuple[str, ...]
    policy: str
    num_prompts: int
    num_tasks: int
    effective_tasks: float
    num_asked: int
    num_labels: int
    num_new_labels: int
    num_open_tasks: int
    agreement: Share
    gold_accuracy: Share | None
    labelers: tuple[str, ...]
    overlong: Overlong | None = None  # of the prompts
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual


class LabelsWaitError(StageWaitsError):
    """A round waits for people's labels. `count_missing` counts those that it still needs before it continues.

    `count_missing` raises one of `STORE_AWAY` while the store cannot be used.
    """

    def __init__(self, message: str, count_missing: Callable[[], int]) -> None:
        super().__init__(message)
        self.count_missing = count_missing


@contextmanager
def waiting_for_store(run: StageRun, store: str) -> Iterator[None]:
    """Raise LabelsWaitError, which does not end the run, if the people's label store cannot be used in the block."""
    try:
        yield
    except STORE_AWAY as error:
        message = f"{run.name} waits for the label store {store}: {reason_of(error)}"
        raise LabelsWaitError(message, partial(_require_store, run.open_labels, store)) from error


def _require_store(open_labels: OpenLabels, store: str) -> int:
    """Returns 0: no label is missing once the store can be opened. Raises: one of `STORE_AWAY` until then."""
    with open_labels(store):
        return 0


def run_round(run: StageRun, config: RoundConfig) -> None:
    """Add the round's tasks, get labels, and write the rankings of all labels so far.

    Raises: LabelsWaitError while people have not given enough labels, or their store cannot be used.
    """
    tokenizer = run.tokenizer_of("sft")
    fitting = fitting_prompts(run, tokenizer, config.prompts, config.max_new_tokens, config.on_overlong)
    earlier = [added_by(run.run_folder, number) for number in range(1, config.round)]
    if not (run.folder / TASKS).is_file():
        _add_tasks(run, config, fitting.prompts, earlier)
    rounds = [*earlier, read_record(run.folder / TASKS, AddedTasks)]
    with _opened_store(run, config) as store:
        if not config.store:
            _let_world_label(run, store, rounds[-1])
        else:
            require_labels(run, store, config, rounds)
        rankings = [ranking for batch, ids in _by_batch(rounds) for ranking in _rankings(store, batch, ids)]
        num_open = sum(len(one.judged_by) < one.num_labelers for one in _covered(store, config, rounds))
    if not rankings:
        raise ValueError(f"{run.name}: the store has no label to learn from; answers that are not skips were expected")
    write_rankings(run.folder / "rankings.jsonl", rankings)
    run.write_results(_results(run, config, rounds, rankings, num_open, fitting.overlong or None, fitting.sources))


@contextmanager
def _opened_store(run: StageRun, config: RoundConfig) -> Iterator[Labels]:
    """Opens the label store. Raises: LabelsWaitError if it is `config.store` and cannot be used now."""
    path = store_of(run.run_folder, config)
    if not config.store:
        with run.open_labels(path) as store:
            yield store
        return
    with waiting_for_store(run, path), run.open_labels(path) as store:
        yield store


def store_of(run_folder: Path, config: RoundConfig) -> str:
    """Returns the path or URL of the label store."""
    return config.store or str(run_folder / "labels.sqlite")


def added_by(run_folder: Path, number: int) -> AddedTasks:
    """Returns the tasks that a round has added."""
    return read_record(run_folder / name_of_round(COLLECT, number) / TASKS, AddedTasks)


def missing_labels(run: StageRun, config: RoundConfig) -> int:
    """Returns how many labels a round still waits for; 0 if it can train."""
    rounds = [added_by(run.run_folder, number) for number in range(1, config.round + 1)]
    with run.open_labels(store_of(run.run_folder, config)) as store:
        return _missing(store, config, rounds)


def _missing(store: Labels, config: RoundConfig, rounds: Sequence[AddedTasks]) -> int:
    covered = _covered(store, config, rounds)
    num_asked = sum(one.num_labelers for one in covered)  # as leads have changed it; archived tasks ask for nothing
    wanted = max(1, math.ceil(config.enough_share * min(config.labels, num_asked)))
    return max(0, wanted - sum(len(one.judged_by) for one in covered))


def _by_batch(rounds: Sequence[AddedTasks]) -> list[tuple[str, set[str]]]:
    """Returns the loop's own tasks by batch, in order of the rounds; people's batch has tasks of all rounds."""
    found: dict[str, set[str]] = {}
    for added in rounds:
        found.setdefault(added.batch, set()).update(task.task_id for task in added.tasks)
    return list(found.items())


def _rankings(store: Labels, batch: str, task_ids: set[str]) -> list[Ranking]:
    return [ranking for ranking in store.rankings(batch) if ranking.task_id in task_ids]


def _covered(store: Labels, config: RoundConfig, rounds: Sequence[AddedTasks]) -> list[Coverage]:
    """Returns who has judged the loop's own tasks. Raises: ValueError if the store lacks some of them."""
    found = list[Coverage]()
    for batch, ids in _by_batch(rounds):
        own = [one for one in store.coverage(batch) if one.task_id in ids]
        lost = ids - {one.task_id for one in own}
        if lost:
            raise ValueError(
                f"loop.store: {config.store or 'labels.sqlite'} lacks {len(lost)} tasks of batch {batch!r} that the"
                " loop has added; the store that has them was expected"
            )
        found += own
    return found


# ---- tasks ----


def _add_tasks(run: StageRun, config: RoundConfig, prompts: Sequence[Prompt], earlier: Sequence[AddedTasks]) -> None:
    """Sample, choose and add the round's tasks, and write tasks.json. Safe to call again after a kill."""
    num_asked = sum(task.num_labelers for added in earlier for task in added.tasks)
    num_tasks = config.num_tasks(max(0, config.asked - num_asked))
    fingerprint = json.loads((run.folder / "inputs.json").read_text(encoding="utf-8"))["fingerprint"][:12]
    # People see all rounds as one batch; the world's labelers are dealt each round's tasks on their own.
    batch = run.run_folder.resolve().name if config.store else fingerprint
    tasks, policy, chosen = list[Task](), "", list[Prompt]()
    if num_tasks:
        policy = run.own("sft")
        chosen = _least_asked(prompts, earlier, config.num_prompts(num_tasks), run.seed)
        candidates = _candidates(run, config, policy, chosen)
        # The ids seed the world's labelers, so they depend on contents and not on the run's name. People's store may
        # hold the same contents for several runs.
        contents = json_hash([[of.prompt_id, [one.response for one in of.candidates]] for of in candidates])[:12]
        tasks = choose_tasks(
            candidates,
            batch=f"{batch}/{run.name}/{fingerprint}" if config.store else f"{run.name}/{contents}",
            rule=RULES[config.choose],
            responses_per_task=config.responses_per_prompt,
            tasks_per_prompt=1,
            evaluation_share=config.evaluation_share,
            seed=run.seed,
            num_tasks=num_tasks,
        )
    quotas = config.quotas(len(tasks))
    if tasks:
        with _opened_store(run, config) as store:
            if not config.store:
                tasks = _with_new_ids(store, tasks, batch)
            store.add_tasks(tasks, batch=batch, num_labelers=quotas)
    ids = {tuple(Message.of(message) for message in prompt.messages): prompt.prompt_id for prompt in chosen}
    added = tuple(
        AddedTask(task.task_id, ids[task.prompt], quota, 1 / (task.details["propensity"] * task.details["num_sets"]))
        for task, quota in zip(tasks, quotas, strict=True)
    )
    write_json(run.folder / TASKS, as_json(AddedTasks(batch, added, len(chosen), policy)))


def _with_new_ids(store: Labels, tasks: Sequence[Task], batch: str) -> list[Task]:
    """Returns the tasks, with the batch added to each id that another batch has, such as this stage's earlier one."""
    others = [other for other in store.batches() if other != batch]
    taken = {stored.task.task_id for other in others for stored in store.tasks(other)}
    return [replace(task, task_id=f"{task.task_id}/{batch}") if task.task_id in taken else task for task in tasks]


def _least_asked(prompts: Sequence[Prompt], earlier: Sequence[AddedTasks], num_prompts: int, seed: int) -> list[Prompt]:
    """Returns the prompts with the fewest tasks so far, ties in random order."""
    times = Counter(task.prompt_id for added in earlier for task in added.tasks)
    order = sorted(prompts, key=lambda one: (times[one.prompt_id], derive_seed(seed, "prompts", one.prompt_id)))
    return order[:num_prompts]


def _candidates(run: StageRun, config: RoundConfig, policy: str, prompts: Sequence[Prompt]) -> list[PromptCandidates]:
    """Sample the newest policy on the prompts, and score the samples by the reward models that the rule reads."""
    sampled: dict[str, list[str]] = {prompt.prompt_id: [] for prompt in prompts}
    spec = SamplingSpec(
        policy=run.start("sft"),
        num_samples=config.num_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=derive_seed(run.seed, "collect", policy),
        precision=run.engine.resolved_precision(),
    )
    for sample in sample_everywhere(run, policy, spec, prompts):
        sampled[sample.prompt_id].append(sample.response)
    models = [run.run_folder / name / "model" for name in config.models]
    scores = _scores(run, models, prompts, sampled) if models else scores_of((), {}, prompts, sampled)
    sources = {name: [(text, policy) for text in texts] for name, texts in sampled.items()}
    return candidates_of(prompts, sources, scores)


def _scores(
    run: StageRun, models: Sequence[Path], prompts: Sequence[Prompt], texts: dict[str, list[str]]
) -> dict[str, list[tuple[float, ...]]]:
    """Returns the models' scores of each prompt's texts; each worker scores a part of the prompts."""
    ppo, workers = run.job.section(PPO), run.workers()
    weights = {} if ppo is None else dict(ppo.reward.objective_weights)
    bounds = [len(prompts) * rank // workers.num_workers for rank in range(workers.num_workers + 1)]
    parts = [prompts[start:end] for start, end in pairwise(bounds)]
    shares = [(models, weights, part, {prompt.prompt_id: texts[prompt.prompt_id] for prompt in part}) for part in parts]
    run.enter("scoring")
    return {
        name: own for part in workers.run_split(f"{run.name}: scores", scores_of, shares) for name, own in part.items()
    }


# ---- labels ----


def _let_world_label(run: StageRun, store: Labels, added: AddedTasks) -> None:
    if not added.tasks:
        return
    let_world_label(
        store, run.world, batch=added.batch, seed=run.job.seed,  # the same labelers in each round
        on_progress=lambda state: run.show(state.num_tasks - state.num_open, state.num_tasks, "labeled"),
    )  # fmt: skip


def require_labels(run: StageRun, store: Labels, config: RoundConfig, rounds: Sequence[AddedTasks]) -> None:
    """Raises: LabelsWaitError while people have not given enough labels."""
    if _missing(store, config, rounds):
        most = max(one.num_labelers for one in _covered(store, config, rounds))
        people = f", and some tasks need answers from {most} people" if most > 1 else ""
        raise LabelsWaitError(
            f"{run.name} waits for labels of batch {rounds[-1].batch!r} in {config.store}; people give them where `heed"
            f" label serve --store {config.store}` says{people}",
            partial(missing_labels, run, config),
        )


def _results(
    run: StageRun,
    config: RoundConfig,
    rounds: Sequence[AddedTasks],
    rankings: Sequence[Ranking],
    num_open: int,
    overlong: Overlong | None,
    sources: tuple[SourceRows, ...],
) -> RoundResults:
    added, num_before = rounds[-1], 0
    if config.round > 1:
        before = run.run_folder / name_of_round(COLLECT, config.round - 1)
        num_before = read_record(before / "results.json", RoundResults).num_labels
    return RoundResults(
        round=config.round,
        rule=config.choose,
        models=config.models,
        policy=added.policy,
        num_prompts=added.num_prompts,
        num_tasks=len(added.tasks),
        effective_tasks=effective_number([task.weight for task in added.tasks]),
        num_asked=sum(task.num_labelers for of in rounds for task in of.tasks),
        num_labels=len(rankings),
        num_new_labels=len(rankings) - num_before,
        num_open_tasks=num_open,
        agreement=pairwise_agreement(rankings),
        gold_accuracy=_gold_accuracy(rankings, run.opened_world),
        labelers=tuple(sorted({ranking.labeler for ranking in rankings})),
        overlong=overlong,
        sources=sources,
    )


def effective_number(weights: Sequence[float]) -> float:
    """Returns (Σw)²/Σw² (Kish 1965, "Survey Sampling", 11.7); NaN for no weights."""
    values = np.asarray(weights, dtype=np.float64)
    return float(values.sum() ** 2 / (values**2).sum()) if len(values) else math.nan


def _gold_accuracy(rankings: Sequence[Ranking], world: World | None) -> Share | None:
    return None if world is None else accuracy_against(rankings, label_truth(rankings, world))


# ---- before a run ----


def preflight(run: StageRun, config: RoundConfig) -> None:
    """Check that there are enough prompts, that each leaves room for its responses, and that labels can be stored."""
    if config.store:
        # Before the first tasks are sent, the address may be wrong. Later, an unavailable store comes back.
        has_begun = config.round > 1 or (run.folder / TASKS).is_file()
        with waiting_for_store(run, config.store) if has_begun else nullcontext():
            _require_store(run.open_labels, config.store)
    else:
        require_locks(run.run_folder)
    tokenizer = run.tokenizer_of("sft")
    fitting = fitting_prompts(
        run,
        tokenizer,
        config.prompts,
        config.max_new_tokens,
        config.on_overlong,
        run.tell if config.round == 1 else untold,
    )
    num_tasks = config.num_tasks(config.asked - config.asked_before)
    if len(fitting.prompts) < num_tasks:
        raise ValueError(
            f"loop.labels: round {config.round} asks for {num_tasks:,} tasks, but collect.prompts has"
            f" {len(fitting.prompts):,} prompts; as many as tasks, or fewer labels per round, were expected"
        )


def plan(planner: Planner, config: RoundConfig) -> Sampling:
    num_prompts = min(
        planner.sizes.num_rows(config.prompts), config.num_prompts(config.num_tasks(config.asked - config.asked_before))
    )
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: run.tokenizer_of("sft")
    )
    num_samples = config.num_samples
    return Sampling(planner.model, num_prompts, num_samples, config.max_new_tokens, lengths, num_samples)
