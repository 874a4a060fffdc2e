"""The label store's tables as they are now; `migrations` makes them, and turns older stores into these.

tasks      one row a task, in order of arrival; the content never changes
places     one row a labeler that a task wants: free, leased or done; what is leased is found here alone
judgments  one row an act of a labeler, append-only: triggers refuse UPDATE and DELETE
people_acts  one row an act on people or on what they made (an invitation, an export), append-only likewise
"""

import secrets

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    UniqueConstraint,
    text,
)

metadata = MetaData()


def new_handle() -> str:
    """A task's handle: random, so that it says nothing of the task, its batch or its place in it."""
    return secrets.token_urlsafe(12)


tasks = Table(
    "tasks",
    metadata,
    Column("position", Integer, primary_key=True),  # order of arrival
    Column("task_id", String, nullable=False, unique=True),
    Column("batch", String, nullable=False),
    Column("num_labelers", Integer, nullable=False),  # how many distinct labelers are wanted
    Column("prompt", JSON, nullable=False),  # [[role, content], ...]
    Column("responses", JSON, nullable=False),
    Column("sources", JSON, nullable=False),
    Column("objective", String, nullable=False),
    Column("gold_ranks", JSON, nullable=False),  # [] = no gold task
    Column("repeat_of", String, nullable=False),  # "" = no repeat
    Column("details", JSON, nullable=False),
    # What labelers are shown instead of task_id, which may say what they must not know ("gold-7", "repeat of ...").
    Column("handle", String, nullable=False, default=new_handle),
    Index("tasks_by_handle", "handle", unique=True),
    Index("tasks_by_batch", "batch", "position"),
)

places = Table(
    "places",
    metadata,
    Column("task", ForeignKey("tasks.position"), nullable=False),
    Column("place", Integer, nullable=False),  # 0 .. num_labelers - 1
    Column("batch", String, nullable=False),  # its task's
    Column("original", Integer, nullable=False),  # position of the task that its task repeats; 0 = none
    Column("labeler", String),  # who holds it or is done with it; NULL = nobody
    Column("expires_at", Float, nullable=False),  # of a lease, seconds since the epoch
    Column("is_done", Boolean, nullable=False),
    Column("given_at", Float, nullable=False),  # when its labeler was first shown the task under this lease; 0 = not
    PrimaryKeyConstraint("task", "place"),
    Index(
        "places_open",
        "batch",
        "task",
        "place",
        sqlite_where=text("is_done = 0"),  # as queries say it: else the index is not used
        postgresql_where=text("NOT is_done"),
    ),
    Index("places_by_labeler", "labeler", "task", unique=True),  # nobody has two places of one task
    Index(
        "places_held",
        "labeler",
        "task",
        sqlite_where=text("is_done = 0 AND labeler IS NOT NULL"),
        postgresql_where=text("NOT is_done AND labeler IS NOT NULL"),
    ),
)

judgments = Table(
    "judgments",
    metadata,
    Column("judgment_id", Integer, primary_key=True),
    Column("task", ForeignKey("tasks.position"), nullable=False),
    Column("labeler", String, nullable=False),
    Column("revision", Integer, nullable=False),  # 0, 1, ...: the labeler's acts on this task; the last one stands
    Column("kind", String, nullable=False),  # answer, skip, undo, adjudication
    Column("ranks", JSON, nullable=False),  # in canonical order, dense, 1 is best; [] of a skip or an undo
    Column("ratings", JSON, nullable=False),  # in canonical order; [] = none
    Column("flags", JSON, nullable=False),  # in canonical order, a list a response; [] = none
    Column("note", JSON, nullable=False),  # a string; JSON takes every one, PostgreSQL's text does not
    Column("shown_order", JSON, nullable=False),  # shown_order[i]: canonical index of the response shown at place i
    Column("instructions_version", String, nullable=False),
    Column("milliseconds", Integer, nullable=False),
    Column("client", String, nullable=False),
    Column("created_at", Float, nullable=False),  # seconds since the epoch
    # Also the index that finds a task's judgments.
    UniqueConstraint("task", "labeler", "revision", name="judgments_once"),
    Index("judgments_by_labeler", "labeler", "judgment_id"),
)

accounts = Table(
    "accounts",
    metadata,
    Column("name", String, primary_key=True),
    Column("role", String, nullable=False),  # lead or labeler
    Column("key_hash", String, nullable=False),  # argon2
    Column("state", String, nullable=False),  # new, admitted, closed; only screening makes a difference of new
    Column("read_version", String, nullable=False),  # the instructions that they said they have read
    Column("created_at", Float, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("token_hash", String, primary_key=True),  # SHA-256: the token has 256 random bits
    Column("account", String, ForeignKey("accounts.name"), nullable=False),
    Column("expires_at", Float, nullable=False),
)

invitations = Table(
    "invitations",
    metadata,
    Column("code_hash", String, primary_key=True),
    Column("name", String, nullable=False, unique=True),  # a newer link voids the older one
    Column("role", String, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("invited_by", String, nullable=False),  # a lead, "command line" or "server"
)

people_acts = Table(
    "people_acts",
    metadata,
    Column("act_id", Integer, primary_key=True),
    Column("actor", String, nullable=False),
    Column("act", String, nullable=False),  # invited, revoked, joined, closed, admitted, exported, read
    Column("subject", String, nullable=False),  # a name, or a batch
    Column("created_at", Float, nullable=False),
)

instructions = Table(
    "instructions",
    metadata,
    Column("version", String, primary_key=True),
    Column("text", JSON, nullable=False),
    Column("flags", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)
