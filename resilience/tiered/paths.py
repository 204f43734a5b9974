"""Names: what a namespace may be, and the names of objects in S3 or a folder. Pure.

    {namespace}/data/{digest}                                   a shard's bytes
    {namespace}/steps/{step:012d}-g{generation}/{shard}.json    what a step is made of

No name has an empty part or one that begins with a dot, so that nothing leaves its
folder. Every name can be read back, and only names that are made here can be.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from resilience.tiered.shard import ShardId

NAMESPACE_CHARS_MAX = 200
SHARD_CHARS_MAX = 240
"""Of the shard's name as it is written: a file's name has at most 255 bytes."""
STEP_MAX = 10**12 - 1
"""More digits would break the order of the names."""

_SHOWN_MAX = 60
_NAMESPACE = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAMESPACE_CHARS_MAX - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DATA_KEY = re.compile(r"([^/]+)/data/([^/]+)")
_STEP_KEY = re.compile(r"([^/]+)/steps/([0-9]{12})-g(-?[0-9]{1,18})/([^/]+)\.json")
_EMPTY = "!"
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_.-]|![0-9A-F]{2})+")


def check_namespace(namespace: str) -> str:
    """Return the namespace; raises ValueError unless it may be one."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(
            f"namespace {_show(namespace)} is not allowed; want 1 to {NAMESPACE_CHARS_MAX} "
            "letters, digits, '.', '_' or '-', the first of them no '.'"
        )
    return namespace


def data_prefix(namespace: str) -> str:
    """Return what the names of all the namespace's bytes begin with."""
    return f"{check_namespace(namespace)}/data/"


def data_key(namespace: str, digest: str) -> str:
    """Return the name of a shard's bytes; raises ValueError for what is no digest."""
    return data_prefix(namespace) + _check_digest(digest)


def parse_data_key(key: str) -> tuple[str, str]:
    """Return namespace and digest; raises ValueError for any other name."""
    if not (match := _DATA_KEY.fullmatch(key)):
        raise ValueError(f"{_show(key)} names no data; want NAMESPACE/data/DIGEST")
    return check_namespace(match[1]), _check_digest(match[2])


def steps_prefix(namespace: str) -> str:
    """Return what the names of all the namespace's steps begin with."""
    return f"{check_namespace(namespace)}/steps/"


def step_prefix(namespace: str, step: int, generation: int) -> str:
    """Return what the names of a step's shards begin with; later steps sort later."""
    if not 0 <= step <= STEP_MAX:
        raise ValueError(f"step {step} is not allowed; want 0 to {STEP_MAX}")
    if abs(generation) >= 10**18:
        raise ValueError(f"generation {generation} is not allowed; want at most 18 digits")
    return f"{steps_prefix(namespace)}{step:012d}-g{generation}/"


def step_key(shard_id: ShardId) -> str:
    """Return the name of a shard's description; raises ValueError where there can be none."""
    folder = step_prefix(shard_id.namespace, shard_id.step, shard_id.generation)
    return f"{folder}{_escape(shard_id.shard)}.json"


def parse_step_key(key: str) -> ShardId:
    """Return which shard is described there; raises ValueError for any other name."""
    wanted = f"{_show(key)} names no shard; want NAMESPACE/steps/STEP-gGENERATION/SHARD.json"
    if not (match := _STEP_KEY.fullmatch(key)):
        raise ValueError(wanted)
    parsed = ShardId(
        namespace=check_namespace(match[1]),
        step=int(match[2]),
        generation=int(match[3]),
        shard=_unescape(match[4]),
    )
    if step_key(parsed) != key:
        raise ValueError(wanted)
    return parsed


def _check_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest {_show(digest)} is not allowed; want 32 of 0-9 and a-f")
    return digest


def _escape(shard: str) -> str:
    """Write all but letters, digits, `_`, `-` and inner dots as `!` and two hex digits."""
    try:
        quoted = quote(shard, safe="")
    except UnicodeEncodeError as error:
        raise ValueError(f"shard {_show(shard)} is not allowed; want text of Unicode") from error
    escaped = quoted.replace("~", "!7E").replace("%", "!") or _EMPTY
    if escaped.startswith("."):
        escaped = f"!2E{escaped[1:]}"
    if len(escaped) > SHARD_CHARS_MAX:
        raise ValueError(
            f"shard {_show(shard)} is not allowed; its name takes {len(escaped)} characters, "
            f"want at most {SHARD_CHARS_MAX}"
        )
    return escaped


def _unescape(escaped: str) -> str:
    if escaped == _EMPTY:
        return ""
    if not _ESCAPED.fullmatch(escaped):
        raise ValueError(f"{_show(escaped)} is no name of a shard; want '!' and two hex digits")
    try:
        return unquote(escaped.replace("!", "%"), errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"{_show(escaped)} is no name of a shard; want UTF-8") from error


def _show(value: str) -> str:
    shown = ascii(value)
    return shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}... ({len(value)})"
