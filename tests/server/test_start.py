"""The start of a server whose packs are isolated: what earlier starts have learnt, processes at import time, what a pack asks for."""

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest

from comfy_multiproc.testing import start_server
from comfy_multiproc.testing.workflows import Graph

SLOW = 4.0


@pytest.fixture
def home(tmp_path, packs):
    """A server's folder with the pack zoo_start in a copy of its own, and one that nothing isolates."""
    for name in ("zoo_start", "zoo_rude"):
        shutil.copytree(packs / name, tmp_path / "custom_nodes" / name)
    return tmp_path


def started(fork_tree, home, seconds=0.0, args=("--isolate", "zoo_start")):
    return start_server(fork_tree, ["--cpu", *args], home=home, environment={"ZOO_IMPORTS": str(home / "imports"), "ZOO_START_SECONDS": str(seconds)})


def where(server):
    return next(pack for pack in server.get("/system_stats")["packs"] if pack["name"] == "zoo_start")


def until(condition, what=""):
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, what or condition
        time.sleep(0.05)
    return value


def graph():
    graph = Graph()
    graph.add("n", "ZooStart", seed=time.time_ns() % 10 ** 9)
    return graph


def run(server):
    """The pack's process, which has run its node."""
    result = server.run(graph())
    assert result.ok, result.error
    pid, about = result.outputs["n"]["pid"][0], result.outputs["n"]["about"][0]
    assert (Path(server.home) / "temp" / "of_this_start").is_dir(), "its start has emptied the folder of the running server"
    assert psutil.Process(pid).net_connections("inet") == []
    assert about["main"] is None and not about["database"]
    assert Path(about["utils"]).parts[-2:] == ("utils", "install_util.py") and "custom_nodes" not in about["utils"]
    assert len(about["packs"]) == 1 and about["packs"][0].endswith("zoo_start")
    return pid


def imports(home):
    return [int(line) for line in (home / "imports").read_text().split()]


def test_a_server_that_knows_its_packs_does_not_wait_for_them_and_renews_what_turns_out_to_be_different(fork_tree, home):
    """The pack is imported once for each start of its worker, and never in the host."""
    with started(fork_tree, home) as server:
        first = server.get("/object_info/ZooStart")
        pids = [where(server)["pid"]]
        entry, = until(lambda: list((home / "cache" / "descriptions").glob("*.json")))
    kept = json.loads(entry.read_text())
    one, = kept["said"]["packs"]["zoo_start"]["classes"]
    kept["said"]["packs"]["zoo_start"]["classes"] = [{**one, "attributes": {**one["attributes"], "CATEGORY": "old"}}, {**one, "id": "ZooGone"}]
    entry.write_text(json.dumps(kept))
    with started(fork_tree, home, SLOW) as server:
        assert where(server)["state"] in ("stopped", "starting")
        assert server.get("/object_info/ZooStart")["ZooStart"]["category"] == "old" and server.get("/object_info/ZooGone")
        pids.append(run(server))
        until(lambda: server.get("/object_info/ZooStart") == first)
        assert server.get("/object_info/ZooGone") == {}
        assert server.log().count("was last described: ZooGone, ZooStart") == 1
        until(lambda: "ZooGone" not in entry.read_text())
        assert run(server) == pids[-1] and where(server)["starts"] == 1
    assert imports(home) == pids
    (home / "custom_nodes" / "zoo_start" / "pyproject.toml").write_text(
        '[tool.comfyui-multiproc]\nisolate = true\nenvironment = "nowhere"\nfallback = "refuse"\n')
    with started(fork_tree, home, args=()) as server:
        assert not where(server)["isolated"] and "there is no Python" in where(server)["reason"]
        assert server.get("/object_info/ZooStart") == first
        result = server.run(graph())
        assert result.error["node_id"] == "n" and "nowhere, where there is no Python" in result.error["exception_message"]
        assert "Pack zoo_start cannot be isolated and is not loaded" in server.log()
    assert imports(home) == pids
