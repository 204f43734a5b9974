from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from resilience.comm.sockets import TcpSocket, open_sockets, shut_down, sockets_since


def connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, served = connect()
    with client, served:
        yield client, served


def inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino


def test_only_connected_tcp_sockets_are_seen(pair: tuple[socket.socket, socket.socket]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram,
        socket.socket() as unconnected,
        contextlib.ExitStack() as stack,
    ):
        local, other = (stack.enter_context(each) for each in socket.socketpair())
        seen = {each.inode for each in open_sockets()}

        assert {inode(each) for each in pair} <= seen
        assert not seen & {inode(each) for each in (listening, datagram, unconnected, local, other)}


def test_sockets_from_before_are_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    before = open_sockets()
    client, served = connect()
    with client, served:
        assert shut_down(sockets_since(before)) == 2

        assert client.recv(1) == b""
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"


def test_whoever_got_the_descriptor_next_is_left_alone() -> None:
    client, served = connect()
    old = TcpSocket(inode(client), client.fileno())
    client.close()
    served.close()
    others = connect()
    with others[0], others[1]:
        assert old.descriptor in {each.fileno() for each in others}

        assert shut_down([old]) == 0
        others[0].sendall(b"x")
        assert others[1].recv(1) == b"x"


def test_a_socket_closed_meanwhile_is_no_error() -> None:
    client, served = connect()
    known = TcpSocket(inode(client), client.fileno())
    client.close()
    served.close()

    assert shut_down([known]) == 0
