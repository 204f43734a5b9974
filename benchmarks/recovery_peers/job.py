"""The job that every system trains: a tiny Llama on bytes, the same numbers everywhere.

Data is a pure function of the sample's global index. Needs torch and transformers; xxhash for
the digest. A worker of any system writes "committed" after each update with its step, loss and
world size, and "finished" with the digest at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import xxhash

from benchmarks.jobplan import MICRO_BATCH

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SEQUENCE = 64
VOCABULARY = 256
SEED = 1234


def build_model(**shape: int) -> tuple[LlamaForCausalLM, torch.optim.AdamW]:
    """Build the model and its optimizer with the same first weights in every process.

    `shape` is what of the model's configuration is another one.
    """
    # Here, as who trains another model imports nothing of it.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    known = {
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2 * SEQUENCE,
    }
    config = LlamaConfig(**{**known, **shape}, use_cache=False)
    model = LlamaForCausalLM(config).to(torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def draw_sample(index: int) -> torch.Tensor:
    """Draw one sequence of bytes: counting by a stride, one byte in sixteen disturbed."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + index)
    start, stride = torch.randint(1, VOCABULARY, (2,), generator=generator).tolist()
    clean = (start + stride * torch.arange(SEQUENCE)) % VOCABULARY
    other = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=generator)
    disturbed = torch.randint(0, 16, (SEQUENCE,), generator=generator) == 0
    return torch.where(disturbed, other, clean)


def draw_batch(rank: int, step: int, num_ranks: int) -> torch.Tensor:
    """Draw the micro batch of one rank; `num_ranks` is the whole job's, whoever is missing."""
    first = (step * num_ranks + rank) * MICRO_BATCH
    return torch.stack([draw_sample(first + row) for row in range(MICRO_BATCH)])


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Run the forward pass of a model, wrapped or not."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def loss_bits(loss: torch.Tensor) -> str:
    """Return the loss as the eight hexadecimal digits of its float32."""
    return struct.pack(">f", loss.item()).hex()


def named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and what the optimizer keeps for it, in one fixed order."""
    for name, parameter in model.named_parameters():
        yield f"weight.{name}", parameter.detach()
        kept = optimizer.state.get(parameter, {})
        for key in sorted(kept):
            if torch.is_tensor(kept[key]):
                yield f"{key}.{name}", kept[key]


def state_digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash weights and both moments with xxh3: equal digests mean equal bits."""
    digest = xxhash.xxh3_128()
    for name, tensor in named_state(model, optimizer):
        digest.update(name.encode())
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def fill_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its empty moments before the first update, so that a load finds a place."""
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
