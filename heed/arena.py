"""The live policies of the arena: what each is, how it answers piece by piece, and the processes that run them.

A local model computes each answer alone, one token after another, and several answers take turns. So an answer's tokens
depend on the weights, the conversation, the seed and the settings, which are recorded, and not on who else was asking.
The price is throughput: a batch would read the weights once for all its answers.

Both policies are in processes of their own, so that sampling never holds up the server's pages.

A process takes up to `NUM_RUNNING` answers at a time, which take turns token by token; further ones wait in order of
arrival. A process that dies is started again, and its unfinished answers fail with a sentence that names no side.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from files.hashes import derive_seed
from preferences.page.arena import NO_ANSWER, TOO_LONG, Listener
from preferences.records import Message

if TYPE_CHECKING:
    from lm.encoder import EncoderDecoder
    from lm.model import LanguageModel
    from lm.sampling import Choice
    from lm.tokenizer import Tokenizer
    from reward.endpoint import Endpoint


Messages = Sequence[Mapping[str, str]]
HALF_CHARACTER = "\ufffd"  # what a tokenizer writes for bytes that are no character yet
ENDPOINT_SEEDS = 2**31  # servers accept seeds below this
SILENT_SECONDS = 120.0  # without a word from an endpoint, after which an answer fails


class TooLongError(ValueError):
    """The conversation leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class ArenaSampling:
    """How answers are sampled. `seed` is the server's; each answer's own is derived from it."""

    temperature: float
    max_new_tokens: int
    seed: int = 0

    def seed_of(self, names: Sequence[str | int]) -> int:
        return derive_seed(self.seed, *names)


@dataclass(frozen=True)
class ArenaPolicy:
    """A policy by name: a model's folder, .gguf file or hub id, or an endpoint URL#MODEL.

    `sha256` is the digest of a model's files; "" for an endpoint, which has none.
    """

    name: str
    kind: str  # model or endpoint
    spec: str
    sha256: str

    @property
    def identity(self) -> str:
        return f"{self.name} {self.sha256 or self.spec}"


@dataclass(frozen=True)
class Written:
    """A whole answer, and a record of how it was sampled, in JSON's types."""

    text: str
    record: Mapping[str, Any]


# Yields the text so far, or None if there is nothing new, and returns the whole answer.
Answering = Generator[str | None, None, Written]


class Speaker(Protocol):
    """Answers conversations. Several answers may be under way; closing one stops it."""

    def answer(self, messages: Messages, seed: int) -> Answering:
        """Raises: TooLongError before the first piece."""


def arena_policy(name: str, spec: str) -> ArenaPolicy:
    """Returns a policy. Raises: ValueError for a spec that is no model that writes text, and no endpoint."""
    from lm.hub import model_hash
    from reward.endpoint import Endpoint

    if spec.startswith(("http://", "https://")):
        Endpoint.of(spec, name, timeout_seconds=SILENT_SECONDS, max_wait_seconds=0)  # checks it
        return ArenaPolicy(name, "endpoint", spec, "")
    _check_model(spec)
    return ArenaPolicy(name, "model", spec, model_hash(spec))


def _check_model(spec: str) -> None:
    from lm.hub import shape_and_tokenizer
    from lm.weights import purpose_of

    folder = shape_and_tokenizer(spec)
    purpose = purpose_of(folder)
    if purpose not in ("language", "translate"):
        raise ValueError(f"{spec}: a model that writes text was expected; this one is for {purpose!r}")


def open_speaker(policy: ArenaPolicy, sampling: ArenaSampling, num_threads: int) -> Speaker:
    """Loads a model, or opens an endpoint. Raises: ValueError if the model's files are not those of the digest."""
    if policy.kind == "endpoint":
        return RemoteSpeaker.open(policy, sampling)
    return LocalSpeaker.load(policy, sampling, num_threads)


# ---- local models ----


