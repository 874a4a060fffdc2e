"""`heed merge-adapter`: a LoRA adapter made elsewhere, as a model that every stage takes (docs/lora.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages.progress import console, results_console

if TYPE_CHECKING:
    from lm.adapters import AdapterFolder
    from lm.source import ModelSource


def merge_adapter(
    adapter: Annotated[str, typer.Argument(help="An adapter in PEFT's layout: a folder or a hub id.")],
    output: Annotated[Path, typer.Argument(help="The model directory to write; it must not exist.")],
    base: Annotated[
        str, typer.Option(help="The model that was adapted (default: the one that the adapter names).")
    ] = "",
    end_token: Annotated[str, typer.Option(help="End-of-sequence token (default: the tokenizer's).")] = "",
    pad_token: Annotated[str, typer.Option(help="Padding token, for a tokenizer that names none.")] = "",
) -> None:
    """Add a LoRA adapter to its model, and write the result as a model directory.

    Every stage takes it as init_from or reward_from; transformers and vLLM load it.
    """
    from files.atomic import atomic_folder
    from lm.adapters import AdapterFolder, FromAdapter
    from lm.hub import adapter_directory, model_directory
    from lm.lora import merged
    from lm.source import on_meta
    from lm.tokenizer import Tokenizer
    from lm.weights import save_model

    if output.exists():
        raise ValueError(f"{output} exists already; the name of a new folder was expected")
    with console.status("reading the adapter"):
        folder = AdapterFolder(adapter_directory(adapter))
        name = base or folder.base
        if not name:
            raise ValueError(f"{folder.folder}: the adapter names no model; --base MODEL was expected")
        frozen = _frozen(model_directory(name), folder)
        source = FromAdapter(frozen, folder.folder)
        network, plain = on_meta(source.build), on_meta(frozen.build)
        # Many adapters are saved with the tokenizer whose template they were trained on.
        has_tokenizer = (folder.folder / "tokenizer.json").is_file()
        tokenizer = Tokenizer.load(
            folder.folder if has_tokenizer else model_directory(name), end=end_token, pad=pad_token
        )
    with console.status(f"writing {output}"), atomic_folder(output) as temporary:
        save_model(temporary, plain, merged(network, source.tensors()), tokenizer)
    results_console().print(f"{output}: {name} with the adapter {adapter}", soft_wrap=True)


def _frozen(base: Path, adapter: "AdapterFolder") -> "ModelSource[Any]":
    """The model that was adapted; a classifier's adapter on a language model brings the head."""
    from lm.model import SCORE
    from lm.weights import any_folder
    from reward.training import network_source

    if adapter.config.get("task_type") != "SEQ_CLS":
        return any_folder(base)
    heads = [shape[0] for name, shape in adapter.shapes.items() if name in ("score.weight", "classifier.weight")]
    labels = [f"LABEL_{number}" for number in range(max(heads, default=1))]
    return network_source(base, 0.0, 0, labels if len(labels) > 1 else (SCORE,))
