"""The arguments of a user's program, as a recipe has them and as words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from launcher.job.fields import OneLine, check_no_nul, check_one_line
from launcher.written.texts import to_text

ArgumentStyle = Literal["--key value", "--key=value", "key=value"]
BooleanStyle = Literal["flag", "value"]

_ALLOWED = (
    "allowed: names with text, numbers, true, false, null, lists of texts and numbers, or sections "
    "of the same, as {lr: 3e-4}; or a list of words, as [--lr, 3e-4]"
)
_WORD = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
_TEXTS = {"type": "array", "items": {"type": "string"}}


def _check_all(value: Any) -> Any:
    # A null of conf/ may be replaced by either form.
    return _check({} if value is None else value)


def _check(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_check_word, value))
    if not isinstance(value, Mapping):
        raise ValueError(_ALLOWED)  # noqa: TRY004  pydantic tells of no other
    return {_check_key(key): _check_value(each) for key, each in value.items()}


def _check_key(key: Any) -> str:
    if not isinstance(key, str) or "=" in key:
        raise ValueError(f"the name {key!r}; {_ALLOWED}")
    return check_one_line(key)


def _check_value(value: Any) -> Any:
    if isinstance(value, (list, tuple, Mapping)):
        return _check(value)
    if value is not None and not isinstance(value, bool):
        _check_word(value)
    return value


def _check_word(value: Any) -> str:
    text = to_text(value)
    if not isinstance(text, str):
        raise ValueError(f"the value {value!r}; {_ALLOWED}")  # noqa: TRY004  pydantic's own
    return check_no_nul(text)


Arguments = Annotated[
    Any,
    PlainValidator(_check_all),
    WithJsonSchema(
        {"anyOf": [{"type": "object"}, {"type": "array", "items": _WORD}, {"type": "null"}]}
    ),
]
"""Values by the names of arguments, or words."""


def _as_tuple(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[
    tuple[OneLine, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [_TEXTS, {"type": "string"}, {"type": "null"}]}),
]
"""Several texts, one, or none."""


def named_values(arguments: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument; those of a section have its name before a dot."""
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            yield from named_values(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def argument_words(
    arguments: Mapping[str, Any] | tuple[str, ...], style: ArgumentStyle, booleans: BooleanStyle
) -> list[str]:
    """Return the words that a program gets, before any shell reads them."""
    if isinstance(arguments, tuple):
        return list(arguments)
    words: list[str] = []
    for key, value in named_values(arguments):
        # A name with dashes of its own is an option as it is.
        name = key if style == "key=value" or key.startswith("-") else f"--{key}"
        if value is None:
            continue
        if isinstance(value, bool) and booleans == "flag" and style != "key=value":
            words += [name] if value else []
        elif style == "--key value":
            words += [name, *(value if isinstance(value, tuple) else (to_text(value),))]
        else:
            words.append(f"{name}={to_text(value)}")
    return words
