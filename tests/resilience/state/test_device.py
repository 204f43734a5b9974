"""A state that a device gives no more is told from one that it gives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from resilience.checkpointless.recovery import Recovery
from resilience.errors import DeviceLostError
from resilience.state import stream
from resilience.state.device import await_kernels, check_readable
from resilience.state.layout import make_layout
from resilience.state.report import Phase, fresh_report
from resilience.state.view import NamedTensor
from tests.resilience.state.nodes import PlainView

LAYOUT = make_layout(nodes=["n0"], num_local_ranks=1)
LOST = torch.zeros(3, device="meta")
"""A tensor whose values cannot be read, as after the end of a context."""


class Opening:
    """The first generation: nobody holds anything yet."""

    number = 0
    rank = 0
    layout = LAYOUT
    before = None
    keeps_state = True
    reports = (fresh_report(LAYOUT, 0, -1),)


def recovery_of(tensor: Tensor) -> Recovery:
    recovery = Recovery(apply=lambda step: None)
    recovery.enter(Opening())
    recovery.bind(PlainView([tensor]))
    return recovery


def test_rank_whose_device_gives_nothing_claims_no_state() -> None:
    recovery = recovery_of(LOST)

    with pytest.raises(DeviceLostError, match="can be read no more"):
        recovery.report(rank=0, node="n0", generation=0)


def test_state_in_the_hosts_memory_is_not_read_for_a_report() -> None:
    """A report of a large state costs nothing there."""
    recovery = recovery_of(torch.zeros(3))

    assert recovery.report(rank=0, node="n0", generation=0).phase is Phase.FRESH


def test_one_tensor_that_cannot_be_read_is_found_behind_others() -> None:
    check_readable([torch.zeros(3), torch.zeros(0)])
    with pytest.raises(DeviceLostError):
        check_readable([torch.zeros(3), LOST])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_state_of_a_device_that_works_is_read(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1000, 3, dtype=dtype, device="cuda")

    check_readable([tensor, tensor[::2], tensor[:0]])


def test_memory_that_is_read_only_reaches_a_device_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a lent step is; a tensor of the host stands in for one of a device."""
    monkeypatch.setattr(stream, "_HostMemory", stream._DeviceMemory)
    content = np.arange(5 * stream.BLOCK_BYTES // 2, dtype=np.uint32).view(np.uint8)
    content.setflags(write=False)
    tensor = torch.zeros(len(content) // 4, dtype=torch.int32)
    warns_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            target = stream.Stream([NamedTensor(name="w", tensor=tensor)], is_read=False)
            checksum = target.pass_chunk(content)
    finally:
        torch.set_warn_always(warns_always)

    assert tensor.numpy().tobytes() == content.tobytes()
    assert checksum == xxhash.xxh3_64(content.tobytes()).intdigest()


@pytest.mark.gpu
def test_host_waits_for_what_was_queued() -> None:
    tensor = torch.zeros(1000, device="cuda")
    ended = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    ended.record()
    assert not ended.query()

    await_kernels([tensor])

    assert ended.query()
