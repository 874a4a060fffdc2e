"""Model directories by name: a local folder, a GGUF file, or a model from the Hugging Face hub, downloaded once per
machine.
"""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from files.fields import no_such_file
from files.hashes import folder_hash, unchanged_hash
from files.rows import hub_reason
from lm.progress import note_progress

# Only safetensors weights: a pickled file can run arbitrary code. `original/` (Llama, gpt-oss) and
# `consolidated*` (Mistral) are second copies.
_WANTED = [
    "*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "generation_config.json",
    "tokenizer*.json", "*.jinja",
]  # fmt: skip
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's, in the folder of an adapter

# Where the hub's client keeps a model at one commit: CACHE/models--OWNER--NAME/snapshots/COMMIT. The hub allows no "--"
# in the names of owners and models.
_SNAPSHOT = re.compile(r"(?P<cache>.*)/models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<commit>[0-9a-f]{40})")

_FROM_GGUF = re.compile(r".*/heed/gguf/[0-9a-f]{64}-\d+")


def model_directory(name: str, revision: str | None = None) -> Path:
    """Returns the folder of a model, downloaded from the hub if needed.

    `revision` is a commit, branch or tag; None = the newest. A GGUF file's folder is written when the file is first
    used (`lm.gguf_files`).
    Raises: ValueError saying why neither a folder nor the hub provides it, and for an adapter.
    """
    if is_gguf(name):
        from lm.gguf_files import cached_model  # it reads tokenizers and weights, which import this module

        return cached_model(Path(name).expanduser())
    folder = adapter_directory(name, revision)
    refuse_adapter(folder, name)
    return folder


def shape_and_tokenizer(name: str) -> Path:
    """Like `model_directory`, but a GGUF file's folder may lack the weights, which take long to convert."""
    if is_gguf(name):
        from lm.gguf_files import cached_model

        return cached_model(Path(name).expanduser(), has_weights=False)
    return model_directory(name)


def is_on_this_machine(name: str) -> bool:
    """Whether a model's weights are on this machine, so that `shape_and_tokenizer` downloads nothing large."""
    if Path(name).expanduser().exists():
        return True
    try:
        folder = snapshot_download(name, allow_patterns=_WANTED, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return any(Path(folder).glob("*.safetensors"))


def adapter_directory(name: str, revision: str | None = None) -> Path:
    """Like `model_directory`, for an adapter or a model."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"{name}: no such folder; a model directory, a .gguf file, or a hub id such as 'Qwen/Qwen2.5-0.5B', was"
            " expected"
        )
    return _downloaded(name, revision)


def is_gguf(name: str) -> bool:
    """Whether a model's name is a GGUF file. Raises: ValueError if that file is missing."""
    if not name.lower().endswith(".gguf") or Path(name).expanduser().is_dir():
        return False
    if not Path(name).expanduser().is_file():
        raise ValueError(f"{name}: {no_such_file(name)}")
    return True


def gguf_cache() -> Path:
    """Returns the folder of model directories made from GGUF files."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "heed" / "gguf"


def model_hash(name: str) -> str:
    """Returns the SHA-256 of the model of this name: of the GGUF file, or of all files in the folder."""
    return unchanged_hash(Path(name).expanduser()) if is_gguf(name) else folder_hash(model_directory(name))


def refuse_adapter(folder: Path, name: str = "") -> None:
    """Raises: ValueError for an adapter without a model's weights. Some are saved with their base's config.json."""
    if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*")):
        named = name or folder
        merged = folder.parent / "model"  # a run writes both
        advice = f"Run `heed merge-adapter {named} OUTPUT` to merge it into its base"
        if (merged / "config.json").is_file():
            advice = f"{merged} is the model that it is merged into"
        raise ValueError(f"{named} has an {ADAPTER_CONFIG}: it is an adapter, not a model. {advice}")


def hub_name(folder: Path) -> str:
    """Returns the hub id of a folder that `model_directory` downloaded; "" for any other folder."""
    match = _SNAPSHOT.fullmatch(str(folder))
    return f"{match['owner']}/{match['name']}" if match else ""


def on_this_machine(folder: Path) -> Path:
    """Returns this machine's copy of a folder that `model_directory` may have made on another machine.

    A hub model's copy has the same commit. It is downloaded once, even if several processes ask for it: the hub's
    client locks each file. A folder made from a GGUF file is the one in this machine's cache. Any other folder is
    returned as it is.

    Raises: ValueError as for `model_directory`.
    """
    match = _SNAPSHOT.fullmatch(str(folder))
    if match is None:
        is_elsewhere = _FROM_GGUF.fullmatch(str(folder)) and not folder.is_dir()
        return gguf_cache() / folder.name if is_elsewhere else folder
    # A folder that is here may be incomplete: another process may be downloading it. The client completes it.
    cache = match["cache"] if folder.is_dir() else None
    return _downloaded(f"{match['owner']}/{match['name']}", match["commit"], cache)


def _downloaded(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    try:
        download = partial(snapshot_download, name, revision=revision, cache_dir=cache, tqdm_class=_NotedBar)
        return Path(download(allow_patterns=_WANTED, ignore_patterns=["original/*", "consolidated*"]))
    except Exception as error:  # the hub's client raises many types; they mean the same to the user
        raise ValueError(
            f"{name!r} is neither a local folder nor a model that the hub provided: {hub_reason(error)}"
        ) from error


class _NotedBar(tqdm):
    """The client's progress bar, which also notes progress: a rank that downloads for an hour is not stuck."""

    def update(self, n: float | None = 1) -> Any:
        note_progress()
        return super().update(n)
