"""The arena: people talk to two policies at once and say which answers better. Verdicts are labels like any other.

A turn that is judged becomes a task with two responses and an answer. Its prompt is what both policies read. After a
turn before which each read its own answers there is no such prompt. Then the task compares dialogues: its prompt is
what they have in common, its responses are the rest, and it is in the batch BATCH-dialogues, so that no reward model
learns from it by accident.

"Much better" is a mark of the better response, and "both bad" a tie with the mark "bad" on both, as in Chatbot Arena's
data (`preferences.formats.published`).

Two answers are written at the same time and shown so that speed does not tell who writes which. Both sides show as many
characters as the slower one has written, so they start together and grow together. Once one has ended, the other is
shown at the pace so far, which is the slower one's, even if all of it is there already.

Leaves out: the answers' length and style, and the pace itself, which is that of the slower policy.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from preferences.accounts import Account
from preferences.arena_records import OWN, Conversation, Conversations
from preferences.assignment import REQUIRES
from preferences.database import STORE_AWAY, reason_of
from preferences.keys import BusyError
from preferences.leases import canonical, display_order
from preferences.page.config import LabelingConfig
from preferences.page.forms import MAX_NOTE_CHARACTERS
from preferences.page.service import RefusedError, why_no_answer
from preferences.recording import Import
from preferences.records import MAX_MILLISECONDS, Judgment, Message, Task
from preferences.store import LabelStore

USUAL_PACE = 40.0  # characters per second, if one side ends before a pace is known


@dataclass(frozen=True)
class Glance:
    """What both sides show now. `is_over`: nothing more will come; what came is stored, unless there is a failure."""

    texts: tuple[str, str]
    is_over: bool
    failure: str = ""


class LockstepTurn:
    """A turn that two policies are answering; sides 0 and 1 are shown as A and B. `clock` returns seconds.

    Methods may be called from any thread. `on_end` is called once, without a lock, when both have ended or one failed.
    """

    def __init__(self, person: str, clock: Callable[[], float], on_end: Callable[["LockstepTurn"], None]) -> None:
        self.person, self._clock, self._on_end = person, clock, on_end
        self._lock = threading.Lock()
        self._texts, self._ended = ["", ""], [False, False]
        self.records: list[Mapping[str, Any]] = [{}, {}]
        self.failure = ""
        self._began_at: float | None = None  # when both had written something
        self._parted_at: float | None = None  # when all of one answer was shown
        self._num_begun = self._num_common = self._num_shown = 0  # characters shown at these moments, and now
        self.seen_at = clock()  # when somebody last looked
        self.is_stored = False

    @property
    def is_written(self) -> bool:
        """Whether both policies have ended, although not all of it may be shown yet."""
        return all(self._ended)

    @property
    def texts(self) -> tuple[str, str]:
        return self._texts[0], self._texts[1]

    def wrote(self, side: int, text: str) -> None:
        """Takes one side's whole text so far."""
        with self._lock:
            self._texts[side] = text
            self._advance()

    def ended(self, side: int, text: str, record: Mapping[str, Any]) -> None:
        """Takes one side's whole text, and how it was sampled."""
        with self._lock:
            self._advance()
            self._texts[side], self.records[side], self._ended[side] = text, record, True
            self._advance()
            is_over = all(self._ended) and not self.failure
        if is_over:
            self._on_end(self)

    def failed(self, reason: str) -> None:
        """Takes a sentence that says why there is no answer, and does not say whose."""
        with self._lock:
            is_first, self.failure = not self.failure, self.failure or reason
        if is_first:
            self._on_end(self)

    def look(self) -> Glance:
        """Returns what both sides show now."""
        self.seen_at = self._clock()
        return self.look_unseen()

    def look_unseen(self) -> Glance:
        """Like `look`, but not on behalf of somebody who waits."""
        with self._lock:
            self._advance()
            shown = self._texts[0][: self._num_shown], self._texts[1][: self._num_shown]
            is_shown = self._num_shown >= max(map(len, self._texts))
            is_over = bool(self.failure) or (self.is_written and self.is_stored and is_shown)
            return Glance(shown, is_over, self.failure)

    def _advance(self) -> None:
        """Updates how many characters both sides show."""
        now, lengths = self._clock(), [len(text) for text in self._texts]
        if self._parted_at is None:
            self._num_shown = max(self._num_shown, min(lengths))
            if self._num_shown and self._began_at is None:
                self._began_at, self._num_begun = now, self._num_shown
            if any(ended and length <= self._num_shown for length, ended in zip(lengths, self._ended, strict=True)):
                self._parted_at, self._num_common = now, self._num_shown
            return
        elapsed = self._parted_at - self._began_at if self._began_at is not None else 0.0
        num_since = self._num_common - self._num_begun
        pace = num_since / elapsed if elapsed > 0 and num_since else USUAL_PACE
        allowed = self._num_common + int(pace * (now - self._parted_at))
        self._num_shown = max(self._num_shown, min(allowed, max(lengths)))


