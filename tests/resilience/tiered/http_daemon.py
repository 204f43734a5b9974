"""A daemon with an HTTP door, to be started as a process and to be killed.

usage: http_daemon.py FOLDER BUDGET_MIB PORT    says its port on one line when it is there
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from resilience.tiered.arena import Arena
from resilience.tiered.memoryd.http import HttpDoor
from resilience.tiered.vault import Vault
from tests.resilience.tiered.http_client import nobody


def main() -> None:
    folder, budget_mib, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    arena = Arena(folder, budget_mib << 20)
    vault = Vault(arena)
    door = HttpDoor(vault, folder, "127.0.0.1", port, others=nobody(vault))
    door.start()
    sys.stdout.write(f"{door.address[1]}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
