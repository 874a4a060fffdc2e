"""The label store's tables. `migrations` creates them.

tasks        one row per task, in order of arrival, append-only: triggers refuse UPDATE, DELETE and replacing a row
places       one row per assignment (a labeler that a task wants): free, leased or done; leases are stored only here;
             triggers refuse DELETE, replacing a row, and moving an assignment to another task
judgments    one row per event of a labeler, append-only like tasks
people_acts  the audit log: one row per event on accounts or exports, append-only like tasks
arena_conversations, arena_turns   conversations of people with two policies (`heed arena`)
labelers     the name of each pseudonym; triggers refuse DELETE, and every UPDATE except an erasure

A column `labeler` holds a pseudonym, and so do `actor` and `subject` of the audit log if they are people. Only an
erasure may change a judgment: the trigger allows emptying the notes of an erased labeler, and nothing else.

In the database `assignments` is the table `places`, whose column `place` is the assignment's number, and `audit_log` is
the table `people_acts`.
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
    false,
    text,
)

metadata = MetaData()


def new_handle() -> str:
    """Returns a random handle, which reveals neither the task nor its batch nor its position in it."""
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
    Column("gold_ranks", JSON, nullable=False),  # [] = not a gold task
    Column("repeat_of", String, nullable=False),  # "" = not a repeat
    Column("details", JSON, nullable=False),
    Column("warning", String, nullable=False, server_default=""),  # "" = none
    # What labelers see instead of task_id, which may reveal what they must not know ("gold-7", "repeat of ...").
    Column("handle", String, nullable=False, default=new_handle),
    Index("tasks_by_handle", "handle", unique=True),
    Index("tasks_by_batch", "batch", "position"),
)

assignments = Table(
    "places",
    metadata,
    Column("task", ForeignKey("tasks.position"), nullable=False),
    Column("place", Integer, nullable=False),  # 0 .. num_labelers - 1
    Column("batch", String, nullable=False),  # the task's batch
    Column("original", Integer, nullable=False),  # position of the task that its task repeats; 0 = none
    Column("labeler", String),  # who has leased or finished it; NULL = nobody
    Column("expires_at", Float, nullable=False),  # end of the lease, seconds since the epoch
    Column("is_done", Boolean, nullable=False),
    # When this lease was granted or its task revealed, in seconds since the epoch; 0 = no lease.
    Column("given_at", Float, nullable=False),
    Column("is_revealed", Boolean, nullable=False, server_default=false()),  # of a task with a warning
    PrimaryKeyConstraint("task", "place"),
    Index(
        "places_open",
        "batch",
        "task",
        "place",
        sqlite_where=text("is_done = 0"),  # must match the queries' wording, or SQLite ignores the index
        postgresql_where=text("NOT is_done"),
    ),
    Index("places_by_labeler", "labeler", "task", unique=True),  # a labeler has at most one assignment of a task
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
    Column("revision", Integer, nullable=False),  # 0, 1, ...: the labeler's events on this task; the last is current
    Column("kind", String, nullable=False),  # answer, skip, undo, adjudication, void
    Column("ranks", JSON, nullable=False),  # in canonical order, dense, 1 is best; [] for a skip, undo or void
    Column("ratings", JSON, nullable=False),  # in canonical order; [] = none
    Column("flags", JSON, nullable=False),  # in canonical order, one list per response; [] = none
    Column("note", JSON, nullable=False),  # a string; JSON holds any string, PostgreSQL's text type does not
    Column("shown_order", JSON, nullable=False),  # shown_order[i]: canonical index of the response shown at position i
    Column("instructions_version", String, nullable=False),
    Column("milliseconds", Integer, nullable=False),
    Column("client", String, nullable=False),
    Column("created_at", Float, nullable=False),  # seconds since the epoch
    # This constraint's index also finds a task's judgments.
    UniqueConstraint("task", "labeler", "revision", name="judgments_once"),
    Index("judgments_by_labeler", "labeler", "judgment_id"),
)

labelers = Table(
    "labelers",
    metadata,
    Column("pseudonym", String, primary_key=True),  # random; or the name in imported data, if it identifies nobody
    Column("name", String, unique=True),  # NULL = erased, or never known
    Column("is_erased", Boolean, nullable=False),
)

accounts = Table(
    "accounts",
    metadata,
    Column("name", String, primary_key=True),
    Column("role", String, nullable=False),  # lead or labeler
    Column("key_hash", String, nullable=False),  # argon2
    Column("state", String, nullable=False),  # new, admitted, closed; "new" matters only with screening
    Column("read_version", String, nullable=False),  # the version of the instructions that they confirmed reading
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

audit_log = Table(
    "people_acts",
    metadata,
    Column("act_id", Integer, primary_key=True),
    Column("actor", String, nullable=False),
    Column("act", String, nullable=False),  # invited, revoked, joined, closed, admitted, exported, erased, ...
    Column("subject", String, nullable=False),  # a pseudonym or a batch
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

arena_conversations = Table(
    "arena_conversations",
    metadata,
    Column("handle", String, primary_key=True),  # random: it is in the page's address
    Column("labeler", String, nullable=False),
    Column("policies", JSON, nullable=False),  # names and digests of both
    Column("prompt_id", String, nullable=False),  # of a prompt from a file; "" = typed
    Column("start", JSON, nullable=False),  # [[role, content], ...] before the first question
    Column("is_swapped", Boolean, nullable=False),  # whether side A is the second policy
    Column("created_at", Float, nullable=False),
    Index("arena_conversations_by_labeler", "labeler", "created_at"),
)

arena_turns = Table(
    "arena_turns",
    metadata,
    Column("conversation", String, ForeignKey("arena_conversations.handle"), nullable=False),
    Column("turn", Integer, nullable=False),  # 0, 1, ...
    Column("question", JSON, nullable=False),  # a string; JSON holds any string
    Column("follows", String, nullable=False),  # "0" or "1": both policies read that one's answers; "own": each its own
    Column("responses", JSON, nullable=False),  # by policy; [] = unfinished
    Column("records", JSON, nullable=False),  # by policy: how the response was sampled; [] = unfinished
    Column("finished_at", Float, nullable=False),  # 0 = unfinished
    PrimaryKeyConstraint("conversation", "turn"),
)
