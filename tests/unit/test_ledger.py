"""The ledger: what one process writes is what every other reads, whatever happens to either of them."""
from __future__ import annotations

import errno
import os
import resource
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest

from comfy.process_memory.provider import Candidate, DeviceUsage, Kind, RamUsage
from comfy_multiproc import ledger as ledgers
from comfy_multiproc.claims import LedgerClaims
from comfy_multiproc.ledger import Ledger, LedgerError, runtime_folder
from comfy_multiproc.liveness import alive, process_start, stopped
from comfy_multiproc.peer import PeerProcess, Peers
from comfy_multiproc.records import (BODY, CANDIDATES, CLAIMS, DEVICES, FILE_SIZE, HEADER, HEADER_SIZE, SLOT_SIZE, SLOTS, DeviceReport, Report)

from tests.unit.processes import children

MB = 1 << 20


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    yield made
    made.close()


def a_report(resident=100 * MB, models=2, key="cuda:1", **usage):
    return Report(ram=RamUsage(resident=5 * MB, pinned=MB), devices=(DeviceReport(
        key=key, allocator=resident + 7, pager=3, total=1000 * MB,
        usage=DeviceUsage(resident=resident, cached=None, committed=2 * resident, reclaimable=resident, **usage),
        candidates=tuple(Candidate(id=str(i + 1), name=f"Model{i}", resident=resident // models, size=resident, refs=i + 3,
                                   in_use=i == 0) for i in range(models))),))


