"""Graph capture: the hooks on a function of upstream's shape, what others see meanwhile, and how long a load waits."""

import contextlib
import os
import pathlib
import sys
import threading
import time
import types

import pytest

from comfy.process_memory import capture, registry
from comfy_multiproc.fork import anchors, series
from tests.unit.providers import CARD, Peer

# Of the shape that the release with capture has: faults, captures on a side stream, replays.
SYNTHETIC = '''
import torch
import comfy.model_management

def prefetch_queue_pop(queue, device, module, core=None, enable_graph=False):
    if queue is None:
        return core()
    if enable_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = core()
        graph.replay()
        return out
    return core()
'''


def hooked(source):
    """The source with the patch's lines in it."""
    patch = next(patch for patch in series.load() if patch.name.startswith("64-"))
    found = anchors.SourceFile("comfy/model_prefetch.py", source.encode())
    lines = found.lines[:]
    inserts = [insert for insert in patch.inserts if insert.anchor.file == found.name]
    places = sorted(((anchors.resolve(found, insert.anchor), insert) for insert in inserts), key=lambda pair: pair[0], reverse=True)
    for place, insert in places:
        lines[place.line:place.line] = [place.indent + line.encode() + b"\n" for line in insert.code.strip().splitlines()]
    return b"".join(lines).decode()


class Told(Peer):
    """A process that is told of captures here."""
    def __init__(self):
        super().__init__("told")
        self.now = 0

    @contextlib.contextmanager
    def exclusive(self, device):
        assert device == CARD
        self.now += 1
        yield
        self.now -= 1


A_GPU = "the capture itself, which needs a real GPU and ComfyUI 0.33"


@pytest.fixture
def told():
    peer = Told()
    registry.register(peer)
    yield peer
    registry.unregister(peer)


@pytest.fixture
def prefetch_queue_pop(monkeypatch):
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: None), Stream=lambda device: None,
                                       stream=lambda stream: contextlib.nullcontext(), graph=lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "comfy.model_management", types.ModuleType("comfy.model_management"))
    import comfy
    monkeypatch.setattr(comfy, "model_management", sys.modules["comfy.model_management"], raising=False)
    module = {}
    exec(compile(hooked(SYNTHETIC), "model_prefetch", "exec"), module)  # noqa: S102  (text of this file)
    return module["prefetch_queue_pop"]


DEVICE = types.SimpleNamespace(type="cpu", index=0)


@pytest.mark.row(14, partial=A_GPU)
def test_others_are_told_while_a_graph_is_captured_and_not_otherwise(told, prefetch_queue_pop):
    assert prefetch_queue_pop([None], DEVICE, None, lambda: told.now, enable_graph=True) == 1
    assert told.now == 0
    assert prefetch_queue_pop([None], DEVICE, None, lambda: told.now) == 0


@pytest.mark.row(14, partial=A_GPU)
def test_a_capture_that_fails_ends_too(told, prefetch_queue_pop):
    def out_of_memory():
        raise MemoryError
    with pytest.raises(MemoryError):
        prefetch_queue_pop([None], DEVICE, None, out_of_memory, enable_graph=True)
    assert told.now == 0


@pytest.mark.row(14, partial=A_GPU)
def test_a_load_waits_for_the_end_of_another_s_capture(told):
    told.capturing = True
    threading.Timer(0.2, lambda: setattr(told, "capturing", False)).start()
    assert capture.wait_for_captures([DEVICE]) is True and told.capturing is False


@pytest.mark.row(14, partial=A_GPU)
def test_and_not_for_ever(told, monkeypatch):
    monkeypatch.setattr(capture, "PATIENCE", 0.1)
    told.capturing = True
    began = time.monotonic()
    assert capture.wait_for_captures([DEVICE]) is False
    assert time.monotonic() - began < 20


def test_a_capture_elsewhere_does_not_hold_a_load_here(told):
    told.capturing = True
    assert capture.wait_for_captures([types.SimpleNamespace(type="cpu", index=1)]) is True


def newer():
    """The source of ComfyUI's own function in a tree that captures: the one that the tests run on, or the one that a variable names."""
    for name in ("COMFY_MULTIPROC_NEWER", "COMFY_MULTIPROC_UPSTREAM"):
        path = pathlib.Path(os.environ.get(name) or os.devnull, "comfy/model_prefetch.py")
        if path.is_file() and "torch.cuda.graph(" in (source := path.read_text()):
            return source
    return None


@pytest.mark.skipif(newer() is None, reason="neither --upstream nor COMFY_MULTIPROC_NEWER names a tree of 0.33.0 or later")
@pytest.mark.row(14, partial=A_GPU)
def test_the_hooks_fit_a_newer_tree():
    text = hooked(newer())
    compile(text, "model_prefetch", "exec")
    begin, graph, end = (text.index(what) for what in ("begin_capture(", "torch.cuda.graph(", "end_capture("))
    assert begin < graph < end
    assert "@process_memory.may_capture\ndef prefetch_queue_pop(" in text
