"""The fork of the main release."""

import pytest

from comfy_multiproc.fork import tree, upstream


@pytest.fixture(scope="session")
def source():
    return upstream.find(None, upstream.DEFAULT_RELEASE)


@pytest.fixture(scope="session")
def fork(source, tmp_path_factory):
    return tree.build(source, tmp_path_factory.mktemp("fork") / "fork")
