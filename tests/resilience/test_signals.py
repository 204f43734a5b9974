"""Signals as bytes of a file."""

from __future__ import annotations

import os
import select
import signal
import threading

from resilience.signals import caught_signals, read_signals


def test_signals_are_read_in_their_order_and_do_nothing_else() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with caught_signals(signal.SIGTERM, signal.SIGUSR1) as file:
        assert read_signals(file) == ()
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        sender.start()
        sender.join()
        os.kill(os.getpid(), signal.SIGTERM)

        assert select.select([file], [], [], 60)[0]
        assert read_signals(file) == (signal.SIGUSR1, signal.SIGTERM)

    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == before
