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


@pytest.mark.parametrize(
    ("run", "problem"),
    [("a b", "'a b': String should match"), (None, "None: Input should be a valid string")],
)
def test_owner_that_is_none_is_refused_in_one_line(run: str | None, problem: str) -> None:
    vault = SimpleNamespace(claim=lambda namespace, job: None)
    house: Any = SimpleNamespace(
        settings=SimpleNamespace(token="", own=SimpleNamespace(name="a")),
        board=SimpleNamespace(vault=vault, shelf=None),
    )
    process: Any = SimpleNamespace(owner="")
    session = Session(house, process, process, lambda: None)
    session.answer({"op": "hello", "namespace": "n", "job": "j"})

    answer, _ = session.answer({"op": "own", "run": run, "name": "r in /f"})

    (text,) = str(answer["message"]).splitlines()
    assert f"the owner of a namespace cannot be read: run {problem}" in text
