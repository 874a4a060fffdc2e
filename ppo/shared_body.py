"""One frozen body for four models (`ppo.lora.shared_body`): PPO in about the memory of fine-tuning.

The policy is the SFT model with adapters, and the reference is the same model without them. The reward model is an
adapter of the same SFT model, with a head; the value function starts as that adapter. The models are separate objects
whose frozen weights are the policy's tensors, so the body is in memory only once.

Shape letters: B responses, R response tokens, L rows, T tokens of a row, D model width, C tokens of all responses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor, nn

from lm.adapters import ADAPTER, FromAdapter
from lm.experts import Replay, no_route
from lm.lora import is_adapter, merged, read_by
from lm.model import LanguageModel, ScalarModel
from lm.progress import note_progress
from lm.sampling import token_logprobs
from lm.source import ModelSource, load, on_meta
from lm.weights import ModelFolder, WithNewHead
from ppo.config import PPOConfig
from ppo.learner import Learner
from ppo.rank import InitialModels, PackedRollout, joined_heads
from ppo.rollout import Asked, Drawn, Rollout
from ppo.scorer import HeldModel, Scorer
from training.config import EngineConfig

ROUNDING = 1e-6  # relative to the largest weight: another machine may have merged the adapter in another order
HEADS = ("score.weight", "bias")  # parameters of a scalar model that are not part of its body


def adapter_of(reward: Path) -> Path:
    """Returns the folder of the adapter that was written next to a reward model. Raises: ValueError without one."""
    folder = reward.parent / ADAPTER
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"ppo.lora.shared_body: {reward} has no adapter next to it ({folder.resolve()}); the reward/model of a run,"
            " trained with [reward] lora on the policy's initial model, was expected"
        )
    return folder


@dataclass(frozen=True)
class OnBody:
    """A reward model that uses the tensors of `body`; only its heads are read from `folder`."""

    body: nn.Module
    folder: Path

    def build(self) -> ScalarModel:
        return ModelFolder(self.folder, ScalarModel).build()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        model, held = on_meta(self.build), dict([*self.body.named_parameters(), *self.body.named_buffers()])
        own = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in HEADS}
        rows = {name: range(len(tensor) if tensor.dim() else 1) for name, tensor in own.items()}
        heads = dict(ModelFolder(self.folder, ScalarModel).tensors(rows))
        for name, _ in [*model.named_parameters(), *model.named_buffers()]:
            yield name, heads[name] if name in heads else held[name].detach()


def reward_on_body(body: nn.Module, reward: Path) -> ModelSource[ScalarModel]:
    """Returns a source of the reward model as an adapter on a body in memory. Only adapters and heads are trainable.
    Raises: as `adapter_of`.
    """
    return FromAdapter(OnBody(body, reward), adapter_of(reward))


def require_same_shape(policy: Path, reward: Path) -> None:
    """Check that a reward model has an adapter, and the initial policy's shape, without reading weights.

    Raises: ValueError naming the field of the shape that differs, and as `adapter_of`.
    """
    adapter_of(reward)
    theirs = on_meta(ModelFolder(reward, ScalarModel).build).config.model_dump()
    ours = on_meta(ModelFolder(policy, LanguageModel).build).config.model_dump()
    differs = [f"{name} ({theirs[name]}, {value})" for name, value in ours.items() if theirs[name] != value]
    if differs:
        raise _of_another_body(differs[0], policy, reward)


def require_same_body(policy: Path, reward: Path) -> None:
    """Check that a reward model is the initial policy's body with an adapter, by comparing all tensors one at a time.

    Raises: ValueError naming the first tensor that differs, and as `require_same_shape`.
    """
    require_same_shape(policy, reward)
    whole = ModelFolder(reward, ScalarModel)
    labels = on_meta(whole.build).labels
    body = WithNewHead(policy, LanguageModel, lambda shape: ScalarModel(shape, labels=labels), seed=0)
    source = FromAdapter(body, adapter_of(reward))
    made = merged(on_meta(source.build), source.tensors())
    for (name, ours), (other, theirs) in zip(made, whole.tensors(), strict=True):
        assert name == other, f"{other} came where {name} was expected"
        if name != "bias" and not torch.allclose(ours, theirs, rtol=0, atol=ROUNDING * float(theirs.abs().max())):
            raise _of_another_body(name, policy, reward)


def _of_another_body(what: str, policy: Path, reward: Path) -> ValueError:
    return ValueError(
        f"ppo.lora.shared_body: {what} of {reward} differs from that of {policy} with the adapter {adapter_of(reward)};"
        " a reward model trained with [reward] lora on this initial policy was expected"
    )


def require_shared(model: nn.Module, body: nn.Module) -> None:
    """Assert that a model's frozen weights are the tensors of `body`, not copies."""
    held = {name: parameter.data_ptr() for name, parameter in body.named_parameters()}
    for name, parameter in model.named_parameters():
        if not is_adapter(name) and name not in HEADS:
            assert parameter.data_ptr() == held[name], f"{name} is a second copy of the body's"


