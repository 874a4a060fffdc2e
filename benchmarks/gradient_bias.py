"""Computes how far each policy-gradient estimator's mean gradient is from the exact one, by enumeration.

A toy policy writes two tokens from a vocabulary of three, so it has nine responses (seven if a token ends them). So
both the exact gradient of (mean reward - β · KL) and the mean of an estimator's gradient over all groups of two
responses are finite sums. In the game of two turns, an environment's reply is between the two tokens. The estimators
are those of `ppo`, called as the controller calls them.
`python -m benchmarks.gradient_bias` rewrites the table in docs/algorithms.md. tests/benchmarks/test_gradient_bias.py
checks the table and what it claims.

Shape letters: B responses, R response tokens, S states, V tokens.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.guessing_game import Game
from lm.tool_calls import AssistantMessage
from ppo.algorithm import (
    GAE,
    CutImportance,
    DropResponses,
    DropTokens,
    GroupMean,
    Importance,
    KLConfig,
    LeaveOneOut,
    NoBaseline,
    ResponseLoss,
    importance_weights,
    policy_loss,
    response_kl_loss,
    teacher_terms,
    token_rewards,
    token_weights,
)
from ppo.config import PPOConfig
from training.config import BatchConfig, Config, OptimizerConfig
from training.data import DataConfig

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- written by python -m benchmarks.gradient_bias -->\n", "<!-- end -->\n"
VOCABULARY, LENGTH, KL_COEF = 3, 2, 0.3
VALUES = GAE(value_optimizer=OptimizerConfig(learning_rate=1.0), scale="none")
OTHERS = LeaveOneOut(samples_per_prompt=2, scale="none")


@dataclass(frozen=True)
class Toy:
    """Logits [S, V] of the policy, of the reference, and of an older policy. The first state is the start of the
    response; each other state follows one of its possible first tokens (in the game, the reply to it). With `has_end`,
    a first token 0 ends the response.
    """

    has_end: bool
    logits_SV: Tensor
    ref_logits_SV: Tensor
    old_logits_SV: Tensor
    tokens_BR: Tensor  # all responses
    states_BR: Tensor  # the state in which the policy writes each token
    mask_BR: Tensor  # True = a token of the policy
    scores_B: Tensor
    turn_rewards_BR: Tensor  # of an environment
    chances_B: Tensor  # the probability that the environment is the one that this response meets

    @classmethod
    def draw(cls, *, has_end: bool) -> "Toy":
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tokens_BR = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
        scores_B, logits = normal(len(tokens_BR)), [normal(1 + VOCABULARY, VOCABULARY) for _ in range(3)]
        mask_BR = torch.ones_like(tokens_BR, dtype=torch.bool)
        if has_end:
            is_short_B = tokens_BR[:, 0] == 0
            mask_BR[is_short_B, 1] = False
            kept = ~is_short_B | (tokens_BR[:, 1] == 0)
            tokens_BR, mask_BR, scores_B = tokens_BR[kept], mask_BR[kept], scores_B[kept]
        policy, ref, noise = logits
        old, states_BR = policy + 0.5 * noise, F.pad(1 + tokens_BR[:, :1], (1, 0))
        rewards_BR, ones_B = torch.zeros_like(mask_BR, dtype=torch.float64), torch.ones_like(scores_B)
        return cls(
            has_end, policy.requires_grad_(), ref, old, tokens_BR, states_BR, mask_BR, scores_B, rewards_BR, ones_B
        )

    @classmethod
    def game(cls) -> "Toy":
        """The guessing game with three numbers, each with the same chance. Token v says the number v + 1; a reply
        is token 3 (lower) or 4 (higher), and each pair of a wrong guess and its reply is a state.
        """
        games = list[Played]()
        for number in range(VOCABULARY):
            found = [_played(number, *guesses) for guesses in _GUESSES]  # the same, whatever follows a right guess
            games += [game for place, game in enumerate(found) if game not in found[:place]]
        replies = sorted({tuple(game.tokens[:2]) for game in games if game.tokens[1] >= VOCABULARY})
        states = [[0, 0, 1 + replies.index(tuple(game.tokens[:2])) if game.mask[2] else 0] for game in games]
        generator = torch.Generator().manual_seed(4)
        shape = 1 + len(replies), VOCABULARY
        policy, ref, old = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3))
        return cls(
            True,
            policy.requires_grad_(),
            ref,
            old,
            torch.tensor([game.tokens for game in games]),
            torch.tensor(states),
            torch.tensor([game.mask for game in games]),
            torch.zeros(len(games), dtype=torch.float64),
            torch.tensor([game.rewards for game in games], dtype=torch.float64),
            torch.full((len(games),), 1 / VOCABULARY, dtype=torch.float64),
        )

    @property
    def returns_B(self) -> Tensor:
        return self.scores_B + self.turn_rewards_BR.sum(dim=1)

    def logprobs(self, logits_SV: Tensor, rows: Tensor) -> Tensor:
        """Returns log π of the responses' tokens [B, R]; 0 where there is no token."""
        mask_BR = self.mask_BR[rows]
        logprobs_BR = logits_SV.log_softmax(-1)[self.states_BR[rows], torch.where(mask_BR, self.tokens_BR[rows], 0)]
        return torch.where(mask_BR, logprobs_BR, 0.0)

    def exact_gradient(self, score_coef: float, kl_coef: float) -> Tensor:
        """Returns ∇ Σ π(y) (score_coef · score(y) - kl_coef · log π(y)/π_ref(y))."""
        everything = torch.arange(len(self.tokens_BR))
        logprob_B = self.logprobs(self.logits_SV, everything).sum(dim=1)
        log_ratio_B = logprob_B - self.logprobs(self.ref_logits_SV, everything).sum(dim=1)
        chance_B = self.chances_B * logprob_B.exp()
        value = (chance_B * (score_coef * self.returns_B - kl_coef * log_ratio_B)).sum()
        return torch.autograd.grad(value, self.logits_SV)[0]

    def values(self, kl_coef: float) -> Tensor:
        """Returns the exact value before each token of each response [B, R]: the mean of the rewards still to come."""
        everything = torch.arange(len(self.tokens_BR))
        logprobs_BR = self.logprobs(self.logits_SV, everything).detach()
        ref_BR = self.logprobs(self.ref_logits_SV, everything)
        rewards_BR, _ = token_rewards(self.scores_B, logprobs_BR, ref_BR, self.mask_BR, kl_coef, self.turn_rewards_BR)
        chance_B, values_BR = self.chances_B * logprobs_BR.sum(dim=1).exp(), torch.zeros_like(rewards_BR)
        for column in range(values_BR.shape[1]):
            to_come_B = rewards_BR[:, column:].sum(dim=1)
            for state in self.states_BR[self.mask_BR[:, column], column].unique():
                same_B = self.mask_BR[:, column] & (self.states_BR[:, column] == state)
                values_BR[same_B, column] = (chance_B * to_come_B)[same_B].sum() / chance_B[same_B].sum()
        return values_BR


