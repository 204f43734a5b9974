"""The #SBATCH lines of a batch script: their options, their quoting, their limits.

sbatch splits such a line into words by rules of its own: quotes of either kind
group, a backslash takes the next character as it is in quotes as well, and an
unquoted # ends the line. No variable or command is expanded. Pure.
"""

from __future__ import annotations

import difflib
import re
import shlex

from launcher.errors import RecipeError

# The controller refuses longer texts without saying which; lists of nodes may have more.
_VALUE_MAX_BYTES = 1024
_NODES_MAX_BYTES = 64 * 1024
_NODE_LISTS = frozenset({"exclude", "nodelist"})
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")

# Long options of sbatch 20.11 to 24.11, by what follows their name.
_WITH_VALUE = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude export export-file
    extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
    gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodelist nodes ntasks
    nodefile ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
    partition power prefer priority profile qos reservation segment signal sockets-per-node
    switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
    wait-all-nodes wckey wrap
    """.split()  # noqa: SIM905  a list would take a line each
)
_SWITCHES = frozenset(
    """
    consolidate-segments contiguous hold ignore-pbs no-requeue overcommit oversubscribe parsable
    quiet reboot requeue spread-job stepmgr test-only use-min-nodes verbose wait
    """.split()  # noqa: SIM905  a list would take a line each
)
_EITHER = frozenset({"exclusive", "get-user-env", "nice", "no-kill", "oom-kill-step", "propagate"})
_OPTIONS = _WITH_VALUE | _SWITCHES | _EITHER
SWITCHED_ON = "true"
"""What a recipe gives to an option without a value."""


def option_line(name: str, value: str | None = None) -> str:
    """Return the line that sets an option to exactly this text, None for a bare option."""
    return f"#SBATCH --{name}" + ("" if value is None else f"={_quote(value)}")


def check_option(name: str, value: str, field: str) -> bool:
    """Check what a recipe's field gives to an option; return whether it has a value.

    Raises RecipeError that names the field.
    """
    if close := _known_options_near(name):
        raise RecipeError(f"{field}: sbatch has no option --{name}; closest: {close}")
    if not value or not value.isprintable():
        raise RecipeError(f"{field} {value!r} does not fit; allowed: one line of printable text")
    limit = _NODES_MAX_BYTES if name in _NODE_LISTS else _VALUE_MAX_BYTES
    if (length := len(value.encode())) > limit:
        raise RecipeError(f"{field} has {length} bytes; Slurm allows at most {limit}")
    is_switched_on = value == SWITCHED_ON
    if name in _SWITCHES and not is_switched_on:
        raise RecipeError(
            f"{field} {value!r}: sbatch's --{name} takes no value; "
            f"allowed: {SWITCHED_ON!r}, or leave it out"
        )
    return name in _WITH_VALUE or not is_switched_on


def parse_option_line(line: str, where: str) -> str:
    """Return the name of the one option that a #SBATCH line sets, in the right form.

    Raises RecipeError that begins with `where`.
    """
    words = _split(line.removeprefix("#SBATCH"), where)
    if len(words) != 1 or not line.startswith("#SBATCH "):
        raise RecipeError(f"{where}: {line!r} has {len(words)} words; allowed: one --option")
    name, equals, value = words[0].removeprefix("--").partition("=")
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", words[0], re.DOTALL):
        raise RecipeError(
            f"{where}: {words[0]!r} is no option; allowed: --option or --option=value"
        )
    if close := _known_options_near(name):
        raise RecipeError(f"{where}: sbatch has no option {words[0]!r}; closest: {close}")
    if (name in _WITH_VALUE and not value) or (name in _SWITCHES and equals):
        rule = "takes no value" if equals else "needs a value, as --option=value"
        raise RecipeError(f"{where}: --{name} {rule}")
    return name


def _known_options_near(name: str) -> str:
    """Return the options that an unknown name is a misspelling of; none are, of a site's own.

    A site's plugins add options to sbatch, so a name that is like no other may pass.
    """
    close = [] if name in _OPTIONS else difflib.get_close_matches(name, _OPTIONS, 3, cutoff=0.8)
    return ", ".join(close)


def _quote(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _split(text: str, where: str) -> list[str]:
    """Split into as many words as sbatch does; it drops a backslash that shlex may keep."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escapedquotes = True, "\"'"
    try:
        return list(words)
    except ValueError as error:
        raise RecipeError(f"{where}: {text.strip()!r}: {error}") from None
