"""Workers: start against a fresh interpreter, call round trip against a pipe, two CPU-bound workers side by side, a server's start.

    COMFY_MULTIPROC_FORK=build/ComfyUI-0.30.0 python benchmarks/start.py [--rounds 5]

Needs a built fork. Bounds: start 1.1x of a fresh interpreter that imports the same, call 8x of a pipe, two at once 1.8x, a server
whose four packs are isolated and known from an earlier start 1.2x of the same server with the packs in it. What two processes
gain beside each other differs from machine to machine and from second to second where processors are shared, so two plain
processes that do the same over pipes take their turn in every round.
"""

import argparse
import functools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

HERE = Path(__file__).resolve().parent
FORK = Path(os.environ.get("COMFY_MULTIPROC_FORK", HERE.parent / "build" / "ComfyUI-0.30.0")).resolve()
CALLS = 2000
SPINS = 6_000_000
SPIN_ROUNDS = 20

SAME = """
import asyncio, comfy.cli_args
comfy.cli_args.args.cpu = comfy.cli_args.args.disable_api_nodes = True
import logging
logging.disable(logging.ERROR)
import utils.extra_config, utils.install_util, comfy.utils, nodes, torch
asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
import os
os._exit(0)     # ready; taking it apart again is not measured
"""

# The worker's side: `entry` of its spec.


def load(context: object) -> None:
    context.on_execution("echo", lambda request: request.reply(request.body))   # type: ignore[attr-defined]
    context.on_execution("spin", lambda request: request.reply(spin()))     # type: ignore[attr-defined]


def spin() -> int:
    total = 0
    for i in range(SPINS):
        total += i & 3
    return total


def echo(pipe: Connection) -> None:
    while True:
        pipe.send_bytes(pipe.recv_bytes())


def spin_at_call(pipe: Connection) -> None:
    while True:
        pipe.recv_bytes()
        spin()
        pipe.send_bytes(b"")


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


NODE = """
class {name}:
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{}}}})
    RETURN_TYPES, FUNCTION = (), "run"

    def run(self):
        return ()


NODE_CLASS_MAPPINGS = {{"{name}": {name}}}
"""


def servers(rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until a server answers: with four workers, and without any."""
    from comfy_multiproc.testing import start_server

    def ready(home: Path, *arguments: str) -> float:
        begin = time.perf_counter()
        with start_server(FORK, ["--cpu", *arguments], home=home):
            return time.perf_counter() - begin
    isolated, native = [], []
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for name in ("One", "Two", "Three", "Four"):
            pack = Path(folder, "custom_nodes", name.lower())
            pack.mkdir(parents=True)
            (pack / "__init__.py").write_text(NODE.format(name=name))
        ready(Path(folder), "--isolate", "all")     # not known before
        for _ in range(rounds):
            isolated.append(ready(Path(folder), "--isolate", "all"))
            native.append(ready(Path(folder)))
    return isolated, native


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if not (FORK / "main.py").exists():
        sys.stderr.write(f"{FORK} is no built fork: set COMFY_MULTIPROC_FORK\n")
        return 1
    sys.path[:0] = [str(FORK), str(HERE)]
    import logging
    logging.disable(logging.ERROR)
    import comfy.cli_args
    comfy.cli_args.args.cpu = comfy.cli_args.args.disable_api_nodes = True
    import folder_paths  # noqa: F401  as in a server, so that its state is passed on
    from comfy_multiproc import host

    fresh, start = [], []
    for _ in range(rounds):
        fresh.append(timed(lambda: subprocess.run([sys.executable, "-c", SAME], cwd=FORK, check=True, stderr=subprocess.DEVNULL)))
        worker = host.Worker(host.Spec("start", entry="start"))
        start.append(timed(lambda: worker.start().result(120)))
        worker.stop()
    workers = [host.Worker(host.Spec(name, entry="start")) for name in ("one", "two")]
    for each in workers:
        each.start().result(120)

    context = multiprocessing.get_context("fork")

    def plain(serve: Callable[[Connection], None]) -> tuple[Connection, BaseProcess]:
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(other,), daemon=True)
        process.start()
        return pipe, process
    pipe, floor = plain(echo)

    def by_pipe() -> None:
        pipe.send_bytes(b"{}")
        pipe.recv_bytes()
    piped, called = [], []
    for _ in range(CALLS):
        piped.append(timed(by_pipe))
        called.append(timed(lambda: workers[0].call("echo").result(30)))
    floor.terminate()

    pipes = [plain(spin_at_call) for _ in range(2)]

    def spin_plain(pipe: Connection) -> Callable[[], object]:
        pipe.send_bytes(b"")
        return pipe.recv_bytes

    def spin_worker(worker: host.Worker) -> Callable[[], object]:
        future = worker.call("spin")
        return lambda: future.result(120)

    def gain(begins: list[Callable[[], Callable[[], object]]]) -> tuple[float, float]:
        """Seconds one after the other, and at once."""
        return timed(lambda: [begin()() for begin in begins]), timed(lambda: [end() for end in [begin() for begin in begins]])
    spun: dict[str, list[tuple[float, float]]] = {"plain": [], "workers": []}
    for _ in range(SPIN_ROUNDS):
        spun["plain"].append(gain([functools.partial(spin_plain, pipe) for pipe, _ in pipes]))
        spun["workers"].append(gain([functools.partial(spin_worker, worker) for worker in workers]))
    for _, process in pipes:
        process.terminate()
    alone, together = zip(*spun["workers"], strict=True)
    gains = {who: statistics.median(a / b for a, b in times) for who, times in spun.items()}
    host.stop_all()
    isolated, native = servers(rounds)

    rows = [
        ("worker start", start, "fresh interpreter, same imports", fresh, "s", 1.0, lambda a, b: f"{a / b:.2f}x (at most 1.1x)"),
        ("empty call", called, "raw pipe, same bytes", piped, "us", 1e6, lambda a, b: f"{a / b:.1f}x (at most 8x)"),
        ("two workers at once", together, "one after the other", alone, "s", 1.0,
         lambda a, b: f"{gains['workers']:.2f}x as fast (at least 1.8x; two plain processes {gains['plain']:.2f}x)"),
        ("server, 4 packs isolated", isolated, "server, the packs in it", native, "s", 1.0, lambda a, b: f"{a / b:.2f}x (at most 1.2x)"),
    ]
    sys.stdout.write("| what | median | against | median | ratio |\n| --- | --- | --- | --- | --- |\n")
    for what, ours, against, theirs, unit, scale, ratio in rows:
        a, b = statistics.median(ours), statistics.median(theirs)
        sys.stdout.write(f"| {what} | {a * scale:.3g} {unit} | {against} | {b * scale:.3g} {unit} | {ratio(a, b)} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
