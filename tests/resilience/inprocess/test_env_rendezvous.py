"""torch's table of handlers, as `env_rendezvous` writes to it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from resilience.inprocess import env_rendezvous


def test_torch_has_the_table_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is private: with a torch that has another one this test fails first."""
    assert dist.is_available()
    module = sys.modules["torch.distributed.rendezvous"]
    handlers = dict(module._rendezvous_handlers)
    by_torch = handlers["env"]
    monkeypatch.setattr(module, "_rendezvous_handlers", handlers)

    env_rendezvous.serve_env()

    assert by_torch is module._env_rendezvous_handler
    assert handlers["env"].__module__ == env_rendezvous.__name__
    assert handlers.keys() >= {"env", "tcp", "file"}


def test_handler_is_replaced_where_the_program_imports_torch_later() -> None:
    program = (
        "import sys; from resilience.inprocess.env_rendezvous import serve_env; serve_env(); "
        "assert 'torch' not in sys.modules; from torch.distributed.rendezvous import "
        "_rendezvous_handlers as found; print(found['env'].__module__, "
        "*(type(each).__module__ for each in sys.meta_path))"
    )

    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    module, *finders = told.stdout.split()
    assert module == env_rendezvous.__name__
    assert module not in finders