@dataclass(frozen=True)
class Played:
    """A game: its two guesses with the reply between them, which of them are guesses, and their rewards."""

    tokens: list[int]
    mask: list[bool]
    rewards: list[float]


_GUESSES = [*itertools.product(range(VOCABULARY), repeat=LENGTH)]


def _played(number: int, *guesses: int) -> Played:
    """Returns the game in which these are the guesses about a number, with the replies of the environment."""
    game, tokens, mask, rewards = Game(number + 1), [0] * 3, [False] * 3, [0.0] * 3
    for column, guess in zip((0, 2), guesses, strict=True):
        text = str(guess + 1)
        reply = asyncio.run(game.reply(AssistantMessage(text, text)))
        tokens[column], mask[column], rewards[column] = guess, True, reply.reward
        if reply.is_over:
            break
        if column == 0:
            tokens[1] = VOCABULARY + ("lower", "higher").index(reply.messages[0]["content"])
    return Played(tokens, mask, rewards)


@dataclass(frozen=True)
class Group:
    """Two responses (rows of the toy's) with log π [B, R], with gradients, of the policy, reference and sampler."""

    toy: Toy
    rows: Tensor
    logprobs_BR: Tensor
    ref_logprobs_BR: Tensor
    behaviour_logprobs_BR: Tensor

    @property
    def mask_BR(self) -> Tensor:
        return self.toy.mask_BR[self.rows]


Loss = Callable[[Group], Tensor]


