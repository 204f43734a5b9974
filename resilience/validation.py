"""What is wrong with data from outside, in words."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

_LISTED_MAX = 8
"""More names than this make a reason no clearer."""


def first_problem(error: ValidationError, *, whole: str = "all of it") -> str:
    """Return where the first problem is, the value there, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or whole
    has_value = first["type"] not in {"missing", "json_invalid"}
    value = f" {first['input']!r:.80}" if has_value else ""
    # A person calls no function here.
    is_unknown = first["type"] == "unexpected_keyword_argument"
    return f"{where}{value}: {'no field has this name' if is_unknown else first['msg']}"


def list_some(texts: Sequence[str]) -> str:
    """Return the first of many words, and how many more there are."""
    listed = ", ".join(texts[:_LISTED_MAX])
    more = len(texts) - _LISTED_MAX
    return f"{listed} and {more} more" if more > 0 else listed
