"""Workflows whose packs run in workers look like the same workflows native: the same /object_info, outputs, messages and pixels."""

import json
import time
import urllib.request

import pytest

from comfy_multiproc.testing import workflows
from comfy_multiproc.testing.server import ServerError
from comfy_multiproc.testing.workflows import Graph, out
from tests.server.browser import browser, chromium

ZOO = ("zoo_loader", "zoo_nodes", "zoo_v3", "zoo_front", "zoo_patcher", "zoo_broken")


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    return tmp_path_factory.mktemp("imports") / "pids"


@pytest.fixture(scope="module")
def isolated(serve, fork_tree, imports):
    """The fork with every pack isolated: zoo_loader in a worker of its own, the others in one group."""
    return serve(fork_tree, ["--cpu", "--isolate", "all"], packs=ZOO, environment={"ZOO_IMPORTS": str(imports)})


@pytest.fixture(scope="module")
def native(serve, upstream_tree):
    """ComfyUI as it is, with the same packs."""
    return serve(upstream_tree, ["--cpu"], packs=ZOO)


@pytest.fixture(params=["isolated", "native"])
def server(request):
    """A test that takes this says what is so in both."""
    return request.getfixturevalue(request.param)


def nodes(*entries):
    """A prompt of (id, class, inputs)."""
    graph = Graph()
    for id, kind, inputs in entries:
        graph.add(id, kind, **inputs)
    return graph


def ui(result, id="n"):
    assert result.ok, result.error
    return result.outputs[id]


def packs(server):
    return {pack["name"]: pack for pack in server.get("/system_stats")["packs"]}


def worker_pid(server, pack):
    return packs(server)[pack]["pid"]


# what the page sees

def test_every_node_is_described_as_native(isolated, native):
    ours, theirs = isolated.get("/object_info"), native.get("/object_info")
    assert set(ours) - set(theirs) == {"MultiprocMemory", "MultiprocRelease", "MultiprocLoadCheckpoint"} and set(theirs) <= set(ours)
    assert [name for name in theirs if json.dumps(ours[name]) != json.dumps(theirs[name])] == []


def test_one_node_is_described_as_native(isolated, native):
    assert isolated.request("/object_info/ZooEverything") == native.request("/object_info/ZooEverything")


def test_a_new_file_is_offered_when_the_page_asks_again(isolated):
    models = isolated.home / "models" / "checkpoints"
    before = isolated.get("/object_info/ZooLoadCheckpoint")
    link = models / "zoo_copy.safetensors"
    try:
        link.symlink_to(next(models.glob("*.safetensors")))
        time.sleep(1.1)     # what was just asked is not asked again
        after = isolated.get("/object_info/ZooLoadCheckpoint")
    finally:
        link.unlink(missing_ok=True)
    options = [info["ZooLoadCheckpoint"]["input"]["required"]["ckpt_name"][0] for info in (before, after)]
    assert set(options[1]) - set(options[0]) == {"zoo_copy.safetensors"}


def test_the_log_and_the_stats_say_where_each_pack_runs(isolated):
    found = packs(isolated)
    assert found["zoo_nodes"]["pid"] == found["zoo_v3"]["pid"] == found["zoo_front"]["pid"] != found["zoo_loader"]["pid"]
    assert isolated.pid not in {pack.get("pid") for pack in found.values()}
    assert not found["zoo_patcher"]["isolated"] and "zoo_schedule" in found["zoo_patcher"]["reason"]
    assert "nobody has" in found["zoo_broken"]["reason"] and "pid" not in found["zoo_broken"]
    log = isolated.log()
    for name in ZOO:
        assert f"  {name}: " in log


def test_nothing_is_said_of_packs_where_none_is_isolated(native):
    assert "packs" not in native.get("/system_stats")


# models

@pytest.mark.behaviour(15)
def test_a_model_of_a_worker_is_sampled_and_decoded_there_to_the_same_pixels(isolated, native):
    graph = workflows.txt2img_sd3()
    graph["ckpt"]["class_type"] = "ZooLoadCheckpoint"
    ours, theirs = isolated.run(graph), native.run(graph)
    assert ours.images == theirs.images != []
    assert "[zoo_loader]" in isolated.log() and "Requested to load SD3" in isolated.log()


