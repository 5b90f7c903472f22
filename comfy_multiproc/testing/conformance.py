"""Whether a provider keeps the rules of ProcessMemoryProvider: for its author's own tests.

    def test_my_provider():
        check_provider(lambda: MyProvider(start_my_server()), device="cpu:0", close=MyProvider.stop)

Each rule gets a provider of its own from `make_provider`; it has to hold something on `device` that it can give back.
Everything runs with a bound, so a provider that hangs fails the check and does not hang it.
"""

from __future__ import annotations

import queue
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comfy.process_memory import (API_VERSION, Candidate, DeviceUsage, Kind, Outcome, ProcessMemoryProvider, Reason, Receipt, ReleaseRequest,
                                  registry)

COUNT_LIMIT = 0.005
"""Seconds that a count may take (the median of several)."""

BLOCK_LIMIT = 0.1
"""Seconds that a count may take while a request runs."""

DEADLINE = 1.0
"""Seconds that the requests of this check may take."""

GRACE = 0.5
"""Seconds beyond a deadline that are still forgiven, for the scheduler."""

UNKNOWN_DEVICE = "cuda:00000000-0000-0000-0000-000000000000"
SIZES = ("resident", "cached", "fixed", "scratch", "claimed", "committed", "reclaimable")

Make = Callable[[], ProcessMemoryProvider]


class NotConforming(AssertionError):
    """A provider breaks rules; the message lists them."""


class _Broken(Exception):
    """How a rule is broken."""


class _HoldsNothing(Exception):
    """The rule is about what the provider holds, and that is nothing."""


@dataclass
class Report:
    """What was checked. `broken` maps a rule to how it is broken; `untried` are rules that a provider which holds nothing cannot show."""

    name: str
    kept: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    device: str = ""

    @property
    def ok(self) -> bool:
        return not self.broken and not self.untried

    def text(self) -> str:
        """One line for each rule."""
        untried = f", {len(self.untried)} not tried" if self.untried else ""
        lines = [f"{self.name}: {len(self.kept)} rules kept, {len(self.broken)} broken{untried}"]
        if self.untried:
            lines.append(f"  it holds nothing on {self.device}: make_provider has to return a provider whose process holds something there (is that "
                         "the device's key in its usage, and has it loaded what it is to give back?)")
        lines += [f"  kept    {rule}" for rule in self.kept]
        lines += [f"  BROKEN  {rule}: {how}" for rule, how in self.broken.items()]
        lines += [f"  NOT TRIED  {rule}" for rule in self.untried]
        return "\n".join(lines) + "\n"


def check_provider(make_provider: Make, *, device: str = "cpu:0", close: Callable[[Any], object] = lambda provider: None,
                   say: Callable[[str], object] | None = None) -> Report:
    """Run every rule against providers made by `make_provider` and print the outcome.

    Raises NotConforming, with the outcome for its message, if a rule is broken or could not be tried because the provider holds
    nothing on `device`. `device` is the device key that the provider's process holds memory on; `close` is called with each
    provider at the end of its rule; `say` takes the text instead of standard output.
    """
    report = Report(name="provider", device=device)
    for rule in RULES:
        words = (rule.__doc__ or "").splitlines()[0].rstrip(".")
        provider = make_provider()
        try:
            rule(provider, device)
        except _Broken as how:
            report.broken[words] = str(how)
        except _HoldsNothing:
            report.untried.append(words)
        except Exception as error:      # what it has answered is so odd that the rule itself trips over it
            report.broken[words] = f"{type(error).__name__}: {error}"
        else:
            report.kept.append(words)
        finally:
            close(provider)
        report.name = type(provider).__name__
        if rule is is_a_provider and report.broken:
            break
    if not report.ok:
        raise NotConforming(report.text())
    (say or sys.stdout.write)(report.text())
    return report


# running something with a bound