@dataclass(frozen=True)
class LocalSpeaker:
    """A model in this process."""

    policy: ArenaPolicy
    sampling: ArenaSampling
    tokenizer: "Tokenizer"
    model: "LanguageModel | EncoderDecoder"
    choice: "Choice"
    machine: Mapping[str, Any]  # what else the bits depend on, for the record
    steps: Any

    @classmethod
    def load(cls, policy: ArenaPolicy, sampling: ArenaSampling, num_threads: int) -> "LocalSpeaker":
        """Raises: ValueError if the model's files are not those of the digest."""
        import torch

        from evaluation.compare.folder import versions
        from lm.decoding import decoding_steps
        from lm.hub import model_directory, model_hash
        from lm.model import LanguageModel
        from lm.native.decoder import what_native_steps_miss
        from lm.sampling import Choice
        from lm.tokenizer import Tokenizer
        from lm.weights import load_writer

        torch.set_num_threads(num_threads)
        found = model_hash(policy.spec)
        if found != policy.sha256:
            raise ValueError(
                f"policy {policy.name!r}: the files of {policy.spec} have SHA-256 {found}; {policy.sha256} was expected"
            )
        folder = model_directory(policy.spec)
        tokenizer, model = Tokenizer.load(folder), load_writer(folder)
        weight = model.head.weight
        machine = {
            "device": weight.device.type,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "threads": num_threads,
            "versions": versions(),
        }
        # Recorded steps of a GPU belong to one batch at a time, so streams there take eager ones.
        is_native = isinstance(model, LanguageModel) and not what_native_steps_miss(model)
        steps = decoding_steps(model, "native") if is_native else None
        choice = Choice(sampling.temperature)
        return cls(policy, sampling, tokenizer, model, choice, machine, steps)

    def answer(self, messages: Messages, seed: int) -> Answering:
        from lm.generation import prompts_and_sources, stream

        tokens = self.tokenizer.encode_prompt(list(messages))
        (prompt,), sources = prompts_and_sources(self.model, [tokens], self.tokenizer.target_start_id)
        context = self.model.config.max_position_embeddings
        room = context - len(prompt)
        if room < 1 or (sources is not None and len(sources[0]) > context):
            raise TooLongError(f"the conversation has {len(tokens)} tokens; the model reads {context}")
        limit = min(self.sampling.max_new_tokens, room)
        response: list[int] = []
        for token in stream(
            self.model, prompt, max_new_tokens=limit, end_ids=self.tokenizer.end_ids, choice=self.choice, seed=seed,
            source=None if sources is None else sources[0], steps=self.steps,
        ):  # fmt: skip
            response.append(token)
            yield self.tokenizer.decode(response).rstrip(HALF_CHARACTER).strip()
        settings = asdict(self.sampling) | {"seed": seed, "max_new_tokens": limit}
        record = asdict(self.policy) | settings | dict(self.machine)
        finished = bool(response) and response[-1] in self.tokenizer.end_ids
        record |= {"num_tokens": len(response), "finished": finished, "tokens_sha256": tokens_hash(response)}
        return Written(self.tokenizer.decode(response).strip(), record)


def tokens_hash(tokens: Sequence[int]) -> str:
    """Returns a SHA-256 of an answer's tokens."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


# ---- endpoints ----


@dataclass(frozen=True)
class RemoteSpeaker:
    """A model that an OpenAI-compatible endpoint serves. The endpoint streams, or sends whole answers if it cannot."""

    policy: ArenaPolicy
    sampling: ArenaSampling
    endpoint: "Endpoint"

    @classmethod
    def open(cls, policy: ArenaPolicy, sampling: ArenaSampling) -> "RemoteSpeaker":
        from reward.endpoint import Endpoint

        endpoint = Endpoint.of(policy.spec, policy.name, timeout_seconds=SILENT_SECONDS, max_wait_seconds=0)
        return cls(policy, sampling, endpoint)

    def answer(self, messages: Messages, seed: int) -> Answering:
        pieces: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
        stopped, said = threading.Event(), _Said()
        request = self._request(messages, seed)
        reader = threading.Thread(target=self._read, args=(request, pieces, stopped, said), daemon=True)
        reader.start()
        text = ""
        try:
            while True:
                try:
                    piece = pieces.get_nowait()
                except queue.Empty:
                    yield None
                    continue
                if piece is None:
                    break
                if isinstance(piece, Exception):
                    raise piece
                text += piece
                yield text.strip()
        finally:
            stopped.set()
        settings = {name: value for name, value in request.items() if name not in ("messages", "stream")}
        record = asdict(self.policy) | settings | {"served_model": said.model, "finished": said.finished}
        return Written(text.strip(), record)

    def _request(self, messages: Messages, seed: int) -> dict[str, Any]:
        own = self.sampling
        request: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [dict(message) for message in messages],
            "temperature": own.temperature,
            "max_tokens": own.max_new_tokens,
            "seed": seed % ENDPOINT_SEEDS,
            "stream": True,
        }
        return request

    def _read(
        self,
        request: Mapping[str, Any],
        pieces: "queue.SimpleQueue[str | Exception | None]",
        stopped: threading.Event,
        said: "_Said",
    ) -> None:
        """Reads the endpoint's stream in a thread of its own: pieces of text, then None, or an error."""
        import httpx

        headers = {"Authorization": f"Bearer {self.endpoint.key}"} if self.endpoint.key else {}
        url = f"{self.endpoint.url}/chat/completions"
        try:
            with httpx.stream("POST", url, json=request, headers=headers, timeout=SILENT_SECONDS) as response:
                if not response.is_success:
                    raise ValueError(f"{url}: status {response.status_code} ({response.reason_phrase})")
                is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                if not is_stream:
                    response.read()
                for line in response.iter_lines() if is_stream else ("data: " + response.text,):
                    if stopped.is_set():
                        return
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        pieces.put(said.read(json.loads(line[5:])))
                    elif line.startswith("data:"):
                        said.is_over = True
                if is_stream and not said.is_over:
                    raise ValueError(f"{url}: the stream ended before the answer did")
            pieces.put(None)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            pieces.put(ValueError(f"{type(error).__name__}: {error}"))


