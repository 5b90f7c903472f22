"""The provider of examples/packs/language_model_pack, which docs/provider-api.md shows, against real processes."""

import contextlib
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comfy.process_memory import Outcome, ReleaseRequest, registry
from comfy_multiproc.testing import check_provider
from tests.unit.providers import until

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "examples" / "packs" / "language_model_pack"
STAND_IN = Path(__file__).with_name("language_server.py")
CARD = "cpu:0"
SIZE = 3 << 20


spec = importlib.util.spec_from_file_location("language_model_provider", PACK / "provider.py")
provider_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(provider_module)


@pytest.fixture
def start():
    started = []

    def start(program=STAND_IN, *arguments):
        server = subprocess.Popen([sys.executable, str(program), *arguments, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        started.append(server)
        provider = provider_module.LanguageModel(server, CARD)
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


def test_the_page_shows_the_provider_as_it_is():
    page = (ROOT / "docs/provider-api.md").read_text("utf-8")
    assert f"```python\n{(PACK / 'provider.py').read_text('utf-8')}```\n" in page


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
    provider.send("busy")
    until(lambda: provider.usage(CARD).busy)
    assert provider.candidates(CARD)[0].in_use
    receipt = release(provider, seconds=0.1)
    assert (receipt.outcome, receipt.freed, receipt.resident) == (Outcome.BUSY, 0, SIZE)
    provider.send("idle")
    until(lambda: provider.usage(CARD).resident == 0)
    assert release(provider).outcome is Outcome.NOTHING, "the first request was served late; this one found nothing"


def test_when_it_dies_all_it_held_is_free(start):
    provider = start()
    provider._server.kill()
    provider._server.wait(20)
    assert release(provider).outcome is Outcome.GONE
    until(lambda: provider.usage(CARD).resident == 0)


def test_the_server_of_the_example_has_its_weights_while_it_is_used(start):
    provider = start(PACK / "server.py", "cpu")
    assert provider.usage(CARD).resident == 0 and release(provider).outcome is Outcome.NOTHING

    def ask(ticket):
        provider.send("ask", ticket, "ein müder Löwe")
        return provider.answers.get(timeout=60)
    first = ask("1")
    assert first[:2] == ("1", "answer") and len(first[2].split()) == 8
    held = provider.usage(CARD).resident
    assert 0.99 * SIZE < held <= SIZE
    receipt = release(provider)
    assert (receipt.outcome, receipt.freed, receipt.resident, provider.usage(CARD).resident) == (Outcome.FREED, held, 0, 0)
    assert ask("2")[2] == first[2], "the same weights again"
    provider.send("drop", "3")
    provider.send("ask", "4", "")
    assert provider.answers.get(timeout=60)[:2] == ("4", "answer")
