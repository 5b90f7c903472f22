"""Places in ComfyUI's own code that a hook must reach: what a person would see go wrong there without it, in the real tree."""

import ast
import sys
import threading
import types

import pytest

from comfy_multiproc.testing import stub_patcher
from tests.unit.providers import Peer, until

MIB = 1 << 20
GIB = 1 << 30


class Holder(Peer):
    """A process that also holds page-locked host memory, idle, and gives it back."""

    def __init__(self, pinned=0, busy=False, **more):
        super().__init__(busy=busy, **more)
        self.pinned, self.asked_pins = pinned, []

    def usage(self, device):
        from comfy.process_memory import DeviceUsage
        if device == "ram:pins":
            return DeviceUsage(resident=0, claimed=self.pinned, busy=self.busy)
        return super().usage(device)

    def ram(self):
        from comfy.process_memory import RamUsage
        return RamUsage(resident=0, pinned=self.pinned, registered=0, backups=0, outputs=0)

    def release_pins(self, request):
        from comfy.process_memory import Outcome, Receipt
        given = min(self.pinned, request.bytes)
        self.pinned -= given
        self.asked_pins.append(request.bytes)
        return Receipt(outcome=Outcome.FREED if given else Outcome.NOTHING, freed=given, resident=self.pinned)


@pytest.fixture
def known(card):
    """known(peer): this process knows it from now on."""
    from comfy.process_memory import registry
    added = []

    def add(peer):
        registry.register(peer)
        added.append(peer)
        return peer
    yield add
    for peer in added:
        registry.unregister(peer)


@pytest.fixture
def host_memory(card, monkeypatch):
    """host_memory(left): a machine with plenty, and a container of 32 GiB that leaves so many bytes; ComfyUI may lock 10 GiB."""
    import comfy.model_management as mm
    import psutil
    from comfy.process_memory import claims, limits, ram
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=256 * GIB, available=200 * GIB))
    monkeypatch.setattr(limits, "upstream", lambda: None)
    monkeypatch.setattr(ram, "FRESH", 0.0)
    monkeypatch.setattr(ram, "PAUSE", 0.0)
    monkeypatch.setattr(claims, "current", claims.LocalClaims())
    for name, value in (("MAX_PINNED_MEMORY", 80 * GIB), ("TOTAL_PINNED_MEMORY", 0)):
        monkeypatch.setattr(mm, name, value)        # 10 GiB in proportion to the container

    def leaves(left):
        monkeypatch.setattr(limits, "groups", types.SimpleNamespace(total=lambda machine: 32 * GIB, available=lambda machine: left))
    return leaves


# graph capture, and the pager's headroom

@pytest.mark.row(14, partial="the capture itself, which needs a real GPU and ComfyUI 0.33")
def test_a_load_brings_nothing_to_the_card_while_another_process_captures(card, known):
    import comfy.model_management as mm
    peer, seen = known(Peer(models={"idle": 8 * MIB})), []
    peer.capturing = True
    model = stub_patcher(16 * MIB)
    load = model.partially_load
    model.partially_load = lambda *args, **kwargs: seen.append(peer.capturing) or load(*args, **kwargs)
    over = threading.Timer(0.3, lambda: setattr(peer, "capturing", False))
    over.start()
    mm.load_models_gpu([model])
    over.join()
    assert seen == [False] and model.loaded_size() == 16 * MIB


@pytest.mark.row(14, partial="the capture itself, which needs a real GPU and ComfyUI 0.33")
def test_a_process_that_captures_is_not_asked_for_memory(card, known):
    import comfy.model_management as mm
    import torch
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=card.device)
    peer = known(Peer(models={"idle": held.nbytes}))
    peer.capturing = True
    mm.free_memory(card.settings.size, card.device)
    assert peer.asked == []
    peer.capturing = False
    mm.free_memory(card.settings.size, card.device)
    assert [name for name, _ in peer.asked] == ["idle"]


class Pager:
    """aimdo's control, as far as headroom goes."""
    headroom = None

    def set_simple_vram_headroom(self, size):
        self.headroom = size


@pytest.fixture
def pages(monkeypatch, card):
    """This process pages."""
    import comfy.memory_management
    import comfy.model_management as mm
    from comfy.process_memory import pager
    control = Pager()
    monkeypatch.setitem(sys.modules, "comfy_aimdo.control", control)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    monkeypatch.setattr(pager, "_forwarded", None)
    return types.SimpleNamespace(control=control, reserve=int(mm.extra_reserved_memory()))


