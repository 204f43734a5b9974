"""Count a model's parameters from its dimensions."""

from __future__ import annotations

from launcher.job.workload import GptOssModel, LlamaModel


def count_parameters(model: LlamaModel | GptOssModel) -> int:
    """Return the number of weights and biases, embeddings included."""
    hidden = model.hidden_size
    embeddings = model.vocab_size * hidden * (1 if model.tie_embeddings else 2)
    norms = 2 * hidden
    layer = _attention(model) + _feed_forward(model) + norms
    return embeddings + model.num_layers * layer + hidden


def _attention(model: LlamaModel | GptOssModel) -> int:
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    weights = 2 * model.hidden_size * (queries + keys)
    if isinstance(model, LlamaModel):
        return weights
    biases = queries + 2 * keys + model.hidden_size
    sinks = model.num_heads
    return weights + biases + sinks


def _feed_forward(model: LlamaModel | GptOssModel) -> int:
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    if isinstance(model, LlamaModel):
        return 3 * hidden * inner
    expert = 3 * hidden * inner + 2 * inner + hidden
    router = model.num_experts * (hidden + 1)
    return model.num_experts * expert + router
