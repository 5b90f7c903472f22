"""top: what a person and a program see of who holds what."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from comfy.process_memory.provider import Candidate, DeviceUsage, Kind, RamUsage
from comfy_multiproc.ledger import Ledger
from comfy_multiproc.records import DeviceReport, Report

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
GB = 1 << 30


@pytest.fixture
def folder(tmp_path):
    ledger = Ledger(tmp_path)
    with_card = ledger.take("ComfyUI on port 8188")
    with_card.publish(Report(ram=RamUsage(resident=3 * GB, pinned=0), devices=(DeviceReport(
        key="cuda:GPU-1", total=24 * GB, allocator=6 * GB, pager=2 * GB,
        usage=DeviceUsage(resident=7 * GB, cached=512 * MB, committed=9 * GB, reclaimable=512 * MB),
        candidates=(Candidate(id="1", name="Flux", resident=7 * GB, size=9 * GB, in_use=True),
                    Candidate(id="0", name="allocator cache", kind=Kind.CACHE, resident=512 * MB, size=512 * MB))),)))
    with_card.claim("cuda:GPU-1", 100 * MB)
    with_card.busy(True, prompt=True)
    without = ledger.take("worker of a pack")
    without.publish(Report(ram=RamUsage(resident=900 * MB)))
    yield tmp_path
    ledger.close()


def top(folder, *arguments):
    return subprocess.run([sys.executable, "-m", "comfy_multiproc", "top", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "COMFY_MULTIPROC_RUNTIME": str(folder), "COLUMNS": "200"})


@pytest.mark.row(41)
def test_for_people(folder):
    shown = top(folder, "--once")
    assert shown.returncode == 0 and not shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == "cuda:GPU-1   8.0 GB of 24.0 GB held by 1 process"
    assert lines[2].split() == [str(os.getpid()), "ComfyUI", "on", "port", "8188", "busy", "7.0G", "512M", "?", "100M",
                                "512M", "0M", "3.0G"]
    assert "worker of a pack" in lines[-1] and lines[-1].endswith("900M") and "\x1b" not in shown.stdout


def test_a_terminal_of_80_columns_shows_every_column(folder):
    from comfy_multiproc.commands.top import table
    rows = json.loads(top(folder, "--once", "--json").stdout)["processes"]
    rows[0].update(pid=4194304, name="worker of a pack with a long name", ram=123 * GB, pinned=1023 * MB)
    rows[0]["devices"][0].update(weights=100 * GB, cached=1023 * MB, scratch=1023 * MB, claimed=1023 * MB, reclaimable=1023 * MB)
    lines = table(rows, 80)
    assert max(map(len, lines[1:3])) <= 80 and lines[1].endswith("RAM") and lines[2].endswith("123.0G") and "worker of" in lines[2]


def test_until_ctrl_c_with_the_time_between_tables(folder):
    with subprocess.Popen([sys.executable, "-m", "comfy_multiproc", "top", "--interval", "0.05"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env={**os.environ, "COMFY_MULTIPROC_RUNTIME": str(folder)}) as shown:
        first = shown.stdout.readline()
        while not (line := shown.stdout.readline()).startswith("-- "):
            assert line
        shown.send_signal(signal.SIGINT)
        shown.stdout.read()
        assert first.startswith("-- ") and shown.wait(30) == 0 and shown.stderr.read() == ""


def test_for_a_program(folder):
    rows = json.loads(top(folder, "--once", "--json").stdout)["processes"]
    [device] = rows[0]["devices"]
    assert (rows[0]["name"], rows[0]["state"], rows[0]["prompts"], rows[0]["ram"]) == ("ComfyUI on port 8188", "busy", 1, 3 * GB)
    assert (device["weights"], device["scratch"], device["claimed"], device["total"]) == (7 * GB, None, 100 * MB, 24 * GB)
    assert [(m["name"], m["in_use"]) for m in device["models"]] == [("Flux", True), ("allocator cache", False)]
    assert rows[1]["devices"] == [] and rows[1]["pinned"] is None


def test_refreshed_in_a_pipe_until_the_reader_has_seen_enough(folder):
    with subprocess.Popen([sys.executable, "-m", "comfy_multiproc", "top", "--json", "--interval", "0.05"], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COMFY_MULTIPROC_RUNTIME": str(folder)}) as shown:
        assert [len(json.loads(shown.stdout.readline())["processes"]) for _ in range(3)] == [2, 2, 2]
        shown.stdout.close()
        assert shown.wait(30) == 1 and shown.stderr.read() == ""


def test_nothing_to_show(tmp_path):
    shown = top(tmp_path, "--once")
    assert shown.returncode == 2 and "no ComfyUI process" in shown.stderr and not shown.stdout
    ledger = Ledger(tmp_path)
    assert top(tmp_path, "--once").stdout == "no ComfyUI process is running\n"
    ledger.close()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "x", "1e9"])
def test_an_interval_that_is_none(tmp_path, seconds):
    shown = top(tmp_path, "--interval", seconds)
    assert shown.returncode == 2 and "--interval" in shown.stderr
