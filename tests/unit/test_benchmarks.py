"""The benchmark of the consults measures what the patches call, and measures at all: each call is made once."""

import importlib.util
import re
from pathlib import Path

from comfy.process_memory import registry
from comfy_multiproc.fork import series

ROOT = Path(__file__).resolve().parents[2]


def test_each_consult_is_measured_under_the_name_that_the_patches_call_it_by(monkeypatch):
    spec = importlib.util.spec_from_file_location("consults", ROOT / "benchmarks" / "consults.py")
    consults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(consults)

    def once(call, number):
        call()
        return 1.0
    monkeypatch.setattr(consults, "nanoseconds", once)
    called = {name for patch in series.load() for insert in patch.inserts for name in re.findall(r"process_memory\.((?:moments\.)?\w+)", insert.code)}
    assert set(consults.without_providers()) <= called
    assert len(consults.with_providers()) == 6 and registry.entries == ()
