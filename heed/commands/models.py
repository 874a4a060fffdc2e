"""`heed export` writes a trained model in another program's format; `heed merge-adapter` makes a LoRA adapter from
elsewhere into a model that every stage takes (docs/lora.md); `heed inspect` shows a model's shape in numbers.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from heed.commands.options import model_folder
from stages.progress import console, results_console

if TYPE_CHECKING:
    from lm.adapters import AdapterFolder
    from lm.config import ModelConfig
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


# ---- heed inspect ----


_LOOKED_UP = ("embedding.weight", "positions.weight", "token_types.weight")


def inspect(
    shape: Annotated[
        Path, typer.Argument(help="A model directory or .gguf file, or a TOML file with a model's shape or a job.")
    ],
) -> None:
    """Show parameters by part, FLOPs per token and key-value cache per token."""
    results_console().print(describe(read_shape(shape)))


def read_shape(path: Path) -> "ModelConfig":
    """Returns the shape of a model, of a file such as configs/models/gpt3-175b.toml, or of a job.

    Raises: ValueError naming file and field.
    """
    from heed.jobs.job_file import load_job, read_toml, validated
    from lm.config import ModelConfig
    from lm.hub import is_gguf
    from lm.weights import purpose_of, read_config

    if path.is_dir() or is_gguf(str(path)):
        folder = model_folder(path)
        return read_config(folder, purpose_of(folder))[0]
    values = read_toml(path, str(path))
    if "name" in values:
        model = load_job(path, opens_models=False).model
        if model is None:
            raise ValueError(f"{path}: the job has no [model] and starts from none")
        return model
    return validated(ModelConfig, values.get("model", values), lambda _key: str(path))


def describe(config: "ModelConfig") -> Table:
    """Returns a table of parameters by part, and of costs per token."""
    from lm.cache import state_bytes
    from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token, parameter_table

    table = Table(box=None, pad_edge=False)
    for column in ("part", "shape", "tensors", "parameters"):
        table.add_column(column, justify="left" if column == "part" else "right", overflow="fold")
    parts = parameter_table(config)
    for part in parts:
        shape = " x ".join(f"{size:,}" for size in part.shape)
        table.add_row(part.name, shape, str(part.num_tensors), f"{part.num_parameters:,}")
    total = sum(part.num_parameters for part in parts)
    lookups = sum(part.num_parameters for part in parts if part.name.endswith(_LOOKED_UP))
    table.add_section()
    table.add_row("all", "", str(sum(part.num_tensors for part in parts)), f"{total:,}")
    table.add_row("without embeddings", "", "", f"{total - lookups:,}")
    table.add_section()
    for context in (1, config.max_position_embeddings):
        label = f"FLOPs per token, forward, {context:,} in context"
        table.add_row(label, "", "", f"{flops_per_token(config, context):,}")
    if config.kind == "encoder-decoder":
        label = f"FLOPs per source token, of {config.max_position_embeddings:,}"
        table.add_row(label, "", "", f"{flops_per_source_token(config):,}")
    if config.kind != "encoder":
        table.add_row("key-value cache, bytes per token, bf16", "", "", f"{cache_bytes_per_token(config):,}")
    if config.num_linear_layers:
        table.add_row("states of linear layers, bytes per sequence, bf16", "", "", f"{state_bytes(config):,}")
    return table
