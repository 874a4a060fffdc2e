"""Opens a judge by its spec: people, a gold scorer, a language model, a reward endpoint, a function, a reward model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from evaluation.inputs import named_specs
from evaluation.judges.judge import Judge, ScoreJudge, reward_model_score
from evaluation.judges.language_model import LanguageModelJudge, read_template
from evaluation.judges.people import PeopleJudge
from files.hashes import file_hash, folder_hash, json_hash
from lm.hub import model_directory, model_hash
from lm.tokenizer import Messages
from lm.weights import purpose_of
from preferences.records import MAX_RESPONSES
from reward.endpoint import Asker, Budget, Endpoint
from reward.external import ExternalReward, RemoteReward, RewardFunction, Scored
from reward.judge import JudgeReward
from reward.rubric import Rubric
from reward.scoring import labels_of
from stages.reports.text import listed
from stages.world import OpenLabels, World
from training.data import Prompt

PEOPLE, GOLD = "people:", "gold:"
BY_RUBRIC = "language model with a rubric"  # the kind of judge that `[ppo.reward] kind = "judge"` is too


@dataclass(frozen=True)
class Asking:
    """How to query policies and judges behind endpoints. `cache` is the file that stores their answers."""

    cache: Path
    concurrency: int
    timeout_seconds: float
    max_wait_seconds: float
    max_failed_share: float
    budget: Budget = field(default_factory=Budget)

    def asker(self, name: str, spec: str) -> Asker:
        """Raises: as `Endpoint.of` does."""
        limits = {"timeout_seconds": self.timeout_seconds, "max_wait_seconds": self.max_wait_seconds}
        endpoint = Endpoint.of(spec, name, **limits)
        return Asker(endpoint, self.cache, self.concurrency, self.max_failed_share, self.budget)


@dataclass(frozen=True)
class Judging:
    """Options of judges: a language model's template and answer length, the batch and number of labelers. With a
    `rubric`, a file, language models grade each response by it instead of comparing two.

    `open_world` finds the world that a gold judge names. Raises: ValueError if there is none. `open_labels` opens the
    label store of people who judge.
    """

    asking: Asking
    template: Path | None
    max_tokens: int
    batch: str
    num_labelers: int
    seed: int
    open_world: Callable[[str], World]
    rubric: Path | None = None
    open_labels: OpenLabels = field(kw_only=True)


def open_judges(specs: Sequence[str], judging: Judging, prompts: Sequence[Prompt], num_policies: int) -> list[Judge]:
    """Returns the judges of NAME=SPEC or SPEC, ready to judge responses to these prompts.

    Raises: ValueError for an invalid one, and for a template that no judge would read.
    """
    opened = [_open(name, spec, judging, prompts, num_policies) for name, spec in named_specs(specs, "judge")]
    if judging.rubric is not None:
        if judging.template is not None:
            raise ValueError(f"--rubric {judging.rubric}: a rubric has its own template; no --template was expected")
        if not any(isinstance(judge, ScoreJudge) and judge.kind == BY_RUBRIC for judge in opened):
            raise ValueError(
                f"--rubric {judging.rubric}: no judge is a language model (URL#MODEL, or a model directory); only such"
                " a judge reads it"
            )
    if judging.template is not None:
        read_template(judging.template)
        if not any(isinstance(judge, LanguageModelJudge) for judge in opened):
            raise ValueError(
                f"--template {judging.template}: no judge is a language model (URL#MODEL); only such a judge reads it"
            )
    return opened


def _open(name: str, spec: str, judging: Judging, prompts: Sequence[Prompt], num_policies: int) -> Judge:
    if spec.startswith(PEOPLE):
        return _people(name, spec.removeprefix(PEOPLE), judging, num_policies)
    if spec.startswith(GOLD):
        return _gold(name, spec, judging, prompts)
    if judging.rubric is not None and is_language_model(spec):
        return _rubric_judge(name, spec, judging.rubric, judging.asking)
    if is_url(spec) and "#" in spec:
        return _language_model(name, spec, judging)
    return open_scorer(name, spec, judging.asking)


def is_url(spec: str) -> bool:
    return spec.startswith(("http://", "https://"))


def is_function(spec: str) -> bool:
    """Whether a spec names a Python function, or its file alone, which `open_scorer` refuses."""
    return (":" in spec and not is_url(spec) and not Path(spec).is_dir()) or spec.endswith(".py")


def is_language_model(spec: str) -> bool:
    """Whether a spec names a language model: behind an endpoint, or by its directory, file or hub id."""
    if is_url(spec):
        return "#" in spec
    return not is_function(spec) and "#" not in spec and purpose_of(model_directory(spec)) == "language"


def open_scorer(name: str, spec: str, asking: Asking) -> ScoreJudge:
    """Open what scores one response at a time: a reward endpoint, a Python function, or a reward model.

    Raises: ValueError for an invalid spec.
    """
    if is_url(spec):
        return _reward_endpoint(name, spec, asking)
    if spec.endswith(".py"):
        raise ValueError(f"judge {name!r}: {spec} names no function; FILE.py:FUNCTION was expected, as in {spec}:score")
    return function_judge(name, spec) if is_function(spec) else reward_model_judge(name, spec)


def function_judge(name: str, spec: str, *, has_rows: bool = False) -> ScoreJudge:
    """Open a Python function, "MODULE:FUNCTION" or "FILE.py:FUNCTION". `has_rows` says whether the prompts have their
    rows, for a function that reads them. Raises: ValueError if there is none, or
    if it reads rows that are not there.
    """
    function = RewardFunction(function=spec)
    if function.reads_rows and not has_rows:
        raise ValueError(
            f"judge {name!r}: {spec} has a parameter `rows`, but these prompts come without their rows; a function of"
            " prompts and responses was expected"
        )
    about = {"description": f"the function {spec}", "sha256": file_hash(function.file)}
    return ScoreJudge(name, "function", spec, function.score, about, function.reads_rows)


def reward_model_judge(name: str, spec: str) -> ScoreJudge:
    """Open a reward model by directory or hub id; "#OBJECTIVE" selects one of its objectives. Raises: ValueError if
    there is none.
    """
    source, _, objective = spec.partition("#")
    folder = model_directory(source)
    score = reward_model_score(folder, _weights(folder, objective) if objective else {})
    about = {"description": f"the reward model {spec}", "sha256": model_hash(source)}
    return ScoreJudge(name, "reward model", spec, score, about)


def reward_judge(
    name: str,
    reward: ExternalReward | Path,
    objective_weights: Mapping[str, float],
    *,
    is_climbed: bool = True,
) -> ScoreJudge:
    """Open a run's reward as a judge: its reward model's folder, or a function or endpoint. `is_climbed` says whether
    the policies were trained to raise it; DPO's were not.
    """
    if isinstance(reward, RewardFunction):
        judge = function_judge(name, reward.function, has_rows=True)
    elif isinstance(reward, ExternalReward):
        about: dict[str, object] = {"description": f"the {reward.noun} {reward.source}"}
        judge = ScoreJudge(name, f"reward {reward.noun}", reward.source, reward.score, about, reward.reads_rows)
    else:
        details = {"description": "the run's reward model", "sha256": folder_hash(reward)}
        judge = ScoreJudge(name, "reward model", str(reward), reward_model_score(reward, objective_weights), details)
    return described_as_reward(judge, "is also the reward") if is_climbed else judge


def described_by_data(
    judge: ScoreJudge, judge_data: Collection[str] | None, data: Mapping[str, set[str]]
) -> ScoreJudge:
    """Returns a reward model, described by whose training data it shares. `data` has the hashes of what each policy
    learned from, by its title; `judge_data` those of the judge, None if they are not known.
    """
    relation = "what it learned from is not known, so it may share the policies' errors"
    if judge_data is not None:
        same = [title for title, hashes in data.items() if not hashes.isdisjoint(judge_data)]
        shares = f"it learned from the same comparisons as {listed(same)}" if same else ""
        relation = f"{shares}, so it shares their errors and is not independent" if same else ""
    return replace(judge, details={**judge.details, "relation": relation}) if relation else judge


def described_as_reward(judge: ScoreJudge, relation: str) -> ScoreJudge:
    """Returns the judge, described as unable to show whether the reward was gamed; `relation` says why."""
    description = f"{judge.details['description']}, which {relation}: whatever it overlooks stays unseen here"
    return replace(judge, details={**judge.details, "description": description, "is_reward": True})


def _weights(folder: Path, objective: str) -> dict[str, float]:
    """Give one of a reward model's objectives all the weight. Raises: ValueError if it has no such objective."""
    labels = labels_of(folder)
    if objective not in labels:
        raise ValueError(f"{folder} has no objective {objective!r}; it has {', '.join(labels)}")
    return {label: float(label == objective) for label in labels}


