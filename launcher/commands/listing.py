"""The command `list`: a row for each recipe, or the same as JSON.

A recipe that waits for what only its user knows is listed with the keys that it asks for. What is
wrong with a broken recipe stands below the table.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.composition.choice import list_recipes
from launcher.composition.compose import compose_recipe
from launcher.composition.resolve import missing_keys, request_from_config
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.parameters import count_parameters
from launcher.job.tiered_rules import STORE_URL, STORE_URL_FORM
from launcher.job.workload import MegatronTrainer, ScriptTrainer
from launcher.monitor.logs import plain
from launcher.paths import find_folders
from launcher.terminal import drawing

COLUMNS_MAX = 120
_STORE_OF_ALL = "folder:checkpoints"
"""Of every recipe that chooses no tiers, by conf/resilience/tiered/run_folder.yaml."""
_TITLES = ("recipe", "ver", "model", "method", "nodes", "features")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What `list` says of one recipe; None is what is not known while a key is asked for."""

    name: str
    version: int | None = None
    description: str | None = None
    architecture: str | None = None
    num_parameters: int | None = None
    method: str | None = None
    num_nodes: int | None = None
    num_devices: int | None = None
    features: tuple[str, ...] | None = None
    asks_for: tuple[str, ...] | None = None
    """Keys that whoever runs the recipe has to set."""
    error: str | None = None
    """Why the recipe cannot be used."""

    def has(self, word: str) -> bool:
        """Return whether the word occurs in what the recipe is called, trains, or has."""
        texts = (*_cells(self), self.description or "")
        return any(word.casefold() in text.casefold() for text in texts)


def print_list(arguments: Sequence[str], start: Path) -> int:
    """List the recipes that are seen from the folder `start`; return the exit status.

    Raises RecipeError where the arguments are wrong or no recipe has the word.
    """
    words = [argument for argument in arguments if argument != "--json"]
    if len(words) > 1 or len(arguments) > len(words) + 1 or any(w.startswith("-") for w in words):
        raise RecipeError(
            "list takes a word that the recipes have to contain, and --json; each at most once"
        )
    names = list_recipes(find_folders(start).recipes)
    entries = [_read_entry(name, start) for name in names]
    if words and not (entries := [entry for entry in entries if entry.has(words[0])]):
        raise RecipeError(f"no recipe matches {words[0]}; `list` shows them all")
    if len(arguments) > len(words):
        texts = [dataclasses.asdict(entry) for entry in entries]
        sys.stdout.write(json.dumps(texts, indent=2) + "\n")
    else:
        _print_table(entries)
    return 0


def _read_entry(name: str, start: Path) -> Entry:
    try:
        config, found_by = compose_recipe(name, start=start)
        asks_for = tuple(_unset_keys(config))
        if STORE_URL in asks_for:
            # Any place lets the other rules be checked.
            OmegaConf.update(config, STORE_URL, "s3://bucket/prefix")
        is_partial = any(key != STORE_URL for key in asks_for)
        job = None if is_partial else request_from_config(config, found_by=found_by).job
        return _known_entry(name, config, asks_for, job)
    except RecipeError as error:
        return Entry(name=name, error=str(error))


def _unset_keys(config: DictConfig) -> Iterator[str]:
    """Yield the keys that a recipe leaves to whoever runs it."""
    if OmegaConf.select(config, STORE_URL, default=...) is None:
        # Null in conf/: a rule says best what is wanted.
        yield STORE_URL
    yield from missing_keys(OmegaConf.to_container(config, resolve=False))


def _known_entry(
    name: str, config: DictConfig, asks_for: tuple[str, ...], job: Job | None
) -> Entry:
    """Return what is known of a recipe; it has no job until the keys that it asks for are set."""

    def known(key: str) -> Any:
        return OmegaConf.select(config, key, throw_on_missing=False)

    return Entry(
        name=name,
        version=known("recipe.version"),
        description=known("recipe.description"),
        architecture=known("model.architecture") or (known("trainer.entry") and "script"),
        num_parameters=count_parameters(job.model) if job and job.model else None,
        method=_method(job) if job else None,
        num_nodes=known("trainer.num_nodes"),
        num_devices=known("trainer.num_devices"),
        features=tuple(
            key
            for key in known("resilience") or ()
            if known(f"resilience.{key}")
            and (key != "tiered" or known("resilience.tiered.store.url") != _STORE_OF_ALL)
        ),
        asks_for=asks_for,
    )


def _method(job: Job) -> str:
    """Return how training is spread over the workers."""
    trainer = job.trainer
    if isinstance(trainer, ScriptTrainer):
        return f"{trainer.world_size} processes"
    if isinstance(trainer, MegatronTrainer):
        degrees = {
            "TP": trainer.tensor_parallel,
            "PP": trainer.pipeline_parallel,
            "CP": trainer.context_parallel,
            "EP": trainer.expert_parallel,
            "DP": trainer.data_parallel_size,
        }
        return "Megatron " + " ".join(f"{key}{size}" for key, size in degrees.items() if size > 1)
    if trainer.sharding == "none":
        return f"DDP {trainer.world_size}"
    return (
        f"FSDP2 {trainer.sharding}, {trainer.replicas} x {trainer.world_size // trainer.replicas}"
    )


def _print_table(entries: Sequence[Entry]) -> None:
    """Print rows of at most 120 columns; below them what is asked for and what is broken."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    width = None if sys.stdout.isatty() else COLUMNS_MAX
    console = Console(width=width, highlight=False, file=drawing(sys.stdout))
    console.width = min(console.width, COLUMNS_MAX)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    # A name is never divided: it is copied from here.
    longest = max((len(entry.name) for entry in entries), default=0)
    table.add_column(_TITLES[0], no_wrap=True, min_width=longest)
    for title in _TITLES[1:-1]:
        table.add_column(title, overflow="fold")
    # `show` and --json have all of them.
    table.add_column(_TITLES[-1], overflow="ellipsis", no_wrap=True, max_width=30)
    for entry in entries:
        if entry.error is None:
            table.add_row(*map(Text, _cells(entry)))
    console.print(table)
    for entry in entries:
        if entry.asks_for:
            forms = {STORE_URL: STORE_URL_FORM}
            keys = " ".join(f"{key}={forms.get(key, 'VALUE')}" for key in entry.asks_for)
            console.print(Text(f"\n{entry.name} asks for {keys}"))
    for entry in entries:
        if entry.error is not None:
            console.print(Text(f"\n{plain(entry.name)} cannot be used:", style="red"))
            lines = "\n".join(map(plain, entry.error.splitlines()))
            console.print(Padding(Text(lines), (0, 0, 0, 2)))


def _cells(entry: Entry) -> tuple[str, ...]:
    size = f" {_short(entry.num_parameters)}" if entry.num_parameters else ""
    model = entry.architecture and f"{entry.architecture}{size}"
    nodes = entry.num_nodes and f"{entry.num_nodes} x {entry.num_devices or '?'}"
    features = None if entry.features is None else ", ".join(entry.features) or "-"
    # Degrees are Megatron's alone.
    method = entry.method and entry.method.removeprefix("Megatron ")
    cells = (entry.version, model, method, nodes, features)
    return (entry.name, *("?" if cell is None else str(cell) for cell in cells))


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
