"""Model directories by name: a local folder, or a model from the Hugging Face hub, downloaded once."""

from pathlib import Path

from huggingface_hub import snapshot_download

# Only safetensors weights: a pickled file can run arbitrary code.
_WANTED = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer*.json", "*.jinja"]


def model_directory(name: str) -> Path:
    """The folder of a model, downloaded from the hub if needed.

    Raises: ValueError saying why neither a folder nor the hub provides it; offline, with the hub client's message.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"{name}: no such folder; a model directory, or a hub id such as 'Qwen/Qwen2.5-0.5B', was expected"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # the hub's client raises many types; they mean the same to the user
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name!r} is neither a local folder nor a model that the hub provided: {type(error).__name__}: {reason}"
        ) from error
