"""What hooked code of ComfyUI gets from each consult. The manager here is a card that is a number."""

import logging
import sys
import threading
import types
import weakref

import pytest

from comfy import process_memory
from comfy.process_memory import Receipt, Outcome, admission, arithmetic, claims, devices, ladder, moments, registry
from tests.unit.providers import CARD, Hanging, Peer, until

MIB = 1 << 20


class Device:
    """A torch.device as the consults see it."""

    def __init__(self, type="cpu", index=0):
        self.type, self.index = type, index

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))


class Model:
    """An entry of the list of loaded models."""

    def __init__(self, size, loaded=None, dynamic=False, device=Device()):
        self.size, self.on_card, self.dynamic, self.device = size, size if loaded is None else loaded, dynamic, device
        self.currently_used = False
        self.model = self

    def is_dynamic(self):
        return self.dynamic

    def loaded_size(self):
        return self.on_card

    model_loaded_memory = loaded_size

    def model_memory(self):
        return self.size

    def model_offloaded_memory(self):
        return self.size - self.on_card


class Manager(types.ModuleType):
    """What the consults read of comfy.model_management."""

    DISABLE_SMART_MEMORY = False
    TOTAL_PINNED_MEMORY = 3

    def __init__(self, size):
        super().__init__("comfy.model_management")
        self.size = size
        self.used = 0
        self.cached = 0
        self.current_loaded_models = []
        self.device = Device()
        self.readings = 0

    def get_total_memory(self, device, torch_total_too=False):
        own = sum(model.on_card for model in self.current_loaded_models) + self.cached
        return (self.size, own) if torch_total_too else self.size

    def get_free_memory(self, device, torch_free_too=False):
        self.readings += 1
        free = process_memory.left_by_peers(device, self.size - self.used, self.cached)
        return (free, self.cached) if torch_free_too else free

    def minimum_inference_memory(self):
        return 10

    def get_torch_device(self):
        return self.device


@pytest.fixture
def card(monkeypatch):
    """A card of 1000 bytes; peers that free something free it there."""
    manager = Manager(1000)
    monkeypatch.setitem(sys.modules, "comfy.model_management", manager)
    monkeypatch.setattr(claims, "current", claims.LocalClaims())
    monkeypatch.setattr(ladder, "patience", 0.5)
    yield manager
    for entry in registry.entries:
        registry.unregister(entry.provider)
    assert not admission._loads and not admission._node


def peer(card, name, models=(), **more):
    def freed(size):
        card.used -= size
    found = Peer(name, models, on_freed=freed, **more)
    card.used += sum(found.models.values()) + found.cache
    process_memory.register_process_memory_provider(found)
    return found


def own(card, *models):
    card.current_loaded_models[:] = models
    card.used += sum(model.on_card for model in models)


def climb(card, required, keep_loaded=(), for_dynamic=False, device=Device()):
    """The ladder of free_memory, as the hooks leave it; gives the order in which things went."""
    went = []
    can_unload = [(-model.model_offloaded_memory(), 3, model.size, i) for i, model in enumerate(card.current_loaded_models)
                  if model.device == device and model not in keep_loaded]
    can_unload.extend(process_memory.peer_candidates(device, keep_loaded, required, for_dynamic))
    for x in sorted(can_unload):
        if process_memory.ask_peer(x):
            went.append(x.candidate.id)
            continue
        model = card.current_loaded_models[x[-1]]
        missing = 1e32 if card.DISABLE_SMART_MEMORY else required - card.get_free_memory(device)
        if model.dynamic and for_dynamic and not card.DISABLE_SMART_MEMORY:
            required -= model.on_card
            missing = 0
        if missing > 0:
            card.used -= model.on_card
            model.on_card = 0
            went.append(model)
    process_memory.ask_busy_peers()
    return went


# nobody registered

def test_with_no_provider_every_consult_gives_what_there_was(card):
    own(card, Model(100))
    card.readings = 0
    assert list(process_memory.peer_candidates(Device(), [], 1e30, False)) == []
    assert process_memory.ask_peer((0, 3, 100, 0)) is False
    assert process_memory.left_by_peers(Device(), 123.5, 4) == 123.5
    assert process_memory.make_room(Device(), 999) == 0
    process_memory.ask_busy_peers()
    process_memory.release_peers_caches()

    def load(models, memory_required=0):
        process_memory.claim_load({Device(): 50}, memory_required)
        process_memory.model_loaded()
        return process_memory.limit_budget(Model(9, 0), 7.25), models

    assert process_memory.claims_memory(load)([1], memory_required=5) == (7.25, [1])
    assert process_memory.peers_unload_too(lambda: "unloaded")() == "unloaded"
    assert process_memory.with_processes(lambda: "summary")() == "summary"
    assert card.readings == 0 and claims.current.own(CARD) == 0


