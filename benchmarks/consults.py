"""What each consult costs: with no provider registered, and with sixteen.

    python benchmarks/consults.py [--json]

Needs no ComfyUI and no torch. With no provider a consult may take 300 ns.
"""

import argparse
import json
import sys
import timeit
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comfy import process_memory
from comfy.process_memory import Candidate, DeviceUsage, Outcome, ProcessMemoryProvider, Receipt, ReleaseRequest, registry

LIMIT_NS = 300
CARD = types.SimpleNamespace(type="cpu", index=0)
MODEL = types.SimpleNamespace(device=CARD)
ENTRY = (-1, 3, 100, 0)


class Peer(ProcessMemoryProvider):
    """Answers at once from what it has ready."""

    name = "peer"
    _usage = DeviceUsage(resident=4 << 30, cached=0, fixed=0, scratch=0, claimed=0, committed=4 << 30, reclaimable=4 << 30, busy=False)
    _candidates = tuple(Candidate(id=str(i), name="model", resident=1 << 30, size=1 << 30) for i in range(4))

    def __init__(self, inline: bool):
        self.inline_counting = inline

    def usage(self, device: str) -> DeviceUsage:
        return self._usage

    def candidates(self, device: str) -> tuple[Candidate, ...]:
        return self._candidates

    def release(self, request: ReleaseRequest) -> Receipt:
        return Receipt(outcome=Outcome.FREED, freed=request.bytes)


def nanoseconds(call: Callable[[], Any], number: int) -> float:
    """What one call takes in the quietest round (other work on the machine only ever adds), without the loop around it."""
    empty = min(timeit.repeat(lambda: None, number=number, repeat=9))
    return max(0.0, min(timeit.repeat(call, number=number, repeat=15)) - empty) / number * 1e9


def without_providers() -> dict[str, float]:
    def nothing(*args: object) -> None:
        pass
    bare = nanoseconds(nothing, 50_000)
    consults: dict[str, Callable[[], Any]] = {
        "peer_candidates": lambda: process_memory.peer_candidates(CARD, [], 1, False),
        "ask_peer": lambda: process_memory.ask_peer(ENTRY),
        "ask_busy_peers": process_memory.ask_busy_peers,
        "left_by_peers": lambda: process_memory.left_by_peers(CARD, 1, 1),
        "claim_load": lambda: process_memory.claim_load({}, 0),
        "limit_budget": lambda: process_memory.limit_budget(MODEL, 0.1),
        "model_loaded": process_memory.model_loaded,
        "node_started": process_memory.node_started,
        "node_ended": process_memory.node_ended,
        "release_peers_caches": process_memory.release_peers_caches,
        "reset_peers": process_memory.reset_peers,
        "reclaimable": lambda: process_memory.reclaimable(CARD),
        "room_for_batch": lambda: process_memory.room_for_batch(MODEL, CARD, nothing),
        "batch_size": lambda: process_memory.batch_size(MODEL, CARD, 2.0, 3, 4),
        "free_after_asking": lambda: process_memory.free_after_asking(CARD, 2.0, 1.0),
        "obtainable": lambda: process_memory.obtainable(CARD, 1.0),
        "beyond_container": process_memory.beyond_container,
        "container_free": lambda: process_memory.container_free(CARD, 1, 1),
        "pin_shortfall": lambda: process_memory.pin_shortfall(1, 1.0),
        "pins_full": lambda: process_memory.pins_full(1),
        "weigh_outputs": lambda: process_memory.weigh_outputs([], 1.0, 1.0),
        "hint_memory": lambda: process_memory.hint_memory({}, (), None),
        "tell_interrupt": lambda: process_memory.tell_interrupt(True),
        "shared_counter": lambda: process_memory.shared_counter(MODEL, CARD),
        "set_pager_headroom": process_memory.set_pager_headroom,
        "wait_for_captures": lambda: process_memory.wait_for_captures([CARD]),
        "ask_for_room": lambda: process_memory.ask_for_room(CARD, 1.0),
        "free_for_batch": lambda: process_memory.free_for_batch(MODEL, CARD, 1.0),
        "claim_network": lambda: process_memory.claim_network(MODEL, CARD),
        "settle_network": lambda: process_memory.settle_network(CARD),
        "container_total": lambda: process_memory.container_total(CARD, 1.0),
        "moments.step": process_memory.moments.step,
        "moments.before_node": process_memory.moments.before_node,
        "moments.after_node": process_memory.moments.after_node,
        "moments.idle": process_memory.moments.idle,
        "moments.awake": lambda: process_memory.moments.awake(True),
    }
    found = {name: nanoseconds(call, 50_000) for name, call in consults.items()}
    for name, decorate in (("claims_memory", process_memory.claims_memory), ("peers_unload_too", process_memory.peers_unload_too),
                           ("with_processes", process_memory.with_processes), ("asks_peers_on_oom", process_memory.asks_peers_on_oom),
                           ("may_capture", process_memory.may_capture), ("settled_dtype", process_memory.settled_dtype),
                           ("shared_card", process_memory.shared_card),
                           ("asks_peers_on_oom_same_noise", process_memory.asks_peers_on_oom_same_noise), ("moments.no_safe_point", process_memory.moments.no_safe_point)):
        found[name] = max(0.0, nanoseconds(decorate(nothing), 50_000) - bare)
    def given(what: object, **options: object) -> bool:
        return True
    for name, decorate_given, what in (("reserves_pins", process_memory.reserves_pins, 1), ("peers_registrations_too", process_memory.peers_registrations_too, 1),
                                       ("one_pin_ceiling", process_memory.one_pin_ceiling, 1), ("for_file", process_memory.for_file, "model.safetensors")):
        call = decorate_given(given)
        found[name] = max(0.0, nanoseconds(lambda call=call, what=what: call(what), 50_000) - bare)
    return found


def with_providers() -> dict[str, float]:
    """Microseconds."""
    found = {}
    for kind, inline in (("inline", True), ("helper threads", False)):
        peers = [Peer(inline) for _ in range(16)]
        for peer in peers:
            registry.register(peer)
        found[f"usage of 16, {kind}"] = nanoseconds(lambda: registry.count("usage", "cpu:0"), 300) / 1000
        found[f"usage and candidates of 16, {kind}"] = nanoseconds(
            lambda: (registry.count("usage", "cpu:0"), registry.count("candidates", "cpu:0")), 300) / 1000
        entry = registry.entries[0]
        found[f"one release that frees at once, {kind}"] = nanoseconds(
            lambda: registry.ask("release", [(entry, ReleaseRequest(device="cpu:0", bytes=1))]), 300) / 1000
        for peer in peers:
            registry.unregister(peer)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    nobody, sixteen = without_providers(), with_providers()
    if args.json:
        sys.stdout.write(json.dumps({"no_provider_ns": nobody, "sixteen_providers_us": sixteen, "limit_ns": LIMIT_NS}) + "\n")
    else:
        for name, value in nobody.items():
            sys.stdout.write(f"no provider: {name:24} {value:8.0f} ns{'   over ' + str(LIMIT_NS) if value > LIMIT_NS else ''}\n")
        for name, value in sixteen.items():
            sys.stdout.write(f"{name:48} {value:8.1f} us\n")
    return 1 if max(nobody.values()) > LIMIT_NS else 0


if __name__ == "__main__":
    sys.exit(main())
