"""A process that has imported the launcher and forks it, so that a test need not wait for that.

Requests and answers are JSON lines. It composes nothing itself and has no threads, so that each
child begins as a process of its own would.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

import launcher.app
import launcher.composition.compose
from launcher.__main__ import main

_PRELOADED = (launcher.app, launcher.composition.compose)


def _run_child(request: dict[str, Any], out: int, err: int) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # A launcher that hangs is one that failed.
    signal.alarm(request["timeout_s"])
    try:
        return main(request["arguments"])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - the interpreter would print it and end with 1
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _run(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            status = 1
            try:
                status = _run_child(request, out.fileno(), err.fileno())
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"status": status, "out": texts[0], "err": texts[1]}


def _warm_parsers() -> None:
    """Have the grammars of Hydra and OmegaConf learn what they else learn in each child."""
    words = ("a=b/c_d1", "+a.b=b", "a=1", "a=1e-3", "a=[1,2]", "a={b: c}", "~a", "a=1,2", "a='x y'")
    OverridesParser.create().parse_overrides(list(words))
    config = {"a": 1, "b": {"c": "${a}", "d": "x${..a}y", "e": "${oc.select:b.c,null}"}}
    OmegaConf.to_container(OmegaConf.create(config), resolve=True)


def serve() -> None:
    Plugins.instance()
    _warm_parsers()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
