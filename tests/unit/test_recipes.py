"""How objects that stay in the host were made is known as long as they are alive."""

import gc

import pytest

from comfy_multiproc.nodecall import RECIPE, Call
from comfy_multiproc.recipes import Recipes, stays


class Model:
    pass


@pytest.fixture
def forgotten():
    return []


@pytest.fixture
def recipes(forgotten):
    return Recipes(forgotten.append)


def made(recipes, value, **inputs):
    recipes.record(Call("Loader", "load", None), {"inputs": inputs}, (value, 1))


def test_an_object_crosses_as_the_way_it_was_made(recipes):
    base, patched = Model(), Model()
    made(recipes, base, name="a.safetensors")
    made(recipes, patched, model=base, strength=0.5)
    crossing = recipes.crossing(patched)
    assert crossing["values"]["inputs"]["strength"] == 0.5 and crossing["slot"] == 0
    inner = crossing["values"]["inputs"]["model"]
    assert inner["values"]["inputs"] == {"name": "a.safetensors"} and inner[RECIPE] != crossing[RECIPE]
    assert recipes.crossing([base, 3])[0][RECIPE] == inner[RECIPE]


def test_what_has_no_recipe_is_left_as_it_is(recipes):
    value, items = Model(), [1, 2]
    assert recipes.crossing(value) is value and recipes.crossing(items) is items


def test_it_is_forgotten_with_its_object(recipes, forgotten):
    model = Model()
    made(recipes, model)
    number = recipes.of(model).number
    del model
    gc.collect()
    assert forgotten == [number]


def test_two_objects_of_one_call_are_forgotten_with_the_last(recipes, forgotten):
    model, clip = Model(), Model()
    recipes.record(Call("Loader", "load", None), {"inputs": {}}, (model, clip))
    del model
    gc.collect()
    assert forgotten == [] and recipes.of(clip).slot == 1
    del clip
    gc.collect()
    assert len(forgotten) == 1


def test_a_list_is_let_go_when_only_the_recipes_know_it(recipes, forgotten):
    conditioning = [[1, {"control": Model()}]]
    made(recipes, conditioning)
    recipes.prune()
    assert forgotten == [] and recipes.of(conditioning) is not None
    del conditioning
    recipes.prune()
    assert len(forgotten) == 1


def test_a_node_that_passes_an_object_on_has_not_made_it(recipes):
    model = Model()
    made(recipes, model, name="first")
    made(recipes, model, name="second")
    assert recipes.of(model).values["inputs"] == {"name": "first"}


@pytest.mark.parametrize("value, expected", [
    (1, False), ("a", False), (None, False), ([1, {"a": (2,)}], False), (Model(), True), ([1, {"a": (Model(),)}], True),
])
def test_what_stays(value, expected):
    assert stays(value) is expected
