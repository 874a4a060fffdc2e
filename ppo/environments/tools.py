"""Environments that run the tools that the policy calls: a calculator, and a search in a folder of texts.

A turn with calls is answered with their results, one message each. A turn without calls is the policy's answer, and
ends the conversation; `[ppo.reward]` scores it.
"""

import ast
import math
import operator
import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.environment import Environment, Episode, Reply

MOST_CALLS = 16  # in one turn; the others are not run
MOST_CHARACTERS = 200  # of an expression
MOST_BITS = 1024  # of an integer
K1, B = 1.5, 0.75  # of BM25
NUM_PASSAGES, PASSAGE_CHARACTERS = 3, 500  # that a search returns, and to which each is cut


class ToolError(Exception):
    """A call that cannot be answered. The policy reads the message."""


class ToolEnvironment(Environment):
    """The base of environments that only run tools."""

    scores: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    @abstractmethod
    def run(self, call: ToolCall) -> str:
        """Returns what the policy reads in answer to a call. Raises: ToolError with what it reads instead."""

    def open(self, _conversation: Messages, _row: Row, _seed: int) -> Episode:
        return ToolEpisode(self)


class ToolEpisode(Episode):
    """A conversation with tools, which have no state."""

    def __init__(self, environment: ToolEnvironment) -> None:
        self.environment = environment

    async def reply(self, message: AssistantMessage) -> Reply:
        if not message.tool_calls:
            return Reply(is_over=True)
        return Reply([self._result(number, call) for number, call in enumerate(message.tool_calls)])

    def _result(self, number: int, call: ToolCall) -> Mapping[str, str]:
        try:
            if wrong := refusal(number, call):
                raise ToolError(wrong)
            content = self.environment.run(call)
        except ToolError as error:
            content = f"Error: {error}"
        return {"role": "tool", "name": call.name, "content": content}


def refusal(number: int, call: ToolCall) -> str:
    """Returns why a turn's call of this number, from 0, is not made; "" if it is."""
    return f"a turn has at most {MOST_CALLS} calls" if number >= MOST_CALLS else call.failure


def function_schema(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    """Returns the JSON schema of a function with a single text parameter, as chat templates expect it."""
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_argument(call: ToolCall, schema: Mapping[str, Any]) -> str:
    """Returns a call's only argument. Raises: ToolError if the call names another tool, or has other arguments."""
    name, (parameter,) = schema["function"]["name"], schema["function"]["parameters"]["properties"]
    if call.name != name:
        raise ToolError(f"there is no tool {call.name!r}; {name} was expected")
    value = call.arguments.get(parameter)
    if not isinstance(value, str) or len(call.arguments) != 1:
        raise ToolError(f"{name} has one argument, {parameter}, which is a text")
    return value


CALCULATE = function_schema(
    "calculate", "Returns the value of an arithmetic expression.", "expression", "such as (3 + 4) * 2"
)
SEARCH = function_schema(
    "search", "Returns the passages of a library that fit a query best.", "query", "words to search for"
)


class Calculator(ToolEnvironment):
    """A calculator, the tool `calculate`: numbers, + - * / // % **, and parentheses."""

    model_config = ConfigDict(title="Environment calculator")

    kind: Literal["calculator"] = Field(default="calculator", description="The kind of this table.")

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [CALCULATE]

    def run(self, call: ToolCall) -> str:
        return calculated(text_argument(call, CALCULATE))


_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculated(expression: str) -> str:
    """Returns the value of an arithmetic expression, with at most 12 significant digits if it is not an integer.

    Nothing but arithmetic is evaluated, and no step can take long. Raises: ToolError naming what is wrong.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"an expression has at most {MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python's parser raises all of these
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        is_power = isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
        if is_power and right > 0 and int(left).bit_length() * right > MOST_BITS:
            raise OverflowError
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise OverflowError
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError
    number: int | float = value
    return number


class Retrieval(ToolEnvironment):
    """A search in a folder of texts, the tool `search`: it returns the paragraphs that fit a query best, by BM25."""

    model_config = ConfigDict(title="Environment retrieval")

    kind: Literal["retrieval"] = Field(default="retrieval", description="The kind of this table.")
    folder: str = Field(
        pattern=r"^.+$",
        description="Folder of .txt and .md files, on every machine that samples; paragraphs, which empty lines"
        " separate, are searched.",
    )

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [SEARCH]

    def check(self, _rows: Sequence[Row]) -> None:
        self.load()

    def load(self) -> None:
        index_of(self.folder)

    def run(self, call: ToolCall) -> str:
        found = index_of(self.folder).search(text_argument(call, SEARCH), NUM_PASSAGES)
        return "\n\n".join(passage[:PASSAGE_CHARACTERS] for passage in found) or "Nothing was found."


class Index:
    """An index of passages by the words in them."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = passages
        self._counts = [Counter(_words(passage)) for passage in passages]
        self._lengths = [counts.total() for counts in self._counts]
        self._places: dict[str, list[int]] = {}
        for place, counts in enumerate(self._counts):
            for word in counts:
                self._places.setdefault(word, []).append(place)

    def search(self, query: str, number: int) -> list[str]:
        """Returns at most `number` passages, those with the highest scores above 0, best first.

        score = Σ over the query's words of ln(1 + (N - n + ½)/(n + ½)) · f (k1 + 1)/(f + k1 (1 - b + b l / mean l)),
        where n of N passages have the word, and a passage of l words has it f times (Robertson and Zaragoza 2009,
        eq. 3.15, with the idf of Lucene, which is never negative).
        """
        scores, mean_length = defaultdict[int, float](float), sum(self._lengths) / max(1, len(self._lengths))
        for word in dict.fromkeys(_words(query)):
            places = self._places.get(word, ())
            weight = math.log(1 + (len(self.passages) - len(places) + 0.5) / (len(places) + 0.5))
            for place in places:
                frequency, length = self._counts[place][word], self._lengths[place]
                norm = K1 * (1 - B + B * length / mean_length)
                scores[place] += weight * frequency * (K1 + 1) / (frequency + norm)
        best = sorted(scores, key=lambda place: (-scores[place], place))
        return [self.passages[place] for place in best[:number]]


@cache
def index_of(folder: str) -> Index:
    """Returns the index of a folder, which each process reads once. Raises: ValueError if it has no texts."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".txt", ".md") and path.is_file())
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    passages = [part.strip() for text in texts for part in re.split(r"\n\s*\n", text) if part.strip()]
    if not passages:
        raise ValueError(
            f"ppo.environment.folder {folder!r} has no texts; a folder with .txt or .md files was expected"
        )
    return Index(passages)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