def mean_gradient(toy: Toy, loss: Loss, *, from_old: bool = False) -> Tensor:
    """Returns the mean of -∇ loss over all groups of two responses, sampled by the policy or the old policy."""
    behaviour_SV = toy.old_logits_SV if from_old else toy.logits_SV.detach()
    total_SV = torch.zeros_like(behaviour_SV)
    for pair in itertools.product(range(len(toy.tokens_BR)), repeat=2):
        rows = torch.tensor(pair)
        behaviour_BR = toy.logprobs(behaviour_SV, rows)
        group = Group(toy, rows, toy.logprobs(toy.logits_SV, rows), toy.logprobs(toy.ref_logits_SV, rows), behaviour_BR)
        (gradient_SV,) = torch.autograd.grad(loss(group), toy.logits_SV)
        total_SV -= float(toy.chances_B[rows].prod() * behaviour_BR.sum().exp()) * gradient_SV
    return total_SV


def config_of(**changes: object) -> PPOConfig:
    """Returns the job settings of an estimator, including those that no estimator depends on."""
    values: dict[str, object] = {
        "prompts": DataConfig(source="none"),
        "num_iterations": 1,
        "rollout_batch_size": 2,
        "minibatch": BatchConfig(batch_size=2, micro_batch_size=2),
        "max_new_tokens": LENGTH,
        "policy_optimizer": OptimizerConfig(learning_rate=1.0),
        "advantage": VALUES,
        "kl": KLConfig(coef=KL_COEF),
    }
    return PPOConfig.model_validate({**values, **changes})


def heeds_loss(config: PPOConfig, *, has_perfect_values: bool = True, corrects: bool = False) -> Loss:
    """Returns the policy's loss, as the controller and the learner compute it from two responses to one prompt. The
    job's teachers, if it has any, all have the reference's log-probs.
    """
    reward_weight, token_weight = (
        sum(teacher.weight for teacher in config.teachers if teacher.kind == kind) for kind in ("reward", "token")
    )

    def loss(group: Group) -> Tensor:
        old_BR, ref_BR, mask_BR, scores_B, turns_BR = (
            group.logprobs_BR.detach(),
            group.ref_logprobs_BR,
            group.mask_BR,
            group.toy.returns_B[group.rows],
            group.toy.turn_rewards_BR[group.rows],
        )
        kl_coef = config.kl.coef if config.kl.kind == "reward" else 0.0
        last_B = config.score_coef * group.toy.scores_B[group.rows]
        own_BR = config.score_coef * turns_BR
        rewards_BR, _ = token_rewards(last_B, old_BR, ref_BR, mask_BR, kl_coef, own_BR)
        values_BR = group.toy.values(kl_coef)[group.rows] * has_perfect_values
        terms = {
            kind: teacher_terms(old_BR, ref_BR[:, None], torch.tensor([own]), mask_BR)
            for kind, own in (("reward", reward_weight), ("token", token_weight))
        }
        found = config.advantage.estimate(scores_B, rewards_BR + terms["reward"], values_BR, mask_BR, terms["token"])
        advantages_BR = found.advantages_BR
        if corrects:
            importance_BR, _ = importance_weights(
                old_BR, group.behaviour_logprobs_BR, mask_BR, config.importance.cap, config.importance.floor,
                config.importance.kind,
            )  # fmt: skip
            advantages_BR = importance_BR * advantages_BR
        weight_BR, num_tokens = token_weights(found.counted_BR, config.loss.token_weight, config.max_new_tokens)
        total, _ = policy_loss(
            group.logprobs_BR, old_BR, advantages_BR, weight_BR, 0.2, by_response=config.loss.is_per_response
        )
        total = total / num_tokens
        if config.kl.kind == "loss":
            kl_weight_BR, num_scored = token_weights(mask_BR, config.loss.token_weight, config.max_new_tokens)
            weight_B = config.kl.coef * kl_weight_BR.amax(dim=1) / num_scored
            total = total + response_kl_loss(group.logprobs_BR, ref_BR.sum(dim=1), weight_B)
        return total

    return loss


