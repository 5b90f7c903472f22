"""What upstream does with its list of loaded models stays upstream's with providers registered: nothing of ours is in it."""

import gc
import weakref

import pytest

from comfy_multiproc.testing import stub_patcher
from tests.fork import peers

MIB = 1 << 20


@pytest.fixture
def mm(card, spawn):
    """ComfyUI's memory manager with a process registered that holds a model."""
    import comfy.model_management as mm
    peer = peers.make_peer("W1", spawn(peers.FILE))
    peer.load("theirs", 32 * MIB)
    mm.register_process_memory_provider(peer)
    yield mm
    mm.unregister_process_memory_provider(peer)
    mm.current_loaded_models.clear()


def only_own(mm, *patchers):
    """The list holds these patchers and nothing else, as what upstream puts there."""
    assert all(type(entry) is mm.LoadedModel for entry in mm.current_loaded_models)
    assert {id(entry.model) for entry in mm.current_loaded_models} == {id(patcher) for patcher in patchers}


@pytest.mark.row(22)
@pytest.mark.row(26)
@pytest.mark.row(28)
@pytest.mark.row(29)
@pytest.mark.row(30)
@pytest.mark.row(38)
@pytest.mark.behaviour(1)
def test_pruning_clones_identity_and_the_list_of_models_are_upstream_s(mm, card):
    first, second = stub_patcher(16 * MIB), stub_patcher(24 * MIB)
    mm.load_models_gpu([first])
    mm.load_models_gpu([second])
    only_own(mm, first, second)
    assert mm.loaded_models() == [second, first], "what a node gets to see (38)"
    assert mm.loaded_models(only_currently_used=True) == [second]

    clone = second.clone()
    assert clone.is_clone(second) and not clone.is_clone(first)
    mm.load_models_gpu([clone])
    only_own(mm, first, clone)
    assert card.read().process(card.file._pid).total == 40 * MIB, "one copy of the weights (29)"

    entry = mm.current_loaded_models[0]
    assert entry == mm.LoadedModel(clone) and entry != mm.LoadedModel(first), "(28)"
    assert entry.real_model() is clone.model and entry.model_finalizer.alive, "(26)"
    assert not any(entry.model.is_dynamic() for entry in mm.current_loaded_models), "(30)"

    gone = weakref.ref(clone.model)
    del entry, clone, second
    gc.collect()
    assert gone() is None
    only_own(mm, first)
    mm.cleanup_models_gc()
    only_own(mm, first)
    assert card.read().process(card.file._pid).total == 16 * MIB, "(22)"


@pytest.mark.row(28)
@pytest.mark.card(size="96M")
def test_a_leaked_model_is_found_and_said_as_upstream_does(mm, caplog):
    patcher = stub_patcher(16 * MIB)
    mm.load_models_gpu([patcher])
    kept = patcher.model         # what a node does that leaks
    del patcher
    gc.collect()
    caplog.set_level("INFO")
    mm.cleanup_models_gc()
    assert any("memory leak" in record.getMessage() and "Stub" in record.getMessage() for record in caplog.records)
    assert len(mm.current_loaded_models) == 1 and mm.current_loaded_models[0].real_model() is kept


@pytest.mark.row(2)
@pytest.mark.card(size="96M")
def test_while_peers_are_asked_the_list_is_upstream_s(mm, card):
    own = stub_patcher(24 * MIB)
    mm.load_models_gpu([own])
    seen = []
    from comfy.process_memory import registry
    provider = registry.entries[0].provider
    release = provider.release

    def looking(request):
        seen.append([type(entry) is mm.LoadedModel for entry in mm.current_loaded_models])
        return release(request)
    provider.release = looking
    unloaded = mm.free_memory(90 * MIB, card.device)
    assert seen and all(all(types) for types in seen)
    assert [entry.model for entry in unloaded] == [own] and not mm.current_loaded_models
    assert card.read().used == 0
