"""Packs that cannot be isolated, restarts of a worker, and the executor without a cache: what happens is said, never silent."""

import os
import signal
import subprocess
import sys
import sysconfig
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


OWN = '''
import os
import sys

import only_here


class OwnEnvironment:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    def run(self, image):
        return {"ui": {"prefix": [sys.prefix], "where": [only_here.WHERE], "blue": [float(image[..., 2].mean())], "pid": [os.getpid()]}}


NODE_CLASS_MAPPINGS = {"OwnEnvironment": OwnEnvironment}
'''

TWIN = '''
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
{how} twin_names


class Twin:
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"seed": ("INT", {{"default": 0}})}}}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    def run(self, seed):
        return {{"ui": {{"who": [twin_names.WHO]}}}}


NODE_CLASS_MAPPINGS = {{"Twin_{name}": Twin{more}}}
'''


RUDE = {
    "exit": "os._exit(7)\n",
    "key": "raise KeyboardInterrupt\n",
    "text": "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Mute\n",
    "list": "NODE_CLASS_MAPPINGS = [1]\n",
    "fork": "os.fork() if hasattr(os, 'fork') else None\n",
    "path": "import pathlib\nWEB_DIRECTORY = pathlib.Path('js')\n",
    "route": "from server import PromptServer\nfor path in ('/{bad', 'bad', '/rude/good'):\n"
             "    @PromptServer.instance.routes.get(path)\n    async def answer(request):\n"
             "        from aiohttp import web\n        return web.json_response('good')\n",
    "none": "NODE_CLASS_MAPPINGS['RudeNone'] = None\n",
}


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    return tmp_path_factory.mktemp("imports") / "log"


@pytest.fixture(scope="module")
def server(serve, fork_tree, tmp_path_factory, imports):
    folder = tmp_path_factory.mktemp("packs")
    for name, table in (("Required", 'environment = "nowhere"\nfallback = "refuse"'), ("Allowed", 'environment = "nowhere"'), ("Good", ""),
                        ("Own", 'environment = "environment"'), ("Wrong", "idle_seconds = -1")):
        pack = folder / name.lower()
        pack.mkdir()
        (pack / "__init__.py").write_text(NODE.format(name=name, log=str(imports)))
        (pack / "pyproject.toml").write_text(f"[tool.comfyui-multiproc]\nisolate = true\n{table}\n")
    with open(folder / "good" / "__init__.py", "a") as file:
        file.write('WEB_DIRECTORY = "js"\n')
    (folder / "good" / "js").mkdir()
    (folder / "good" / "js" / "good.js").write_text("// good")
    (folder / "own" / "__init__.py").write_text(OWN)
    environment(folder / "own" / "environment")
    for name, group in (("twin_a", "twins"), ("twin_b", "twins"), ("alone_a", None), ("alone_b", None)):
        pack = folder / name
        pack.mkdir()
        (pack / "twin_names.py").write_text(f"WHO = {name!r}\n")
        (pack / "__init__.py").write_text(TWIN.format(name=name, how="from . import" if group else "import", more=', "Twin": Twin' if group else ""))
        (pack / "pyproject.toml").write_text("[tool.comfyui-multiproc]\nisolate = true\n" + (f'group = "{group}"\n' if group else ""))
    for name, rude in RUDE.items():
        pack = folder / f"rude_{name}"
        pack.mkdir()
        (pack / "__init__.py").write_text(NODE.format(name=f"Rude_{name}", log=str(imports)) + rude)
        (pack / "pyproject.toml").write_text(f"[tool.comfyui-multiproc]\nisolate = true\ngroup = \"{'deadly' if name == 'exit' else 'rude'}\"\n")
    for name, isolate in (("lacking", "true"), ("loose", "false")):
        pack = folder / name
        pack.mkdir()
        (pack / "__init__.py").write_text("import what_is_not_there\n")
        (pack / "pyproject.toml").write_text(f"[tool.comfyui-multiproc]\nisolate = {isolate}\n")
    return serve(fork_tree, ["--cpu", "--cache-none", "--isolate", "zoo_nodes", "--isolate", "nonsense", "--isolate", "god"],
                 packs=("zoo_nodes", *sorted(folder.iterdir())))


