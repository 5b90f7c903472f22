"""The headroom of aimdo's pager: each version's own way to set it, and nothing else set by the way."""

import sys
import types

import pytest

from comfy.process_memory import pager, registry
from tests.unit.providers import Peer

MIB = 1 << 20
A_GPU = "what aimdo evicts by it, which needs a real GPU"


class Aimdo:
    """comfy_aimdo.control as far as it matters; `set` is what its C side holds."""

    def __init__(self):
        self.set = {"headroom": "as at start", "nvml_pressure": True}


class Version0411(Aimdo):
    def init(self, implementation=None, simple_vram_headroom=None, nvml_pressure=False):
        if simple_vram_headroom is not None:
            self.set["headroom"] = simple_vram_headroom
        self.set["nvml_pressure"] = nvml_pressure


class Version0410(Aimdo):
    def init(self, implementation=None, simple_vram_headroom=None):
        self.set["headroom"] = simple_vram_headroom


class Version049(Aimdo):
    def init(self, implementation=None):
        raise AssertionError("there is nothing to set in this version")


class Version060(Aimdo):
    def init(self, implementation=None, simple_vram_headroom=None, nvml_pressure=False):
        raise AssertionError("it has a setter")

    def set_simple_vram_headroom(self, size):
        self.set["headroom"] = size


@pytest.mark.row(13, partial=A_GPU)
@pytest.mark.parametrize("version, sets", [(Version0411, True), (Version0410, True), (Version060, True), (Version049, False)])
@pytest.mark.parametrize("nvml", [True, False])
def test_the_headroom_is_set_and_nothing_else(version, sets, nvml):
    control = version()
    control.set["nvml_pressure"] = nvml
    assert pager.forward(control, 700 * MIB, types.SimpleNamespace(disable_nvml_pressure=not nvml)) is sets
    assert control.set == {"headroom": 700 * MIB if sets else "as at start", "nvml_pressure": nvml}


@pytest.fixture
def paged(monkeypatch):
    """This process pages; its manager reserves 400 MiB."""
    control = Version0411()
    device = types.SimpleNamespace(type="cpu", index=0)
    manager = types.SimpleNamespace(
        args=types.SimpleNamespace(disable_nvml_pressure=False), extra_reserved_memory=lambda: 400 * MIB,
        get_all_torch_devices=lambda: [device],
        comfy=types.SimpleNamespace(memory_management=types.SimpleNamespace(aimdo_enabled=True)))
    monkeypatch.setitem(sys.modules, "comfy.model_management", manager)
    monkeypatch.setitem(sys.modules, "comfy_aimdo.control", control)
    monkeypatch.setattr(pager, "_forwarded", None)
    return control


@pytest.mark.row(13, partial=A_GPU)
def test_the_pager_leaves_what_another_process_has_been_admitted_for(paged):
    peer = Peer(models={"A": 3000 * MIB})
    registry.register(peer)
    try:
        pager.set_pager_headroom()
        assert paged.set["headroom"] == "as at start"                # it has claimed nothing: the pager sees all there is
        peer.claimed = 2000 * MIB
        pager.set_pager_headroom()
        assert paged.set["headroom"] == (400 + 3000 + 2000) * MIB
        peer.claimed = 0
        pager.set_pager_headroom()
        assert paged.set["headroom"] == 400 * MIB
    finally:
        registry.unregister(peer)
    pager.set_pager_headroom()
    assert paged.set == {"headroom": 400 * MIB, "nvml_pressure": True}


def test_alone_nothing_is_set(paged):
    pager.set_pager_headroom()
    assert paged.set["headroom"] == "as at start"


def test_a_version_that_takes_it_in_another_way_ends_no_prompt(paged, monkeypatch, caplog):
    tried = []

    def init(implementation=None, *, simple_vram_headroom=None):
        tried.append(simple_vram_headroom)
        raise TypeError("megabytes, please")
    monkeypatch.setattr(paged, "init", init)
    peer = Peer(models={"A": 3000 * MIB})
    peer.claimed = 2000 * MIB
    registry.register(peer)
    try:
        for _ in range(3):
            pager.set_pager_headroom()
    finally:
        registry.unregister(peer)
    assert len(tried) == len(caplog.records) == 1 and "megabytes" in caplog.text