@dataclass
class _Said:
    """What an endpoint said about an answer: whether all of it has come (`is_over`), whether the model ended it itself
    (`finished`; None = unknown), and which model wrote it.
    """

    is_over: bool = False
    finished: bool | None = None
    model: str = ""

    def read(self, event: Mapping[str, Any]) -> str:
        """Returns the text in an event, or in a whole answer."""
        choices = event.get("choices") or []
        self.model = str(event.get("model") or self.model)
        if not choices:
            return ""
        reason = choices[0].get("finish_reason")
        self.is_over = self.is_over or bool(reason)
        self.finished = {"stop": True, "length": False}.get(reason, self.finished)
        part = choices[0].get("delta") or choices[0].get("message") or {}
        return str(part.get("content") or "")


# ---- two policies in processes of their own ----


LOG = logging.getLogger(__name__)
NUM_RUNNING = 8
TEXT_SECONDS = 0.05  # between two reports of an answer's text
IDLE_SECONDS = 0.01  # between two looks at endpoints that are silent
LOAD_SECONDS = 600.0
RESTART_SECONDS = 5.0  # between two starts of a process that keeps dying


@dataclass(frozen=True)
class Start:
    """To a process: begin an answer."""

    key: str
    messages: Messages
    seed: int


@dataclass(frozen=True)
class Stop:
    """To a process: stop an answer."""

    key: str


@dataclass(frozen=True)
class Said:
    """From a process: an answer's text so far; its record, once it has ended; or why it failed."""

    key: str
    text: str = ""
    record: dict[str, Any] | None = None
    failure: str = ""
    is_too_long: bool = False


READY = Said("")  # the policy is loaded


# ---- in the process ----