def _language_model(name: str, spec: str, judging: Judging) -> Judge:
    asker = judging.asking.asker(name, spec)
    return LanguageModelJudge(name, asker, read_template(judging.template), judging.max_tokens)


def _rubric_judge(name: str, spec: str, rubric: Path, asking: Asking) -> ScoreJudge:
    judge = JudgeReward(
        model=spec,
        rubric=Rubric.read(rubric),
        cache=str(asking.cache),
        timeout_seconds=asking.timeout_seconds,
        max_wait_seconds=asking.max_wait_seconds,
        parallel=asking.concurrency,
    )
    judge.check(())
    sha256 = {} if judge.is_remote else {"sha256": model_hash(spec)}
    about = {
        "description": f"{spec} by the rubric {rubric.name}",
        "rubric_sha256": json_hash(judge.rubric.model_dump()),
    }
    return ScoreJudge(name, BY_RUBRIC, spec, judge.score, about | sha256)


def _reward_endpoint(name: str, spec: str, asking: Asking) -> ScoreJudge:
    asker = asking.asker(name, f"{spec}#none")  # refuses invalid URLs and URLs with a password
    timeout, max_wait = asking.timeout_seconds, asking.max_wait_seconds
    endpoint = RemoteReward(url=asker.endpoint.url, timeout_seconds=timeout, max_wait_seconds=max_wait)

    def score(conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        if not asking.budget.take(1):
            raise ValueError(
                f"--budget {asking.budget.num_requests:,} requests is used up: a request to {spec} with"
                f" {len(responses):,} responses has not been sent. It stores no scores"
            )
        return endpoint.score(conversations, responses)

    return ScoreJudge(name, "reward endpoint", spec, score)


def _people(name: str, store_url: str, judging: Judging, num_policies: int) -> PeopleJudge:
    if not store_url:
        raise ValueError(f"judge {name!r}: {PEOPLE}STORE was expected, such as people:labels.sqlite")
    return people_judge(
        name,
        store_url,
        num_policies,
        judging.open_labels,
        batch=judging.batch,
        num_labelers=judging.num_labelers,
        seed=judging.seed,
    )


def people_judge(
    name: str, store_url: str, num_policies: int, open_labels: OpenLabels, *, batch: str, num_labelers: int, seed: int
) -> PeopleJudge:
    """Open a label store whose labelers judge. Raises: ValueError for too many policies or an invalid store."""
    if num_policies > MAX_RESPONSES:
        raise ValueError(
            f"judge {name!r}: {num_policies} policies; people rank at most {MAX_RESPONSES} responses at once"
        )
    with open_labels(store_url):
        pass  # anything wrong with it is reported before sampling starts
    return PeopleJudge(name, PEOPLE + without_password(store_url), store_url, batch, num_labelers, seed, open_labels)


def without_password(store_url: str) -> str:
    """Returns a URL with its password as "***"; a file's path, and a URL without a password, stay unchanged."""
    try:
        url = make_url(store_url)
    except ArgumentError:  # a file's path
        return store_url
    return store_url if url.password is None else url.render_as_string(hide_password=True)


def _gold(name: str, spec: str, judging: Judging, prompts: Sequence[Prompt]) -> Judge:
    try:
        world = judging.open_world(spec.removeprefix(GOLD))
    except ValueError as error:
        raise ValueError(f"judge {name!r}: {error}") from None
    for prompt in prompts:
        try:
            world.gold_scores([prompt.messages[-1]["content"]], [""])
        except ValueError as error:  # a prompt from another world
            raise ValueError(f"judge {name!r}: prompt {prompt.prompt_id!r}: {error}") from None
    return gold_judge(name, spec, world)


def gold_judge(name: str, spec: str, world: World) -> ScoreJudge:
    """Open a world's gold scorer."""

    def score(conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        asked = [messages[-1]["content"] for messages in conversations]
        return [Scored(value) for value in world.gold_scores(asked, list(responses))]

    return ScoreJudge(name, "gold", spec, score, {"description": world.describe(), "pass_mark": world.pass_mark})