def kl_loss(penalty: Callable[[Tensor], Tensor], *, by_response: bool) -> Loss:
    """Returns the mean of a penalty on the log ratio log π/π_ref, per token or per response, over `LENGTH` tokens."""

    def loss(group: Group) -> Tensor:
        log_ratio_BR = group.logprobs_BR - group.ref_logprobs_BR
        if by_response:
            log_ratio_BR = log_ratio_BR.sum(dim=1, keepdim=True)
        return penalty(log_ratio_BR).sum() / len(group.rows) / LENGTH

    return loss


@dataclass(frozen=True)
class Row:
    """An estimator and what is known about its mean gradient: it is `scale` times the exact gradient. 0 means that its
    direction differs.
    """

    name: str
    settings: str
    toy: Toy
    loss: Loss
    scale: float
    known: str
    kl_only: bool = False
    from_old: bool = False

    @cached_property
    def measured(self) -> tuple[float, float]:
        """Returns the mean gradient's projection on the exact one, relative to it, and their angle in degrees."""
        found = LENGTH * mean_gradient(self.toy, self.loss, from_old=self.from_old).flatten()
        exact = self.toy.exact_gradient(0.0 if self.kl_only else 1.0, 1.0 if self.kl_only else KL_COEF).flatten()
        along = float(found @ exact / (exact @ exact))
        if found.norm() < 1e-9 * exact.norm():
            return 0.0, math.nan
        return along, math.degrees(math.acos(min(1.0, float(found @ exact / found.norm() / exact.norm()))))


@cache
def rows() -> list[Row]:
    return [
        *_advantages(),
        *_token_weights(),
        *_stale_samples(),
        *_kl_terms(),
        *_teachers(),
        *_conversations(),
    ]


def _advantages() -> list[Row]:
    toy = Toy.draw(has_end=False)

    def row(name: str, settings: str, loss: Loss, scale: float, known: str) -> Row:
        return Row(name, settings, toy, loss, scale, known)

    def blind(advantage: GAE) -> Loss:
        return heeds_loss(config_of(advantage=advantage), has_perfect_values=False)

    whole = VALUES.model_copy(update={"gae_lambda": 1.0})
    nothing = heeds_loss(config_of(advantage=NoBaseline(scale="none")))
    kl_in_loss = heeds_loss(_rloo(kl=KLConfig(coef=KL_COEF, kind="loss")))
    mean = heeds_loss(config_of(advantage=GroupMean(samples_per_prompt=2, scale="none")))
    scaled = heeds_loss(config_of(advantage=GroupMean(samples_per_prompt=2, scale="group")))
    forgets = "λ < 1 forgets rewards that no value foretold"
    shorter = "(K - 1)/K of its length, for the mean holds the response itself"
    evens = "small differences of rewards count as much as large ones"
    return [
        row("GAE, perfect values", '`advantage.kind = "gae"`', heeds_loss(config_of()), 1.0, "none"),
        row("GAE, values of 0", '`advantage.kind = "gae"`', blind(VALUES), 0.0, forgets),
        row("GAE, values of 0", "`advantage.gae_lambda = 1`", blind(whole), 1.0, "none"),
        row("REINFORCE", '`advantage.kind = "none"`', nothing, 1.0, "none"),
        row("RLOO", '`advantage.kind = "leave_one_out"`', heeds_loss(_rloo()), 1.0, "none"),
        row("RLOO, KL in the loss", '`kl.kind = "loss"`', kl_in_loss, 1.0, "none"),
        row("Dr. GRPO's advantage", '`advantage.kind = "group_mean"`', mean, 0.5, shorter),
        row("GRPO's advantage", '`advantage.scale = "group"`', scaled, 0.0, evens),
    ]


def _token_weights() -> list[Row]:
    toy = Toy.draw(has_end=True)
    known = {
        "constant": (1.0, "none"),
        "per_token": (0.0, "the denominator depends on the responses; less so in a large minibatch"),
        "per_response": (0.0, "1/length favours short right and long wrong responses"),
    }
    losses = {kind: heeds_loss(_rloo(loss={"token_weight": kind})) for kind in known}
    found = [
        Row("RLOO, lengths differ", f'`loss.token_weight = "{kind}"`', toy, losses[kind], *bias)
        for kind, bias in known.items()
    ]
    gspo = heeds_loss(_rloo(loss=ResponseLoss()))
    return [*found, Row("RLOO, lengths differ", '`loss.kind = "response"`', toy, gspo, 0.0, "that of per_response")]


