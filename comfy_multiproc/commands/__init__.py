"""The command line: one module per command."""

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence

from comfy_multiproc import __version__
from comfy_multiproc.commands import build, doctor, series, test, top, up
from comfy_multiproc.console import Console
from comfy_multiproc.fork.errors import ForkError, explain_os_error

COMMANDS = (up, top, test, build, series, doctor)

_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def parser() -> argparse.ArgumentParser:
    """The parser of everything before a `--`."""
    top = argparse.ArgumentParser(prog="comfy_multiproc", description="ComfyUI with memory management across processes, as a fork that it builds.")
    top.add_argument("--version", action="version", version=f"comfy_multiproc {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.configure(commands)
    for parser in commands.choices.values():
        parser.set_defaults(parser=parser)
    return top


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Runs a command and returns its exit code: 2 and one message on stderr for bad input, 130 for Ctrl-C."""
    console = console or Console()
    own, rest = split(list(sys.argv[1:] if arguments is None else arguments))
    top = parser()
    args, unknown = top.parse_known_args(own)
    behind = getattr(args, "takes_rest", None)
    if unknown:
        # By the command's own parser, so that it is the command's usage that is shown.
        hint = f"; options of {behind} go behind --: {args.command} -- {shlex.join([*unknown, *rest])}" if behind else ""
        args.parser.error(f"{args.command} does not know {shlex.join(unknown)}{hint}")
    if rest and not behind:
        args.parser.error(f"{args.command} takes nothing after --")
    args.rest = rest
    try:
        return args.run(args, console)
    except ForkError as error:
        console.error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        console.error("interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be written there while Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        console.error(str(explain_os_error(error, error.filename or "a file")))
        return ForkError.exit_code


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is before the first `--` and what is after it."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
