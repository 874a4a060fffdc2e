"""The job file: one TOML document that configures every stage, checked as a whole before anything runs."""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from evaluation.compare import CompareConfig
from heed.collect import CollectConfig
from lm.config import ModelConfig
from lm.hub import model_directory
from lm.weights import read_config
from playground.reviews import ReviewsConfig, ReviewsWorld
from playground.world import PlaygroundConfig, PlaygroundWorld, World
from ppo.config import PPOConfig
from pretrain.stage import PretrainConfig
from reward.stage import RewardConfig
from sft.stage import SFTConfig
from training.config import Config, EngineConfig

STAGES = ("pretrain", "sft", "collect", "reward", "ppo", "compare")


class PlaygroundSection(PlaygroundConfig):
    """[world] kind = "playground"."""

    kind: Literal["playground"]


class ReviewsSection(ReviewsConfig):
    """[world] kind = "reviews"."""

    kind: Literal["reviews"]


class JobConfig(Config):
    """A whole job. Sections belong to their stages; what spans stages is checked here.

    A source "world:NAME" is the file NAME.jsonl that the world writes; "collect:rankings" is what labelers gave.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    note: str = ""  # a caution that the report shows
    seed: int = Field(ge=0)
    workers: int = Field(ge=1)
    world: Annotated[PlaygroundSection | ReviewsSection, Field(discriminator="kind")]
    engine: EngineConfig
    model: ModelConfig
    pretrain: PretrainConfig
    sft: SFTConfig
    collect: CollectConfig
    reward: RewardConfig
    ppo: PPOConfig
    compare: CompareConfig

    @field_validator("name")
    @classmethod
    def _no_hidden_name(cls, name: str) -> str:
        if ".." in name:
            raise ValueError("a folder name without '..' was expected")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        context = self.model.context_tokens
        for field, tokens in (
            ("pretrain.row_tokens", self.pretrain.row_tokens),
            ("sft.row_tokens", self.sft.row_tokens),
            ("collect.max_response_tokens", self.collect.max_response_tokens + 1),
            ("ppo.max_response_tokens", self.ppo.max_response_tokens + 1),
            ("compare.max_response_tokens", self.compare.max_response_tokens + 1),
        ):
            if tokens > context:
                raise ValueError(f"{field} does not fit model.context_tokens = {context}")
        for name, batch in (
            ("pretrain.batch", self.pretrain.batch),
            ("sft.batch", self.sft.batch),
            ("reward.batch", self.reward.batch),
            ("ppo.minibatch", self.ppo.minibatch),
        ):
            try:
                batch.num_micro_batches(self.workers)
            except ValueError as error:
                raise ValueError(f"{name} with workers = {self.workers}: {error}") from None
        for name, optimizer in (
            ("pretrain.optimizer", self.pretrain.optimizer),
            ("sft.optimizer", self.sft.optimizer),
            ("reward.optimizer", self.reward.optimizer),
            ("ppo.policy_optimizer", self.ppo.policy_optimizer),
            ("ppo.value_optimizer", self.ppo.value_optimizer),
        ):
            try:
                optimizer.check_sharding(self.engine)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if (optimizer.trained_layers or 0) > self.model.num_layers:
                raise ValueError(
                    f"{name}.trained_layers is {optimizer.trained_layers}; model.num_layers is {self.model.num_layers}"
                )
        for name, rows in (("ppo.rollout_prompts", self.ppo.rollout_prompts), ("ppo.ptx_rows", self.ppo.ptx_rows)):
            if rows % self.workers:
                raise ValueError(f"{name} is {rows}; a multiple of workers = {self.workers} was expected")
        return self

    def open_world(self) -> World:
        """The world that the job names. Errors: ValueError for files that are missing or malformed."""
        if isinstance(self.world, PlaygroundSection):
            return PlaygroundWorld(self.world)
        return ReviewsWorld(self.world)


def load_job(path: Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """A job file (None: the built-in demo) with `--set` overrides such as "ppo.kl_coef=0.05".

    Errors: ValueError naming file, field, value and what was expected.
    """
    source = files("configs").joinpath("jobs/demo.toml") if path is None else path
    name = "configs/jobs/demo.toml" if path is None else str(path)
    try:
        values = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: not TOML: {error}") from None
    for override in overrides:
        _apply_override(values, override)
    _take_shape(name, values)
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{name}: " + "; ".join(_explain(dict(problem)) for problem in error.errors())) from None


def _take_shape(name: str, values: dict[str, Any]) -> None:
    """Where pretraining starts from a model, `[model]` is that model's shape, and is checked if it is written out."""
    section = values.get("pretrain")
    init_from = section.get("init_from") if isinstance(section, dict) else None
    if not isinstance(init_from, str) or not init_from:
        return
    try:
        shape = read_config(model_directory(init_from), "language")[0].model_dump(mode="json")
    except ValueError as error:
        raise ValueError(f"{name}: pretrain.init_from: {error}") from None
    written = values.get("model", {})
    for key, value in written.items() if isinstance(written, dict) else ():
        if key in shape and value != shape[key]:
            raise ValueError(
                f"{name}: model.{key} is {value!r}, but {init_from} has {shape[key]!r}; leave [model] out where"
                " pretrain.init_from brings its shape"
            )
    values["model"] = {**shape, **written} if isinstance(written, dict) else written


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is TOML, or a bare string where it is not."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"--set {override!r}: KEY=VALUE was expected")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {override!r}: {parent!r} is not a section")
    place[leaf] = value


def _explain(problem: Mapping[str, Any]) -> str:
    """One validation error as: full key, what was found, what was expected."""
    # The discriminated union puts its tag into the location; users know the key without it.
    location = [str(part) for part in problem["loc"] if part not in ("playground", "reviews")]
    key = ".".join(location) or "job"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(location)
        close = get_close_matches(location[-1], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(sorted(known))}"
        return f"{key}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{key}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    simple = isinstance(problem["input"], str | int | float | bool)
    return f"{key}: {message}" + (f", found {problem['input']!r}" if simple else "")


def _keys_beside(location: Sequence[str]) -> list[str]:
    """The fields that the section holding this key knows."""
    models: list[type[BaseModel]] = [JobConfig]
    for part in location[:-1]:
        if part.isdigit():
            continue
        if part == "world":
            models = [PlaygroundSection, ReviewsSection]
            continue
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [found for field in fields for found in _models_in(field)]
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _models_in(part)]
