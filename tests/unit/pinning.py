"""A small process that locks memory, in the manner of ComfyUI's manager with the hooks of the series, in a container of numbers.

The container is card 0 of a capacity file, what the driver will register is card 1: both are shared by all processes, and what
is over-committed fails as it does with the kernel and the driver.
"""
from __future__ import annotations

import mmap
import random
import types

import psutil

from comfy import process_memory
from comfy.process_memory import limits, pins, ram
from comfy_multiproc.testing.card.capacity import CardFull
from tests.unit.small import MB, Process

FLOOR = 64 * MB
PIECE = 16 * MB
MACHINE = 1 << 40


class Container:
    """What the kernel says of the container."""

    def __init__(self, card):
        self.card = card

    def total(self, machine):
        return self.card.size(0)

    def available(self, machine):
        return self.card.free(0)


class PinProcess(Process):
    def __init__(self, pipe, folder, card, name, ceiling=None, barrier=None):
        """Without a `ceiling` it takes the share of a machine that has no container, which is what ComfyUI does on Windows."""
        super().__init__(pipe, folder, card, name, 1.0, barrier)
        limits.FLOOR, pins.PIECE, ram.FRESH, ram.PAUSE = FLOOR, PIECE, 0.0, 0.0
        mm = self.mm
        limits.groups = Container(mm.card)
        limits.upstream = lambda: None
        machine = MACHINE if ceiling is not None else mm.card.size(0)       # a big machine around the container
        psutil.virtual_memory = lambda: types.SimpleNamespace(total=machine, available=machine)
        if ceiling is not None:
            pins.budget = lambda: ceiling
        mm.MAX_PINNED_MEMORY = machine * 0.40 if ceiling is None else ceiling
        mm.args = types.SimpleNamespace(fast_disk=False)
        mm.comfy = types.SimpleNamespace(memory_management=types.SimpleNamespace(RAM_CACHE_HEADROOM=0))
        mm.ensure_pin_budget = process_memory.reserves_pins(self.ensure_pin_budget)
        mm.free_pins = process_memory.peers_pins_too(self.free_pins)
        mm.free_registrations = process_memory.peers_registrations_too(self.free_registrations)
        mm.ensure_pin_registerable = process_memory.one_pin_ceiling(self.ensure_pin_registerable)
        self.pins = {False: [], True: []}       # in use by a running prompt -> sizes
        self.cached = []
        self.refused = 0

    # as upstream does it

    def free_pins(self, size, evict_active=False):
        freed = 0
        for active in (False, True) if evict_active else (False,):
            while self.pins[active] and freed < size:
                freed += self.let_go_of(self.pins[active].pop())
        return freed

    def free_registrations(self, shortfall, evict_active=True):
        return shortfall <= 0 or self.free_pins(shortfall, evict_active) >= shortfall

    def ensure_pin_registerable(self, size, evict_active=True):
        return self.mm.free_registrations(self.mm.TOTAL_PINNED_MEMORY + size - self.mm.MAX_PINNED_MEMORY, evict_active)

    def ensure_pin_budget(self, size):
        headroom = self.mm.comfy.memory_management.RAM_CACHE_HEADROOM
        shortfall = size + max(headroom / 2, FLOOR) - MACHINE
        shortfall = process_memory.pin_shortfall(size, shortfall)
        return shortfall <= 0 or self.mm.free_pins(shortfall) >= shortfall

    def pin_memory(self, tensor):
        size = tensor.nbytes
        if process_memory.pins_full(size):
            return False
        try:
            self.mm.card.allocate(1, size)
        except CardFull:
            self.refused += 1
            return process_memory.pin_again(self.pin_memory, tensor)
        self.take(size)
        self.mm.TOTAL_PINNED_MEMORY += size
        self.pins[True].append(size)
        return True

    def let_go_of(self, size):
        self.mm.card.release(1, size)
        self.give_back(size)
        self.mm.TOTAL_PINNED_MEMORY -= size
        return size

    # the container's memory

    def take(self, size):
        self.mm.card.allocate(0, size)

    def give_back(self, size):
        self.mm.card.release(0, size)

    # what a test orders

    def node_pin(self, size):
        granted = self.mm.ensure_pin_budget(size) and self.mm.ensure_pin_registerable(size)
        return bool(granted) and self.pin_memory(types.SimpleNamespace(nbytes=size))

    def node_register(self, size):
        """Locks what is in memory already."""
        return self.pin_memory(types.SimpleNamespace(nbytes=size))

    def node_at_once(self, size):
        self.barrier.wait(60)
        return self.node_register(size)

    def node_ceiling(self, size):
        """ComfyUI's ceiling for one process changes while it runs."""
        self.mm.MAX_PINNED_MEMORY = size
        return True

    def node_done(self):
        """The prompt that uses the pins is over."""
        self.pins[False] += self.pins[True]
        self.pins[True].clear()
        process_memory.changed()
        return True

    def node_keep_free(self, size):
        self.mm.comfy.memory_management.RAM_CACHE_HEADROOM = size
        process_memory.tell_headroom(size)
        return True

    def node_shortfall(self, size):
        headroom = self.mm.comfy.memory_management.RAM_CACHE_HEADROOM
        return process_memory.pin_shortfall(size, size + max(headroom / 2, FLOOR) - MACHINE)

    def node_random(self, seed, turns):
        """Locks and lets go of memory at random."""
        choose = random.Random(seed)
        pinned = 0
        for _ in range(turns):
            if choose.random() < 0.65:
                pinned += self.node_pin(choose.randrange(1, 24) * MB)
            elif choose.random() < 0.5:
                self.node_done()
            elif self.pins[False]:
                self.let_go_of(self.pins[False].pop())
            process_memory.moments.after_node()
        self.node_done()
        return pinned

    def now_pins(self):
        return {"locked": self.mm.TOTAL_PINNED_MEMORY, "reserved": self.runtime.claims.own(pins.PINS), "refused": self.refused}


