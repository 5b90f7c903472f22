"""up: everything from nothing to a running server."""

import argparse
from typing import Any

from comfy_multiproc import launch
from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.environment import TORCH, Environment, project_root, requirement_lines
from comfy_multiproc.fork import process
from comfy_multiproc.fork.errors import ForkError, writing
from comfy_multiproc.testing.card.settings import CardSettings
from comfy_multiproc.testing.card.virtual import server_environment


def configure(commands: Any) -> None:
    parser = commands.add_parser(
        "up",
        help="set everything up and start the server",
        usage="comfy_multiproc up [--demo [--keep] [--device cuda]] [--card SIZE] [--upstream PATH] [--release V] [--dir DIR] [--force] [-- SERVER ARGUMENTS]",
    )
    parser.add_argument("--demo", action="store_true", help="show on tiny models what the series does, with and without it: about five minutes on two cores, no GPU needed")
    parser.add_argument("--keep", action="store_true", help="with --demo: leave its server running at the end")
    parser.add_argument("--device", choices=["card", "cuda"], default="card", help="with --demo: a virtual card (default), or the GPU")
    parser.add_argument("--card", type=card, metavar="SIZE", help="a virtual card for the server, on a machine without a GPU too: 400M, or 400M,count=2,state=low (docs/testing.md)")
    common.build_arguments(parser)
    parser.set_defaults(run=run, takes_rest="the server")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.demo:
        if args.card:
            raise ForkError("--demo makes its own virtual card: leave --card out")
        return demo(args, console)
    if args.keep or args.device != "card":
        raise ForkError("--keep and --device belong to --demo")
    address = launch.Address.of(args.rest)
    address.check_free()
    needed = card_arguments(args.card, args.rest) if args.card else []
    built = common.build_fork(args, common.find_source(args, console), console)
    environment = Environment(project_root() / ".venv")
    environment.ensure([*TORCH, *requirement_lines(built.path / "requirements.txt")], console.progress)
    arguments = [*args.rest, *(needed if args.card else device(environment, args.rest, console))]
    address.check_free()
    # With --base-directory ComfyUI makes its user folder there, and still opens its database in this one.
    with writing(built.path):
        (built.path / "user").mkdir(exist_ok=True)
    if database := launch.database_argument(built.path, args.rest, address.port):
        console.note("another server runs in this folder: this one gets a database of its own, " + database[1].rpartition("/")[2])
        arguments += database
    console.progress(f"Starting ComfyUI {built.version} in {built.path}")
    console.settle()
    return launch.serve(
        environment.python,
        built.path,
        arguments,
        address=address,
        variables=server_environment(args.card, tree=built.path) if args.card else {},
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
    return process.attached(command, cwd=project_root(), grace=launch.GRACE * 2)


def card(text: str) -> CardSettings:
    """The virtual card that `--card` asks for: a size, and settings behind it."""
    try:
        return CardSettings.parse(f"size={text.removeprefix('size=')}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def card_arguments(settings: CardSettings, arguments: list[str]) -> list[str]:
    """What the server has to be told beside `arguments` so that it runs on that card. Raises `ForkError` if they do not go together."""
    needed = "--cpu" if settings.form == "python" else "--disable-dynamic-vram"
    chosen = launch.device_argument(arguments)
    if settings.form == "python" and chosen not in (None, "--cpu"):
        raise ForkError(f"{chosen} does not go with --card, which chooses the device: leave it out (for --lowvram write --card SIZE,state=low)")
    if settings.form != "python" and chosen == "--cpu":
        raise ForkError("--cpu does not go with a card of form=npu: leave it out")
    return [] if needed in arguments else [needed]


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
