"""Fill templates in, such that a recipe's value stays plain text whatever it holds.

A value enters a shell script through the filter `sh` and a manifest through
`json` (JSON is YAML, so a value can never become structure), or with others
through `fields`; texts enter a comment of either through `comment`. A team's
template replaces ours of the same name.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.errors import RecipeError
from resilience.plain_files import read_plain_text

# What JSON may hold as it is, but YAML may not, or takes for a line's end. (Written as two escapes
# of 16 bits, as JSON does beyond them, a character is no YAML either.)
_NOT_YAML = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ufeff\\ufffe\\uffff\\ud800-\\udfff]")


def read_templates(folders: Iterable[Path], kind: str) -> dict[str, str]:
    """Return the <kind>/*.j2 below the folders by name; the first folder wins.

    Raises RecipeError that names a file that cannot be read.
    """
    texts: dict[str, str] = {}
    for folder in folders:
        for path in sorted((folder / kind).rglob("*.j2")):
            try:
                text = read_plain_text(path)
            except (OSError, UnicodeDecodeError) as error:
                raise RecipeError(f"template {path} cannot be read: {error}") from error
            texts.setdefault(path.relative_to(folder).as_posix(), text)
    return texts


def fill_template(templates: Mapping[str, str], name: str, values: Mapping[str, Any]) -> str:
    """Return template `name` with the values in it; an undefined value is an error.

    Raises RecipeError that names the template and line.
    """
    try:
        return _environment(frozenset(templates.items())).get_template(name).render(values)
    except jinja2.TemplateSyntaxError as error:
        where = f"template {error.name or name}, line {error.lineno}"
        raise RecipeError(f"{where}: {error.message}") from error
    except Exception as error:
        # A template computes, so anything may come out of it.
        raise RecipeError(f"template {name}: {error}") from error


@lru_cache(maxsize=4)
def _environment(templates: frozenset[tuple[str, str]]) -> jinja2.Environment:
    """Return where the templates are: each is compiled once, however many nodes there are."""
    # HTML's escaping would be wrong here: the filters below quote for shells and manifests.
    # A template that came with somebody's recipes reaches nothing of this process.
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.DictLoader(dict(templates)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A template is filled in a few times: folding its constants takes longer than it saves.
        optimized=False,
    )
    environment.filters["sh"] = _quote_shell
    environment.filters["json"] = _quote_json
    environment.filters["comment"] = _quote_comment
    environment.filters["fields"] = _write_fields
    return environment


def _quote_shell(value: object) -> str:
    """Quote for sh, such that a line of the text never begins with # or ends as on DOS.

    sbatch takes lines that begin with #SBATCH for options wherever they stand,
    and refuses carriage returns.
    """
    quoted = shlex.quote(str(value))
    return quoted.replace("\n#", "\n''#").replace("\r", "'\"$(printf '\\r')\"'")


def _quote_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return _NOT_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _write_fields(fields: Mapping[str, object], indent: int, quoted: bool = False) -> str:
    """Return fields of YAML, a line each; a field that is null is left out."""
    given = {name: _quote_json(value) for name, value in fields.items() if value is not None}
    names = {name: _quote_json(name) if quoted else name for name in given}
    return "\n".join(f"{' ' * indent}{names[name]}: {text}" for name, text in given.items())


def _quote_comment(texts: Iterable[str]) -> str:
    """Return a list in lines that begin with #; what follows a text's first line stays as it is."""
    lines = []
    for text in texts:
        first, *others = text.splitlines()
        lines += textwrap.wrap(
            first,
            width=98,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [f"    {other.strip()}" for other in others]
    return "\n".join(f"# {line}" for line in lines)
