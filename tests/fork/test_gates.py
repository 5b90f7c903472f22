"""Two processes on one card, each with an 8-bit file, and the dtype that each gives its weights."""

import pytest

from tests.fork import runtimes

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.row(7)
@pytest.mark.card(size=48 * GIB, inference=int(0.8 * GIB), reserved=int(0.4 * GIB))
def test_of_two_12b_files_of_8_bits_on_one_48_gb_card_the_second_stays_as_it_is(card, spawn, here):
    first = spawn(runtimes.FILE)
    first.call("start", who="first")
    # 24 GB at 16 bits are 22.35 GiB. Alone: 48 x 0.88 - 1.2 = 41.04, and upstream casts it up.
    assert first.call("load_12b") == ["torch.float16", 24_000_000_000]
    # Beside it: (48 - 22.35) x 0.88 - 1.2 = 21.37. Both at 16 bits would be 48 GB of weights.
    assert runtimes.load_12b() == ("torch.float8_e4m3fn", 12_000_000_000)
    runtimes.drop("12b")
    first.call("drop", model="12b")


@pytest.mark.row(7)
@pytest.mark.card(size="48M")       # 88 % of it less 7.2 MiB for inference: 35 MiB; the file is 15.2 MiB at 8 bits, 30.3 at 16
def test_the_second_process_keeps_the_8_bit_weights_since_the_first_has_committed_half_of_the_card(card, spawn, here):
    first = spawn(runtimes.FILE)
    first.call("start", who="first")
    dtype, size = first.call("load_file", file="unet_fp8")
    assert dtype == "torch.float16" and size > 30 * MIB      # alone it is cast up, as upstream does
    dtype, size = runtimes.load_file("unet_fp8")                                # (48 - 30.3) x 0.88 - 7.2 = 8.4 MiB, less than 30.3
    assert dtype == "torch.float8_e4m3fn" and size < 16 * MIB


@pytest.mark.row(7)
@pytest.mark.card(size="48M")
def test_a_file_keeps_its_dtype_when_the_other_process_comes_or_goes(card, spawn, here):
    assert runtimes.load_file("unet_fp8")[0] == "torch.float16"
    first = spawn(runtimes.FILE)
    first.call("start", who="first")
    assert first.call("load_file", file="unet_fp8")[0] == "torch.float8_e4m3fn"
    runtimes.drop("unet_fp8")
    first.call("drop", model="unet_fp8")
    assert first.call("load_file", file="unet_fp8")[0] == "torch.float8_e4m3fn"      # there is room now, and the picture stays the same
    assert runtimes.load_file("unet_fp8")[0] == "torch.float16"


@pytest.mark.row(7)
@pytest.mark.card(size="48M")
def test_a_model_that_is_gone_is_committed_no_more(card, spawn, here):
    first = spawn(runtimes.FILE)
    first.call("start", who="first")
    assert first.call("load_file", file="unet_fp8")[0] == "torch.float16"
    first.call("drop", model="unet_fp8")
    assert runtimes.load_file("unet_fp8")[0] == "torch.float16"
