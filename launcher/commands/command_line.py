"""What can be wrong with a command line before anything of it is looked up.

Hydra answers most of this with a page of usage, or with the words of its parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.commands.usage import COMMANDS
from launcher.composition.choice import list_recipes, nearest
from launcher.errors import RecipeError
from launcher.secrets import held_secrets, shown_override
from launcher.written.overrides import check_given_twice

# Hydra's options, with the values that one takes: None where it takes any, () where none.
_CONFIGS = ("job", "hydra", "all")
_INFOS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_OPTIONS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("--hydra-help", "--version", "--resolve", "--shell-completion", "-sc"), ()),
    **dict.fromkeys(("--run", "-r", "--multirun", "-m"), ()),
    **dict.fromkeys(("--cfg", "-c"), _CONFIGS),
    **dict.fromkeys(("--info", "-i"), _INFOS),
    **dict.fromkeys(("--package", "-p", "--config-dir", "-cd")),
}


def override_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a message for each part of a command line that may hold a secret.

    Hydra writes a sweep's command line to a file before any job is looked at.
    """
    return list(dict.fromkeys(problem for each in arguments for problem in _secrets_of(each)))


def _secrets_of(argument: str) -> Iterator[str]:
    key, _, text = argument.lstrip("+~-").partition("=")
    # The keys of a sweeper's parameters are overrides themselves.
    place = tuple(key.removeprefix("hydra.sweeper.params.").split("."))
    for value in _values_of(argument, text):
        if place == ("hydra", "sweeper", "params") and isinstance(value, dict):
            yield from override_secrets(f"{each}={value[each]}" for each in value)
        else:
            yield from held_secrets(value, place)


def _values_of(argument: str, text: str) -> list[Any]:
    """Return the value of an override, or each that it sweeps over, as plain data."""
    if "{" not in text:
        return [None if text == "null" else text]
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        # Nothing is composed of what cannot be read, and the message does not show it.
        return [None]
    if not override.is_discrete_sweep():
        return [override.value()]
    key = override.get_key_element()
    swept = override.sweep_string_iterator()
    return [value for each in swept for value in _values_of(f"{key}={each}", each)]


def ordered_arguments(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return a command line with its options first, which is how Hydra's parser wants it.

    Raises RecipeError that names the first argument that is neither option nor override, or a key
    that is given twice.
    """
    options: list[str] = []
    overrides: list[str] = []
    waiting: str | None = None
    for argument in arguments:
        option, waiting = waiting, None
        # A value with an = in it is given as --config-dir=PATH.
        if option is not None and not argument.startswith("-") and "=" not in argument:
            _check_value(option, argument)
            options.append(argument)
            continue
        options += _without_value(option)
        if argument.startswith("-"):
            waiting = _check_option(argument)
            options.append(argument)
        elif argument.startswith("="):
            raise RecipeError(f"{argument!r} has no key before its =; write KEY=VALUE")
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        else:
            is_first = argument == arguments[0]
            raise RecipeError(_no_override(argument, is_first, list_recipes(folders)))
    check_given_twice(overrides)
    return [*options, *_without_value(waiting), *overrides]


def _without_value(option: str | None) -> list[str]:
    """Return the value of an option that none followed: --info alone may have none, and says all.

    Raises RecipeError for the others.
    """
    if option is None:
        return []
    if option in {"--info", "-i"}:
        return ["all"]
    allowed = _OPTIONS[option]
    words = f"; allowed: {', '.join(allowed)}" if allowed else ""
    raise RecipeError(f"{option} has no value{words}")


def _check_option(argument: str) -> str | None:
    """Return the option if its value is the next argument."""
    name, equals, value = argument.partition("=")
    if name not in _OPTIONS:
        if equals:
            shown = shown_override(argument)
            raise RecipeError(
                f"{shown!r}: a key has no dashes before it; write {shown.lstrip('-')}"
            )
        raise RecipeError(f"no option {argument!r}; {nearest(argument, _OPTIONS)}")
    if equals:
        _check_value(name, value)
        return None
    return None if _OPTIONS[name] == () else name


def _check_value(option: str, value: str) -> None:
    allowed = _OPTIONS[option]
    if allowed is not None and value not in allowed:
        if not allowed:
            raise RecipeError(f"{option}={value}: {option} takes no value")
        raise RecipeError(f"{option} {value!r}: allowed: {', '.join(allowed)}")


def _no_override(word: str, is_first: bool, recipes: list[str]) -> str:
    """Say what to write for a word without an =."""
    if word in recipes or word.endswith((".yaml", ".yml")):
        return f"{word!r} is a recipe; choose it with recipe={word}"
    if not is_first or "." in word:
        return f"{word!r} says no value; write {word}=VALUE"
    known = (*COMMANDS, *recipes)
    near = nearest(word, known)
    if near.startswith("allowed"):
        near = f"allowed: {', '.join(COMMANDS)}, or recipe=NAME with a name that `list` shows"
    return f"no command {word!r}; {near}"
