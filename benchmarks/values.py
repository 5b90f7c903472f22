"""A call and a 64 MiB tensor between two processes: ours, the floor, and the peers that are installed.

    python benchmarks/values.py [--rounds 30] [--json]

Needs torch. comfy-env and pyisolate are measured where they can be imported. All are measured in turn within every round, in
random order: the speed of memory drifts by more than what is to be seen, so the ratios to the same round's preallocated
shared memory are what to quote. Every payload is made afresh and the receiver reads each page of it.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import queue
import random
import statistics
import sys
import tempfile
import time
import warnings
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch

warnings.filterwarnings("ignore", "The given buffer is not writable")

from comfy_multiproc import link
from comfy_multiproc.handles import HandleTable
from comfy_multiproc.shared import SharedPool
from comfy_multiproc.values import Codec

MIB = 64
COUNT = MIB * (1 << 20) // 4
EXPECTED = float(COUNT // 1024)
BASE = "preallocated shared memory"
spawn = multiprocessing.get_context("spawn")


def fresh() -> torch.Tensor:
    return torch.ones(COUNT)


def touch(tensor: torch.Tensor) -> float:
    """Read one number of every page, so that nothing is left to be mapped later."""
    return float(tensor.view(-1)[::1024].sum())


class Ours:
    """A codec at both ends of a link, as a host and a worker have it; without the call of a node."""

    name = "this project"

    def start(self) -> None:
        ours, theirs = link.pair()
        self.process = spawn.Process(target=serve_ours, args=(theirs,))
        self.process.start()
        theirs.close()
        self.link = link.Link(ours)
        self.codec = Codec(HandleTable("host"), SharedPool(), lambda notice: self.link.notify("values", notice), private=False)
        self.link.on("values", lambda message: self.codec.receive(message.body))
        self.link.start()

    def _call(self, value: Any) -> Any:
        packet = self.codec.encode(value)
        answer = self.link.request("call", packet.body, packet.fds).result(60)
        return self.codec.decode(answer.body, answer.take_fds())

    async def call(self) -> None:
        self._call(None)

    async def sink(self, tensor: torch.Tensor) -> float:
        return self._call(tensor)

    async def prepare(self) -> None:
        self._call("prepare")

    async def fetch(self) -> torch.Tensor:
        return self._call("fetch")

    async def forward(self, tensor: torch.Tensor) -> None:
        self._call([tensor])

    def stop(self) -> None:
        self.link.close()
        self.process.join()
        self.codec.close()


def serve_ours(sock: Any) -> None:
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end = link.Link(sock, lost=lambda why: requests.put(None) or link.LinkClosed(why))     # type: ignore[func-returns-value]
    codec = Codec(HandleTable("worker"), SharedPool(), lambda notice: end.notify("values", notice), private=True)
    end.on("values", lambda message: codec.receive(message.body))
    end.on("call", requests.put)
    end.start()
    ready = None
    while (request := requests.get()) is not None:
        value = codec.decode(request.body, request.take_fds())
        if isinstance(value, torch.Tensor):
            value = touch(value)
        elif value == "prepare":
            ready, value = fresh(), None
        elif value == "fetch":
            value = ready
        else:
            value = None
        packet = codec.encode(value)
        request.reply(packet.body, packet.fds)
        del value, packet, request


class Pipe:
    """The bytes of the tensor through a pipe."""

    name = "raw pipe"

    def start(self) -> None:
        self.end, other = spawn.Pipe()
        self.process = spawn.Process(target=serve_pipe, args=(other,))
        self.process.start()

    async def call(self) -> None:
        self.end.send_bytes(b"call")
        self.end.recv_bytes()

    async def sink(self, tensor: torch.Tensor) -> float:
        self.end.send_bytes(b"sink")
        self.end.send_bytes(memoryview(tensor.numpy()).cast("B"))
        return float(self.end.recv_bytes())

    async def prepare(self) -> None:
        self.end.send_bytes(b"prepare")
        self.end.recv_bytes()

    async def fetch(self) -> torch.Tensor:
        self.end.send_bytes(b"fetch")
        return torch.frombuffer(self.end.recv_bytes(), dtype=torch.float32)

    def stop(self) -> None:
        self.end.send_bytes(b"end")
        self.process.join()


def serve_pipe(end: Any) -> None:
    ready = fresh()
    while (what := end.recv_bytes()) != b"end":
        if what == b"sink":
            end.send_bytes(str(touch(torch.frombuffer(end.recv_bytes(), dtype=torch.float32))).encode())
        elif what == b"fetch":
            end.send_bytes(memoryview(ready.numpy()).cast("B"))
        else:
            ready = fresh() if what == b"prepare" else ready
            end.send_bytes(b"")


class Shared(Pipe):
    """The floor: one copy into memory that both have had mapped all along."""

    name = BASE

    def start(self) -> None:
        self.memory = shared_memory.SharedMemory(create=True, size=COUNT * 4)
        self.view = torch.frombuffer(self.memory.buf, dtype=torch.float32)
        self.end, other = spawn.Pipe()
        self.process = spawn.Process(target=serve_shared, args=(other, self.memory.name))
        self.process.start()

    async def sink(self, tensor: torch.Tensor) -> float:
        self.view.copy_(tensor)
        self.end.send_bytes(b"sink")
        return float(self.end.recv_bytes())

    async def fetch(self) -> torch.Tensor:
        self.end.send_bytes(b"fetch")
        self.end.recv_bytes()
        return self.view

    def stop(self) -> None:
        super().stop()
        del self.view
        self.memory.close()
        self.memory.unlink()


def serve_shared(end: Any, name: str) -> None:
    memory = shared_memory.SharedMemory(name=name)
    view = torch.frombuffer(memory.buf, dtype=torch.float32)
    ready = fresh()
    while (what := end.recv_bytes()) != b"end":
        if what == b"sink":
            end.send_bytes(str(touch(view)).encode())
            continue
        if what == b"fetch":
            view.copy_(ready)
        elif what == b"prepare":
            ready = fresh()
        end.send_bytes(b"")
    del view
    memory.close()


class Queue:
    """torch.multiprocessing's own way."""

    name = "torch.multiprocessing queue"

    def start(self) -> None:
        import torch.multiprocessing
        context = torch.multiprocessing.get_context("spawn")
        self.to, self.back = context.Queue(), context.Queue()
        self.process = context.Process(target=serve_queue, args=(self.to, self.back))
        self.process.start()

    def _do(self, what: str, value: Any = None) -> Any:
        self.to.put((what, value))
        return self.back.get()

    async def call(self) -> None:
        self._do("call")

    async def sink(self, tensor: torch.Tensor) -> float:
        return self._do("sink", tensor)

    async def prepare(self) -> None:
        self._do("prepare")

    async def fetch(self) -> torch.Tensor:
        return self._do("fetch")

    def stop(self) -> None:
        self.to.put(("end", None))
        self.process.join()


