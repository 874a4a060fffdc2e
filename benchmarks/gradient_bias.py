"""Computes how far each policy-gradient estimator's mean gradient is from the exact one, by enumeration.

A toy policy writes two tokens from a vocabulary of three, so it has nine responses (seven if a token ends them). So
both the exact gradient of (mean reward - β · KL) and the mean of an estimator's gradient over all groups of two
responses are finite sums. The estimators are those of `ppo`, called as the controller calls them.
`python -m benchmarks.gradient_bias` rewrites the table in docs/algorithms.md. tests/benchmarks/test_gradient_bias.py
checks the table and what it claims.

Shape letters: B responses, R response tokens, S states, V tokens.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ppo.algorithm import (
    GAE,
    NO_TERMS,
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
from ppo.groups import StepRewards
from reward.steps import StepsConfig
from training.config import BatchConfig, OptimizerConfig
from training.data import DataConfig

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- written by python -m benchmarks.gradient_bias -->\n", "<!-- end -->\n"
VOCABULARY, LENGTH, KL_COEF = 3, 2, 0.3
VALUES = GAE(value_optimizer=OptimizerConfig(learning_rate=1.0), scale="none")
OTHERS = LeaveOneOut(samples_per_prompt=2, scale="none")


@dataclass(frozen=True)
class Toy:
    """Logits [S, V] of the policy, of the reference, and of an older policy. The first state is the start of the
    response; each other state follows one of its possible first tokens. With `has_end`, a first token 0 ends the
    response. If each token is a step, `paid_BR` is what the steps are paid, which adds up to the scores.
    """

    has_end: bool
    logits_SV: Tensor
    ref_logits_SV: Tensor
    old_logits_SV: Tensor
    tokens_BR: Tensor  # all responses
    mask_BR: Tensor  # True = a token
    scores_B: Tensor
    paid_BR: Tensor | None = None

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
        return cls(has_end, policy.requires_grad_(), ref, policy.detach() + 0.5 * noise, tokens_BR, mask_BR, scores_B)

    @classmethod
    def in_steps(cls, form: str) -> "Toy":
        """Draw step scores between 0 and 1, which depend on the tokens so far, and what they amount to."""
        toy, steps = cls.draw(has_end=True), StepsConfig.model_validate({"form": form})
        generator = torch.Generator().manual_seed(5)
        drawn_SV = torch.rand(1 + VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        paid_BR = torch.zeros_like(toy.tokens_BR, dtype=torch.float64)
        for row, (tokens, mask) in enumerate(zip(toy.tokens_BR.tolist(), toy.mask_BR.tolist(), strict=True)):
            states = (0, 1 + tokens[0])[: sum(mask)]
            scores = [float(drawn_SV[state, token]) for state, token in zip(states, tokens, strict=False)]
            paid_BR[row, : len(scores)] = torch.tensor(steps.paid(scores), dtype=torch.float64)
        return replace(toy, scores_B=paid_BR.sum(dim=1), paid_BR=paid_BR)

    def token_rewards(self, rows: Tensor, logprobs_BR: Tensor, score_coef: float, kl_coef: float) -> Tensor:
        """Returns the rewards of the responses' tokens [B, R], for their scores or for their steps."""
        ref_BR, mask_BR = self.logprobs(self.ref_logits_SV, rows), self.mask_BR[rows]
        terminal_B, paid_BR = score_coef * self.scores_B[rows], NO_TERMS
        if self.paid_BR is not None:
            terminal_B, paid_BR = torch.zeros_like(terminal_B), score_coef * self.paid_BR[rows]
        return token_rewards(terminal_B, logprobs_BR, ref_BR, mask_BR, kl_coef, paid_BR)[0]

    def logprobs(self, logits_SV: Tensor, rows: Tensor) -> Tensor:
        """Returns log π of the responses' tokens [B, R]; 0 where there is no token."""
        tokens_BR = self.tokens_BR[rows]
        states_BR = torch.stack([torch.zeros_like(tokens_BR[:, 0]), 1 + tokens_BR[:, 0]], dim=1)
        logprobs_BR = logits_SV.log_softmax(-1)[states_BR, tokens_BR]
        return torch.where(self.mask_BR[rows], logprobs_BR, 0.0)

    def exact_gradient(self, score_coef: float, kl_coef: float) -> Tensor:
        """Returns ∇ Σ π(y) (score_coef · score(y) - kl_coef · log π(y)/π_ref(y))."""
        everything = torch.arange(len(self.tokens_BR))
        logprob_B = self.logprobs(self.logits_SV, everything).sum(dim=1)
        log_ratio_B = logprob_B - self.logprobs(self.ref_logits_SV, everything).sum(dim=1)
        value = (logprob_B.exp() * (score_coef * self.scores_B - kl_coef * log_ratio_B)).sum()
        return torch.autograd.grad(value, self.logits_SV)[0]

    def values(self, kl_coef: float) -> Tensor:
        """Returns the exact value before each token of each response [B, R]: the mean of the rewards still to come."""
        everything = torch.arange(len(self.tokens_BR))
        logprobs_BR = self.logprobs(self.logits_SV, everything).detach()
        rewards_BR = self.token_rewards(everything, logprobs_BR, 1.0, kl_coef)
        values_BR = torch.zeros_like(rewards_BR)
        values_BR[:, 0] = (logprobs_BR.sum(dim=1).exp() * rewards_BR.sum(dim=1)).sum()
        for first in range(VOCABULARY):
            same = self.tokens_BR[:, 0] == first
            values_BR[same, 1] = (logprobs_BR[same, 1].exp() * rewards_BR[same, 1]).sum()
        return torch.where(self.mask_BR, values_BR, 0.0)


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
        total_SV -= float(behaviour_BR.sum().exp()) * gradient_SV
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
        old_BR, ref_BR, mask_BR, scores_B = (
            group.logprobs_BR.detach(),
            group.ref_logprobs_BR,
            group.mask_BR,
            group.toy.scores_B[group.rows],
        )
        kl_coef = config.kl.coef if config.kl.kind == "reward" else 0.0
        rewards_BR = group.toy.token_rewards(group.rows, old_BR, config.score_coef, kl_coef)
        paid_BR = group.toy.paid_BR
        steps = None if paid_BR is None else StepRewards(config.score_coef * paid_BR[group.rows], mask_BR)
        values_BR = group.toy.values(kl_coef)[group.rows] * has_perfect_values
        terms = {
            kind: teacher_terms(old_BR, ref_BR[:, None], torch.tensor([own]), mask_BR)
            for kind, own in (("reward", reward_weight), ("token", token_weight))
        }
        found = config.advantage.estimate(
            scores_B, rewards_BR + terms["reward"], values_BR, mask_BR, terms["token"], steps
        )
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

    def measured(self) -> tuple[float, float]:
        """Returns the mean gradient's projection on the exact one, relative to it, and their angle in degrees."""
        found = LENGTH * mean_gradient(self.toy, self.loss, from_old=self.from_old).flatten()
        exact = self.toy.exact_gradient(0.0 if self.kl_only else 1.0, 1.0 if self.kl_only else KL_COEF).flatten()
        along = float(found @ exact / (exact @ exact))
        if found.norm() < 1e-9 * exact.norm():
            return 0.0, math.nan
        return along, math.degrees(math.acos(min(1.0, float(found @ exact / found.norm() / exact.norm()))))


