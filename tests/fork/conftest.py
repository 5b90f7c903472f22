"""Real ComfyUI with the series, several processes, one virtual card.

$COMFY_MULTIPROC_FORK names the built tree. It comes first on sys.path, so `import comfy.model_management` is the fork's; import it
inside a test or fixture, not at the top of a file.
"""

import os
import pathlib
import sys

import pytest

from tests.leaks import nothing_is_left  # noqa: F401  for every module here

TREE = os.environ.get("COMFY_MULTIPROC_FORK")
if TREE:
    sys.path.insert(0, os.path.abspath(TREE))


def pytest_configure(config):
    config.addinivalue_line("markers", "card(**settings): the virtual card of the `card` fixture")


@pytest.fixture(scope="session", autouse=True)
def fork_tree():
    """The built fork."""
    if not TREE:
        pytest.skip("COMFY_MULTIPROC_FORK names no built fork; `python -m comfy_multiproc test` sets it")
    return pathlib.Path(TREE).resolve()


@pytest.fixture
def card(request):
    """A virtual card of 256 MiB in this process; @pytest.mark.card(size="64M", count=2) chooses another."""
    from comfy_multiproc.testing import virtual_card
    marker = request.node.get_closest_marker("card")
    with virtual_card(**{"size": "256M", **(marker.kwargs if marker else {})}) as card:
        yield card


@pytest.fixture
def spawn(request, card, fork_tree):
    """spawn(): a process on the same card that runs functions of the test's file; spawn(disable_smart_memory=True): with arguments.

    All are gone when the test ends.
    """
    from comfy_multiproc.testing import CardProcess
    from comfy_multiproc.testing.card.virtual import server_environment
    started = []

    def start(functions=request.path, **arguments):
        environment = server_environment(card.settings, card.path, tree=fork_tree)
        started.append(CardProcess(fork_tree, functions, environment=environment, arguments=arguments))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def here(fork_tree, monkeypatch):
    """This process is one of several, and remembers nothing of what was there in other tests; `runtimes` has what it and others do."""
    from comfy.process_memory import gates, retry, scratch, sizers

    from tests.fork import runtimes
    for remembered in (gates._alone, gates._dtypes, retry._gave_nothing, sizers._kept):
        remembered.clear()
    monkeypatch.setattr(scratch, "_backups", (float("-inf"), 0))
    yield runtimes.start("here")
    runtimes.kept.clear()
    runtimes.stop()


@pytest.fixture
def other(spawn, here):
    """Another one."""
    from tests.fork.runtimes import FILE
    process = spawn(FILE)
    process.call("start", who="other")
    return process
