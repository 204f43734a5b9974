"""The commands beside `recipe=`: list, show, schema and report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.choice import list_recipes
from launcher.compose import resolve
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.parameters import count_parameters
from launcher.job.workload import MegatronTrainer
from launcher.paths import find_folders


def run_command(command: str, arguments: Sequence[str], start: Path) -> int:
    """Run one command in the folder `start`. Raises RecipeError and OutsideError."""
    if command == "list":
        _expect(arguments, 0, "list")
        _print_list(start)
    elif command == "show":
        if not arguments:
            raise RecipeError("show needs a recipe's name; `list` shows them")
        _print_recipe(arguments[0], arguments[1:], start)
    elif command == "schema":
        from launcher.schema import recipe_schema_text

        _expect(arguments, 0, "schema")
        sys.stdout.write(recipe_schema_text())
    else:
        from launcher.report import write_report

        _expect(arguments, 1, "report")
        sys.stdout.write(f"{write_report(start / arguments[0])}\n")
    return 0


def _expect(arguments: Sequence[str], number: int, command: str) -> None:
    if len(arguments) != number:
        raise RecipeError(f"{command} takes {number} arguments, not {len(arguments)}")


def _print_list(start: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("recipe", "version", "model", "method", "nodes x devices", "features"):
        table.add_column(title, no_wrap=title == "recipe")
    for name in list_recipes(find_folders(start).recipes):
        try:
            table.add_row(*recipe_row(name, resolve(name, start=start)))
        except RecipeError as error:
            # One broken recipe may not hide the others.
            table.add_row(name, "-", Text(str(error).splitlines()[0], style="red"))
    # Piped into another program there is no width to keep to.
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False).print(table)


def recipe_row(name: str, job: Job) -> tuple[str, ...]:
    """Return the cells of one recipe's row in `list`."""
    trainer = job.trainer
    return (
        name,
        str(job.recipe.version),
        f"{job.model.architecture} {_short(count_parameters(job.model))}",
        _method(job),
        f"{trainer.num_nodes} x {trainer.num_devices}",
        ", ".join(job.resilience.names()) or "-",
    )


def _method(job: Job) -> str:
    trainer = job.trainer
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


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _print_recipe(name: str, overrides: Sequence[str], start: Path) -> None:
    import yaml

    content = resolve(name, overrides, start).model_dump(mode="json", by_alias=True)
    yaml.safe_dump(content, sys.stdout, sort_keys=False, allow_unicode=True)
