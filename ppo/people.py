"""People as spot checkers of the alarm: on the label page, they compare the policy's responses with the initial ones.

**What is tested.** A task shows a labeler, blindly, the response that an iteration's policy gave to a prompt and one
that the initial policy gave to it. The verdict is 1 if the policy's is better, -1 if the initial one's is, 0 for a tie,
and v_i is the mean verdict of the tasks that iteration i sent, which may have anything in common. The hypothesis: given
all earlier iterations and their verdicts, the expectation of v_i is at least 0. No prompt is compared twice in a run.

**How.** For a bet b, the stake S = Π (1 - b v_i) over the iterations from k on is a nonnegative supermartingale under
the hypothesis, since b is a constant and how many tasks are sent depends on earlier verdicts alone. So is its mean over
bets and beginnings k, and it ever reaches 1/α with probability at most α (Ville).

**Answers come late, or never.** PPO does not wait for them. Which answers are still missing may depend on what they
will be: clear defeats may be answered first. Stakes are therefore multiplied in the order in which tasks were *sent*,
and a missing verdict counts as 1, the least it can add to the evidence. The stake of the first n iterations, as far as
it is known, is then at most their stake with all verdicts. So the largest over all n stays within the bound, whatever
decides who answers what and when.

Shape letters: N tasks in the order sent, I iterations with tasks, K iterations in which a fall may begin, L bets.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from files.hashes import derive_seed, json_hash
from lm.tokenizer import Messages, Tokenizer
from ppo.alarm import ACTIONS, NUM_BEGINNINGS, Evidence, Rang
from ppo.config import AlarmConfig, PeopleSource
from ppo.prompts import Mixture
from ppo.rollout import Rollout
from preferences.rankings import current_judgments
from preferences.records import Message, Task
from stages.world import Labels, OpenLabels
from training.data import Prompt
from training.notices import say
from training.packing import Sampler

Floats = NDArray[np.float64]

PEOPLE_CHECKS = "people_checks.jsonl"
BETS = (0.4, 0.95)  # shares of the stake
LEAST_SHARE = 0.25  # of `checks_per_iteration`, sent while nothing speaks against the policy
MOST_OPEN = 2  # unanswered tasks, as a multiple of `checks_per_iteration`
POLICY, INITIAL = "policy", "initial policy"  # the sources of a task's responses, which labelers do not see
ROLES = ("system", "user", "assistant")  # of a prompt that the label page shows


@dataclass(frozen=True)
class Comparison:
    """A task that was sent, or two equal texts, which nobody needs to compare (`task_id` is "")."""

    task_id: str
    prompt_id: str
    messages: Messages
    response: str
    initial: str


@dataclass(frozen=True)
class Iteration:
    """One line of people_checks.jsonl: what an iteration sent, and the verdicts that had come when it did, by task."""

    iteration: int  # counted from 0
    policy: int  # how many iterations had trained the policy that sampled
    sent: tuple[Comparison, ...]
    read: Mapping[str, int] = field(default_factory=dict)


class PeopleChecks:
    """Sends comparisons to a label store and reads the verdicts of those sent earlier. PPO never waits for them.

    people_checks.jsonl is written before tasks are sent. A resumed run repeats what it says about the iterations that
    it runs again, so it sends no other tasks, and knows no verdict earlier than before.
    """

    def __init__(
        self,
        config: AlarmConfig,
        open_labels: OpenLabels,
        folder: Path,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        order: Sampler | Mixture,
        *,
        num_iterations: int,
        seed: int,
        resume_step: int,
    ) -> None:
        """`order` says which prompts each iteration samples.

        Raises: ValueError for a prompt that the label page cannot show, and for a run of one iteration.
        """
        assert isinstance(config.source, PeopleSource)
        self.config, self.source, self._open_labels = config, config.source, open_labels
        self.prompts, self.tokenizer, self.seed, self.num_iterations = prompts, tokenizer, seed, num_iterations
        self.rang: Rang | None = None  # the first alarm
        self.plan = planned_rows(order, num_iterations, config, seed)
        if not any(self.plan.values()):
            raise ValueError("ppo.alarm: the only iteration samples from the initial policy; several were expected")
        for row in itertools.chain(*self.plan.values()):
            self._require_shown(prompts[row])
        self._log = _Log(folder / PEOPLE_CHECKS)
        self._known = {int(line["iteration"]): _as_iteration(line) for line in self._log.lines if "sent" in line}
        self._initial: dict[int, str] = {}
        for line in self._log.lines:
            if "initial" in line:
                self._initial = {int(row): text for row, text in line["initial"].items()}
        self._done: list[Iteration] = []
        self._stored: set[str] = set()
        for iteration in sorted(self._known):
            if iteration < resume_step:
                self._done.append(self._known[iteration])
                self._listen(says=False)

    def initial_rows(self, rows_multiple: int) -> list[int]:
        """Returns the rows of the prompts whose initial responses are needed. Some may occur twice, so that their
        number is a multiple of `rows_multiple`.
        """
        rows = [*itertools.chain(*self.plan.values())]
        return [int(row) for row in np.resize(rows, -(-len(rows) // rows_multiple) * rows_multiple)]

    def add(self, rollout: Rollout, _scores_B: Sequence[float], *, iteration: int, policy: int) -> dict[str, float]:
        """Send comparisons of a rollout's responses, and read verdicts. Returns the metrics.

        The first call has the initial policy's responses, which are kept. `policy` is how many iterations had trained
        the policy that sampled.
        """
        if not policy:
            if not self._initial:
                self._initial = self._responses(rollout)
                self._log.write({"initial": {str(row): text for row, text in self._initial.items()}})
            return {"alarm_nats": 0.0, "spot_checks": 0.0, "open_spot_checks": 0.0}
        current = self._known.get(iteration)
        if current is None:
            read = self._answers()
            open_tasks = [one for one in self._open() if one.task_id not in read]
            nats = self._nats_so_far(read)
            number = number_to_send(self.config.checks_per_iteration, nats, self.aim, len(open_tasks))
            current = Iteration(iteration, policy, self._chosen(rollout, iteration, number), read)
            self._log.write(asdict(current))
            self._known[iteration] = current
        self._done.append(current)
        self._send()
        evidence = self._listen()
        verdicts = [verdict for one in self._done for verdict in one.read.values()]
        new = [(verdict + 1) / 2 for verdict in current.read.values()]
        return {
            **({"spot_check": float(np.mean(new))} if new else {}),
            "alarm_nats": evidence.nats,
            "spot_checks": float(len(verdicts)),
            "open_spot_checks": float(len(self._open())),
        }

    @property
    def aim(self) -> float:
        """The evidence that rings the alarm, in nats."""
        return -math.log(self.config.false_alarms)

    def evidence(self) -> Evidence:
        """Compute the evidence from all verdicts so far."""
        return evidence_of_verdicts(*self._verdicts({}), self.num_iterations)

    def close(self) -> None:
        self._log.close()

    def _verdicts(self, more: Mapping[str, int]) -> tuple[Floats, NDArray[np.int64]]:
        """Returns the verdict (NaN = none yet) of each comparison in the order sent, and the policy's number."""
        known = {task: verdict for one in self._done for task, verdict in one.read.items()} | dict(more)
        sent = [(comparison, one.policy) for one in self._done for comparison in one.sent]
        verdicts = [known.get(one.task_id, math.nan) if one.task_id else 0.0 for one, _ in sent]
        return np.array(verdicts, dtype=np.float64), np.array([policy for _, policy in sent], dtype=np.int64)

    def _nats_so_far(self, read: Mapping[str, int]) -> float:
        """Returns the evidence of the verdicts alone: it decides how many tasks are sent, and rings no alarm."""
        verdict_N, policy_N = self._verdicts(read)
        has_come_N = ~np.isnan(verdict_N)
        stakes_I = _log_stakes(verdict_N[has_come_N], policy_N[has_come_N], self.num_iterations)[0]
        return float(stakes_I[-1]) if len(stakes_I) else 0.0

    def _open(self) -> list[Comparison]:
        answered = {task for one in self._done for task in one.read}
        sent = [comparison for one in self._done for comparison in one.sent]
        return [one for one in sent if one.task_id and one.task_id not in answered]

    def _responses(self, rollout: Rollout) -> dict[int, str]:
        texts: dict[int, str] = {}
        for row in range(len(rollout)):
            text = self.tokenizer.decode(rollout.turns(row)[-1][1]).strip()
            texts.setdefault(int(rollout.prompt_rows_B[row]), text)
        return texts

    def _chosen(self, rollout: Rollout, iteration: int, number: int) -> tuple[Comparison, ...]:
        texts = self._responses(rollout)
        rows = [row for row in self.plan.get(iteration, ()) if row in texts and row in self._initial]
        return tuple(self._comparison(row, iteration, texts[row]) for row in rows[:number])

    def _comparison(self, row: int, iteration: int, response: str) -> Comparison:
        prompt, initial = self.prompts[row], self._initial[row]
        messages = [dict(message) for message in prompt.messages]
        named = (self.source.batch, self.seed, iteration, prompt.prompt_id, messages, response, initial)
        task_id = f"alarm/{json_hash(*named)[:20]}"
        return Comparison("" if response == initial else task_id, prompt.prompt_id, messages, response, initial)

    def _require_shown(self, prompt: Prompt) -> None:
        odd = next((turn["role"] for turn in prompt.messages if turn["role"] not in ROLES), None)
        if odd is not None:
            raise ValueError(
                f"ppo.alarm.source: prompt {prompt.prompt_id!r} has a turn of the role {odd!r}, which the label page"
                f" does not show; {', '.join(ROLES)} were expected"
            )

    def _listen(self, *, says: bool = True) -> Evidence:
        evidence = self.evidence()
        if self.rang is None and evidence.rings(self.config.false_alarms):
            number = sum(len(one.read) for one in self._done)
            self.rang = Rang(self._done[-1].policy, evidence.fall, number, evidence.nats, by_people=True)
            if says:
                say(
                    f"ppo: alarm: {number} comparisons by people in batch {self.source.batch!r} show that the policy is"
                    f" worse than the initial one, most likely since iteration {evidence.fall} ({evidence.nats:.1f}"
                    f" nats of evidence; at most {self.config.false_alarms:.0%} of runs whose policy does not lose"
                    f" ever reach {self.aim:.1f}). {ACTIONS[self.config.action]}"
                )
        return evidence

    # The label store. A store that is locked or away must not stop training: the next iteration tries again.

    def _send(self) -> None:
        tasks = []
        for one in self._open():
            if one.task_id not in self._stored:
                responses, sources = _in_order(one)
                prompt = tuple(Message.of(turn) for turn in one.messages)
                tasks.append(Task(one.task_id, prompt, responses, sources, details={"from": "ppo.alarm"}))
        if tasks and self._with_store(lambda store: store.add_tasks(tasks, batch=self.source.batch, num_labelers=1)):
            self._stored |= {task.task_id for task in tasks}

    def _answers(self) -> dict[str, int]:
        """Returns the verdicts that have come on tasks that were open."""
        waiting = {one.task_id: one for one in self._open()}
        found: dict[str, int] = {}

        def read(store: Labels) -> None:
            for judgment in current_judgments(store.judgments(self.source.batch, with_names=False)).final:
                if (one := waiting.get(judgment.task_id)) is not None:
                    ranks = dict(zip(_in_order(one)[1], judgment.ranks, strict=True))
                    found[one.task_id] = int(np.sign(ranks[INITIAL] - ranks[POLICY]))  # rank 1 is best

        if waiting:
            self._with_store(read)
        return found

    def _with_store(self, act: Callable[[Labels], None]) -> bool:
        """Returns whether the store could be used. An error in `act` that is not the database's is raised."""
        from sqlalchemy.exc import SQLAlchemyError  # which a bare GPU machine lacks

        with ExitStack() as closing:
            try:
                store = closing.enter_context(self._opened())
            except (OSError, ValueError) as error:
                say(f"ppo.alarm: {error}. The next iteration tries again")
                return False
            try:
                act(store)
            except SQLAlchemyError as error:
                cause = getattr(error, "orig", None) or error
                say(f"ppo.alarm: label store {self.source.store!r}: {cause}. The next iteration tries again")
                return False
        return True

    def _opened(self) -> Labels:
        """Opens the store. Raises: ValueError or OSError if it is locked or away; a missing file is not created."""
        from preferences.database import store_file

        file = store_file(self.source.store)
        if file is not None and not file.is_file():
            raise ValueError(f"label store {str(file)!r}: there is no such file")
        return self._open_labels(self.source.store)