# the ladder

def test_peers_and_own_models_go_in_one_order_and_only_as_many_as_needed(card):
    first = peer(card, "W1", {"A": 250, "B": 160})
    second = peer(card, "W2", {"C": 330})
    mine = Model(200)
    own(card, mine)
    assert climb(card, 500) == ["B", mine, "A", "C"]
    assert first.asked == [("B", 440), ("A", 80)] and second.asked == [] and first.models == {"A": 170, "B": 0}
    assert card.size - card.used == 500


def test_a_request_that_fits_asks_nobody(card):
    peer(card, "W1", {"A": 400})
    own(card, Model(100))
    for _ in range(10):
        assert climb(card, 500) == []
    assert registry.entries[0].provider.asked == []


def test_an_idle_peers_cache_is_given_back_before_any_model_goes(card):
    own(card, Model(300, loaded=200))
    W = peer(card, "W1", {"A": 200}, cache=150)
    climb(card, 550)
    assert W.asked == [("cache", 100)] and W.models == {"A": 200} and card.current_loaded_models[0].on_card == 200


def test_what_a_running_node_uses_is_never_asked_for(card):
    W = peer(card, "W1", {"A": 400, "B": 300}, in_use=["A"])
    climb(card, 1000)
    assert W.asked == [("B", 700)]


def test_a_busy_peer_is_asked_only_after_everybody_else(card):
    busy = peer(card, "busy", {"A": 300, "used": 100}, busy=True, in_use=["used"])
    idle = peer(card, "idle", {"B": 300})
    assert climb(card, 600) == ["B"]
    assert busy.asked == [] and idle.asked == [("B", 300)]
    assert climb(card, 900) == []
    assert busy.asked == [("A", 300)]


def test_a_peer_that_does_not_say_whether_it_is_busy_counts_as_busy(card):
    unsaid, idle = peer(card, "unsaid", {"A": 300}, busy=None), peer(card, "idle", {"B": 300})
    climb(card, 700)
    assert unsaid.asked == [] and idle.models == {"B": 0}


def test_a_capturing_peer_is_not_asked(card):
    W = peer(card, "W", {"A": 900})
    W.capturing = True
    assert climb(card, 500) == [] and W.asked == []


def test_busy_is_never_taken_for_freed_and_its_holder_is_not_pestered(card):
    W = peer(card, "W", {"A": 300, "B": 300})
    other = peer(card, "other", {"C": 350})
    answers = []
    W.release = lambda request: answers.append(request.candidate) or Receipt(outcome=Outcome.BUSY, freed=300)
    climb(card, 600)
    assert other.models == {"C": 0}
    assert set(answers) == {"A"} and 2 <= len(answers) <= 9, "once in its turn, and at the end now and then until patience is over"


def test_a_peer_that_dies_in_the_middle_is_gone_and_the_load_goes_on(card):
    W = peer(card, "W", {"A": 300, "B": 100})
    other = peer(card, "other", {"C": 200})

    def die(request):
        card.used -= 400
        W.models = {}
        return Receipt(outcome=Outcome.GONE)
    W.release = die
    climb(card, 900)
    assert other.asked == [("C", 100)] and card.size - card.used == 900
    assert registry.entries[0].gone


def test_a_peer_that_lies_does_not_end_the_search(card):
    liar, honest = peer(card, "liar", {"A": 100}), peer(card, "honest", {"B": 300})
    liar.release = lambda request: Receipt(outcome=Outcome.FREED, freed=10**9)
    climb(card, 900)
    assert honest.models == {"B": 0}


def test_a_hanging_peer_costs_a_load_one_deadline_at_most(card, monkeypatch):
    monkeypatch.setattr(ladder, "DEADLINE", 0.2)
    monkeypatch.setattr(registry, "GRACE", 0.0)
    hanging = Hanging("hanging", {"A": 100, "B": 100, "C": 100})
    card.used += 300
    process_memory.register_process_memory_provider(hanging)
    fine = peer(card, "fine", {"D": 300})
    climb(card, 900)
    climb(card, 1000)
    assert fine.models == {"D": 0}
    hanging.go.set()
    until(lambda: not registry.entries[0].hung)
    assert len(hanging.asked) == 1


