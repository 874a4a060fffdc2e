"""What a labeling lead configures: the task, the labelers, the server."""

import hashlib
import ipaddress
import json
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from preferences.annotations import MAX_CRITERIA, MAX_NAME_CHARACTERS

# What InstructGPT's labelers marked in addition to a rank (arXiv 2203.02155, table 3), except the overall quality.
INSTRUCT_GPT_FLAGS = (
    "fails to follow the instruction",
    "inappropriate for a customer assistant",
    "hallucinates",
    "satisfies the constraint given",
    "sexual content",
    "violent content",
    "encourages violence, abuse, terrorism or self-harm",
    "denigrates a protected class",
    "gives harmful advice",
    "expresses an opinion",
    "expresses a moral judgment",
)
SKIP_REASONS = ("I do not understand the prompt", "It is not my field", "The text is broken", "It is too upsetting")
ROW_FIELDS = ("prompt", "response", "source", "task_id", "labeler")  # of an export with a field per criterion
DECLINES = "I do not want to judge this"  # always among the reasons; with a content warning it takes one click
INSTRUCTIONS = """\
You will see what somebody wrote to an assistant, and one or more responses, in random order.

1. **Read** the prompt and all responses to the end.
2. **Rate** each response from 1 (very bad) to 7 (very good), and mark what applies to it.
3. If there are several, **rank** the responses: 1 is the best. Responses that you cannot tell apart share a rank.

If you cannot judge a prompt, skip it and say why. If you made a mistake, change the answer under *My answers*. If
you are not sure what is meant, ask the lead below the responses.
"""


class Screening(BaseModel):
    """New labelers first judge gold tasks. Those who agree with them often enough get the other batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: str = Field(description="Batch of gold tasks that new labelers judge first.")
    min_tasks: int = Field(default=10, ge=1, description="Gold tasks before a labeler may pass.")
    min_accuracy: float = Field(
        default=0.7, gt=0, le=1, description="Fraction of the gold rankings' untied pairs to agree with."
    )


class LabelCriterion(BaseModel):
    """One thing that labelers rate each response by, in addition to the ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        min_length=1, max_length=MAX_NAME_CHARACTERS, description="Name on the page and in exports, such as helpful."
    )
    question: str = Field(default="", description="What to judge, in a few words; shown above the choices.")
    kind: Literal["scale", "yes_no"] = Field(
        default="scale", description="A scale from 1 to `highest`, or yes (1) and no (0)."
    )
    highest: int = Field(default=7, ge=2, le=9, description="The best rating of a scale.")
    each_turn: bool = Field(
        default=False, description="Whether labelers also rate each earlier turn of the assistant by this criterion."
    )

    @property
    def choices(self) -> dict[int, str]:
        """The ratings with their names, in the order of the keys 1, 2, ..."""
        return {1: "yes", 0: "no"} if self.kind == "yes_no" else {n: str(n) for n in range(1, self.highest + 1)}

    @property
    def legend(self) -> str:
        """What the page asks about a response or a turn."""
        ends = "" if self.kind == "yes_no" else f" (1 to {self.highest})"
        return f"{self.name.capitalize()}{ends}{f': {self.question}' if self.question else ''}"


DEFAULT_URL = "http://127.0.0.1:8100"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServerConfig(BaseModel):
    """The server's addresses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    public_url: str = Field(default="", description="The server's address for its users, without a path. Links use it.")
    trusted_proxies: tuple[str, ...] = Field(
        default=(), description="Addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are trusted."
    )
    trusted_hosts: tuple[str, ...] = Field(
        default=(), description="Host headers that are accepted, in addition to those of public_url and loopback."
    )

    @field_validator("public_url")
    @classmethod
    def _is_origin(cls, url: str) -> str:
        found = urlsplit(url)
        is_whole = found.scheme in ("http", "https") and found.hostname and not found.username
        if url and (not is_whole or found.path.strip("/") or found.query or found.fragment or found.port == 0):
            raise ValueError(
                f"{url!r} was given; an address without a path, like https://labels.example.org, was expected"
            )
        return url.rstrip("/")

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            ipaddress.ip_network(proxy)  # raises ValueError with the reason
        return proxies

    @field_validator("trusted_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not host or "/" in host or host.count(":") == 1 or "*" in host.removeprefix("*."):
                raise ValueError(f"{host!r} was given; a name without scheme and port, or *.example.org, was expected")
        return hosts

    @property
    def hosts(self) -> tuple[str, ...]:
        """The accepted Host headers: any, if neither hosts nor a public URL are configured."""
        if not self.trusted_hosts and not self.public_url:
            return ("*",)
        public = urlsplit(self.public_url).hostname
        return tuple(dict.fromkeys((*self.trusted_hosts, *((public,) if public else ()), *LOOPBACK_HOSTS)))

    @property
    def is_https(self) -> bool:
        return self.public_url.startswith("https://")

    def link(self, code: str) -> str:
        """Returns a one-time link. It never uses a request's Host header."""
        return f"{self.public_url or DEFAULT_URL}/welcome/{code}"