def run_policy(policy: ArenaPolicy, sampling: ArenaSampling, num_threads: int, pipe: "Connection[Any, Any]") -> None:
    """Answers until the pipe closes. This is a process border: every error is reported through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which closes the pipe
    try:
        speaker = open_speaker(policy, sampling, num_threads)
    except (ValueError, OSError, RuntimeError) as error:
        pipe.send(Said("", failure=str(error)))
        return
    pipe.send(READY)
    try:
        _TurnTaking(speaker, pipe).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


class _TurnTaking:
    """Lets answers take turns: each gives one token, then the next one."""

    def __init__(self, speaker: Speaker, pipe: "Connection[Any, Any]") -> None:
        self.speaker, self.pipe = speaker, pipe
        self.waiting: deque[Start] = deque()
        self.running: dict[str, Answering] = {}
        self.reported_at: dict[str, float] = {}

    def run(self) -> None:
        while True:
            while self.pipe.poll(None if not self.running and not self.waiting else 0):
                self._take(self.pipe.recv())
            while self.waiting and len(self.running) < NUM_RUNNING:
                start = self.waiting.popleft()
                self.running[start.key] = self.speaker.answer(start.messages, start.seed)
            has_moved = [self._advance(key, answering) for key, answering in list(self.running.items())]
            if not any(has_moved):
                time.sleep(IDLE_SECONDS)

    def _take(self, message: Start | Stop) -> None:
        if isinstance(message, Start):
            self.waiting.append(message)
            return
        self.waiting = deque(start for start in self.waiting if start.key != message.key)
        self.reported_at.pop(message.key, None)
        if message.key in self.running:
            self.running.pop(message.key).close()

    def _advance(self, key: str, answering: Answering) -> bool:
        """Takes the next piece of an answer. Returns whether there was one."""
        try:
            text = next(answering)
        except StopIteration as ended:
            self._end(Said(key, ended.value.text, dict(ended.value.record)))
            return True
        except TooLongError as error:
            self._end(Said(key, failure=str(error), is_too_long=True))
            return True
        except (ValueError, ArithmeticError, RuntimeError) as error:
            self._end(Said(key, failure=f"{type(error).__name__}: {error}"))
            return True
        if text is None:
            return False
        now = time.monotonic()
        if now - self.reported_at.get(key, 0.0) >= TEXT_SECONDS:
            self.reported_at[key] = now
            self.pipe.send(Said(key, text))
        return True

    def _end(self, said: Said) -> None:
        self.running.pop(said.key, None)
        self.reported_at.pop(said.key, None)
        self.pipe.send(said)


# ---- in the server ----


class PolicyProcess:
    """One policy's process, and who listens to its answers."""

    def __init__(self, number: int, policy: ArenaPolicy, sampling: ArenaSampling, num_threads: int) -> None:
        self.number, self.policy, self.sampling, self._num_threads = number, policy, sampling, num_threads
        self._listeners: dict[str, tuple[int, Listener]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        self._pipe, theirs = context.Pipe()
        arguments = (self.policy, self.sampling, self._num_threads, theirs)
        self.process = context.Process(target=run_policy, args=arguments, daemon=True, name=self.policy.name)
        self.process.start()
        self._started_at = time.monotonic()
        theirs.close()

    def wait_ready(self) -> None:
        """Raises: ValueError if the policy cannot be loaded."""
        if not self._pipe.poll(LOAD_SECONDS):
            raise ValueError(f"policy {self.policy.name!r} was not loaded within {LOAD_SECONDS:.0f} seconds")
        try:
            said = self._pipe.recv()
        except EOFError:
            raise ValueError(f"policy {self.policy.name!r}: its process ended while it was loaded") from None
        if said != READY:
            raise ValueError(f"policy {self.policy.name!r}: {said.failure}")

    def listen(self) -> None:
        """Begins to pass on what the process says."""
        self._thread = threading.Thread(target=self._read, daemon=True, name=f"arena-{self.number}")
        self._thread.start()

    def start(self, key: str, messages: Sequence[Message], seed: int, side: int, to: Listener) -> None:
        turns = [message.turn for message in messages]
        try:
            with self._lock:
                self._listeners[key] = (side, to)
                self._pipe.send(Start(key, turns, seed))
        except OSError:  # the process has died, and `_read` may have failed its answers before this one came
            LOG.warning("policy %s: an answer began while its process was down", self.policy.name)
            with self._lock:
                self._listeners.pop(key, None)
            to.failed(NO_ANSWER)

    def stop(self, key: str) -> None:
        with self._lock:
            if self._listeners.pop(key, None) is not None:
                try:
                    self._pipe.send(Stop(key))
                except OSError:
                    LOG.warning("policy %s: an answer was stopped while its process was down", self.policy.name)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self.process.terminate()
        self.process.join()

    def _read(self) -> None:
        while True:
            try:
                self._hear(self._pipe.recv())
            except (EOFError, OSError):
                if self._is_closed:
                    return
                self._revive()

    def _hear(self, said: Said) -> None:
        with self._lock:
            side, listener = self._listeners.get(said.key, (0, None))
            if said.record is not None or said.failure:
                self._listeners.pop(said.key, None)
        if said.failure:
            LOG.error("policy %s: %s", self.policy.name, said.failure)
        if listener is None:
            return
        if said.failure:
            listener.failed(TOO_LONG if said.is_too_long else NO_ANSWER)
        elif said.record is not None:
            listener.ended(side, said.text, {"policy": self.number, **said.record})
        else:
            listener.wrote(side, said.text)

    def _revive(self) -> None:
        """Starts the process again, and fails the answers that it was writing."""
        self.process.join(1.0)
        LOG.error("policy %s: its process ended (exit code %s)", self.policy.name, self.process.exitcode)
        with self._lock:
            lost, self._listeners = list(self._listeners.values()), {}
        for _, listener in lost:
            listener.failed(NO_ANSWER)
        if time.monotonic() - self._started_at < RESTART_SECONDS:
            time.sleep(RESTART_SECONDS)
        with self._lock:
            if not self._is_closed:
                self._start()


class PolicyProcesses:
    """Both policies: what `preferences.page.arena.Writers` describes."""

    def __init__(self, policies: tuple[ArenaPolicy, ArenaPolicy], sampling: ArenaSampling) -> None:
        """Starts both processes. Raises: ValueError if a policy cannot be loaded."""
        num_local = sum(policy.kind == "model" for policy in policies)
        num_threads = max(1, len(os.sched_getaffinity(0)) // max(1, num_local))
        self.sampling = sampling
        self._processes = [PolicyProcess(n, policy, sampling, num_threads) for n, policy in enumerate(policies)]
        self.identities = (policies[0].identity, policies[1].identity)
        try:
            for process in self._processes:
                process.wait_ready()
        except ValueError:
            self.close()
            raise
        for process in self._processes:
            process.listen()

    def start(
        self, key: str, policy: int, messages: Sequence[Message], seed_of: Sequence[str | int], side: int, to: Listener
    ) -> None:
        self._processes[policy].start(key, messages, self.sampling.seed_of(seed_of), side, to)

    def stop(self, key: str) -> None:
        for process in self._processes:
            process.stop(key)

    def close(self) -> None:
        for process in self._processes:
            process.close()