def _rloo(**changes: object) -> PPOConfig:
    return config_of(advantage=OTHERS, **changes)


def _stale_samples() -> list[Row]:
    toy = Toy.draw(has_end=False)
    plain = heeds_loss(_rloo())
    found = [Row("RLOO, stale samples", "no correction", toy, plain, 0.0, "another policy's samples", from_old=True)]
    corrections: dict[str, tuple[Importance, str]] = {
        "`importance.cap = 1e9`": (CutImportance(cap=1e9), "a token's weight corrects that token alone"),
        "`importance.cap = 1.2`": (CutImportance(cap=1.2), "that, and what the cap cuts"),
        '`importance.kind = "drop_tokens"`': (DropTokens(cap=1.2, floor=0.8), "that, and tokens beyond .8 and 1.2"),
        '`importance.kind = "drop_responses"`': (
            DropResponses(cap=1.2, floor=0.8), "that, and responses beyond .8 and 1.2",
        ),
    }  # fmt: skip
    for settings, (importance, known) in corrections.items():
        loss = heeds_loss(_rloo().model_copy(update={"importance": importance}), corrects=True)
        found.append(Row("RLOO, stale samples", settings, toy, loss, 0.0, known, from_old=True))
    return found


def _kl_terms() -> list[Row]:
    def row(name: str, settings: str, penalty: Callable[[Tensor], Tensor], scale: float, known: str) -> Row:
        by_response = "per token" not in name
        loss = kl_loss(penalty, by_response=by_response)
        return Row(f"KL alone: {name}", settings, Toy.draw(has_end=True), loss, scale, known, kl_only=True)

    return [
        row("k2 per response", '`kl.kind = "loss"`', lambda x: x**2 / 2, 1.0, "none"),
        row("k2 per token", "not offered", lambda x: x**2 / 2, 0.0, "leaves out the KL of the tokens that follow"),
        row("k1 in the loss", "not offered", lambda x: x, 0.0, "its mean gradient is 0"),
        row("k3 in the loss", "not offered", lambda x: (-x).exp() - 1 + x, 0.0, "the gradient of KL(π_ref, π) instead"),
    ]


def _teachers() -> list[Row]:
    """The reference as the teacher, with weight 1 and no other reward: its exact gradient is that of -KL(π, π_ref)."""

    def row(kind: str, scale: float, known: str) -> Row:
        loss = heeds_loss(
            config_of(
                advantage=NoBaseline(scale="none"),
                loss={"token_weight": "constant"},
                kl=KLConfig(coef=0.0),
                score_coef=0.0,
                teachers=[{"model": "the reference", "kind": kind}],
            )
        )
        settings = f'`teachers.kind = "{kind}"`'
        return Row("Teacher alone", settings, Toy.draw(has_end=True), loss, scale, known, kl_only=True)

    return [row("reward", 1.0, "none"), row("token", 0.0, "leaves out the KL of the tokens that follow")]


def _conversations() -> list[Row]:
    """The game of two turns, whose rewards are paid turn by turn."""
    whole = VALUES.model_copy(update={"gae_lambda": 1.0})
    kinds: list[tuple[str, str, Config, bool]] = [
        ("GAE, perfect values", '`advantage.kind = "gae"`', VALUES, True),
        ("GAE, values of 0", "`advantage.gae_lambda = 1`", whole, False),
        ("REINFORCE", '`advantage.kind = "none"`', NoBaseline(scale="none"), True),
        ("RLOO", '`advantage.kind = "leave_one_out"`', OTHERS, True),
    ]
    return [
        Row(
            f"Game of two turns: {name}",
            settings,
            Toy.game(),
            heeds_loss(config_of(advantage=advantage, loss={"token_weight": "constant"}), has_perfect_values=perfect),
            1.0,
            "none",
        )
        for name, settings, advantage, perfect in kinds
    ]


def table(found: Sequence[Row]) -> str:
    lines = [
        "| estimator | settings | length | angle | known bias |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        along, angle = row.measured
        shown = "-" if math.isnan(angle) else f"{0.0 if angle < 0.05 else angle:.1f}°"
        lines.append(f"| {row.name} | {row.settings} | {along:.2f} | {shown} | {row.known} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Returns the page with a newly computed table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(rows()) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
