from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.local_world import end_all, prepare


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Path]:
    """A folder in which runs on this machine do as a test says; none outlives the test."""
    prepare(tmp_path)
    yield tmp_path
    end_all(tmp_path)


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of kubectl; it runs in the run's folder."""
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    def put(text: str) -> None:
        program.write_text(text)
        program.chmod(0o755)

    return put
