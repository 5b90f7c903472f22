"""The provider in docs/provider-api.md, as it stands there, against a real process."""

import contextlib
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comfy.process_memory import Outcome, ReleaseRequest, registry
from comfy_multiproc.testing import check_provider
from tests.unit.providers import until

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("language_server.py")
CARD = "cpu:0"
SIZE = 3 << 20


@pytest.fixture(scope="module")
def LanguageModel(tmp_path_factory):
    """The class, from the page's one block of Python."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/provider-api.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    path = tmp_path_factory.mktemp("example") / "language_model.py"
    path.write_text(code, "utf-8")
    spec = importlib.util.spec_from_file_location("language_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LanguageModel


@pytest.fixture
def start(LanguageModel):
    started = []

    def start():
        server = subprocess.Popen([sys.executable, str(SERVER), str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(server)
        provider = LanguageModel(server, CARD)
        until(lambda: not provider.usage(CARD).busy)
        return provider
    yield start
    for server in started:
        server.kill()
        server.wait(20)
        server.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what was never read
            server.stdin.close()


def release(provider, seconds=20.0):
    registry.register(provider)
    try:
        request = ReleaseRequest(device=CARD, bytes=1, candidate="weights", deadline=time.monotonic() + seconds)
        return registry.ask("release", [(registry.entries[-1], request)])[0]
    finally:
        registry.unregister(provider)


def test_it_keeps_every_rule(start):
    assert check_provider(start, device=CARD, say=lambda text: None).ok


def test_it_gives_its_weights_back_when_it_is_idle(start):
    provider = start()
    assert provider.usage(CARD).resident == SIZE
    receipt = release(provider)
    assert (receipt.outcome, receipt.freed, receipt.resident) == (Outcome.FREED, SIZE, 0)
    assert release(provider).outcome is Outcome.NOTHING


def test_while_it_answers_a_question_it_is_busy_and_a_late_answer_is_not_taken_for_another(start):
    provider = start()
    provider._server.stdin.write("busy\n")
    provider._server.stdin.flush()
    until(lambda: provider.usage(CARD).busy)
    assert provider.candidates(CARD)[0].in_use
    receipt = release(provider, seconds=0.1)
    assert (receipt.outcome, receipt.freed, receipt.resident) == (Outcome.BUSY, 0, SIZE)
    provider._server.stdin.write("idle\n")
    provider._server.stdin.flush()
    until(lambda: provider.usage(CARD).resident == 0)
    assert release(provider).outcome is Outcome.NOTHING, "the first request was served late; this one found nothing"


def test_when_it_dies_all_it_held_is_free(start):
    provider = start()
    provider._server.kill()
    provider._server.wait(20)
    assert release(provider).outcome is Outcome.GONE
    until(lambda: provider.usage(CARD).resident == 0)
