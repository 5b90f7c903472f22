"""Providers for tests: what they hold is a dictionary, and what they are asked is written down."""

import os
import threading
import time

from comfy.process_memory import Candidate, DeviceUsage, Kind, Outcome, ProcessMemoryProvider, Receipt
from comfy.process_memory.provider import NOTHING

CARD = "cpu:0"


class Peer(ProcessMemoryProvider):
    """A process that holds models of some bytes on one device and gives back as much as it is asked for."""

    def __init__(self, name="peer", models=(), cache=0, busy=False, device=CARD, in_use=(), on_freed=lambda size: None):
        self._name = name
        self.models = dict(models)
        self.sizes = dict(self.models)
        self.cache = cache
        self.busy = busy
        self.device = device
        self.in_use = set(in_use)
        self.claimed = 0
        self.capturing = False
        self.asked = []
        self.on_freed = on_freed
        self.pid = os.getpid()

    @property
    def name(self):
        return self._name

    def usage(self, device):
        if device != self.device:
            return DeviceUsage(resident=0, cached=0, fixed=0, scratch=0, claimed=0, committed=0, reclaimable=0, busy=self.busy)
        held = sum(self.models.values())
        return DeviceUsage(resident=held, cached=self.cache, fixed=0, scratch=0, claimed=self.claimed, committed=sum(self.sizes.values()),
                           reclaimable=held + self.cache, busy=self.busy, capturing=self.capturing)

    def candidates(self, device):
        if device != self.device:
            return []
        found = [Candidate(id=name, name=name, resident=held, size=self.sizes[name], refs=3, in_use=name in self.in_use)
                 for name, held in self.models.items() if held]
        if self.cache:
            found.append(Candidate(id="cache", name="allocator cache", kind=Kind.CACHE, resident=self.cache, size=self.cache))
        return found

    def release(self, request):
        self.asked.append((request.candidate, request.bytes))
        if request.device != self.device:
            return NOTHING
        if request.candidate == "cache":
            freed, self.cache = self.cache, 0
        else:
            freed = 0
            for name in [request.candidate] if request.candidate else self.models:
                part = min(self.models.get(name, 0), request.bytes - freed)
                self.models[name] = self.models.get(name, 0) - part
                freed += part
        self.on_freed(freed)
        return Receipt(outcome=Outcome.FREED if freed else Outcome.NOTHING, freed=freed, resident=sum(self.models.values()))

    def unload(self, request):
        self.asked.append(("unload", request.bytes))
        freed = sum(self.models.values()) + self.cache
        self.models = {name: 0 for name in self.models}
        self.cache = 0
        self.on_freed(freed)
        return Receipt(outcome=Outcome.FREED if freed else Outcome.NOTHING, freed=freed, resident=0)


class Hanging(Peer):
    """Its requests come back only when `go` is set."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.go = threading.Event()
        self.entered = threading.Event()

    def release(self, request):
        self.entered.set()
        self.go.wait(30)
        return super().release(request)

    unload = release


def until(condition, seconds=20.0):
    """Wait for something another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.001)
