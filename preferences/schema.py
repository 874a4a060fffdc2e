"""The label store's tables. `migrations` creates them.

tasks        one row per task, in order of arrival, append-only: triggers refuse UPDATE, DELETE and replacing a row
places       one row per assignment (a labeler that a task wants): free, leased or done; leases are stored only here;
             triggers refuse DELETE, replacing a row, and moving an assignment to another task
judgments    one row per event of a labeler, append-only like tasks
people_acts  the audit log: one row per event on accounts or exports, append-only like tasks
questions    one row per message between a labeler and the leads about a task, append-only like tasks
arena_conversations, arena_turns   conversations of people with two policies (`heed arena`)
labelers     the name of each pseudonym; triggers refuse DELETE, and every UPDATE except an erasure
batch_settings, requirements
             whether a batch is closed, and which tags a labeler needs for it or for some of its tasks
task_summaries, task_texts
             how far the answers to a task agree, and its words, for leads to search by; computed from the tables above

A column `labeler` holds a pseudonym, and so do `actor` and `subject` of the audit log if they are people. Only an
erasure may change a judgment or a message: the triggers allow emptying the notes and messages of an erased person, and
nothing else.

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
    Text,
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
    Index(
        "tasks_gold",
        "position",
        sqlite_where=text("gold_ranks <> '[]'"),
        postgresql_where=text("gold_ranks::text <> '[]'"),
    ),
    Index(
        "tasks_repeating", "position", sqlite_where=text("repeat_of <> ''"), postgresql_where=text("repeat_of <> ''")
    ),
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
    Column("is_surplus", Boolean, nullable=False, server_default=false()),  # a lead wants fewer labelers by now
    Column("is_archived", Boolean, nullable=False, server_default=false()),  # the task's; a lead put it away
    Column("requires", String, nullable=False, server_default=""),  # tags that a labeler needs; see `assignment`
    PrimaryKeyConstraint("task", "place"),
    Index(
        "places_open",
        "batch",
        "task",
        "place",
        # must match the queries' wording, or SQLite ignores the index
        sqlite_where=text("is_done = 0 AND is_surplus = 0 AND is_archived = 0"),
        postgresql_where=text("NOT is_done AND NOT is_surplus AND NOT is_archived"),
    ),
    Index("places_done", "batch", "labeler", sqlite_where=text("is_done = 1"), postgresql_where=text("is_done")),
    Index("places_archived", "task", sqlite_where=text("is_archived = 1"), postgresql_where=text("is_archived")),
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
    Column("annotations", JSON, nullable=False, server_default="{}"),  # see preferences.annotations; {} = none
    # This constraint's index also finds a task's judgments.
    UniqueConstraint("task", "labeler", "revision", name="judgments_once"),
    Index("judgments_by_labeler", "labeler", "judgment_id"),
    Index("judgments_by_labeler_time", "labeler", "created_at"),
    Index("judgments_by_time", "created_at"),
    Index(
        "judgments_noted",
        "judgment_id",
        sqlite_where=text("note <> '\"\"'"),
        postgresql_where=text("note::text <> '\"\"'"),
    ),
    Index(
        "judgments_marked",
        "judgment_id",
        sqlite_where=text("flags <> '[]'"),
        postgresql_where=text("flags::text <> '[]'"),
    ),
)

questions = Table(
    "questions",
    metadata,
    Column("message_id", Integer, primary_key=True),
    Column("task", ForeignKey("tasks.position"), nullable=False),
    Column("labeler", String, nullable=False),  # whose thread about the task it is
    Column("author", String, nullable=False),  # this labeler or a lead
    Column("kind", String, nullable=False),  # question, reply, resolved
    Column("text", JSON, nullable=False),  # a string, as in judgments.note
    Column("created_at", Float, nullable=False),  # seconds since the epoch
    Index("questions_by_labeler", "labeler", "task", "message_id"),
    Index("questions_by_task", "task", "labeler", "message_id"),
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
    Column("tags", JSON, nullable=False, server_default="[]"),  # which tasks they may get: languages, skills, teams
    Column("daily_quota", Integer, nullable=False, server_default="0"),  # answers per day; 0 = the configuration's
    Column("identity", String, nullable=False, server_default=""),  # hash of an OIDC subject; "" = signs in with a key
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

batch_settings = Table(
    "batch_settings",
    metadata,
    Column("batch", String, primary_key=True),
    Column("is_closed", Boolean, nullable=False),  # no new leases
    Column("requires", String, nullable=False),  # tags that a labeler needs for the batch; see `assignment`
)

requirements = Table(  # the distinct values of places.requires, so that no request has to scan for them
    "requirements",
    metadata,
    Column("batch", String, nullable=False),
    Column("requires", String, nullable=False),
    PrimaryKeyConstraint("batch", "requires"),
)

task_summaries = Table(  # of every task that was answered or adjudicated; see `adjudication`
    "task_summaries",
    metadata,
    Column("task", ForeignKey("tasks.position"), primary_key=True, autoincrement=False),
    Column("batch", String, nullable=False),
    Column("num_answers", Integer, nullable=False),
    Column("num_agreeing", Integer, nullable=False),  # how many gave the most frequent ranking
    Column("disagreement", Float, nullable=False),  # 0 to 1
    Column("is_adjudicated", Boolean, nullable=False),
    Index("task_summaries_by_disagreement", "batch", text("disagreement DESC"), "task"),
    Index("task_summaries_in_all_batches", text("disagreement DESC"), "task"),
)

task_texts = Table(  # the full-text index on it differs between the databases; see the migration and `search`
    "task_texts",
    metadata,
    Column("task", ForeignKey("tasks.position"), primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
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
