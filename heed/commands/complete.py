"""`heed complete`: continue a text as it stands, score it, fill in its masks, or show its tokens. `heed classify`: what
a classifier says of texts.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from heed.commands.chat import Streamed
from heed.commands.options import (
    Beams,
    Greedy,
    Temperature,
    TopK,
    TopP,
    model_folder,
    read_choice,
    refuse_run_folder,
    typed,
)
from stages.progress import console, results_console

if TYPE_CHECKING:
    from classify.predict import TextClassifier
    from lm.encoder import EncoderDecoder
    from lm.model import LanguageModel
    from lm.sampling import Choice
    from lm.tokenizer import Tokenizer


NUM_WORDS = 5  # per mask
LN_10 = math.log(10)


Model = Annotated[
    str, typer.Argument(help="A model directory, such as runs/demo/pretrain/model, a .gguf file, or a hub id.")
]
TextOrDash = Annotated[
    str, typer.Argument(help="The text; - (or nothing) reads standard input, without its last line end.")
]
Length = Annotated[
    int, typer.Option(min=0, help="Maximum length of a continuation, in tokens; 0 only scores, with --logprobs.")
]


def complete(
    context: typer.Context,
    model: Model,
    text: TextOrDash = "-",
    greedy: Greedy = False,
    beams: Beams = 0,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Number of continuations to sample.")] = 1,
    max_new_tokens: Length = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Show each token's log-probability, and the joint probability.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Only show how the text is cut into tokens; reads no weights.")
    ] = False,
) -> None:
    """Continue a text as it stands, without a chat template.

    A decoder continues the text, and an encoder-decoder writes the output for it. An encoder fills in each [MASK] with
    the likeliest words. With --logprobs, sentences are scored: log-probabilities are the model's own, in nats, at
    temperature 1.
    """
    given = [option for option in typed(context) if option != "--tokens"]
    if tokens and given:
        raise ValueError(f"--tokens with {', '.join(given)}: --tokens alone was expected, since nothing is computed")
    choice = read_choice(
        context,
        greedy=greedy,
        beams=beams,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        several=f"--samples {samples}" if samples > 1 else "",
    )
    if max_new_tokens == 0 and (not logprobs or set(given) - {"--max-new-tokens", "--logprobs"}):
        raise ValueError(
            "--max-new-tokens 0 writes nothing; only --logprobs was expected with it, which scores the text"
        )
    asked = Asked.of(model, _typed_text() if text == "-" else text, has_weights=not tokens)
    if tokens:
        show_tokens(asked)
    elif asked.purpose == "masked":
        if given:
            raise ValueError(
                f"{', '.join(given)}: {model} is an encoder, which fills in [MASK] and writes no text; a decoder or an"
                " encoder-decoder was expected"
            )
        fill_in(asked)
    else:
        write(asked, choice, beams, samples, max_new_tokens, seed, logprobs)


def _typed_text() -> str:
    if sys.stdin.isatty():
        console.print("type the text; Ctrl-D on a line of its own ends it")
    return sys.stdin.read().removesuffix("\n")


@dataclass(frozen=True)
class Asked:
    """A text for a model. `purpose` is the model's (`lm.weights.purpose_of`)."""

    name: str
    folder: Path
    purpose: str
    tokenizer: "Tokenizer"
    text: str
    tokens: Sequence[int]

    @classmethod
    def of(cls, name: str, text: str, *, has_weights: bool) -> "Asked":
        """Raises: ValueError for an empty text, for a folder without a tokenizer, and with `has_weights` for a model
        that neither writes text nor fills in masks.
        """
        from lm.hub import model_directory, shape_and_tokenizer
        from lm.tokenizer import Tokenizer
        from lm.weights import purpose_of

        if not text:
            raise ValueError("TEXT is empty; at least one character was expected")
        folder = model_directory(name) if has_weights else shape_and_tokenizer(name)
        refuse_run_folder(folder)
        purpose = purpose_of(folder) if has_weights or (folder / "config.json").is_file() else "language"
        if has_weights and purpose not in ("language", "translate", "masked"):
            raise ValueError(
                f"{name} scores or labels texts; a decoder, an encoder-decoder, or an encoder that fills in masks was"
                " expected"
            )
        tokenizer = Tokenizer.load(folder)
        takes_masks = purpose == "masked" or (purpose == "translate" and tokenizer.mask)
        tokens = tokenizer.encode_masked(text) if takes_masks else tokenizer.encode_plain([text])[0]
        return cls(name, folder, purpose, tokenizer, text, tokens)

    @property
    def read(self) -> list[int]:
        """What the model reads: the start token and the text, as in pretraining; all but decoders also its end."""
        tokenizer = self.tokenizer
        if self.purpose in ("language", "score"):
            return [tokenizer.start_id, *self.tokens]
        has_start = self.purpose != "translate" or tokenizer.start
        return [*([tokenizer.start_id] if has_start else []), *self.tokens, tokenizer.end_id]

    def require_room(self, most: int) -> None:
        """Raises: ValueError if the model reads more tokens than `most`."""
        if len(self.read) > most:
            raise ValueError(
                f"TEXT has {len(self.tokens)} tokens, and {self.name} reads at most"
                f" {most - len(self.read) + len(self.tokens)}"
            )


