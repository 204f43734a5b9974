"""The process that makes the batches of one cache: `python -m resilience.data.producer`.

The producer reads its ProducerSpec from standard input. It inherits two descriptors: the locked
file by which there is one producer a cache at most, and the socket that consumers connect to even
before the producer has started. It ends when its owner does, some time after its last consumer, or
when it is told to. Whatever it has started ends with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from resilience.data.errors import CacheFolderError, DataCacheError
from resilience.data.folder import explaining, open_root, remove_old_caches
from resilience.data.producer_segments import ProducerSegments
from resilience.data.production import Production
from resilience.data.reception import Reception
from resilience.data.sealing import open_cache_sealer
from resilience.data.sources import OpenSource, Source, Start, open_source
from resilience.data.spawn import end_producer
from resilience.data.spec import SOCKET_NAME, OwnerProcess, ProducerSpec, parse_spec, read_started
from resilience.data.states import find_state, write_state
from resilience.data.streams import Streams
from resilience.data.window import WindowLimits

_GRACE_S = 2.0
"""How long the source may take to return when the producer has to end."""
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> NoReturn:
    """Run a producer; `arguments` are the descriptors of the lock and of the socket."""
    lock_file, socket_file = map(int, arguments)
    for each in (lock_file, socket_file):
        # Held on by what the source starts, they would say that the producer lives.
        os.set_inheritable(each, False)  # noqa: FBT003 - it takes no name
    spec = parse_spec(sys.stdin.read())
    # What a dataset prints must not be taken for what the caller prints.
    os.dup2(2, 1)
    sys.path[:] = spec.module_path
    production = _make_production(spec)
    wake, waker = socket.socketpair()
    ends = [wake.fileno(), *_watch_owner(spec.owner)]
    reception = Reception(
        production,
        socket.socket(fileno=socket_file),
        ends=tuple(ends),
        linger_s=None if spec.owner else spec.linger_s,
    )
    lease = open_root(Path(spec.root), spec.job, spec.keep_s, removes_expired=False)
    _guard_forks(lambda: [lock_file, lease.fileno(), *ends, *reception.descriptors()])
    _wake_at_signal(waker)
    is_done = threading.Event()
    thread = threading.Thread(target=_receive, args=(spec, reception, production, is_done))
    thread.daemon = True
    thread.start()
    status = 1
    try:
        _remove_old(spec)
        production.run()
        production.close()
        lease.close()
        status = 0
    except BaseException:  # noqa: BLE001 - even one that ends Python must not wait for the source
        traceback.print_exc()
    is_done.set()
    _kill_group()
    _exit(status)


def _remove_old(spec: ProducerSpec) -> None:
    """Remove caches that this one takes the place of.

    Before the source is opened, which may fork: a child would hold their locks.
    """
    try:
        name = Path(spec.folder).name
        remove_old_caches(Path(spec.root), name, end_producer=end_producer)
    except CacheFolderError:  # they take room, and nobody reads them
        traceback.print_exc()


def _make_production(spec: ProducerSpec) -> Production:
    limits = WindowLimits(
        prefetch_length=spec.prefetch_length,
        lookback_length=spec.lookback_length,
        checkpoint_frequency=spec.checkpoint_frequency,
        budget_bytes=spec.budget_bytes,
        is_validation=spec.stage == "val",
    )
    lock = threading.RLock()
    folder = Path(spec.folder)
    open_at: Callable[[int], OpenSource] = partial(_open_at, spec)
    sealer, refusal = None, None
    try:
        sealer = open_cache_sealer(spec, is_producer=True)
    except DataCacheError as error:
        # Those hear of it who wait for a batch; what is stored stays.
        refusal = error
        open_at = partial(_refuse, error)
    segments = ProducerSegments(
        folder,
        bytes.fromhex(spec.fingerprint),
        sealer=sealer,
        budget_bytes=spec.budget_bytes,
        lock=lock,
    )
    if refusal is None:
        segments.find()
    streams = Streams(
        open_at, keep_state=partial(write_state, folder), is_sealed=sealer is not None
    )
    return Production(
        limits=limits,
        first=spec.first,
        checkpoint=spec.checkpoint,
        segments=segments,
        streams=streams,
        lock=lock,
        is_refusing=refusal is not None,
    )


def _open_at(spec: ProducerSpec, number: int) -> OpenSource:
    start = Start(
        batch=number,
        samples_consumed=number * spec.samples_per_batch,
        rank=spec.rank,
        size=spec.size,
        stage=spec.stage,
    )
    with explaining(Path(spec.folder)):
        state = find_state(Path(spec.folder), number)
    return open_source(Source(spec.reference, spec.arguments), start, state)


def _refuse(error: DataCacheError, _number: int) -> NoReturn:
    raise error


def _receive(
    spec: ProducerSpec, reception: Reception, production: Production, is_done: threading.Event
) -> None:
    """Serve consumers, then end the process, with the main thread or without it."""
    try:
        # Where somebody removes the folder, another may stand there in the end, with a new socket.
        folder = os.open(spec.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        reception.run()
        with suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=folder)
    except Exception:  # noqa: BLE001 - nobody could replace a producer that lives and does not listen
        traceback.print_exc()
    production.stop()
    if not is_done.wait(_GRACE_S):
        # The source does not return. What it has stored is whole in any case.
        _kill_group()
        _exit(0)


def _watch_owner(owner: OwnerProcess | None) -> list[int]:
    """Return a descriptor that is readable when the owner has ended; none without an owner."""
    if owner is None:
        return []
    try:
        file = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        _exit(0)
    if read_started(owner.pid) != owner.started:
        _exit(0)
    return [file]


def _wake_at_signal(waker: socket.socket) -> None:
    """Have SIGTERM end the thread that listens, whatever the main one is within."""
    waker.settimeout(0)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    # Without a handler in Python nothing is written to the descriptor.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)


def _guard_forks(list_files: Callable[[], list[int]]) -> None:
    """See to it that forked children, such as a DataLoader's workers, end with this process."""
    libc = ctypes.CDLL(None)
    producer = os.getpid()
    fork = threading.local()

    def before_fork() -> None:
        fork.parent = os.getpid()
        fork.is_of_main_thread = threading.get_ident() == threading.main_thread().ident

    def after_fork() -> None:
        # Not in the children of children: there these numbers may be other files.
        if fork.parent == producer:
            # Held on by a child, the lock and the sockets would say that the producer lives.
            for file in list_files():
                with suppress(OSError):
                    os.close(file)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Of another thread the end would be the signal, and that may come at any time.
        if fork.is_of_main_thread:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != fork.parent:
                os.kill(os.getpid(), signal.SIGKILL)

    os.register_at_fork(before=before_fork, after_in_child=after_fork)


def _kill_group() -> None:
    """End the other processes of the group, of which this one is the leader."""
    own = os.getpid()
    if os.getpgrp() != own:
        return
    with suppress(OSError):  # of a process that has used up its descriptors
        for path in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(path.name)
                if pid != own and os.getpgid(pid) == own:
                    os.kill(pid, signal.SIGKILL)


def _exit(status: int) -> NoReturn:
    """End at once: what the source has left running in this process must not hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
