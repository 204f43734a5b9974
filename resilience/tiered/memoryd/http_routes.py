"""Which call of AWS's protocol a request is. Pure.

GET, POST, DELETE  /v1/cp/namespaces/{namespace}   POST: ?num_ranks=N&steps_retained=N
GET                /v1/cp/checkpoints/{namespace}/latest   ?limit=N
GET, POST, DELETE  /v1/cp/checkpoints/{namespace}/{rank}/{step}
POST               /v1/cp/cluster/reset
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from resilience.runtime.http_messages import HttpError, Request, bad_request

MAX_NAME = 200
"""Of a namespace, in characters."""
MAX_RANKS = 1 << 20
MAX_STEPS = 1 << 20
MAX_STEP = (1 << 63) - 1
STEPS_RETAINED = 3
"""As the client asks for where nobody says otherwise."""
LIMIT = 5
"""Steps that `latest` tells where the client names no number."""

HEALTH_PATH = "/health"
SHARD_META = "Shard-Meta"
ALGORITHM = "xxh3_128"
MAX_SHARD_META = 4096

NAMESPACE = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}\Z")
_NUMBER = re.compile(r"0\Z|[1-9][0-9]{0,18}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of the protocol: `kind` is the name of what is done."""

    kind: str
    namespace: str = ""
    rank: int = 0
    step: int = 0
    num_ranks: int = 0
    steps_retained: int = 0
    limit: int = 0


_PREFIX = "/v1/cp/"
_ROUTES: tuple[tuple[re.Pattern[str], dict[str, str]], ...] = (
    (
        re.compile(r"namespaces/(?P<namespace>[^/]*)"),
        {"GET": "get_namespace", "POST": "create_namespace", "DELETE": "delete_namespace"},
    ),
    (re.compile(r"checkpoints/(?P<namespace>[^/]*)/latest"), {"GET": "latest"}),
    (
        re.compile(r"checkpoints/(?P<namespace>[^/]*)/(?P<rank>[^/]*)/(?P<step>[^/]*)"),
        {"GET": "get_shard", "POST": "put_shard", "DELETE": "delete_shard"},
    ),
    (re.compile(r"cluster/reset"), {"POST": "reset"}),
)


def parse_call(request: Request) -> Call:
    """Say what a request asks for.

    Raises HttpError: 404 for an unknown path, 405 with the methods that there are, 400 for a
    name or number that cannot be one.
    """
    path, _, query = request.target.partition("?")
    if any(part in path for part in ("%", "\\", "#", ";")) or {".", ".."} & set(path.split("/")):
        raise bad_request("the path has characters that no name has")
    if path.startswith(_PREFIX):
        for pattern, kinds in _ROUTES:
            if match := pattern.fullmatch(path, len(_PREFIX)):
                kind = _kind(kinds, request.method)
                return _call(kind, match.groupdict(), _parse_query(query))
    if path == HEALTH_PATH:
        return Call(kind=_kind({"GET": "health"}, request.method))
    raise HttpError(HTTPStatus.NOT_FOUND, "unknown path")


def parse_shard_meta(text: str | None) -> bytes:
    """Return the xxh3_128 that the header Shard-Meta promises, in 16 bytes; 400 for any other."""
    if text is None:
        raise bad_request(f"{SHARD_META} is missing")
    if len(text) > MAX_SHARD_META:
        raise bad_request(f"{SHARD_META} is longer than {MAX_SHARD_META} characters")
    try:
        meta = json.loads(text)
        algorithm, checksum = meta["algorithm"], meta["checksum"]
        digest = base64.b64decode(checksum, validate=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise bad_request(f"{SHARD_META} names no checksum and algorithm") from None
    if algorithm != ALGORITHM or len(digest) != 16:
        raise bad_request(f"{SHARD_META}: the checksum has to be an {ALGORITHM}")
    return digest


def _kind(kinds: Mapping[str, str], method: str) -> str:
    if method not in kinds:
        allowed = ", ".join(kinds)
        raise HttpError(
            HTTPStatus.METHOD_NOT_ALLOWED, f"this takes {allowed}", [("Allow", allowed)]
        )
    return kinds[method]


def _call(kind: str, fields: Mapping[str, str], query: Mapping[str, str]) -> Call:
    namespace = fields.get("namespace", "_")
    if not NAMESPACE.match(namespace):
        raise bad_request(
            f"a namespace is 1 to {MAX_NAME} of A-Z a-z 0-9 . _ - and begins with no . or -"
        )
    namespace = fields.get("namespace", "")
    if kind == "create_namespace":
        return Call(
            kind=kind,
            namespace=namespace,
            num_ranks=_number("num_ranks", query.get("num_ranks"), 1, MAX_RANKS),
            steps_retained=_number(
                "steps_retained", query.get("steps_retained", str(STEPS_RETAINED)), 1, MAX_STEPS
            ),
        )
    return Call(
        kind=kind,
        namespace=namespace,
        rank=_number("rank", fields.get("rank", "0"), 0, MAX_RANKS),
        step=_number("step", fields.get("step", "0"), 0, MAX_STEP),
        limit=_number("limit", query.get("limit", str(LIMIT)), 1, MAX_STEPS),
    )


def _parse_query(query: str) -> dict[str, str]:
    """Return the query's values by name; names that nobody knows are left to their sender."""
    values: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name in values:
            raise bad_request("a word of the query comes twice")
        values[name] = value
    return values


def _number(name: str, text: str | None, least: int, most: int) -> int:
    if text is None:
        raise bad_request(f"{name} is missing")
    if not _NUMBER.match(text) or not least <= int(text) <= most:
        raise bad_request(f"{name} has to be a number from {least} to {most}")
    return int(text)
