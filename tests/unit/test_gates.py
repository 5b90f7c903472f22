"""How much of a card the dtype gates see, on the numbers of the specification."""

import pytest

from comfy.process_memory import DeviceUsage, arithmetic

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