RESULT = 4 * MB
"""Bytes of one cached result at most."""


class ContainedProcess(PinProcess):
    """One whose memory is real, in a control group that the test has put it into."""

    def __init__(self, *args):
        super().__init__(*args)
        self.held = {}      # bytes -> pieces of so many
        self.lowest = MACHINE

    def take(self, size):
        piece = mmap.mmap(-1, size)
        piece.write(bytes(size))
        self.held.setdefault(size, []).append(piece)
        self.lowest = min(self.lowest, limits.Groups().available(MACHINE))

    def give_back(self, size):
        self.held[size].pop().close()

    def node_contained(self, by):
        """From now on memory is what the group leaves, or what the machine says it has."""
        limits.groups = limits.Groups() if by == "group" else types.SimpleNamespace(total=lambda machine: machine, available=lambda machine: machine)
        return limits.total() // MB

    def node_keep(self, size):
        """A node has a result, which is cached; results go as the output cache lets them go."""
        self.take(size)
        self.cached.append(size)
        while self.cached and limits.available() < 2 * FLOOR:
            self.give_back(self.cached.pop(0))

    def node_work(self, seed, turns):
        """Locks and caches memory at random; gives how often it has locked some, and the least that was left meanwhile."""
        choose = random.Random(seed)
        pinned = 0
        for _ in range(turns):
            kind = choose.choice(["pin", "pin", "pin", "keep", "done", "let go"])
            if kind == "pin":
                pinned += self.node_pin(choose.randrange(1, 24) * MB)
            elif kind == "keep":
                self.node_keep(choose.randrange(1, RESULT))
            elif kind == "done":
                self.node_done()
            elif self.pins[False]:
                self.let_go_of(self.pins[False].pop())
            process_memory.moments.after_node()
        self.node_done()
        return [pinned, self.lowest]


def process(pipe, *args):
    PinProcess(pipe, *args).run()


def contained(pipe, *args):
    ContainedProcess(pipe, *args).run()
