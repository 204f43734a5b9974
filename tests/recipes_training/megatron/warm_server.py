"""A process as that of `tests.warm_server` that has imported Megatron as well."""

from __future__ import annotations

import gc
import importlib
import socket
import sys

import torch

from tests.forking import serve
from tests.warm_server import _become

_PRELOADED = ("recipes_training.megatron.preload_cpu", "recipes_training.recovery")

if __name__ == "__main__":
    for name in _PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])), _become)