def rows() -> list[Row]:
    return [*_advantages(), *_token_weights(), *_steps(), *_stale_samples(), *_kl_terms(), *_teachers()]


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


def _steps() -> list[Row]:
    """Each token is a step, and responses have one step or two."""
    constant = {"token_weight": "constant"}
    gae, loo = heeds_loss(config_of(loss=constant)), heeds_loss(_rloo(loss=constant))

    def group(scale: str) -> Loss:
        baseline = GroupMean.model_validate({"samples_per_prompt": 2, "scale": scale})
        return heeds_loss(config_of(advantage=baseline, loss=constant))

    def row(name: str, settings: str, form: str, loss: Loss, scale: float = 1.0, known: str = "none") -> Row:
        return Row(f"Steps: {name}", settings, Toy.in_steps(form), loss, scale, known)

    worst = Toy.in_steps("min")
    assert worst.paid_BR is not None, "these responses have steps"
    # The minimum changes at the second step if and only if that is the worst one.
    at_second_B1 = (worst.paid_BR[:, 1:] < 0).double()
    moved = replace(worst, paid_BR=worst.scores_B[:, None] * torch.cat([1 - at_second_B1, at_second_B1], dim=1))
    nothing = heeds_loss(config_of(advantage=NoBaseline(scale="none"), loss=constant))
    forms = [(form, f'`steps.form = "{form}"`') for form in ("sum", "min")]
    return [
        *(row("GAE, perfect values", settings, form, gae) for form, settings in forms),
        *(row("RLOO", settings, form, loo) for form, settings in forms),
        row(
            "GRPO's mean of all steps", '`advantage.kind = "group_mean"`', "sum", group("none"), 0.0,
            "subtracts the mean once for each step that follows",
        ),
        row("GRPO", '`advantage.scale = "group"`', "sum", group("group"), 0.0, "that, and that of `group`"),
        Row(
            "Steps: minimum paid at the worst step", "not offered", moved, nothing, 0.0,
            "after a bad step, a worse one seems to earn its score",
        ),
    ]  # fmt: skip


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


def table(found: Sequence[Row]) -> str:
    lines = [
        "| estimator | settings | length | angle | known bias |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        along, angle = row.measured()
        shown = "-" if math.isnan(angle) else f"{0.0 if angle < 0.05 else angle:.1f}°"
        lines.append(f"| {row.name} | {row.settings} | {along:.2f} | {shown} | {row.known} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Returns the page with a newly computed table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(rows()) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
