"""Whose memory is whose, where the kernel does not tell the daemon who asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilience.tiered.memoryd.session import Session


@pytest.mark.parametrize(
    ("known", "told", "owners"),
    [
        pytest.param("process-7", "b", ["process-7"], id="seen"),
        # A daemon in a container of its own sees the number of no worker.
        pytest.param("", "b", ["b"], id="unseen"),
        pytest.param("", None, [""], id="says-nothing"),
    ],
)
def test_worker_that_the_kernel_does_not_name_is_known_by_its_own_word(
    known: str, told: str | None, owners: list[str]
) -> None:
    prepared = []

    def prepare(num_bytes: int, owner: str, **_: object) -> None:
        prepared.append(owner)

    house: Any = SimpleNamespace(
        settings=SimpleNamespace(token="", own=SimpleNamespace(name="a")),
        board=SimpleNamespace(vault=SimpleNamespace(prepare=prepare)),
    )
    process: Any = SimpleNamespace(owner=known)
    listener: Any = SimpleNamespace(is_closing=False)
    session = Session(house, process, listener, lambda: None)

    session.answer({"op": "hello", **({} if told is None else {"process": told})})
    answer, _ = session.answer({"op": "prepare", "num_bytes": 1})

    assert (answer, prepared) == ({}, owners)