class Running:
    """A call on a thread of its own."""

    def __init__(self, what: str, call: Callable[..., Any], *args: Any) -> None:
        self.what = what
        self._results: queue.SimpleQueue[tuple[Any, float, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(call, args), daemon=True, name=f"conformance: {what}").start()

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Here, since starting a thread takes a tenth of a second where many others want the processor, and that is not the call's doing.
        began = time.perf_counter()
        try:
            result = call(*args)
            self._results.put((result, time.perf_counter() - began, None))
        except BaseException as error:
            self._results.put((None, 0.0, error))

    def result(self, seconds: float) -> tuple[Any, float]:
        """What it returned and how long it took; broken if it raised or does not come back."""
        try:
            result, took, error = self._results.get(timeout=seconds)
        except queue.Empty:
            raise _Broken(f"{self.what} has not come back after {seconds:.1f} s") from None
        if error is not None:
            raise _Broken(f"{self.what} raised {type(error).__name__}: {error}")
        return result, took


def within(seconds: float, what: str, call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result of a call and how long it took; broken if it raises or does not come back."""
    return Running(what, call, *args).result(seconds)


def count(provider: ProcessMemoryProvider, method: str, *args: Any) -> Any:
    """A proper count; broken without one."""
    counted = within(2.0, method, getattr(provider, method), *args)[0]
    if problem := registry.problem_with(counted, registry.KINDS[method]):
        raise _Broken(f"{method} {problem}")
    return counted


def request(device: str | None, size: int, seconds: float = DEADLINE, **more: Any) -> ReleaseRequest:
    return ReleaseRequest(device=device, bytes=size, deadline=time.monotonic() + seconds, origin="conformance check", **more)


def ask(provider: ProcessMemoryProvider, method: str, asked: ReleaseRequest) -> Receipt:
    """A proper receipt in time; broken without one."""
    receipt, _ = within(asked.remaining() + GRACE, method, getattr(provider, method), asked)
    if problem := registry.problem_with(receipt, Receipt):
        raise _Broken(f"{method} {problem}")
    if receipt.outcome is not Outcome.FREED and receipt.freed:
        raise _Broken(f"{method} returned {receipt.outcome.value} with freed={receipt.freed}; only FREED has freed anything")
    return receipt


def held(usage: DeviceUsage) -> int:
    return (usage.resident or 0) + (usage.cached or 0)


def needs_holdings(provider: ProcessMemoryProvider, device: str) -> None:
    """Ends the rule if there is nothing on the device that could be given back. Unknown is not nothing."""
    usage = count(provider, "usage", device)
    if usage.resident == 0 and not usage.cached and not any(found.resident for found in count(provider, "candidates", device)):
        raise _HoldsNothing


def give_back(provider: ProcessMemoryProvider, device: str) -> tuple[Candidate | None, ReleaseRequest]:
    """A request for the largest thing that the provider says it could give back."""
    needs_holdings(provider, device)
    candidates = [found for found in count(provider, "candidates", device) if not found.in_use and found.resident]
    largest = max(candidates, key=lambda found: found.resident, default=None)
    size = largest.resident if largest is not None else max(1, held(count(provider, "usage", device)))
    return largest, request(device, size, candidate=None if largest is None else largest.id)


# the rules

def is_a_provider(provider: Any, device: str) -> None:
    """it is a ProcessMemoryProvider of this version with a name."""
    if not isinstance(provider, ProcessMemoryProvider):
        raise _Broken(f"{type(provider).__name__} is no subclass of ProcessMemoryProvider")
    if provider.api_version[0] != API_VERSION[0]:
        raise _Broken(f"api_version is {provider.api_version}, this interface is {API_VERSION}")
    if not isinstance(provider.name, str) or not provider.name:
        raise _Broken(f"name is {provider.name!r}")


def counts_what_it_says(provider: ProcessMemoryProvider, device: str) -> None:
    """counting gives whole, non-negative bytes."""
    for method, args in (("usage", (device,)), ("candidates", (device,)), ("ram", ()), ("waiting", ())):
        count(provider, method, *args)


def candidates_are_part_of_the_usage(provider: ProcessMemoryProvider, device: str) -> None:
    """candidates have ids of their own and hold no more than the usage says."""
    candidates, usage = count(provider, "candidates", device), count(provider, "usage", device)
    if not candidates:
        needs_holdings(provider, device)
    if len({found.id for found in candidates}) != len(candidates):
        raise _Broken("two candidates have the same id")
    for found in candidates:
        if found.kind is Kind.MODEL and found.size < found.resident:
            raise _Broken(f"{found.id}: resident={found.resident} of size={found.size}")
    resident = sum(found.resident for found in candidates if found.kind is Kind.MODEL)
    if usage.resident is not None and resident > usage.resident:
        raise _Broken(f"candidates hold {resident} bytes, the usage says {usage.resident}")


def counts_at_once(provider: ProcessMemoryProvider, device: str) -> None:
    """counting is answered from local state, in microseconds to a few milliseconds."""
    for method, args in (("usage", (device,)), ("candidates", (device,)), ("ram", ())):
        took = statistics.median(within(5.0, method, getattr(provider, method), *args)[1] for _ in range(5))
        if took > COUNT_LIMIT:
            raise _Broken(f"{method} takes {took * 1000:.1f} ms")


def counts_on_any_thread(provider: ProcessMemoryProvider, device: str) -> None:
    """counting works on several threads at once."""
    go = threading.Barrier(4)

    def many() -> None:
        go.wait(5)
        for _ in range(50):
            provider.usage(device)
            provider.candidates(device)

    for running in [Running("counting on four threads at once", many) for _ in range(4)]:
        running.result(10.0)


def counts_while_a_request_runs(provider: ProcessMemoryProvider, device: str) -> None:
    """counting does not wait for a request that is running."""
    _, asked = give_back(provider, device)
    done = threading.Event()

    def release() -> None:
        try:
            provider.release(asked)
        finally:
            done.set()

    threading.Thread(target=lambda: _swallow(release), daemon=True).start()
    end = time.monotonic() + DEADLINE + GRACE
    slow = []
    while time.monotonic() < end:
        for method in ("usage", "candidates"):
            took = within(DEADLINE + 2 * GRACE, f"{method} during a request", getattr(provider, method), device)[1]
            slow += [took] if took > BLOCK_LIMIT else []
        if done.wait(0.001):
            break
    # one alone may be the scheduler's doing; a lock shows each time, and long
    if len(slow) > 1 or any(took > 4 * BLOCK_LIMIT for took in slow):
        raise _Broken(f"a count took {max(slow) * 1000:.0f} ms while a request was running")


def does_not_know_other_devices(provider: ProcessMemoryProvider, device: str) -> None:
    """on a device it does not know it holds nothing, has no candidates and gives back nothing."""
    usage = count(provider, "usage", UNKNOWN_DEVICE)
    if any(getattr(usage, size) for size in SIZES) or usage.resident is None:
        raise _Broken(f"usage of a device that does not exist is {usage}")
    if count(provider, "candidates", UNKNOWN_DEVICE):
        raise _Broken("there are candidates on a device that does not exist")
    receipt = ask(provider, "release", request(UNKNOWN_DEVICE, 1 << 20))
    if receipt.outcome is Outcome.FREED:
        raise _Broken(f"release on a device that does not exist freed {receipt.freed} bytes")


def keeps_its_deadline(provider: ProcessMemoryProvider, device: str) -> None:
    """a request ends in a receipt by its deadline."""
    _, asked = give_back(provider, device)
    ask(provider, "release", asked)


def answers_a_request_that_is_late(provider: ProcessMemoryProvider, device: str) -> None:
    """a request whose deadline has passed is answered at once."""
    _, asked = give_back(provider, device)
    ask(provider, "release", request(device, asked.bytes, seconds=0.0, candidate=asked.candidate))


def tells_the_truth(provider: ProcessMemoryProvider, device: str) -> None:
    """a receipt says what really left the device: no more than the usage has fallen by."""
    before = count(provider, "usage", device)
    _, asked = give_back(provider, device)
    receipt = ask(provider, "release", asked)
    after = count(provider, "usage", device)
    if None in (before.resident, after.resident):
        return
    fallen = held(before) - held(after)
    if receipt.outcome is Outcome.FREED and receipt.freed > fallen:
        raise _Broken(f"the receipt says that {receipt.freed} bytes were freed, the usage has fallen by {fallen}")
    if receipt.outcome is Outcome.GONE and held(after):
        raise _Broken(f"the receipt says that the process is dead, the usage that it holds {held(after)} bytes")
    if receipt.outcome in (Outcome.BUSY, Outcome.NOTHING) and fallen > 0:
        raise _Broken(f"the receipt says {receipt.outcome.name}, which means that all is still there, and the usage has fallen by {fallen}")
    if receipt.outcome is Outcome.NOTHING and after.busy is False:
        for found in count(provider, "candidates", device):
            if found.id == asked.candidate and found.resident and not found.in_use:
                raise _Broken(f"the receipt says that there was nothing to give, the candidate {found.id} holds {found.resident} bytes and is not in use")
    if receipt.resident is not None and after.resident is not None and receipt.resident < after.resident:
        raise _Broken(f"the receipt says that {receipt.resident} bytes stay resident, the usage says {after.resident}")


def survives_a_candidate_that_is_gone(provider: ProcessMemoryProvider, device: str) -> None:
    """a candidate that does not exist any more is nothing to give, and no error."""
    receipt = ask(provider, "release", request(device, 1, candidate=f"no such thing {uuid.uuid4().hex}"))
    if receipt.outcome is Outcome.FREED:
        raise _Broken("release freed something else than the candidate it was asked for")


def takes_any_amount(provider: ProcessMemoryProvider, device: str) -> None:
    """a request for more than it holds is no error."""
    needs_holdings(provider, device)
    ask(provider, "release", request(device, 1 << 62))


def answers_every_request(provider: ProcessMemoryProvider, device: str) -> None:
    """every other request ends in a receipt, too."""
    for method, place, reason in (("release_pins", None, Reason.PINS), ("release_ram", None, Reason.RAM), ("unload", device, Reason.USER_FREE),
                                  ("reset", None, Reason.USER_FREE)):
        ask(provider, method, request(place, 1 << 20, reason=reason))


def is_told_at_once(provider: ProcessMemoryProvider, device: str) -> None:
    """what it is told (claim, interrupt) and a capture it is to wait for return at once."""
    def capture() -> None:
        with provider.exclusive(device):
            pass

    for what, args in (("claim", (device, 1 << 20)), ("claim", (device, 0)), ("interrupt", ("prompt", True)), ("interrupt", (None, False))):
        # the shortest of three: one alone may be the scheduler's doing
        took = min(within(2.0, what, getattr(provider, what), *args)[1] for _ in range(3))
        if took > BLOCK_LIMIT:
            raise _Broken(f"{what} takes {took * 1000:.0f} ms")
    within(2.0, "exclusive", capture)


def makes_no_request_itself(provider: ProcessMemoryProvider, device: str) -> None:
    """while it answers a request it makes none."""
    with _probe(device) as probe:
        _, asked = give_back(provider, device)
        ask(provider, "release", asked)
        ask(provider, "unload", request(device, 1 << 20))
    if probe.asked:
        raise _Broken(f"it asked others for memory while it answered a request ({', '.join(sorted(set(probe.asked)))})")


RULES: tuple[Callable[[Any, str], None], ...] = (
    is_a_provider, counts_what_it_says, candidates_are_part_of_the_usage, counts_at_once, counts_on_any_thread,
    counts_while_a_request_runs, does_not_know_other_devices, keeps_its_deadline, answers_a_request_that_is_late, tells_the_truth,
    survives_a_candidate_that_is_gone, takes_any_amount, answers_every_request, is_told_at_once, makes_no_request_itself)


class _Probe(ProcessMemoryProvider):
    """Another peer, which should hear nothing."""

    inline_counting = True
    name = "conformance probe"

    def __init__(self, device: str) -> None:
        self.device = device
        self.asked: list[str] = []

    def usage(self, device: str) -> DeviceUsage:
        size = 1 << 40 if device == self.device else 0
        return DeviceUsage(resident=size, cached=0, fixed=0, scratch=0, claimed=0, committed=size, reclaimable=size, busy=False)

    def candidates(self, device: str) -> Sequence[Candidate]:
        return [Candidate(id="probe", name="probe", resident=1 << 40, size=1 << 40)] if device == self.device else []

    def release(self, request: ReleaseRequest) -> Receipt:
        self.asked.append(request.reason.value)
        return Receipt(outcome=Outcome.NOTHING)


@contextmanager
def _probe(device: str) -> Iterator[_Probe]:
    probe = _Probe(device)
    registry.register(probe)
    try:
        yield probe
    finally:
        registry.unregister(probe)


def _swallow(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:
        return  # another rule is about that
