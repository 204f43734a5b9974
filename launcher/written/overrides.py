"""Overrides in Hydra's grammar, before Hydra turns their texts into numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launcher.errors import RecipeError
from launcher.secrets import shown_override
from launcher.written.texts import is_text_place, text_package_problem, to_text

_KEY = re.compile(r"(?P<mark>\+\+?)?(?P<key>[A-Za-z_][\w./-]*)(@[\w.:]*)?=(?P<value>.*)", re.DOTALL)
_TOKEN = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\\.|[^\s,:\[\]{}()'"\\]+|\s+|.""", re.DOTALL
)
_OPENING, _ENDS = ("", "{", "[", "(", ",", ":"), ("", "}", "]", ")", ",")


def keep_text(override: str) -> str:
    """Return an override of a section of texts with quotes around its numbers, true and false.

    Hydra reads 1.10 as 1.1, and 1e5 as 100000.0. Raises RecipeError where a file would be put into
    such a section.
    """
    found = _KEY.fullmatch(override)
    if problem := text_package_problem(override.partition("=")[0], shown_override(override)):
        raise RecipeError(problem)
    if found is None or not is_text_place(found["key"].split(".")) or "${" in found["value"]:
        return override
    value = found["value"]
    if re.match(r"\w+\(", value) and not value.startswith("choice("):
        return override
    return override.removesuffix(value) + _quoted(value)


def _quoted(value: str) -> str:
    tokens = _TOKEN.findall(value)
    is_plain = not re.match(r"\s*[\[{]|choice\(", value)
    kept = []
    for index, token in enumerate(tokens):
        before = next((each for each in reversed(tokens[:index]) if not each.isspace()), "")
        after = next((each for each in tokens[index + 1 :] if not each.isspace()), "")
        stands_alone = before in _OPENING and after in _ENDS and not (is_plain and before == ":")
        kept.append(f"'{token}'" if stands_alone and _is_changed(token) else token)
    return "".join(kept)


def _is_changed(token: str) -> bool:
    """Return whether Hydra reads a word as a number, true or false of another text."""
    if token.lower() in ("true", "false"):
        return not token.islower()
    if re.fullmatch(r"[-+]?(0|[1-9](_?[0-9])*)", token):
        return bool(to_text(int(token)) != token)
    try:
        return bool(to_text(float(token)) != token)
    except ValueError:
        return False


def check_given_twice(arguments: Sequence[str]) -> None:
    """Raise RecipeError where a key is given twice, of which the last would count."""
    seen: dict[str, str] = {}
    for argument in arguments:
        found = _KEY.fullmatch(argument)
        if found is None or found["key"] == "recipe":
            continue
        first = seen.setdefault(found["key"], argument)
        if first is not argument:
            raise RecipeError(
                f"{found['key']} is given twice, by {shown_override(first)!r} and "
                f"{shown_override(argument)!r}; give it once"
            )
        for key in _keys_twice(found["value"]):
            raise RecipeError(
                f"{shown_override(argument)!r} holds the key {key!r} twice in a mapping; "
                "give it once"
            )


def _keys_twice(value: str) -> Iterator[str]:
    tokens = [each for each in _TOKEN.findall(value) if not each.isspace()]
    # Of each open bracket: the keys so far, None where it holds no mapping.
    open_keys: list[set[str] | None] = [None]
    for index, token in enumerate(tokens):
        if token in ("{", "[", "("):
            open_keys.append(set() if token == "{" else None)
        elif token in ("}", "]", ")"):
            open_keys = open_keys[:-1] or [None]
        elif token == ":" and (keys := open_keys[-1]) is not None:
            name = tokens[index - 1].strip("'\"")
            if tokens[index - 2] in ("{", ","):
                if name in keys:
                    yield name
                keys.add(name)
