"""What producer and consumers say arrives as it was said, and exceptions as themselves."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.data.errors import SourceError
from resilience.data.failure import (
    Failure,
    describe_failure,
    encode_failure,
    parse_failure,
    rebuild_error,
)
from resilience.data.wire import MESSAGE_BYTES_MAX, ProducerMessage, encode_message, parse_message
from tests.resilience.data.scene import NeedyError, SampleError

VERBS = st.sampled_from(["need", "at", "published", "doing"])


@given(st.builds(ProducerMessage, VERBS, st.integers(0, 2**63), st.text().filter(str.isprintable)))
def test_a_message_arrives_as_it_was_sent(message: ProducerMessage) -> None:
    assert parse_message(encode_message(message)) == message


@pytest.mark.parametrize("packet", [b"", b"need", b"need -1", b"need x", b"sing 1", b"\xff 1"])
def test_what_is_no_message_is_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        parse_message(packet)


def pass_on(error: Exception) -> Exception:
    """Return what a consumer gets of an error, by way of a packet."""
    try:
        raise error
    except type(error) as raised:
        text = encode_failure(describe_failure(raised))
    packet = encode_message(ProducerMessage("failed", 7, text))
    assert len(packet) < MESSAGE_BYTES_MAX
    return rebuild_error(parse_failure(parse_message(packet).text), number=7)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such sample", 3),
        KeyError("text"),
        FileNotFoundError(2, "No such file", "/data/x"),
        SampleError(3),
        RuntimeError(),
        RuntimeError("line\nline \u2603"),
    ],
)
def test_an_error_arrives_as_itself(error: Exception) -> None:
    arrived = pass_on(error)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived).keys() == vars(error).keys()
    assert "in pass_on" in "".join(traceback.format_exception(arrived))


class MuteError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_has_no_text_arrives_with_the_one_that_it_came_of() -> None:
    error = MuteError(1)
    error.__cause__ = FileNotFoundError("shard-7")

    arrived = pass_on(error)

    assert type(arrived) is MuteError
    assert "FileNotFoundError: shard-7\n\nThe above exception was the direct cause of" in str(
        arrived.__cause__
    )


class PickyError(Exception):
    """An error whose constructor fails when it is given what it has made of its argument."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        assert code in (1, 2)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(NeedyError(object()), id="arguments-that-json-cannot-hold"),
        pytest.param(PickyError(1), id="constructor-that-fails"),
        pytest.param(type("Local", (ValueError,), {})("lost"), id="class-that-cannot-be-found"),
        pytest.param(ValueError("\u2603" * 10_000), id="too-long"),
    ],
)
def test_an_error_that_cannot_be_made_again_is_told(error: Exception) -> None:
    arrived = pass_on(error)

    assert type(arrived) is SourceError
    assert str(arrived).startswith("the source of batch 7 raised ")
    assert type(error).__name__ in str(arrived)


def test_what_is_no_exception_is_not_called() -> None:
    failure = Failure(
        module="os", name="system", text="", trace="", arguments=["exit 1"], attributes={}
    )

    assert type(rebuild_error(failure, number=0)) is SourceError
