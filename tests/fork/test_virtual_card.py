"""The virtual card under ComfyUI's own memory manager, in one process and in several."""

import copy
import gc
import os
import threading

import pytest

from comfy_multiproc.testing import ProcessError, RemoteError, read_card, stub_patcher

MIB = 1 << 20


# ---- what another process does

held = []


def load(nbytes):
    import comfy.model_management as mm
    held.append(stub_patcher(nbytes))
    mm.load_models_gpu(held[-1:])
    return held[-1].loaded_size()


def free_bytes():
    import comfy.model_management as mm
    return mm.get_free_memory()


def allocate(nbytes):
    import comfy.model_management as mm
    import torch
    held.append(torch.empty(nbytes, dtype=torch.uint8, device=mm.get_torch_device()))


def drop():
    held.clear()


def empty_cache():
    import comfy.model_management as mm
    mm.soft_empty_cache()


def wait_forever():
    threading.Event().wait()


# ---- one process

def books(mm):
    """The bytes on cards by ComfyUI's own list."""
    return sum(m.model.loaded_size() for m in mm.current_loaded_models)


def test_counted_bytes_are_comfyui_s_own_books_at_rest(card):
    import comfy.model_management as mm
    models = [stub_patcher(n * MIB) for n in (80, 64, 120, 40)]
    for order in ((0,), (1,), (2,), (3, 0), (2, 1), (0, 3)):        # whole and partial loads, partial and whole unloads
        mm.load_models_gpu([models[i] for i in order])
        assert card.read().used == books(mm) > 0
        assert mm.get_free_memory() == card.read().free
    assert any(0 < m.loaded_size() < m.model_size() for m in models), "nothing was loaded in part: the test shows little"
    mm.unload_all_models()
    assert card.read().used == books(mm) == 0
    assert card.read().peak <= card.settings.size


def test_a_model_is_computed_with_weights_offloaded_and_on_the_card(card):
    import comfy.model_management as mm
    import torch
    model = stub_patcher(320 * MIB)      # more than the card
    mm.load_models_gpu([model])
    devices = {layer.weight.device for layer in model.model.layers}
    assert devices == {card.device, torch.device("cpu")}
    with torch.inference_mode():
        assert model.model(torch.ones(1, 1, device=card.device)).device == card.device


def test_what_does_not_fit_raises_comfyui_s_out_of_memory(card):
    import comfy.model_management as mm
    import torch
    keep = torch.empty(200 * MIB, dtype=torch.uint8, device=card.device)
    with pytest.raises(mm.OOM_EXCEPTION, match="Tried to allocate 57.00 MiB.* of which 56.00 MiB is free") as caught:
        torch.empty(57 * MIB, dtype=torch.uint8, device=card.device)
    assert mm.is_oom(caught.value)
    torch.empty(56 * MIB, dtype=torch.uint8, device=card.device)
    del keep
    assert card.read().used == 0


@pytest.mark.card(size="64M", count=2)
def test_two_cards_are_two_places(card):
    import comfy.model_management as mm
    import torch
    zero, one = card.devices
    a, b = torch.ones(MIB, device=zero), torch.ones(2 * MIB, device=one)
    assert [card.read(i).used for i in (0, 1)] == [4 * MIB, 8 * MIB]
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        a[:MIB] + b[:MIB]
    with pytest.raises(RuntimeError, match="at least two devices, cpu and cuda:1"):
        b + torch.ones(2 * MIB)
    c = a.to(one)
    assert (c.device, (c + b[:MIB]).device, c.data_ptr() == a.data_ptr()) == (one, one, False)
    mm.load_models_gpu([keep := stub_patcher(40 * MIB, one)])
    assert [card.read(i).used for i in (0, 1)] == [4 * MIB, 52 * MIB] and keep.loaded_size() == 40 * MIB
    assert mm.get_free_memory(zero) == 60 * MIB and mm.get_free_memory(one) == 12 * MIB