def write(
    asked: Asked, choice: "Choice", beams: int, num_samples: int, max_new_tokens: int, seed: int, logprobs: bool
) -> None:
    """Prints continuations of the text, or an encoder-decoder's outputs for it."""
    from files.hashes import derive_seed
    from lm.generation import generate, never, prompts_and_sources
    from lm.search import beam_search
    from lm.weights import load_writer, read_config

    is_decoder, most = asked.purpose == "language", read_config(asked.folder, asked.purpose)[0].max_position_embeddings
    if not is_decoder and not max_new_tokens:
        raise ValueError(
            f"--max-new-tokens 0: {asked.name} is an encoder-decoder, which gives a probability to its output and not"
            " to what it reads; a length above 0 was expected"
        )
    asked.require_room(most - (is_decoder and max_new_tokens > 0))
    room = most - (len(asked.read) if is_decoder else 1)
    if room < max_new_tokens:
        console.print(f"--max-new-tokens {max_new_tokens} is reduced to {room}, the rest of the context")
        max_new_tokens = room
    with console.status("loading"):
        model = load_writer(asked.folder)
    if not max_new_tokens:
        show_logprobs(asked, model, [])
        return
    printed = _Printed(asked)
    start_id, end_ids = asked.tokenizer.target_start_id, asked.tokenizer.end_ids
    if beams:
        hypotheses = beam_search(
            model, asked.read, num_beams=beams, max_new_tokens=max_new_tokens, start_id=start_id, end_ids=end_ids
        )
        titles = [f"score {one.score:.4f}, log p {one.logprob:.4f}" for one in hypotheses]
        responses = [one.response for one in hypotheses]
    else:
        prompts, sources = prompts_and_sources(model, [asked.read] * num_samples, start_id)
        seeds = [derive_seed(seed, "complete", number) for number in range(num_samples)]
        stop = printed.stream if num_samples == 1 and sys.stdout.isatty() else never
        found = generate(
            model,
            prompts,
            sources=sources,
            max_new_tokens=max_new_tokens,
            end_ids=end_ids,
            choice=choice,
            seeds=seeds,
            stop=stop,
        )
        titles, responses = [f"sample {number}" for number in range(1, num_samples + 1)], found.responses
    for place, (title, response) in enumerate(zip(titles, responses, strict=True)):
        if beams or num_samples > 1:
            print(f"--- {title}")
        printed.whole(response)
        if logprobs:
            show_logprobs(asked, model, response, has_text=place == 0)


class _Printed:
    """Prints a decoder's text with its continuation, or an encoder-decoder's output."""

    def __init__(self, asked: Asked) -> None:
        self._decode, self._streamed = asked.tokenizer.decode, Streamed()
        self._before = list(asked.tokens) if asked.purpose == "language" else []
        self._text = asked.text if self._before else ""

    def _with_text(self, response: Sequence[int]) -> str:
        # Some vocabularies drop the space before the first token that they decode.
        before, whole = self._decode(self._before), self._decode([*self._before, *response])
        return self._text + (whole.removeprefix(before) if whole.startswith(before) else self._decode(response))

    def stream(self, response: Sequence[int]) -> bool:
        """Prints what is new, as a condition of `generate` that never ends a response."""
        self._streamed.show(self._with_text(response))
        return False

    def whole(self, response: Sequence[int]) -> None:
        self._streamed.finish(self._with_text(response))
        self._streamed = Streamed()


