"""AWS's agent on a torch that has an option of the same name: theirs counts, with its default.

Runs in the environment of scripts/install-aws-agent.sh.
"""

from __future__ import annotations

import argparse

import hyperpod_elastic_agent.run as agent
from torch.distributed import run as torchrun

SHUTDOWN_TIMEOUT_S = 15


def make_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser, whose options may be declared again.

    torch's own --shutdown-timeout stays the first of its name in the parser, and its default, none,
    would count: workers that ignore SIGTERM would then live on.
    """
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    for each in (parser, *parser._action_groups):
        each.conflict_handler = "resolve"
    parser.set_defaults(shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    return parser


if __name__ == "__main__":
    agent.get_args_parser = make_parser
    agent.main()
