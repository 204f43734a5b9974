"""Each value of Hugging Face's layout stands once in each copy, and comes back where it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from launcher.job.parameters import shapes
from launcher.job.workload import GptOssModel, Model
from recipes_training.megatron.names import Piece, Place, blocks, pieces
from recipes_training.weights.tensors import Index, find_gap
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job


@dataclass(frozen=True)
class Split:
    """How the ranks of one copy divide the model."""

    tensor: int = 1
    stages: int = 1
    experts: int = 1


SPLITS = [
    pytest.param(Split(), id="whole"),
    pytest.param(Split(tensor=2), id="tp2"),
    pytest.param(Split(stages=2), id="pp2"),
    pytest.param(Split(tensor=2, stages=2), id="tp2-pp2"),
]
OF_EXPERTS = [
    *SPLITS,
    pytest.param(Split(experts=2), id="ep2"),
    pytest.param(Split(experts=4, stages=2), id="ep4-pp2"),
    pytest.param(Split(experts=2, tensor=2), id="ep2-tp2"),
]
CASES = [
    *(pytest.param(LLAMA, *each.values, id=f"llama-{each.id}") for each in SPLITS),
    *(pytest.param(GPT_OSS, *each.values, id=f"gpt-oss-{each.id}") for each in OF_EXPERTS),
]


def model_of(values: dict[str, Any]) -> Model:
    # Two tensor ranks divide an even vocabulary.
    return make_job(model={**values, "vocab_size": 260}).model


def own_shapes(model: Model, split: Split, stage: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what Megatron's model of a rank is made of."""
    hidden, parts = model.hidden_size, split.tensor
    heads, ffn = model.num_heads // parts, model.ffn_hidden_size // parts
    packed = (heads + 2 * model.num_kv_heads // parts) * model.head_dim
    if stage == 0:
        yield "embedding.word_embeddings.weight", (model.vocab_size // parts, hidden)
    if stage == split.stages - 1:
        yield "decoder.final_layernorm.weight", (hidden,)
        yield "output_layer.weight", (model.vocab_size // parts, hidden)
    for layer in range(model.num_layers // split.stages):
        name = f"decoder.layers.{layer}."
        yield f"{name}input_layernorm.weight", (hidden,)
        yield f"{name}pre_mlp_layernorm.weight", (hidden,)
        yield f"{name}self_attention.linear_qkv.weight", (packed, hidden)
        yield f"{name}self_attention.linear_proj.weight", (hidden, heads * model.head_dim)
        if not isinstance(model, GptOssModel):
            yield f"{name}mlp.linear_fc1.weight", (2 * ffn, hidden)
            yield f"{name}mlp.linear_fc2.weight", (hidden, ffn)
            continue
        yield f"{name}self_attention.linear_qkv.bias", (packed,)
        yield f"{name}self_attention.linear_proj.bias", (hidden,)
        yield f"{name}self_attention.core_attention.softmax_offset", (heads,)
        yield f"{name}mlp.router.weight", (model.num_experts, hidden)
        yield f"{name}mlp.router.bias", (model.num_experts,)
        for expert in range(model.num_experts // split.experts):
            inner = f"{name}mlp.experts.local_experts.{expert}."
            whole = model.ffn_hidden_size
            yield f"{inner}linear_fc1.weight", (2 * whole, hidden)
            yield f"{inner}linear_fc1.bias", (2 * whole,)
            yield f"{inner}linear_fc2.weight", (hidden, whole)
            yield f"{inner}linear_fc2.bias", (hidden,)


def places(model: Model, split: Split) -> Iterator[tuple[int, Place]]:
    """Yield the stage and place of each rank of one copy."""
    experts = model.num_experts // split.experts if isinstance(model, GptOssModel) else 0
    for stage in range(split.stages):
        for tensor in range(split.tensor):
            for expert in range(split.experts):
                yield (
                    stage,
                    Place(
                        tensor_rank=tensor,
                        tensor_size=split.tensor,
                        first_layer=model.num_layers // split.stages * stage,
                        first_expert=experts * expert,
                    ),
                )


def check_blocks(
    name: str, model: Model, place: Place, whole: dict[str, Any], num_values: int
) -> None:
    """Assert that a parameter is read once and nothing beside it."""
    read = 0
    for source, part, own in blocks(name, model, place):
        block = whole[source][part]
        read += block.size
        for piece, within in own:
            np.testing.assert_array_equal(block[within], whole[source][piece.index])
    assert read == num_values, name


@pytest.mark.parametrize(("values", "split"), CASES)
def test_every_value_has_a_place_and_comes_back_from_it(
    values: dict[str, Any], split: Split
) -> None:
    model = model_of(values)
    whole = {
        name: np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        for name, shape in shapes(model).items()
    }
    back = {name: np.full(each.shape, -1) for name, each in whole.items()}

    for stage, place in places(model, split):
        for name, shape in own_shapes(model, split, stage):
            check_blocks(name, model, place, whole, np.prod(shape))
            own = np.full(shape, -1)
            for piece in pieces(name, model, place):
                part = whole[piece.source][piece.index]
                rows = own[piece.rows]
                assert (rows == -1).all(), f"{name}: a value is given twice"
                rows[...] = (part.T if piece.is_transposed else part).reshape(rows.shape)
            assert (own >= 0).all(), f"{name}: a value is given none"
            for piece in pieces(name, model, place):
                target = back[piece.source][piece.index]
                rows = own[piece.rows]
                back[piece.source][piece.index] = (rows.T if piece.is_transposed else rows).reshape(
                    target.shape
                )

    for name, each in whole.items():
        np.testing.assert_array_equal(back[name], each, err_msg=name)


@pytest.mark.parametrize(("values", "split"), CASES)
def test_what_a_rank_has_not_given_is_told(values: dict[str, Any], split: Split) -> None:
    model = model_of(values)
    given = [
        piece
        for stage, place in places(model, split)
        for name, _ in own_shapes(model, split, stage)
        for piece in pieces(name, model, place)
    ]

    def gap_of(found: list[Piece]) -> str:
        return find_gap(
            {each.source: [*indices(found, each.source)] for each in found}, shapes(model)
        )

    assert gap_of(given) == ""
    assert gap_of([*given, *given]) == ""
    name = "model.layers.1.self_attn.o_proj.weight"
    (last,) = [each for each in given if each.source == name][-1:]
    kept = [each for each in given if (each.source, each.index) != (name, last.index)]
    left = 1024 - 1024 // split.tensor
    assert gap_of(kept) == f"{left:,} of the 1,024 values of {name!r}"


def indices(found: list[Piece], source: str) -> Iterator[Index]:
    return (each.index for each in found if each.source == source)


def test_heads_of_a_query_group_stand_together() -> None:
    """Megatron's order of rows: a group's query heads, its key head, its value head."""
    model = model_of(LLAMA)

    found = pieces("decoder.layers.1.self_attention.linear_qkv.weight", model, Place())

    layer = "model.layers.1.self_attn"
    assert [(each.source, each.index[0], each.rows) for each in found] == [
        (f"{layer}.q_proj.weight", slice(0, 16), slice(0, 16)),
        (f"{layer}.k_proj.weight", slice(0, 8), slice(16, 24)),
        (f"{layer}.v_proj.weight", slice(0, 8), slice(24, 32)),
        (f"{layer}.q_proj.weight", slice(16, 32), slice(32, 48)),
        (f"{layer}.k_proj.weight", slice(8, 16), slice(48, 56)),
        (f"{layer}.v_proj.weight", slice(8, 16), slice(56, 64)),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "position_embeddings.weight",
    ],
)
def test_an_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(KeyError):
        pieces(name, model_of(LLAMA), Place())


@pytest.mark.parametrize(
    "values", [pytest.param(LLAMA, id="llama"), pytest.param(GPT_OSS, id="gpt-oss")]
)
def test_shapes_are_those_of_hugging_face(values: dict[str, Any]) -> None:
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

    from recipes_training.plan import plan_model_config

    model = model_of(values)
    is_llama = model.architecture == "llama"
    config = (LlamaConfig if is_llama else GptOssConfig)(**plan_model_config(model))
    with torch.device("meta"):
        core = (LlamaForCausalLM if is_llama else GptOssForCausalLM)(config)

    assert shapes(model) == {name: tuple(each.shape) for name, each in core.named_parameters()}
