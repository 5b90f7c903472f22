"""Workers of real ComfyUI: what they take over from their host, and how they fail, on a virtual card."""

import os
import pathlib
import sys
import time

import pytest

SECONDS = 120.0
MIB = 1 << 20

# ---- in the host, a process of its own

workers = {}


def start(**spec):
    from comfy_multiproc import host
    folder = str(pathlib.Path(__file__).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    workers["zoo"] = host.Worker(host.Spec("zoo", entry="worker_zoo", **spec))
    return workers["zoo"].start().result(SECONDS).body


def ask(kind, body=None, prompt=None):
    return workers["zoo"].call(kind, body, prompt=prompt).result(SECONDS).body


def failure(kind, body=None):
    import comfy.model_management as mm
    try:
        ask(kind, body)
    except BaseException as error:
        return {"oom": bool(mm.is_oom(error)), "type": type(error).__name__, "text": str(error)}


def interrupt_once_begun(began):
    import comfy.model_management as mm
    from comfy_multiproc import host
    future = workers["zoo"].call("wait_for_interrupt", began, prompt="one")
    end = time.monotonic() + SECONDS
    while not os.path.exists(began) and time.monotonic() < end:
        time.sleep(0.01)
    host.interrupt("one")
    try:
        return future.result(SECONDS).body
    except mm.InterruptProcessingException:
        return "interrupted"


def load_paths(config):
    import utils.extra_config
    utils.extra_config.load_extra_path_config(config)


def about_host():
    import comfy.model_management as mm
    import folder_paths
    return {"reserved": mm.EXTRA_RESERVED_VRAM, "vram_state": mm.vram_state.name, "device": str(mm.get_torch_device()),
            "folders": [folder_paths.base_path, folder_paths.get_folder_paths("checkpoints")], "total": mm.get_total_memory(mm.get_torch_device())}


def share():
    from comfy_multiproc import runtime
    runtime.start("the host")


def peers():
    from comfy.process_memory import registry
    return [entry.provider.name for entry in registry.entries]


def begin_pack(path):
    """A station of the pack at `path`, whose worker has been told to start."""
    from comfy_multiproc.pack import Pack
    from comfy_multiproc.station import PackStation
    stations["pack"] = PackStation("pack", [Pack("pack", pathlib.Path(path), True, "the test")])
    stations["pack"].worker.start()


def send(method, instance=None, aside=False, prompt="", **inputs):
    """Make a call of the pack's node; `result` waits for it."""
    from comfy_multiproc.nodecall import Call
    values = {name: blank() if value == "blank" else value for name, value in inputs.items()}
    call = Call("FromPack", method, instance, prompt=prompt, executes=instance is not None, id="1" if prompt else "")
    sent.append(stations["pack"].send(call, {"inputs": values}, aside))


def result():
    try:
        return sent.pop(0).result(SECONDS)
    except BaseException as error:
        return type(error).__name__


def blank():
    import torch
    return torch.zeros(MIB)


def interrupt(prompt):
    from comfy_multiproc import host
    host.interrupt(prompt)


def lent():
    from comfy_multiproc import station
    return station.of_host()[1].usage().lent


stations, sent = {}, []


def pid():
    return workers["zoo"].pid


def stop():
    from comfy_multiproc import host
    host.stop_all()


# ---- the tests


@pytest.fixture
def host(spawn):
    """A host with one worker, `zoo`."""
    started = []

    def begin(spec=None, paths=None, **arguments):
        process = spawn(**arguments)
        started.append(process)
        if paths:
            process.call("load_paths", config=str(paths))
        return process, process.call("start", timeout=SECONDS, **(spec or {}))
    yield begin
    for process in started:
        if process.alive:
            process.call("stop")


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.mark.behaviour(14)
@pytest.mark.behaviour(16)
@pytest.mark.row(3)
def test_a_worker_is_the_comfyui_that_its_host_is(host, tmp_path, fork_tree):
    (tmp_path / "extra.yaml").write_text(f"extra:\n  base_path: {tmp_path}\n  checkpoints: more\n")
    process, _ = host(paths=tmp_path / "extra.yaml", reserve_vram=3.0, disable_smart_memory=True, base_directory=str(tmp_path))
    about, here = process.call("ask", kind="about"), process.call("about_host")
    assert about["args"] == {"cpu": True, "reserve_vram": 3.0, "disable_smart_memory": True, "base_directory": str(tmp_path)}
    assert {key: about[key] for key in here} == here
    assert str(tmp_path / "more") in about["folders"][1]
    assert about["nodes"] == [True, True] and about["inference"]
    assert pathlib.Path(about["utils"]) == fork_tree / "utils" / "install_util.py" and about["main"] is None


@pytest.mark.row(39)
@pytest.mark.behaviour(20)
@pytest.mark.behaviour(21)
@pytest.mark.card(size="64M")
def test_out_of_memory_and_interrupts_are_comfyuis_own_and_leave_the_worker_empty(host, card, tmp_path):
    process, worker = host()
    assert process.call("failure", kind="oom", body="class")["oom"]
    assert process.call("failure", kind="oom", body="code")["oom"]
    assert not process.call("failure", kind="oom", body="text")["oom"]
    before = card.read().process(worker).total
    result = process.call("failure", kind="allocate", body=[24, 24, 24])
    assert result["oom"] and result["type"] == "OutOfMemoryError"
    assert card.read().process(worker).total == before
    assert process.call("ask", kind="allocate", body=[24, 24]) == 2
    assert process.call("interrupt_once_begun", began=str(tmp_path / "began")) == "interrupted"
    assert process.call("ask", kind="about", prompt="two")["pid"] == worker


@pytest.mark.card(size="128M")
def test_a_worker_is_a_peer_and_what_it_held_is_free_when_it_is_gone(host, card):
    process, worker = host({"idle_seconds": 3.0})
    process.call("share")
    until(lambda: process.call("peers") == ["worker zoo"])
    assert process.call("ask", kind="hold", body=32) == worker
    assert card.read().process(worker).total >= 32 * MIB
    until(lambda: card.read().free == 128 * MIB)
    until(lambda: process.call("peers") == [])
    assert process.call("ask", kind="about")["pid"] != worker


PACK = """
import asyncio, os, server, time
assert asyncio.get_event_loop() is server.PromptServer.instance.loop
here = os.path.dirname(__file__)
open(os.path.join(here, "began"), "w").close()
while not os.path.exists(os.path.join(here, "go")):
    time.sleep(0.01)

class FromPack:
    FUNCTION, RETURN_TYPES = "run", ("INT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    @classmethod
    def VALIDATE_INPUTS(cls):
        return "asked"

    def run(self, image):
        open(os.path.join(here, "runs"), "w").close()
        while not os.path.exists(os.path.join(here, "end")):
            time.sleep(0.01)
        return (1,)

NODE_CLASS_MAPPINGS = {"FromPack": FromPack}
"""


def test_questions_wait_for_the_packs_and_what_an_interrupted_prompt_has_sent_comes_back(spawn, tmp_path):
    process = spawn()
    (tmp_path / "__init__.py").write_text(PACK)
    process.call("begin_pack", path=str(tmp_path), timeout=SECONDS)
    until((tmp_path / "began").exists)
    process.call("send", method="VALIDATE_INPUTS", aside=True)      # the nodes are not there yet
    (tmp_path / "go").touch()
    assert process.call("result", timeout=SECONDS) == "asked"
    for instance in (1, 2):
        process.call("send", method="run", instance=instance, prompt="one", image="blank")
    until((tmp_path / "runs").exists)
    assert process.call("lent") > 0
    process.call("interrupt", prompt="one")
    (tmp_path / "end").touch()
    assert [process.call("result", timeout=SECONDS) for _ in range(2)] == ["InterruptProcessingException"] * 2
    until(lambda: process.call("lent") == 0)        # also of the call that had not begun
    process.call("stop")
