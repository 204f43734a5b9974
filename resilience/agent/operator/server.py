"""The HTTP port for the operator: few callers, one request each, answered at once.

A request is read whole before anything is done about it, within the limits that connections of
strangers have in `runtime.server`. Only the path, the method and a bounded body are looked at.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from resilience.agent.operator.commands import BODIES
from resilience.agent.operator.states import RefusalError
from resilience.runtime import http_messages as http
from resilience.runtime.server import BACKLOG, Server, Way

BODY_BYTES_MAX = 1 << 20
"""The addresses and data of some thousand nodes."""
_HEAD_BYTES_MAX = 8 << 10
METHODS = {"/status": "GET", "/shutdown": "POST", **dict.fromkeys(BODIES, "POST")}
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
Answer = Callable[[str, bytes], dict[str, Any] | None]
"""Carries out a request, by path and body, and returns what is answered as JSON."""


class OneRequest(Way):
    """A connection's one request, which is answered; whatever follows it is dropped."""

    def __init__(
        self, connection: socket.socket, options: argparse.Namespace, answer: Answer
    ) -> None:
        super().__init__(connection)
        self._options, self._answer = options, answer
        self._data = bytearray()
        self._request: http.Request | None = None
        self._path = ""
        self._is_answered = False

    def advance(self) -> bool:
        """See `Way`; it never passes, since nothing is left to serve."""
        if self._is_answered:
            return super().advance()
        if not (data := self.socket.recv(BODY_BYTES_MAX)):
            raise ConnectionError("it has ended the connection")
        self._data += data
        try:
            self._take()
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            detail = [{**each, "loc": ["body", *each["loc"]]} for each in found]
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": detail})
        except RefusalError as error:
            self._send(HTTPStatus.CONFLICT, {"detail": str(error)})
        except http.HttpError as error:
            self._send(error.status, {"detail": str(error)})
        return False

    def _take(self) -> None:
        """Carry the request out once it is whole."""
        if self._request is None:
            if (size := http.measure_head(self._data, _HEAD_BYTES_MAX)) is None:
                return
            self._request = http.parse_head(bytes(self._data[:size]), _HEAD_BYTES_MAX)
            del self._data[:size]
            self._check(self._request)
            if self._request.expects_continue():
                self.socket.send(http.format_head(HTTPStatus.CONTINUE, [], 0))
        request = self._request
        num_bytes = request.content_length() if request.has_body() else 0
        if num_bytes > BODY_BYTES_MAX:
            text = f"at most {BODY_BYTES_MAX} bytes are allowed"
            raise http.HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        if len(self._data) >= num_bytes:
            self._send(HTTPStatus.OK, self._answer(self._path, bytes(self._data[:num_bytes])))

    def _check(self, request: http.Request) -> None:
        """Raise HttpError for a request of somebody else, and for one that is no command."""
        host = ipaddress.ip_address(self.socket.getpeername()[0].partition("%")[0])
        address = getattr(host, "ipv4_mapped", None) or host
        given = request.headers.get("authorization", "").encode("latin-1")
        # No command has a query: one that comes has no meaning here.
        self._path = path = request.target.partition("?")[0]
        token = self._options.operator_token_file
        is_allowed = any(address in each for each in self._options.operator_from or LOOPBACK)
        is_proven = not token or hmac.compare_digest(given, f"Bearer {token}".encode())
        method = METHODS.get(path, "")
        for is_so, status, text in (
            (is_allowed, HTTPStatus.FORBIDDEN, f"{address} is in no network of --operator-from"),
            ("origin" not in request.headers, HTTPStatus.FORBIDDEN, "a web page has sent this"),
            (is_proven, HTTPStatus.UNAUTHORIZED, "the token is missing or wrong"),
            (path in METHODS, HTTPStatus.NOT_FOUND, f"allowed: {', '.join(METHODS)}"),
            (request.method == method, HTTPStatus.METHOD_NOT_ALLOWED, f"allowed: {method}"),
        ):
            if not is_so:
                raise http.HttpError(status, text)

    def _send(self, status: HTTPStatus, content: dict[str, Any] | None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self._is_answered = True
        headers = [("Content-Type", "application/json"), http.CLOSE]
        self.socket.send(http.format_answer(status, body, headers))
        # To close over what was not read would throw the answer away.
        self.socket.shutdown(socket.SHUT_WR)


def open_port(options: argparse.Namespace, answer: Answer) -> Server:
    """Return the server of the port, on loopback alone where no other caller is allowed.

    Raises OSError where the port cannot be had.
    """
    is_local = all(each.is_loopback for each in options.operator_from or LOOPBACK)
    is_dual = socket.has_dualstack_ipv6() and not is_local
    listening = socket.create_server(
        ("127.0.0.1" if is_local else "", options.operator_port),
        family=socket.AF_INET6 if is_dual else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=is_dual,
    )
    return Server(listening, lambda each: OneRequest(each, options, answer))