def test_moving_is_copying_and_staying_is_not(card):
    import torch
    x = torch.arange(8.0)
    y = x.to(card.device)
    y += 1
    assert y.to(card.device) is y and y.device == card.device
    assert y.cpu().tolist() == [v + 1 for v in x.tolist()] and x.tolist() == list(range(8))
    back = y.to("cpu")
    back += 1
    assert y[0].item() == 1.0 and back.device == torch.as_tensor(y, device="cpu").device == torch.device("cpu")
    with pytest.warns(UserWarning, match="copy construct"):
        assert torch.tensor(y).device == card.device
    for z in (y.half(), y.to(card.device, torch.float16), y[2:], y * 2, torch.zeros_like(y), torch.ones(2).to(y), copy.deepcopy(y),
              torch.tensor([1.0], device=card.device), y.new_tensor([1.0]), torch.nn.Parameter(y), torch.ones(2, dtype=torch.int32).type_as(y)):
        assert z.device == card.device
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        y.numpy()
    del x, y, z, back
    gc.collect()
    assert card.read().used == 0


def test_a_thread_is_on_the_card_too(card):
    import torch
    seen = []
    held = torch.ones(MIB, device=card.device)

    def offload():
        moved = held.to("cpu")
        seen.append((moved.device, moved.data_ptr() != held.data_ptr(), torch.ones(MIB, device=card.device).device, card.read().used))

    class Own(threading.Thread):
        def run(self):
            offload()

    for thread in (threading.Thread(target=offload), Own()):
        thread.start()
        thread.join(30)
        assert seen.pop() == (torch.device("cpu"), True, card.device, 4 * MIB)