def planned_rows(order: Sampler | Mixture, num_iterations: int, config: AlarmConfig, seed: int) -> dict[int, list[int]]:
    """Returns the rows of the prompts that each iteration may have compared, each row once in the whole run.

    They are spread evenly: every iteration gets its first prompt before any gets its second, up to `initial_checks`.
    """
    drawn = {}
    for iteration in range(1, num_iterations):
        rng = np.random.default_rng(derive_seed(seed, "ppo", "alarm", iteration))
        drawn[iteration] = iter(rng.permutation(np.unique(np.asarray(order.batch(iteration)))).tolist())
    plan: dict[int, list[int]] = {iteration: [] for iteration in drawn}
    used: set[int] = set()
    for _ in range(config.checks_per_iteration):
        for iteration, rows in drawn.items():
            row = next((row for row in rows if row not in used), None)
            if row is not None and len(used) < config.initial_checks:
                used.add(row)
                plan[iteration].append(row)
    return plan


def number_to_send(most: int, nats: float, aim: float, num_open: int) -> int:
    """Returns how many comparisons an iteration sends: more, the nearer the evidence is to an alarm; none while people
    are far behind. It depends only on what was known before, as the bound requires.
    """
    near = min(max(nats / aim, 0.0), 1.0)
    wanted = math.ceil(most * (LEAST_SHARE + (1 - LEAST_SHARE) * near))
    return max(0, min(wanted, MOST_OPEN * most - num_open))