@pytest.mark.behaviour(1)
def test_a_model_of_the_host_is_made_again_in_the_worker_that_needs_it(isolated, native):
    graph = workflows.txt2img_sd3()
    graph.add("shifted", "ZooShiftModel", model=out("ckpt"), scale=1.5)
    graph["sampler"]["inputs"]["model"] = out("shifted")
    ours, theirs = isolated.run(graph), native.run(graph)
    assert ours.images == theirs.images != []
    assert ours.images != isolated.run(workflows.txt2img_sd3()).images


def test_models_of_worker_and_host_in_one_workflow(isolated, native):
    graph = workflows.txt2img_sd3()
    graph.add("mine", "ZooLoadCheckpoint", ckpt_name=graph["ckpt"]["inputs"]["ckpt_name"])
    graph["sampler"]["inputs"]["model"] = out("mine")
    assert isolated.run(graph).images == native.run(graph).images != []


def test_samplers_and_noise_of_the_host_go_to_the_model(isolated, native):
    graph = workflows.txt2img_sd3()
    graph["ckpt"]["class_type"] = "ZooLoadCheckpoint"
    sampler = graph.pop("sampler")["inputs"]
    graph.add("guider", "CFGGuider", model=sampler["model"], positive=sampler["positive"], negative=sampler["negative"], cfg=4.0)
    graph.add("sigmas", "BasicScheduler", model=sampler["model"], scheduler="simple", steps=2, denoise=1.0)
    graph.add("euler", "KSamplerSelect", sampler_name="euler")
    graph.add("noise", "RandomNoise", noise_seed=5)
    graph.add("sampler", "SamplerCustomAdvanced", noise=out("noise"), guider=out("guider"), sampler=out("euler"), sigmas=out("sigmas"),
              latent_image=sampler["latent_image"])
    assert isolated.run(graph).images == native.run(graph).images != []


def test_objects_of_two_workers_in_one_node_are_refused_by_name(isolated):
    graph = nodes(("m", "ZooLoadCheckpoint", {"ckpt_name": "tiny_sd3.safetensors"}), ("t", "ZooMakeThing", {"text": "x"}),
                  ("n", "ZooUseThing", {"thing": out("t")}))
    assert isolated.run(graph).ok
    graph["n"]["inputs"]["thing"] = out("m")
    with pytest.raises(ServerError, match="mismatch"):
        isolated.run(graph)


def test_an_object_that_only_passes_through_a_worker_comes_back_as_itself(isolated, native):
    graph = workflows.txt2img_sd3()
    graph.add("through", "ZooTricks", mode="a", big=1, model=out("ckpt"))
    assert isolated.run(graph).ok and native.run(graph).ok


# the older style

def test_type_tricks_validate_and_run(server):
    graph = nodes(("e", "EmptyImage", {"width": 8, "height": 8, "batch_size": 1, "color": 0}),
                  ("n", "ZooTricks", {"mode": "a", "big": 2 ** 63, "k7": out("e"), "first": out("e"), "more": 3}),
                  ("after", "ZooTricks", {"mode": "b", "big": 1, "x": out("n", 6)}))
    said = ui(server.run(graph))
    assert said["inputs"] == [["first", "k7", "more"]] and said["shapes"][0]["k7"] == [1, 8, 8, 3] and said["id"] == ["n"]


def test_the_node_runs_in_its_worker(isolated):
    said = ui(isolated.run(nodes(("n", "ZooTricks", {"mode": "a", "big": 1}))))
    assert said["pid"] == [worker_pid(isolated, "zoo_nodes")]


@pytest.mark.parametrize("how, runs", [("seed", 1), ("nan", 2), ("raise", 2)])
def test_change_checks(server, how, runs):
    graph = nodes(("e", "EmptyImage", {"width": 8, "height": 8, "batch_size": 1, "color": 0}),
                  ("n", "ZooChanged", {"seed": 3, "how": how, "image": out("e")}))
    first = ui(server.run(graph))["asked"][0]
    assert first[-1] == {"seed": 3, "how": how, "image": "None"}
    second = server.run(graph)
    executed = [event for event in second.events if event["type"] == "executing" and event["data"]["node"] == "n"]
    assert len(executed) == runs - 1


