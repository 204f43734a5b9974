"""Values on the command lines of agents, daemons and those who ask them."""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path

_NUMBER_MAX = 1 << 40
_TOKEN_BYTES_MAX = 4096


def positive(text: str) -> int:
    """Return a whole number of at least 1; raises ArgumentTypeError for any other text."""
    return _whole(text, 1)


def count(text: str) -> int:
    """Return a whole number of at least 0; raises ArgumentTypeError for any other text."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) < _NUMBER_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds above 0; raises ArgumentTypeError for any other text."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, up to 1e6")
    return number


def read_token(text: str) -> str:
    """Return the token that a file holds; raises ArgumentTypeError where there is none."""
    try:
        with Path(text).open("rb") as file:
            found = file.read(_TOKEN_BYTES_MAX + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from error
    if not 0 < len(found) <= _TOKEN_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds no token; 1 to {_TOKEN_BYTES_MAX} characters are allowed"
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
    """Say whether only processes of this machine reach a host's address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