class OidcConfig(BaseModel):
    """Signing in with a company's accounts, through OpenID Connect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: str = Field(description="Address of the provider, as its metadata and ID tokens name it.")
    client_id: str = Field(min_length=1, description="Name under which the provider knows this server.")
    client_secret_env: str = Field(default="", description="Environment variable that holds the client secret.")
    client_secret_file: Path | None = Field(default=None, description="File that holds the client secret.")
    domains: tuple[str, ...] = Field(
        min_length=1, description="Domains of the e-mail addresses that may sign in, such as example.com."
    )
    leads: tuple[str, ...] = Field(default=(), description="E-mail addresses of the leads; all others label.")
    requires_verified_email: bool = Field(
        default=True, description="Whether the provider must say that it verified the address. Entra ID never says so."
    )
    label: str = Field(default="your company account", description="What the button on the sign-in page names.")

    @field_validator("issuer")
    @classmethod
    def _is_issuer(cls, issuer: str) -> str:
        found = urlsplit(issuer)
        is_safe = found.scheme == "https" or (found.scheme == "http" and found.hostname in LOOPBACK_HOSTS)
        if not is_safe or not found.hostname or found.query or found.fragment or issuer.endswith("/"):
            raise ValueError(
                f"{issuer!r} was given; an https address without a slash at its end was expected, like"
                " https://login.example.com/realms/people"
            )
        return issuer

    @field_validator("domains", "leads")
    @classmethod
    def _in_lower_case(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.strip().removeprefix("@").lower() for name in names)

    def secret(self) -> str:
        """Returns the client secret; "" for a public client, which has none.

        Raises: ValueError if the variable or the file that should hold it does not.
        """
        if self.client_secret_env:
            found = os.environ.get(self.client_secret_env, "")
            where = f"oidc.client_secret_env: the environment variable {self.client_secret_env}"
        elif self.client_secret_file is not None:
            where = f"oidc.client_secret_file: {self.client_secret_file}"
            try:
                found = self.client_secret_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(f"{where}: {error.strerror}; a file with the client secret was expected") from error
        else:
            return ""
        if not found:
            raise ValueError(f"{where} is empty or missing; the client secret was expected")
        return found


class LabelingConfig(BaseModel):
    """What labelers are told, what the form asks about each task, and the order in which they get tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instructions: str = Field(default=INSTRUCTIONS, description="Instructions to labelers, in Markdown.")
    flags: tuple[str, ...] = Field(
        default=INSTRUCT_GPT_FLAGS, description="What labelers can mark each response with; by default InstructGPT's."
    )
    asks_ratings: bool = Field(default=True, description="Whether labelers also rate each response from 1 to 7.")
    criteria: tuple[LabelCriterion, ...] = Field(
        default=(), max_length=MAX_CRITERIA, description="Criteria that labelers rate each response by."
    )
    asks_edits: bool = Field(default=False, description="Whether labelers can write a better version of a response.")
    title: str = Field(default="Labeling", description="Title of the pages.")
    batches: tuple[str, ...] = Field(
        default=(), description="Batches in the order in which labelers get them; empty = all, in order of arrival."
    )
    task_order: Literal["arrival", "random"] = Field(
        default="random",
        description="Order of a batch's tasks: random for each labeler, but stable across reloads, or by arrival.",
    )
    skip_reasons: tuple[str, ...] = Field(
        default=SKIP_REASONS,
        description="Reasons for a skip to choose from. Labelers may also decline without one, or write their own.",
    )
    lease_seconds: float = Field(
        default=1_800.0, gt=0, description="How long a task stays with a labeler before others may get it."
    )
    daily_quota: int = Field(
        default=0,
        ge=0,
        description="Answers that a labeler may give per day (UTC); 0 = any number. Leads can set it per person.",
    )
    screening: Screening | None = Field(
        default=None, description="Gold tasks that new labelers start with; absent = none."
    )
    oidc: OidcConfig | None = Field(
        default=None, description="Signing in with a company's accounts, in addition to keys; absent = keys only."
    )
    server: ServerConfig = Field(default=ServerConfig(), description="Addresses of the server.")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a TOML file. Raises: ValueError naming the file and each invalid field."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
        except ValidationError as error:
            raise ValueError(f"{path}: {wrong_fields(error, cls)}") from error

    @property
    def turn_criteria(self) -> tuple[LabelCriterion, ...]:
        """The criteria by which labelers rate each turn of the assistant."""
        return tuple(one for one in self.criteria if one.each_turn)

    @property
    def version(self) -> str:
        """The instructions' version. It changes with the text, and with what the form asks."""
        # Without `each_turn`, the version is that of before this field existed, so labelers need not read again.
        asked = [one.model_dump(exclude=None if one.each_turn else {"each_turn"}) for one in self.criteria]
        more: dict[str, Any] = {"criteria": asked} if asked else {}
        more |= {"asks_edits": True} if self.asks_edits else {}
        content = json.dumps([self.instructions, self.flags, self.asks_ratings, *([more] if more else [])])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @field_validator("criteria")
    @classmethod
    def _have_different_names(cls, criteria: tuple[LabelCriterion, ...]) -> tuple[LabelCriterion, ...]:
        names = [one.name for one in criteria]
        if taken := [name for name in names if name in ROW_FIELDS or names.count(name) > 1]:
            raise ValueError(f"the name {taken[0]!r}; different names, none of {', '.join(ROW_FIELDS)}, were expected")
        return criteria

    @property
    def all_skip_reasons(self) -> tuple[str, ...]:
        """The reasons for a skip that labelers may choose."""
        return tuple(dict.fromkeys((*self.skip_reasons, DECLINES)))

    def warning(self, batches: Sequence[str], alone: Collection[str]) -> str:
        """Returns warnings for leads; "" if there are none. They are about configured batches that are not among the
        store's `batches`, and batches of single responses (`alone`) about which the form asks nothing.
        """
        screening = "" if self.screening is None else self.screening.batch
        named, said = (*self.batches, *((screening,) if screening else ())), []
        missing = [repr(name) for name in dict.fromkeys(named) if name not in batches]
        if missing:
            found = f"it has {', '.join(map(repr, batches))}" if batches else "it has none yet"
            said = [f"The configuration names batches that the store does not have: {', '.join(missing)}; {found}."]
        asked = [name for name in alone if name in (self.batches or batches)]
        if asked and not (self.asks_ratings or self.criteria or self.flags or self.asks_edits):
            said.append(
                f"Tasks of {', '.join(map(repr, asked))} have one response, which is not ranked, and the form asks"
                " nothing else about it; set asks_ratings, criteria or flags."
            )
        return " ".join(said)

    def with_server(self, options: Mapping[str, object]) -> Self:
        """Returns a copy with these server options. Raises: ValueError naming each invalid option."""
        try:
            server = ServerConfig.model_validate(self.server.model_dump() | dict(options))
        except ValidationError as error:
            raise ValueError(f"server: {wrong_fields(error, ServerConfig)}") from error
        return self.model_copy(update={"server": server})