def test_validation(server):
    assert server.run(nodes(("n", "ZooValidated", {"seed": 12, "name": "a"}))).ok      # its own check replaces the bound of 5
    with pytest.raises(ServerError, match="13 is unlucky for Ann"):
        server.run(nodes(("n", "ZooValidated", {"seed": 13, "name": "Ann"})))


@pytest.mark.parametrize("pick", ["a", "b"])
def test_only_the_chosen_branch_runs(server, pick):
    graph = nodes(("a", "ZooCounted", {"value": 1, "again": ord(pick)}), ("b", "ZooCounted", {"value": 2, "again": ord(pick)}),
                  ("n", "ZooLazySwitch", {"pick": pick, "a": out("a"), "b": out("b")}))
    for id in "ab":
        graph[id]["class_type"] = "ZooSilent"       # no output node, so that only the switch asks for it
    result = server.run(graph)
    assert ui(result)["seen"] == [[[None, None], [1 if pick == "a" else None, 2 if pick == "b" else None]]]
    assert ui(result)["values"] == [[1, None] if pick == "a" else [None, 2]]


def test_an_instance_lives_as_long_as_native(server):
    graph = nodes(("n", "ZooCounted", {"value": 1, "again": 1}))
    runs = []
    for again in (10, 11, 12):
        graph["n"]["inputs"]["again"] = again
        runs.append(ui(server.run(graph))["runs"][0])
    server.run(nodes(("other", "ZooCounted", {"value": 1, "again": 99})))      # a prompt without the node
    graph["n"]["inputs"]["again"] = 13
    runs.append(ui(server.run(graph))["runs"][0])
    assert runs == [1, 2, 3, 1]


def test_expansion_has_the_ids_of_native_and_is_cached(server):
    graph = nodes(("7", "ZooExpand", {"value": 5}), ("9", "ZooExpand", {"value": 6}), ("n", "ZooCounted", {"value": out("7"), "again": 0}),
                  ("o", "ZooCounted", {"value": out("9"), "again": 0}))
    result = server.run(graph)
    assert result.ok, result.error
    ids = {event["data"]["node"] for event in result.events if event["type"] == "executing"} - {None}
    assert {"7.0.0.1", "7.0.0.2", "9.0.0.1", "9.0.0.2"} <= ids
    again = server.run(graph)
    assert again.ok and not [e for e in again.events if e["type"] == "executing" and e["data"]["node"]]


def test_a_node_that_expands_itself_reads_the_grown_prompt(server):
    graph = nodes(("l", "ZooLoop", {"left": 3, "total": 0}), ("n", "ZooEach", {"text": out("s")}), ("s", "ZooText", {"value": out("l")}))
    assert ui(server.run(graph))["text"] == ["6"]


def test_lists_and_blockers(server):
    graph = nodes(("s", "ZooSource", {"message": ""}), ("n", "ZooEach", {"text": out("s")}), ("w", "ZooWhole", {"text": out("s")}),
                  ("again", "ZooEach", {"text": out("n")}))
    result = server.run(graph)
    assert ui(result)["text"] == ["x", "x"]
    assert ui(result, "again")["text"] == ["x!", "x!"]
    assert "w" not in result.outputs


def test_a_list_output_keeps_its_equal_items(server):
    graph = nodes(("w", "ZooWhole", {"text": "a"}), ("n", "ZooEach", {"text": out("w")}))
    assert ui(server.run(graph))["text"] == ["y", "y", "y"]


def test_a_blocker_with_a_message_is_shown(server):
    graph = nodes(("s", "ZooSource", {"message": "stop here"}), ("n", "ZooEach", {"text": out("s")}))
    result = server.run(graph)
    assert result.error and "stop here" in result.error["exception_message"] and result.error["node_type"] == "ZooEach"


