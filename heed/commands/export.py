"""`heed export` writes a trained model in another program's format; `heed merge-adapter` makes a LoRA adapter from
elsewhere into a model that every stage takes (docs/lora.md)."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.options import model_folder
from stages.progress import console, results_console

if TYPE_CHECKING:
    from lm.adapters import AdapterFolder
    from lm.tokenizer import Tokenizer

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
    results_console().print(f"{output}: {model} in {kind.value}", soft_wrap=True)


def merge_adapter(
    adapter: Annotated[str, typer.Argument(help="An adapter in PEFT's layout: a folder or a hub id.")],
    output: Annotated[Path, typer.Argument(help="The model directory to write; it must not exist.")],
    base: Annotated[
        str, typer.Option(help="The model that was adapted (default: the one that the adapter names).")
    ] = "",
) -> None:
    """Add a LoRA adapter to its model, and write the result as a model directory.

    Every stage takes it as init_from or as a reward model; transformers and vLLM load it.
    """
    from files.atomic import atomic_folder
    from lm.adapters import AdapterFolder, adapted_folder
    from lm.hub import ADAPTER_CONFIG, adapter_directory, model_directory
    from lm.lora import merged
    from lm.source import on_meta
    from lm.weights import save_model

    if output.exists():
        raise ValueError(f"{output} exists already; the name of a new folder was expected")
    with console.status("reading the adapter"):
        folder = AdapterFolder(adapter_directory(adapter))
        named = folder.config.base_model_name_or_path
        if not base and not named:
            raise ValueError(f"{folder.folder}: the adapter names no model; --base MODEL was expected")
        try:
            base_folder = model_directory(base) if base else model_directory(str(named), folder.config.revision)
        except ValueError as error:
            if base:
                raise
            path = folder.folder / ADAPTER_CONFIG
            raise ValueError(f"{path} names {named} as the model; --base MODEL can name another. {error}") from None
        _refuse_merged(base_folder, folder)
        source = adapted_folder(base_folder, folder)
        network, plain = on_meta(source.build), on_meta(source.frozen.build)
        tokenizer = _tokenizer(folder.folder, base_folder, plain.config.vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    with console.status(f"writing {output}"), atomic_folder(output) as temporary:
        save_model(temporary, plain, merged(network, source.tensors()), tokenizer)
    if base and named and base != named:
        console.print(f"warning: {adapter} names {named} as its model, not {base}", soft_wrap=True)
    results_console().print(f"{output}: {base or named} with the adapter {adapter}", soft_wrap=True)


def _refuse_merged(base: Path, adapter: "AdapterFolder") -> None:
    """Raise ValueError for a base that already contains this adapter, because a run wrote both together."""
    from files.hashes import file_hash
    from lm.adapters import ADAPTER, ADAPTER_WEIGHTS

    written = base.parent / ADAPTER / ADAPTER_WEIGHTS
    if written.is_file() and file_hash(written) == file_hash(adapter.weights):
        named = adapter.config.base_model_name_or_path
        raise ValueError(
            f"{base} has this adapter merged already; the model that it was trained on ({named}) was expected"
        )


def _tokenizer(adapter: Path, base: Path, num_embeddings: int) -> "Tokenizer":
    """Loads the adapter's tokenizer if it has one (it may have been trained on another template), else the base's.

    Raises: ValueError for a token without an embedding, and as `Tokenizer.load`.
    """
    from lm.tokenizer import Tokenizer

    folder = adapter if (adapter / "tokenizer.json").is_file() else base
    tokenizer = Tokenizer.load(folder, model_folder=base)
    if tokenizer.vocab_size > num_embeddings:
        raise ValueError(
            f"{folder / 'tokenizer.json'} has {tokenizer.vocab_size} tokens; at most {num_embeddings} were expected, of"
            f" which {base} has embeddings"
        )
    return tokenizer
