"""Objects that stay where they are, and how long they stay there."""

import copy
import gc
import pickle
import threading

import pytest

from comfy_multiproc.handles import Handle, HandleLost, HandleTable, handles_in
from tests.unit.value_peer import Pair


class Model:
    """Something that cannot cross."""


@pytest.fixture
def host():
    return HandleTable("host")


@pytest.fixture
def pairs(host):
    """Two workers of one host."""
    pairs = Pair(host, "w1"), Pair(host, "w2")
    yield pairs
    for pair in pairs:
        pair.close()


def test_an_object_comes_home_as_itself_and_is_dropped_with_its_last_handle(pairs):
    pair, _ = pairs
    model = Model()
    first, again = pair.to_host(model), pair.to_host({"model": [model]})["model"][0]
    assert first is again and (first.owner, first.type_name) == ("w1", "Model")
    assert pair.to_worker(first) is model
    del first
    gc.collect()
    assert pair.to_worker(again) is model
    del again
    pair.until(lambda: pair.worker.handles.count == 0)


def test_a_handle_that_is_given_out_while_an_earlier_one_is_dropped_is_not_lost(pairs):
    pair, _ = pairs
    model = Model()
    early = pair.to_host(model)
    packet = pair.worker.encode(model)      # under way ...
    del early                               # ... while the host lets go of what it had
    pair.until(lambda: pair.worker._exported[("w1", 1)][0] == 1)
    late = pair.host.decode(packet.body)
    assert pair.to_worker(late) is model


def test_a_handle_on_its_way_home_is_good_although_it_was_dropped_meanwhile(pairs):
    pair, _ = pairs
    model = Model()
    handle = pair.to_host(model)
    packet = pair.host.encode(handle)
    del handle
    gc.collect()
    pair.to_host(other := Model())      # its release is told after anything that was dropped before
    pair.until(lambda: other is not None and pair.worker.handles.count == 1)
    assert pair.worker.decode(packet.body) is model
    pair.until(lambda: pair.worker.handles.count == 0)


def test_a_handle_that_passes_through_the_host_stays_its_owners(pairs):
    one, two = pairs
    model = Model()
    handle = one.to_host(model)
    there = two.to_worker({"model": handle})["model"]
    assert there.owner == "w1" and there.type_name == "Model"
    assert two.to_host(there) is handle
    del handle
    gc.collect()
    assert one.worker.handles.count == 1, "w2 still has it"
    assert one.to_worker(two.to_host(there)) is model
    del there
    one.until(lambda: one.worker.handles.count == 0)


def test_an_object_of_the_host_is_one_object_for_all_workers(pairs, host):
    one, two = pairs
    model = Model()
    first, second = one.to_worker(model), two.to_worker(model)
    assert first.id == second.id and one.to_host(first) is model and two.to_host(second) is model
    del first
    one.until(lambda: not one.host._exported)
    assert host.count == 1
    del second
    two.until(lambda: host.count == 0)


def test_handles_of_a_dead_process_say_so_and_what_it_held_is_let_go(pairs, host):
    one, two = pairs
    handle = one.to_host(Model())
    handle.io_type = "MODEL"
    one.to_worker(kept := Model())
    there = one.to_worker(kept)
    one.host.close("worker w1 ended with signal 9")
    assert handle.lost and host.count == 0 and there is not None
    with pytest.raises(HandleLost, match=r"the MODEL \(Model\) of process w1 is gone: worker w1 ended with signal 9. Run the node"):
        two.to_worker([handle])
    with pytest.raises(HandleLost):
        one.to_worker(handle)


def test_an_object_that_nobody_holds_is_said_to_be_gone(host):
    number = host.retain(model := Model())
    assert host.get(number) is model
    host.release(number)
    with pytest.raises(HandleLost, match="object 1 of process host"):
        host.get(number)


def test_the_last_release_hands_the_object_over(host):
    dropped = []
    table = HandleTable("w1", drop=dropped.append)
    number = table.retain(model := Model())
    assert table.retain(model) == number
    table.release(number)
    assert dropped == []
    table.release(number)
    assert dropped == [model]


def test_many_threads_may_hold_and_let_go(pairs):
    pair, _ = pairs
    model = Model()
    failed = []

    def use():
        try:
            for _ in range(50):
                assert pair.to_worker(pair.to_host([model])[0]) is model
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    pair.until(lambda: pair.worker.handles.count == 0)


def test_node_code_is_told_what_it_has_got():
    handle = Handle("w1", 1, "ModelPatcher", io_type="MODEL")
    assert not hasattr(handle, "model") and copy.deepcopy({"x": handle})["x"] is handle
    with pytest.raises(AttributeError, match=r"'clone': the MODEL \(ModelPatcher\) of process w1 stays in that process"):
        handle.clone()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(handle)


def test_handles_are_found_wherever_they_are():
    a, b, c = (Handle("w1", n, "X") for n in range(3))
    value = {"x": [a, {"y": (1, b)}], "z": {c}}
    value["again"] = value
    assert set(handles_in(value)) == {a, b, c} and list(handles_in("x")) == []