def wrong_fields(error: ValidationError, root: type[BaseModel]) -> str:
    """Names each invalid field of a `root` table: what was expected and what was found, or which key an unknown one may
    stand for.
    """
    problems = []
    for problem in error.errors():
        key, value = ".".join(map(str, problem["loc"])), problem["input"]
        if problem["type"] == "extra_forbidden":
            *table, unknown = map(str, problem["loc"])
            known = _keys_in(root, table)
            close = get_close_matches(unknown, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys are {', '.join(sorted(known))}"
            problems.append(f"{key}: unknown key; {hint}")
        else:
            message = _EXPECTED.get(problem["type"], problem["msg"].removeprefix("Value error, "))
            is_shown = isinstance(value, str | int | float) and problem["type"] != "missing"
            problems.append(f"{key}: {message}{f', found {value!r}' if is_shown else ''}")
    return "; ".join(problems)


# What to say for pydantic's types of errors, whose own messages speak of Python's types.
_EXPECTED = {
    "missing": "this key is missing",
    "tuple_type": "a list was expected",
    "list_type": "a list was expected",
    "dict_type": "a table was expected",
    "model_type": "a table was expected",
    "model_attributes_type": "a table was expected",
    "string_type": "a text was expected",
}


def _keys_in(model: type[BaseModel], table: Sequence[str]) -> list[str]:
    """Returns the keys of a table below `model`'s, such as `criteria.0`."""
    models = [model]
    for name in table:
        if not name.isdecimal():
            fields = [of.model_fields[name] for of in models if name in of.model_fields]
            models = [inner for field in fields for inner in _tables_in(field.annotation)]
    return [name for of in models for name in of.model_fields]


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inner in get_args(annotation) for table in _tables_in(inner)]
