"""An exception of the source on its way from the producer to the consumers.

The exception arrives as itself where its class can be imported and its attributes are plain data;
nothing of the class is executed but its own constructor.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from resilience.data.errors import SourceError

_SCRIPT_NAME = "__mp_main__"
"""What the script that consumers have started is called in the producer."""
# Together well below what a packet holds, in any language.
_TEXT_CHARS_MAX = 2_000
_TRACE_CHARS_MAX = 12_000
_VALUES_CHARS_MAX = 4_000


class RemoteTraceback(Exception):  # noqa: N818  (never raised: the cause of what is)
    """Where in the producer an exception was raised; its text is the traceback."""

    def __str__(self) -> str:
        return f"in the producer of the batches:\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, taken apart."""

    module: str
    name: str
    """Qualified name of the class in its module."""
    text: str
    trace: str
    arguments: list[Any] | None
    """None where JSON cannot hold them."""
    attributes: Mapping[str, Any] = field(default_factory=dict)


def describe_failure(error: BaseException) -> Failure:
    """Take an exception apart, in the producer."""
    kind = type(error)
    arguments = list(error.args)
    if isinstance(error, OSError) and len(arguments) == 2 and error.filename is not None:
        # What an OSError has taken as its file does not stand among its arguments.
        others = [] if error.filename2 is None else [None, str(error.filename2)]
        arguments += [str(error.filename), *others]
    attributes = {key: value for key, value in vars(error).items() if _is_plain(value)}
    return Failure(
        module="__main__" if kind.__module__ == _SCRIPT_NAME else kind.__module__,
        name=kind.__qualname__,
        text=_text(error)[:_TEXT_CHARS_MAX],
        trace="".join(traceback.format_exception(error))[-_TRACE_CHARS_MAX:],
        arguments=arguments if _is_plain(arguments) else None,
        attributes=attributes if _is_plain(attributes) else {},
    )


def encode_failure(failure: Failure) -> str:
    """Return the text that `parse_failure` reads."""
    return json.dumps(asdict(failure), ensure_ascii=False)


def parse_failure(text: str) -> Failure:
    """Return what was encoded; ValueError where the text is none."""
    try:
        return Failure(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"no failure: {text[:80]!r}") from error


def rebuild_error(failure: Failure, *, number: int) -> Exception:
    """Return the exception, to be raised at the batch that it was raised for.

    SourceError, with the same text, for one whose class or arguments cannot be had here.
    """
    error = _rebuild(failure)
    if error is None:
        error = SourceError(
            f"the source of batch {number} raised {failure.module}.{failure.name}: {failure.text}"
        )
    error.__cause__ = RemoteTraceback(failure.trace)
    return error


def _rebuild(failure: Failure) -> Exception | None:
    kind = _find_class(failure)
    if kind is None or failure.arguments is None:
        return None
    try:
        error = kind(*failure.arguments)
        if _text(error)[:_TEXT_CHARS_MAX] != failure.text:
            # Its constructor takes something else and makes the arguments of that.
            error = kind.__new__(kind, *failure.arguments)
            error.args = tuple(failure.arguments)
        for key, value in failure.attributes.items():
            setattr(error, key, value)
    except Exception:  # noqa: BLE001 - its constructor may do anything, and is not what failed
        return None
    return error


def _find_class(failure: Failure) -> type[Exception] | None:
    try:
        found: Any = importlib.import_module(failure.module)
        for part in failure.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as reason:  # noqa: BLE001 - an error of the text must not hide the error
        return f"(has no text: {reason!r})"


def _is_plain(value: object) -> bool:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    # JSON makes lists of tuples, and text of keys.
    return len(text) <= _VALUES_CHARS_MAX and bool(value == json.loads(text))