def test_async_nodes_of_one_worker_overlap(server):
    graph = nodes(*((f"{i}", "ZooAsync", {"seconds": 0.5, "seed": time.time_ns() % 10 ** 9 + i}) for i in range(3)))
    result = server.run(graph)
    spans = [ui(result, str(i))["span"][0] for i in range(3)]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


def test_hidden_inputs(server):
    said = ui(server.run(nodes(("n", "ZooHidden", {"seed": 1}), ("m", "ZooHidden", {"seed": 2}))))
    assert said["nodes"] == [["m", "n"]] and said["id"] == ["n"]


def test_a_thing_of_the_pack_is_the_same_object_for_its_next_node(server):
    said = ui(server.run(nodes(("t", "ZooMakeThing", {"text": "it"}), ("n", "ZooUseThing", {"thing": out("t")}))))
    assert said == {"text": ["it"], "same": [True]}


@pytest.mark.parametrize("size", [8, 1024])
def test_editing_an_input_in_place_leaves_the_cached_value_alone(isolated, size):
    graph = nodes(("e", "EmptyImage", {"width": size, "height": size, "batch_size": 1, "color": 0}), ("n", "ZooInPlace", {"image": out("e"), "seed": 1}),
                  ("native", "ImageScale", {"image": out("e"), "upscale_method": "area", "width": 4, "height": 4, "crop": "disabled"}),
                  ("mean", "ZooMean", {"image": out("native"), "seed": 1}))
    assert ui(isolated.run(graph))["mean"] == [1.0]
    graph["n"]["inputs"]["seed"] = graph["mean"]["inputs"]["seed"] = 2
    graph["native"]["inputs"]["width"] = 5
    result = isolated.run(graph)
    assert ui(result)["mean"] == [1.0] and ui(result, "mean")["mean"] == [0.0] and ui(result)["inference"] == [True]


def test_prints_are_in_the_log_under_the_worker(isolated):
    assert isolated.run(nodes(("n", "ZooPrints", {"lines": 3}))).ok
    deadline = time.monotonic() + 10
    while "zoo says 2 é" not in isolated.log() and time.monotonic() < deadline:
        time.sleep(0.05)
    line = next(line for line in isolated.log().splitlines() if "zoo says 2 é" in line)
    assert "[zoo]" in line


def test_progress_and_previews_carry_the_id_of_their_node(server):
    graph = nodes(("a", "ZooProgress", {"steps": 10, "pause": 0.12, "seed": time.time_ns() % 10 ** 9}))
    result = server.run(graph)
    updates = [e["data"] for e in result.events if e["type"] == "progress"]
    assert updates and {u["node"] for u in updates} == {"a"} and updates[-1]["value"] == updates[-1]["max"] == 10
    states = [e["data"]["nodes"]["a"] for e in result.events if e["type"] == "progress_state" and "a" in e["data"]["nodes"]]
    assert [s for s in states if s["state"] == "running" and s["value"] == 5]


# the newer style

def test_every_kind_of_input_of_the_newer_style(isolated, native):
    graph = nodes(("e", "EmptyImage", {"width": 8, "height": 8, "batch_size": 1, "color": 0}),
                  ("n", "ZooEverything", {"count": 3, "scale": 2.0, "text": "t", "flag": False, "pick": "one", "either": out("e"), "matched": out("e"),
                                          "many.n0": 4, "many.n1": 5, "kind": "fancy", "kind.level": 2, "kind.label": "l"}))
    ours, theirs = ui(isolated.run(graph)), ui(native.run(graph))
    assert ours["said"] == theirs["said"]
    assert ours["said"][0]["kind"] == {"kind": "fancy", "level": 2, "label": "l"} and ours["said"][0]["many"] == {"n0": 4, "n1": 5}
    assert ours["pid"] == [worker_pid(isolated, "zoo_v3")]


def test_fingerprints_of_the_newer_style(server):
    graph = nodes(("n", "ZooFingerprint", {"seed": 4}))
    assert ui(server.run(graph))["asked"] == [[4]]
    graph["n"]["inputs"]["seed"] = 5
    result = server.run(graph)
    assert result.ok and [e for e in result.events if e["type"] == "executing" and e["data"]["node"]]
    with pytest.raises(ServerError, match="seed is negative"):
        server.run(nodes(("n", "ZooFingerprint", {"seed": -1})))


