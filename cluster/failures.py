"""A rank's failure as sent to the driver: the exception's kind and text, and the exception if it can be pickled."""

import re
import time
import traceback
from dataclasses import dataclass
from typing import Literal

from ray import cloudpickle

from training.notices import UnrepeatableError

# mistake: the user must fix something. echo: a peer did not answer, so the cause is elsewhere. loss: this rank, its GPU
# or its port is unusable, and a new group may work. error: the work itself failed, and would fail again.
Kind = Literal["mistake", "echo", "loss", "error"]

PEER_WORDS = (
    "connection reset",
    "connection closed",
    "closed by peer",
    "connection refused",
    "broken pipe",
    "timed out",
)
# Only in errors of torch, gloo and NCCL: an OSError with these words may be about some other server.
NETWORK_WORDS = (
    "no route to host",
    "network is unreachable",
    "host is unreachable",
    "connection aborted",
    "temporary failure in name resolution",
    "name or service not known",
    "nccl error",
    "ncclremoteerror",
    "ncclsystemerror",
    "ncclinternalerror",
)
PORT_WORDS = ("eaddrinuse", "address already in use")
DEVICE_WORDS = ("cuda error", "uncorrectable ecc", "hip error")
MEMORY_WORDS = ("out of memory", "can't allocate memory", "running low on memory")


class WorkerError(RuntimeError):
    """A call failed on some rank. The message has the first cause: stage, rank, exception and traceback."""


class WorkerLostError(WorkerError):
    """A rank is gone: its process or its node was killed. A new group may finish the work."""


class UnsentError(RuntimeError):
    """Stands for an exception that could not be sent from its rank; holds its text."""


@dataclass(frozen=True)
class Failure:
    """A rank's exception in plain values, which any driver can read."""

    kind: Kind
    at: float  # Unix seconds, by the rank's clock
    text: str  # type and message
    trace: str  # the rank's traceback
    is_memory: bool  # memory ran out
    pickled: bytes  # the exception itself; empty if it cannot be sent

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        trace = "".join(traceback.format_exception(error))
        return cls(kind_of(error), time.time(), _text(error), trace, ran_out_of_memory(error), _pickled(error))

    @property
    def error(self) -> Exception:
        """The exception, or a stand-in if this process cannot unpickle it."""
        try:
            error = cloudpickle.loads(self.pickled) if self.pickled else None
        except Exception:  # its class may exist only on the rank
            error = None
        if isinstance(error, Exception):
            return error
        return ValueError(self.text) if self.kind == "mistake" else UnsentError(self.text)


def kind_of(error: Exception) -> Kind:
    """How the driver should treat a rank's exception."""
    from torch import AcceleratorError
    from torch.distributed import DistError

    words = str(error).lower()
    if isinstance(error, UnrepeatableError):
        return "loss"
    if isinstance(error, ValueError):
        return "mistake"
    if not isinstance(error, RuntimeError | OSError) or ran_out_of_memory(error):
        return "error"
    if any(word in words for word in PORT_WORDS):
        return "loss"
    if isinstance(error, DistError) or any(word in words for word in PEER_WORDS):
        return "echo"
    if isinstance(error, RuntimeError) and any(word in words for word in NETWORK_WORDS):
        return "echo"
    if isinstance(error, AcceleratorError) or any(word in words for word in DEVICE_WORDS):
        return "loss"
    return "error"


def ran_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the CPU or on a GPU."""
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in MEMORY_WORDS)


MEMORY_ADVICE = (
    "memory ran out: to use less per rank, set a smaller micro_batch_size or micro_batch_tokens, shorter rows (seq_len,"
    " max_new_tokens), engine.checkpoint_activations, a higher engine.zero_stage, engine.offload (on a GPU) or more"
    " workers; `heed plan` lists memory part by part"
)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?$", re.MULTILINE)


def without_colours(text: str) -> str:
    """Remove terminal colour codes from Ray's text."""
    return _COLOUR.sub("", text)


def last_line(text: str) -> str:
    """Return the line of one or more tracebacks that names the last exception: "KeyError: 'x'"."""
    lines = _LAST_LINE.findall(text) or text.strip().splitlines() or [""]
    return str(lines[-1]).strip()


def _text(error: Exception) -> str:
    """Return type and message. A library's exception class may raise when its message is converted."""
    name = type(error).__name__
    try:
        return f"{name}: {error}" if str(error) else name
    except Exception:
        return name


def _pickled(error: Exception) -> bytes:
    """Return the pickled exception; empty if a trial unpickling fails."""
    try:
        pickled: bytes = cloudpickle.dumps(error)
        return pickled if type(cloudpickle.loads(pickled)) is type(error) else b""
    except Exception:  # its class may raise anything
        return b""
