"""Recognise a secret that was written where only a reference may stand."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAME = re.compile(r"(?i)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|API_?KEY|ACCESS_KEY)")
_TEXT = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bsk-[A-Za-z0-9_-]{20,}"
    r"|://[^/\s:@]+:[^/\s:@]+@"
)
_REMEDY = "allowed: a reference under cluster.secrets{}, so that the value is in no file"


def env_secrets(env: dict[str, str]) -> Iterator[str]:
    """Yield a message for each variable whose name says that its value is a secret."""
    for name, value in env.items():
        if value and _NAME.search(name):
            yield f"env.{name} holds a value (not shown); {_REMEDY.format(f'.{name}')}"


def text_secrets(content: object) -> Iterator[str]:
    """Yield a message for each text in plain data that has the form of a known secret."""
    for where, text in _texts(content, ""):
        if _TEXT.search(text):
            yield f"{where} looks like a secret (not shown); {_REMEDY.format('')}"


def override_secrets(arguments: Iterator[str] | list[str]) -> Iterator[str]:
    """Yield a message for each command-line override that holds a secret.

    Hydra writes a sweep's command line to a file before any job is looked at.
    """
    for argument in arguments:
        key, _, value = argument.lstrip("+~").partition("=")
        if key.startswith("env."):
            yield from env_secrets({key.removeprefix("env."): value})
        if _TEXT.search(value):
            yield f"{key} looks like a secret (not shown); {_REMEDY.format('')}"


def _texts(node: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield (key path, text) for every text in plain data, dictionary keys among them."""
    if isinstance(node, str):
        yield where, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield where or "the recipe", str(key)
            yield from _texts(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _texts(value, f"{where}[{index}]")
