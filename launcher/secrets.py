"""Recognise a secret that was written where only a reference may stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Whole words of a name: TOKENIZERS_PARALLELISM and MAX_TOKENS are no secrets.
_WORDS = r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|PRIVATE_KEY|API_?KEY|ACCESS_KEY"
_NAME = re.compile(rf"(?i)(?<![A-Z0-9])({_WORDS})(?![A-Z0-9])")
_TEXT = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bsk-[A-Za-z0-9_-]{20,}"
    r"|://[^/\s:@]+:[^/\s:@]+@"
)
_REMEDY = "allowed: a reference under cluster.secrets{}, so that the value is in no file"


def env_secrets(env: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a message for each variable whose name says that its value is a secret."""
    for name, value in env.items():
        if value and _NAME.search(name):
            yield f"env.{name} holds a value (not shown); {_REMEDY.format(f'.{name}')}"


def text_secrets(content: object) -> Iterator[str]:
    """Yield a message for each text in plain data that has the form of a known secret."""
    for where, text in _texts(content, ""):
        if _TEXT.search(text):
            yield f"{where} looks like a secret (not shown); {_REMEDY.format('')}"


def override_secrets(arguments: Iterable[str]) -> Iterator[str]:
    """Yield a message for each command-line override that may hold a secret.

    Hydra writes a sweep's command line to a file before any job is looked at,
    so this looks at the text alone and would rather refuse too much.
    """
    for argument in arguments:
        key, _, value = argument.lstrip("+~-").partition("=")
        if key.startswith("env."):
            yield from env_secrets({key.removeprefix("env."): value})
        elif key == "env" or key.startswith("hydra.sweeper"):
            if _NAME.search(value):
                yield f"{key} holds a secret's value (not shown); {_REMEDY.format('')}"
        elif _SECRET_ENTRY.fullmatch(key) and not value.startswith("{"):
            yield f"{key} holds a value (not shown); allowed: where it is, {_FORMS}"
        if _TEXT.search(argument):
            yield f"{_TEXT.sub('...', key)} looks like a secret (not shown); {_REMEDY.format('')}"


def file_secrets(content: object) -> Iterator[str]:
    """Yield a message for each secret in the plain data of a recipe's or profile's file."""
    env = content.get("env") if isinstance(content, dict) else None
    if isinstance(env, dict):
        yield from env_secrets({str(name): value and str(value) for name, value in env.items()})
    yield from text_secrets(content)


def may_hold_secret(text: str) -> bool:
    """Return False of a YAML text in which `file_secrets` would find nothing; costs little."""
    return _NAME.search(text) is not None or _TEXT.search(text) is not None


def shown_override(override: str) -> str:
    """Return an override as a message may repeat it: without a value that may be a secret."""
    key, equals, _ = override.partition("=")
    is_shown = not (_UNSHOWN.match(key.lstrip("+~-")) or _NAME.search(key))
    return override if is_shown or not equals else f"{key}=(not shown)"


def masked(content: object, place: tuple[Any, ...] = ()) -> Any:
    """Return plain data that lies at a place with NOT_SHOWN for each value that may be a secret."""
    if isinstance(content, dict):
        return {key: masked(value, (*place, key)) for key, value in content.items()}
    if isinstance(content, list):
        return [masked(value, (*place, index)) for index, value in enumerate(content)]
    return NOT_SHOWN if _may_be_secret(content, tuple(map(str, place))) else content


def _may_be_secret(value: object, place: tuple[str, ...]) -> bool:
    if value is None or isinstance(value, bool) or value == "":
        return False
    if _TEXT.search(str(value)) or (place[:1] == ("env",) and _NAME.search(place[-1])):
        return True
    if place[:2] == ("cluster", "secrets"):
        # What is below an entry says where the secret is.
        return len(place) == _SECRET_ENTRY_DEPTH
    # A file's path, and num_experts_per_token.
    is_other = place[-1].endswith("_file") or place[-1].startswith("num_")
    return not is_other and any(_NAME.search(part) for part in place)


NOT_SHOWN = "(not shown)"
_SECRET_ENTRY_DEPTH = 3
_UNSHOWN = re.compile(r"(env|cluster\.secrets)\b")
_SECRET_ENTRY = re.compile(r"cluster\.secrets\.[^.]+")
_FORMS = "as {file: PATH} or {} on Slurm and here, {name: SECRET, key: KEY} on Kubernetes"


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
