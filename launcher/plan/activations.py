"""What one rank keeps of the forward pass, and computes with, at its fullest moment. Pure.

Per token and layer, in bytes, `c` being those of a number that is computed with. Read off the
layers of Transformers and of Megatron-Core, and held against torch's memory tracker by tests.

torch      norms      each its input in 32 bits, the normalised input, and its output
           attention  Llama: queries, keys, values, output; a number of 32 bits for each head
                      GPT-OSS: the same with keys and values repeated; a score for each token
           MLP        Llama: gate, its SiLU, up, product
                      GPT-OSS, for each expert of a token: 7 times its width, 3 times the input
Megatron   the same idea, divided over tensor ranks; a score for each token in any model, in
           32 bits and, with bf16, once more in 16

Recomputation keeps each layer's input, and has one layer whole at a time. In shards the gradients
of the layer behind are whole and in 32 bits until they are scattered.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job.parameters import count_layer_parameters
from launcher.job.workload import GptOssModel, LlamaModel, MegatronTrainer, Model, TorchTrainer
from launcher.plan.figure import Figure, in_gib

_LOSS_BYTES = 12
"""Of each logit: probabilities and two gradients in 32 bits, in the backward pass of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Bytes of one micro batch on a rank."""

    layer: int
    """What a layer keeps for its backward pass."""
    layer_input: int
    loss: int
    """What the last norm and the loss take at their fullest."""
    backward: int
    """What a layer's backward pass takes beside what was kept."""
    scattered: int = 0
    """Whole gradients of the layer behind, which are scattered meanwhile."""


def torch_activations(model: Model, trainer: TorchTrainer, seq_length: int) -> Figure:
    """Return the activations of a rank of plain PyTorch."""
    one = _torch_pass(model, trainer, seq_length)
    return _figure(one, trainer, model.num_layers, num_in_flight=1, has_loss=True)


def megatron_activations(
    model: Model, trainer: MegatronTrainer, seq_length: int, *, stage: int
) -> Figure:
    """Return the activations of a rank of a pipeline's stage, counted from 0.

    A stage has begun as many micro batches as stages follow it before it ends the first.
    """
    num_stages = trainer.pipeline_parallel
    num_own = -(-trainer.num_micro_batches // trainer.data_parallel_size)
    return _figure(
        _megatron_pass(model, trainer, seq_length),
        trainer,
        -(-model.num_layers // num_stages),
        num_in_flight=min(num_stages - stage, num_own),
        has_loss=stage == num_stages - 1,
    )


def _figure(
    one: _Pass,
    trainer: TorchTrainer | MegatronTrainer,
    num_layers: int,
    *,
    num_in_flight: int,
    has_loss: bool,
) -> Figure:
    is_recomputed = trainer.activation_checkpointing
    kept_by_layer = one.layer_input if is_recomputed else one.layer
    kept = num_in_flight * num_layers * kept_by_layer
    backward = one.backward + (one.layer - one.layer_input if is_recomputed else 0)
    loss = one.loss if has_loss else 0
    if num_layers > 1:
        # All but the last layer have one behind them, of which nothing is kept any more.
        backward = max(backward, backward + one.scattered - kept_by_layer)
    most, where = max((backward, "a backward pass"), (loss, "the loss"))
    formula = (
        f"{num_layers} layers x {in_gib(kept_by_layer)} x {num_in_flight} micro batches + "
        f"{in_gib(most)} in {where}{', recomputed' if is_recomputed else ''}"
    )
    return Figure(
        name="activations",
        value=kept + most,
        unit="bytes",
        formula=formula,
        source="launcher/plan/activations.py",
    )


def _torch_pass(model: Model, trainer: TorchTrainer, seq_length: int) -> _Pass:
    tokens = trainer.micro_batch_size * seq_length
    c = 2 if trainer.precision == "bf16" else 4
    # DDP computes in bf16 by autocast: the residual and the weights stay in 32 bits, and both are
    # copied for each product.
    is_autocast = c == 2 and trainer.sharding == "none"
    wide = 4 if is_autocast else c
    copies = c * count_layer_parameters(model) if is_autocast else 0
    output = c * model.vocab_size * model.hidden_size if is_autocast else 0
    if isinstance(model, GptOssModel):
        layer = _gpt_oss_layer(model, c, wide, seq_length)
        routed = wide * model.num_experts_per_token * model.ffn_hidden_size * 3 // 2
        experts = wide * model.num_experts * model.hidden_size * model.ffn_hidden_size
        # The gradient of one expert's matrices is made as large as that of all experts', and added.
        taken = max(tokens * routed + experts, 7 * experts)
    else:
        layer = _llama_layer(model, c, is_autocast=is_autocast)
        taken = tokens * c * (2 * model.ffn_hidden_size + model.hidden_size)
    return _Pass(
        layer=tokens * layer + copies,
        layer_input=tokens * model.hidden_size * wide,
        loss=tokens * (_LOSS_BYTES * model.vocab_size + 3 * wide * model.hidden_size) + output,
        backward=taken,
        # Sums are taken in 32 bits.
        scattered=0 if trainer.sharding == "none" else 4 * count_layer_parameters(model),
    )


def _llama_layer(model: LlamaModel, c: int, *, is_autocast: bool) -> int:
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # With autocast query, key, value, gate and up each take a copy of their norm's output.
    norms = (16 + 5 * c if is_autocast else 2 * (4 + 2 * c)) * model.hidden_size
    attention = c * 2 * (queries + keys) + 4 * model.num_heads
    return norms + attention + c * 4 * model.ffn_hidden_size


def _gpt_oss_layer(model: GptOssModel, c: int, wide: int, seq_length: int) -> int:
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    norms = (16 + (4 if wide > c else 2) * c) * hidden
    scores = model.num_heads * (seq_length + 4) * (c + wide if wide > c else c)
    attention = c * 4 * model.num_heads * model.head_dim + scores
    expert = (6 * wide + c) * inner + (2 * wide + c) * hidden
    return norms + attention + model.num_experts_per_token * expert + c * model.num_experts


def _megatron_pass(model: Model, trainer: MegatronTrainer, seq_length: int) -> _Pass:
    tokens = trainer.micro_batch_size * seq_length // trainer.context_parallel
    c = 2 if trainer.precision == "bf16" else 4
    tensor = trainer.tensor_parallel
    hidden = model.hidden_size // (tensor if trainer.sequence_parallel else 1)
    inner = model.ffn_hidden_size
    scores = model.num_heads * seq_length * ((4 + c) if c == 2 else 4)
    if isinstance(model, GptOssModel):
        # Experts are not divided over tensor ranks: each takes its own part of the tokens.
        own = model.num_experts_per_token / (tensor if trainer.sequence_parallel else 1)
        mlp, backward = own * c * (8 * inner + model.hidden_size), own * c * 2 * inner
    else:
        mlp, backward = c * 5 * inner / tensor, c * 2 * inner / tensor
    attention = (c * 4 * model.num_heads * model.head_dim + scores) / tensor
    return _Pass(
        layer=round(tokens * (2 * (8 + c) * hidden + attention + mlp)),
        layer_input=tokens * hidden * c,
        loss=tokens * ((8 + c) * hidden + _LOSS_BYTES * model.vocab_size // tensor),
        # Sequence parallelism gathers a layer's input once more.
        backward=round(tokens * (backward + c * model.hidden_size)),
    )
