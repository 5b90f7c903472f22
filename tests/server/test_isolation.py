"""Workflows whose packs run in workers look like the same workflows native: the same /object_info, outputs, messages and pixels."""

import asyncio
import io
import json
import time
import urllib.request

import aiohttp
import pytest
from PIL import Image

from comfy_multiproc.testing import workflows
from comfy_multiproc.testing.server import ServerError
from comfy_multiproc.testing.workflows import Graph, out
from tests.server.browser import browser, chromium

STYLES = ("style_upscale", "style_matting", "style_prompts")        # as public packs are written
MODELS = ("txt2img_sd3", "upscale")
ZOO = ("zoo_loader", "zoo_nodes", "zoo_v3", "zoo_front", "zoo_patcher", "zoo_broken", *STYLES)


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    return tmp_path_factory.mktemp("imports") / "pids"


@pytest.fixture(scope="module")
def isolated(serve, fork_tree, imports):
    """The fork with every pack isolated: zoo_loader in a worker of its own, the others in one group."""
    return serve(fork_tree, ["--cpu", "--isolate", "all"], names=MODELS, packs=ZOO, environment={"ZOO_IMPORTS": str(imports)})


@pytest.fixture(scope="module")
def native(serve, upstream_tree):
    """ComfyUI as it is, with the same packs."""
    return serve(upstream_tree, ["--cpu"], names=MODELS, packs=ZOO)


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


def ran(result):
    """The nodes that have been run, and were not taken from the cache."""
    return {event["data"]["node"] for event in result.events if event["type"] == "executing"} - {None}


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
    edits = ("comfy.samplers.SCHEDULER_NAMES got 'zoo_schedule'", "comfy.sample.prepare_noise was replaced")
    assert not found["zoo_patcher"]["isolated"] and all(edit in found["zoo_patcher"]["reason"] for edit in edits)
    assert "nobody has" in found["zoo_broken"]["reason"] and "pid" not in found["zoo_broken"]
    lines = {name: next(line for line in isolated.log().splitlines() if f"  {name}: " in line) for name in ZOO}
    assert lines["zoo_broken"].split(": ")[1] == "nowhere"
    assert isolated.log().count('raise ImportError("zoo_broken needs') == 1, "the pack's traceback is shown once"
    assert "takes MODEL (ZooShiftModel), which is not sent" in lines["zoo_loader"] and "takes" not in lines["zoo_v3"]
    assert found["zoo_loader"]["takes_objects"] == {"MODEL": ["ZooShiftModel"]} and found["zoo_v3"]["takes_objects"] == {}
    assert all(edit in lines["zoo_patcher"] for edit in edits)


def test_what_a_pack_has_added_to_comfyui_is_offered_and_used_by_the_host(server):
    assert "zoo_schedule" in server.get("/object_info/KSampler")["KSampler"]["input"]["required"]["scheduler"][0]


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


def test_a_workflow_in_two_workers_and_the_host_gives_the_same_pixels(isolated, native):
    graph = workflows.txt2img_sd3()
    graph["ckpt"]["class_type"] = "ZooLoadCheckpoint"
    graph.add("upscaler", "StyleLoadUpscaler", model_name="tiny_compact_x2.safetensors")
    graph.add("larger", "StyleUpscaleInTiles", upscaler=out("upscaler"), image=out("decode"), tile=32)
    graph.add("small", "ImageScale", image=out("larger"), upscale_method="area", width=48, height=48, crop="disabled")
    graph.add("cut", "StyleRemoveBackground", image=out("small"), weights="random", seed=3)
    graph["save"]["inputs"]["images"] = out("cut")
    ours, theirs = isolated.run(graph), native.run(graph)
    assert ours.images == theirs.images != []
    assert ours.outputs["larger"]["pid"] == ours.outputs["cut"]["pid"] == [worker_pid(isolated, "style_upscale")] != [worker_pid(isolated, "zoo_loader")]


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
    said = {"seed": 3, "how": how, "image": "None"}
    assert ui(server.run(graph))["asked"][0] == [said]
    second = server.run(graph)
    executed = [event for event in second.events if event["type"] == "executing" and event["data"]["node"] == "n"]
    assert len(executed) == runs - 1
    graph["n"]["inputs"].update(seed=4, how="nan")
    asked = ui(server.run(graph))["asked"][0]
    assert asked == ([said] if runs == 1 else []) + [{**said, "seed": 4, "how": "nan"}]     # once for each prompt


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
    assert ran(result) == {pick, "n"}


