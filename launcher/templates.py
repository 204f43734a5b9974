"""Fill templates in, such that a recipe's value stays plain text whatever it holds.

A value enters a shell script through the filter `sh` and a manifest through
`json` (JSON is YAML, so a value can never become structure). A team's template
replaces ours of the same name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from launcher.errors import RecipeError

# What JSON may hold as it is, but YAML may not, or takes for a line's end. (Written as two escapes
# of 16 bits, as JSON does beyond them, a character is no YAML either.)
_NOT_YAML = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ufeff\\ufffe\\uffff\\ud800-\\udfff]")


def read_templates(folders: Iterable[Path]) -> dict[str, str]:
    """Return every *.j2 below the folders by relative name; the first folder wins."""
    texts: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.j2")):
            texts.setdefault(path.relative_to(folder).as_posix(), path.read_text("utf-8"))
    return texts


def fill_template(templates: Mapping[str, str], name: str, values: Mapping[str, Any]) -> str:
    """Return template `name` with the values in it; an undefined value is an error.

    Raises RecipeError that names the template and line.
    """
    # HTML's escaping would be wrong here: the filters below quote for shells and manifests.
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(dict(templates)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = _quote_shell
    environment.filters["json"] = _quote_json
    try:
        return environment.get_template(name).render(values)
    except jinja2.TemplateSyntaxError as error:
        where = f"template {error.name or name}, line {error.lineno}"
        raise RecipeError(f"{where}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise RecipeError(f"template {name}: {error.message}") from error


def _quote_shell(value: object) -> str:
    return shlex.quote(str(value))


def _quote_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return _NOT_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
