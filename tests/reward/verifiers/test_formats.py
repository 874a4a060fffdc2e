"""Checks of a response's form, and how rows name checks."""

import json
import time

import pytest
from jsonschema import Draft202012Validator

from reward.verifiers import checks
from reward.verifiers.checks import Check, read_checks

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("pattern", "response", "passes"),
    [
        (r"\d{4}", "It was in 1984.", True),
        (r"^\d{4}$", "It was in 1984.", False),
        (r"^\d{4}$", "1984", True),
        (r"(?i)yes", "YES, it is", True),
    ],
)
def test_a_regular_expression_is_searched_for(pattern: str, response: str, passes: bool) -> None:
    assert Check.of("here", "format:regex", {"pattern": pattern}).passes(response) is passes


def test_a_search_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SEARCH_SECONDS", 0.1)
    check = Check.of("here", "format:regex", {"pattern": "^(a|a|b?a)*$"})
    with pytest.raises(TimeoutError):
        check.passes("a" * 40 + "c")


SLOW, LONG = "^(a|a|b?a)*$", "a" * 40 + "c"


@pytest.mark.parametrize(
    ("schema", "response"),
    [
        ({"pattern": SLOW}, f'"{LONG}"'),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": SLOW, "items": {"$ref": "#"}},
         f'["{LONG}"]'),
        ({"patternProperties": {SLOW: {}}}, f'{{"{LONG}": 1}}'),
        ({"patternProperties": {SLOW: {}}, "additionalProperties": False}, f'{{"{LONG}": 1}}'),
        ({"propertyNames": {"pattern": SLOW}}, f'{{"{LONG}": 1}}'),
    ],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_search_without_end_in_a_schema_is_stopped(
    schema: dict[str, object], response: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SEARCH_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        Check.of("here", "format:json_schema", {"schema": schema}).passes(response)


def test_the_searches_of_a_response_take_that_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SEARCH_SECONDS", 0.2)
    check = Check.of("here", "format:json_schema", {"schema": {"items": {"not": {"pattern": SLOW}}}})
    started = time.process_time()
    with pytest.raises(TimeoutError):
        check.passes(json.dumps(["a" * 15 + "c"] * 1000))
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("response", "passes"),
    [
        ('{"a": 1, "x1": "s"}', True),
        ('{"a": 1, "x1": 3}', False),
        ('{"a": 1, "y": null}', True),
        ('{"a": 1, "y": 3}', False),
        ('{"a": "1"}', False),
        ('{"x1": "no digit"}', True),
        ("[1]", True),
    ],
)
def test_named_matching_and_other_properties(response: str, passes: bool) -> None:
    schema = {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^x": {"type": "string"}},
        "additionalProperties": {"type": "null"},
    }
    assert Check.of("here", "format:json_schema", {"schema": schema}).passes(response) is passes
    assert Draft202012Validator(schema).is_valid(json.loads(response)) is passes


@pytest.mark.parametrize(
    ("response", "passes"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('```json\n{"name": "Ada"}\n```', True),
        ('{"name": "Ada", "age": -1}', False),
        ('{"age": 36}', False),
        ("name: Ada", False),
        ("[" * 100_000, False),
    ],
)
def test_json_is_valid_under_the_schema_or_not(response: str, passes: bool) -> None:
    assert Check.of("here", "format:json_schema", {"schema": SCHEMA}).passes(response) is passes


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "no_such"}, r"check 'no_such'; one of keywords:existence, "),
        ({"kind": 3}, "field 'kind' is int; a string was expected"),
        ({}, "field 'kind' is missing"),
        ({"kind": "format:regex"}, "check 'format:regex': argument 'pattern': it is missing"),
        ({"kind": "format:regex", "pattern": "("}, r"argument 'pattern': '\(' found: not a regular expression: "),
        ({"kind": "format:json_schema", "schema": {"type": "objekt"}}, r"not a JSON schema \(draft 2020-12\): \$.type"),
        ({"kind": "format:json_schema", "schema": {"$ref": "http://a/b"}}, "within the schema was expected"),
        ({"kind": "format:json_schema", "schema": {"$ref": "#/$defs/a"}}, r"\$ref '#/\$defs/a': a reference within"),
        ({"kind": "format:json_schema", "schema": {"not": {"$dynamicRef": "#a"}}}, r"\$dynamicRef '#a': a reference"),
        ({"kind": "format:json_schema", "schema": {"$ref": "#"}}, "its references lead back to themselves without end"),
        (
            {"kind": "format:json_schema", "schema": {"patternProperties": {"a": {}}, "unevaluatedProperties": False}},
            "patternProperties with unevaluatedProperties: additionalProperties was expected",
        ),
        ({"kind": "punctuation:no_comma", "n": 1}, "argument 'n': this kind has no such argument"),
        (
            {"kind": "length_constraints:number_words", "relation": "exactly", "num_words": 3},
            "argument 'relation': 'exactly' found: Input should be 'at least' or 'less than'",
        ),
        ({"kind": "length_constraints:number_words", "relation": "at least", "num_words": "3"}, "'3' found: .*integer"),
        ({"kind": "length_constraints:number_words", "relation": "at least", "num_words": -3}, "-3 found: .*or equal"),
        ({"kind": "keywords:existence", "keywords": []}, "at least 1 item"),
        ({"kind": "keywords:letter_frequency", "letter": "ab", "let_frequency": 1, "let_relation": "at least"}, "1 c"),
        ({"kind": "language:response_language", "language": "xx"}, "'xx' found: one of af, ar, "),
    ],
)  # fmt: skip
def test_a_wrong_check_is_an_error_that_names_the_row(check: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.jsonl: line 7: field 'checks\[1\]'.*{message}"):
        read_checks("a.jsonl: line 7", {"checks": [{"kind": "punctuation:no_comma"}, check]})


def test_rows_name_checks_with_their_arguments_and_null_is_absent() -> None:
    row = {
        "checks": [
            {"kind": "length_constraints:number_words", "relation": "less than", "num_words": 4, "letter": None},
            {"kind": "punctuation:no_comma"},
        ]
    }
    words, comma = read_checks("here", row)
    assert words.arguments == {"relation": "less than", "num_words": 4}
    assert [check.passes("one, two three") for check in (words, comma)] == [True, False]
    assert [check.passes(" \n") for check in (words, comma)] == [False, False]  # an empty response passes none
    with pytest.raises(ValueError, match="here: field 'checks' is missing"):
        read_checks("here", {"prompt": "a"})


@pytest.mark.parametrize("response", ["1e400", "-1e400", "[1, 1e400]", "NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_is_invalid(response: str) -> None:
    assert not checks.json_schema(response, schema={})
    assert checks.json_schema("[1e300, 1e-400, -0.5]", schema={"items": {"type": "number"}})


@pytest.mark.parametrize("response", ["NaN", "1e400", "9" * 400, "[" * 400 + "]" * 400])
def test_json_that_the_validator_cannot_handle_is_invalid(response: str) -> None:
    schema = {"multipleOf": 0.5, "items": {"$ref": "#"}, "uniqueItems": True, "type": "number"}
    assert not checks.json_schema(response, schema=schema)
