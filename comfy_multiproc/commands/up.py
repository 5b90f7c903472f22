"""up: everything from nothing to a running server."""

import argparse
import subprocess
from typing import Any

from comfy_multiproc import launch
from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.environment import TORCH, Environment, project_root, requirement_lines
from comfy_multiproc.fork.errors import ForkError, writing


def configure(commands: Any) -> None:
    parser = commands.add_parser(
        "up",
        help="set everything up and start the server",
        usage="comfy_multiproc up [--demo [--keep] [--device cuda]] [--upstream PATH] [--release V] [--dir DIR] [--force] [-- SERVER ARGUMENTS]",
    )
    parser.add_argument("--demo", action="store_true", help="show on tiny models what the series does, with and without it: about five minutes on two cores, no GPU needed")
    parser.add_argument("--keep", action="store_true", help="with --demo: leave its server running at the end")
    parser.add_argument("--device", choices=["card", "cuda"], default="card", help="with --demo: a virtual card (default), or the GPU")
    common.build_arguments(parser)
    parser.set_defaults(run=run, takes_rest="the server")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.demo:
        return demo(args, console)
    if args.keep or args.device != "card":
        raise ForkError("--keep and --device belong to --demo")
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
    if database := launch.database_argument(built.path, args.rest, address.port):
        console.note("another server of this folder has its database open: this one gets its own, " + database[1].rpartition("/")[2])
        arguments += database
    console.progress(f"Starting ComfyUI {built.version} in {built.path}")
    console.settle()
    return launch.serve(
        environment.python,
        built.path,
        arguments,
        address=address,
        answered=lambda: console.say(console.strong(f"ComfyUI answers at {address.url} (Ctrl-C stops it)")),
    )


def demo(args: argparse.Namespace, console: Console) -> int:
    """The demonstration; exit code 0 only if every check of it holds."""
    if args.rest:
        raise ForkError("--demo chooses the server's arguments itself: leave out what follows --")
    source = common.find_source(args, console)
    built = common.build_fork(args, source, console)
    environment = Environment(project_root() / ".venv")
    environment.ensure([*TORCH, *requirement_lines(built.path / "requirements.txt")], console.progress)
    console.settle()
    command = [str(environment.python), "-m", "comfy_multiproc.demo", "--fork", str(built.path), "--upstream", str(source.path),
               "--out", str(project_root() / "build" / "demo"), "--device", args.device, *(["--keep"] if args.keep else [])]
    with subprocess.Popen(command, cwd=project_root()) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait(launch.GRACE * 2)


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
