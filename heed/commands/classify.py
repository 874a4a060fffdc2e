"""`heed classify`: what a classifier says of texts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.options import model_folder, refuse_run_folder
from stages.progress import console

if TYPE_CHECKING:
    from classify.predict import TextClassifier


def classify(
    model: Annotated[Path, typer.Argument(help="A classifier: its directory, such as runs/classify/classify/model.")],
    texts: Annotated[list[str], typer.Argument(help="Texts to label, to find entities in, or to answer from.")],
    pair: Annotated[str, typer.Option(help="Second text of a pair, for a classifier of pairs.")] = "",
    question: Annotated[str, typer.Option(help="Question to answer from each text.")] = "",
) -> None:
    """Print what a classifier says of each text: labels with probabilities, entities, or the answer to --question.

    Each answer comes with its margin over no answer, in nats; below 0, the text has no answer.
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
        return [f"{margin:+.2f}  {answer}" if margin > 0 else f"{margin:+.2f}  no answer (the best: {answer})"]
    if classifier.task == "token":
        return [f"{kind}  {words}" for kind, words in classifier.entities(text)] or ["no entity"]
    return [f"{share:.3f}  {label}" for label, share in classifier.probabilities(text, pair).items()]
