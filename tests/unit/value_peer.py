"""Two ends of a link within one process, and one whose other end is a process: for tests of values."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import torch

from comfy_multiproc import link
from comfy_multiproc.handles import HandleTable
from comfy_multiproc.shared import SharedPool
from comfy_multiproc.values import Codec

LONG = 120      # seconds; starting a process takes half a minute on a busy machine
ROOT = Path(__file__).resolve().parents[2]


class Pair:
    """A host's codec and a worker's; messages go as JSON and descriptors, as on a real link."""

    def __init__(self, host: HandleTable | None = None, worker: str = "worker", drivers=(None, None)):
        self._changed = threading.Condition()
        self.host = Codec(host or HandleTable("host"), SharedPool(), self._to("worker"), private=False, driver=drivers[0])
        self.worker = Codec(HandleTable(worker), SharedPool(), self._to("host"), private=True, driver=drivers[1])

    def _to(self, end):
        def notify(notice):
            getattr(self, end).receive(over_the_wire(notice))
            with self._changed:
                self._changed.notify_all()
        return notify

    def to_worker(self, value):
        return self._send(self.host, self.worker, value)

    def to_host(self, value):
        return self._send(self.worker, self.host, value)

    def _send(self, sender, receiver, value):
        packet = sender.encode(value)
        return receiver.decode(over_the_wire(packet.body), [os.dup(fd) for fd in packet.fds])

    def until(self, condition):
        """Wait for a notice that makes it true."""
        with self._changed:
            assert self._changed.wait_for(condition, LONG)

    def close(self):
        for codec in (self.host, self.worker):
            end(codec)
            codec.pool.trim(0)


def end(codec):
    """Close it and wait for its thread."""
    codec.close()
    if codec._thread is not None:
        codec._thread.join(LONG)
        assert not codec._thread.is_alive()


def over_the_wire(body):
    return json.loads(json.dumps(body))


class Peer:
    """A process that does what `DO` names with a value and sends the result back."""

    def __init__(self, host: HandleTable, pool: SharedPool, limit: int | None = None, driver=None, environment=None):
        ours, theirs = link.pair()
        self.gone = threading.Event()
        self.link = link.Link(ours, name="peer", lost=self._lost)
        self.codec = Codec(host, pool, lambda notice: self.link.notify("values", notice), private=False, driver=driver)
        self.link.on("values", lambda message: self.codec.receive(message.body))
        self.link.on("preview", self._preview)
        self.previews = 0
        self.process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno()), str(limit or 0), *([driver.folder] if driver else [])], pass_fds=[theirs.fileno()],
                                        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                                             "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})})
        theirs.close()
        self.link.start()

    def _lost(self, why):
        self.codec.close(why)
        self.gone.set()
        return link.LinkClosed(why)

    def _preview(self, message):
        self.codec.decode(message.body, message.take_fds())
        self.previews += 1

    def do(self, what, value=None, wait=True):
        packet = self.codec.encode(value)
        answer = self.link.request("do", {"what": what, **packet.body}, packet.fds)
        return self.result(answer) if wait else answer

    def result(self, answer):
        message = answer.result(LONG)
        return self.codec.decode(message.body, message.take_fds())

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LONG)
        assert self.gone.wait(LONG)

    def close(self):
        self.link.close()
        self.process.wait(LONG)
        assert self.gone.wait(LONG)
        end(self.codec)


kept = []


def edit(x):
    x.add_(1)
    return float(x.mean())


def keep(x):
    kept.append(x)
    return x


def descriptors(_):
    return len(os.listdir("/dev/fd"))


def touched(x):
    return float(x.sum()), x.untyped_storage().nbytes()


DO = {
    "echo": lambda x: x, "edit": edit, "keep": keep, "kept": lambda x: kept, "descriptors": descriptors, "touch": touched,
    "ones": lambda n: torch.ones(n), "object": lambda x: keep(threading.Event()), "is kept": lambda x: any(x is k for k in kept),
    "same storage": lambda x: x[0].untyped_storage().data_ptr() == x[1].untyped_storage().data_ptr(),
    "device": lambda x: str(x.device), "on the card": lambda n: torch.full((1 << 20,), float(n), device="cuda"),
    "allocated": lambda _: torch.cuda.memory_allocated(),
    "small": lambda n: [torch.full((4,), float(i)) for i in range(n)],
}


def main(fd, limit, card=None):
    if limit:
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    requests = queue.SimpleQueue()
    host = link.Link(socket.socket(fileno=fd), name="host", lost=lambda why: requests.put(None) or link.LinkClosed(why))
    place = os.environ.get("VALUE_PEER_DEVICE")
    codec = Codec(HandleTable(f"peer-{os.getpid()}"), SharedPool(), lambda notice: host.notify("values", notice), private=True, driver=card,
                  device=None if place is None else lambda name: torch.device(place))
    host.on("values", lambda message: codec.receive(message.body))
    host.on("do", requests.put)
    host.start()
    while (request := requests.get()) is not None:
        value = codec.decode(request.body, request.take_fds())
        if request.body["what"] == "previews":
            for _ in range(value):
                packet = codec.encode(torch.ones(2 << 20))
                host.notify("preview", packet.body, packet.fds)
            value = None
        packet = codec.encode(DO.get(request.body["what"], DO["echo"])(value))
        del value
        request.reply(packet.body, packet.fds)
        del packet, request


if __name__ == "__main__":
    if sys.argv[3:]:
        from tests.unit.shared_card import FileCard
    main(int(sys.argv[1]), int(sys.argv[2]), FileCard(sys.argv[3]) if sys.argv[3:] else None)
