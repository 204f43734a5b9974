"""What can be wrong with a command line before anything of it is looked up.

Hydra answers most of this with a page of usage, or with the words of its parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.choice import list_recipes, nearest
from launcher.commands.usage import COMMANDS
from launcher.errors import RecipeError

# Hydra's options, with the values that one takes: None where it takes any, () where none.
_OPTIONS: dict[str, tuple[str, ...] | None] = {
    "--hydra-help": (),
    "--version": (),
    "--resolve": (),
    "--run": (),
    "-r": (),
    "--multirun": (),
    "-m": (),
    "--shell-completion": (),
    "-sc": (),
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": None,
    "-p": None,
    "--config-dir": None,
    "-cd": None,
    "--experimental-rerun": None,
}


def check_arguments(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Raise RecipeError that names the first argument that is neither option nor override."""
    waiting: str | None = None
    for index, argument in enumerate(arguments):
        option, waiting = waiting, None
        if option is not None and not argument.startswith("-"):
            # --info may stand alone, before an override.
            if "=" in argument and option in {"--info", "-i"}:
                continue
            _check_value(option, argument)
        elif argument.startswith("-"):
            waiting = _check_option(argument)
        elif "=" not in argument and not argument.startswith("~"):
            raise RecipeError(_no_override(argument, index, list_recipes(folders)))


def _check_option(argument: str) -> str | None:
    """Return the option if its value is the next argument."""
    name, equals, value = argument.partition("=")
    if name not in _OPTIONS:
        if equals:
            key = name.lstrip("-")
            raise RecipeError(f"{argument!r}: a key has no dashes before it; write {key}={value}")
        raise RecipeError(f"no option {argument!r}; {nearest(argument, _OPTIONS)}")
    if equals:
        _check_value(name, value)
        return None
    return None if _OPTIONS[name] == () else name


def _check_value(option: str, value: str) -> None:
    allowed = _OPTIONS[option]
    if allowed is not None and value not in allowed:
        words = ", ".join(allowed) or "it takes no value"
        raise RecipeError(f"{option} {value!r}: allowed: {words}")


def _no_override(word: str, index: int, recipes: list[str]) -> str:
    """Say what to write for a word without an =."""
    if word in recipes or word.endswith((".yaml", ".yml")):
        return f"{word!r} is a recipe; choose it with recipe={word}"
    if index or "." in word:
        return f"{word!r} says no value; write {word}=VALUE"
    known = (*COMMANDS, *recipes)
    near = nearest(word, known)
    if near.startswith("allowed"):
        near = f"allowed: {', '.join(COMMANDS)}, or recipe=NAME with a name that `list` shows"
    return f"no command {word!r}; {near}"
