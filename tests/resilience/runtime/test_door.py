"""The door without connections: bytes in, bytes out; and the places before it."""

from __future__ import annotations

import hmac
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.runtime.door import (
    AGENTS,
    DAEMONS,
    NAME_BYTES,
    NONCE_BYTES,
    Door,
    DoorError,
    DoorKind,
    Strangers,
    find_origin,
)

TOKEN = "of this run"


def door(
    *, connects: bool, token: str = TOKEN, name: bytes | None = None, kind: DoorKind = AGENTS
) -> Door:
    return Door(
        kind,
        token,
        name=name or secrets.token_bytes(NAME_BYTES),
        nonce=secrets.token_bytes(NONCE_BYTES),
        connects=connects,
    )


def feed(to: Door, data: bytes) -> bytes:
    """Hand over the bytes in pieces of as many as are wanted; returns the answers."""
    answers = b""
    while data:
        size = to.num_wanted
        assert size, "bytes behind the door are not the door's"
        answers += to.feed(data[:size])
        data = data[size:]
    return answers


def pass_through(connector: Door, acceptor: Door) -> list[bytes]:
    """Return what the two say to each other, in order."""
    first = connector.opening
    second = feed(acceptor, first)
    third = feed(connector, second)
    assert feed(acceptor, third) == b""
    return [first, second, third]


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_two_that_know_the_token_pass(token: str) -> None:
    connector, acceptor = door(connects=True, token=token), door(connects=False, token=token)

    said = pass_through(connector, acceptor)

    assert connector.is_passed
    assert acceptor.is_passed
    assert not token or all(token.encode() not in each for each in said)


def test_bytes_may_come_one_by_one() -> None:
    connector, acceptor = door(connects=True), door(connects=False)

    answers = [acceptor.feed(bytes([each])) for each in connector.opening]
    proofs = [connector.feed(bytes([each])) for each in b"".join(answers)]
    for each in b"".join(proofs):
        acceptor.feed(bytes([each]))

    assert acceptor.is_passed
    assert acceptor.num_wanted == connector.num_wanted == 0


@pytest.mark.parametrize(("mine", "other"), [(TOKEN, "another"), (TOKEN, ""), ("", TOKEN)])
def test_neither_side_passes_with_another_token(mine: str, other: str) -> None:
    connector, acceptor = door(connects=True, token=mine), door(connects=False, token=other)

    answer = feed(acceptor, connector.opening)
    with pytest.raises(DoorError, match="does not know the run's token"):
        feed(connector, answer)
    with pytest.raises(DoorError, match="does not know the run's token"):
        feed(acceptor, secrets.token_bytes(acceptor.num_wanted))

    assert not connector.is_passed
    assert not acceptor.is_passed


@given(st.data())
def test_a_changed_byte_opens_nothing(data: st.DataObject) -> None:
    connector, acceptor = door(connects=True), door(connects=False)
    turn = data.draw(st.integers(0, 2))
    sides = [acceptor, connector, acceptor]
    said = connector.opening

    for number, side in enumerate(sides):
        if number == turn:
            place = data.draw(st.integers(0, len(said) - 1))
            bit = 1 << data.draw(st.integers(0, 7))
            said = said[:place] + bytes([said[place] ^ bit]) + said[place + 1 :]
        try:
            said = feed(side, said)
        except DoorError:
            break

    assert not acceptor.is_passed


@given(st.binary(min_size=1))
def test_what_is_no_agent_is_refused_by_its_first_bytes(data: bytes) -> None:
    magic = door(connects=True).opening[:8]
    side = door(connects=False)

    try:
        side.feed(data[: side.num_wanted])
    except DoorError:
        assert not data.startswith(magic)
    else:
        assert magic.startswith(data[:8]) or data.startswith(magic)
    assert not side.is_passed


def test_proof_for_a_daemon_is_none_for_an_agent() -> None:
    acceptor, connector = door(connects=False), door(connects=True, kind=DAEMONS)
    with pytest.raises(DoorError, match="something else than an agent"):
        feed(acceptor, connector.opening)


def test_keys_are_those_of_rfc_5869() -> None:
    """Its third case, without a salt: the first 32 bytes need no further block."""
    secret = hmac.digest(bytes(32), b"\x0b" * 22, "sha256")
    assert secret.hex() == "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04"
    key = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert DoorKind(member="", magic=b"").derive_key("\x0b" * 22).hex() == key


def test_what_one_side_has_proved_is_no_proof_of_the_other_side() -> None:
    acceptor, stranger = door(connects=False), door(connects=True, token="guess")

    answer = feed(acceptor, stranger.opening)
    with pytest.raises(DoorError, match="does not know"):
        feed(acceptor, answer[-32:])


def test_another_connection_s_proof_is_none_of_this_one() -> None:
    """Who is challenged has another agent answer in its place."""
    acceptor, oracle = door(connects=False), door(connects=False)
    stranger = door(connects=True, token="guess")

    answer = feed(acceptor, stranger.opening)
    again = feed(oracle, answer[:-32])
    with pytest.raises(DoorError, match="does not know"):
        feed(acceptor, again[-32:])


def test_a_process_does_not_answer_its_own_challenge() -> None:
    """Somebody hands the challenge of a process back to that process."""
    name = secrets.token_bytes(NAME_BYTES)
    connector, acceptor = door(connects=True, name=name), door(connects=False, name=name)

    with pytest.raises(DoorError, match="this process itself"):
        feed(acceptor, connector.opening)
    with pytest.raises(DoorError, match="this process itself"):
        feed(connector, connector.opening)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans())))
def test_a_newcomer_gets_a_place_and_no_origin_more_than_its_share(
    steps: list[tuple[str, bool]],
) -> None:
    strangers = Strangers(6, 3)
    waiting: dict[int, str] = {}
    for peer, (name, passes) in enumerate(steps):
        origin = f"10.0.0.{ord(name)}"
        waiting[peer] = origin
        leaves = strangers.add(peer, origin)

        assert leaves != peer
        if leaves is not None:
            counts = {each: [*waiting.values()].count(each) for each in waiting.values()}
            assert counts[waiting[leaves]] == max(counts.values())
            del waiting[leaves]
            strangers.remove(leaves)
        if passes:
            del waiting[peer]
            strangers.remove(peer)
        assert len(strangers) == len(waiting) <= 6
        assert all([*waiting.values()].count(each) <= 3 for each in waiting.values())


def test_whoever_has_waited_longest_gives_up_its_place() -> None:
    strangers = Strangers(3, 2)

    left = [strangers.add(peer, host) for peer, host in enumerate(["10.0.0.1", "10.0.0.1"])]
    assert left == [None, None]
    assert strangers.add(2, "10.0.0.1") == 0
    strangers.remove(0)
    assert strangers.add(3, "10.0.0.2") is None
    assert strangers.add(4, "10.0.0.3") == 1


def test_addresses_of_one_host_are_one_origin() -> None:
    assert find_origin("10.0.0.1") == find_origin("::ffff:10.0.0.1") != find_origin("10.0.0.2")
    assert find_origin("2001:db8::1") == find_origin("2001:db8::2:3:4:5")
    assert find_origin("2001:db8::1") != find_origin("2001:db8:0:1::1")
    assert find_origin("fe80::1%eth0") == "fe80::/64"
