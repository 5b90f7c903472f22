"""The real server over HTTP and websocket.

$COMFY_MULTIPROC_FORK names the built tree, $COMFY_MULTIPROC_UPSTREAM the tree it was built from, unpatched.
"""

import os
import pathlib

import pytest

from tests.leaks import nothing_is_left  # noqa: F401  for every module here

PACKS = pathlib.Path(__file__).parent / "packs"


def tree(variable):
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} names no ComfyUI tree; `python -m comfy_multiproc test` sets it")
    return pathlib.Path(found).resolve()


@pytest.fixture(scope="session")
def fork_tree():
    """The built fork."""
    return tree("COMFY_MULTIPROC_FORK")


@pytest.fixture(scope="session")
def upstream_tree():
    """The ComfyUI that the fork was built from, which never changes."""
    return tree("COMFY_MULTIPROC_UPSTREAM")


@pytest.fixture(scope="session")
def cpp_card():
    """The C++ form of the virtual card is built; skips where it cannot be."""
    from comfy_multiproc.testing.cpp import build
    if build.compiler() is None:
        pytest.skip("the C++ form of the virtual card needs Linux and a C++ compiler")
    return build.library()


@pytest.fixture(scope="session")
def packs():
    """The folder of the tests' packs."""
    return PACKS


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """serve(tree, card=..., ...): start_server's server, with the tests' packs and models, until the module is done.

    `workflows`: names in workflows.WORKFLOWS whose models are made. The server's `card_path` is the card's capacity file.
    """
    import contextlib

    from comfy_multiproc.testing import start_server, tiny_models, workflows
    with contextlib.ExitStack() as stack:
        def serve(tree, args=(), *, names=("txt2img_sd3",), packs=("card_probe",), card=None, card_file=None, **options):
            models = tiny_models.ensure({m for name in names for m in workflows.models_of(workflows.WORKFLOWS[name]())})
            card_file = card_file or tmp_path_factory.mktemp("card") / "card"
            server = stack.enter_context(start_server(tree, args, models=models, packs=[PACKS / p for p in packs], card=card,
                                                      card_file=card_file, **options))
            server.card_path = card_file
            return server
        yield serve
