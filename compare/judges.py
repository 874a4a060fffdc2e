"""A judge by its spec: people, a gold scorer, a language model, a reward endpoint, a function, a reward model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from evaluation.answers import Asker
from evaluation.endpoint import Endpoint
from evaluation.judges.judge import Judge
from evaluation.judges.language_model import LanguageModelJudge
from evaluation.judges.people import PeopleJudge
from evaluation.judges.scorers import ScoreJudge, reward_model_score
from evaluation.judges.template import read_template
from evaluation.names import named_specs
from files.hashes import file_hash, folder_hash
from lm.hub import model_directory
from lm.tokenizer import Messages
from preferences.records import MAX_RESPONSES
from preferences.store import LabelStore
from reward.external import RemoteReward, RewardFunction, Scored
from reward.scoring import labels_of
from stages.world import World
from training.data import Prompt

PEOPLE, GOLD = "people:", "gold:"


@dataclass(frozen=True)
class Asking:
    """How endpoints are asked, policies and judges alike. `cache` is the file of answers."""

    cache: Path
    concurrency: int
    timeout_seconds: float
    num_retries: int
    max_failed_share: float

    def asker(self, name: str, spec: str) -> Asker:
        """Raises: those of `Endpoint.of`."""
        endpoint = Endpoint.of(spec, name, timeout_seconds=self.timeout_seconds, num_retries=self.num_retries)
        return Asker(endpoint, self.cache, self.concurrency, self.max_failed_share)


@dataclass(frozen=True)
class Judging:
    """What judges are told: the template and answers' length of language models, the batch and number of labelers.

    `open_world` finds the world that a gold judge names. Raises: ValueError where there is none.
    """

    asking: Asking
    template: Path | None
    max_tokens: int
    batch: str
    num_labelers: int
    seed: int
    open_world: Callable[[str], World]


def open_judges(specs: Sequence[str], judging: Judging, prompts: Sequence[Prompt], num_policies: int) -> list[Judge]:
    """The judges of NAME=SPEC or SPEC, ready to judge responses to these prompts.

    Raises: ValueError for an invalid one.
    """
    return [_open(name, spec, judging, prompts, num_policies) for name, spec in named_specs(specs, "judge")]


def _open(name: str, spec: str, judging: Judging, prompts: Sequence[Prompt], num_policies: int) -> Judge:
    if spec.startswith(PEOPLE):
        return _people(name, spec.removeprefix(PEOPLE), judging, num_policies)
    if spec.startswith(GOLD):
        return _gold(name, spec, judging, prompts)
    if spec.startswith(("http://", "https://")):
        return _language_model(name, spec, judging) if "#" in spec else _reward_endpoint(name, spec, judging)
    if ":" in spec and not Path(spec).is_dir():
        function = RewardFunction(spec)
        return ScoreJudge(name, "function", spec, function.score, {"sha256": file_hash(function.file)})
    source, _, objective = spec.partition("#")
    folder = model_directory(source)
    score = reward_model_score(folder, _weights(folder, objective) if objective else {})
    return ScoreJudge(name, "reward model", spec, score, {"sha256": folder_hash(folder)})


def _weights(folder: Path, objective: str) -> dict[str, float]:
    """One of a reward model's objectives counts. Raises: ValueError where it has no such objective."""
    labels = labels_of(folder)
    if objective not in labels:
        raise ValueError(f"{folder} has no objective {objective!r}; it has {', '.join(labels)}")
    return {label: float(label == objective) for label in labels}


def _language_model(name: str, spec: str, judging: Judging) -> Judge:
    asker = judging.asking.asker(name, spec)
    return LanguageModelJudge(name, asker, read_template(judging.template), judging.max_tokens)


def _reward_endpoint(name: str, spec: str, judging: Judging) -> Judge:
    asking = judging.asking
    asker = asking.asker(name, f"{spec}#none")  # refuses what is no URL, or holds a password
    endpoint = RemoteReward(asker.endpoint.url, asking.timeout_seconds, asking.num_retries)
    return ScoreJudge(name, "reward endpoint", spec, endpoint.score)


def _people(name: str, store_url: str, judging: Judging, num_policies: int) -> Judge:
    if num_policies > MAX_RESPONSES:
        raise ValueError(
            f"judge {name!r}: {num_policies} policies; people rank at most {MAX_RESPONSES} responses at once"
        )
    if not store_url:
        raise ValueError(f"judge {name!r}: {PEOPLE}STORE was expected, such as people:labels.sqlite")
    with LabelStore(store_url):
        pass  # what is wrong with it is told before anything is sampled
    shown = PEOPLE + _without_password(store_url)
    return PeopleJudge(name, shown, store_url, judging.batch, judging.num_labelers, judging.seed)


def _without_password(store_url: str) -> str:
    try:
        return make_url(store_url).render_as_string(hide_password=True)
    except ArgumentError:  # a file's path
        return store_url


def _gold(name: str, spec: str, judging: Judging, prompts: Sequence[Prompt]) -> Judge:
    try:
        world = judging.open_world(spec.removeprefix(GOLD))
    except ValueError as error:
        raise ValueError(f"judge {name!r}: {error}") from None
    for prompt in prompts:
        try:
            world.gold_scores([prompt.messages[-1]["content"]], [""])
        except ValueError as error:  # a prompt of another world
            raise ValueError(f"judge {name!r}: prompt {prompt.prompt_id!r}: {error}") from None
    return gold_judge(name, spec, world)


def gold_judge(name: str, spec: str, world: World) -> ScoreJudge:
    """A world's gold scorer."""

    def score(conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        asked = [messages[-1]["content"] for messages in conversations]
        return [Scored(value) for value in world.gold_scores(asked, list(responses))]

    return ScoreJudge(name, "gold", spec, score, {"description": world.describe(), "pass_mark": world.pass_mark})
