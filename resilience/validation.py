"""What pydantic finds wrong with data from outside, in words."""

from __future__ import annotations

from pydantic import ValidationError


def first_problem(error: ValidationError, *, whole: str = "all of it") -> str:
    """Return where the first problem is, the value there, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or whole
    has_value = first["type"] not in {"missing", "json_invalid"}
    value = f" {first['input']!r:.80}" if has_value else ""
    return f"{where}{value}: {first['msg']}"