def show_logprobs(
    asked: Asked, model: "LanguageModel | EncoderDecoder", response: Sequence[int], *, has_text: bool = True
) -> None:
    """Prints the log-probability of every token given those before it, and their sums: the chain rule,
    log p(t_1 ... t_N) = Σ log p(t_n | t_1 ... t_n-1). The text's own tokens are listed if `has_text`.
    """
    from lm.encoder import EncoderDecoder
    from lm.sequence_logprobs import output_logprobs, response_logprobs

    table, tokenizer = _table("part", "token", "id", "log p", "p"), asked.tokenizer
    if isinstance(model, EncoderDecoder):
        scored = [
            ("output", response, output_logprobs(model, asked.read, response, tokenizer.target_start_id).tolist())
        ]
    else:
        start, *text = asked.read
        numbers = response_logprobs(model, [[start]], [[*text, *response]], 1.0)[0].tolist()
        scored = [("text", text, numbers[: len(text)]), ("continuation", response, numbers[len(text) :])]
        if has_text:
            table.add_row("start", _shown(tokenizer, start), str(start), "", "")
    for part, tokens, numbers in scored:
        for token, number in zip(tokens, numbers, strict=True):
            if has_text or part != "text":
                table.add_row(part, _shown(tokenizer, token), str(token), f"{number:.4f}", probability(number))
    table.add_section()
    sums = {f"{part}, all": math.fsum(numbers) for part, tokens, numbers in scored if tokens}
    if len(sums) > 1:
        sums["both, all"] = math.fsum(sums.values())
    for name, total in sums.items():
        table.add_row(name, "", "", f"{total:.4f}", probability(total))
    results_console().print(table)


def probability(logprob: float) -> str:
    """Returns exp(logprob) with four digits, also where a float would be 0."""
    if logprob > -700:
        return f"{math.exp(logprob):.4g}"
    exponent = math.floor(logprob / LN_10)
    return f"{math.exp(logprob - exponent * LN_10):.3f}e{exponent}"


def fill_in(asked: Asked) -> None:
    """Prints the likeliest words for each mask. All are predicted at once, each without knowing the others' words.

    Raises: ValueError for a text without a mask, and for one that the model cannot read as a whole.
    """
    import torch

    from lm.encoder import MaskedLanguageModel
    from lm.source import load_for_inference
    from lm.weights import ModelFolder, read_config

    tokenizer, mask_id = asked.tokenizer, asked.tokenizer.mask_id
    if mask_id not in asked.tokens:
        raise ValueError(
            f"TEXT has no [MASK]: {asked.name} is an encoder, which fills in masks; [MASK]"
            + (f" or {tokenizer.mask}" if tokenizer.mask != "[MASK]" else "")
            + " was expected in place of each hidden word"
        )
    asked.require_room(read_config(asked.folder, asked.purpose)[0].max_position_embeddings)
    with console.status("loading"):
        model = load_for_inference(ModelFolder(asked.folder, MaskedLanguageModel))
    tokens_BT = torch.tensor([asked.read], device=model.head.weight.device)
    with torch.inference_mode():
        logprobs_CV = torch.log_softmax(model(tokens_BT, selected_BT=tokens_BT == mask_id).float(), dim=-1)
    table = _table("mask", "word", "log p", "p")
    *before, _ = tokenizer.split_at_masks(asked.text)
    for number, (part, logprobs_V) in enumerate(zip(before, logprobs_CV, strict=True), 1):
        for token, word in likeliest_words(tokenizer, part, logprobs_V.argsort(descending=True).tolist()):
            logprob = float(logprobs_V[token])
            table.add_row(str(number), Text(word), f"{logprob:.4f}", probability(logprob))
    results_console().print(table)


