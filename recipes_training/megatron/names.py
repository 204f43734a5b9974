"""Where each value of a Megatron parameter stands in Hugging Face's layout. Pure.

    Hugging Face                     Megatron, by the local layer specification
    model.embed_tokens, lm_head      embedding.word_embeddings, output_layer: rows by tensor rank
    q_proj, k_proj, v_proj           linear_qkv: per query group its q heads, its k, its v head
    o_proj, down_proj                linear_proj, linear_fc2: columns by tensor rank
    gate_proj, up_proj               linear_fc1: a tensor rank's part of gate, then that of up
    experts.gate_up_proj, down_proj  linear_fc1, linear_fc2 of each expert, transposed and whole
    self_attn.sinks                  core_attention.softmax_offset: by tensor rank

The way back is the same table: what a rank holds is written where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.job.workload import GptOssModel, Model
from recipes_training.weights.tensors import Index, Part, split_index

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.(weight|bias)")
_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_COPIED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    # Added once, after the tensor ranks' parts have been summed.
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one of Hugging Face's tensors, and the rows of a Megatron parameter it fills."""

    source: str
    """Name of Hugging Face's tensor."""
    index: Index
    """Which part of it."""
    rows: slice = field(default_factory=lambda: slice(None))
    """Rows of the rank's own tensor."""
    is_transposed: bool = False
    """Whether the part is the transpose of these rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of the model a rank has."""

    tensor_rank: int = 0
    tensor_size: int = 1
    first_layer: int = 0
    """Number in the model of the layer that is the rank's number 0."""
    first_expert: int = 0
    """Number in the layer of the expert that is the rank's number 0."""

    def part(self, size: int) -> range:
        """Return the rank's part of an axis that is divided by tensor rank."""
        own = size // self.tensor_size
        return range(self.tensor_rank * own, (self.tensor_rank + 1) * own)


def pieces(name: str, model: Model, place: Place) -> tuple[Piece, ...]:
    """Return what a parameter is made of; raises KeyError for a name that is not known."""
    if name in _OUTER:
        source = _OUTER[name]
        if name == "output_layer.weight" and model.tie_embeddings:
            source = _OUTER["embedding.word_embeddings.weight"]
        rows = () if "layernorm" in name else (_slice(place.part(model.vocab_size)),)
        return (Piece(source=source, index=rows),)
    found = _LAYER.fullmatch(name)
    if found is None:
        raise KeyError(name)
    layer = f"model.layers.{place.first_layer + int(found[1])}."
    inner = found[2]
    if inner in _COPIED:
        return (Piece(source=layer + _COPIED[inner], index=()),)
    if inner.startswith("self_attention."):
        return tuple(_attention(inner.removeprefix("self_attention."), layer, model, place))
    if (expert := _EXPERT.fullmatch(inner)) is not None:
        number = place.first_expert + int(expert[1])
        return tuple(_expert(f"{expert[2]}.{expert[3]}", number, layer, model))
    return tuple(_mlp(inner, layer, model, place))


def blocks(
    name: str, model: Model, place: Place
) -> list[tuple[str, Part, list[tuple[Piece, Index]]]]:
    """Return what is to be read for a parameter: source, part, and the pieces within the part."""
    found: list[tuple[str, Part, list[tuple[Piece, Index]]]] = []
    for piece in pieces(name, model, place):
        part, within = split_index(piece.index)
        if not found or found[-1][:2] != (piece.source, part):
            found.append((piece.source, part, []))
        found[-1][2].append((piece, within))
    return found


def _attention(name: str, layer: str, model: Model, place: Place) -> Iterator[Piece]:
    head = model.head_dim
    if name == "linear_proj.weight":
        columns = _slice(place.part(model.num_heads * head))
        yield Piece(source=f"{layer}self_attn.o_proj.weight", index=(slice(None), columns))
    elif name == "core_attention.softmax_offset":
        yield Piece(source=f"{layer}self_attn.sinks", index=(_slice(place.part(model.num_heads)),))
    elif name in ("linear_qkv.weight", "linear_qkv.bias"):
        kind = name.rpartition(".")[2]
        heads = {"q": model.num_heads // model.num_kv_heads * head, "k": head, "v": head}
        begin = 0
        for group in place.part(model.num_kv_heads):
            for part, size in heads.items():
                yield Piece(
                    source=f"{layer}self_attn.{part}_proj.{kind}",
                    index=(slice(group * size, (group + 1) * size),),
                    rows=slice(begin, begin + size),
                )
                begin += size
    else:
        raise KeyError(name)


def _mlp(name: str, layer: str, model: Model, place: Place) -> Iterator[Piece]:
    own = place.part(model.ffn_hidden_size)
    if name == "mlp.linear_fc2.weight":
        yield Piece(source=f"{layer}mlp.down_proj.weight", index=(slice(None), _slice(own)))
    elif name == "mlp.linear_fc1.weight":
        for number, part in enumerate(("gate", "up")):
            yield Piece(
                source=f"{layer}mlp.{part}_proj.weight",
                index=(_slice(own),),
                rows=_half(number, own),
            )
    else:
        raise KeyError(name)


def _expert(name: str, number: int, layer: str, model: Model) -> Iterator[Piece]:
    assert isinstance(model, GptOssModel)
    size = model.ffn_hidden_size
    experts = f"{layer}mlp.experts."
    if name == "fc2.bias":
        yield Piece(source=f"{experts}down_proj_bias", index=(number,))
    elif name == "fc2.weight":
        yield Piece(source=f"{experts}down_proj", index=(number,), is_transposed=True)
    else:
        is_weight = name == "fc1.weight"
        for part in range(2):
            # Gate and up take turns along the last axis.
            columns = slice(part, 2 * size, 2)
            yield Piece(
                source=f"{experts}gate_up_proj{'' if is_weight else '_bias'}",
                index=(number, slice(None), columns) if is_weight else (number, columns),
                rows=_half(part, range(size)),
                is_transposed=is_weight,
            )


def _half(number: int, own: range) -> slice:
    return slice(number * len(own), (number + 1) * len(own))


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
