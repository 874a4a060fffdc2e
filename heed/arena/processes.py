"""Two policies in processes of their own, so that sampling never holds up the server's pages.

A process takes up to `NUM_RUNNING` answers at a time, which take turns token by token; further ones wait in order of
arrival. A process that dies is started again, and its unfinished answers fail with a sentence that names no side.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from heed.arena.policies import Answering, ArenaPolicy, ArenaSampling, Messages, Speaker, TooLongError, open_speaker
from preferences.page.arena import NO_ANSWER, TOO_LONG, Listener
from preferences.records import Message

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