# ---- the arena ----


ARENA_TAG = "arena"  # which labelers need for the tasks that turns become
LOG = logging.getLogger(__name__)
CLIENT = "arena"
DIALOGUES = "-dialogues"  # end of the name of the batch in which dialogues are compared
MUCH_BETTER, BOTH_BAD = "much better", "bad"
MAX_QUESTION_CHARACTERS = 20_000
MAX_TURNS = 50
MAX_LIVE = 200  # turns that are sampled or wait for it
UNSEEN_SECONDS = 10.0  # after which nobody waits for a turn any more: its work is stopped
STORED_SECONDS = 60.0  # how long a stored turn that nobody looks at stays in memory
NO_ANSWER = "One of the two answers could not be sampled. Your question is stored: sample the turn again."
TOO_LONG = "This conversation is longer than the policies can read. Begin a new one."
RUNNING = "A turn of yours is still being written. Wait for it, or stop it; then send this one."

WHY_CLOSED = {  # what labelers read who may give no verdict now
    "instructions": "Read the instructions first, then send this again.",
    "screening": "Before you can talk to the models, judge your first tasks on the page Label.",
    "daily quota": (
        "You have given as many answers as you may give per day. You can continue after midnight (UTC), and change"
        " earlier verdicts at any time. If you want to do more today, ask the labeling lead."
    ),
    "batches closed": "The labeling lead has closed the arena. You can still change earlier verdicts.",
    "no fitting task": (
        "The arena is for people with other languages or skills than those on your account. If one of yours is missing"
        " there, tell the labeling lead."
    ),
}


@dataclass(frozen=True)
class Choice:
    """A verdict that can be given: ranks and marks of sides A and B."""

    label: str
    ranks: tuple[int, int]
    marks: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


CHOICES: Mapping[str, Choice] = {
    "a-much": Choice("A is much better", (1, 2), ((MUCH_BETTER,), ())),
    "a": Choice("A is better", (1, 2)),
    "tie": Choice("They are equally good", (1, 1)),
    "b": Choice("B is better", (2, 1)),
    "b-much": Choice("B is much better", (2, 1), ((), (MUCH_BETTER,))),
    "bad": Choice("Both are bad", (1, 1), ((BOTH_BAD,), (BOTH_BAD,))),
}
OWN_MARKS = (MUCH_BETTER, BOTH_BAD)


class Listener(Protocol):
    """Hears what a policy writes, in a thread of the writers."""

    def wrote(self, side: int, text: str) -> None: ...

    def ended(self, side: int, text: str, record: Mapping[str, Any]) -> None: ...

    def failed(self, reason: str) -> None: ...


class Writers(Protocol):
    """Two policies that answer, in processes of their own. Calls return at once."""

    @property
    def identities(self) -> tuple[str, str]:
        """Returns names and digests of both policies, which tell them from other ones."""

    def start(
        self, key: str, policy: int, messages: Sequence[Message], seed_of: Sequence[str | int], side: int, to: Listener
    ) -> None:
        """Begins a response. `key` and `policy` identify it; the seed is derived from `seed_of`."""

    def stop(self, key: str) -> None:
        """Stops both policies' work on this key, if any is left."""


@dataclass(frozen=True)
class ArenaPrompt:
    """A prompt to begin with: it ends with a user's turn."""

    prompt_id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Given:
    """A verdict: one of `CHOICES`, marks of sides A and B, a note, and the number of the person's next event."""

    choice: str = ""
    marks: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    note: str = ""
    revision: int = 0


