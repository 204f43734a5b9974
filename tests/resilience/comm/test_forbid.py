from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from resilience.comm.forbid import forbid_collectives
from resilience.errors import StateError
from tests.resilience.rank_processes import TIMEOUT_S, run_ranks

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def _collectives(mesh):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import Shard, distribute_tensor

    value = torch.ones(2)
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    group = dist.group.WORLD
    return {
        "all_reduce": lambda: dist.all_reduce(value),
        "group": lambda: group.allreduce([value]).wait(),
        "all_gather": lambda: dist.all_gather([torch.zeros(2), torch.zeros(2)], value),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(4), value),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(value, torch.ones(4)),
        "broadcast": lambda: dist.broadcast(value, src=0),
        "barrier": dist.barrier,
        "send": lambda: dist.isend(value, dst=1),
        "objects": lambda: dist.all_gather_object([None, None], 1),
        "functional": lambda: functional.all_reduce(value, "sum", group),
        "full_tensor": sharded.full_tensor,
        "redistribution": lambda: sharded.sum() ** 2,
    }


def find_allowed(rank, world_size, folder):
    """Return what got through the guard, and what is left of the group."""
    import warnings

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore", FutureWarning)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    allowed = []
    for name, collective in _collectives(init_device_mesh("cpu", (world_size,))).items():
        try:
            with forbid_collectives():
                collective()
        except StateError:
            continue
        allowed.append(name)
    total = torch.ones(1)
    dist.all_reduce(total)
    return allowed, total.item()


def test_every_way_to_a_collective_is_closed_and_open_again_behind(tmp_path):
    results = run_ranks(find_allowed, 2, str(tmp_path))

    assert results == [([], 2.0)] * 2


def update_sharded(rank, world_size, folder, options):
    """Return the bits of a sharded parameter and its moments after two updates."""
    import contextlib

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    results = []
    for guard in (contextlib.nullcontext, forbid_collectives):
        torch.manual_seed(0)
        sharded = [distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)]) for _ in range(2)]
        parameter = torch.nn.Parameter(sharded[0])
        parameter.grad = sharded[1]
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)
        for _ in range(2):
            with guard():
                optimizer.step()
        moments = [each for each in optimizer.state[parameter].values() if each.ndim]
        locals_ = [each.to_local() for each in (parameter.detach(), *moments)]
        results.append([each.numpy().tobytes() for each in locals_])
    return results[0] == results[1]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_update_of_sharded_parameters_has_the_same_bits(tmp_path, options):
    assert run_ranks(update_sharded, 2, str(tmp_path), options) == [True, True]


def test_guard_says_what_to_change():
    import torch.distributed as dist

    group = dist.distributed_c10d.ProcessGroup(dist.HashStore(), 0, 1)
    with (
        forbid_collectives(),
        pytest.raises(StateError, match=r"holds a collective, c10d\.allreduce_.*; an optimizer"),
    ):
        group.allreduce([torch.ones(1)])


def test_a_new_process_imports_no_compiler_in_its_first_update():
    """All ranks would wait for that import, which takes a good part of a second."""
    program = (
        "import sys, torch\n"
        "from resilience.comm.forbid import forbid_collectives\n"
        "weight = torch.ones(3)\n"
        "with torch.no_grad(), forbid_collectives():\n"
        "    weight.mul_(0.5)\n"
        "assert weight.tolist() == [0.5] * 3\n"
        "print(any(name.startswith('torch._dynamo.') for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S
    )

    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
