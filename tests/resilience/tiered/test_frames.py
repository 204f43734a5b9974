"""Frames over a real pair of sockets: whole, in time, and without a descriptor left over."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilience.tiered.errors import (
    HeldError,
    LostError,
    RefusedError,
    StaleError,
    TieredError,
    TierError,
    VaultFullError,
)
from resilience.tiered.frames import FRAME_BYTES_MAX, FrameSocket, describe_error, raise_error

LIMIT_S = 60.0
Pair = tuple[FrameSocket, FrameSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = [FrameSocket(each) for each in socket.socketpair(socket.AF_UNIX)]
    yield ends[0], ends[1]
    for each in ends:
        each.close()


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_arrive_as_they_were_sent(pair: Pair) -> None:
    for message in ({}, {"op": "x", "text": "\u00fc\n", "list": [1, None, True]}):
        pair[0].send(message, timeout_s=LIMIT_S)
        assert pair[1].receive(timeout_s=LIMIT_S).message == message


def test_large_messages_go_in_parts(pair: Pair) -> None:
    message = {"text": "x" * (FRAME_BYTES_MAX - 100)}

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair[0].send, message, timeout_s=LIMIT_S)
        assert pair[1].receive(timeout_s=LIMIT_S).message == message
        sent.result()


def test_a_message_that_is_too_long_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ValueError, match="is longer than"):
        pair[0].send({"text": "x" * FRAME_BYTES_MAX}, timeout_s=LIMIT_S)

    pair[0].send({"is": "fine"}, timeout_s=LIMIT_S)
    assert pair[1].receive(timeout_s=LIMIT_S).message == {"is": "fine"}


def test_descriptors_come_with_a_frame_and_stay_in_this_process(pair: Pair) -> None:
    before = num_files()
    with tempfile.TemporaryFile() as file:
        file.write(b"hello")
        file.flush()
        pair[0].send({"a": 1}, timeout_s=LIMIT_S, files=(file.fileno(),))
        pair[0].send({"b": 2}, timeout_s=LIMIT_S)

    frame = pair[1].receive(timeout_s=LIMIT_S, takes_files=True)
    (received,) = frame.files
    assert os.pread(received, 5, 0) == b"hello"
    assert not os.get_inheritable(received)
    frame.close()
    assert pair[1].receive(timeout_s=LIMIT_S, takes_files=True).files == ()
    assert num_files() == before


@pytest.mark.parametrize(
    ("data", "takes_files"),
    [
        pytest.param(struct.pack(">I", 2) + b"{}", False, id="nobody-wants-it"),
        pytest.param(struct.pack(">I", 2) + b"[]", True, id="no-object"),
        pytest.param(struct.pack(">I", 1 << 31), True, id="oversized"),
        pytest.param(b"\0", True, id="cut"),
    ],
)
def test_descriptors_of_what_is_no_frame_are_closed(
    pair: Pair, data: bytes, takes_files: bool
) -> None:
    with tempfile.TemporaryFile() as file:
        socket.send_fds(pair[0].socket, [data], [file.fileno()])
        pair[0].socket.shutdown(socket.SHUT_WR)
        before = num_files()

        try:
            assert pair[1].receive(timeout_s=LIMIT_S, takes_files=takes_files).files == ()
        except (ValueError, ConnectionError):
            assert takes_files

        assert num_files() == before


@pytest.mark.parametrize("data", [b"", b"\0\0", struct.pack(">I", 5) + b'{"a"'])
def test_a_frame_that_does_not_come_to_its_end_has_a_deadline(pair: Pair, data: bytes) -> None:
    pair[0].socket.sendall(data)

    with pytest.raises(TimeoutError):
        pair[1].receive(timeout_s=0.05)


def test_whoever_does_not_read_has_a_deadline(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        pair[0].send({"text": "x" * (FRAME_BYTES_MAX - 100)}, timeout_s=0.05)


def test_no_time_is_no_wait(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match="too slow"):
        pair[1].receive(timeout_s=0.0)


def test_a_shut_down_ends_who_waits(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair[1].receive, timeout_s=LIMIT_S)
        pair[1].shut_down()
        with pytest.raises(ConnectionError, match="has ended the connection"):
            waiting.result()
    pair[1].shut_down()


@pytest.mark.parametrize(
    "error",
    [
        VaultFullError("a"),
        HeldError("b"),
        StaleError("c"),
        RefusedError("d"),
        LostError("e"),
        ValueError("f"),
        KeyError("g"),
    ],
)
def test_an_error_is_the_same_on_the_other_side(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        raise_error(describe_error(error))

    assert caught.value.args == error.args


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (describe_error(TierError("of S3")), "of S3"),
        (describe_error(PermissionError("no")), "PermissionError: no"),
        ({"error": "news"}, ""),
        ({"error": ["x"], "message": 5}, "5"),
    ],
)
def test_other_errors_are_errors_of_the_tiers(reply: dict[str, object], text: str) -> None:
    with pytest.raises(TieredError) as caught:
        raise_error(reply)

    assert str(caught.value) == text


def test_a_result_is_no_error() -> None:
    raise_error({"steps": []})
