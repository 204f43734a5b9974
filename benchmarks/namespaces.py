"""Hosts that one machine plays: a network namespace for each, and this process as their switch.

    with Network(3) as network:
        network.words(0)  # what comes before MODULE ARGUMENTS, for a process on the first host
        network.cut(2)    # its cable is pulled
        network.heal()

The switch passes, delays, loses and cuts off frames of TAP devices, so no kernel needs to be built
for that. Nothing here has a name outside: namespaces and devices are this process's open files, and
gone with them, however it ends. It needs Linux, root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import os
import random
import runpy
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PORT = 29500
"""Free on every host."""
_NETWORK = "10.77.0"
_MASK = "255.255.255.0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP = 1
_DEVICE, _LOOPBACK = b"eth0", b"lo"
_FRAME_BYTES_MAX = 1 << 16
_FRAMES_MAX = 64
"""So many of one host are taken before those of others."""
_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(RuntimeError):
    """This machine plays no hosts; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Host:
    namespace: int
    tap: int


class Network:
    """Hosts 0, 1, ... on one switch; the settings may be changed at any time.

    Raises NamespaceError where the machine does not allow it.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        delay_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        mtu: int = 1500,
    ) -> None:
        """Make the hosts; `delay_s` is one way, and `loss` the part of the frames that is lost.

        A larger `mtu` means fewer frames, each of which costs this process some time.
        """
        self.delay_s, self.loss = delay_s, loss
        self._random = random.Random(seed)
        self._hosts: list[_Host] = []
        self._sides = dict.fromkeys(range(num_hosts), 0)
        self._ports: dict[bytes, int] = {}
        """Behind which host an Ethernet address is."""
        self._late: list[tuple[float, int, int, int, bytes]] = []
        """When a frame is due, a number, from whom, to whom."""
        self._numbers = itertools.count()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._switch, name="switch", daemon=True)
        try:
            for number in range(num_hosts):
                # A thread stays in the namespace that it has made, so each has one of its own.
                with ThreadPoolExecutor(1) as alone:
                    made = alone.submit(_make_host, self.address(number), mtu)
                    self._hosts.append(made.result())
        except OSError as error:
            self._close_files()
            raise NamespaceError(
                f"network namespaces are refused here, they need root and /dev/net/tun: {error}"
            ) from error
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        """Return the host's address."""
        return f"{_NETWORK}.{host + 1}"

    def path(self, host: int) -> str:
        """Return where any process finds the host's namespace, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._hosts[host].namespace}"

    def words(self, host: int) -> tuple[str, ...]:
        """Return what comes between `python -m` and MODULE ARGUMENTS for a process on the host."""
        return (__name__, self.path(host))

    def agent_options(self, host: int, folder: Path) -> list[str]:
        """Return by what an agent on the host finds the others; their token lies in the folder."""
        token = folder / "token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text("known to the agents of one run\n", "ascii")
        endpoints = ",".join(f"{self.address(each)}:{PORT}" for each in range(len(self._hosts)))
        return [
            f"--rdzv-endpoint={endpoints}",
            f"--local-addr={self.address(host)}",
            f"--token-file={token}",
        ]

    # ---- troubles

    def cut(self, host: int) -> None:
        """Let nothing pass to a host or from it; nobody is told."""
        self._sides = {**self._sides, host: -1 - host}

    def split(self, *sides: Iterable[int]) -> None:
        """Let nothing pass from one side to another; who is on none is alone."""
        alone = {host: -1 - host for host in self._sides}
        self._sides = alone | {host: n for n, side in enumerate(sides) for host in side}

    def heal(self) -> None:
        """Let all pass again."""
        self._sides = dict.fromkeys(self._sides, 0)

    def close(self) -> None:
        """End the switch; the namespaces end with their last process."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._close_files()

    def _close_files(self) -> None:
        for file in (
            self._wake,
            *(file for each in self._hosts for file in (each.tap, each.namespace)),
        ):
            os.close(file)

    # ---- the switch

    def _switch(self) -> None:
        hosts = {each.tap: number for number, each in enumerate(self._hosts)}
        with select.epoll() as ready:
            for file in (self._wake, *hosts):
                ready.register(file, select.EPOLLIN)
            while True:
                due_s = self._late[0][0] if self._late else None
                pause_s = None if due_s is None else max(0.0, due_s - time.monotonic())
                for file, _ in ready.poll(pause_s):
                    if file == self._wake:
                        return
                    self._take(hosts[file], file)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, sender, receiver, frame = heapq.heappop(self._late)
                    self._pass(sender, receiver, frame)

    def _take(self, sender: int, tap: int) -> None:
        for _ in range(_FRAMES_MAX):
            try:
                frame = os.read(tap, _FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            self._ports[frame[6:12]] = sender
            if self.loss and self._random.random() < self.loss:
                continue
            known = self._ports.get(frame[:6])
            receivers = range(len(self._hosts)) if known is None else (known,)
            for receiver in receivers:
                if receiver == sender:
                    continue
                if self.delay_s:
                    due_s = time.monotonic() + self.delay_s
                    late = (due_s, next(self._numbers), sender, receiver, frame)
                    heapq.heappush(self._late, late)
                else:
                    self._pass(sender, receiver, frame)

    def _pass(self, sender: int, receiver: int, frame: bytes) -> None:
        sides = self._sides
        if sides[sender] == sides[receiver]:
            # A host that takes no more loses it, as hosts do.
            with contextlib.suppress(OSError):
                os.write(self._hosts[receiver].tap, frame)


def _make_host(address: str, mtu: int) -> _Host:
    """Make a namespace with one device and loopback; the thread that calls stays in it."""
    _check(_libc.unshare(_CLONE_NEWNET))
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    tap = -1
    try:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TAP | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, _MASK)):
                packed = struct.pack(
                    "16sHH4s16x", _DEVICE, socket.AF_INET, 0, socket.inet_aton(text)
                )
                fcntl.ioctl(control, request, packed)
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", _DEVICE, mtu))
            for device in (_LOOPBACK, _DEVICE):
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device, _IFF_UP))
    except OSError:
        for file in (namespace, tap):
            if file >= 0:
                os.close(file)
        raise
    return _Host(namespace, tap)


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter(path: str) -> None:
    """Have the calling thread, and what it starts, be on the host whose namespace this is."""
    namespace = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(namespace, _CLONE_NEWNET))
    finally:
        os.close(namespace)


def main() -> None:
    """Be `python -m MODULE ARGUMENTS` on a host."""
    path, module, *arguments = sys.argv[1:]
    enter(path)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
