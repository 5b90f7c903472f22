"""What ComfyUI reads off a class survives the way to another process, tricks included."""

import enum
import json
import math

import pytest

from comfy_multiproc import interface
from comfy_multiproc.interface import Files, InterfaceError, Opaque, decode, encode


def crossed(value, types=()):
    return decode(json.loads(json.dumps(encode(value, types))))


class Kind(str, enum.Enum):
    a = "A"


@pytest.mark.parametrize("value", [
    None, True, 3, -(2 ** 63), 2 ** 64 - 1, 1.5, -0.0, math.inf, "text", "", [], (), {}, [1, (2, [3])], {"a": ("INT", {"min": 0})}, {1: "one"},
    {"set": {1, 2}}, ("a",),
])
def test_plain_values_keep_their_exact_types(value):
    assert crossed(value) == value and repr(crossed(value)) == repr(value)


def test_not_a_number_and_enumerations():
    assert math.isnan(crossed(math.nan))
    assert crossed({"display": Kind.a}) == {"display": "A"} and json.dumps(crossed(Kind.a)) == json.dumps(Kind.a)


class NotUnequal(str):
    def __ne__(self, other):
        return False


class EqualToAll(NotUnequal):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


class Either(str):
    def __ne__(self, other):
        return other not in ("IMAGE", "MASK", "*")


@pytest.mark.parametrize("kind", [NotUnequal, EqualToAll, Either, str])
@pytest.mark.parametrize("other", ["IMAGE", "MASK", "LATENT", "*"])
def test_type_names_that_lie_keep_lying_the_same_way(kind, other):
    original = kind("*")
    there = crossed(original, ("IMAGE", "MASK", "LATENT"))
    assert (there != other, there == other) == (original != other, original == other)
    assert (other != there, other == there) == (other != original, other == original)
    assert json.dumps(there) == json.dumps(original)


class Open(dict):
    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return (NotUnequal("*"),)


class Endless(tuple):
    def __getitem__(self, index):
        return tuple.__getitem__(self, min(index, len(self) - 1))


def test_a_dictionary_that_claims_every_key():
    there = crossed({"optional": Open({"a": ("INT",)})})["optional"]
    assert "k7" in there and not there["k7"][0] != "IMAGE" and list(there) == ["a"]
    assert json.dumps(there) == json.dumps(Open({"a": ("INT",)}))
    assert "k7" not in crossed({"a": 1})


def test_a_tuple_without_an_end():
    there = crossed(Endless((NotUnequal("*"),)))
    assert len(there) == 1 and not there[50] != "MODEL"
    with pytest.raises(IndexError):
        crossed(("A",))[50]


def test_lists_of_files_are_looked_up_where_they_arrive(monkeypatch):
    described = {"required": {"name": (["none"] + Files(["old"], "loras") + ["other"],), "plain": (Files(["old"], "unknown"),)}}
    assert described["required"]["name"][0] == ["none", "old", "other"]
    assert crossed(described)["required"]["name"] == (["none", "old", "other"],)
    monkeypatch.setattr(interface, "file_list", {"loras": ["new", "old"]}.__getitem__)
    there = crossed(described)["required"]
    assert there["name"] == (["none", "new", "old", "other"],) and there["plain"] == (["old"],)
    assert type(there["name"][0]) is list


def test_what_cannot_be_described_fails_where_the_original_would():
    there = crossed({"f": print})
    assert isinstance(there["f"], Opaque)
    with pytest.raises(TypeError):
        json.dumps(there)


@pytest.mark.parametrize("data", [{"eval": "1"}, {"dict": 3}, {"int": "x"}, {"set": [[1]]}, {}, {"name": 1}])
def test_no_description_is_an_error(data):
    with pytest.raises(InterfaceError):
        decode(data)


def test_depth_has_a_bound():
    deep = []
    for _ in range(100):
        deep = [deep]
    crossed(deep)
    data = []
    for _ in range(1000):
        data = [data]
    with pytest.raises(InterfaceError):
        decode(data)
