"""up: everything from nothing to a running server."""

import argparse
from typing import Any

from comfy_multiproc import launch
from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.environment import TORCH, Environment, project_root, requirement_lines
from comfy_multiproc.fork.errors import writing


def configure(commands: Any) -> None:
    parser = commands.add_parser(
        "up",
        help="set everything up and start the server",
        usage="comfy_multiproc up [--upstream PATH] [--release V] [--dir DIR] [--force] [-- SERVER ARGUMENTS]",
    )
    common.build_arguments(parser)
    parser.set_defaults(run=run, takes_rest=True)


def run(args: argparse.Namespace, console: Console) -> int:
    address = launch.Address.of(args.rest)
    address.check_free()
    built = common.build_fork(args, common.find_source(args, console), console)
    environment = Environment(project_root() / ".venv")
    environment.ensure([*TORCH, *requirement_lines(built.path / "requirements.txt")], console.progress)
    arguments = [*args.rest, *device(environment, args.rest, console)]
    address.check_free()
    # With --base-directory ComfyUI makes its user folder there, and still opens its database in this one.
    with writing(built.path):
        (built.path / "user").mkdir(exist_ok=True)
    console.progress(f"Starting ComfyUI {built.version} in {built.path}")
    console.settle()
    return launch.serve(
        environment.python,
        built.path,
        arguments,
        address=address,
        answered=lambda: console.say(console.strong(f"ComfyUI answers at {address.url} (Ctrl-C stops it)")),
    )


def device(environment: Environment, arguments: list[str], console: Console) -> list[str]:
    """["--cpu"] when nothing else can be meant."""
    chosen = launch.device_argument(arguments)
    if chosen == "--cpu":
        return []
    console.progress("Looking for a GPU")
    torch = environment.torch()
    if torch is None or torch.devices:
        return []
    why = f" ({'; '.join(torch.failed)})" if torch.failed else ""
    if chosen is not None:
        console.note(f"torch {torch.version} can use no GPU{why}; --cpu is not added because of {chosen}")
        return []
    console.note(f"torch {torch.version} can use no GPU{why}: running on the CPU (--cpu)")
    return ["--cpu"]
