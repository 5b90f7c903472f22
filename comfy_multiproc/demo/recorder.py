"""What every process holds on the card over time, and who asked whom for memory."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL = 0.01
ASKED = re.compile(r"(?:\[(?P<who>[^]]+)\] )?Process memory: asked (?P<whom>.+?) for (?P<what>.+?): (?P<outcome>\w+|no answer), (?P<size>\d+) MB")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LEVELS = ("DEBUG", "INFO")


@dataclass(frozen=True)
class Sample:
    """Bytes on the card at a moment, by process id; `claimed` are bytes admitted and not allocated yet."""
    at: float
    held: Mapping[int, int]
    claimed: Mapping[int, int]


@dataclass(frozen=True)
class Event:
    """Something worth a mark on the timeline."""
    at: float
    kind: str       # "step" (of the demonstration) and its "end", "release", "refused" (no room was given), "out of memory"
    text: str
    who: str = ""   # has given memory back
    size: int = 0   # so many MB, in the log's sense of 1024 * 1024 bytes


@dataclass
class Recording:
    """One run. Times are seconds since its beginning."""
    size: int
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    peak: int = 0
    refusals: int = 0

    @property
    def length(self) -> float:
        return self.samples[-1].at if self.samples else 0.0

    @property
    def eventful(self) -> float:
        """When the last thing began of which there is something to see: a step, or bytes on the card."""
        seen = [after.at for sample, after in zip(self.samples, self.samples[1:]) if any(sample.held.values()) or any(sample.claimed.values())]
        return max([*seen, *(event.at for event in self.events if event.kind != "end")], default=0.0)

    def releases(self) -> list[Event]:
        return [event for event in self.events if event.kind == "release"]


class Outstanding:
    """What of the claims has not appeared yet.

    A process lowers its claim every few hundredths of a second while its bytes arrive. What has arrived since is in both
    figures, on the card and as claimed, and is taken from the claim here.
    """

    def __init__(self) -> None:
        self._set: dict[int, tuple[int, int]] = {}      # pid -> its claim, and what it held when that was first seen

    def of(self, held: Mapping[int, int], claimed: Mapping[int, int]) -> dict[int, int]:
        """The claims, less what of them is on the card by now. Both in bytes by process id."""
        left = {}
        for pid, claim in claimed.items():
            before, base = self._set.get(pid, (-1, 0))
            now = held.get(pid, 0)
            if claim != before:
                base = now
            self._set[pid] = claim, base
            left[pid] = max(0, claim - max(0, now - base))
        return left


class Recorder:
    """Samples in a thread from entering to leaving. `read` gives (held, claimed, names) by process id; `logs` are followed.

    What `read` raises is raised at leaving: a recording that broke off would have seen nothing go wrong.
    """

    def __init__(self, size: int, read: Callable[[], tuple[dict[int, int], dict[int, int], dict[int, str]]], logs: Mapping[str, Path]):
        self.recording = Recording(size)
        self._read = read
        self._logs = {name: [path, 0] for name, path in logs.items()}
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._outstanding = Outstanding()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="demo recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._failure is not None and kind is None:
            raise self._failure

    def mark(self, kind: str, text: str) -> None:
        """Put a mark at this moment."""
        self.recording.events.append(Event(time.monotonic() - self._began, kind, text))

    def _run(self) -> None:
        try:
            while not self._stop.wait(INTERVAL):
                self._sample()
            self._sample()
        except Exception as error:
            self._failure = error

    def _sample(self) -> None:
        held, claimed, names = self._read()
        claimed = self._outstanding.of(held, claimed)
        now = time.monotonic() - self._began
        self.recording.names.update(names)
        last = self.recording.samples[-1] if self.recording.samples else None
        if last is None or (last.held, last.claimed) != (held, claimed):
            if last is not None:
                self.recording.samples.append(Sample(now, last.held, last.claimed))
            self.recording.samples.append(Sample(now, held, claimed))
        for name, entry in self._logs.items():
            self._follow(name, entry, now)

    def _follow(self, name: str, entry: list, now: float) -> None:
        path, position = entry
        try:
            with path.open("rb") as log:
                log.seek(position)
                data = log.read()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        entry[1] = position + whole
        for line in COLOUR.sub("", data[:whole].decode("utf-8", "replace")).splitlines():
            if asked := ASKED.search(line):
                who = f"worker {asked['who']}" if asked["who"] and asked["who"] not in LEVELS else name
                kind, size = "release" if asked["outcome"] == "freed" else "refused", int(asked["size"])
                whom = asked["whom"].partition(" (pid")[0]
                self.recording.events.append(Event(now, kind, f"{who} asked {whom} for {asked['what']}: {size} MB {asked['outcome']}", whom, size))
