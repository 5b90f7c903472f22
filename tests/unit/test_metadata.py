"""What nodes of several workers have changed in one dictionary, put together."""
from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from comfy_multiproc.metadata import Watched, places_of, take_over


def edited(info: Any, sent: Any, edit: Callable[[Any], object], place: str = "inputs") -> Any:
    """The result of a node in a worker that got the state `sent` and does `edit`, as the host has it afterwards."""
    values = {"inputs": {"image": 1}, "hidden": {}}
    values[place]["info"] = info
    found = places_of((None, info), values)
    there = json.loads(json.dumps({**values, place: {**values[place], "info": sent}, "metadata": found}))
    watched = Watched(there)
    edit(there[place]["info"])
    return take_over(json.loads(json.dumps(watched.with_changes(["result"]))), (None, info))


def test_each_change_arrives_where_it_was_made_and_nothing_else_does():
    workflow = {"nodes": [{"id": 1, "widgets_values": ["a"]}, {"id": 2}], "version": 1}
    info = {"workflow": workflow}
    sent = copy.deepcopy(info)
    assert edited(info, sent, lambda i: i["workflow"]["nodes"][0].update(widgets_values=["shown", "text"])) == ["result"]
    assert edited(info, sent, lambda i: i["workflow"]["nodes"][1].update(widgets_values=["of the other"]), "hidden") == ["result"]
    assert edited(info, sent, lambda i: i["workflow"].pop("version")) == ["result"]
    assert edited(info, sent, lambda i: i.update(note={"one": 1})) == ["result"]
    assert edited(info, sent, lambda i: i.update(note={"two": 2})) == ["result"]
    assert info == {"workflow": {"nodes": [{"id": 1, "widgets_values": ["shown", "text"]}, {"id": 2, "widgets_values": ["of the other"]}]},
                    "note": {"one": 1, "two": 2}}
    assert info["workflow"] is workflow


def test_a_change_whose_place_is_gone_is_left_out():
    info = {"workflow": {"nodes": [{"id": 1}]}}
    sent = copy.deepcopy(info)
    info["workflow"]["nodes"].clear()
    assert edited(info, sent, lambda i: (i["workflow"]["nodes"][0].update(id=2), i.update(last=1))) == ["result"]
    assert info == {"workflow": {"nodes": []}, "last": 1}


def test_without_a_change_the_result_is_as_it_was():
    assert Watched({"inputs": {}}).with_changes("result") == "result" == take_over("result", ())
    info = {"a": [1, {"b": None}], "n": float("nan")}
    watched = Watched({"inputs": {"info": [info]}, "metadata": places_of((info,), {"inputs": {"info": [info]}})})
    assert watched.with_changes("result") == "result"
