from __future__ import annotations

import pytest

from resilience.faults.injector import InjectedFault
from tests.resilience.faults.small_model import (
    SmallModel,
    make_injector,
    raise_over_ddp,
    reach_alone,
    reach_over_ddp,
    reach_over_fsdp,
)
from tests.resilience.rank_processes import TIMEOUT_S, run_ranks

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def test_places_come_in_order_of_the_backward_pass(tmp_path):
    """With four layers: the middle one is the third, and each has its gradients behind it."""
    assert reach_alone(tmp_path, 4) == [("backward", [3]), ("reduction", [1, 2, 3])]


def test_places_come_in_order_with_a_single_layer(tmp_path):
    assert reach_alone(tmp_path, 1) == [("backward", []), ("reduction", [])]


def test_ddp_has_begun_to_reduce_when_reduction_is_reached(tmp_path):
    log = run_ranks(reach_over_ddp, 2, str(tmp_path))[0]

    assert [each for each in log if each != "bucket"] == ["backward", "reduction"]
    assert "bucket" in log[: log.index("reduction")]
    assert "bucket" in log[log.index("reduction") :]


def test_fsdp_has_sharded_gradients_when_reduction_is_reached(tmp_path):
    log = run_ranks(reach_over_fsdp, 2, str(tmp_path))[0]

    assert [name for name, _ in log] == ["backward", "reduction"]
    (_, at_backward), (_, at_reduction) = log
    assert set(at_backward) < set(at_reduction)
    assert 3 in at_reduction
    assert 0 not in at_reduction


def test_exception_comes_out_of_backward_over_ddp(tmp_path):
    assert run_ranks(raise_over_ddp, 2, str(tmp_path)) == [
        "injected in reduction of step 0 on rank 0",
        "peer",
    ]


@pytest.mark.parametrize("place", ["backward", "reduction"])
def test_exception_comes_out_of_backward(tmp_path, place):
    model = SmallModel(3)
    injector = make_injector(tmp_path, [place], kind="exception")
    model.hook(injector)

    with pytest.raises(InjectedFault, match=f"^injected in {place} of step 0 on rank 0$"):
        model.run_loss().backward()


def test_micro_batch_that_does_not_reduce_reaches_nothing(tmp_path):
    reached = []
    model = SmallModel(3)
    injector = make_injector(tmp_path, ["backward", "reduction"], on_corrupt=reached.append)
    model.hook(injector, is_reducing=lambda: False)

    model.run_loss().backward()

    assert reached == []


def test_nothing_is_hooked_where_nothing_is_scheduled(tmp_path):
    model = SmallModel(3)

    assert model.hook(make_injector(tmp_path, ["forward"])) == ()
    assert model.hook(make_injector(tmp_path, ["backward"], rank=1)) == ()


def test_removed_hooks_reach_nothing(tmp_path):
    model = SmallModel(3)
    for handle in model.hook(make_injector(tmp_path, ["backward"], kind="exception")):
        handle.remove()

    model.run_loss().backward()