@pytest.mark.row(13, partial="what aimdo evicts by it, which needs a real GPU")
def test_before_a_load_the_pager_is_told_what_another_process_is_about_to_take(card, known, pages):
    import comfy.model_management as mm
    peer = known(Peer(models={"used": 32 * MIB}, busy=True, in_use=("used",)))
    peer.claimed = 16 * MIB
    mm.load_models_gpu([model := stub_patcher(8 * MIB)])
    assert pages.control.headroom == pages.reserve + (32 + 16) * MIB and model.loaded_size() == 8 * MIB


# one prompt of one node, through ComfyUI's own executor

class Server:
    """What an executor talks to."""
    client_id = last_node_id = None

    def send_sync(self, *message):
        pass


class Made:
    """A node that makes `MIB` of host memory, and counts."""
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE, runs, during = ("IMAGE",), "run", "", True, 0, staticmethod(lambda: None)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def run(self):
        import torch
        Made.runs += 1
        Made.during()
        return (torch.zeros(MIB // 4),)


@pytest.fixture
def executor(card, monkeypatch):
    """executor(ram, inactive): ComfyUI's own, that keeps so many GiB free for running prompts and others; gives run()."""
    import execution
    import nodes
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "Made", Made)
    monkeypatch.setattr(Made, "runs", 0)

    def make(ram, inactive):
        found = execution.PromptExecutor(Server(), cache_type=execution.CacheType.RAM_PRESSURE, cache_args={"lru": 0, "ram": ram, "ram_inactive": inactive})

        def run():
            found.execute({"n": {"class_type": "Made", "inputs": {}}}, "prompt", {}, ["n"])
            assert found.success
            return Made.runs
        return run
    return make


@pytest.mark.row(13, partial="what aimdo evicts by it, which needs a real GPU")
def test_before_a_node_the_pager_is_told_too(card, known, pages, executor, monkeypatch):
    import comfy.model_management as mm
    import execution
    monkeypatch.setattr(mm, "reset_cast_buffers", lambda: None)
    monkeypatch.setattr(execution.comfy_aimdo.model_vbar, "vbars_reset_watermark_limits", lambda: None)
    peer = known(Peer(models={"used": 32 * MIB}, busy=True, in_use=("used",)))
    peer.claimed = 16 * MIB
    told = []
    monkeypatch.setattr(Made, "during", lambda: told.append(pages.control.headroom))
    assert executor(0, 0)() == 1 and told == [pages.reserve + 48 * MIB]


@pytest.mark.row(39)
def test_cancel_reaches_a_process_that_works_on_the_prompt_while_it_answers_something_else(card, known, executor, monkeypatch):
    import nodes
    from comfy.process_memory import ReleaseRequest, registry

    class Working(Peer):
        told, cancelled = [], threading.Event()

        def release(self, request):
            self.cancelled.wait(20)     # a long answer, which nothing but the interrupt ends
            return super().release(request)

        def interrupt(self, prompt_id, value):
            self.told.append(value)
            if value:
                self.cancelled.set()
    peer = known(Working())

    def cancel():
        nodes.interrupt_processing()
        [receipt] = registry.ask("release", [(registry.entries[0], ReleaseRequest(device="cpu:0", bytes=1))])
        assert receipt is not None and peer.cancelled.is_set()
    monkeypatch.setattr(Made, "during", cancel)
    assert executor(0, 0)() == 1
    until(lambda: sorted(peer.told) == [False, True])   # a prompt that starts has not been cancelled


@pytest.mark.row(8)
@pytest.mark.row(15)
@pytest.mark.parametrize("left, runs", [(30 * GIB, 1), (1 * GIB, 2)])
def test_after_a_node_results_are_given_up_by_what_the_container_leaves(card, known, executor, host_memory, left, runs):
    host_memory(left)
    known(Peer())
    run = executor(4, 0)        # 4 GiB are kept free while a prompt runs
    assert run() == 1 and run() == runs


@pytest.mark.row(15)
@pytest.mark.row(36)
def test_the_cache_of_a_server_keeps_free_what_fits_its_container(card, known, host_memory, fork_tree):
    """The first lines of the server's own prompt worker, up to the executor that it makes."""
    from comfy import process_memory
    host_memory(30 * GIB)
    known(Peer())
    source = ast.parse((fork_tree / "main.py").read_text())
    worker = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "prompt_worker")
    made = {}

    class Stop(Exception):
        pass

    def make(server, cache_type, cache_args):
        made.update(cache_args)
        raise Stop
    names = {"args": types.SimpleNamespace(cache_classic=False, cache_none=False, cache_lru=0, cache_ram=[]), "process_memory": process_memory,
             "comfy": types.SimpleNamespace(model_management=types.SimpleNamespace(total_ram=256 * 1024)),
             "execution": types.SimpleNamespace(CacheType=types.SimpleNamespace(RAM_PRESSURE=1), PromptExecutor=make)}
    exec(compile(ast.Module([worker], []), "main.py", "exec"), names)  # noqa: S102  (upstream's file with our hooks)
    with pytest.raises(Stop):
        names["prompt_worker"](None, None)
    assert (made["ram"], made["ram_inactive"]) == (pytest.approx(3.2), 32)      # a tenth, and all, of 32 GiB; not 10 and 128