def environment(folder):
    """A Python environment with the packages of this one and a module that only it has."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages") if os.name == "posix" else folder.glob("Lib/site-packages")
    (site / "all_of_the_host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "only_here.py").write_text("WHERE = __file__\n")


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
    assert any("--isolate god: there is no such pack" in line and line.endswith("did you mean good?") for line in server.log().splitlines())


def test_a_pack_whose_import_fails_is_said_once_with_what_to_install(server):
    log = server.log()
    lacking, loose = packs(server)["lacking"], packs(server)["loose"]
    assert not lacking["isolated"] and "-m pip install what_is_not_there" in lacking["reason"]
    assert "its import failed" in loose["reason"]
    listed = [line.strip() for line in log.splitlines()]
    assert any(line.startswith("loose: nowhere: its import failed") for line in listed)
    assert any(line.startswith("lacking: nowhere: ModuleNotFoundError") for line in listed)
    lines = [line for line in log.splitlines() if "[lacking] " in line]
    assert lines, log
    assert sum("import what_is_not_there" in line for line in lines) == 1 and not any("comfy_multiproc" in line for line in lines)
    assert sum("lacking" in line and "line 1, in <module>" in line for line in log.splitlines()) == 1


def test_a_pack_that_is_rude_when_it_is_imported_is_not_tried_in_the_server_too(server):
    found = packs(server)
    for name, word in (("exit", "exit code 7"), ("key", "KeyboardInterrupt"), ("text", "Mute"), ("list", "TypeError"), ("none", "cannot be described")):
        pack = found[f"rude_{name}"]
        assert not pack["isolated"] and word in pack["reason"]
    nodes = server.get("/object_info")
    assert "Rude_exit" not in nodes and "Rude_key" not in nodes
    [pid] = {server.run(one(f"Rude_{name}", seed=1)).outputs["n"]["pid"][0] for name in ("fork", "path", "route")}
    assert packs(server)["rude_path"]["pid"] == pid != server.pid
    assert server.get("/rude/good") == server.get("/api/rude/good") == "good"


def test_an_isolated_pack_is_imported_once_for_each_start_of_its_worker(server, imports):
    first = server.run(one("Good", seed=1)).outputs["n"]["pid"][0]
    assert server.request("/extensions/good/good.js") == b"// good" and "/extensions/good/good.js" in server.get("/extensions")
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
    assert server.request("/extensions/good/good.js") == b"// good" and "/extensions/good/good.js" in server.get("/extensions")
    assert packs(server)["good"]["state"] == "stopped"
    second = server.run(one("Good", seed=2)).outputs["n"]["pid"][0]
    lines = [int(line.split()[1]) for line in imports.read_text().splitlines() if line.startswith("Good")]
    assert lines == [first, second] and server.pid not in lines


def test_a_pack_with_an_environment_of_its_own(server):
    """Its Python, its modules, and the values of everybody."""
    graph = one("OwnEnvironment", image=out("e"))
    graph.add("e", "EmptyImage", width=8, height=8, batch_size=1, color=255)
    result = server.run(graph)
    assert result.ok, result.error
    said = result.outputs["n"]
    assert said["prefix"] == [str(server.home / "custom_nodes" / "own" / "environment")] or said["prefix"][0].endswith("own/environment")
    assert "own/environment" in said["where"][0] and said["blue"] == [1.0] and said["pid"] == [packs(server)["own"]["pid"]]


def test_packs_with_the_same_names(server):
    """Two in one worker have the same node: the last has it, as natively. Two with workers of their own have the same module: each has its own."""
    order = [name for name in os.listdir(server.home / "custom_nodes") if name.startswith("twin")]
    assert packs(server)["twin_a"]["pid"] == packs(server)["twin_b"]["pid"]
    assert server.run(one("Twin", seed=1)).outputs["n"]["who"] == [order[-1]]
    for name in order:
        assert server.run(one(f"Twin_{name}", seed=1)).outputs["n"]["who"] == [name]
    for name in ("alone_a", "alone_b"):
        assert server.run(one(f"Twin_{name}", seed=1)).outputs["n"]["who"] == [name]


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