def child_holds(pipe, folder, resident):
    """Lists itself with `resident` bytes; then does as it is told."""
    ledger = Ledger(folder)
    slot = ledger.take(f"child with {resident}", "unix:/nowhere")
    if slot is not None:
        slot.publish(a_report(resident))
    pipe.send(None if slot is None else slot.index)
    while (order := pipe.recv()) is not None:
        if order == "claim":
            slot.claim("cuda:1", 9 * MB)
        elif order == "half":
            # The state in which SIGKILL or SIGSTOP in the middle of a writing leaves the slot.
            ledger.words[slot._at] |= 1
            ledger.words[slot._at + BODY // 8 + 8] = 12345
        elif order == "whole":
            ledger.words[slot._at] += 1
        elif order == "lock":
            with ledger.lock():
                pipe.send("locked")
                pipe.recv()
        elif order == "read":
            pipe.send(sorted(p.name for p in ledger.processes(exact=True)))
            continue
        pipe.send("done")
    if slot is not None:
        slot.close()
    pipe.send("left")


def test_what_one_process_writes_is_what_another_reads(tmp_path):
    with children((child_holds, tmp_path, 77 * MB)) as [child]:
        child.hear()
        ledger = Ledger(tmp_path)
        [process] = ledger.processes()
        assert (process.pid, process.name, process.address) == (child.pid, "child with " + str(77 * MB), "unix:/nowhere")
        assert process.start == process_start(child.pid)
        written = a_report(77 * MB).devices[0]
        read = process.devices["cuda:1"]
        assert read.candidates == written.candidates
        assert (read.usage.resident, read.usage.cached, read.usage.fixed) == (77 * MB, None, None), "unknown stays unknown"
        assert (read.usage.committed, ledger.claimed(process.slot, "cuda:1"), read.usage.busy) == (154 * MB, 0, False)
        assert (read.allocator, read.pager, read.total) == (77 * MB + 7, 3, 1000 * MB)
        assert (process.ram.resident, process.ram.pinned, process.ram.backups) == (5 * MB, MB, None)
        child.call("claim")
        assert ledger.claimed(process.slot, "cuda:1") == 9 * MB
        ledger.close()


def test_flags_and_claims_of_a_device_that_nothing_is_on(ledger):
    slot = ledger.take("me")
    slot.busy(True, prompt=True)
    slot.claim("cuda:2", 5)
    slot.capture("cuda:3", True)
    process = ledger.read(slot.index)
    assert process.busy and process.prompts == 1
    assert process.devices["cuda:3"].usage.capturing and process.devices["cuda:3"].usage.resident == 0
    assert ledger.claimed(slot.index, "cuda:2") == 5 and ledger.claimed(slot.index, "cuda:3") == 0
    slot.claim("cuda:4", 6)
    slot.publish(a_report(key="cuda:2"))
    assert ledger.claimed(slot.index, "cuda:2") == 5, "a report does not end a claim"
    slot.claim("cuda:2", 0)
    slot.capture("cuda:3", False)
    slot.busy(False)
    process = ledger.read(slot.index)
    assert not process.busy and process.devices.keys() == {"cuda:2"}
    assert (ledger.claimed(slot.index, "cuda:2"), ledger.claimed(slot.index, "cuda:4")) == (0, 6)
    for n in range(CLAIMS - 2):
        slot.claim(f"more:{n}", 1)
    with pytest.raises(ValueError, match="48 devices"):
        slot.claim("one too many", 1)


def test_sixteen_cards_and_what_is_claimed_beside_them_have_room_and_more_ends_no_load(ledger):
    """A card, the models that are meant for it, pins and headroom: each is a claim."""
    slot = ledger.take("me")
    claims = LedgerClaims(ledger.folder, lambda: slot, lambda: None)
    keys = [f"cuda:{n}{more}" for n in range(DEVICES) for more in ("", "+meant")] + ["ram:pins", "ram:headroom"]
    for key in keys:
        claims.write(key, 7)
    assert [ledger.claimed(slot.index, key) for key in keys] == [7] * 34
    for n in range(CLAIMS):
        claims.write(f"npu:{n}", 5)
    assert claims.own("npu:47") == 5


def test_long_names_odd_characters_and_too_many_candidates(ledger):
    slot = ledger.take("ä" * 100 + "\0rest", "tcp:1")
    many = DeviceReport(key="d" * 100, usage=DeviceUsage(resident=2**70), candidates=tuple(
        Candidate(id=str(i), name="M\N{SNOWMAN}" * 40, kind=Kind.CACHE, resident=-5, size=2**80) for i in range(CANDIDATES + 5)))
    slot.publish(Report(devices=(many,)))
    process = ledger.read(slot.index)
    assert process.name == "ä" * 31
    [device] = process.devices.values()
    assert len(device.candidates) == CANDIDATES and device.candidates[0].kind is Kind.CACHE
    assert device.candidates[0].resident == 0 and device.candidates[0].size == 2**64 - 2
    assert len(device.key) == 63 and device.usage.resident is not None, "a figure that is too large is not the unknown one"


def test_a_seventeenth_device_is_refused_and_nothing_is_lost(ledger):
    slot = ledger.take("me")
    slot.publish(a_report())
    with pytest.raises(ValueError, match="16 devices, not 17"):
        slot.publish(Report(devices=tuple(DeviceReport(key=f"cuda:{i}", usage=DeviceUsage(resident=i)) for i in range(DEVICES + 1))))
    assert ledger.read(slot.index).devices.keys() == {"cuda:1"}


def test_nothing_is_written_when_nothing_has_changed(ledger):
    slot = ledger.take("me")
    slot.publish(a_report())
    before = ledger.read(slot.index)
    slot.publish(a_report())
    assert ledger.read(slot.index) is before
    slot.publish(a_report(resident=101 * MB))
    assert ledger.read(slot.index) is not before


def test_age_is_since_the_owner_last_confirmed(ledger, monkeypatch):
    slot = ledger.take("me")
    slot.publish(a_report())
    now = time.monotonic()
    monkeypatch.setattr(ledgers.time, "monotonic", lambda: now + 100)
    assert 99 < ledger.age(slot.index) < 110
    monkeypatch.undo()
    slot.confirm()
    assert ledger.age(slot.index) < 60
    # Setting the clock of the machine changes nothing: no date is written.
    monkeypatch.setattr(ledgers.time, "time", lambda: 0.0)
    assert ledger.age(slot.index) < 60


@pytest.mark.parametrize("order", [None, "claim", "half"])
def test_killed_at_any_point_it_is_gone_and_its_slot_is_used_again(ledger, tmp_path, order):
    with children((child_holds, tmp_path, 50 * MB)) as [child]:
        index = child.hear()
        if order:
            child.call(order)
        child.kill()
        assert list(ledger.processes(exact=True)) == []
        slot = ledger.take("next")
        assert slot.index == index
        slot.publish(a_report(resident=3))
        process = ledger.read(index)
        assert process.name == "next" and process.settled and process.devices["cuda:1"].usage.resident == 3
        assert ledger.claimed(index, "cuda:1") == 0


def test_gone_without_looking_exactly_within_a_moment(ledger, tmp_path):
    with children((child_holds, tmp_path, 50 * MB)) as [child]:
        child.hear()
        assert len(list(ledger.processes())) == 1
        child.kill()
        gone = threading.Event()
        deadline = time.monotonic() + 20
        while not gone.is_set() and time.monotonic() < deadline:
            if not list(ledger.processes()):
                gone.set()
        assert gone.is_set()


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_dead():
    """While this one may open no more files, say."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    start = process_start(os.getppid())
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        looked = alive(os.getppid(), start), stopped(os.getppid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert looked == (True, False)


def test_what_a_process_has_left_that_is_now_another_program_is_gone(ledger):
    """os.execv, with which servers restart themselves, keeps the pid and the start."""
    found: list[str] = []
    peers = Peers(ledger, (0, 0), lambda process: PeerProcess(ledger, process, b""), lambda peer: found.append(f"+{peer.name}"),
                  lambda peer: found.append(f"-{peer.name}"))
    ledger.take("somebody else's")
    before = ledger.take("before")
    before.claim("cuda:1", 5)
    before.publish(a_report())
    peers.refresh()
    [old] = [peer for peer in peers if peer.name == "before"]
    assert old.usage("cuda:1").claimed == 5
    ledger.words[ledger.sequence_place(0) + 1] = 1      # a slot that is free is nearer
    after = ledger.take("after", only=True)
    assert [p.name for p in ledger.processes(exact=True)] == ["after"] and after.index == 0
    peers.refresh()
    assert found[-2:] == ["-before", "+after"]
    assert old.usage("cuda:1").claimed == 0 and old.usage("cuda:1").resident == 0
    third = ledger.take("third", only=True)
    peers.refresh()
    assert third.index == after.index and found[-2:] == ["-after", "+third"], "in the same slot, too"


def test_a_zombie_is_gone(ledger):
    slot = ledger.take("me")
    words = ledger.words
    with subprocess.Popen(["sleep", "60"]) as child:
        words[slot._at + 1], words[slot._at + 2] = child.pid, process_start(child.pid)
        assert [p.pid for p in ledger.processes(exact=True)] == [child.pid]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)     # ended, and not yet looked after
        assert list(ledger.processes(exact=True)) == []


def test_killed_while_it_holds_the_lock(ledger, tmp_path):
    with children((child_holds, tmp_path, 50 * MB)) as [child]:
        child.hear()
        child.tell("lock")
        assert child.hear() == "locked"
        child.kill()
        assert ledger.take("next") is not None


def test_stopped_while_it_holds_the_lock_says_so_within_the_bound(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr(ledgers, "LOCK_SECONDS", 0.2)
    with children((child_holds, tmp_path, 50 * MB)) as [child]:
        child.hear()
        child.tell("lock")
        assert child.hear() == "locked"
        child.stop()
        with pytest.raises(LedgerError, match="stopped ComfyUI process"):
            ledger.take("next")


def test_stopped_in_the_middle_of_writing_its_last_word_counts_as_busy(ledger, tmp_path):
    with children((child_holds, tmp_path, 50 * MB)) as [child]:
        child.hear()
        [before] = ledger.processes()
        child.call("half")
        child.call("claim")
        child.stop()
        [process] = ledger.processes()
        assert ledger.claimed(process.slot, "cuda:1") == 9 * MB, "a claim is never read from yesterday"
        assert not process.settled and process.busy
        assert process.devices["cuda:1"].usage.resident == before.devices["cuda:1"].usage.resident
        # Whoever has never read it knows that somebody is there, and nothing else.
        [process] = Ledger(tmp_path).processes()
        assert process.pid == child.pid and not process.settled and process.devices == {}
        child.resume()
        child.call("whole")
        [process] = ledger.processes()
        assert process.settled and not process.busy


def test_a_pid_that_was_given_again_is_another_process(ledger):
    slot = ledger.take("me")
    words = ledger.words
    words[slot._at + 2] += 1        # the same pid, started at another time
    assert ledger.read(slot.index, exact=True) is None


def test_sixty_four_processes_and_one_more(ledger, tmp_path):
    # Slots of real, live processes: this one stands for the first 63.
    for i in range(SLOTS - 1):
        assert ledger.take(f"process {i}") is not None
    with children((child_holds, tmp_path, MB), (child_holds, tmp_path, MB)) as [last, more]:
        slots = {last: last.hear(), more: more.hear()}
        assert set(slots.values()) == {SLOTS - 1, None}
        listed, unlisted = sorted(slots, key=lambda child: slots[child] is None)
        assert len(unlisted.call("read")) == SLOTS, "whoever is not listed still sees the others"
        listed.kill()
        assert ledger.take("the next one gets its slot").index == SLOTS - 1


def test_a_slot_that_is_given_back_is_free_at_once(ledger):
    changes = ledger.changes
    slot = ledger.take("me")
    slot.close()
    assert list(ledger.processes()) == [] and ledger.changes == changes + 2
    assert ledger.take("again").index == slot.index


def damage_magic(data):
    return b"\xff" * 8 + data[8:]


def damage_version(data):
    return data[:8] + struct.pack("<Q", 99) + data[16:]


def damage_boot(data):
    return data[:16] + struct.pack("<Q", 1) + data[24:]


@pytest.mark.parametrize("damage", [damage_magic, damage_version, damage_boot, lambda data: data[:100], lambda data: b"",
                                    lambda data: data + b"x"])
def test_a_damaged_file_or_one_of_another_boot_is_made_anew(tmp_path, damage):
    old = Ledger(tmp_path)
    old.take("me")
    path = old.path
    damaged = damage(path.read_bytes())
    other = tmp_path / "other"
    other.write_bytes(damaged)
    os.replace(other, path)
    new = Ledger(tmp_path)
    assert list(new.processes()) == [] and path.stat().st_size == FILE_SIZE
    assert old.replaced and not new.replaced
    assert len(list(old.processes())) == 1, "who has the old file open is not cut off from it"
    assert new.take("me").index == 0
    new.close()


def test_all_of_the_file_has_its_place_from_the_start(ledger):
    """A page that finds no room when it is first written ends the process that writes it."""
    assert os.stat(ledger.path).st_blocks * 512 >= FILE_SIZE


def test_random_bytes_in_the_slots_are_no_processes_and_no_crash(tmp_path):
    made = Ledger(tmp_path)
    first = HEADER_SIZE
    made._map[first:first + 8 * SLOT_SIZE] = os.urandom(8 * SLOT_SIZE)
    # One with a live owner: everything but its name and address is noise.
    at = first // 8
    made.words[at] = 8
    made.words[at + 1], made.words[at + 2] = os.getpid(), process_start(os.getpid())
    processes = list(made.processes())
    assert [p.pid for p in processes] == [os.getpid()]
    assert len(processes[0].devices) <= DEVICES
    assert made.take("me") is not None
    made.close()


def test_only_this_user_can_read_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COMFY_MULTIPROC_RUNTIME", str(tmp_path / "run"))
    ledger = Ledger()
    assert (ledger.folder.stat().st_mode & 0o777, ledger.path.stat().st_mode & 0o777) == (0o700, 0o600)
    os.chmod(tmp_path / "run", 0o755)
    Ledger().close()
    assert ledger.folder.stat().st_mode & 0o777 == 0o700, "a folder that others can look into is closed again"
    ledger.close()


def test_a_folder_that_cannot_be_used_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMFY_MULTIPROC_RUNTIME", str(tmp_path / "file"))
    with pytest.raises(LedgerError, match=r"file.*COMFY_MULTIPROC_RUNTIME"):
        runtime_folder()
    os.symlink(tmp_path, tmp_path / "link")
    monkeypatch.setenv("COMFY_MULTIPROC_RUNTIME", str(tmp_path / "link"))
    with pytest.raises(LedgerError, match="not a folder"):
        runtime_folder()
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setenv("COMFY_MULTIPROC_RUNTIME", str(tmp_path / "open"))

    def chmod(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    with monkeypatch.context() as patch, pytest.raises(LedgerError, match=r"open private: Read-only.*COMFY_MULTIPROC_RUNTIME"):
        patch.setattr(os, "chmod", chmod)
        runtime_folder()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be two users")
def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setenv("COMFY_MULTIPROC_RUNTIME", str(folder))
    ledger = Ledger()
    ledger.take("me")
    os.chown(folder, 65534, 65534)
    with pytest.raises(LedgerError, match="belongs to another user"):
        runtime_folder()
    ledger.close()


def test_the_folder_is_the_same_with_and_without_the_login_shells_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("COMFY_MULTIPROC_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == tmp_path / "comfyui-multiproc"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr(ledgers.tempfile, "gettempdir", lambda: str(tmp_path))
    assert runtime_folder() in (Path(f"/run/user/{os.getuid()}/comfyui-multiproc"), tmp_path / f"comfyui-multiproc-{os.getuid()}")


def test_reading_needs_no_process_and_no_ledger_is_said_so(tmp_path):
    with pytest.raises(LedgerError, match="no ComfyUI process"):
        Ledger(tmp_path, create=False)
    Ledger(tmp_path).take("me")
    reader = Ledger(tmp_path, create=False)
    assert [p.name for p in reader.processes()] == ["me"]
    reader.close()


def test_a_reader_never_sees_half_of_a_writing(tmp_path):
    """One thread writes reports in which every figure is the same number; whatever is read must be one of them, whole."""
    ledger = Ledger(tmp_path)
    slot = ledger.take("me")
    reader = Ledger(tmp_path, create=False)
    wrong: list[object] = []
    done = threading.Event()

    def write():
        for n in range(1, 400):
            slot.publish(Report(devices=tuple(DeviceReport(key=f"cuda:{d}", usage=DeviceUsage(resident=n, cached=n, committed=n), candidates=tuple(
                Candidate(id=str(n), name=str(n), resident=n, size=n, refs=n) for _ in range(n % 8))) for d in range(1 + n % 5))))
        done.set()
    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        process = reader.read(slot.index)
        if not process.settled or not process.devices:
            continue
        n = process.devices["cuda:0"].usage.resident
        if len(process.devices) != 1 + n % 5 or any(
                {d.usage.resident, d.usage.cached, d.usage.committed} != {n} or [c.id for c in d.candidates] != [str(n)] * (n % 8)
                for d in process.devices.values()):
            wrong.append(process)
    thread.join()
    assert not wrong
    reader.close()
    ledger.close()


def test_the_layout_is_the_one_that_is_written_down(ledger):
    slot = ledger.take("name", "unix:/address")
    slot.publish(a_report())
    slot.claim("cuda:1", 7)
    raw = ledger.path.read_bytes()
    assert HEADER.unpack_from(raw)[1] == 1 and len(raw) == FILE_SIZE == 4096 + 64 * SLOT_SIZE
    at = 4096 + slot.index * SLOT_SIZE
    words = struct.unpack_from("<16Q", raw, at)
    assert words[0] % 2 == 0 and words[1] == os.getpid() and words[7] == 1 and words[8] == 5 * MB and words[10] == 2**64 - 1
    assert raw[at + 128:].startswith(b"name\0") and raw[at + 192:].startswith(b"unix:/address\0")
    claims = at + 384
    assert struct.unpack_from("<4Q", raw, claims)[1:3] == (7, 0)
    device = claims + 768
    assert raw[device:].startswith(b"cuda:1\0")
    figures = struct.unpack_from("<16Q", raw, device + 64)
    assert figures[0] == 100 * MB and figures[1] == 2**64 - 1 and figures[5] == 200 * MB and figures[9] == 2
    assert struct.unpack_from("<5Q", raw, device + 192) == (1, 256, 50 * MB, 100 * MB, 3)
    assert struct.unpack_from("<5Q", raw, device + 192 + 96) == (2, 0, 50 * MB, 100 * MB, 4)