def test_two_busy_peers_share_one_wait(card):
    peers = [Hanging(name, {name: 300}, busy=True) for name in ("W1", "W2")]
    card.used = 600
    for each in peers:
        process_memory.register_process_memory_provider(each)
    done = threading.Event()
    threading.Thread(target=lambda: (climb(card, 1000), done.set())).start()
    for each in peers:
        assert each.entered.wait(20), "both are asked at the same time"
    assert done.wait(20)
    for each in peers:
        each.go.set()


@pytest.mark.parametrize("amount", [1e30, 1e32, float("inf")])
def test_a_sentinel_asks_for_the_card_and_no_more(card, amount):
    W = peer(card, "W", {"A": 300})
    climb(card, amount)
    assert W.asked == [("A", 300)]


def test_unload_just_this_does_not_reach_peers(card):
    kept = Model(100)
    own(card, kept)
    W = peer(card, "W", {"A": 300})
    assert climb(card, 1e30, keep_loaded=[kept]) == []
    assert W.asked == []
    climb(card, 700, keep_loaded=[kept])
    assert W.asked == [("A", 100)], "a real amount that must be had without a model is a real shortfall"


def test_without_smart_memory_peers_are_asked_for_the_real_shortfall_only(card):
    card.DISABLE_SMART_MEMORY = True
    mine = Model(400)
    own(card, mine)
    W = peer(card, "W", {"A": 300})
    assert climb(card, 500) == [mine, "A"] and W.asked == []
    assert climb(card, 900) == [mine, "A"] and W.asked == [("A", 200)]


def test_a_dynamic_load_asks_peers_only_for_what_own_dynamic_models_cannot_page_out(card):
    own(card, Model(400, dynamic=True))
    W = peer(card, "W", {"A": 300})
    climb(card, 700, for_dynamic=True)
    assert W.asked == [], "300 are free and 400 page out on demand"
    climb(card, 800, for_dynamic=True)
    assert W.asked == [("A", 100)]


@pytest.mark.parametrize("device", [None, Device("cpu", None)])
def test_ram_is_not_this_ladders_business(card, device):
    W = peer(card, "W", {"A": 300})
    assert list(process_memory.peer_candidates(device, [], 1e30, False)) == []
    process_memory.ask_busy_peers()
    assert W.asked == [] and process_memory.left_by_peers(device, 5, 5) == 5


def test_a_peer_on_another_device_is_not_asked(card):
    W = peer(card, "W", {"A": 300}, device="cpu:1")
    climb(card, 1000)
    assert W.asked == []


def test_in_a_handler_only_peers_are_asked_for_room(card):
    mine = Model(300)
    own(card, mine)
    W = peer(card, "W", {"A": 300, "B": 300})
    assert process_memory.make_room(Device(), 350) == 250
    assert W.asked == [("A", 250)] and mine.on_card == 300


def test_who_serves_a_request_asks_nobody(card):
    W = peer(card, "W", {"A": 900})
    with process_memory.serving("ticket"):
        climb(card, 1000)
        assert process_memory.make_room(Device(), 900) == 0
    assert W.asked == []


def test_a_provider_that_manages_memory_while_it_is_asked_is_left_out_and_changes_no_list(card, caplog):
    """The execution thread goes by index through the list of loaded models, and waits for that provider."""
    threads = []
    free_memory = moments.no_safe_point(lambda *args: threads.append(threading.get_ident()))
    W, other = peer(card, "W", {"A": 300}), peer(card, "other", {"B": 400})
    W.release = lambda request: free_memory(1e30, Device())
    assert climb(card, 700) == ["A", "B"]
    assert threads == [] and other.models == {"B": 0}
    assert "must not manage" in caplog.text
    free_memory()
    assert threads == [threading.get_ident()]


# what is free

def test_claims_of_others_are_not_free(card):
    W = peer(card, "W", {"A": 300})
    W.claimed = 200
    assert card.get_free_memory(Device()) == 500
    W.claimed = 5000
    card.cached = 40
    assert card.get_free_memory(Device(), torch_free_too=True) == (40, 40), "nobody else can take what this allocator keeps"


