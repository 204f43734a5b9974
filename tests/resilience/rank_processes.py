"""Ranks as real processes over gloo, forked from one that has imported torch.

Targets are functions of modules that a process can import; they return what pickles.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 60
PRELOADED = ["pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
CONTEXT = multiprocessing.get_context("forkserver")


def run_ranks(
    target: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: int = TIMEOUT_S
) -> list[Any]:
    """Call `target(rank, world_size, *arguments)` in a process each; returns the results."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    return _run_ranks(CONTEXT, target, world_size, arguments, timeout_s)


def fork_ranks(target: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Do the same in processes that have what this one has imported; it has no other thread."""
    context = multiprocessing.get_context("fork")
    return _run_ranks(context, target, world_size, arguments, TIMEOUT_S)


def _run_ranks(
    context: Any,
    target: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...],
    timeout_s: int,
) -> list[Any]:
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_run, args=(pipe[1], target, rank, world_size, arguments, timeout_s))
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return [_receive(rank, pipe[0], timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _receive(rank: int, pipe: Connection, timeout_s: int) -> Any:
    assert pipe.poll(timeout_s), f"rank {rank} hangs"
    with pipe:
        is_right, result = pipe.recv()
    assert is_right, f"rank {rank}: {result}"
    return result


def _run(
    pipe: Connection,
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    arguments: Any,
    timeout_s: int,
) -> None:
    import torch

    signal.alarm(timeout_s)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        pipe.send((True, target(rank, world_size, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