# page-locked memory

@pytest.mark.row(34)
def test_pins_of_idle_processes_are_freed_with_own_ones(card, known, host_memory):
    import comfy.model_management as mm
    host_memory(30 * GIB)
    idle, busy = known(Holder(3 * GIB)), known(Holder(5 * GIB, busy=True, name="busy"))
    assert mm.free_pins(1 * GIB) == 1 * GIB
    assert (idle.asked_pins, busy.asked_pins) == ([1 * GIB], [])


@pytest.mark.row(34)
@pytest.mark.row(8)
def test_memory_is_locked_by_what_the_container_leaves_and_for_what_is_missing_idle_processes_are_asked(card, known, host_memory):
    import comfy.model_management as mm
    host_memory(3 * GIB)        # 2 of them stay free
    idle = known(Holder(1 * GIB))
    assert mm.ensure_pin_budget(1 * GIB) is True and idle.asked_pins == []
    idle.pinned = 0
    assert mm.ensure_pin_budget(2 * GIB) is False       # the machine has 200
    idle.pinned = 4 * GIB
    assert mm.ensure_pin_budget(2 * GIB) is False and idle.asked_pins       # it has given some, and the container has no more yet


@pytest.mark.row(34)
@pytest.mark.row(42)
def test_what_has_been_found_room_for_is_reserved(card, known, host_memory):
    import comfy.model_management as mm
    from comfy.process_memory import claims, pins
    host_memory(30 * GIB)
    known(Holder())
    assert mm.ensure_pin_budget(1 * GIB) is True
    assert claims.current.own(pins.PINS) == 1 * GIB


@pytest.mark.row(42)
@pytest.mark.parametrize("busy", [True, False])
def test_the_ceiling_for_registrations_is_one_for_all(card, known, host_memory, busy):
    import comfy.model_management as mm
    host_memory(30 * GIB)
    other = known(Holder(8 * GIB, busy=busy))
    assert mm.ensure_pin_registerable(1 * GIB) is True and other.asked_pins == []
    assert mm.ensure_pin_registerable(4 * GIB) is not busy              # 12 of 10
    assert other.pinned == (8 * GIB if busy else 6 * GIB)


@pytest.mark.row(42)
def test_registrations_of_idle_processes_go_when_the_driver_is_short_of_them(card, known, host_memory):
    import comfy.model_management as mm
    host_memory(30 * GIB)
    other = known(Holder(8 * GIB))
    assert mm.free_registrations(3 * GIB) is True and other.pinned == 5 * GIB


@pytest.mark.row(42)
def test_a_pin_above_the_common_ceiling_stays_unregistered(card, known, host_memory, monkeypatch):
    import comfy.pinned_memory
    import torch
    host_memory(30 * GIB)
    known(Holder(10 * GIB, busy=True))
    registered = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(cudaHostRegister=lambda *args: registered.append(args) or 0))
    pin = torch.zeros(4096, dtype=torch.uint8)
    module = types.SimpleNamespace(_pins={"weights": {"pin": pin, "registered": False, "stack_index": 0}}, _pin_state={"weights": (None, None, [0], [0])})
    assert comfy.pinned_memory.get_pin(module) is pin and registered == []


@pytest.mark.row(34)
def test_the_floor_of_the_output_cache_is_told_to_others(card, known, host_memory):
    import comfy.memory_management
    from comfy.process_memory import claims, ram
    host_memory(30 * GIB)
    known(Peer())
    comfy.memory_management.set_ram_cache_release_state(None, 6 * GIB)
    assert claims.current.own(ram.HEADROOM) == 6 * GIB
    comfy.memory_management.set_ram_cache_release_state(None, 0)
    assert claims.current.own(ram.HEADROOM) == 0
