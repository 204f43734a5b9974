"""A model's tensors and parameters, from its dimensions. Pure."""

from __future__ import annotations

import math

from launcher.job.workload import GptOssModel, Model

EXPERTS = ".experts."
"""In the names of those tensors whose first axis is the experts."""


def count_parameters(model: Model) -> int:
    """Return the number of weights and biases, embeddings included."""
    return model.num_layers * count_layer_parameters(model) + _count(other_shapes(model))


def count_layer_parameters(model: Model) -> int:
    """Return the number of weights and biases of one layer."""
    return _count(layer_shapes(model))


def count_active_parameters(model: Model) -> int:
    """Return the parameters that a token meets: of the experts those that it is sent to."""
    if not isinstance(model, GptOssModel):
        return count_parameters(model)
    experts = _count({name: each for name, each in layer_shapes(model).items() if EXPERTS in name})
    idle = experts // model.num_experts * (model.num_experts - model.num_experts_per_token)
    return count_parameters(model) - model.num_layers * idle


def _count(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, tensors.values()))


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape by Hugging Face's name, in the order that files have them."""
    first, *others = other_shapes(model).items()
    layers = [
        (f"model.layers.{number}.{name}", shape)
        for number in range(model.num_layers)
        for name, shape in layer_shapes(model).items()
    ]
    return dict([first, *layers, *others])


def other_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that are in no layer; the embedding's comes first."""
    hidden, vocab = model.hidden_size, model.vocab_size
    output = {} if model.tie_embeddings else {"lm_head.weight": (vocab, hidden)}
    return {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), **output}


def layer_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of one layer by its name in the layer."""
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
