"""A daemon that stands still, and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from tests.processes import stopped

WAITS = """
from resilience.tiered.memoryd import daemon

daemon._LOOK_S = 0.05
with daemon.caught_signals(*daemon.END_SIGNALS) as signals:
    print(flush=True)
    raise SystemExit(daemon._wait_for_end(daemon.Lease(None, print), daemon.Path(), signals))
"""


def test_daemon_that_stood_still_for_longer_than_between_two_looks_goes_on() -> None:
    """Its wait for signals ended then, as if a signal had come."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout
        daemon.stdout.readline()
        for _ in range(3):
            with stopped(daemon.pid):
                # Longer than between two looks: nothing happens that could be waited for.
                time.sleep(0.2)
        assert daemon.poll() is None
        daemon.send_signal(signal.SIGUSR1)

        assert daemon.wait(60) == signal.SIGUSR1
