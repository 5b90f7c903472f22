"""What is known of packs from earlier starts: for the same files only, and never in the way."""

import json
import os
import sys
import types

import pytest

from comfy_multiproc import describe, descriptions, interface, pack, proxy
from comfy_multiproc.descriptions import Description

SAID = {"packs": {"one": {"classes": [{"id": "A"}], "edits": [], "folders": {}, "web_directories": {}}}, "routes": [], "replacements": [],
        "prompt_handlers": 0}


@pytest.fixture
def packs(tmp_path, monkeypatch):
    monkeypatch.setenv("COMFY_MULTIPROC_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "one"
    path.mkdir()
    (path / "__init__.py").write_text("")
    return [pack.decide(path, ["one"])]


def test_it_holds_for_the_same_files_only(packs):
    Description("one", packs).keep(SAID)
    assert Description("one", packs).said == SAID
    assert Description("other", packs).said is None
    os.utime(packs[0].path / "__init__.py", ns=(1, 1))
    assert Description("one", packs).said is None
    Description("one", packs).keep(SAID)
    (packs[0].path / "more.py").write_text("")
    assert Description("one", packs).said is None


@pytest.mark.parametrize("damage", [
    lambda text: text[:-5], lambda text: "", lambda text: "[]", lambda text: "\0" * 100, lambda text: "[" * 100_000,
    lambda text: text.replace('"routes": []', '"routes": 3'), lambda text: text.replace('"A"', "7"), lambda text: text.replace('"one"', '"two"'),
])
def test_what_is_damaged_is_not_used_and_written_anew(packs, damage):
    known = Description("one", packs)
    known.keep(SAID)
    known.path.write_text(damage(known.path.read_text()))
    again = Description("one", packs)
    assert again.said is None
    again.keep(SAID)
    assert Description("one", packs).said == SAID


@pytest.mark.parametrize("change", [{"error": "ImportError"}, {"edits": ["nodes.x was replaced"]}])
def test_only_what_can_be_isolated_is_kept(packs, change):
    known = Description("one", packs)
    known.keep(SAID)
    known.keep({**SAID, "packs": {"one": {**SAID["packs"]["one"], **change}}})
    assert Description("one", packs).said is None and not known.path.exists()


def test_a_folder_that_cannot_be_written_stops_nothing(packs, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMFY_MULTIPROC_CACHE", str(tmp_path / "file"))
    known = Description("one", packs)
    known.keep(SAID)
    known.forget()
    assert Description("one", packs).said is None


def test_the_number_of_entries_has_a_bound(packs, monkeypatch):
    monkeypatch.setattr(descriptions, "ENTRIES", 3)
    for i in range(5):
        known = Description(f"worker {i}", packs)
        known.keep(SAID)
        os.utime(known.path, (i, i))
    known.keep(SAID)
    left = list(known.path.parent.iterdir())
    assert len(left) == 3 and known.path in left


def node(id_, category="zoo", **more):
    return {"id": id_, "v3": False, "attributes": {"CATEGORY": category}, "function": "run", "methods": {}, "inputs": {"dict": []}, **more}


def test_what_differs_is_exchanged_and_what_does_not_stays():
    """Nobody else's node of the same name is touched."""
    before = {"classes": [node("Same"), node("Other"), node("Gone"), node("Taken")]}
    known = proxy.Interface("one", before, None)
    mappings = dict(proxy.module_of(known).NODE_CLASS_MAPPINGS, Taken=str)
    nodes = types.SimpleNamespace(NODE_CLASS_MAPPINGS=mappings, NODE_DISPLAY_NAME_MAPPINGS={"Gone": "Gone"})
    same, other = mappings["Same"], mappings["Other"]
    now = {"classes": [node("Same", inputs={"dict": [["required", {"dict": []}]]}), node("Other", "new"), node("More"), node("Taken", "new")],
           "display_names": {"More": "A new one"}}
    changed = proxy.exchange(known, json.loads(json.dumps(now)), nodes)
    assert changed == ["Gone", "More", "Other"]
    assert mappings["Same"] is same and mappings["Other"] is not other and mappings["Other"].CATEGORY == "new"
    assert mappings["Taken"] is str and "Gone" not in mappings and issubclass(mappings["More"], proxy.Isolated)
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS == {"More": "A new one"}
    assert same.INPUT_TYPES() == {"required": {}}


def test_sets_are_described_alike_in_every_process():
    texts = [f"text {i}" for i in range(20)]
    assert interface.encode(set(texts)) == {"set": sorted(texts)}


def test_what_an_import_has_not_found_is_said_with_what_installs_it(tmp_path):
    missing = ModuleNotFoundError("No module named 'not_there'", name="not_there.inner")
    assert describe._remedy(missing, tmp_path).endswith(f"{sys.executable} -m pip install not_there")
    (tmp_path / "requirements.txt").write_text("not-there")
    assert describe._remedy(missing, tmp_path).endswith(f"pip install -r {tmp_path / 'requirements.txt'}")
    assert describe._remedy(ModuleNotFoundError("No module named 'json.inner'", name="json.inner"), tmp_path) == ""
    assert describe._remedy(ImportError("its own words"), tmp_path) == ""
