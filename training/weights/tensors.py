"""The tensors of Hugging Face's layout: their shapes, and parts of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from launcher.job.workload import GptOssModel, Model

Index = tuple[int | slice, ...]
Part = tuple[slice, ...]
"""A range of each of the first axes."""


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of Hugging Face's tensors, in the order that files have them."""
    hidden, vocab = model.hidden_size, model.vocab_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(model.num_layers):
        for name, shape in _layer_shapes(model).items():
            found[f"model.layers.{layer}.{name}"] = shape
    found["model.norm.weight"] = (hidden,)
    if not model.tie_embeddings:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def _layer_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    heads, groups = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rows = {"q": heads, "k": groups, "v": groups}
    found: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    has_biases = isinstance(model, GptOssModel)
    for part, size in rows.items():
        found[f"self_attn.{part}_proj.weight"] = (size, hidden)
        if has_biases:
            found[f"self_attn.{part}_proj.bias"] = (size,)
    found["self_attn.o_proj.weight"] = (hidden, heads)
    if has_biases:
        found["self_attn.o_proj.bias"] = (hidden,)
        found["self_attn.sinks"] = (model.num_heads,)
    found["post_attention_layernorm.weight"] = (hidden,)
    if not isinstance(model, GptOssModel):
        for part in ("gate", "up"):
            found[f"mlp.{part}_proj.weight"] = (ffn, hidden)
        return {**found, "mlp.down_proj.weight": (hidden, ffn)}
    experts = model.num_experts
    return {
        **found,
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * ffn),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * ffn),
        "mlp.experts.down_proj": (experts, ffn, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


def split_index(index: Index) -> tuple[Part, Index]:
    """Return a range of each axis that covers an index, and the index within them.

    Indices that take turns along an axis have the same range.
    """
    covering: list[slice] = []
    within: list[int | slice] = []
    for each in index or (slice(None),):
        if isinstance(each, int):
            covering.append(slice(each, each + 1))
            within.append(0)
        else:
            first = (each.start or 0) % (each.step or 1)
            covering.append(slice((each.start or 0) - first, each.stop))
            within.append(slice(first, None, each.step))
    return tuple(covering), tuple(within)


def find_gap(parts: Mapping[str, Iterable[Index]], known: Mapping[str, tuple[int, ...]]) -> str:
    """Return which of the tensors is not made up of its parts, in words; "" where all are.

    A part may be there more than once.
    """
    for name, shape in known.items():
        boxes = {_box(index, shape) for index in parts.get(name, ())}
        found, total = sum(math.prod(map(len, box)) for box in boxes), math.prod(shape)
        if found != total:
            return f"{found:,} of the {total:,} values of {name!r}"
    return ""


def _box(index: Index, shape: tuple[int, ...]) -> tuple[range, ...]:
    whole = [range(size) for size in shape]
    own = [
        axis[slice(i, i + 1) if isinstance(i, int) else i]
        for i, axis in zip(index, whole, strict=False)
    ]
    return (*own, *whole[len(index) :])
