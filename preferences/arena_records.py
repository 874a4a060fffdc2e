"""Conversations of people with two policies, in the label store's database: what was asked and what was answered.

A turn is stored when it is asked and completed when both policies have answered. A turn without responses is
unfinished: it is being sampled, or the server stopped in the middle. Verdicts are not stored here: a judged turn
becomes a task with a judgment (`preferences.page.arena`). Policies are numbered 0 and 1; people see sides A and B.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from preferences.database import open_engines
from preferences.names import known_pseudonym, pseudonym_of
from preferences.records import Message
from preferences.rows import messages
from preferences.schema import arena_conversations, arena_turns

OWN = "own"  # `follows` of a turn before which each policy reads its own answers


@dataclass(frozen=True)
class Turn:
    """A question, and each policy's response to it; `responses` and `records` are empty while it is unfinished.

    `follows` says whose answers the policies read before the question: "0" or "1" for one policy's, "own" for each
    policy's own. `records` say how each response was sampled. `finished_at` is in seconds since the epoch, 0 before.
    """

    question: str
    follows: str
    responses: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()
    finished_at: float = 0.0

    @property
    def is_finished(self) -> bool:
        return bool(self.responses)


@dataclass(frozen=True)
class Conversation:
    """A person's conversation. `start` is what comes before the first question, such as a system's turn.

    `labeler` is the person's pseudonym. `policies` name both policies with their digests. `is_swapped` says that side A
    is policy 1.
    """

    handle: str
    labeler: str
    policies: tuple[str, str]
    prompt_id: str
    start: tuple[Message, ...]
    is_swapped: bool
    created_at: float
    turns: tuple[Turn, ...] = ()

    @property
    def policy_of(self) -> tuple[int, int]:
        """The policies on sides A and B."""
        return (1, 0) if self.is_swapped else (0, 1)

    def context(self, turn: int, policy: int) -> tuple[Message, ...]:
        """Returns what a policy reads at a turn: the conversation up to this turn's question."""
        asked = Message("user", self.turns[turn].question)
        if turn == 0:
            return (*self.start, asked)
        follows = self.turns[turn].follows
        read = policy if follows == OWN else int(follows)
        answer = Message("assistant", self.turns[turn - 1].responses[read])
        return (*self.context(turn - 1, read), answer, asked)

    def is_shared(self, turn: int) -> bool:
        """Whether both policies read the same conversation at this turn."""
        return self.context(turn, 0) == self.context(turn, 1)


class Conversations:
    """Reads and writes conversations."""

    def __init__(self, url_or_path: str | Path) -> None:
        self._reader, self._writer = open_engines(url_or_path)

    def close(self) -> None:
        self._reader.dispose()

    def begin(
        self, labeler: str, policies: tuple[str, str], start: Sequence[Message], question: str, prompt_id: str = ""
    ) -> str:
        """Stores a new conversation with its first question. Returns its handle. Its sides are drawn at random."""
        handle = secrets.token_urlsafe(12)
        with self._writer.begin() as connection:
            connection.execute(
                insert(arena_conversations).values(
                    handle=handle,
                    labeler=pseudonym_of(connection, labeler),
                    policies=list(policies),
                    prompt_id=prompt_id,
                    start=[message.fields for message in start],
                    is_swapped=bool(secrets.randbelow(2)),
                    created_at=time.time(),
                )
            )
            _insert_turn(connection, handle, 0, question, OWN)
        return handle

    def ask(self, handle: str, turn: int, question: str, follows: str) -> None:
        """Stores the next question. The same question sent again is accepted.

        Raises: ValueError if the conversation has another number of turns, or its last turn is unfinished.
        """
        with self._writer.begin() as connection:
            turns = _turns(connection, handle)
            if turn == len(turns) - 1 and turns[turn].question == question and turns[turn].follows == follows:
                return
            if turn != len(turns):
                raise ValueError("This conversation has gone on in another window.")
            if not turns[-1].is_finished:
                raise ValueError("The last turn is unfinished: sample it again first.")
            _insert_turn(connection, handle, turn, question, follows)

    def finish(self, handle: str, turn: int, responses: Sequence[str], records: Sequence[Mapping[str, Any]]) -> None:
        """Stores both responses, if the turn has none yet."""
        place = (arena_turns.c.conversation == handle, arena_turns.c.turn == turn, arena_turns.c.finished_at == 0)
        values = {"responses": list(responses), "records": [dict(record) for record in records]}
        with self._writer.begin() as connection:
            connection.execute(update(arena_turns).where(*place).values(**values, finished_at=time.time()))

    def get(self, labeler: str, handle: str) -> Conversation | None:
        """Returns this person's conversation; None if there is none of theirs with this handle."""
        with self._reader.begin() as connection:
            who = known_pseudonym(connection, labeler)
            found = _rows(connection, who, handle=handle)
            return _with_turns(connection, found[0]) if found else None

    def latest(self, labeler: str, limit: int) -> list[Conversation]:
        """Returns this person's last conversations, newest first."""
        with self._reader.begin() as connection:
            who = known_pseudonym(connection, labeler)
            return [_with_turns(connection, one) for one in _rows(connection, who, limit=limit)]

    def seen_prompts(self, labeler: str) -> set[str]:
        """Returns the ids of the prompts from a file with which this person has begun conversations."""
        with self._reader.begin() as connection:
            mine = arena_conversations.c.labeler == known_pseudonym(connection, labeler)
            return set(connection.scalars(select(arena_conversations.c.prompt_id).where(mine)))


# ---- within the caller's transaction; `who` is a pseudonym ----


def conversations_of(connection: Connection, who: str) -> list[Conversation]:
    """Returns all conversations of a person, newest first."""
    return [_with_turns(connection, one) for one in _rows(connection, who)]


def delete_conversations(connection: Connection, who: str) -> None:
    """Deletes all conversations of a person. Turns that were judged stay, as tasks."""
    mine = select(arena_conversations.c.handle).where(arena_conversations.c.labeler == who)
    connection.execute(delete(arena_turns).where(arena_turns.c.conversation.in_(mine)))
    connection.execute(delete(arena_conversations).where(arena_conversations.c.labeler == who))


def _rows(connection: Connection, who: str, *, handle: str = "", limit: int | None = None) -> list[Conversation]:
    table = arena_conversations
    wanted = select(table).where(table.c.labeler == who).order_by(table.c.created_at.desc(), table.c.handle)
    if handle:
        wanted = wanted.where(table.c.handle == handle)
    return [
        Conversation(**(dict(row) | {"start": messages(row["start"]), "policies": tuple(row["policies"])}))
        for row in connection.execute(wanted.limit(limit)).mappings()
    ]


def _with_turns(connection: Connection, conversation: Conversation) -> Conversation:
    return Conversation(**(vars(conversation) | {"turns": tuple(_turns(connection, conversation.handle))}))


def _turns(connection: Connection, handle: str) -> list[Turn]:
    wanted = select(arena_turns).where(arena_turns.c.conversation == handle).order_by(arena_turns.c.turn)
    return [
        Turn(row["question"], row["follows"], tuple(row["responses"]), tuple(row["records"]), row["finished_at"])
        for row in connection.execute(wanted).mappings()
    ]


def _insert_turn(connection: Connection, handle: str, turn: int, question: str, follows: str) -> None:
    values = {"question": question, "follows": follows, "responses": [], "records": [], "finished_at": 0.0}
    connection.execute(insert(arena_turns).values(conversation=handle, turn=turn, **values))