def serve_queue(to: Any, back: Any) -> None:
    ready = None
    while True:
        what, value = to.get()
        if what == "end":
            return
        if what == "sink":
            value = touch(value)
        elif what == "prepare":
            ready, value = fresh(), None
        elif what == "fetch":
            value = ready
        back.put(value)
        del value


NODE = '''
import torch
ready = None
def call(): return None
def sink(x): return float(x.view(-1)[::1024].sum())
def prepare():
    global ready
    ready = torch.ones({count})
def fetch(): return ready
'''


class ComfyEnv:
    """comfy-env's worker, without ComfyUI in it."""

    name = "comfy-env"

    def start(self) -> None:
        from comfy_env.isolation.workers.subprocess import SubprocessWorker
        self.folder = tempfile.TemporaryDirectory()
        Path(self.folder.name, "comfy_env_benchmark.py").write_text(NODE.format(count=COUNT))
        self.worker = SubprocessWorker(python=sys.executable, working_dir=Path(self.folder.name), env={}, sys_path=[self.folder.name], name="benchmark")

    def _do(self, what: str, **values: Any) -> Any:
        result = self.worker.call_module(module="comfy_env_benchmark", func=what, **values)
        self.worker.begin_call()
        self.worker.end_call()
        return result

    async def call(self) -> None:
        self._do("call")

    async def sink(self, tensor: torch.Tensor) -> float:
        return self._do("sink", x=tensor)

    async def prepare(self) -> None:
        self._do("prepare")

    async def fetch(self) -> torch.Tensor:
        return self._do("fetch")

    def stop(self) -> None:
        self.worker.shutdown()
        self.folder.cleanup()


