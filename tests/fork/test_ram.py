"""Host memory of two real processes: the output cache in a container, pins under one ceiling and a driver that refuses."""

import time
import types

import pytest

from tests.fork import runtimes
from tests.unit import value_peer

MIB = 1 << 20
GIB = 1 << 30


class Box:
    """A container of 32 GiB on a machine of 256 GiB that has 200 available."""

    def __init__(self, available):
        self.left = available

    def total(self, machine):
        return min(machine, 32 * GIB)

    def available(self, machine):
        return min(machine, self.left)


@pytest.fixture
def box(monkeypatch):
    """box.left: what the container leaves, in bytes."""
    import psutil
    from comfy.process_memory import limits, ram
    found = Box(2 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=256 * GIB, available=200 * GIB))
    monkeypatch.setattr(limits, "groups", found)
    monkeypatch.setattr(limits, "upstream", lambda: None)
    monkeypatch.setattr(ram, "FRESH", 0.0)
    return found


@pytest.fixture(autouse=True)
def pins_as_found(fork_tree, monkeypatch):
    import comfy.model_management as mm
    for name, value in (("TOTAL_PINNED_MEMORY", 0), ("PINNED_MEMORY", {}), ("MAX_PINNED_MEMORY", -1),
                        ("discard_cuda_async_error", mm.discard_cuda_async_error)):
        monkeypatch.setattr(mm, name, value)
    import torch
    from comfy.process_memory import limits, pins
    for owner, name in ((torch.cuda, "cudart"), (limits, "groups"), (pins, "PIECE")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def cache(entries):
    """ComfyUI's cache with entries of an old prompt: name -> (outputs, when it was touched)."""
    from comfy_execution.caching import CacheKeySetID, RAMPressureCache
    found = RAMPressureCache(CacheKeySetID)
    found.generation = 2
    for name, (outputs, touched) in entries.items():
        found.cache[name] = types.SimpleNamespace(outputs=outputs)
        found.used_generation[name], found.timestamps[name], found.children[name] = 1, touched, []
    return found


@pytest.mark.row(8)
@pytest.mark.row(36)
def test_the_output_cache_gives_up_what_the_container_lacks_and_no_more(card, here, box, monkeypatch):
    import comfy.model_management as mm
    import psutil
    import torch
    cpu = torch.device("cpu")
    assert mm.get_free_memory(cpu) == 2 * GIB and mm.get_total_memory(cpu) == 32 * GIB
    found = cache({name: ([[torch.zeros(MIB // 4)]], at) for name, at in (("a", 100), ("b", 101), ("c", 102))})
    assert found.ram_release(1 * GIB) == 0 and len(found.cache) == 3          # 2 GiB are left

    def left(start):
        return start + (3 - len(found.cache)) * MIB
    box.available = lambda machine: left(2 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=256 * GIB, available=left(200 * GIB)))
    found.ram_release(2 * GIB + MIB)
    assert list(found.cache) == ["a", "b"]                                     # the tie goes as in upstream: the last touched


@pytest.mark.row(36)
def test_an_entry_that_cannot_be_measured_is_dropped_and_the_next_prompt_runs(card, here, box, caplog):
    import torch

    class Odd:
        def __getattr__(self, name):
            raise RuntimeError("its process is gone")
    found = cache({"odd": ([[Odd()]], 100), "good": ([[torch.zeros(MIB // 4)]], 101)})
    found.ram_release(1 * GIB)
    assert list(found.cache) == ["odd", "good"]         # nothing was short, nothing was looked at
    found.ram_release(3 * GIB)
    assert "odd" not in found.cache
    assert sum("cannot be measured" in record.message for record in caplog.records) == 1


@pytest.mark.row(36)
def test_a_latent_in_a_dictionary_and_what_a_worker_holds_weigh_what_they_are(card, here, box):
    import torch
    held = types.SimpleNamespace(held_ram=700 * MIB)
    found = cache({"latent": ([[{"samples": torch.zeros(512 * MIB // 4)}]], 100), "held": ([[held]], 101), "small": ([[1]], 102)})
    # Only what is large goes first, and before, neither weighed anything.
    found.ram_release(3 * GIB, free_active=True, min_entry_size=512 * MIB)
    assert list(found.cache) == ["small"]


class Loaded:
    """Something of a pack that holds `size` bytes of host memory."""

    def __init__(self, size):
        import torch
        self.weights = [torch.zeros(size, dtype=torch.uint8)]


@pytest.fixture
def pair():
    """The links of a host and a worker."""
    pair = value_peer.Pair()
    yield pair
    pair.close()


@pytest.mark.row(15)
@pytest.mark.row(36)
def test_what_a_worker_keeps_for_a_result_weighs_in_the_host_like_its_own(card, here, box, pair):
    held, small = pair.to_host(Loaded(600 * MIB)), pair.to_host(Loaded(0))
    assert held.held_ram == 600 * MIB and small.held_ram == 0
    found = cache({"held": ([[held]], 100), "nested": ([[{"model": [held]}]], 101), "small": ([[small]], 102)})
    found.ram_release(3 * GIB, free_active=True, min_entry_size=512 * MIB)
    assert list(found.cache) == ["small"]


@pytest.mark.row(36)
@pytest.mark.parametrize("worker_s", ["a", "b", "c", None])
def test_of_equal_results_the_last_touched_goes_as_in_upstream_whoever_holds_it(card, here, box, pair, monkeypatch, worker_s):
    import psutil
    import torch
    found = cache({name: ([[pair.to_host(Loaded(MIB)) if name == worker_s else torch.zeros(MIB, dtype=torch.uint8)]], at)
                   for name, at in (("a", 100), ("b", 101), ("c", 102))})

    def left(start):
        return start + (3 - len(found.cache)) * MIB
    box.available = lambda machine: left(2 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=256 * GIB, available=left(200 * GIB)))
    found.ram_release(2 * GIB + 1)
    assert list(found.cache) == ["a", "b"]


@pytest.mark.row(36)
def test_a_result_of_a_worker_that_is_gone_ends_no_prompt(card, here, box, pair):
    import torch
    found = cache({"held": ([[pair.to_host(Loaded(8 * MIB))]], 100), "good": ([[torch.zeros(MIB // 4)]], 101)})
    value_peer.end(pair.host)
    found.ram_release(3 * GIB, free_active=True)
    assert "held" not in found.cache


@pytest.mark.row(36)
def test_another_process_sees_how_much_the_output_cache_holds(card, spawn, here, box, monkeypatch):
    import torch
    from comfy import process_memory
    from comfy.process_memory import moments, ram
    other = spawn(runtimes.FILE)
    other.call("start", who="other")
    found = cache({"images": ([[torch.zeros(64 * MIB, dtype=torch.uint8)]], 100), "latent": ([[{"samples": torch.zeros(32 * MIB, dtype=torch.uint8)}]], 101)})
    monkeypatch.setattr(moments, "executor", types.SimpleNamespace(caches=types.SimpleNamespace(outputs=found)))
    monkeypatch.setattr(ram, "_results", (float("-inf"), 0))
    process_memory.changed()
    assert other.call("outputs")["here"] == 96 * MIB


@pytest.mark.row(9)
@pytest.mark.row(36)
def test_free_with_little_host_memory_leaves_the_card_empty(card, spawn, here, box, tmp_path):
    import comfy.model_management as mm
    others = [spawn(runtimes.FILE), spawn(runtimes.FILE)]
    for number, other in enumerate(others):
        other.call("start", who=f"other{number}")
        other.call("load", model="idle", nbytes=60 * MIB)
    runtimes.load("mine", 60 * MIB)
    box.left = 0
    for other in others:
        other.begin("serve", path=str(tmp_path / "enough"))
    mm.unload_all_models()
    (tmp_path / "enough").touch()
    for other in others:
        other.result()
    assert [other.call("loaded", model="idle") for other in others] == [0, 0] and runtimes.loaded("mine") == 0


class Driver:
    """A driver that locks ranges of addresses, each once."""

    def __init__(self):
        self.ranges = {}

    def cudaHostRegister(self, address, size, flags):
        if any(address < start + held and start < address + size for start, held in self.ranges.items()):
            return 712      # already registered
        self.ranges[address] = size
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.ranges.pop(address, None) else 713


@pytest.mark.row(42)
def test_a_received_tensor_that_is_dropped_is_unlocked_first(card, here, box, monkeypatch):
    import comfy.model_management as mm
    import torch
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(mm, "MAX_PINNED_MEMORY", 1 * GIB)
    monkeypatch.setattr(mm, "discard_cuda_async_error", lambda: None)
    sent = torch.arange(2 * MIB, dtype=torch.int32)
    for _ in range(3):                      # three workers, one after the other
        pair = value_peer.Pair()
        for _ in range(7):
            received = pair.to_host(sent)
            assert mm.pin_memory(received) is True
            assert list(driver.ranges.values()) == [8 * MIB]
            del received
            assert (driver.ranges, mm.PINNED_MEMORY, mm.TOTAL_PINNED_MEMORY) == ({}, {}, 0)
        last = pair.to_host(sent)
        assert mm.pin_memory(last) is True
        pair.close()
        assert torch.equal(last, sent)      # still readable, still locked
        del last
        assert (driver.ranges, mm.TOTAL_PINNED_MEMORY) == ({}, 0)


@pytest.mark.row(8)
@pytest.mark.row(15)
def test_the_cache_s_own_thresholds_fit_the_container(card, here, box):
    from comfy import process_memory
    assert process_memory.container_cache_sizes(10.0, 128.0, []) == (32 * 0.10, 32.0)
    assert process_memory.container_cache_sizes(10.0, 128.0, [10.0]) == (10.0, 32.0)      # given on the command line
    runtimes.stop()
    assert process_memory.container_cache_sizes(10.0, 128.0, []) == (10.0, 128.0) and process_memory.beyond_container() == 0


@pytest.mark.row(34)
@pytest.mark.row(42)
def test_a_refused_registration_succeeds_once_the_idle_process_has_given_its_pins(card, spawn, here, tmp_path):
    runtimes.driver(str(tmp_path / "driver"), 10 * MIB, ceiling=100 * MIB)
    other = spawn(runtimes.FILE)
    other.call("start", who="other")
    other.call("driver", path=str(tmp_path / "driver"), quota=10 * MIB, ceiling=100 * MIB)
    assert other.call("pin", model="idle", nbytes=8 * MIB) is True
    other.begin("serve", path=str(tmp_path / "enough"))
    assert runtimes.pin("mine", 4 * MIB) is True
    (tmp_path / "enough").touch()
    other.result()
    assert other.call("pinned") == [0, 0] and runtimes.pinned() == [4 * MIB, 1]


@pytest.mark.row(34)
@pytest.mark.row(42)
def test_the_ceiling_of_one_is_the_ceiling_of_both(card, spawn, here, tmp_path):
    runtimes.driver(str(tmp_path / "driver"), 100 * MIB, ceiling=10 * MIB)
    other = spawn(runtimes.FILE)
    other.call("start", who="other")
    other.call("driver", path=str(tmp_path / "driver"), quota=100 * MIB, ceiling=10 * MIB)
    assert other.call("pin", model="used", nbytes=8 * MIB, active=True) is True
    assert runtimes.pin("mine", 4 * MIB) is False and runtimes.pinned() == [0, 0]       # 12 of 10: it stays unlocked
    other.kill()
    deadline = time.monotonic() + 5
    while not runtimes.pin("mine", 4 * MIB):     # for a moment a process that was seen alive is taken to be so
        assert time.monotonic() < deadline