class SharedBodyLearner(Learner):
    """A learner whose policy shares its body with the value function, the reference and the reward model."""

    def __init__(self, config: PPOConfig, engine_config: EngineConfig, models: InitialModels, num_workers: int) -> None:
        super().__init__(config, engine_config, models, num_workers)
        source, dtype = reward_on_body(self.policy.module, self._reward), self.policy.held_dtype
        network = load(source, self.device, dtype).eval().requires_grad_(False)
        for model in (network, *(engine.module for engine in self.engines.values())):
            require_shared(model, self.policy.module)
        self.scorer = Scorer(config, engine_config, models, HeldModel(network))

    @property
    def _reward(self) -> Path:
        assert isinstance(self.models.reward, Path), "a body is shared with a reward model"
        return self.models.reward

    def _value_source(self) -> ModelSource[ScalarModel]:
        weights, scale = self.config.reward.objective_weights, self.models.scale
        return joined_heads(reward_on_body(self.policy.module, self._reward), self._reward, weights, scale)

    @torch.no_grad()
    def measure(self, rollout: Rollout, pass_sizes: Sequence[int], drawn: Drawn | None = None) -> Tensor:
        """Returns [B, 3, R]: log-probs under policy and reference, nats, and values; 0 at padding."""
        of_pass = iter(drawn.parts(pass_sizes)) if drawn else repeat(None)
        replays = list[Replay]()
        with self.policy.cache_weight_casts():
            found = self._by_pass(lambda part: self._measured(part, next(of_pass), replays), rollout, pass_sizes)
        if replays:
            self._compare_routes(replays, rollout, pass_sizes)
        return found

    def _measured(self, rollout: Rollout, drawn: Drawn | None, replays: list[Replay]) -> Tensor:
        note_progress()
        packed = PackedRollout.of(rollout, self.device)
        policy, value = self.policy.module, self.value.module if "value" in self.engines else None
        readers = [policy, None] if value is None else [policy, None, value]
        rows, segments = (part.repeat(len(readers), 1) for part in (packed.tokens_LT, packed.segments_LT))

        def read(model: LanguageModel | ScalarModel, hidden_LTD: Tensor) -> Tensor:
            with self._precision():
                return model.read(hidden_LTD, packed.states_LT)

        routes, replay = packed.routes(rollout), None
        if routes is not None:  # the value function's routers choose
            nothing = torch.full_like(routes, no_route(routes))
            replay = Replay(torch.cat([routes, routes, nothing][: len(readers)]))
        with self._precision(), read_by(policy, readers):
            hidden = policy.decoder.hidden(rows, segments, routes=replay).chunk(len(readers))
        if replay is not None:
            replays.append(replay.of_first(packed.tokens_LT.numel()))
        outputs = list[Tensor]()
        for of_role, tested in zip(hidden[:2], (drawn, None), strict=True):  # logits are larger than all hidden states
            logits_CV = read(policy, of_role)
            outputs.append(token_logprobs(logits_CV, packed.targets_C, self.config.temperature))
            if tested is not None:
                self._keep_draws(logits_CV, outputs[0], packed, rollout, tested)
            del logits_CV
        outputs.append(torch.zeros_like(outputs[0]) if value is None else read(value, hidden[2]).float())
        return torch.stack([packed.spread(flat_C) for flat_C in outputs], dim=1)

    def scores(self, rollout: Rollout, asked: Asked) -> Tensor:
        """As `Scorer.scores`."""
        return self.scorer.scores(rollout, asked)

    def first_failure(self) -> str:
        """As `Scorer.first_failure`."""
        return self.scorer.first_failure()
