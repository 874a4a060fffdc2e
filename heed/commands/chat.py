"""`heed chat`: talk to a model at the terminal."""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from heed.commands.options import (
    Greedy,
    Temperature,
    TopK,
    TopP,
    Weights,
    read_choice,
    read_weights,
    refuse_run_folder,
)
from stages.progress import console

if TYPE_CHECKING:
    from lm.encoder import EncoderDecoder
    from lm.model import LanguageModel
    from lm.sampling import Choice
    from lm.search import Scorer
    from lm.tokenizer import Messages, Tokenizer
    from reward.scoring import RewardModel


HELP = """/help   show this
/reset  start over, as an empty line does
/exit   leave, as `/quit`, `exit`, `quit` and the end of input do (Ctrl-D)
Ctrl-C stops a response; at the prompt it leaves.
The arrow keys bring back earlier lines, also of earlier sessions; they are kept in {history}."""
HISTORY_LINES = 1000


def chat(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A model directory, such as runs/demo/ppo/model, a .gguf file, or a hub id.")
    ],
    system: Annotated[str, typer.Option(help="The system's turn, with which each conversation starts.")] = "",
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    greedy: Greedy = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a response, in tokens.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    best_of: Annotated[
        int, typer.Option(min=1, help="Number of responses to sample; the one that --judge scores highest is shown.")
    ] = 1,
    judge: Annotated[str, typer.Option(help="A reward model: its directory or hub id.")] = "",
    weight: Weights = None,
) -> None:
    """Talk to a model. Each line is a turn; /help lists commands.

    Lines typed at a terminal are kept for the arrow keys in ~/.local/state/heed/chat_history (or below
    $XDG_STATE_HOME), which only you can read.
    """
    choice = read_choice(
        context,
        greedy=greedy,
        beams=0,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        several=f"--best-of {best_of}" if best_of > 1 else "",
    )
    if (best_of > 1) != bool(judge):
        raise ValueError(
            f"--best-of is {best_of}, --judge {judge!r}; expected either several responses and a reward model to"
            " choose among them, or neither"
        )
    if weight and not judge:
        raise ValueError("--weight applies to the objectives of --judge, which is missing")
    with console.status("loading"):
        speaker = Speaker.load(
            model,
            choice=choice,
            max_new_tokens=max_new_tokens,
            seed=seed,
            num_samples=best_of,
            judge=judge,
            weights=read_weights(weight),
        )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        console.print(f"{model}: type a message; /help lists commands", markup=False)
    _converse(speaker, system, is_terminal)