class Arena:
    """Runs turns, and stores verdicts in a batch of the label store. `close` it at the end."""

    def __init__(
        self,
        store: LabelStore,
        conversations: Conversations,
        config: LabelingConfig,
        writers: Writers,
        *,
        batch: str,
        prompts: Sequence[ArenaPrompt] = (),
    ) -> None:
        self.store, self.conversations, self.config, self.prompts = store, conversations, config, prompts
        self._writers, self._batch, self._clock = writers, batch, time.time
        self._live: dict[tuple[str, int], LockstepTurn] = {}
        self._beginning: set[str] = set()  # people whose turn is being stored
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, daemon=True, name="arena")
        self._sweeper.start()

    def close(self) -> None:
        self._is_closed.set()
        self._sweeper.join()

    def why_closed(self, account: Account) -> str:
        """Returns why this person may send no message and give no new verdict, by the rules for tasks; "" if they may.

        They may still change earlier verdicts, like other answers.
        """
        why = why_no_answer(self.store, self.config, account, self._batch, self._clock())
        return WHY_CLOSED[why] if why else ""

    def _require_open(self, account: Account) -> None:
        """Raises: RefusedError if this person may send no message and give no new verdict."""
        closed = self.why_closed(account)
        if closed:
            raise RefusedError(closed)

    # ---- turns ----

    def begin(self, account: Account, question: str) -> str:
        """Begins a conversation with a typed question. Returns its handle. Raises: ValueError, BusyError."""
        _require_question(question)
        return self._begin(account, (), question, "")

    def begin_with_prompt(self, account: Account) -> str:
        """Begins with a prompt from the file that this person has not had yet. Raises: ValueError, BusyError."""
        seen = self.conversations.seen_prompts(account.name)
        unseen = [prompt for prompt in self.prompts if prompt.prompt_id not in seen]
        if not unseen:
            raise ValueError("You have had all prompts of the list. Type one of your own.")
        prompt = random.Random(f"{account.name}/{len(seen)}").choice(unseen)
        return self._begin(account, prompt.messages[:-1], prompt.messages[-1].content, prompt.prompt_id)

    def _begin(self, account: Account, start: Sequence[Message], question: str, prompt_id: str) -> str:
        with self._one_at_a_time(account):
            handle = self.conversations.begin(account.name, self._writers.identities, start, question, prompt_id)
            self._sample(account, self.conversation(account, handle))
        return handle

    def ask(self, account: Account, handle: str, turn: int, question: str, side: str) -> None:
        """Continues a conversation after the answer on `side` ("a" or "b"), or each policy after its own ("own").

        Raises: ValueError, BusyError.
        """
        _require_question(question)
        conversation = self.conversation(account, handle)
        if turn >= MAX_TURNS:
            raise ValueError(f"A conversation has at most {MAX_TURNS} turns. Begin a new one.")
        if side not in ("a", "b", OWN):
            raise ValueError("Say whose answer the conversation continues.")
        self._require_same_policies(conversation)
        follows = OWN if side == OWN else str(conversation.policy_of["ab".index(side)])
        with self._one_at_a_time(account):
            self.conversations.ask(handle, turn, question, follows)
            self._sample(account, self.conversation(account, handle))

    def again(self, account: Account, handle: str) -> None:
        """Samples the last turn again if it is unfinished. Raises: ValueError, BusyError."""
        conversation = self.conversation(account, handle)
        if not self.is_live(handle) and not conversation.turns[-1].is_finished:
            self._require_same_policies(conversation)
            with self._one_at_a_time(account):
                self._sample(account, conversation)

    def stop(self, account: Account, handle: str) -> None:
        """Stops the last turn, which stays unfinished."""
        conversation = self.conversation(account, handle)
        live = self._live.get((handle, len(conversation.turns) - 1))
        if live is not None and not live.is_written:
            self._drop(handle, len(conversation.turns) - 1)

    def conversation(self, account: Account, handle: str) -> Conversation:
        """Raises: RefusedError if this person has no such conversation."""
        found = self.conversations.get(account.name, handle)
        if found is None:
            raise RefusedError("you have no such conversation")
        return found

    def look(self, handle: str, turn: int) -> Glance | None:
        """Returns what is shown of a turn that is being written, and notes that somebody waits for it; None for any
        other turn.
        """
        live = self._live.get((handle, turn))
        return None if live is None else live.look()

    def is_live(self, handle: str) -> bool:
        """Whether a turn of this conversation is being written, or shown at the pace of the slower policy."""
        return any(not live.look().is_over for (own, _), live in list(self._live.items()) if own == handle)

    def _require_same_policies(self, conversation: Conversation) -> None:
        if conversation.policies != self._writers.identities:
            raise ValueError("This conversation was with other policies, which are not here any more. Begin a new one.")

    @contextmanager
    def _one_at_a_time(self, account: Account) -> Iterator[None]:
        """Lets a person begin a turn if none of theirs is being written.

        Raises: ValueError, BusyError; RefusedError as `_require_open`.
        """
        self._require_open(account)
        with self._lock:
            own = [live for live in self._live.values() if live.person == account.name]
            if account.name in self._beginning or any(not live.is_written and not live.failure for live in own):
                raise ValueError(RUNNING)
            if len(self._live) >= MAX_LIVE:
                raise BusyError("many people are asking just now; try again in a minute")
            self._beginning.add(account.name)
        try:
            yield
        finally:
            with self._lock:
                self._beginning.discard(account.name)

    def _sample(self, account: Account, conversation: Conversation) -> None:
        turn = len(conversation.turns) - 1
        handle = conversation.handle
        live = LockstepTurn(account.name, time.monotonic, lambda ended: self._on_end(handle, turn, ended))
        with self._lock:
            before = self._live.get((handle, turn))
            if before is not None and not before.failure:
                return  # sent twice
            self._live[handle, turn] = live
        for side, policy in enumerate(conversation.policy_of):
            named = ("arena", handle, turn, policy)
            self._writers.start(_key(handle, turn), policy, conversation.context(turn, policy), named, side, live)

    def _on_end(self, handle: str, turn: int, live: LockstepTurn) -> None:
        if live.failure:
            self._writers.stop(_key(handle, turn))
        else:
            self._store(handle, turn, live)

    def _store(self, handle: str, turn: int, live: LockstepTurn) -> None:
        """Stores a written turn. If the store is away, the sweeper tries again."""
        by_policy = sorted(
            zip((record["policy"] for record in live.records), live.texts, live.records, strict=True),
            key=lambda one: int(one[0]),
        )
        records = [{name: value for name, value in one[2].items() if name != "policy"} for one in by_policy]
        try:
            self.conversations.finish(handle, turn, [one[1] for one in by_policy], records)
            live.is_stored = True
        except STORE_AWAY as error:
            LOG.error("answers in the arena are not stored yet: %s", reason_of(error))

    def _drop(self, handle: str, turn: int) -> None:
        with self._lock:
            self._live.pop((handle, turn), None)
        self._writers.stop(_key(handle, turn))

    def _sweep(self) -> None:
        """Stops turns that nobody waits for, and stores what could not be stored."""
        while not self._is_closed.wait(1.0):
            for (handle, turn), live in list(self._live.items()):
                unseen = time.monotonic() - live.seen_at
                if live.is_written and not live.failure:
                    if not live.is_stored:
                        self._store(handle, turn, live)
                    elif unseen > UNSEEN_SECONDS and (live.look_unseen().is_over or unseen > STORED_SECONDS):
                        self._drop(handle, turn)
                elif unseen > UNSEEN_SECONDS:
                    self._drop(handle, turn)

    # ---- verdicts ----

    def given(self, account: Account, conversation: Conversation, turn: int) -> Given:
        """Returns this person's verdict on a finished turn; one without a choice if there is none now."""
        task = self._task(account.name, conversation, turn)
        own = [event for event in self.store.events_on(task.task_id) if event.labeler == account.name]
        if not own or not own[-1].ranks:
            return Given(revision=len(own))
        last = own[-1]
        ranks = [last.ranks[policy] for policy in conversation.policy_of]
        marks = [last.flags[policy] if last.flags else () for policy in conversation.policy_of]
        return Given(
            _choice_of((ranks[0], ranks[1]), (marks[0], marks[1])),
            (_without_own(marks[0]), _without_own(marks[1])),
            last.note,
            len(own),
        )

    def judge(self, account: Account, conversation: Conversation, turn: int, given: Given) -> None:
        """Stores a verdict on a turn. On return it is on disk. Repeating a call changes nothing.

        Raises: ValueError for an unknown choice or mark, a note that is too long, an unfinished turn, and if the
        verdict was changed elsewhere; RefusedError for a new verdict of somebody who may give none now.
        """
        choice = CHOICES.get(given.choice)
        if choice is None:
            raise ValueError("Say which answer is better.")
        if len(given.note) > MAX_NOTE_CHARACTERS:
            raise ValueError(f"The note has {len(given.note)} characters; at most {MAX_NOTE_CHARACTERS} are allowed.")
        unknown = sorted({mark for marks in given.marks for mark in marks} - set(self.config.flags))
        if unknown:
            raise ValueError(f"“{unknown[0]}” is not one of the marks that you can give.")
        if not 0 <= turn < len(conversation.turns) or not conversation.turns[turn].is_finished:
            raise ValueError("This turn is unfinished, so it cannot be judged yet.")
        if not self.given(account, conversation, turn).choice:
            self._require_open(account)
        task, now = self._task(account.name, conversation, turn), self._clock()
        order = conversation.policy_of
        marks = [(*own, *marked) for own, marked in zip(choice.marks, given.marks, strict=True)]
        judgment = Judgment(
            task_id=task.task_id,
            labeler=account.name,
            revision=given.revision,
            kind="answer",
            ranks=tuple(canonical(order, choice.ranks)),
            ratings=(),
            flags=tuple(canonical(order, marks)) if any(marks) else (),
            note=given.note,
            shown_order=order,
            instructions_version=self.config.version,
            milliseconds=min(MAX_MILLISECONDS, max(0, int(1000 * (now - conversation.turns[turn].finished_at)))),
            client=CLIENT,
            created_at=now,
        )
        batch = self._batch if conversation.is_shared(turn) else self._batch + DIALOGUES
        self.store.import_all([Import(batch, [task], [1], [judgment])])

    def _task(self, person: str, conversation: Conversation, turn: int) -> Task:
        """Returns the task that a turn becomes.

        Its id is the first one with which the label pages show the sides in the same order, because a verdict that is
        taken back is given again there.
        """
        done = conversation.turns[turn]
        if not done.is_finished:
            raise ValueError("This turn is unfinished, so it cannot be judged yet.")
        number = 0
        while display_order(_task_id(conversation.handle, turn, number), person, 2) != conversation.policy_of:
            number += 1
        sources = tuple(str(record["name"]) for record in done.records)
        details: dict[str, Any] = {
            "from": "arena",
            "conversation": conversation.handle,
            "person": conversation.labeler,
            "turn": turn + 1,
            # Nobody else is given the conversation if the verdict is voided, unless a lead gives them this tag.
            REQUIRES: [ARENA_TAG],
        }
        if conversation.prompt_id:
            details["prompt_id"] = conversation.prompt_id
        prompt, responses = conversation.context(turn, 0), done.responses
        if not conversation.is_shared(turn):
            contexts = [conversation.context(turn, policy) for policy in (0, 1)]
            prompt, responses = _dialogues(contexts, done.responses)
            details["contexts"] = [[one.fields for one in context] for context in contexts]
            details["answers"] = list(done.responses)
        details["sampled"] = [dict(record) for record in done.records]
        return Task(_task_id(conversation.handle, turn, number), prompt, responses, sources, details=details)


