"""Measures what an iteration of PPO costs the driver with more and more ranks.

    python -m benchmarks.driver_calls [RANKS ...]

The controller is the real one, but the handles of ranks are fake: they pickle each rank's arguments as Ray does,
unpickle them, count the bytes, and answer with pickled zeros in the right shapes. An iteration has 1,024 prompts of
1,024 tokens with responses of 1,024 tokens, and one epoch of minibatches of 256 (of 512 for 512 ranks). The seconds are
CPU seconds of this process, without the work that the ranks would do.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray.cloudpickle as cloudpickle
import torch

from benchmarks.speed.own import ppo_config
from cluster.remote import Call, Handle, Pending
from lm.samplers.draws import Draws, evidence
from ppo.controller import PPOController
from ppo.generator import Generators
from ppo.learner import Learners
from ppo.rank import ScoreScale
from ppo.roles import Roles, WeightTransport
from ppo.rollout import Asked, Rollout
from ppo.scorer import Scorers
from training.config import BatchConfig

NUM_RESPONSES, NUM_TOKENS = 1024, 1024  # tokens per prompt and per response
RANKS = (1, 8, 64, 512)
METRICS = {"ratio_error": 0.0, "policy_loss": 0.0}
NO_TOKENS = Draws(*(torch.zeros(0, *shape, dtype=torch.int64) for shape in [()] * 4 + [(1,), ()]))
EVIDENCE = evidence(torch.zeros(0, 2), NO_TOKENS, 1.0, (1,))  # on no tokens, but with every bet

Given = TypeVar("Given")


class FakeRanks(Handle[Any]):
    """Ranks that compute nothing. They count the bytes that they receive and the seconds that they take to answer."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.num_calls, self.num_bytes, self.answer_seconds = num_ranks, 0, 0, 0.0

    def _send(self, arguments: object) -> Any:
        buffers = list[Any]()
        sent = cloudpickle.dumps(arguments, protocol=5, buffer_callback=buffers.append)
        self.num_calls += 1
        self.num_bytes += len(sent) + sum(buffer.raw().nbytes for buffer in buffers)
        started = time.process_time()
        received = cloudpickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers])
        self.answer_seconds += time.process_time() - started
        return received

    def _start(self, method: Callable[..., Any], arguments: Sequence[Call]) -> Pending[list[Any]]:
        distinct = {id(call): call for call in arguments}  # the same arguments for all ranks are sent once
        received = {key: self._send(call) for key, call in distinct.items()}
        started = time.process_time()
        answers = [cloudpickle.dumps(answer(method.__name__, received[id(call)][0]), protocol=5) for call in arguments]
        self.answer_seconds += time.process_time() - started
        return lambda: [cloudpickle.loads(sent) for sent in answers]

    def pass_on(
        self,
        give: Callable[[Any], Iterator[Given]],  # noqa: ARG002 - nothing is sent
        to: Handle[Any],  # noqa: ARG002
        take: Callable[[Any, Iterable[Given]], object],  # noqa: ARG002
    ) -> Pending[object]:
        return lambda: None

    def close(self) -> None:
        pass


def answer(name: str, args: tuple[Any, ...]) -> Any:
    """Returns what a rank returns, as if every probability were 1. Responses are as long as prompts."""
    match name:
        case "generate":
            rows, prompts, *_ = args
            number, length = len(prompts), len(prompts[0])
            responses, ends, logprobs = [[1] * length] * number, [True] * number, [[0.0] * length] * number
            return Rollout.of(rows, prompts, responses, ends, logprobs, max_new_tokens=length, pad_id=0)
        case "scores":
            return args[0].prompt_rows_B[:, None].float()
        case "policy_logprobs" | "reference_logprobs" | "values":
            return torch.zeros(len(args[0]), args[0].max_new_tokens)
        case "update_policy" | "update_value":
            return METRICS
        case "sent_digests":
            return {}
        case "take_evidence":
            return EVIDENCE
    raise AssertionError(f"{name} is not a call of an iteration")


class NoTransport(WeightTransport):
    def advance_and_send(self) -> Pending[object]:
        return lambda: None

    def send(self) -> Pending[object]:
        return lambda: None


@dataclass(frozen=True)
class Cost:
    num_calls: int
    megabytes: float
    seconds: float
    answer_seconds: float


def controller_on(
    num_ranks: int, num_responses: int = NUM_RESPONSES, num_tokens: int = NUM_TOKENS
) -> tuple[PPOController, FakeRanks]:
    """Returns the controller of a job on ranks that compute nothing."""
    minibatch = BatchConfig(batch_size=max(num_responses // 4, num_ranks), micro_batch_size=1)
    config = ppo_config(2, num_responses, minibatch, num_tokens)
    ranks = FakeRanks(num_ranks)
    scorers = Scorers(ranks, Asked(), config.minibatch, ranks)
    roles = Roles(config, Learners(ranks, config.minibatch), Generators(ranks), scorers, NoTransport())
    prompts = [[row % 1000] * num_tokens for row in range(2 * num_responses)]
    return PPOController(config, roles, prompts, ScoreScale(0.0, 1.0), num_pretraining_rows=0, seed=1), ranks


def measure(num_ranks: int) -> Cost:
    """Returns the cost of the second iteration; the first one also does one-time work."""
    controller, ranks = controller_on(num_ranks)
    controller.step(0)
    ranks.num_calls, ranks.num_bytes, ranks.answer_seconds = 0, 0, 0.0
    started = time.process_time()
    controller.step(1)
    seconds = time.process_time() - started
    return Cost(ranks.num_calls, ranks.num_bytes / 1e6, seconds - ranks.answer_seconds, ranks.answer_seconds)


def main() -> None:
    print("| ranks | calls | MB sent | CPU s of the driver |\n|---|---|---|---|")
    for num_ranks in [int(word) for word in sys.argv[1:]] or RANKS:
        cost = measure(num_ranks)
        print(f"| {num_ranks} | {cost.num_calls:,} | {cost.megabytes:.0f} | {cost.seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
