"""Where a node's call is made, by what its inputs are."""

import asyncio
import sys
import threading
import types
from concurrent.futures import Future

import comfy
import pytest

from comfy_multiproc.calls import Calls, answered, core, drop_lost, sent
from comfy_multiproc.handles import Handle, HandleLost

SECONDS = 30.0


class Station:
    def __init__(self, name):
        self.name = name

    def owns(self, handle):
        return handle.owner == self.name


@pytest.fixture
def calls():
    stations = [Station("first"), Station("second")]
    return Calls(lambda pack: stations[0], lambda: iter(stations), lambda number: None)


def handle(owner, io_type="MODEL"):
    return Handle(owner, 1, "ModelPatcher", io_type=io_type)


class Core:
    pass


Core.__module__ = "nodes"


class Extra:
    RELATIVE_PYTHON_MODULE = "comfy_extras.nodes_sd3"


class Hosted:
    RELATIVE_PYTHON_MODULE = "custom_nodes.somebody"


def test_core_nodes_are_those_that_every_worker_has():
    assert core(Core) and core(Extra) and not core(Hosted) and not core(Handle)


@pytest.mark.parametrize("value", [handle("second"), [[1, {"control": handle("second")}]], {"a": (handle("second"),)}])
def test_a_core_node_follows_an_object_however_deep_it_is(calls, value):
    assert calls.place(Core, {"plain": [1], "x": [value]}).name == "second"


def test_a_node_without_such_objects_stays(calls):
    assert calls.place(Core, {"plain": [1, "a", {"b": [2]}]}) is None
    assert calls.place(Core, {"x": [handle("an owner that is not here")]}) is None


def test_objects_of_two_workers_name_the_inputs_and_the_way_out(calls):
    with pytest.raises(RuntimeError) as error:
        calls.place(Core, {"model": [handle("first")], "vae": [handle("second", "VAE")]})
    for words in ("model (MODEL) is in worker first", "vae (VAE) is in worker second", "group"):
        assert words in str(error.value)


def test_a_node_of_a_pack_in_the_host_cannot_follow(calls):
    with pytest.raises(RuntimeError) as error:
        calls.place(Hosted, {"model": [handle("first")]})
    assert 'group = "first"' in str(error.value)


def test_an_object_of_a_worker_that_has_ended(calls):
    lost = handle("first")
    lost.lost = "worker first was ended by signal 9"
    with pytest.raises(HandleLost, match="signal 9.*Run the node that made it again"):
        calls.place(Core, {"model": [lost]})


def test_results_that_are_lost_leave_the_cache_and_the_others_stay():
    class Entry:
        def __init__(self, *outputs):
            self.outputs = list(outputs)

    class Cache:
        def __init__(self, **entries):
            self.cache, self.subcaches = entries, {}

    lost = handle("first")
    lost.lost = "gone"
    cache = Cache(good=Entry([1], [handle("second")]), bad=Entry([2], [[lost]]), empty=Entry())
    cache.subcaches["inner"] = Cache(bad=Entry([{"deep": (lost,)}]))
    assert drop_lost(cache) == 2
    assert set(cache.cache) == {"good", "empty"} and not cache.subcaches["inner"].cache


def test_an_interrupt_that_came_before_the_worker_had_the_call_cancels_it(monkeypatch):
    class Interrupted(BaseException):
        pass
    manager = types.SimpleNamespace(processing_interrupted=lambda: True, InterruptProcessingException=Interrupted)
    monkeypatch.setitem(sys.modules, "comfy.model_management", manager)
    monkeypatch.setattr(comfy, "model_management", manager, raising=False)
    call = Future()
    with pytest.raises(Interrupted):
        asyncio.run(asyncio.wait_for(answered(call), SECONDS))
    assert call.cancelled()


def test_a_call_that_nobody_waits_for_when_its_worker_has_started_is_cancelled():
    began, go, call = threading.Event(), threading.Event(), Future()

    class Starting(Station):
        def running(self):
            return False

        def send(self, *args):
            began.set()
            assert go.wait(SECONDS)
            return call

    async def prompt():
        task = asyncio.create_task(sent(Starting("first"), None, {}))
        await asyncio.get_running_loop().run_in_executor(None, began.wait, SECONDS)
        task.cancel()
        await asyncio.wait([task])
        go.set()
    asyncio.run(prompt())       # waits for its threads
    assert call.cancelled()
