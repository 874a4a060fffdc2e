"""Settings of the engine that samples responses, and of the ranks that sample, score and learn."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, Tag

from training.config import Config, by_kind


class SamplerConfig(Config):
    """What the samplers have in common."""

    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Ranks that sample together as one generator, each with a share of the policy's weights; for a"
        " policy that does not fit on one GPU. Ranks with consecutive numbers, which are on the same machine if it has"
        " room for all of them, work together.",
    )
    max_rows: int = Field(
        default=0,
        ge=0,
        description="Number of responses that a generator samples at once, at most; 0 = 128 on a CPU, and on a GPU up"
        " to 1,024, as many as fit in its free memory.",
    )


class HeedSampler(SamplerConfig):
    """The learner's own core samples. A run that resumes samples the same bits."""

    model_config = ConfigDict(title="Sampler heed")
    has_own_process: ClassVar[bool] = False

    kind: Literal["heed"] = Field(default="heed", description="The kind of this table.")


class VLLM(SamplerConfig):
    """vLLM samples, in processes of its own and under its own Python (docs/samplers.md)."""

    model_config = ConfigDict(title="Sampler vllm")
    has_own_process: ClassVar[bool] = True

    kind: Literal["vllm"] = Field(default="vllm", description="The kind of this table.")
    python: str = Field(
        default="",
        description="Python interpreter with vLLM and Heed on every machine; empty = the one that `make vllm` makes.",
    )


class Colocated(Config):
    """Every worker has all roles: it samples, scores and learns in turns."""

    model_config = ConfigDict(title="Placement colocated")
    roles_share_ranks: ClassVar[bool] = True
    samples_rounds: ClassVar[bool] = False  # whether responses are continued with newer weights
    weight_transport: ClassVar[Literal["auto"]] = "auto"
    num_generators: ClassVar[int] = 0
    num_scorers: ClassVar[int] = 0
    max_staleness: ClassVar[int] = 0

    kind: Literal["colocated"] = Field(default="colocated", description="The kind of this table.")


class SeparateRanks(Config):
    """What the placements have in common in which generators and scorers have ranks of their own."""

    roles_share_ranks: ClassVar[bool] = False
    samples_rounds: ClassVar[bool] = False

    num_generators: int = Field(
        default=1, ge=1, description="Ranks that sample; a multiple of `sampler.tensor_parallel_size`."
    )
    num_scorers: int = Field(
        default=1, ge=1, description="Ranks that hold the frozen models: reward model, reference, teachers."
    )


class Disaggregated(SeparateRanks):
    """The job's workers learn, and other ranks sample and score."""

    model_config = ConfigDict(title="Placement disaggregated")
    max_staleness: ClassVar[int] = 0

    kind: Literal["disaggregated"] = Field(default="disaggregated", description="The kind of this table.")
    weight_transport: Literal["auto", "broadcast", "object_store"] = Field(
        default="auto",
        description="How weights are sent to the generators: by broadcast (NCCL or gloo) or Ray's object store; `auto`"
        " broadcasts between GPUs.",
    )


class Asynchronous(SeparateRanks):
    """As `disaggregated`, while generators sample the next responses with weights that are a few iterations old.
    Weights reach them through Ray's object store, so learners never wait for generators.
    """

    model_config = ConfigDict(title="Placement asynchronous")
    weight_transport: ClassVar[Literal["object_store"]] = "object_store"

    kind: Literal["asynchronous"] = Field(default="asynchronous", description="The kind of this table.")
    max_staleness: int = Field(
        ge=1,
        description="Number of iterations N by which generators run ahead: iteration i learns from responses sampled"
        " with the weights that iteration max(0, i - N) started with.",
    )


class Continuous(SeparateRanks):
    """As `asynchronous`, but no iteration waits for the longest response. Responses that have not ended when weights
    change are continued with the new ones, and prompts enter as rows become free (docs/algorithms.md).
    """

    model_config = ConfigDict(title="Placement continuous")
    weight_transport: ClassVar[Literal["object_store"]] = "object_store"
    samples_rounds: ClassVar[bool] = True

    kind: Literal["continuous"] = Field(default="continuous", description="The kind of this table.")
    max_staleness: int = Field(
        default=1,
        ge=1,
        description="Number of iterations N by which generators run ahead: iteration i learns from the responses that"
        " ended first, and from then on the weights sample that iteration i + 1 - N starts with.",
    )
    num_rows: int = Field(
        default=0,
        ge=0,
        description="Responses in progress at once, over all generators; 0 = as many as an iteration samples. More fill"
        " the GPUs better, and are older when they end.",
    )
    round_tokens: int = Field(
        default=16,
        ge=1,
        description="Tokens drawn per response between two times at which responses enter and weights may change. More"
        " cost less time between rounds, and leave rows idle that end within one.",
    )
    max_age: int = Field(
        default=0,
        ge=0,
        description="Responses whose first token is by more than so many iterations older than the weights that learn"
        " from it are dropped, with their group, and counted; 0 = none.",
    )
    answer_rounds: int = Field(
        default=2,
        ge=1,
        description="Rounds after the end of a conversation's turn after which its environment's answer is taken;"
        " other responses use the row meanwhile. More suit slower environments, and make conversations older.",
    )


Sampler = Annotated[Annotated[HeedSampler, Tag("heed")] | Annotated[VLLM, Tag("vllm")], by_kind("heed", "vllm")]
Placement = Annotated[
    Annotated[Colocated, Tag("colocated")]
    | Annotated[Disaggregated, Tag("disaggregated")]
    | Annotated[Asynchronous, Tag("asynchronous")]
    | Annotated[Continuous, Tag("continuous")],
    by_kind("colocated", "disaggregated", "asynchronous", "continuous"),
]
