"""``python -m cudnn_dsa``: the commands of ``cudnn_dsa.cli``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from cudnn_dsa._version import __version__
from cudnn_dsa.cli.console import CannotRun

# Command -> (module, one line of help). A module has add_arguments(parser) and run(args) -> exit code, and imports
# torch no earlier than run().
COMMANDS = {
    "info": ("cudnn_dsa.cli.info", "which backends can run here, and if not why and what to install"),
    "bench": ("cudnn_dsa.cli.bench", "time this machine's backends on the shapes of named models"),
    "aot": ("cudnn_dsa.cli.aot", "compile the kernels of named models ahead of time"),
    "demo": ("cudnn_dsa.cli.demo", "train a small language model whose attention is this operator"),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m cudnn_dsa", description="DeepSeek sparse attention.")
    top.add_argument("--version", action="version", version=f"cudnn_dsa {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, without the program's name; None takes the process's.

    Returns:
        The exit code: 0, 1 where a check of the command failed, 2 where it cannot run as asked.
    """
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe (head, a pager) left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