class PyIsolate:
    """pyisolate's extension in its own environment, sharing torch."""

    name = "pyisolate"

    def start(self) -> None:
        import pyisolate
        from pyisolate_benchmark import Extension
        self.folder = tempfile.TemporaryDirectory()
        pack = Path(self.folder.name, "pack")
        pack.mkdir()
        (pack / "__init__.py").write_text("")
        self.manager = pyisolate.ExtensionManager(Extension, pyisolate.ExtensionManagerConfig(venv_root_path=f"{self.folder.name}/venvs"))
        self.extension = self.manager.load_extension({
            "name": "benchmark", "module_path": str(pack), "isolated": True, "dependencies": [], "apis": [], "share_torch": True,
            "share_cuda_ipc": False, "sandbox_mode": "disabled", "execution_model": "host-coupled"})

    async def call(self) -> None:
        await self.extension.call()

    async def sink(self, tensor: torch.Tensor) -> float:
        return await self.extension.sink(tensor)

    async def prepare(self) -> None:
        await self.extension.prepare()

    async def fetch(self) -> torch.Tensor:
        return await self.extension.fetch()

    def stop(self) -> None:
        self.manager.stop_all_extensions()
        self.folder.cleanup()


async def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by transport and what was done: "call", "to_worker", "to_host", and for ours "forward"."""
    transports: list[Any] = [Shared(), Ours(), Pipe(), Queue()]
    for module, transport in (("comfy_env", ComfyEnv), ("pyisolate", PyIsolate)):
        if importlib.util.find_spec(module) is not None:
            transports.append(transport())
    for transport in list(transports):
        try:
            transport.start()
            await transport.call()
        except Exception as error:
            sys.stderr.write(f"{transport.name} is left out: {type(error).__name__}: {error}\n")
            transports.remove(transport)
    found: dict[str, dict[str, list[float]]] = {t.name: {} for t in transports}

    def note(transport: Any, what: str, since: float) -> None:
        found[transport.name].setdefault(what, []).append(time.perf_counter() - since)
    for number in range(-3, rounds):
        if number == 0:
            for kept in found.values():
                kept.clear()
        for transport in random.sample(transports, len(transports)):
            for _ in range(5):
                since = time.perf_counter()
                await transport.call()
                note(transport, "call", since)
            tensor = fresh()
            since = time.perf_counter()
            seen = await transport.sink(tensor)
            note(transport, "to_worker", since)
            assert seen == EXPECTED, (transport.name, seen)
            del tensor
            await transport.prepare()
            since = time.perf_counter()
            result = await transport.fetch()
            seen = touch(result)
            note(transport, "to_host", since)
            assert seen == EXPECTED, (transport.name, seen)
            for _ in range(5 if isinstance(transport, Ours) else 0):
                since = time.perf_counter()
                await transport.forward(result)
                note(transport, "forward", since)
            del result
    for transport in transports:
        transport.stop()
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Medians in ms, and of the ratios to the same round's preallocated shared memory."""
    rows: dict[str, dict[str, float]] = {}
    for name, kinds in found.items():
        row = rows[name] = {f"{kind}_ms": statistics.median(seconds) * 1e3 for kind, seconds in kinds.items()}
        for kind in ("to_worker", "to_host"):
            row[f"{kind}_ratio"] = statistics.median(a / b for a, b in zip(kinds[kind], found[BASE][kind], strict=True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):        # peers say on it what they do
        rows = summary(asyncio.run(measure(args.rounds)))
    if args.json:
        sys.stdout.write(json.dumps({"mib": MIB, "rounds": args.rounds, "rows": rows}) + "\n")
        return 0
    sys.stdout.write(f"| | empty call, ms | {MIB} MiB to the worker, ms | x | {MIB} MiB to the host, ms | x |\n| --- | --- | --- | --- | --- | --- |\n")
    for name, row in rows.items():
        sys.stdout.write(f"| {name} | {row['call_ms']:.3f} | {row['to_worker_ms']:.1f} | {row['to_worker_ratio']:.2f} "
                         f"| {row['to_host_ms']:.1f} | {row['to_host_ratio']:.2f} |\n")
    sys.stdout.write(f"\nx: median of the ratios to {BASE} in the same round ({args.rounds} rounds). A result of {MIB} MiB that lies in shared "
                     f"memory already is passed on in {rows[Ours.name]['forward_ms']:.2f} ms.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
