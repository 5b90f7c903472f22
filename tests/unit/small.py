"""A small ComfyUI process: the real runtime and the real consults around a manager of numbers, on a card that processes share.

The manager's functions have the shape of ComfyUI's with the hooks of the series in them; its models are bytes booked in a
capacity file, so what is over-committed fails as it would on a card. It needs no torch, so a dozen of them start in a second.
"""
from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import types
from contextlib import nullcontext
from typing import Any

from comfy import process_memory
from comfy.process_memory import Reason, ReleaseRequest, admission, claims, devices, moments
from comfy_multiproc.testing.card.capacity import CapacityFile, CardFull

KEY = "card:0"
MB = 1 << 20


class Device:
    type, index = "cpu", 0


DEVICE = Device()


class Weights:
    """What a patcher has the model of."""
    model_loaded_weight_memory = 0


class Patcher:
    def __init__(self, name: str, size: int):
        self.name, self.size, self.resident = name, size, 0
        self.model = type(name, (Weights,), {})()

    def is_dynamic(self):
        return False

    def loaded_size(self):
        return self.resident

    def model_size(self):
        return self.size


class LoadedModel:
    def __init__(self, manager: Manager, patcher: Patcher):
        self._manager, self.model, self.device, self.currently_used = manager, patcher, DEVICE, True

    def is_dead(self):
        return False

    def model_memory(self):
        return self.model.size

    def model_loaded_memory(self):
        return self.model.resident

    def model_offloaded_memory(self):
        return self.model.size - self.model.resident

    def model_load(self, budget):
        more = self.model.size - self.model.resident
        if budget:
            more = min(more, max(0, int(budget)))
        # Weights appear one after the other; in between, others see what has been admitted and is not there yet.
        parts = self._manager.load_in_parts
        for i in range(parts):
            size = more * (i + 1) // parts - more * i // parts
            # Where claims are to be exact, whoever holds the device's lock sees no byte both claimed and there.
            with claims.current.hold(KEY, 10) if self._manager.exact else nullcontext():
                self._manager.card.allocate(0, size)
                self.model.resident += size
                if self._manager.exact:
                    admission.arrived()
            if self._manager.halfway is not None:
                self._manager.halfway()
            if parts > 1:
                time.sleep(0.001)

    def model_unload(self, to_free):
        freed = self.model.resident if to_free >= self.model.resident else int(to_free)
        if not freed:
            return not self.model.resident
        if self._manager.during_unload is not None:
            self._manager.during_unload()
        self._manager.card.release(0, freed)
        self.model.resident -= freed
        return not self.model.resident


class Manager(types.ModuleType):
    """comfy.model_management, as far as it matters here."""

    DISABLE_SMART_MEMORY = False
    TOTAL_PINNED_MEMORY = 0

    def __init__(self, card: CapacityFile):
        super().__init__("comfy.model_management")
        self.card = card
        self.current_loaded_models: list[LoadedModel] = []
        self.during_unload = None
        self.between = self.halfway = None
        self.load_in_parts = 1
        self.exact = False
        self.load_models_gpu = process_memory.claims_memory(moments.no_safe_point(self._load_models_gpu))
        self.free_memory = moments.no_safe_point(self._free_memory)

    def get_torch_device(self):
        return DEVICE

    def get_total_memory(self, device, torch_total_too=False):
        own = self.card.own(0)
        return (self.card.size(0), own.allocated + own.cached) if torch_total_too else self.card.size(0)

    def get_free_memory(self, device, torch_free_too=False):
        cached = self.card.own(0).cached
        free = process_memory.left_by_peers(device, self.card.free(0) + cached, cached)
        return (free, cached) if torch_free_too else free

    def minimum_inference_memory(self):
        return 0

    def soft_empty_cache(self):
        self.card.empty_cache(0)

    def _free_memory(self, required, device, keep_loaded=()):
        can_unload: list[Any] = []
        for i, m in enumerate(self.current_loaded_models):
            if m not in keep_loaded:
                can_unload.append((-m.model_offloaded_memory(), sys.getrefcount(m.model), m.model_memory(), i))
                m.currently_used = False
        can_unload.extend(process_memory.peer_candidates(device, keep_loaded, required, False))
        gone = []
        for x in sorted(can_unload):
            if process_memory.ask_peer(x):
                continue
            missing = required - self.get_free_memory(device)
            if missing > 0 and self.current_loaded_models[x[-1]].model_unload(missing):
                gone.append(x[-1])
        process_memory.ask_busy_peers()
        for i in sorted(gone, reverse=True):
            self.current_loaded_models.pop(i)
        if gone:
            self.soft_empty_cache()

    def _load_models_gpu(self, patchers, memory_required=0):
        to_load = []
        for p in patchers:
            found = [m for m in self.current_loaded_models if m.model is p]
            for m in found:
                self.current_loaded_models.remove(m)
            to_load.append(found[0] if found else LoadedModel(self, p))
            to_load[-1].currently_used = True
        needed = {DEVICE: sum(m.model_offloaded_memory() for m in to_load)}
        process_memory.claim_load(needed, memory_required)
        if self.between is not None:
            self.between()
        self._free_memory(needed[DEVICE] + memory_required, DEVICE)
        for m in to_load:
            budget = max(0, self.get_free_memory(DEVICE) - memory_required) or 0.1
            m.model_load(process_memory.limit_budget(m, budget))
            self.current_loaded_models.insert(0, m)
            process_memory.model_loaded()


