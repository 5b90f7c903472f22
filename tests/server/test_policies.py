"""Packs that cannot be isolated, restarts of a worker, and the executor without a cache: what happens is said, never silent."""

import os
import signal
import time

import pytest

from comfy_multiproc.testing.workflows import Graph, out

NODE = '''
import os

import folder_paths

with open({log!r}, "a") as file:
    file.write("{name} %d\\n" % os.getpid())


class {name}:
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"seed": ("INT", {{"default": 0}})}}, "optional": {{"file": (["none"] + folder_paths.get_filename_list("loras"),)}}}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    def run(self, seed):
        return {{"ui": {{"pid": [os.getpid()]}}}}


NODE_CLASS_MAPPINGS = {{"{name}": {name}}}
'''


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    return tmp_path_factory.mktemp("imports") / "log"


@pytest.fixture(scope="module")
def server(serve, fork_tree, tmp_path_factory, imports):
    folder = tmp_path_factory.mktemp("packs")
    for name, table in (("Required", 'environment = "nowhere"\nfallback = "refuse"'), ("Allowed", 'environment = "nowhere"'), ("Good", ""),
                        ("Wrong", "idle_seconds = -1")):
        pack = folder / name.lower()
        pack.mkdir()
        (pack / "__init__.py").write_text(NODE.format(name=name, log=str(imports)))
        (pack / "pyproject.toml").write_text(f"[tool.comfyui-multiproc]\nisolate = true\n{table}\n")
    return serve(fork_tree, ["--cpu", "--cache-none", "--isolate", "zoo_nodes", "--isolate", "nonsense"],
                 packs=("zoo_nodes", *sorted(folder.iterdir())))


def packs(server):
    return {pack["name"]: pack for pack in server.get("/system_stats")["packs"]}


def one(kind, **inputs):
    graph = Graph()
    graph.add("n", kind, **inputs)
    return graph


def test_a_missing_environment_by_policy(server, imports):
    nodes = server.get("/object_info")
    assert "Required" not in nodes and "Allowed" in nodes
    assert server.run(one("Allowed", seed=1)).outputs["n"]["pid"] == [server.pid]
    found = packs(server)
    assert not found["allowed"]["isolated"] and "there is no Python" in found["allowed"]["reason"]
    log = server.log()
    assert "Pack allowed cannot be isolated and runs in the host instead" in log and "Pack required cannot be isolated and is not loaded" in log
    assert "Required" not in imports.read_text()


def test_a_configuration_that_cannot_be_used_is_said(server):
    assert not packs(server)["wrong"]["isolated"] and "idle_seconds" in packs(server)["wrong"]["reason"]
    assert "--isolate nonsense: there is no such pack" in server.log()


def test_an_isolated_pack_is_imported_once_for_each_start_of_its_worker(server, imports):
    first = server.run(one("Good", seed=1)).outputs["n"]["pid"][0]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while packs(server)["good"]["state"] != "stopped" and time.monotonic() < deadline:
        time.sleep(0.1)
    new = server.home / "models" / "loras" / "zoo_new.safetensors"
    new.parent.mkdir(exist_ok=True)
    try:
        new.touch()
        files = server.get("/object_info/Good")["Good"]["input"]["optional"]["file"][0]
    finally:
        new.unlink()
    assert files[0] == "none" and "zoo_new.safetensors" in files      # known without the worker, and without starting it
    assert packs(server)["good"]["state"] == "stopped"
    second = server.run(one("Good", seed=2)).outputs["n"]["pid"][0]
    lines = [int(line.split()[1]) for line in imports.read_text().splitlines() if line.startswith("Good")]
    assert lines == [first, second] and server.pid not in lines


def test_expansion_without_a_cache(server):
    graph = one("ZooEach", text=out("s"))
    graph.add("l", "ZooLoop", left=3, total=0)
    graph.add("s", "ZooText", value=out("l"))
    for _ in range(2):
        result = server.run(graph)
        assert result.ok, result.error
        assert result.outputs["n"]["text"] == ["6"]


def test_without_a_cache_every_run_has_a_new_instance(server):
    assert [server.run(one("ZooCounted", value=1, again=1)).outputs["n"]["runs"] for _ in range(2)] == [[1], [1]]
