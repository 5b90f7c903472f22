"""A recorded sequence of random memory management in one ComfyUI tree, on a virtual card.

    python record_trace.py TREE PROJECT OUT.json

The same seed gives the same sequence in every tree; what differs is what the tree does.
"""

import functools
import gc
import json
import os
import random
import sys

tree, project, out = sys.argv[1:]
sys.path[:0] = [tree, project]

from comfy_multiproc.testing import stub_patcher, virtual_card

UNIT = 1 << 16       # a sixteenth of a MiB: the sums are the same, the copies are short
STEPS = 80
RUNS = {"normal": {}, "low": {"state": "low"}, "no": {"state": "no"}, "high": {"state": "high"}, "no smart memory": {"smart": False},
        "small card": {"size": 96 * UNIT}, "share of free": {"weight_ratio": 0.4}}
RECORDED = ("get_free_memory", "get_total_memory", "soft_empty_cache", "free_memory", "load_models_gpu", "unload_all_models", "cleanup_models_gc")


def run(mm, seed, size=256 * UNIT, smart=True, **settings):
    """The trace: one entry for each step."""
    chance = random.Random(seed)
    trace, calls = [], []
    before = {name: getattr(mm, name) for name in RECORDED}
    methods = {name: getattr(mm.LoadedModel, name) for name in ("model_load", "model_unload")}

    def recording(name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)
        return call

    with virtual_card(size, inference=24 * UNIT, reserved=8 * UNIT, **settings) as card:
        mm.DISABLE_SMART_MEMORY = not smart
        for name, function in before.items():
            setattr(mm, name, recording(name, function))
        for name, function in methods.items():
            setattr(mm.LoadedModel, name, recording(name, function))
        try:
            models = {}
            for step in range(STEPS):
                what = one(mm, chance, models, card)
                names = {id(patcher): name for name, patcher in models.items()}
                listed = [(names.get(id(entry.model), "dropped"), int(entry.model_loaded_memory()) if entry.model is not None else 0,
                           int(entry.model_memory()) if entry.model is not None else 0, bool(entry.currently_used))
                          for entry in mm.current_loaded_models]
                trace.append({"what": what, "list": listed, "calls": calls[:], "used": card.read().used})
                calls.clear()
        finally:
            mm.DISABLE_SMART_MEMORY = False
            for name, function in before.items():
                setattr(mm, name, function)
            for name, function in methods.items():
                setattr(mm.LoadedModel, name, function)
    return trace


def one(mm, chance, models, card):
    """One random step: what it was, and what it returned."""
    action = chance.choices(["load", "free", "unload", "drop", "clone", "just", "empty", "read"], [10, 4, 1, 2, 2, 1, 1, 1])[0]
    if action == "load" or not models:
        while len(models) < 2 or chance.random() < 0.3:
            models[f"m{chance.randrange(10**9)}"] = stub_patcher(chance.randrange(1, 12) * 8 * UNIT)
        wanted = chance.sample(sorted(models), chance.randint(1, min(3, len(models))))
        options = {}
        if chance.random() < 0.5:
            options["memory_required"] = chance.randrange(0, 64) * UNIT
        if chance.random() < 0.3:
            options["minimum_memory_required"] = chance.randrange(0, 32) * UNIT
        if chance.random() < 0.1:
            options["force_patch_weights"] = True
        if chance.random() < 0.1 and sum(models[name].model_size() for name in wanted) < card.settings.size // 2:
            options["force_full_load"] = True
        try:
            result = mm.load_models_gpu([models[name] for name in wanted], **options)
        except mm.OOM_EXCEPTION:
            result = "out of memory"
        return "load", wanted, options, result
    if action == "free":
        keep = [entry for entry in mm.current_loaded_models if chance.random() < 0.2]
        amount = chance.choice([chance.randrange(0, 300) * UNIT, chance.randrange(0, 300) * UNIT, 1e30, 1e32, 0.1])
        device = chance.choice([card.device, card.device, card.device, None])
        dynamic = chance.random() < 0.3
        return "free", amount, str(device), dynamic, len(keep), len(mm.free_memory(amount, device, keep, for_dynamic=dynamic))
    if action == "unload":
        return "unload", mm.unload_all_models()
    name = chance.choice(sorted(models))
    if action == "drop":
        del models[name]
        gc.collect()
        return "drop", name
    if action == "clone":
        models[name] = models[name].clone()
        return "clone", name
    if action == "just" and hasattr(mm, "unload_model_and_clones"):
        return "just", name, mm.unload_model_and_clones(models[name])
    if action == "empty":
        return "empty", mm.soft_empty_cache()
    return "read", mm.get_free_memory(card.device, torch_free_too=True), len(mm.loaded_models()), len(mm.loaded_models(only_currently_used=True))


def main():
    import comfy.cli_args
    comfy.cli_args.args.cpu = True
    import comfy.model_management as mm
    gc.disable()    # a collection at a moment of its own would be a difference
    gc.freeze()
    traces = {name: run(mm, name, **settings) for name, settings in RUNS.items()}
    with open(out, "w") as f:
        json.dump({"process_memory": hasattr(mm, "process_memory"), "traces": traces}, f)
    sys.stdout.flush()
    os._exit(0)     # the card's threads and torch's need no farewell


main()
