"""build: make the fork without starting it."""

import argparse
from typing import Any

from comfy_multiproc.commands import common
from comfy_multiproc.console import Console


def configure(commands: Any) -> None:
    parser = commands.add_parser("build", help="build the fork: an upstream tree with the series applied")
    common.build_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    built = common.build_fork(args, common.find_source(args, console), console)
    console.say(f"ComfyUI {built.version} with the series: {built.path}" + (" (was up to date)" if built.reused else ""))
    return 0
