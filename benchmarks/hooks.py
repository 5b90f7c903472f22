"""What each patch costs in the functions that it hooks: with nobody registered, and with sixteen processes registered.

    COMFY_MULTIPROC_FORK=build/ComfyUI-0.30.0 python benchmarks/hooks.py

Needs a built fork. Prompts run in its real server on the CPU, once with no provider and once with sixteen, and every hooked function that they
come through is timed; free_memory and unload_all_models, which ComfyUI calls for cards only, are called besides. "ns" is what its consults take with nobody registered, each passed once, by `consults.py`; "%" is their share of the
function's median time in the first run. Bound: 1 %. A dash: no prompt here comes through it (a handler of an error, say).
"""

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import consults

from comfy_multiproc.fork import series
from comfy_multiproc.testing import start_server, tiny_models, workflows

FORK = Path(os.environ.get("COMFY_MULTIPROC_FORK", HERE.parent / "build" / "ComfyUI-0.30.0")).resolve()
PROMPTS = ("txt2img_sd3", "lora", "controlnet", "control_lora", "hooks_lora", "upscale")
ROUNDS = 3
PEERS = 16

# A pack of the server: times the functions and registers the peers.
PACK = '''
import functools, importlib, inspect, json, os, sys, time

def timed(function, times):
    if inspect.iscoroutinefunction(function):
        @functools.wraps(function)
        async def call(*args, **kwargs):
            begin = time.perf_counter_ns()
            try:
                return await function(*args, **kwargs)
            finally:
                times.append(time.perf_counter_ns() - begin)
    else:
        @functools.wraps(function)
        def call(*args, **kwargs):
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                times.append(time.perf_counter_ns() - begin)
    return call

measured = {}
for file, scope in json.loads(os.environ["BENCHMARK_HOOKS"]):
    try:
        owner = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        *outer, name = scope.split(".")
        for part in outer:
            owner = getattr(owner, part)
        function = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError):
        continue
    if inspect.isfunction(function) and not inspect.isgeneratorfunction(function):
        setattr(owner, name, timed(function, measured.setdefault(f"{file}:{scope}", [])))

class BenchmarkTimes:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "times", "benchmarks", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def times(self):
        import comfy.model_management as mm
        for _ in range(200):        # what load_models_gpu calls for cards only
            mm.free_memory(1 << 20, mm.get_torch_device())
        for _ in range(20):
            mm.unload_all_models()
        return {"ui": {"times": [json.dumps(measured)]}}

NODE_CLASS_MAPPINGS = {"BenchmarkTimes": BenchmarkTimes}
if peers := int(os.environ["BENCHMARK_PEERS"]):
    sys.path.insert(0, os.environ["BENCHMARK_FOLDER"])
    import consults
    import comfy.model_management as mm
    from comfy import process_memory
    process_memory.devices.name(mm.get_torch_device(), "cpu:0")    # the CPU counts as a card here
    for _ in range(peers):
        mm.register_process_memory_provider(consults.Peer(True))
'''


def hooked(patches: Iterable[series.Patch]) -> dict[tuple[str, str, str], list[str]]:
    """The consults by patch, file and function; those at module level are imports."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for patch in patches:
        for insert in patch.inserts:
            if insert.anchor.scope and (names := re.findall(r"process_memory\.((?:moments\.)?\w+)", insert.code)):
                found.setdefault((patch.name, insert.anchor.file, insert.anchor.scope), []).extend(names)
    return found


def medians(functions: Iterable[tuple[str, str]], peers: int) -> dict[str, float]:
    """Median nanoseconds of each function that the prompts came through."""
    models = tiny_models.ensure({model for name in PROMPTS for model in workflows.models_of(workflows.WORKFLOWS[name]())})
    with tempfile.TemporaryDirectory() as work:
        pack = Path(work, "benchmark_hooks")
        pack.mkdir()
        (pack / "__init__.py").write_text(PACK)
        environment = {"BENCHMARK_HOOKS": json.dumps(sorted(set(functions))), "BENCHMARK_PEERS": str(peers), "BENCHMARK_FOLDER": str(HERE)}
        with start_server(FORK, ["--cpu", "--disable-process-memory"], models=models, packs=[pack], environment=environment) as server:
            for seed in range(ROUNDS):
                for name in PROMPTS:
                    prompt = workflows.WORKFLOWS[name]()
                    if "sampler" in prompt:
                        prompt["sampler"]["inputs"]["seed"] = seed
                    result = server.run(prompt)
                    if not result.ok:
                        raise RuntimeError(f"{name}: {result.error}")
            result = server.run({"times": {"class_type": "BenchmarkTimes", "inputs": {}}})
    return {name: statistics.median(times) for name, times in json.loads(result.outputs["times"]["times"][0]).items() if times}


def main() -> int:
    places = hooked(series.load())
    cost = consults.without_providers()
    alone, among = (medians([(file, scope) for _, file, scope in places], peers) for peers in (0, PEERS))
    sys.stdout.write(f"| patch | function | consults | ns | % | median alone, us | with {PEERS} processes, us |\n|---|---|---|--:|--:|--:|--:|\n")
    worst = 0.0
    for (patch, file, scope), names in places.items():
        known = [cost[name] for name in names if name in cost]
        nanoseconds, median, with_peers = sum(known), alone.get(f"{file}:{scope}"), among.get(f"{file}:{scope}")
        share = 100 * nanoseconds / median if known and median else None
        worst = max(worst, share or 0.0)
        cells = [f"{nanoseconds:.0f}" if known else "-", "-" if share is None else f"{share:.2g}",
                 *("-" if value is None else f"{value / 1000:.1f}" for value in (median, with_peers))]
        sys.stdout.write(f"| {patch} | `{file}` `{scope}` | {', '.join(names)} | {' | '.join(cells)} |\n")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main())
