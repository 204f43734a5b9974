"""A small GPT on the text of one file, character by character, with DDP and accumulated gradients.

Rank 0 writes a checkpoint every 20 steps, whole or not at all; a start goes on from it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import resilience

RUN_DIR = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))
"""The folder of the run: all its starts see it. Without a launcher, the current one."""

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(nn.Module):
    """One layer: attention over the past, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream, [batch, tokens, WIDTH], after this layer."""
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.ffn(self.norms[1](x))


class Gpt(nn.Module):
    """Predicts the next character."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_characters))

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss over [batch, CONTEXT + 1] characters."""
        places = torch.arange(CONTEXT, device=text.device)
        x = self.characters(text[:, :-1]) + self.places(places)
        scores = self.head(self.blocks(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return that of a step: a warm-up of a tenth, then a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step <= warm_up:
        return highest * step / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def main() -> None:
    """Train on --text; two micro batches a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=RUN_DIR / "checkpoints")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()

    characters = sorted(set(text := options.text.read_text("utf-8")))
    index = {each: number for number, each in enumerate(characters)}
    data = torch.tensor([index[each] for each in text])
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(len(characters)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    path, first = options.out / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, map_location=device)
        model.module.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["moments"])
        first = state["step"]
        if rank == 0:
            print(f"goes on from step {first}", flush=True)

    for step in range(first + 1, options.steps + 1):
        chance = torch.Generator().manual_seed(step * 1000 + rank)
        lr = learning_rate(step, options.steps, options.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        total = 0.0
        for is_last in (False, True):
            begins = torch.randint(len(data) - CONTEXT - 1, (8,), generator=chance)
            batch = torch.stack([data[each : each + CONTEXT + 1] for each in begins]).to(device)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(batch) / 2
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        resilience.log(step, total, lr=lr, grad_norm=norm)
        if step % 20 == 0 and rank == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            state = {
                "weights": model.module.state_dict(),
                "moments": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