class Queue:
    """ComfyUI's prompt queue: a wait that a notification ends, with or without a prompt."""

    def __init__(self) -> None:
        self.not_empty = threading.Condition(threading.RLock())
        self.items: list[Any] = []

    def put(self, item):
        with self.not_empty:
            self.items.append(item)
            self.not_empty.notify()

    def get(self):
        with self.not_empty:
            if not self.items:
                self.not_empty.wait(1000)
            return self.items.pop(0) if self.items else None


class Executor:
    """ComfyUI's prompt executor, as far as a reset goes."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self):
        self.resets += 1


class Process:
    """What runs in the child: an execution thread that runs one prompt at a time, and a thread that hears orders."""

    def __init__(self, pipe, folder, card, name="", patience=1.0, barrier=None):
        os.environ["COMFY_MULTIPROC_RUNTIME"] = str(folder)
        self.pipe, self.barrier = pipe, barrier
        self.log: list[str] = []        # warnings and worse
        keep = logging.StreamHandler()
        keep.setLevel(logging.WARNING)
        keep.emit = lambda record: self.log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(keep)
        self.mm = Manager(CapacityFile(card))
        sys.modules["comfy.model_management"] = self.mm
        devices.name(DEVICE, KEY)
        from comfy_multiproc import runtime
        self.runtime = runtime.start(name, patience=patience)
        self.queue, self.executor = Queue(), Executor()
        self.patchers: dict[str, Patcher] = {}
        self.let_go = threading.Event()
        self.ooms = 0
        self.said = threading.Lock()

    def run(self):
        threading.Thread(target=self.hear, daemon=True).start()
        moments.execution_thread(self.queue, self.executor)
        answer = "ready"
        while True:
            moments.idle()
            if answer is not None:
                self.say(answer)
            prompt = self.queue.get()
            moments.awake(prompt is not None)
            if prompt == "end":
                return
            answer = None if prompt is None else self.prompt(*prompt)

    def hear(self):
        """Orders that an execution thread which is busy or stopped in the middle need not be there for."""
        while True:
            try:
                order, *args = self.pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            if hasattr(self, "now_" + order):
                self.say(getattr(self, "now_" + order)(*args))
            elif order == "let go":
                self.let_go.set()
            else:
                self.queue.put((order, *args) if order != "end" else "end")

    def say(self, what):
        with self.said:
            self.pipe.send(what)

    def prompt(self, order, *args):
        """One prompt of one node."""
        moments.before_node()
        process_memory.node_started()
        try:
            return getattr(self, "node_" + order)(*args)
        except CardFull as e:
            self.ooms += 1
            return f"out of memory: {e}"
        finally:
            process_memory.node_ended()
            moments.after_node()

    def patcher(self, name, size):
        return self.patchers.setdefault(name, Patcher(name, size))

    def node_load(self, name, size, beyond=0):
        self.mm.load_models_gpu([self.patcher(name, size)], beyond)
        return self.patchers[name].resident

    def node_free(self, size):
        self.mm.free_memory(size, DEVICE)
        return self.mm.get_free_memory(DEVICE)

    def node_sample(self, name, size, steps):
        """Loads a model and uses it until let go: with steps at which it can be interrupted, or without."""
        self.mm.load_models_gpu([self.patcher(name, size)])
        self.say("sampling")
        while not self.let_go.is_set():
            if steps:
                moments.step()
            self.let_go.wait(0.001)
        self.let_go.clear()
        return "sampled"

    def node_step(self, name, size, beyond):
        """Loads a model and takes a step with it, which needs `beyond` for a moment; then waits until let go."""
        self.mm.load_models_gpu([self.patcher(name, size)], beyond)
        self.mm.card.allocate(0, beyond)
        self.mm.card.release(0, beyond)
        time.sleep(admission.SETTLE_INTERVAL)
        self.mm.get_free_memory(DEVICE)
        self.say("stepped")
        while not self.let_go.wait(0.001):
            moments.step()
        self.let_go.clear()
        return "sampled"

    def node_move(self):
        """Memory management that takes until let go."""
        @moments.no_safe_point
        def moving():
            self.say("moving")
            self.let_go.wait()
        moving()
        self.let_go.clear()
        return "moved"

    def waiting_at(self, point):
        """What says where it is and waits there until let go, or for ever."""
        def wait():
            self.mm.between = self.mm.halfway = self.mm.during_unload = None
            self.say(point)
            self.let_go.wait()
            self.let_go.clear()
        return wait

    def node_stop_at(self, point, name, size):
        """A load that says where it is and waits there: "claimed", or "loading" with half of it there."""
        if point == "claimed":
            self.mm.between = self.waiting_at(point)
        else:
            self.mm.load_in_parts, self.mm.halfway = 2, self.waiting_at(point)
        return self.node_load(name, size)

    def node_work(self, size):
        """Something that leaves `size` bytes in the allocator's cache."""
        self.mm.card.allocate(0, size)
        self.mm.card.release(0, size)
        return "worked"

    def node_load_with_others(self, name, size):
        """A load that begins at the same instant as those of others."""
        self.mm.load_in_parts, self.mm.exact = 8, True
        self.barrier.wait(60)
        return self.node_load(name, size)

    def now_wait_in_unload(self):
        self.mm.during_unload = self.waiting_at("unloading")
        return "will wait"

    def now_fail_in_unload(self, size):
        """Some of the next model that is unloaded goes, and then it fails."""
        def fail():
            self.mm.during_unload = None
            self.mm.card.release(0, size)
            self.mm.current_loaded_models[0].model.resident -= size
            raise RuntimeError("a model of a custom node")
        self.mm.during_unload = fail
        return "will fail"

    def now_fork(self):
        """Forks what ends as any program does."""
        child = os.fork()
        if not child:
            atexit._run_exitfuncs()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def now_use_folder(self, folder):
        os.environ["COMFY_MULTIPROC_RUNTIME"] = str(folder)
        return "used"

    def now_hold_lock(self, claim=0):
        holding = threading.Event()

        def hold():
            with self.runtime.claims.hold(KEY, 10):
                self.runtime.claims.write(KEY, claim)
                holding.set()
                self.let_go.wait()
                self.let_go.clear()
                self.runtime.claims.write(KEY, 0)
        threading.Thread(target=hold, daemon=True).start()
        holding.wait()
        return "holding"

    def now_half(self):
        self.runtime.ledger.words[self.runtime.slot._at] |= 1
        return "half"

    def now_whole(self):
        self.runtime.ledger.words[self.runtime.slot._at] += 1
        return "whole"

    def now_books(self):
        own = self.mm.card.own(0)
        return {"resident": {m.model.name: m.model.resident for m in self.mm.current_loaded_models}, "allocated": own.allocated,
                "cached": own.cached, "claimed": self.runtime.claims.own(KEY), "ooms": self.ooms, "resets": self.executor.resets,
                "peers": sorted(e.name for e in process_memory.registry.entries)}

    def now_ask(self, peer, kind, size, candidate=None, seconds=5.0, ticket="ticket", device=KEY):
        """Asks one peer, on a thread that is not the execution thread; the receipt and how long it took."""
        found = next(p for p in self.runtime.peers if p.name == peer)
        request = ReleaseRequest(device=device, bytes=size, candidate=candidate, reason=Reason.LOAD, ticket=ticket,
                                 deadline=time.monotonic() + seconds, origin=self.runtime.name)
        began = time.monotonic()
        receipt = getattr(found, kind)(request)
        return receipt.outcome, receipt.freed, receipt.resident, time.monotonic() - began

    def now_fan_out(self, peer, size):
        """Asks one peer as core does; the ticket."""
        entry = next(e for e in process_memory.registry.entries if e.name == peer)
        request = ReleaseRequest(device=KEY, bytes=size, ticket=f"of {self.runtime.name}")
        process_memory.registry.ask("release", [(entry, request)])
        return request.ticket

    def now_said(self):
        return self.log

    def now_candidates(self, peer):
        found = next(p for p in self.runtime.peers if p.name == peer)
        return [(c.name, c.id, c.resident, c.in_use) for c in found.candidates(KEY)]

    def now_usage(self, peer):
        found = next(p for p in self.runtime.peers if p.name == peer)
        usage = found.usage(KEY)
        return {"resident": usage.resident, "cached": usage.cached, "claimed": usage.claimed, "busy": usage.busy, "age": usage.age,
                "capturing": usage.capturing, "committed": usage.committed}

    def now_capture(self, on):
        if on:
            self.window = self.runtime.capture(KEY)
            self.window.__enter__()
        else:
            self.window.__exit__(None, None, None)
        return on


def process(pipe, folder, card, name="", patience=1.0, barrier=None):
    """The main function of a child."""
    faulthandler.register(signal.SIGUSR1)
    Process(pipe, folder, card, name, patience, barrier).run()
    atexit._run_exitfuncs()     # a process that was forked for this leaves them out