def evidence_of_verdicts(verdict_N: Floats, policy_N: NDArray[np.int64], num_iterations: int) -> Evidence:
    """Returns the evidence that the policy loses against the initial one. Verdicts are -1, 0 or 1; NaN = none yet.

    It is the largest that the first n iterations give, for any n, since the bound holds for all of them at once.
    """
    stakes_I, stakes_IK, begins_K = _log_stakes(np.nan_to_num(verdict_N, nan=1.0), policy_N, num_iterations)
    if not len(stakes_I) or stakes_I.max() <= 0:
        return Evidence(0.0, 0)
    best = int(stakes_I.argmax())
    return Evidence(float(stakes_I[best]), int(begins_K[stakes_IK[best].argmax()]))


def _log_stakes(
    verdict_N: Floats, policy_N: NDArray[np.int64], num_iterations: int
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Returns the logarithm of the mean stake after each iteration, of that of each beginning of a fall, and those."""
    begins_K = np.array(sorted({1 + place * num_iterations // NUM_BEGINNINGS for place in range(NUM_BEGINNINGS)}))
    policy_I, place_N, count_I = np.unique(policy_N, return_inverse=True, return_counts=True)
    mean_I = np.bincount(place_N, verdict_N, len(policy_I)) / count_I
    counts_IK = policy_I[:, None] >= begins_K
    gain_IKL = np.log1p(-np.array(BETS) * mean_I[:, None])[:, None, :] * counts_IK[..., None]
    stakes_IK = np.logaddexp.reduce(gain_IKL.cumsum(axis=0), axis=2) - math.log(len(BETS))
    return np.logaddexp.reduce(stakes_IK, axis=1) - math.log(len(begins_K)), stakes_IK, begins_K


def _in_order(one: Comparison) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns both responses and who wrote them, in an order that carries no information."""
    if json_hash(one.task_id, one.response) <= json_hash(one.task_id, one.initial):
        return (one.response, one.initial), (POLICY, INITIAL)
    return (one.initial, one.response), (INITIAL, POLICY)


def _as_iteration(line: Mapping[str, Any]) -> Iteration:
    return Iteration(**{**line, "sent": tuple(Comparison(**one) for one in line["sent"])})


class _Log:
    """An append-only JSONL file whose lines are on disk once they are written. A torn last line is removed."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
