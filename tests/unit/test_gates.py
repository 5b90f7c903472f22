"""How much of a card the dtype gates see, on the numbers of the specification."""

import contextlib
import types

import pytest

from comfy.process_memory import DeviceUsage, arithmetic, gates, registry
from tests.unit.providers import Peer

GIB = 1 << 30
RESERVE = 0.8 * GIB + 0.4 * GIB


def gate(total, *committed):
    """The gate of a card of `total` GiB on which others have committed so many GiB, in GiB."""
    return arithmetic.gate(total * GIB * 0.88 - RESERVE, total * GIB, RESERVE, sum(committed) * GIB) / GIB


@pytest.mark.row(7)
def test_of_two_12b_files_on_a_48_gb_card_the_second_stays_8_bit():
    assert gate(48) == pytest.approx(41.04)         # alone: 24 GB at 16 bits fit, as upstream finds
    assert gate(48, 24) == pytest.approx(19.92)     # beside the first, 24 do not
    assert gate(48, 24) < 24 < gate(48)


@pytest.mark.row(7)
def test_the_gate_is_what_is_left_of_the_card_and_never_more_than_upstream_s():
    assert gate(24) == pytest.approx(19.92) and gate(24) >= 16
    assert gate(24, 12) == pytest.approx(9.36) and gate(24, 12) < 16
    assert gate(24, 0) == gate(24)


def test_what_a_process_does_not_say_is_charged_as_its_ceiling():
    assert arithmetic.charged_commitment(DeviceUsage(resident=5, committed=9), 100) == 9
    assert arithmetic.charged_commitment(DeviceUsage(resident=5), 100) == 5
    assert arithmetic.charged_commitment(DeviceUsage(resident=None), 100) == 100


@pytest.mark.row(7)
def test_a_file_is_known_however_its_path_is_given():
    seen = []

    @gates.for_file
    def load(ckpt_path, output_vae=True):
        seen.append(gates._path.get())
        return ckpt_path, output_vae
    assert load(output_vae=False, ckpt_path="a") == ("a", False)
    with registered():
        assert load("b", output_vae=False) == ("b", False) and load(output_vae=False, ckpt_path="c") == ("c", False)
    assert seen[1:] == ["b", "c"] and gates._path.get() is None


@pytest.mark.row(7)
def test_a_file_that_was_first_loaded_alone_keeps_the_dtype_of_the_whole_card(monkeypatch):
    monkeypatch.setattr(gates, "_alone", set())
    monkeypatch.setattr(gates, "_dtypes", {})
    crowded = False

    @gates.settled_dtype
    def unet_dtype(device=None, model_params=0):
        return 8 if crowded and not gates._whole_card.get() else 16
    load = gates.for_file(lambda path: unet_dtype(types.SimpleNamespace(type="cpu", index=None)))
    assert load("early") == 16
    with registered():
        crowded = True
        assert load("early") == 16 and load("late") == 8
        crowded = False
        assert load("late") == 8, "a file keeps its first answer"


@contextlib.contextmanager
def registered():
    peer = Peer()
    registry.register(peer)
    try:
        yield
    finally:
        registry.unregister(peer)
