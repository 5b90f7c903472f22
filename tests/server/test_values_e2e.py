"""Values between two workers and the host, through the real server: they arrive as they were, and nothing is left behind."""

import os
import pathlib
import time

import pytest

from comfy_multiproc.testing.workflows import Graph, out

SOON = 30.0


@pytest.fixture(scope="module")
def server(serve, fork_tree, tmp_path_factory):
    """zoo_values twice: as itself, and under other names in another worker."""
    folder = tmp_path_factory.mktemp("packs") / "other_values"
    folder.mkdir()
    source = pathlib.Path(__file__).parent / "packs" / "zoo_values" / "__init__.py"
    text = source.read_text().replace("cls.__name__: cls", "cls.__name__.replace('Zoo', 'Other'): cls")
    (folder / "__init__.py").write_text(text)
    return serve(fork_tree, ["--cpu", "--isolate", "all"], packs=("zoo_values", folder))


def prompt(*entries):
    graph = Graph()
    for id, kind, inputs in entries:
        graph.add(id, kind, **inputs)
    return graph


@pytest.mark.parametrize("giver, checker", [("Zoo", "Zoo"), ("Zoo", "Other"), ("Other", "Zoo")])
def test_every_kind_of_value_crosses_as_it_was(server, giver, checker):
    result = server.run(prompt(("g", f"{giver}GiveAll", {}), ("n", f"{checker}CheckAll", {"given": out("g")})))
    assert result.ok, result.error
    said = result.outputs["n"]
    assert said["wrong"] == [{}] and said["missing"] == [[]]
    assert said["shared"] == [True]


def test_core_nodes_of_the_host_take_and_give_values(server):
    graph = prompt(("g", "ZooGive", {"name": "view"}), ("s", "ImageScale", {"image": out("g"), "upscale_method": "nearest-exact", "width": 16, "height": 16, "crop": "disabled"}),
                   ("n", "PreviewImage", {"images": out("s")}))
    assert server.run(graph).ok


def test_many_small_tensors_hold_no_descriptors(server):
    def run(seed):
        result = server.run(prompt(("g", "ZooBig", {"count": 3000, "numbers": 4, "seed": seed}), ("n", "OtherSum", {"items": out("g")})))
        assert result.ok, result.error
        assert result.outputs["n"]["sum"] == [2 * sum(range(3000))]
        return result.outputs["n"]["files"][0], len(os.listdir(f"/proc/{server.pid}/fd"))
    before = run(0)
    after = [run(seed) for seed in range(1, 5)][-1]
    assert all(b - a <= 20 for a, b in zip(before, after, strict=True))


def test_a_large_result_does_not_stay_in_shared_memory_when_the_cache_lets_go(server):
    def shared():
        pids = [server.pid, *(pack["pid"] for pack in server.get("/system_stats")["packs"])]
        total = 0
        for pid in pids:
            with open(f"/proc/{pid}/status") as status:
                total += next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))
        return total >> 10
    before = shared()
    result = server.run(prompt(("g", "ZooBig", {"count": 1, "numbers": 50_000_000, "seed": 1}), ("n", "OtherSum", {"items": out("g")})))
    assert result.ok and shared() - before > 150
    server.post("/free", {"free_memory": True})
    deadline = time.monotonic() + 3 * SOON
    while shared() - before > 50:
        assert time.monotonic() < deadline, f"{shared() - before} MiB are still shared"
        time.sleep(1)
