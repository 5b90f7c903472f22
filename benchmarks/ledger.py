"""What the ledger and the peers cost: reading, publishing, claiming, and asking an idle process, in microseconds.

    python benchmarks/ledger.py [--json]

Other processes are real ones, around a manager of numbers (no torch), on a card in a file. The cost of an unload itself is
not in the figures: the models that are asked for are 1 byte.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comfy.process_memory.provider import Candidate, DeviceUsage, ReleaseRequest  # noqa: E402
from comfy_multiproc.channel import auth_key  # noqa: E402
from comfy_multiproc.claims import LedgerClaims  # noqa: E402
from comfy_multiproc.ledger import Ledger  # noqa: E402
from comfy_multiproc.peer import PeerProcess  # noqa: E402
from comfy_multiproc.records import DeviceReport, Report  # noqa: E402
from comfy_multiproc.testing.card.capacity import CapacityFile, ProcessReading  # noqa: E402
from tests.unit.processes import children  # noqa: E402
from tests.unit.small import KEY, MB, Process  # noqa: E402

PEERS = 16
ROUNDS = 2000


class Card:
    """A card that is two numbers: reading it costs nothing, so that what is measured is the asking."""

    def __init__(self) -> None:
        self.allocated = 0

    def size(self, card: int) -> int:
        return 1000 * MB

    def free(self, card: int) -> int:
        return 1000 * MB - self.allocated

    def own(self, card: int) -> ProcessReading:
        return ProcessReading(0, self.allocated, 0, 0, 0, 0)

    def allocate(self, card: int, size: int) -> None:
        self.allocated += size

    def release(self, card: int, size: int) -> None:
        self.allocated -= size

    def empty_cache(self, card: int) -> None:
        pass


def asked(pipe: object, folder: Path, card: Path) -> None:
    """The process that is asked."""
    child = Process(pipe, folder, card, "peer")
    child.mm.card = Card()
    child.run()


def microseconds(call: Callable[[], object], rounds: int = ROUNDS, best_of: int = 5) -> float:
    """The median over `best_of` runs of what one call takes of this thread's processor time on average: nothing here waits for anybody, and
    what else the machine does is no cost of it."""
    runs = []
    for _ in range(best_of):
        began = time.thread_time()
        for _ in range(rounds):
            call()
        runs.append((time.thread_time() - began) / rounds * 1e6)
    return statistics.median(runs)


def each(call: Callable[[], object], rounds: int) -> list[float]:
    """What each of `rounds` calls takes."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e6)
    return sorted(took)


def report(n: int) -> Report:
    return Report(devices=(DeviceReport(key=KEY, usage=DeviceUsage(resident=n * MB, cached=0, committed=n * MB), candidates=tuple(
        Candidate(id=str(i + 1), name="Model", resident=n * MB, size=n * MB, refs=3) for i in range(4))),))


def counting(folder: Path) -> dict[str, float]:
    """Reading and writing. All slots are this process's own: whose they are makes no difference to what reading costs."""
    ledger = Ledger(folder)
    slots = [ledger.take(f"process {i}", "unix:/nowhere") for i in range(PEERS)]
    for i, slot in enumerate(slots):
        slot.publish(report(i + 1))
    peers = [PeerProcess(ledger, ledger.read(slot.index), b"") for slot in slots]

    def read() -> None:
        for peer in peers:
            peer.usage(KEY)
            peer.candidates(KEY)
    numbers = iter(range(10 ** 9))

    def read_changed() -> None:
        slots[0].publish(report(next(numbers) % 1000 + 1))
        peers[0].usage(KEY)
    claims = LedgerClaims(folder, lambda: slots[0], lambda: None)

    def claim() -> None:
        with claims.hold(KEY, 1.0):
            claims.write(KEY, next(numbers) % 1000)
    same = report(5)
    slots[1].publish(same)
    found = {
        f"usage and candidates of {PEERS} processes": microseconds(read),
        "publish what has changed, and one reader parses it": microseconds(read_changed, 500),
        "publish what has not changed": microseconds(lambda: slots[1].publish(same), 500),
        "claim under the device's lock": microseconds(claim, 300),
        "look whether somebody has come or gone": microseconds(lambda: ledger.changes),
        "is a process alive (exact)": microseconds(lambda: ledger.read(slots[0].index, True), 500),
    }
    ledger.close()
    return found


def asking(folder: Path) -> dict[str, float]:
    """Asking an idle process for one byte, and its unloading of one."""
    CapacityFile.create(folder / "card", [1000 * MB]).close()
    with children((asked, folder / "run", folder / "card")) as [child]:
        child.hear()
        ledger = Ledger(folder / "run")
        with ledger.lock():
            key = auth_key(ledger.folder)
        [other] = ledger.processes()
        peer = PeerProcess(ledger, other, key)
        child.call(("load", "Unet", 1000))
        answers = []
        release = each(lambda: answers.append(peer.release(ReleaseRequest(device=KEY, bytes=1, candidate="1"))), 500)
        assert all(a.freed == 1 for a in answers)
        ping = each(peer.ping, 500)
        ledger.close()
    return {"release by an idle process, median": statistics.median(release), "  95th percentile": release[int(len(release) * 0.95)],
            "round trip to an endpoint, median": statistics.median(ping)}


BOUNDS = {f"usage and candidates of {PEERS} processes": 20.0, "release by an idle process, median": 500.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for a program")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "counting").mkdir()
        found = {**counting(Path(name) / "counting"), **asking(Path(name))}
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    if args.json:
        sys.stdout.write(json.dumps({"microseconds": found, "bounds": BOUNDS, "cpus": os.cpu_count(), "load": load}, indent=2) + "\n")
    else:
        for what, took in found.items():
            bound = f"   (to reach: under {BOUNDS[what]:.0f})" if what in BOUNDS else ""
            sys.stdout.write(f"{took:9.2f} us  {what}{bound}\n")
        sys.stdout.write(f"{os.cpu_count()} processors, load average {load}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
