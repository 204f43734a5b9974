"""Reaches places within the backward pass of a model whose code knows nothing of faults.

One mechanism for plain autograd, DDP and FSDP2: a hook on a layer's output runs when
backward gets to the layer, before that layer's own gradients are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def reach_in_backward(
    layers: Sequence[nn.Module],
    *,
    places: Collection[str],
    reach: Callable[[str], None],
    is_reducing: Callable[[], bool] = lambda: True,
) -> tuple[RemovableHandle, ...]:
    """Have `reach` called at `backward` and `reduction` in the backward pass of `layers`.

    The layers are those of the model in the order of its forward pass, wrapped already.
    `backward` is reached at the layer in the middle, `reduction` at the first one, when
    most gradients are there and have been handed to the reduction. `is_reducing` says
    whether this micro batch's backward reduces; it is asked in the forward pass, and
    neither place is reached where it does not. Hooks nothing, and returns no handles,
    for a place that is not among `places`.
    """
    layer_of = {"backward": layers[len(layers) // 2], "reduction": layers[0]}
    return tuple(
        layer.register_forward_hook(partial(_hook_output, reach, place, is_reducing))
        for place, layer in layer_of.items()
        if place in places
    )


def _hook_output(
    reach: Callable[[str], None],
    place: str,
    is_reducing: Callable[[], bool],
    _layer: nn.Module,
    _inputs: Any,
    output: Any,
) -> None:
    outputs = (each for each in _tensors(output) if each.requires_grad)
    first = next(outputs, None)
    if first is not None and is_reducing():
        first.register_hook(lambda _: reach(place))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
