"""What a device still has to do, and whether it still gives what it holds.

A call returns before its kernels have run, and so before their errors are known. Such an error, an
assertion or an address that is none, is sticky: it ends the process's context, and with that all
that the process holds on the device, though Python goes on. Only another process helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from resilience.errors import DeviceLostError


def on_devices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that are not in the host's memory."""
    return [each for each in tensors if each.device.type != "cpu"]


def await_kernels(tensors: Sequence[Tensor]) -> None:
    """Wait until the devices have ended all that this thread has queued, which sees its errors.

    Copies in streams of their own may go on. Raises torch's RuntimeError for what failed.
    """
    for device in _gpus(tensors):
        torch.cuda.current_stream(device).synchronize()


def check_readable(tensors: Sequence[Tensor]) -> None:
    """Wait for the devices of tensors, then read every value there; raises DeviceLostError.

    Whoever waits for the caller bounds this: a kernel may go on for ever.
    """
    found = on_devices(tensors)
    try:
        for device in _gpus(found):
            torch.cuda.synchronize(device)
        for each in found:
            each.sum().item()
    except RuntimeError as error:
        problem = str(error).strip().partition("\n")[0]
        raise DeviceLostError(
            f"the state on the device can be read no more ({problem}); this process is replaced"
        ) from error


def _gpus(tensors: Sequence[Tensor]) -> set[torch.device]:
    return {each.device for each in tensors if each.device.type == "cuda"}