@dataclass(frozen=True)
class ArenaSetup:
    """What a server needs for an arena in addition to its store."""

    writers: Writers
    batch: str
    prompts: Sequence[ArenaPrompt] = ()

    @contextmanager
    def opened(self, url_or_path: str | Path, store: LabelStore, config: LabelingConfig) -> Iterator[Arena]:
        """Opens the arena of a store, and closes it at the end."""
        conversations = Conversations(url_or_path)
        arena = Arena(store, conversations, config, self.writers, batch=self.batch, prompts=self.prompts)
        try:
            yield arena
        finally:
            arena.close()
            conversations.close()


def _require_question(question: str) -> None:
    if not question.strip():
        raise ValueError("Type a message first.")
    if len(question) > MAX_QUESTION_CHARACTERS:
        raise ValueError(f"The message has {len(question)} characters; at most {MAX_QUESTION_CHARACTERS} are allowed.")


def _key(handle: str, turn: int) -> str:
    return f"{handle}/{turn}"


def _task_id(handle: str, turn: int, number: int) -> str:
    return f"arena/{handle}/{turn + 1}/{number}"


def _choice_of(ranks: tuple[int, int], marks: tuple[Sequence[str], Sequence[str]]) -> str:
    """Returns the choice with these ranks and the arena's own marks; if it was given elsewhere, the marks may lack."""
    own = tuple(tuple(mark for mark in one if mark in OWN_MARKS) for one in marks)
    alike = [name for name, choice in CHOICES.items() if choice.ranks == ranks]
    return next((name for name in alike if CHOICES[name].marks == own), {(1, 2): "a", (2, 1): "b"}.get(ranks, "tie"))


def _without_own(marks: Sequence[str]) -> tuple[str, ...]:
    return tuple(mark for mark in marks if mark not in OWN_MARKS)


def _dialogues(
    contexts: Sequence[tuple[Message, ...]], answers: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Returns what two dialogues have in common, which ends with a question, and the rest of each as one text."""
    num_same = next(n for n, (one, other) in enumerate(zip(*contexts, strict=True)) if one != other)
    rests = []
    for context, answer in zip(contexts, answers, strict=True):
        first, *others = [*context[num_same:], Message("assistant", answer)]
        rests.append("\n\n".join([first.content, *(f"**{one.role.capitalize()}:** {one.content}" for one in others)]))
    return contexts[0][:num_same], (rests[0], rests[1])