def test_an_instance_lives_as_long_as_native(server):
    graph = nodes(("n", "ZooCounted", {"value": 1, "again": 1}))
    runs, calls = [], []
    for again in (10, 11, 12):
        graph["n"]["inputs"]["again"] = again
        said = ui(server.run(graph))
        runs.append(said["runs"][0])
        calls.append(said["calls"][0])
        assert said["who"] == ["zoo_nodes"]     # of the module that the pack imports relatively
    assert calls == [calls[0], calls[0] + 1, calls[0] + 2]      # which keeps its state from call to call
    server.run(nodes(("other", "ZooCounted", {"value": 1, "again": 99})))      # a prompt without the node
    graph["n"]["inputs"]["again"] = 13
    runs.append(ui(server.run(graph))["runs"][0])
    assert runs == [1, 2, 3, 1]


def test_expansion_has_the_ids_of_native_and_is_cached(server):
    """Also where two packs expand in two workers, each with a counter of its own."""
    graph = nodes(("7", "ZooExpand", {"value": 5}), ("9", "ZooExpandElsewhere", {"value": 6}), ("n", "ZooCounted", {"value": out("7"), "again": 0}),
                  ("o", "ZooCounted", {"value": out("9"), "again": 0}))
    result = server.run(graph)
    assert (ui(result)["value"], ui(result, "o")["value"]) == ([6], [7])
    assert {"7.0.0.1", "7.0.0.2", "9.0.0.1", "9.0.0.2"} <= ran(result)
    again = server.run(graph)
    assert again.ok and not [e for e in again.events if e["type"] == "executing" and e["data"]["node"]]


def test_equal_nodes_run_once(server):
    tally = {"name": f"equal {time.time_ns()}", "seconds": 0.3}
    result = server.run(nodes(("a", "ZooTally", tally), ("b", "ZooTally", tally), ("after a", "ZooCounted", {"value": out("a"), "again": 1}),
                              ("after b", "ZooCounted", {"value": out("b"), "again": 2})))
    assert ui(result, "a") == ui(result, "b") == {"runs": [1]}
    assert ui(result, "after a") and ui(result, "after b")


def test_equal_nodes_that_expand_do_not_clash(server):
    value = {"value": time.time_ns() % 10 ** 9}
    result = server.run(nodes(("7", "ZooExpand", value), ("9", "ZooExpand", value), ("n", "ZooCounted", {"value": out("7"), "again": 1}),
                              ("o", "ZooCounted", {"value": out("9"), "again": 2})))
    assert ui(result) and ui(result, "o")


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


def test_what_nodes_write_into_the_workflow_is_saved_with_the_picture(server):
    graph = nodes(("e", "EmptyImage", {"width": 8, "height": 8, "batch_size": 1, "color": 0}),
                  *((id, "ZooRemark", {"image": out("e"), "text": id}) for id in ("one", "two")),
                  ("both", "ImageBatch", {"image1": out("one"), "image2": out("two")}), ("n", "SaveImage", {"images": out("both"), "filename_prefix": "remarks"}))
    image = ui(server.run(graph))["images"][0]
    saved = Image.open(io.BytesIO(server.request(f"/view?filename={image['filename']}&type=output"))).text
    assert json.loads(saved["remarks"]) == {"zoo": [], "one": 3, "two": 3}
    assert sorted(id for id, node in json.loads(saved["prompt"]).items() if "seen" in node) == ["one", "two"]


def test_hidden_inputs(server):
    said = ui(server.run(nodes(("n", "ZooHidden", {"seed": 1}), ("m", "ZooHidden", {"seed": 2}))))
    assert said["nodes"] == [["m", "n"]] and said["id"] == ["n"]


@pytest.mark.parametrize("through", [None, ("ComfySwitchNode", {"switch": True, "on_true": out("t"), "on_false": out("t")}), ("ZooPass", {"value": out("t"), "pack": "zoo_nodes.helper"})],
                         ids=["directly", "through a core node", "through a pack of the host"])