def test_lazy_inputs_of_the_newer_style(server):
    graph = nodes(("a", "ZooSilent", {"value": 1, "again": 0}), ("b", "ZooSilent", {"value": 2, "again": 0}),
                  ("n", "ZooLazyV3", {"first": False, "a": out("a"), "b": out("b")}))
    assert ui(server.run(graph))["values"] == [[None, 2]]


def test_an_async_node_of_the_newer_style_reports_through_the_api(server):
    result = server.run(nodes(("n", "ZooAsyncV3", {"seed": time.time_ns() % 10 ** 9})))
    assert result.outputs["n"]["text"][0].startswith("seed ")
    states = [e["data"]["nodes"]["n"] for e in result.events if e["type"] == "progress_state" and "n" in e["data"]["nodes"]]
    assert [s for s in states if (s["value"], s["max"]) == (3, 5)]


def test_a_blocker_of_the_newer_style(server):
    result = server.run(nodes(("b", "ZooBlockV3", {"block": True}), ("n", "ZooCounted", {"value": out("b"), "again": 0})))
    assert result.error and "blocked by the zoo" in result.error["exception_message"]


# the pack's page

def test_routes_answer_from_the_worker(isolated):
    said = isolated.get("/zoo/pid")
    assert said["pid"] == worker_pid(isolated, "zoo_front") == int(said["prestartup"]) and said["queue"] == 0
    assert isolated.get("/api/zoo/pid") == said


def test_bodies_headers_and_status_of_routes(server):
    request = urllib.request.Request(server.url + "/zoo/echo/Ann?q=a%20b", data=b"abc" * 100_000, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 201 and answer.headers["X-Zoo"] == "Ann" and answer.headers["X-Query"] == "a b"
        assert answer.read() == b"cba" * 100_000
    with urllib.request.urlopen(server.url + "/zoo/stream", timeout=30) as answer:
        assert answer.read() == b"".join(bytes([65 + i]) * 1_000_000 for i in range(4))


async def test_a_websocket_of_a_pack(server):
    import aiohttp
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/zoo/socket") as socket:
        await socket.send_str("hello")
        assert (await socket.receive(timeout=30)).data == "HELLO"


def test_what_the_stand_in_lacks_is_said_when_it_is_used(isolated):
    assert b"user_manager: the server is another process" in isolated.request("/zoo/unsupported")


def test_front_end_files_are_served_by_the_host(server):
    files = [f for f in server.get("/extensions") if "zoo" in f]
    assert len(files) == 1 and b"zoo.front" in server.request(files[0])


def test_a_page_of_a_pack_loads_in_a_browser_and_its_route_answers(isolated):
    program = chromium()
    if program is None:
        pytest.skip("needs chromium")
    with browser(program) as open_page:
        page = open_page()
        page.open(isolated.url)
        assert int(page.until("document.body.dataset.zoo", "the pack's extension")) == worker_pid(isolated, "zoo_front")


def test_folders_that_a_pack_adds_are_known_to_the_host(server):
    assert server.get("/models/zoo_models") == ["zoo.js"] or "zoo_models" in server.get("/models")


def test_prompt_handlers_and_messages(isolated):
    graph = nodes(("n", "ZooSends", {"text": "hello", "file": "zoo.js"}))
    try:
        result = isolated.run(graph)
    except ServerError:
        graph["n"]["inputs"]["file"] = "none"
        result = isolated.run(graph)
    assert ui(result)["tag"] == [worker_pid(isolated, "zoo_front")]
    said = [e["data"] for e in result.events if e["type"] == "zoo.said"]
    assert [(s["text"], s["node"]) for s in said] == [("hello", "n")]


def test_the_pack_is_imported_in_its_worker_only(isolated, imports):
    assert [int(line) for line in imports.read_text().split()] == [worker_pid(isolated, "zoo_front")]