def _converse(speaker: "Speaker", system: str, is_terminal: bool) -> None:
    """Answers each line of standard input on standard output, with the conversation so far as context."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    with closing(_lines(is_terminal)) as lines:
        for line in lines:
            command = line.strip()
            if command in ("/exit", "/quit") or (is_terminal and command in ("exit", "quit")):
                return
            if command == "/help":
                print(HELP.format(history=_history_file()))
            elif command in ("", "/reset"):
                messages = list(start)
            elif re.fullmatch("/[a-z]+", command):
                console.print(f"{command}: no such command; /help lists them", markup=False)
            else:
                messages = (
                    _answer(speaker, [*messages, {"role": "user", "content": command}], line, is_terminal) or start
                )


def _lines(is_terminal: bool) -> Generator[str]:
    """Yields lines of standard input with their line ends; on a terminal, with line editing and history (readline)."""
    if not is_terminal:
        yield from iter(sys.stdin.readline, "")
        return
    with _history():
        while True:
            try:
                yield input("> ") + "\n"
            except (EOFError, KeyboardInterrupt):
                print()
                return


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "heed" / "chat_history"


@contextmanager
def _history() -> Iterator[None]:
    """Turns on line editing and history if Python has readline. Without a writable home there is no history."""
    if not importlib.util.find_spec("readline"):  # Windows has none
        yield
        return
    import readline

    path = _history_file()
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        umask = os.umask(0o077)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
        os.umask(umask)


def _answer(speaker: "Speaker", messages: list[dict[str, str]], line: str, is_terminal: bool) -> list[dict[str, str]]:
    """Prints the response, on a terminal as it is sampled. Returns the conversation that the model read, plus the
    response; [] if even the last turn is too long.
    """
    kept = speaker.fitting(messages)
    if not kept:
        shortest = [message for message in messages[:1] if message["role"] == "system"] + messages[-1:]
        print(f"(that is {speaker.num_tokens(shortest)} tokens; the model reads at most {speaker.context - 1})")
        return []
    streamed = Streamed()
    try:
        answer, scores = speaker.respond(kept, line, streamed.show if is_terminal else None)
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print(" (stopped)")
        return [*kept, {"role": "assistant", "content": streamed.shown}]
    streamed.finish(answer or ("(an empty response)" if is_terminal else ""))
    if len(scores) > 1:
        listed = ", ".join(f"{score:.2f}" for score in sorted(scores, reverse=True))
        console.print(f"scores: {listed}", style="dim")
    return [*kept, {"role": "assistant", "content": answer}]


class Streamed:
    """Prints a text that grows, and never half of a character."""

    def __init__(self) -> None:
        self.shown = ""

    def show(self, text: str) -> None:
        """Print what was added since the last call, unless a character is still incomplete."""
        if text.startswith(self.shown) and not text.endswith("\ufffd"):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text

    def finish(self, text: str) -> None:
        """Print the rest of the whole text, or all of it if it does not begin with what was shown."""
        print(text[len(self.shown) :] if text.startswith(self.shown) else f"\n{text}", flush=True)


@dataclass(frozen=True)
class Speaker:
    """A model that answers with whichever of `num_samples` responses the reward model scores highest, or without a
    reward model, with the first. It reads at most `context` tokens.
    """

    tokenizer: "Tokenizer"
    model: "LanguageModel | EncoderDecoder"
    reward_model: "RewardModel | None"
    context: int
    choice: "Choice"
    max_new_tokens: int
    seed: int
    num_samples: int

    @classmethod
    def load(
        cls,
        name: str,
        *,
        choice: "Choice",
        max_new_tokens: int,
        seed: int,
        num_samples: int,
        judge: str,
        weights: Mapping[str, float],
    ) -> Self:
        """Loads a model and, unless `judge` is "", the reward model of that name with weights of its objectives.

        Raises: ValueError for a directory without a generative model, and for weights that do not fit the judge.
        """
        from lm.hub import model_directory
        from lm.tokenizer import Tokenizer
        from lm.weights import load_writer
        from reward.scoring import RewardModel

        folder = model_directory(name)
        refuse_run_folder(folder)
        tokenizer, model = Tokenizer.load(folder), load_writer(folder)
        context = model.config.max_position_embeddings
        reward_model = RewardModel.load(model_directory(judge), weights) if judge else None
        if reward_model is not None:  # it also reads the end token after a truncated response
            context = min(context, reward_model.network.config.max_position_embeddings - 1)
        return cls(tokenizer, model, reward_model, context, choice, max_new_tokens, seed, num_samples)

    def num_tokens(self, messages: "Messages") -> int:
        return len(self.tokenizer.encode_prompt(messages))

    def fitting(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Returns the conversation, shortened by its oldest turns if needed; the system's turn stays. [] if the last
        turn is too long.
        """
        system = messages[:1] if messages[0]["role"] == "system" else []
        for first in range(len(system), len(messages), 2):
            kept = [*system, *messages[first:]]
            if self.num_tokens(kept) < self.context:
                return kept
        return []

    def respond(
        self, messages: list[dict[str, str]], line: str, show: Callable[[str], None] | None
    ) -> tuple[str, Sequence[float]]:
        """Returns the response, and the scores of all. `show` receives the text so far if only one is sampled."""
        from files.hashes import derive_seed
        from lm.encoder import EncoderDecoder
        from lm.generation import never
        from lm.search import best_of

        prompt = self.tokenizer.encode_prompt(messages)

        def stream(response: Sequence[int]) -> bool:
            assert show is not None
            show(self.tokenizer.decode(response).strip())
            return False

        num_turns = sum(message["role"] != "system" for message in messages)
        room = self.context - (1 if isinstance(self.model, EncoderDecoder) else len(prompt))
        (best,) = best_of(
            self.model,
            [prompt],
            _no_preference if self.reward_model is None else _scorer(self.reward_model, self.tokenizer, messages),
            max_new_tokens=min(self.max_new_tokens, room),
            start_id=self.tokenizer.target_start_id,
            end_ids=self.tokenizer.end_ids,
            choice=self.choice,
            seeds=[[derive_seed(self.seed, "chat", num_turns, line, number) for number in range(self.num_samples)]],
            stop=stream if show is not None and self.num_samples == 1 else never,
        )
        return self.tokenizer.decode(best.response).strip(), best.scores


def _no_preference(_prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
    return [0.0] * len(responses)


def _scorer(judge: "RewardModel", tokenizer: "Tokenizer", messages: "Messages") -> "Scorer":
    def score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequence[float]:
        num = len(responses)
        scores = judge.score(tokenizer, [messages] * num, [prompt] * num, responses)
        if any(map(math.isnan, scores)):
            most = judge.network.config.max_position_embeddings
            raise ValueError(f"the judge reads at most {most} tokens; the conversation has more")
        return scores

    return score
