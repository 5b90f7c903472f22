"""What tests of every level share: the two trees, and skipping what needs a GPU."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what is in the background so, and what the tests start would not hear Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of this test run meet each other, and none of the user's or of another test process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFY_MULTIPROC_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def upstream_tree() -> Path:
    """A pristine upstream tree; copy it before writing or running anything in it."""
    if given := os.environ.get("COMFY_MULTIPROC_UPSTREAM"):
        return Path(given)
    from comfy_multiproc.fork import upstream

    return upstream.find(None, None).path


@pytest.fixture(scope="session")
def fork_tree(upstream_tree: Path) -> Path:
    """The fork of it, built if `comfy_multiproc test` has not done so."""
    if given := os.environ.get("COMFY_MULTIPROC_FORK"):
        return Path(given)
    from comfy_multiproc.fork import tree, upstream

    source = upstream.find(None, None)
    return tree.build(source, ROOT / "build" / f"ComfyUI-{source.version}").path
