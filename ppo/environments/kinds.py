"""The kinds of environments that a job may name, and the kind that loads a user's own class."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, ValidationError

from files.importing import load_function
from files.rows import Row
from lm.tokenizer import Messages
from ppo.environments.environment import Environment, Episode
from ppo.environments.mcp import MCPTools
from ppo.environments.openenv import OpenEnv
from ppo.environments.tools import Calculator, Retrieval
from ppo.environments.user import SimulatedUser
from ppo.environments.verifiers import VerifiersEnvironment
from training.config import by_kind
from training.data import RowFields


class OwnEnvironment(Environment):
    """A class of your own, derived from `ppo.environments.environment.Environment` (docs/environments.md)."""

    model_config = ConfigDict(title="Environment class")

    kind: Literal["class"] = Field(default="class", description="The kind of this table.")
    class_name: str = Field(
        pattern=r"^.+:.+$", description='"MODULE:CLASS" or "FILE.py:CLASS"; the current folder is searched too.'
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="Values of the fields that the class declares.")

    @property
    def own(self) -> Environment:
        """The user's environment. Raises: ValueError naming the wrong class or field."""
        limits = {"max_turns": self.max_turns, "deadline_seconds": self.deadline_seconds}
        return _loaded(self.class_name, json.dumps({**self.settings, **limits}, default=str))

    @property
    def short_name(self) -> str:
        """The class alone: its file's folder says nothing to a reader."""
        return self.class_name.rpartition(":")[2]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.own.tools

    @property
    def row_fields(self) -> RowFields:
        found: object = self.own.row_fields
        if not isinstance(found, RowFields):
            raise ValueError(
                f"ppo.environment.class_name {self.class_name!r}: row_fields is {found!r}; a property that returns"
                ' named_fields(("NAME",), "CLASS") was expected (docs/environments.md)'
            )
        return found

    def check(self, rows: Sequence[Row]) -> None:
        self.own.check(rows)

    def load(self) -> None:
        self.own.load()

    def open(self, conversation: Messages, row: Row, seed: int) -> Episode:
        return self.own.open(conversation, row, seed)


@cache
def _loaded(class_name: str, settings: str) -> Environment:
    loaded: object = load_function(class_name, "environment")
    if not isinstance(loaded, type) or not issubclass(loaded, Environment):
        raise ValueError(
            f"ppo.environment.class_name {class_name!r} is not a subclass of ppo.environments.environment.Environment"
        )
    try:
        return loaded.model_validate(json.loads(settings))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"ppo.environment.settings of {class_name}: {wrong}") from None
    except TypeError as error:  # a class with abstract methods
        raise ValueError(f"ppo.environment.class_name {class_name!r}: {error}") from None


AnyEnvironment = Annotated[
    Annotated[OwnEnvironment, Tag("class")]
    | Annotated[Calculator, Tag("calculator")]
    | Annotated[Retrieval, Tag("retrieval")]
    | Annotated[SimulatedUser, Tag("user")]
    | Annotated[MCPTools, Tag("mcp")]
    | Annotated[OpenEnv, Tag("openenv")]
    | Annotated[VerifiersEnvironment, Tag("verifiers")],
    by_kind("class", "calculator", "retrieval", "user", "mcp", "openenv", "verifiers"),
]
