"""The hooks on functions that are in no release yet, on functions of the same shape."""

import types

import pytest

from comfy_multiproc.fork import git, plan, series
from tests.unit.test_consult import card, peer  # noqa: F401  (card is a fixture)

VOXELS = '''
import comfy.model_management


def _sample_voxel_attrs_per_texel(positions, mask):
    if not mask:
        return None

    def nearest(query):
        return query
    try:
        values = on_gpu(positions)
    except Exception as e:
        model_management.raise_non_oom(e)
        values = on_cpu(positions)
    return nearest(values)


def _bake_ambient_occlusion(resolution, num_samples=64, chunk=None):
    dev = model_management.get_torch_device()
    H = W = int(resolution)
    S = num_samples
    if chunk is None:
        free = model_management.get_free_memory(dev)
        chunk = int(free * 0.25 / 376)
    return chunk
'''

DECODE = '''
from comfy import process_memory


class VAE:
    def prepare_decode(self, shape, needed):
        free_memory = self.patcher.get_free_memory(self.device)
        return max(1, int(free_memory / needed))
'''


POSES = '''
import comfy.model_management


class PoseBranchCache:
    def __init__(self, device, slots):
        self.store_device = device
        self.slots = slots

    def select(self, k, create=True):
        est = max(self.slots, default=0) * 1.5
        while self.slots and model_management.get_free_memory(self.store_device) < est:
            self.slots.pop(0)
        return len(self.slots)
'''


def hooked(tmp_path, file, source, **names):
    """The names of `source` with the hooks of the series that wait for such a file."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = plan.Plan(tmp_path, "99.0.0", (), git.Folder(tmp_path))
    inserts = [insert for patch in series.load() for insert in patch.inserts if insert.where_present and insert.anchor.file == file]
    results = [plan.resolve_insert(found, order, "", insert) for order, insert in enumerate(inserts)]
    assert results and {result.status for result in results} == {"ok"}, results
    text = plan.render(found.sources[file], found.hooks[file]).decode()
    exec(compile(text, file, "exec"), names)  # noqa: S102  (text of this file)
    return types.SimpleNamespace(**names)


class OutOfMemory(Exception):
    pass


@pytest.mark.row(19)
@pytest.mark.parametrize("idle", [True, False])
def test_voxels_are_sampled_on_the_card_once_the_idle_process_has_made_room(card, tmp_path, idle):  # noqa: F811
    other = peer(card, "other", {"model": 900}, busy=not idle, in_use=() if idle else ("model",))
    card.raise_non_oom, card.soft_empty_cache = lambda error: None, lambda: None

    def on_gpu(positions):
        if card.size - card.used < 500:
            raise OutOfMemory("Tried to allocate 500 bytes.")
        return "from the card"
    module = hooked(tmp_path, "comfy_extras/nodes_mesh_postprocess.py", VOXELS, model_management=card, on_gpu=on_gpu, on_cpu=lambda positions: "from the CPU")
    assert module._sample_voxel_attrs_per_texel([1], True) == ("from the card" if idle else "from the CPU")
    assert other.models["model"] == (390 if idle else 900)      # 500, and the 10 of inference


@pytest.mark.row(6)
def test_rays_are_cast_in_chunks_for_which_the_idle_process_has_made_room(card, tmp_path):  # noqa: F811
    card.size = 1 << 40
    module = hooked(tmp_path, "comfy_extras/nodes_mesh_postprocess.py", VOXELS, model_management=card)
    other = peer(card, "other", {"model": card.size - 376 * 4})
    few = module._bake_ambient_occlusion(1, num_samples=100)
    assert few == 100 and other.models["model"] == card.size - 376 * 4 * 100      # what it needs, not all there is
    assert module._bake_ambient_occlusion(1, num_samples=50) == 100


@pytest.mark.row(6)
def test_a_decoder_of_its_own_is_promised_only_what_is_there(card, tmp_path):  # noqa: F811
    from comfy import process_memory
    vae = hooked(tmp_path, "comfy/sd.py", DECODE).VAE()
    vae.device = card.device
    vae.patcher = types.SimpleNamespace(get_free_memory=lambda device: card.get_free_memory(device) + process_memory.reclaimable(device))
    assert vae.prepare_decode((), 100) == 10
    peer(card, "other", {"model": 700})
    assert vae.prepare_decode((), 100) == 3


@pytest.mark.row(6)
@pytest.mark.parametrize("idle", [True, False])
def test_a_cache_of_poses_keeps_what_it_has_if_the_idle_process_makes_room(card, tmp_path, idle):  # noqa: F811
    other = peer(card, "other", {"model": 900}, busy=not idle, in_use=() if idle else ("model",))
    cache = hooked(tmp_path, "comfy/ldm/wan/model_animate2.py", POSES, model_management=card).PoseBranchCache(card.device, [200, 200])
    assert cache.select(None) == (2 if idle else 0)
    assert other.models["model"] == (900 - 201 if idle else 900)       # more than 300 free; 100 were


@pytest.mark.row(6)
def test_a_cache_of_poses_in_host_memory_asks_for_what_the_container_lacks(card, tmp_path, monkeypatch):  # noqa: F811
    from comfy.process_memory import limits, ram
    from tests.unit.test_consult import Device
    left, asked = limits.FLOOR + 100, []
    monkeypatch.setattr(card, "get_free_memory", lambda device: left - limits.FLOOR)
    card.comfy = types.SimpleNamespace(memory_management=types.SimpleNamespace(RAM_CACHE_HEADROOM=0))
    monkeypatch.setattr(limits, "available", lambda: left)

    def ask(method, missing):
        nonlocal left
        asked.append((method, missing))
        left += missing
        return missing
    monkeypatch.setattr(ram, "ask", ask)
    peer(card, "other", {})
    cache = hooked(tmp_path, "comfy/ldm/wan/model_animate2.py", POSES, model_management=card).PoseBranchCache(Device(index=None), [200, 200])
    assert cache.select(None) == 2 and asked == [("release_pins", 200)]
