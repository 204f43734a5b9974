"""The HTTP door of a node's checkpoint daemon: what amzn-sagemaker-checkpointing speaks.

A thread for each connection that has sent the head of a request. A shard's body goes from the
socket into its segment and is hashed on the way; it is sent from the segment's file. What a shard
holds is never looked at.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from resilience.runtime.http_messages import (
    CLOSE,
    RETRY_LATER,
    HttpError,
    Request,
    bad_request,
    check_sender,
    format_answer,
    parse_head,
    retry_later,
)
from resilience.tiered.errors import HeldError, StaleError, TieredError, VaultFullError
from resilience.tiered.memoryd.http_connection import ClosedError, Connection, FirstRequest, Limits
from resilience.tiered.memoryd.http_routes import (
    HEALTH_PATH,
    SHARD_META,
    Call,
    parse_call,
    parse_shard_meta,
)
from resilience.tiered.memoryd.http_spaces import Space, Spaces
from resilience.tiered.memoryd.http_steps import METADATA, is_metadata
from resilience.tiered.memoryd.listener import Listener, listen_at
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.shard import ShardId, ShardMeta
from resilience.tiered.vault import Reading, Vault, Writing

_OWNER = "http"
_STALE_TRIES = 3
_FIND_TRIES = 8
_REFUSAL = format_answer(
    HTTPStatus.SERVICE_UNAVAILABLE, b"too many connections\n", [*RETRY_LATER, CLOSE]
)
_HEALTHY = b'{"status":"healthy"}'
_JSON = ("Content-Type", "application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """What this door needs of the rest of the daemon."""

    bring: Callable[[ShardId], tuple[str, Reading]]
    """Returns a shard that some node holds, with where it came from."""
    peers: Peers
    ask_room: Callable[[int], bool]
    """Called with a number of bytes that did not fit after this door has dropped all it may;
    says whether it made or will make room."""
    safe: Callable[[str], Collection[ShardId]]
    """Returns the shards of a namespace that are on enough nodes."""


class HttpDoor:
    """Serves a vault over HTTP, from `start` to `close`.

    `folder` keeps the list of namespaces: the arena's. Without a token whoever reaches the
    port may do everything, so it belongs on loopback. Port 0 is any free one; `address`
    tells which.
    """

    def __init__(
        self,
        vault: Vault,
        folder: Path,
        host: str,
        port: int,
        *,
        others: Others,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.address = (host, port)
        self._vault = vault
        self._others = others
        self._limits = limits or Limits()
        self.spaces = Spaces(
            vault,
            folder,
            num_spaces_max=self._limits.num_spaces_max,
            peers=others.peers,
            safe=others.safe,
        )
        self._credentials = f"Bearer {token}".encode() if token is not None else None
        self._listener = Listener(
            "http",
            self._serve,
            complaint="cannot accept connections over HTTP",
            connections_max=self._limits.connections_max,
            lead=lambda connection: FirstRequest(connection, self._limits, self._refuse),
            refuse=lambda connection: connection.send(_REFUSAL),
        )
        self._lock = threading.Lock()
        self._num_busy = 0
        """Segments that will be free when a writing or reading of this door ends."""

    def start(self) -> None:
        """Listen; raises OSError where the address cannot be had."""
        listening = listen_at(*self.address)
        self.address = listening.getsockname()[:2]
        self._listener.start(listening)

    def close(self) -> None:
        """Stop listening, end all connections and wait for their threads."""
        self._listener.close()

    def _serve(self, plain: socket.socket) -> None:
        """Serve one connection to its end; in a thread of its own."""
        exchange = _Exchange()
        with exchange.held, suppress(ClosedError, OSError):
            connection = Connection(plain, self._limits)
            while not exchange.is_last and not self._listener.is_closing:
                self._serve_next(connection, exchange)
            connection.end()

    def _serve_next(self, connection: Connection, exchange: _Exchange) -> None:
        """Take the next request, if one comes, and answer it."""
        try:
            exchange.is_unread = True
            request = connection.read_request()
            if request is None:
                exchange.is_last = True
                return
            exchange.held.close()
            exchange.begin(request)
            if self._credentials is None:
                check_sender(request)
            if request.target != HEALTH_PATH:
                self._authorize(request)
            self._carry_out(parse_call(request), request, connection, exchange)
        except OSError as error:
            complain(f"a request over HTTP failed: {error}")
            exchange.is_last = True
            connection.answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the daemon failed\n")
        except VaultFullError as error:
            complain(f"a request over HTTP failed: {error}")
            exchange.is_last = True
            connection.answer(HTTPStatus.INSUFFICIENT_STORAGE, b"no room\n")
        except HttpError as error:
            # Where the next request begins is not known, or lies behind a body to be skipped.
            exchange.is_last |= exchange.is_unread
            headers = [*error.headers, *([CLOSE] if exchange.is_last else [])]
            connection.answer(error.status, f"{error}\n".encode(), headers)

    def _refuse(self, head: bytes) -> bytes:
        """Return the answer to a stranger's request; empty for one that is to be carried out."""
        try:
            request = parse_head(head, self._limits.head_bytes_max)
            if self._credentials is not None and request.target == HEALTH_PATH:
                return format_answer(HTTPStatus.OK, _HEALTHY, [_JSON, CLOSE])
            self._authorize(request)
        except HttpError as error:
            return format_answer(error.status, f"{error}\n".encode(), [*error.headers, CLOSE])
        return b""

    def _authorize(self, request: Request) -> None:
        if self._credentials is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._credentials):
            raise HttpError(
                HTTPStatus.UNAUTHORIZED, "the token is missing or wrong",
                [("WWW-Authenticate", "Bearer")],
            )  # fmt: skip

    def _carry_out(
        self, call: Call, request: Request, connection: Connection, exchange: _Exchange
    ) -> None:
        if call.kind == "put_shard":
            self._put_shard(call, request, connection, exchange)
        elif exchange.is_unread:
            raise bad_request("this takes no body")
        elif call.kind == "health":
            connection.answer(HTTPStatus.OK, _HEALTHY, [_JSON])
        elif call.kind == "get_shard":
            self._get_shard(call, connection, exchange)
        elif call.kind == "latest":
            steps = self.spaces.latest(call.namespace, call.limit)
            _answer_json(connection, HTTPStatus.OK, steps)
        elif call.kind in ("get_namespace", "create_namespace"):
            self._tell_namespace(call, connection)
        else:
            if call.kind == "delete_namespace":
                self.spaces.delete(call.namespace)
            elif call.kind == "delete_shard":
                self.spaces.drop_shard(call.namespace, call.rank, call.step)
            else:
                self.spaces.reset()
            connection.answer(HTTPStatus.NO_CONTENT)

    def _tell_namespace(self, call: Call, connection: Connection) -> None:
        status = HTTPStatus.OK
        if call.kind == "get_namespace":
            self.spaces.wait_for(call.namespace, is_asked=True)
        elif self.spaces.create(call.namespace, call.num_ranks, call.steps_retained):
            status = HTTPStatus.CREATED
        space = self.spaces.get(call.namespace)
        content = {"num_ranks": space.num_ranks, "steps_to_retain_per_rank": space.steps_retained}
        _answer_json(connection, status, content)

    def _get_shard(self, call: Call, connection: Connection, exchange: _Exchange) -> None:
        reading = exchange.held.enter_context(self._find(call))
        exchange.held.enter_context(self._busy())
        shard_meta = str(reading.meta.rest["shard_meta"])
        connection.answer_memory(
            reading.memory, [(SHARD_META, shard_meta), ("Content-Type", "application/octet-stream")]
        )

    def _find(self, call: Call) -> Reading:
        """Return a shard, which comes from another node where this one lacks it."""
        for _ in range(_FIND_TRIES):
            meta = self.spaces.find(call.namespace, call.rank, call.step)
            try:
                return self._others.bring(meta.id)[1]
            except KeyError:
                continue  # dropped since, perhaps for a newer version of it: look again
            except VaultFullError:
                if not self.spaces.make_room(self.spaces.get(call.namespace), call.step):
                    raise
            except TieredError as error:
                complain(f"a request over HTTP failed: {error}")
                break
        raise retry_later("the node that has this shard does not give it")

    def _put_shard(
        self, call: Call, request: Request, connection: Connection, exchange: _Exchange
    ) -> None:
        self.spaces.wait_for(call.namespace)
        num_bytes = request.content_length()
        shard_meta = request.headers.get(SHARD_META.lower())
        expected = parse_shard_meta(shard_meta)
        if num_bytes > self._vault.budget_bytes:
            raise HttpError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the whole budget is {self._vault.budget_bytes} bytes",
            )
        wait_s = self._limits.write_wait_s
        with self.spaces.write(call.namespace, call.rank, call.step, wait_s=wait_s) as space:
            writing = self._begin(space, call, str(shard_meta), num_bytes)
            with self._busy(), writing or nullcontext():
                if request.expects_continue():
                    connection.ask_for_body()
                checksums: tuple[int, ...] = ()
                if writing is None:
                    digest = connection.hash_body(num_bytes)
                else:
                    digest, checksums = connection.receive_into(writing.memory)
                exchange.is_unread = False
                if digest != expected:
                    raise bad_request("the body is not what its checksum says")
                if writing is not None:
                    self._commit(space, writing, checksums, str(shard_meta))
        connection.answer(HTTPStatus.OK)

    def _begin(self, space: Space, call: Call, shard_meta: str, num_bytes: int) -> Writing | None:
        """Return where the body goes; None where the same is held already."""
        id_ = self.spaces.choose_id(space, call.rank, call.step, shard_meta, num_bytes)
        if id_ is None:
            return None
        for _ in range(_STALE_TRIES):
            try:
                return self._take(space, id_, num_bytes)
            except StaleError:
                # The step's earlier version is over: a newer one, or a later step's, has begun.
                id_ = self.spaces.renew(space, id_)
        raise HttpError(HTTPStatus.CONFLICT, "others write this namespace under newer generations")

    def _take(self, space: Space, id_: ShardId, num_bytes: int) -> Writing:
        """Begin to write, dropping what can be done without until there is room."""
        has_asked = False
        while True:
            try:
                return self._vault.begin(id_, num_bytes, owner=_OWNER)
            except HeldError as error:
                raise retry_later("this shard is being written") from error
            except VaultFullError as error:
                if self.spaces.make_room(space, id_.step):
                    continue
                if has_asked or not self._others.ask_room(num_bytes):
                    raise self._full(may_change=has_asked or self._num_busy > 0) from error
                has_asked = True

    def _full(self, *, may_change: bool) -> HttpError:
        if may_change:
            return retry_later("the budget is used up at the moment")
        return HttpError(
            HTTPStatus.INSUFFICIENT_STORAGE, "the budget is too small for what has to be kept"
        )

    def _commit(
        self, space: Space, writing: Writing, checksums: tuple[int, ...], shard_meta: str
    ) -> None:
        rank = int(writing.id.shard)
        is_last = is_metadata(writing.memory)
        meta = ShardMeta(
            id=writing.id,
            num_shards=rank + 1 if is_last else space.num_ranks,
            num_bytes=writing.num_bytes,
            tensors=(),
            checksums=checksums,
            rest={"shard_meta": shard_meta, METADATA: is_last},
        )
        try:
            with self.spaces.still(space):
                writing.commit(meta)
                if is_last:
                    self.spaces.learn(space, rank + 1)
                self.spaces.settle(space, writing.id.step)
        except VaultFullError as error:
            raise self._full(may_change=False) from error

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Note that a segment is in use within the block, and may be free thereafter."""
        with self._lock:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_busy -= 1


class _Exchange:
    """Where a connection is between two requests."""

    def __init__(self) -> None:
        self.is_unread = True
        """Bytes may come that belong to no head."""
        self.is_last = False
        self.held = ExitStack()
        """What is being sent; let go when the next head, or the end, has come."""

    def begin(self, request: Request) -> None:
        """Note that a request has come."""
        self.is_unread = request.has_body()
        self.is_last = request.is_last


def _answer_json(connection: Connection, status: HTTPStatus, content: object) -> None:
    body = json.dumps(content, separators=(",", ":")).encode()
    connection.answer(status, body, [_JSON])
