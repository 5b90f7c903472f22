"""What is asked for after an allocation has failed, and when a site begins anew."""

import pytest

from comfy.process_memory import asks_peers_on_oom, asks_peers_on_oom_same_noise, peers_made_room, registry, retry, start_over_if_peers_made_room
from tests.unit.providers import Peer


class Device:
    def __init__(self, type, index):
        self.type, self.index = type, index


@pytest.mark.parametrize("message, index, size", [
    ("CUDA out of memory. Tried to allocate 57.00 MiB. GPU 1 has a total capacity of 23.64 GiB of which 1.2 GiB is free.", 1, 57 << 20),
    ("HIP out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.98 GiB", 0, 5 << 29),
    ("XPU out of memory. Tried to allocate 512 bytes. GPU 0 has", 0, 512),
    ("CUDA error: out of memory", 0, 0),
    ("", 0, 0)])
def test_device_and_size_are_read_from_the_message(message, index, size):
    device, found = retry.failed_allocation(message, Device("cuda", 0))
    assert (device.type, device.index, found) == ("cuda", index, size)


@pytest.fixture
def peers(monkeypatch):
    """A peer, and what asking it gives, one answer after the other."""
    answers = []
    monkeypatch.setattr(retry, "relief", lambda error: answers.pop(0) if answers else 0)
    monkeypatch.setattr(retry, "manager", lambda: type("Manager", (), {"soft_empty_cache": staticmethod(lambda: None)}))
    peer = Peer()
    registry.register(peer)
    yield answers
    registry.unregister(peer)


def failing(times):
    tries = []

    def work():
        tries.append(None)
        if len(tries) <= times:
            raise MemoryError("Tried to allocate 1.00 MiB")
        return len(tries)
    return work


@asks_peers_on_oom
def by_halves(work):
    size = 8
    while True:
        try:
            return work(), size
        except MemoryError:
            if peers_made_room():
                continue
            size //= 2


@asks_peers_on_oom
def in_tiles(work):
    tiled = False
    try:
        return work(), tiled
    except MemoryError:
        start_over_if_peers_made_room()
        tiled = True
    return work(), tiled


@pytest.mark.row(19)
@pytest.mark.parametrize("failures, given, expected", [(1, [5], (2, 8)), (1, [0], (2, 4)), (2, [5, 5], (3, 4)), (3, [5, 5], (4, 2)), (0, [5], (1, 8))])
def test_a_loop_tries_the_same_size_once_more_if_something_was_given(peers, failures, given, expected):
    peers += given
    assert by_halves(failing(failures)) == expected


@pytest.mark.row(19)
@pytest.mark.parametrize("failures, given, expected", [(1, [5], (2, False)), (1, [0], (2, True)), (2, [5, 5], (3, True))])
def test_a_fallback_is_taken_only_if_the_second_try_fails_too(peers, failures, given, expected):
    peers += given
    assert in_tiles(failing(failures)) == expected


def test_a_site_inside_a_site_begins_anew_by_itself(peers):
    peers += [5, 5]
    outer = []

    @asks_peers_on_oom
    def whole():
        outer.append(None)
        try:
            return in_tiles(failing(1))
        except MemoryError:
            start_over_if_peers_made_room()
    assert whole() == (2, False) and len(outer) == 1


def test_a_handler_outside_of_a_site_gets_nothing(peers):
    peers += [5]
    try:
        raise MemoryError
    except MemoryError:
        assert peers_made_room() is False
        start_over_if_peers_made_room()


def test_the_same_noise_is_drawn_again(peers):
    import torch
    peers += [5]
    drawn = []

    @asks_peers_on_oom_same_noise
    def decode():
        drawn.append(torch.rand(1).item())
        try:
            if len(drawn) == 1:
                raise MemoryError
        except MemoryError:
            start_over_if_peers_made_room()
    decode()
    assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_with_nobody_registered_nothing_is_asked_and_the_size_is_halved():
    assert by_halves(failing(1)) == (2, 4) and in_tiles(failing(1)) == (2, True)
