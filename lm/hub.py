"""Model directories by name: a folder here, or a model of the hub, downloaded once."""

from pathlib import Path

from huggingface_hub import snapshot_download

# Weights as safetensors alone: a pickled file runs whatever its author put in it.
_WANTED = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer*.json", "*.jinja"]


def model_directory(name: str) -> Path:
    """Errors: ValueError saying why neither a folder nor the hub has it; offline, what the hub's client said."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"{name}: no such folder; a model directory, or a hub id such as 'Qwen/Qwen2.5-0.5B', was expected"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # the hub's client raises many kinds; each means the same to the user
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name!r} is neither a folder here nor a model that the hub gave: {type(error).__name__}: {reason}"
        ) from error