def test_a_file_is_loaded_onto_the_card(card, tmp_path):
    import torch
    torch.save({"w": torch.ones(MIB), "v": torch.ones(2)}, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", map_location=card.device)
    assert loaded["w"].device == loaded["v"].device == card.device and card.read().used == 4 * MIB + 8
    assert torch.load(tmp_path / "weights.pt", map_location="cpu")["w"].device == torch.device("cpu")
    del loaded
    gc.collect()
    assert card.read().used == 0


def test_a_tensor_that_grows_is_counted_and_may_not_fit(card):
    import torch
    grown, out, ones = torch.empty(0, device=card.device), torch.empty(0, device=card.device), torch.ones(2 * MIB, device=card.device)
    grown.resize_(4 * MIB)
    assert card.read().used == 24 * MIB
    torch.add(ones, ones, out=out)
    assert card.read().used == 32 * MIB
    ones.untyped_storage().resize_(0)
    assert card.read().used == 24 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(0, device=card.device).resize_(64 * MIB)
    del grown, out, ones
    gc.collect()
    assert card.read().used == 0


@pytest.mark.card(size="64M", count=2)
def test_indexing_takes_indices_from_the_cpu_and_nothing_else_from_elsewhere(card):
    import torch
    x, index = torch.zeros(4, device=card.device), torch.tensor([1, 2])
    x[index] = torch.tensor(2.0)
    x[index.to(card.device)] += 1
    assert x[index].tolist() == [3.0, 3.0] and x[torch.tensor([True, False, False, False])].device == card.device
    for refused in (lambda: x[index.to(card.devices[1])], lambda: x.__setitem__(index, torch.ones(2)), lambda: torch.zeros(4)[index.to(card.device)]):
        with pytest.raises(RuntimeError, match="at least two devices"):
            refused()


@pytest.mark.card(size="64M", count=2)
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_what_torch_puts_together_itself_is_where_its_operands_are(card, mode):
    """A function that torch takes apart, as threads for several GPUs meet it, which are in no inference mode."""
    import torch
    from torch.nn import functional
    one = card.devices[1]
    places = {}

    def work():
        with getattr(torch, mode)():
            x = torch.rand(1, 4, 8, 8).to(one)
            places.update(padded=functional.pad(x, (0, 1, 0, 1), mode="circular"), one_hot=functional.one_hot(x.long().flatten()), moved=x.to("cpu"),
                          asked=torch.zeros_like(x, device="cpu"), counted=torch.arange(4), scaled=functional.interpolate(x, scale_factor=2))
            places.update({name: tensor.device for name, tensor in places.items()})
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cpu = torch.device("cpu")
    assert places == {"padded": one, "one_hot": one, "moved": cpu, "asked": cpu, "counted": cpu, "scaled": one}


@pytest.mark.card(size="64M", keep_freed=True, context=2 * MIB)
def test_allocator_cache_and_context_are_on_the_card(card):
    import comfy.model_management as mm
    import torch
    x = torch.empty(20 * MIB, dtype=torch.uint8, device=card.device)
    del x
    own = card.read().processes[0]
    assert (own.allocated, own.cached, own.fixed) == (0, 20 * MIB, 2 * MIB)
    assert mm.get_free_memory(card.device, torch_free_too=True) == (62 * MIB, 20 * MIB)
    mm.soft_empty_cache()
    assert card.read().used == 2 * MIB


@pytest.mark.card(size="64M", state="low")
def test_the_state_of_the_memory_manager_is_as_asked(card):
    import comfy.model_management as mm
    assert mm.vram_state is mm.VRAMState.LOW_VRAM
    assert mm.get_torch_device() == card.device and mm.get_total_memory() == 64 * MIB
    assert not mm.is_device_cpu(card.device) and mm.is_device_cpu(mm.torch.device("cpu"))


def test_afterwards_the_process_is_as_before():
    import comfy.model_management as mm
    import torch

    from comfy_multiproc.testing import virtual_card
    before = {name: value for name, value in vars(mm).items() if not name.startswith("__")}
    with virtual_card("64M") as card:
        kept = torch.ones(MIB, device=card.device)
        mm.load_models_gpu([model := stub_patcher(8 * MIB)])
        assert model.loaded_size()
    assert {name: value for name, value in vars(mm).items() if not name.startswith("__")} == before
    assert kept.device == torch.device("cpu") and kept.numpy().sum() == MIB and not mm.current_loaded_models
    assert not hasattr(torch, "npu")


def test_a_card_that_cannot_be_made_changes_nothing(monkeypatch):
    import comfy.model_management as mm
    import torch

    from comfy_multiproc.testing import virtual_card
    from comfy_multiproc.testing.card import comfy
    monkeypatch.setattr(comfy, "INFERENCE", "a figure that this ComfyUI does not have")
    with pytest.raises(RuntimeError, match="no longer adds"), virtual_card("64M"):
        pass
    assert not hasattr(torch, "npu") and mm.get_torch_device() == torch.device("cpu")


def test_what_outlives_a_card_is_not_on_the_next_one_of_the_same_file(tmp_path):
    import torch

    from comfy_multiproc.testing import virtual_card
    kept = []
    for _ in range(2):
        with virtual_card("64M", path=tmp_path / "card", keep_freed=True) as card:
            assert card.read().used == 0
            kept.append(torch.ones(MIB, device=card.device))


# ---- several processes

def test_processes_share_the_card(card, spawn):
    import comfy.model_management as mm
    mm.load_models_gpu([keep := stub_patcher(100 * MIB)])
    peer = spawn()
    assert peer.call("free_bytes") == 156 * MIB
    assert peer.call("load", nbytes=80 * MIB) == 80 * MIB
    assert {p.pid: p.allocated for p in card.read().processes if p.allocated} == {os.getpid(): 100 * MIB, peer.pid: 80 * MIB}
    assert mm.get_free_memory() == 76 * MIB and keep.loaded_size() == 100 * MIB
    with pytest.raises(RemoteError) as caught:
        peer.call("allocate", nbytes=77 * MIB)
    assert caught.value.type == "OutOfMemoryError" and "76.00 MiB is free" in caught.value.text
    assert read_card(card.path).peak <= 256 * MIB


def test_a_killed_process_s_memory_is_free_at_once(card, spawn):
    import comfy.model_management as mm
    peer = spawn()
    peer.call("load", nbytes=120 * MIB)
    assert mm.get_free_memory() == 136 * MIB
    peer.begin("wait_forever")
    peer.kill()
    assert mm.get_free_memory() == 256 * MIB and card.read().used == 0
    with pytest.raises(ProcessError, match="ended with -9"):
        peer.result()


@pytest.mark.card(size="64M", keep_freed=True)
def test_what_a_process_caches_another_cannot_have(card, spawn):
    import comfy.model_management as mm
    peer = spawn()
    peer.call("allocate", nbytes=40 * MIB)
    peer.call("drop")
    assert mm.get_free_memory() == 24 * MIB
    peer.call("empty_cache")
    assert mm.get_free_memory() == 64 * MIB


def test_a_process_that_does_not_answer_is_an_error_in_time(spawn):
    peer = spawn()
    peer.begin("wait_forever")
    with pytest.raises(ProcessError, match="did not answer in 1 s"):
        peer.result(timeout=1)