def test_a_thing_of_the_pack_is_the_same_object_for_its_next_node(server, isolated, through):
    graph = nodes(("t", "ZooMakeThing", {"text": "it"}), *([("p", *through)] if through else []), ("n", "ZooUseThing", {"thing": out("p" if through else "t")}))
    result = server.run(graph)
    assert ui(result) == {"text": ["it"], "same": [True]}
    if server is isolated and "p" in result.outputs:
        assert ui(result, "p") == {"imported": [[]], "pid": [server.pid]}       # the host has not imported the pack


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


async def test_nodes_of_a_worker_and_of_the_host_report_at_the_same_time(server):
    seed = time.time_ns() % 10 ** 9
    prompt, texts, binary = await followed(server, nodes(("a", "ZooProgress", {"steps": 10, "pause": 0.12, "seed": seed}),
                                                         ("b", "ZooPatientProgress", {"steps": 10, "pause": 0.1, "seed": seed})))
    reports = [m["data"] for m in texts if m["type"] == "progress"]
    assert {m["prompt_id"] for m in reports} == {prompt} and {m["node"] for m in reports} == {"a", "b"}
    for node in "ab":
        values = [m["value"] for m in reports if m["node"] == node]
        assert values == sorted(values) and values[-1] == 10 and all(m["max"] == 10 for m in reports)
    [preview] = [data for kind, data in binary if kind == 4]        # with what it belongs to
    length = int.from_bytes(preview[:4])
    about = json.loads(preview[4:4 + length])
    assert (about["node_id"], about["prompt_id"]) == ("a", prompt)
    assert Image.open(io.BytesIO(preview[4 + length:])).getpixel((0, 0)) == (4, 0, 0)


def test_a_thread_that_knows_no_node_reports_for_the_one_that_runs(server):
    result = server.run(nodes(("a", "ZooProgress", {"steps": 10, "pause": 0.12, "helper": True, "seed": time.time_ns() % 10 ** 9})))
    reports = [e["data"] for e in result.events if e["type"] == "progress"]
    assert {m["node"] for m in reports} == {"a"} and [m["value"] for m in reports][-1] == 10 and len(reports) > 5


def test_the_rate_of_reports_has_a_bound(server):
    result = server.run(nodes(("a", "ZooProgress", {"steps": 3000, "pause": 0.0, "seed": time.time_ns() % 10 ** 9})))
    reports = [e for e in result.events if e["type"] == "progress"]
    assert reports[-1]["data"]["value"] == 3000
    assert len(reports) <= 50 * ui(result, "a")["seconds"][0] + 10


async def test_a_text_is_shown_at_its_node(server):
    _, _, binary = await followed(server, nodes(("n", "ZooSends", {"text": "half way", "file": server.get("/object_info/ZooSends")["ZooSends"]["input"]["required"]["file"][0][0]})))
    assert b"\0\0\0\x01nhalf way" in [data for kind, data in binary if kind == 3]


async def followed(server, prompt):
    """Run a prompt as the page does, which takes previews with what they belong to: its id, its messages, and what came as (kind, bytes)."""
    texts, binary = [], []
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=page", max_msg_size=0) as socket:
        await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        id_ = None
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                binary.append((int.from_bytes(message.data[:4]), message.data[4:]))
                continue
            said = json.loads(message.data)
            if said["type"] == "feature_flags":
                id_ = (await asyncio.to_thread(server.post, "/prompt", {"prompt": prompt, "client_id": "page"}))["prompt_id"]
            elif id_ is not None:
                texts.append(said)
                assert said["type"] != "execution_error", said
                if said["type"] == "execution_success":
                    return id_, texts, binary
    raise AssertionError("the server has closed the connection")


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


def test_lazy_inputs_of_any_number(isolated, native):
    """Whichever of them this release of ComfyUI runs: the same."""
    found = []
    for server in (isolated, native):
        result = server.run(nodes(*((f"i{i}", "ZooSilent", {"value": i, "again": time.time_ns() % 10 ** 9}) for i in range(3)),
                                  ("n", "ZooLazyGrown", {"pick": "v1", **{f"values.v{i}": out(f"i{i}") for i in range(3)}})))
        found.append((ui(result), ran(result)))
    assert found[0] == found[1]
    assert found[0][0]["values"][0]["v1"] == 1