def test_where_the_figure_covers_one_process_what_others_hold_is_taken_off_once(card):
    peer(card, "W", {"A": 300})
    devices.cover(CARD, False)
    try:
        card.used = 0  # the backend does not see it
        assert card.get_free_memory(Device()) == 700
    finally:
        devices.cover(CARD, None)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_missing_is_asked_for_whether_or_not_the_figure_shows_what_others_hold(card, whole):
    W = peer(card, "W", {"A": 625})
    own(card, Model(125, loaded=125))
    devices.cover(CARD, whole)
    try:
        if not whole:
            card.used -= 625
            W.on_freed = lambda size: None
        assert card.get_free_memory(Device(), torch_free_too=True) == (250, 0)      # also what /system_stats shows
        climb(card, 312, keep_loaded=card.current_loaded_models)
        assert W.asked == [("A", 62)]
    finally:
        devices.cover(CARD, None)


def test_no_card_that_a_process_does_not_use_is_asked_for_its_figures(card, monkeypatch):
    """That would open a context on it."""
    cards = [Device("cuda", i) for i in range(4)]
    asked = []
    monkeypatch.setattr(card, "get_all_torch_devices", lambda: cards, raising=False)
    monkeypatch.setattr(card, "device", cards[1])
    for name in ("get_total_memory", "get_free_memory"):
        real = getattr(card, name)
        monkeypatch.setattr(card, name, lambda device, *args, real=real, **kwargs: asked.append(device.index) or real(device, *args, **kwargs))
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(memory_stats=lambda device: {"reserved_bytes.all.current": 7} if device.index == 3 else {}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    own(card, Model(100, device=cards[2]))
    peer(card, "W", {"A": 100})
    assert len(process_memory.processes()) == 2
    process_memory.with_processes(lambda: "")()
    process_memory.peers_unload_too(lambda: None)()
    process_memory.release_peers_caches()
    assert set(asked) == {1, 2, 3}


def test_a_provider_that_stops_answering_loses_its_claim_after_a_while(card, monkeypatch):
    W = peer(card, "W")
    W.claimed = 200
    assert card.get_free_memory(Device()) == 800
    def broken(device):
        raise OSError("gone away")
    W.usage = broken
    assert card.get_free_memory(Device()) == 800
    monkeypatch.setattr("comfy.process_memory.figures.STALE", 0.0)
    assert card.get_free_memory(Device()) == 1000


# admission

def load(card, model, beyond=0, budget=0, meanwhile=lambda: None):
    """load_models_gpu, as the hooks leave it; gives the budget it loaded with."""
    def load_models_gpu():
        process_memory.claim_load({model.device: model.model_offloaded_memory()}, beyond)
        meanwhile()
        given = process_memory.limit_budget(model, budget)
        brought = model.model_offloaded_memory() if given == 0 else min(model.model_offloaded_memory(), int(given))
        model.on_card += brought
        card.used += brought
        card.current_loaded_models.insert(0, model)
        process_memory.model_loaded()
        model.claimed_after = claims.current.own(CARD)
        return given
    return process_memory.claims_memory(load_models_gpu)()


def test_a_load_claims_what_it_brings_and_the_claim_ends_with_it(card):
    peer(card, "W", {"A": 300})
    seen = []
    model = Model(200, loaded=0)
    assert load(card, model, meanwhile=lambda: seen.append(claims.current.own(CARD))) == 0
    assert seen == [200] and model.claimed_after == 0 and claims.current.own(CARD) == 0


def test_nothing_is_claimed_that_is_not_there_and_room_that_is_made_is_claimed(card):
    peer(card, "W", {"A": 900})
    seen = []

    def make_room():
        seen.append(claims.current.own(CARD))
        climb(card, 250)
        seen.append(claims.current.own(CARD))
    load(card, Model(200, loaded=0), meanwhile=make_room)
    assert seen == [100, 200]


def test_a_budget_is_lowered_by_what_others_have_claimed_meanwhile_and_never_raised(card):
    W = peer(card, "W")

    def claim():
        W.claimed = 700
    assert load(card, Model(900, loaded=0), budget=890, meanwhile=claim) == 290, "1000 - 700, less what inference needs at least"
    W.claimed = 0
    card.used = 0
    assert load(card, Model(900, loaded=0), budget=100) == 100
    assert load(card, Model(900, loaded=0), budget=arithmetic.LEAST) == arithmetic.LEAST
    card.used = 0
    W.claimed = 700
    assert load(card, Model(900, loaded=0), budget=0) == 290, "the whole model is not there to be had"
    W.claimed = 0


def test_a_load_that_fails_claims_nothing_any_more(card):
    peer(card, "W")

    def fail():
        assert claims.current.own(CARD) == 500
        raise RuntimeError("broken file")
    with pytest.raises(RuntimeError, match="broken file"):
        load(card, Model(500, loaded=0), meanwhile=fail)
    assert claims.current.own(CARD) == 0


def test_a_load_within_a_load_adds_to_the_claim_and_only_the_outer_one_ends_it(card):
    peer(card, "W")
    seen = []

    def inner():
        load(card, Model(100, loaded=0))
        seen.append(claims.current.own(CARD))
    load(card, Model(300, loaded=0), meanwhile=inner)
    assert seen == [300] and claims.current.own(CARD) == 0


@pytest.mark.row(20)
def test_what_a_node_needs_beyond_weights_is_claimed_until_it_ends_and_shrinks_as_it_appears(card, monkeypatch):
    monkeypatch.setattr(admission, "SETTLE_INTERVAL", 0.0)
    peer(card, "W")
    process_memory.node_started()
    load(card, Model(300, loaded=0), beyond=200)
    assert claims.current.own(CARD) == 200
    card.current_loaded_models.append(Model(150))  # activations of 150, as the allocator counts
    card.used += 150
    card.get_free_memory(Device())
    assert claims.current.own(CARD) == 50
    process_memory.node_ended()
    assert claims.current.own(CARD) == 0


def test_what_a_node_has_used_and_its_allocator_keeps_is_not_claimed_beside(card, monkeypatch):
    """Between two steps of a sampler: others would count it twice, as not free and as claimed."""
    monkeypatch.setattr(admission, "SETTLE_INTERVAL", 0.0)
    peer(card, "W")
    process_memory.node_started()
    load(card, Model(300, loaded=0), beyond=200)
    card.cached = 150
    card.get_free_memory(Device())
    assert claims.current.own(CARD) == 50
    card.cached = 0         # given back, because somebody has asked for it
    admission.claim_again(Device())
    assert claims.current.own(CARD) == 200, "the next step needs it"
    process_memory.node_ended()
    admission.claim_again(Device())
    assert claims.current.own(CARD) == 0


def test_outside_of_a_node_nothing_is_claimed_beyond_the_load(card):
    peer(card, "W")
    load(card, Model(300, loaded=0), beyond=200)
    assert claims.current.own(CARD) == 0


def test_who_cannot_have_the_lock_in_time_loads_as_before_and_claims_nothing(card, monkeypatch):
    monkeypatch.setattr(claims, "HOLD", 0.05)
    peer(card, "W")
    held, done = threading.Event(), threading.Event()

    def holder():
        with claims.current.hold(CARD, 1):
            held.set()
            done.wait(30)
    thread = threading.Thread(target=holder)
    thread.start()
    assert held.wait(10)
    seen = []
    assert load(card, Model(300, loaded=0), budget=290, meanwhile=lambda: seen.append(claims.current.own(CARD))) == 290
    assert seen == [0]
    done.set()
    thread.join(10)


def test_providers_are_told_of_a_claim(card):
    class Listener(Peer):
        told = []

        def claim(self, device, size):
            self.told.append((device, size))
    process_memory.register_process_memory_provider(Listener())
    load(card, Model(300, loaded=0))
    until(lambda: Listener.told == [(CARD, 300), (CARD, 0)])


# unloading and reports

def test_unloading_everything_reaches_every_peer_that_holds_something(card, caplog):
    W1, W2, W3 = peer(card, "W1", {"A": 300}), peer(card, "W2", {"B": 200}, cache=50), peer(card, "W3")
    assert process_memory.peers_unload_too(lambda: climb(card, 1e30))() == [], "not twice: the ladder leaves it to the unload"
    assert W1.asked == [("unload", 300)] and W2.asked == [("unload", 250)] and W3.asked == []
    assert card.used == 0 and not caplog.records


def test_what_is_not_unloaded_is_said_and_shows_in_the_report(card, caplog, monkeypatch):
    monkeypatch.setattr("comfy.process_memory.unloading.DEADLINE", 0.2)
    monkeypatch.setattr(registry, "GRACE", 0.0)
    silent, busy = Hanging("W2", {"B": 200}), peer(card, "W3", {"C": 100})
    process_memory.register_process_memory_provider(silent)
    busy.unload = lambda request: Receipt(outcome=Outcome.BUSY)
    caplog.set_level(logging.WARNING)
    process_memory.peers_unload_too(lambda: None)()
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "W2" in said and "has not confirmed" in said and "W3" in said and "is busy" in said
    assert {row["name"]: row["state"] for row in process_memory.processes()}["W2"] == "not confirmed"
    silent.go.set()
    until(lambda: not registry.entries[-1].hung)
    registry.entries[-1].failures = 0
    process_memory.peers_unload_too(lambda: None)()
    assert {row["name"]: row["state"] for row in process_memory.processes()}["W2"] == "idle"


def test_after_an_out_of_memory_error_peers_hear_why(card):
    W = peer(card, "W", {"A": 100})
    reasons = []
    W.unload = lambda request: reasons.append(request.reason) or Receipt(outcome=Outcome.NOTHING)
    process_memory.peers_unload_too(lambda: None)()
    try:
        raise MemoryError
    except MemoryError:
        process_memory.peers_unload_too(lambda: None)()
    assert [reason.value for reason in reasons] == ["user_free", "oom"]


def test_only_caches_of_idle_peers_are_released_now_and_then(card):
    idle, busy = peer(card, "idle", {"A": 100}, cache=40), peer(card, "busy", {"B": 100}, cache=40, busy=True)
    process_memory.release_peers_caches()
    assert idle.asked == [("cache", 40)] and busy.asked == []


def test_the_report_lists_this_process_and_every_other(card):
    peer(card, "idle", {"A": 100}, cache=40)
    peer(card, "busy", {"B": 100}, busy=True)
    broken = peer(card, "broken")

    def broken_count(device):
        raise RuntimeError
    broken.usage = broken_count
    gone = peer(card, "dead", {"C": 1})
    gone.release = lambda request: Receipt(outcome=Outcome.GONE)
    climb(card, 1000)
    own(card, Model(200, loaded=150))
    rows = {row["name"]: row for row in process_memory.processes()}
    assert {name: row["state"] for name, row in rows.items()} == {"ComfyUI": "idle", "idle": "idle", "busy": "busy", "broken": "silent", "dead": "gone"}
    mine = rows["ComfyUI"]["devices"][0]
    assert (mine["device"], mine["resident"], mine["committed"], mine["reclaimable"]) == (CARD, 150, 200, 150)
    assert rows["broken"]["devices"][0]["vram"] is None
    assert rows["ComfyUI"]["pinned"] == 3 and rows["ComfyUI"]["ram"] > 0
    summary = process_memory.with_processes(lambda: "torch says")().splitlines()
    assert summary[0] == "torch says" and len(summary) == 6


def test_nothing_of_ours_is_ever_in_the_list_of_loaded_models(card):
    mine = Model(100)
    own(card, mine)
    peer(card, "W", {"A": 300})
    climb(card, 1e30)
    load(card, other := Model(50, loaded=0))
    assert card.current_loaded_models == [other, mine]


def test_a_change_is_told_to_who_publishes_it(card, monkeypatch):
    seen = []
    monkeypatch.setattr(process_memory, "on_change", lambda: seen.append(len(card.current_loaded_models)))
    peer(card, "W")
    load(card, Model(50, loaded=0))
    assert seen[-1] == 1


def test_a_model_that_another_thread_lets_go_of_is_there_while_it_is_counted(monkeypatch):
    """The panel and the other processes hear of a model from threads that run beside the one which unloads it."""
    class Model:
        size = 5

    class Entry:
        device = "cpu:0"
        model = property(lambda self: self.weak())

    models, entry = [Model()], Entry()
    entry.weak = weakref.ref(models[0])
    monkeypatch.setattr(process_memory.own, "manager", lambda: types.SimpleNamespace(current_loaded_models=[entry]))
    sizes = []
    for counted in process_memory.own.loaded_models("cpu:0"):
        models.clear()
        sizes.append(counted.model.size)
    assert sizes == [5] and list(process_memory.own.loaded_models("cpu:0")) == []
