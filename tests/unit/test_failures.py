"""Exceptions that cross: what a person and what ComfyUI see of them on the other side."""
from __future__ import annotations

import gc
import json
import sys
import traceback
import types
import weakref

import pytest

from comfy_multiproc import failures


def crossed(error: BaseException) -> BaseException:
    """As the other process gets it: through JSON."""
    return failures.rebuild(json.loads(json.dumps(failures.describe(error))), "worker zoo")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as e:
        return e


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"about {a}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Many(ValueError):
    pass


@pytest.mark.parametrize(("error", "name", "text"), [
    (ValueError("text"), "ValueError", "text"), (KeyError("key"), "KeyError", "'key'"), (Odd(1, 2), f"{__name__}.Odd", "about 1"),
    (FileNotFoundError(2, "No such file", "model"), "FileNotFoundError", "[Errno 2] No such file: 'model'"),
    (Unprintable(), f"{__name__}.Unprintable", "(its text cannot be had: RuntimeError)"), (Many("a", "b"), f"{__name__}.Many", "('a', 'b')"),
    (SystemExit(3), "SystemExit", "3"), (KeyboardInterrupt(), "KeyboardInterrupt", ""), (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
     "UnicodeDecodeError", "'utf-8' codec can't decode byte 0x78 in position 0: bad"), (ValueError("\ud800"), "ValueError", "\ud800"),
    (ExceptionGroup("several", [ValueError("x")]), "ExceptionGroup", "several (1 sub-exception)"),
])
def test_name_and_text_are_those_of_the_original(error, name, text):
    result = crossed(raised(error))
    assert (failures.full_name(type(result)), str(result)) == (name, text)
    assert isinstance(result, Exception)        # never one that ends the host


def test_builtins_can_be_caught_as_themselves_and_others_as_worker_errors():
    with pytest.raises(FileNotFoundError) as caught:
        raise crossed(FileNotFoundError(2, "No such file", "model"))
    assert (caught.value.errno, caught.value.filename) == (2, None) or caught.value.errno == 2
    with pytest.raises(failures.WorkerError) as caught:
        raise crossed(raised(Odd(1, 2)))
    assert caught.value.remote_type == f"{__name__}.Odd"
    assert 'raise error' in caught.value.remote_traceback
    # and once more, from worker to host to another worker
    assert failures.full_name(type(crossed(caught.value))) == f"{__name__}.Odd"


def test_the_traceback_shows_where_it_was_raised():
    def deep() -> None:
        raise ValueError("here")
    try:
        deep()
    except ValueError as e:
        here = traceback.format_tb(e.__traceback__)
        result = crossed(e)
    assert traceback.format_tb(result.__traceback__)[-1].splitlines()[:2] == here[-1].splitlines()[:2]
    try:
        raise result
    except ValueError as e:
        shown = traceback.format_tb(e.__traceback__)
    assert "raise result" in shown[0]
    assert 'raise ValueError("here")' in shown[-1]


def test_what_is_shown_begins_with_the_callers_frames_and_goes_on_with_the_nodes():
    def a_frame(folder, name, then):
        """A function that calls `then`, as if it stood in that file."""
        def call():
            then()
        code = call.__code__.replace(co_filename=f"{folder}/{name}.py", co_name=name)
        return types.FunctionType(code, {}, closure=call.__closure__)

    def fail():
        raise ValueError("here")

    def arrives():
        raise there

    for failing, last in ((a_frame("packs", "the_pack", fail), ["the_pack", "fail"]), (a_frame("comfy_multiproc", "ours", fail), ["fail"])):
        there = crossed(raised_by(a_frame("comfy_multiproc", "nodecall", failing)))
        there = there.with_traceback(there.__traceback__.tb_next)     # without the frame of this test
        error = raised_by(a_frame("comfy", "execution", a_frame("comfy_multiproc", "calls", a_frame("concurrent/futures", "_base", arrives))))
        failures.cut(error.__traceback__)
        assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["raised_by", "execution", "arrives", *last]
    error = raised_by(a_frame("comfy_multiproc", "calls", fail))
    failures.cut(error.__traceback__)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["raised_by", "calls", "fail"], "our own errors are whole"


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error


def test_causes_contexts_and_notes_cross():
    try:
        try:
            raise KeyError("first")
        except KeyError as e:
            raise ValueError("second") from e
    except ValueError as e:
        e.add_note("a note")
        result = crossed(e)
    assert isinstance(result.__cause__, KeyError)
    assert result.__notes__ == ["a note"]
    text = "".join(traceback.format_exception(result))
    assert "direct cause" in text and "a note" in text
    loop = ValueError("itself")
    loop.__context__ = other = KeyError("x")
    other.__context__ = loop
    assert str(crossed(loop)) == "itself"


@pytest.mark.behaviour(20)
def test_running_out_of_memory_is_recognised():
    torch = pytest.importorskip("torch")

    class Own(torch.OutOfMemoryError):
        pass
    accelerator = torch.AcceleratorError("the device says 2")
    accelerator.error_code = 2
    assert isinstance(crossed(raised(torch.OutOfMemoryError("x"))), torch.cuda.OutOfMemoryError)
    assert isinstance(crossed(raised(Own("x"))), torch.cuda.OutOfMemoryError)
    result = crossed(raised(accelerator))
    assert isinstance(result, torch.AcceleratorError)
    assert result.error_code == 2
    result = crossed(raised(RuntimeError("needs 2 GB")))
    assert not isinstance(result, (torch.OutOfMemoryError, torch.AcceleratorError))


def test_the_interrupt_is_comfyuis_own(monkeypatch):
    class InterruptProcessingException(BaseException):
        __module__ = "comfy.model_management"
    monkeypatch.setitem(sys.modules, "comfy.model_management", types.SimpleNamespace(InterruptProcessingException=InterruptProcessingException))
    assert isinstance(crossed(InterruptProcessingException()), InterruptProcessingException)
    assert isinstance(failures.interrupted(), InterruptProcessingException)


@pytest.mark.parametrize("failure", [
    None, [], {}, {"type": 5, "text": []}, {"type": "os.system", "text": "x"}, {"type": "a b\n.c", "text": "x"}, {"type": "ValueError", "args": [[1]]},
    {"type": "ValueError", "args": {}}, {"as": "builtins.SystemExit", "type": "x"}, {"frames": [1, ["a", "b", "c"], ["f", -5, "g"]]},
    {"type": "OSError", "args": ["x"] * 50}, {"cause": {"cause": {"cause": {"cause": {"cause": {"cause": 1}}}}}}, {"notes": [1]},
    {"type": "x" * 5000}, {"type": "."}, {"type": "a."},
])
def test_whatever_arrives_becomes_an_exception_that_can_be_raised(failure):
    error = failures.rebuild(failure)
    with pytest.raises(Exception) as caught:
        raise error
    assert traceback.format_exception(caught.value)


def test_names_that_are_received_are_not_looked_up():
    result = failures.rebuild({"type": "subprocess.CalledProcessError", "text": "x"})
    import subprocess
    assert not isinstance(result, subprocess.CalledProcessError)
    assert isinstance(result, failures.WorkerError)


def test_nothing_of_the_failed_call_stays_alive():
    class Tensor:
        pass
    where: list[weakref.ref[Tensor]] = []

    def node() -> None:
        tensor = Tensor()
        where.append(weakref.ref(tensor))
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer")
    try:
        node()
    except ValueError as e:
        error = e
    gc.disable()
    try:
        failures.describe(error)
        assert where[0]() is not None
        failures.forget(error)
        assert where[0]() is None
    finally:
        gc.enable()
