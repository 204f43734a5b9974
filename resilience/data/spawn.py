"""Starts a producer, if there is none, without waiting for anything.

Whoever locks the cache's lock file starts the producer, and makes the socket that consumers connect
to. The producer gets both. So there is never a second producer, and consumers can connect before it
has started; their connections wait in the socket, and end where the producer dies.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resilience.data.folder import PRODUCER_LOCK_NAME, explaining
from resilience.data.spec import SOCKET_NAME, ProducerSpec, encode_spec
from resilience.data.wire import ProducerMessage, encode_message

_END_S = 3.0
"""How long an unneeded producer may take to end; more than it gives its source."""
_BACKLOG = 256
_REAP_S = 1.0
_started: list[_Detached] = []
"""Producers that this process has started and that may have to be waited for."""


class _Detached(subprocess.Popen[bytes]):
    """A process that may outlive its parent, of which Popen would warn."""

    folder = ""
    """The cache whose producer it is."""

    def __del__(self) -> None:
        pass


def connect_producer(folder: Path) -> socket.socket | None:
    """Return a connection to the producer of a cache; None where there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(0)
    try:
        with _short_path(folder) as path:
            connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def start_producer(spec: ProducerSpec) -> bool:
    """Start a producer; False where there is one, perhaps one that is just being started.

    Takes some milliseconds. Raises CacheFolderError where the folder cannot be had, and OSError
    where the process cannot.
    """
    reap_producers()
    folder = Path(spec.folder)
    lock_path = folder / PRODUCER_LOCK_NAME
    with explaining(folder):
        lock_file = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with explaining(folder):
            listener = _listen(folder)
        with listener:
            _spawn(spec, lock_file, listener.fileno())
    finally:
        os.close(lock_file)
    return True


def end_producer(folder: Path) -> None:
    """End a producer without consumers and wait for its end; one with consumers ends with them."""
    connection = connect_producer(folder)
    if connection is None:
        return
    with connection, suppress(OSError):
        connection.send(encode_message(ProducerMessage("over", 0)))
        connection.settimeout(_END_S)
        if connection.recv(1):
            return  # It has consumers, and said so.
    await_end(folder, _REAP_S)


def reap_producers() -> None:
    """Let the kernel forget the producers of this process that have ended."""
    _started[:] = [each for each in _started if each.poll() is None]


def await_end(folder: Path, timeout_s: float) -> None:
    """Wait for a cache's producer that is ending, if this process has started it."""
    for process in [each for each in _started if each.folder == str(folder)]:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    reap_producers()


def _spawn(spec: ProducerSpec, lock_file: int, socket_file: int) -> None:
    # In memory, as a pipe would have to be read before all of a long text is written.
    text_file = os.memfd_create("producer-spec", os.MFD_CLOEXEC)
    try:
        text = encode_spec(spec).encode()
        os.truncate(text_file, 0)
        if os.pwrite(text_file, text, 0) != len(text):
            raise OSError("the description of the producer was not written whole")
        process = _Detached(
            [sys.executable, "-m", "resilience.data.producer", str(lock_file), str(socket_file)],
            stdin=text_file,
            pass_fds=(lock_file, socket_file),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(spec.module_path)},
        )
    finally:
        os.close(text_file)
    process.folder = spec.folder
    _started.append(process)


def _listen(folder: Path) -> socket.socket:
    """Return a socket that listens in the place of that of a dead producer."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hidden = folder / f".{SOCKET_NAME}"
    try:
        with suppress(FileNotFoundError):
            hidden.unlink()
        with _short_path(folder, hidden.name) as path:
            listener.bind(path)
        listener.listen(_BACKLOG)
        hidden.rename(folder / SOCKET_NAME)
    except BaseException:
        listener.close()
        raise
    return listener


@contextmanager
def _short_path(folder: Path, name: str = SOCKET_NAME) -> Iterator[str]:
    """Give a short path to a socket's file: the kernel allows 107 bytes, folders may be deeper."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{file}/{name}"
    finally:
        os.close(file)
