"""One node's daemon: an arena, the vault in it, and the doors to it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from resilience.node_config import UNDONE_STATUS
from resilience.settings import CLOSE_TIMEOUT_S
from resilience.signals import caught_signals, read_signals
from resilience.tiered.arena import Arena
from resilience.tiered.arena_folder import remove_expired
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.http import HttpDoor, Others
from resilience.tiered.memoryd.keeper import Keeper
from resilience.tiered.memoryd.lease import Lease
from resilience.tiered.memoryd.local import SOCKET_NAME, LocalDoor
from resilience.tiered.memoryd.notes import BoardNotes
from resilience.tiered.memoryd.offer import TieredOffer
from resilience.tiered.memoryd.options import MemorydOptions
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.memoryd.peers import PeerDoor
from resilience.tiered.memoryd.room import Room
from resilience.tiered.memoryd.session import House
from resilience.tiered.vault import Vault

REMOVE_SIGNAL = signal.SIGUSR1
"""Ends the daemon and takes the arena away: its job is over."""

_LOOK_S = 5.0
"""Seconds between two looks of the daemon for its folder."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, REMOVE_SIGNAL)


Door = Keeper | LocalDoor | PeerDoor | HttpDoor
"""A way to the vault, or somebody who works in it, with threads of its own from start to close."""


def open_doors(options: MemorydOptions, vault: Vault, lease: Lease) -> tuple[Keeper, list[Door]]:
    """Make the doors that the options ask for, in the order to start them, the keeper first."""
    local, kept = options.local, options.kept
    peer_door = PeerDoor(vault, options.folder, options.peers) if options.peers else None
    peers: Peers = peer_door or Peers()
    if (shelf := kept.open_shelf()) is not None:
        shelf.remember(vault.owners())
    board = Board(vault, local.own, kept.settings, peers=peers, shelf=shelf)
    vault.on_change = peers.on_change = board.wake
    keeper, room = Keeper(board), Room(board)
    offer = TieredOffer(board, room)
    house = House(
        board=board,
        room=room,
        offer=offer,
        settings=local,
        describe=keeper.describe,
        lease=lease,
        newsroom=keeper.newsroom,
    )
    doors: list[Door] = [keeper, LocalDoor(house, options.folder / SOCKET_NAME)]
    spaces = None
    if options.http:
        others = Others(bring=offer.bring, peers=peers, ask_room=room.ask, safe=board.safe)
        token = None if options.http_open else local.token or None
        http = HttpDoor(vault, options.folder, *options.http, token=token, others=others)
        spaces, keeper.settle_others = http.spaces, http.spaces.settle_all
        doors.append(http)
    if peer_door:
        peer_door.connect_board(room.begin, board.complete, BoardNotes(board, spaces))
        doors.insert(2, peer_door)
    return keeper, doors


def run_daemon(options: MemorydOptions) -> int:
    """Serve until a signal ends it; returns the exit status. For the main thread alone.

    That is 0, or UNDONE_STATUS where the store lacks what it was to get.

    SIGINT ends it, as SIGTERM and the end of its lease do where no agent holds that. SIGUSR1 ends
    it, too, and the arena goes. Before, the store gets for some time what it has to get, for longer
    where the arena goes; it stays where the store is required and did not come to that. Arenas
    beside it that nobody has used for long go once the doors are open.

    Says on one line of standard output when all doors are open. Raises ArenaError where
    the folder cannot be used, OSError where a door cannot be opened.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(caught_signals(*END_SIGNALS))
        arena = Arena(options.folder, options.budget_bytes)
        is_removed = options.remove_on_exit
        stack.callback(lambda: arena.remove() if is_removed else arena.close())
        vault = Vault(arena)
        lease = Lease(options.lease_s, lambda: os.kill(os.getpid(), signal.SIGTERM))
        keeper, doors = open_doors(options, vault, lease)
        for door in doors:
            stack.callback(_close, door)
            door.start()
        lease.start()
        _announce(options, vault)
        # Memory of many gigabytes takes minutes, and nobody waits for it.
        threading.Thread(target=_expire, args=(options,), name="expiry", daemon=True).start()
        has_to_go = _wait_for_end(lease, options.folder, signals) == REMOVE_SIGNAL
        # A second one changes nothing, up to the last moment of the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        lease.end()
        is_removed |= has_to_go
        drain_s = options.kept.remove_s if has_to_go else options.kept.drain_s
        watchdog = threading.Timer(drain_s + CLOSE_TIMEOUT_S, _give_up, (drain_s,))
        watchdog.daemon = True
        watchdog.start()
        is_done = keeper.drain(drain_s)
        keeper.name_only_copies()
        # What nobody else has is not thrown away.
        is_removed &= is_done or not options.kept.is_required
    return 0 if is_done else UNDONE_STATUS


def _wait_for_end(lease: Lease, folder: Path, signals: int) -> int:
    """Return the signal that ends the daemon: SIGINT where its folder was removed.

    A scheduler sends SIGTERM to every process of a job at once, while the workers have their last
    step to save yet. The agent that holds the lease has it too, and ends the daemon after them.
    """
    while True:
        is_asked = bool(select.select([signals], [], [], _LOOK_S)[0])
        for number in read_signals(signals):
            if number != signal.SIGTERM or not lease.is_held:
                return number
            complain("SIGTERM is left to the agent, which ends the daemon after the workers")
        if not is_asked and not folder.exists():
            complain(f"{folder} was removed, and the daemon ends: the next one makes it anew")
            return signal.SIGINT


def _expire(options: MemorydOptions) -> None:
    for path in remove_expired(options.folder, expire_s=options.expire_s):
        complain(f"removed the arena {path}: not used for {options.expire_s:g} s")


def _close(door: Door) -> None:
    try:
        door.close()
    except Exception as error:  # noqa: BLE001 - the others have to be closed, too
        complain(f"{type(door).__name__} did not close: {error!r}")


def _announce(options: MemorydOptions, vault: Vault) -> None:
    with suppress(OSError):  # nobody reads
        sys.stdout.write(
            f"memoryd {os.getpid()} of {options.local.own.name} is ready in {options.folder}: "
            f"{len(vault.metas())} shards, {vault.total_bytes >> 20} of "
            f"{vault.budget_bytes >> 20} MiB\n"
        )
        sys.stdout.flush()
    if options.ready_file is not None:
        with suppress(OSError):  # nobody waits
            os.write(options.ready_file, b"ready")
        os.close(options.ready_file)


def _give_up(drain_s: float) -> None:
    complain(f"the end took longer than {drain_s + CLOSE_TIMEOUT_S:.0f} s")
    os._exit(1)