def test_an_async_node_of_the_newer_style_reports_through_the_api(server):
    result = server.run(nodes(("n", "ZooAsyncV3", {"seed": time.time_ns() % 10 ** 9})))
    assert result.outputs["n"]["text"][0].startswith("seed ")
    states = [e["data"]["nodes"]["n"] for e in result.events if e["type"] == "progress_state" and "n" in e["data"]["nodes"]]
    assert [s for s in states if (s["value"], s["max"]) == (3, 5)]


def test_a_blocker_of_the_newer_style(server):
    result = server.run(nodes(("b", "ZooBlockV3", {"block": True}), ("n", "ZooCounted", {"value": out("b"), "again": 0})))
    assert result.error and "blocked by the zoo" in result.error["exception_message"]


# packs as public ones are written

def test_a_pack_that_upscales_in_tiles(isolated, native):
    def upscaled(server):
        graph = nodes(("l", "StyleLoadUpscaler", {"model_name": "tiny_compact_x2.safetensors"}), ("i", "LoadImage", {"image": "tiny.png"}),
                      ("n", "StyleUpscaleInTiles", {"upscaler": out("l"), "image": out("i"), "tile": 32}), ("s", "PreviewImage", {"images": out("n")}))
        result = server.run(graph)
        said = ui(result)
        reports = [e["data"] for e in result.events if e["type"] == "progress" and e["data"]["node"] == "n"]
        assert said["steps"][0] > 4 and reports[-1]["value"] == reports[-1]["max"] == said["steps"][0]
        return result.images, said["pid"][0]
    ours, theirs = upscaled(isolated), upscaled(native)
    assert ours[0] == theirs[0] != []
    assert ours[1] == worker_pid(isolated, "style_upscale") and theirs[1] == native.pid


def test_a_pack_that_loads_a_network_of_its_own(isolated, native):
    def removed(server):
        graph = nodes(("i", "LoadImage", {"image": "tiny.png"}), ("n", "StyleRemoveBackground", {"image": out("i"), "weights": "random", "seed": 5}),
                      ("m", "MaskToImage", {"mask": out("n", 1)}), ("a", "PreviewImage", {"images": out("n")}), ("b", "PreviewImage", {"images": out("m")}))
        result = server.run(graph)
        assert ui(result)["held"] == [True]
        return result.images, ui(result)["pid"][0]
    ours, theirs = removed(isolated), removed(native)
    assert ours[0] == theirs[0] and len(set(ours[0])) == 2
    assert ours[1] == worker_pid(isolated, "style_matting")
    assert "matting" in isolated.get("/models")


async def test_a_pack_that_keeps_prompts(server):
    name = f"night-{time.time_ns()}"
    graph = nodes(("n", "StyleSavedPrompt", {"name": name}))
    with pytest.raises(ServerError, match="no saved prompt"):
        await asyncio.to_thread(server.run, graph)
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=page") as page:
        async with session.post(f"{server.url}/api/style_prompts/{name}", json={"text": "a lake"}) as answer:
            names = (await answer.json())["names"]
        while (told := await page.receive_json(timeout=30))["type"] != "style_prompts.saved":
            pass
        told = told["data"]
        assert told["names"] == names and name in names
    assert server.get("/style_prompts")[name] == "a lake"
    deadline = time.monotonic() + 10        # what was just asked is not asked again
    while name not in server.get("/object_info/StyleSavedPrompt")["StyleSavedPrompt"]["input"]["required"]["name"][0]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert ui(await server.run_async(graph))["text"] == ["a lake"]
    again = await server.run_async(graph)
    assert not ran(again)
    await asyncio.to_thread(server.post, f"/style_prompts/{name}", {"text": "a sea"})
    assert ui(await server.run_async(graph))["text"] == ["a sea"]       # what it read has changed
    assert b"style_prompts.saved" in server.request("/style_prompts_files/prompts.js")


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
