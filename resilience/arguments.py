"""Values on the command lines of agents, daemons and those who ask them."""

from __future__ import annotations

import argparse
import ipaddress
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from resilience.docstrings import field_docstrings
from resilience.plain_files import open_plain

NO_NAME = "its name does not resolve"
"""Begin of the reason for a connection that fails because a host's name does not resolve."""
NAMELESS_S = 60.0
"""Names of nodes that do not resolve for so long are told of: a pod has a name once it starts."""

_SECONDS_MAX = 1e6
_TOKEN_BYTES_MIN, _TOKEN_BYTES_MAX = 16, 4096


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: under a page of usage nobody finds it."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(
    parser: argparse._ActionsContainer,
    model: type[BaseModel],
    defaults: Mapping[str, Any] | None = None,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    notes: Mapping[str, str] = MappingProxyType({}),
    prefix: str = "",
) -> None:
    """Add an option for each field of a model that `defaults` names; without it for all.

    The field's annotation says what is allowed, its docstring what it is. Its name is the option's,
    after the prefix, where `names` has no other one. `notes` say what None stands for.
    """
    texts = field_docstrings(model)
    for name, field in model.model_fields.items():
        if defaults is not None and name not in defaults:
            continue
        default = field.default if defaults is None else defaults[name]
        text = texts[name].replace("null", "not given").removesuffix(".")
        kind: Any = Annotated[field.annotation, field]
        how: dict[str, Any] = {"type": read_as(kind)}
        if default is False:
            how = {"action": "store_true"}
        elif default == ():
            how = {"type": read_as(get_args(field.annotation)[0]), "action": "append"}
            default = []
        elif note := notes.get(name, f"{default:g}" if isinstance(default, float) else default):
            text += f" (default {note})"
        option = names.get(name, prefix + name).replace("_", "-")
        parser.add_argument(f"--{option}", dest=prefix + name, default=default, help=text, **how)


def read_as(kind: Any) -> Callable[[str], Any]:
    """Return what makes a value of a type of an option's text, or raises ArgumentTypeError."""
    adapter = TypeAdapter(kind)

    def read(text: str) -> Any:
        try:
            value = adapter.validate_python(text)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise argparse.ArgumentTypeError(f"{text!r}: {message}") from error
        if isinstance(value, float) and value > _SECONDS_MAX:
            raise argparse.ArgumentTypeError(f"{text!r}: at most {_SECONDS_MAX:g} is allowed")
        return value

    return read


def read_token(text: str) -> str:
    """Return the token that a file holds, which nobody else may read.

    Raises ArgumentTypeError where there is none, or others can read it.
    """
    try:
        with open(text, "rb", opener=open_plain) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            found = file.read(_TOKEN_BYTES_MAX + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from error
    # Kubernetes keeps a Secret's files in a folder ..TIME, and lets a pod's fs_group read them.
    is_mounted = any(part.startswith("..") for part in Path(text).resolve().parts)
    if mode not in (0o600, 0o400) and not (is_mounted and mode == 0o440):
        raise argparse.ArgumentTypeError(
            f"{text!r} has mode {mode:04o}; allowed: 0600 or 0400, and 0440 in a mounted Secret"
        )
    if not _TOKEN_BYTES_MIN <= len(found) <= _TOKEN_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds {len(found)} characters; allowed for a token: {_TOKEN_BYTES_MIN} to "
            f"{_TOKEN_BYTES_MAX}"
        )
    return found


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT; raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal()
    if not host or not is_number or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as 127.0.0.1:9200")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach a host's address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
