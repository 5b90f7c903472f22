"""As much of torch as a worker needs to run."""
from contextlib import contextmanager


@contextmanager
def inference_mode():
    yield