def likeliest_words(tokenizer: "Tokenizer", before: str, ranked: Sequence[int]) -> list[tuple[int, str]]:
    """Returns the likeliest few tokens that are whole words after the text `before`; if there are none, the likeliest
    few with a letter or a digit.

    A token is a whole word if the text followed by the word is cut into the text's own tokens and this one.
    """
    before = before[before.rstrip().rfind(" ") + 1 :]  # cutting all of a long text once per word would take long
    left = tokenizer.encode_plain([before.removesuffix(" ")])[0]
    words, pieces = list[tuple[int, str]](), list[tuple[int, str]]()
    for token in ranked:
        word = tokenizer.decode([token]).strip().removeprefix("##")  # WordPiece's mark of a continuation
        if not any(map(str.isalnum, word)):
            continue
        if len(pieces) < NUM_WORDS:
            pieces.append((token, word))
        if tokenizer.encode_plain([before + word])[0] == [*left, token]:
            words.append((token, word))
        if len(words) == NUM_WORDS:
            break
    return words or pieces


def show_tokens(asked: Asked) -> None:
    """Prints what the model reads, token by token, and how many of them the text takes."""
    table = _table("id", "token")
    for token in asked.read:
        table.add_row(str(token), _shown(asked.tokenizer, token))
    results_console().print(table)
    num_tokens, num_words, num_characters = len(asked.tokens), len(asked.text.split()), len(asked.text)
    added = len(asked.read) - num_tokens
    rates = [f"{num_tokens / num_words:.2f} per word"] if num_words else []
    rates.append(f"{num_tokens / num_characters:.2f} per character")
    print(
        f"{num_tokens} tokens of text and {added} around it; {num_words} words, {num_characters} characters,"
        f" {len(asked.text.encode())} bytes: {', '.join(rates)}"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify = "left" if column in ("part", "token", "word") else "right"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _shown(tokenizer: "Tokenizer", token: int) -> Text:
    """Returns a token as Python writes a string, or bytes for a part of a character; special tokens by their names."""
    if tokenizer.is_special(token):
        return Text(f"{tokenizer.token_text(token)} (special)")
    return Text(repr(tokenizer.spelled(token)))


# ---- heed classify ----


def classify(
    model: Annotated[Path, typer.Argument(help="A classifier: its directory, such as runs/classify/classify/model.")],
    texts: Annotated[list[str], typer.Argument(help="Texts to label, to find entities in, or to answer from.")],
    pair: Annotated[str, typer.Option(help="Second text of a pair, for a classifier of pairs.")] = "",
    question: Annotated[str, typer.Option(help="Question to answer from each text.")] = "",
) -> None:
    """Print what a classifier says of each text: labels with probabilities, entities, or the answer to --question.

    Each answer comes with its margin over no answer, in nats. Below `no_answer_margin` of the model's job (default: 0),
    the text has no answer.
    """
    with console.status("loading"):
        from classify.predict import TextClassifier

        refuse_run_folder(model)
        classifier = TextClassifier.load(model_folder(model))
    if (classifier.task == "span") != bool(question):
        wanted = "a question, with --question, was" if classifier.task == "span" else "no --question was"
        raise ValueError(f"{model} is a classifier of {classifier.task}s; {wanted} expected")
    if pair and classifier.task != "sequence":
        raise ValueError(f"{model} is a classifier of {classifier.task}s; no --pair was expected")
    for text in texts:
        if len(texts) > 1:
            typer.echo(text)
        for line in _lines(classifier, text, pair, question):
            typer.echo(line)


def _lines(classifier: "TextClassifier", text: str, pair: str, question: str) -> list[str]:
    if classifier.task == "span":
        answer, margin = classifier.answer(question, text)
        has_answer = margin > classifier.reading.no_answer_margin
        return [f"{margin:+.2f}  {answer}" if has_answer else f"{margin:+.2f}  no answer (the best: {answer})"]
    if classifier.task == "token":
        return [f"{kind}  {words}" for kind, words in classifier.entities(text)] or ["no entity"]
    return [f"{share:.3f}  {label}" for label, share in classifier.probabilities(text, pair).items()]
