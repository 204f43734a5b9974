"""What makes a shell complete the script `launcher`: the scripts of Hydra's own plugins.

The scripts ask `launcher -sc query=SHELL` at each press of the key, which Hydra answers.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import cast

from launcher.composition.choice import nearest
from launcher.errors import RecipeError

SCRIPT = "launcher"
SHELLS = ("bash", "zsh", "fish")
# The plugin's script is bash's, and these have zsh take it.
_ZSH_BEGINNING = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
autoload -Uz bashcompinit && bashcompinit
"""


def completion_text(shell: str) -> str:
    """Return the script that a shell evaluates. Raises RecipeError for one that is unknown."""
    if shell not in SHELLS:
        raise RecipeError(f"no completion for {shell!r}; {nearest(shell, SHELLS)}")
    from hydra._internal.core_plugins.bash_completion import BashCompletion
    from hydra._internal.core_plugins.fish_completion import FishCompletion
    from hydra.core.config_loader import ConfigLoader
    from hydra.plugins.completion_plugin import CompletionPlugin

    plugins: dict[str, type[CompletionPlugin]] = {"bash": BashCompletion, "fish": FishCompletion}
    # The script asks for a config; making the script does not.
    plugin = plugins.get(shell, BashCompletion)(cast("ConfigLoader", None))
    said = io.StringIO()
    # A plugin takes the program's name from here, and prints.
    argv, sys.argv = sys.argv, [SCRIPT]
    try:
        with contextlib.redirect_stdout(said):
            plugin.install()
    finally:
        sys.argv = argv
    # In fish it would also take the completion of `python` away.
    lines = [
        line
        for line in said.getvalue().splitlines(keepends=True)
        if not line.startswith("complete -c python")
    ]
    return (_ZSH_BEGINNING if shell == "zsh" else "") + "".join(lines)
