"""HTTP/1.1 as bytes: the head of a request is read strictly, the head of an answer is written.

Pure: no socket, no clock. What is not plainly a request of this protocol is
refused, never guessed at: two readings of one message are how requests are smuggled.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEADERS = 64
MAX_DIGITS = 19
"""Of a length: more is no number of bytes that any machine has."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_TARGET = re.compile(r"[!-~]+\Z")
_VALUE = re.compile(r"[\t -~\x80-\xff]*\Z")
_LENGTH = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}\Z")
_PORT = re.compile(r":[0-9]*\Z")
_HEAD_END = b"\r\n\r\n"
CLOSE = ("Connection", "close")
RETRY_LATER = (("Retry-After", "1"),)
_CLUSTER_SUFFIX = ".svc.cluster.local"
_ABSOLUTE = re.compile(r"http://[^/?#]+", re.IGNORECASE)


class HttpError(Exception):
    """A request that is not carried out: its status, and one line for who sent it."""

    def __init__(
        self, status: HTTPStatus, text: str, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(text)
        self.status = status
        self.headers = tuple(headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The head of a request."""

    method: str
    target: str
    """Path and query; of a target in absolute form, as proxies get it, what follows the host."""
    headers: Mapping[str, str]
    """By name in lower case; no name comes twice."""
    is_last: bool
    """The other end sends nothing after it on this connection."""

    def content_length(self) -> int:
        """Return how long the body is; 411 where that is not said, 501 for a chunked one."""
        if "transfer-encoding" in self.headers:
            raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "send the body whole, with Content-Length")
        if (text := self.headers.get("content-length")) is None:
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        return int(text)

    def has_body(self) -> bool:
        """Return whether bytes of this request follow its head."""
        length = self.headers.get("content-length", "0")
        return "transfer-encoding" in self.headers or int(length) > 0

    def expects_continue(self) -> bool:
        """Return whether the body is sent only when it is asked for."""
        return self.headers.get("expect", "").lower() == "100-continue"


def measure_head(data: bytes | bytearray, bytes_max: int) -> int | None:
    """Return of how many bytes the head is; more than `bytes_max` are one. None if more follow."""
    end = data.find(_HEAD_END)
    if end >= 0:
        return end + len(_HEAD_END)
    return len(data) if len(data) > bytes_max else None


def parse_head(head: bytes, bytes_max: int) -> Request:
    """Read the head of a request, the empty line at its end included.

    Raises HttpError with 400, 431 for one too long or too many headers, 417 or 505 for what this
    protocol lacks.
    """
    if len(head) > bytes_max:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head is too large")
    lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, version = _parse_first_line(lines[0] if lines else "")
    headers = _parse_headers(lines[1:])
    if version == "1.1" and "host" not in headers:
        raise bad_request("Host is missing")
    if not _LENGTH.match(headers.get("content-length", "0")):
        raise bad_request("Content-Length is no number")
    if "content-length" in headers and "transfer-encoding" in headers:
        raise bad_request("the body's length is told twice")
    if headers.get("expect", "100-continue").lower() != "100-continue":
        raise HttpError(HTTPStatus.EXPECTATION_FAILED, "only 100-continue can be expected")
    connection = {each.strip() for each in headers.get("connection", "").lower().split(",")}
    is_last = "close" in connection or (version == "1.0" and "keep-alive" not in connection)
    return Request(method=method, target=target, headers=headers, is_last=is_last)


def check_sender(request: Request) -> None:
    """Raise HttpError with 403 for a request that a web page has a browser send.

    Browsers name the page's origin, but not where they take this machine for the page's own host:
    any name of the public DNS can be made to lead here, so none is taken for a Host.
    """
    headers = request.headers
    if "origin" in headers:
        raise _forbidden(f"Origin is {headers['origin']:.80}; web pages have no business here")
    name = _PORT.sub("", headers.get("host", ""))
    if "." in name and not (_is_address(name) or name.lower().endswith(_CLUSTER_SUFFIX)):
        raise _forbidden(
            f"Host is {name:.80}; allowed: an address, a name without a dot, or one that ends "
            f"with {_CLUSTER_SUFFIX}"
        )


def format_head(status: HTTPStatus, headers: Sequence[tuple[str, str]], num_bytes: int) -> bytes:
    """Return the head of an answer with a body of so many bytes."""
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.CONTINUE):
        lines.append(f"Content-Length: {num_bytes}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def format_answer(
    status: HTTPStatus, body: bytes, headers: Sequence[tuple[str, str]] = ()
) -> bytes:
    """Return an answer."""
    return format_head(status, headers, len(body)) + body


def _parse_first_line(line: str) -> tuple[str, str, str]:
    words = line.split(" ")
    if len(words) != 3 or not _TOKEN.match(words[0]) or not _TARGET.match(words[1]):
        raise bad_request("no request line")
    method, target, version = words
    if not re.match(r"HTTP/[0-9]\.[0-9]\Z", version):
        raise bad_request("no request line")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this is HTTP/1.1")
    if absolute := _ABSOLUTE.match(target):
        target = target[absolute.end() :]
    if not target.startswith("/"):
        raise bad_request("no path")
    return method, target, version[-3:]


def _parse_headers(lines: Sequence[str]) -> dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.match(name) or not _VALUE.match(value):
            raise bad_request("no header line")
        name = name.lower()
        if name in headers:
            raise bad_request("a header comes twice")
        headers[name] = value.strip(" \t")
    return headers


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _forbidden(text: str) -> HttpError:
    return HttpError(HTTPStatus.FORBIDDEN, text)


def retry_later(text: str) -> HttpError:
    """Return the error of a request that may be carried out in a second."""
    return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, text, RETRY_LATER)


def bad_request(text: str) -> HttpError:
    """Return the error of a request that says what cannot be."""
    return HttpError(HTTPStatus.BAD_REQUEST, text)
