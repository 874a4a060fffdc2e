"""`heed export`: writes a trained model in another program's format."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from heed.commands.options import model_folder
from stages.progress import console, results_console

export_app = typer.Typer(no_args_is_help=True, help="Write a model for other programs.")


class WeightType(StrEnum):
    f16 = "f16"
    q8_0 = "q8_0"
    f32 = "f32"


@export_app.command("gguf")
def export_gguf(
    model: Annotated[
        Path, typer.Argument(help="A model directory or a stage's folder, such as runs/demo/ppo, or a hub id.")
    ],
    output: Annotated[Path, typer.Argument(help="The .gguf file to write; it must not exist.")],
    kind: Annotated[
        WeightType,
        typer.Option("--type", help="Type of the weights: f16, q8_0 (half the size, rounded to 8 bits) or f32."),
    ] = WeightType.f16,
) -> None:
    """Write a language model with its tokenizer and chat template as a GGUF file, which llama.cpp and Ollama run.

    A model trained with LoRA is written with its adapters merged.
    """
    from lm.gguf_files import export_gguf as export
    from lm.weights import CONFIG, read_config

    if output.exists():
        raise ValueError(f"{output} exists already; the name of a new file was expected")
    if output.suffix != ".gguf":
        raise ValueError(f"{output}: a name that ends in .gguf was expected")
    folder = model / "model" if (model / "model" / CONFIG).is_file() else model_folder(model)
    with console.status(f"writing {output}"):
        context = export(folder, output, kind.value)
    if context < read_config(folder, "language")[0].max_position_embeddings:
        console.print(f"its context is cut to its sliding window of {context} tokens, which llama.cpp would ignore")
    results_console().print(f"{output}: {folder} in {kind.value}", soft_wrap=True)
