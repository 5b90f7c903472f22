"""What the workers of the tests can be asked to do."""
import asyncio
import atexit
import ctypes
import dataclasses
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

jobs = {}


def job(function):
    jobs[function.__name__] = function
    return function


def load(context):
    if os.environ.get("ZOO_BROKEN"):
        if os.environ["ZOO_BROKEN"] == "hangs":
            atexit.register(time.sleep, 1000)
        raise ImportError("the pack needs something that is not there")
    import comfy.model_management
    global management
    management = comfy.model_management
    for name, function in jobs.items():
        context.on_execution(name, lambda request, f=function: answer(request, f))
    context.on_execution("slow_async", slow_async)
    context.on_execution("let_go", lambda request: let_go(context, request))
    context.link.on("freed", lambda request: request.reply(kept_thing and kept_thing[0]() is None))     # not on the execution thread
    context.on_reset(lambda: None)
    return {"pid": os.getpid(), "packs": context.state["packs"]}


kept_thing = None


def let_go(context, request):
    """Hands an object that nobody else has to the execution thread, as the release of a handle does."""
    global kept_thing
    thing = TwoArguments(1, 2)
    kept_thing = [weakref.ref(thing)]
    context.soon(lambda _: None, thing)
    request.reply()


def answer(request, function):
    request.reply(function(request.body))


async def slow_async(request):
    """Answers when the other one of its kind has begun: both have to run at once."""
    running.add(request.body)
    while len(running) < 2:
        await asyncio.sleep(0.01)
    request.reply(sorted(running))


running = set()



@job
def echo(body):
    return body


@job
def about(body):
    import utils.install_util
    from comfy.cli_args import args

    import folder_paths
    return {
        "pid": os.getpid(), "path": sys.path, "main": getattr(sys.modules["__main__"], "__file__", None), "cwd": os.getcwd(),
        "utils": utils.install_util.WHERE, "args": {k: str(v) for k, v in vars(args).items()}, "session": os.getsid(0),
        "thread": threading.current_thread() is threading.main_thread(), "environment": dict(os.environ), "python": sys.executable,
        "folders": [folder_paths.output_directory, folder_paths.folder_names_and_paths["checkpoints"][0]],
        "same_set": folder_paths.folder_names_and_paths["checkpoints"][1] is folder_paths.supported_pt_extensions,
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "files": len(os.listdir("/dev/fd")),
    }


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(f"about {a}")
        self.b = b


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str

    @property
    def error_code(self):
        raise RuntimeError("nor looked into")

    def __str__(self):
        return self.text


@job
def fail(body):
    if body == "two":
        raise TwoArguments("this", "that")
    if body == "local":
        class OnlyHere(ValueError):
            pass
        raise OnlyHere("nobody else knows it")
    if body == "file":
        error = OSError(28, "no space")
        error.file = open(os.devnull)
        raise error
    if body == "frozen":
        raise Frozen("it cannot be changed")
    if body == "exit":
        sys.exit(3)
    if body == "interrupted":
        raise management.InterruptProcessingException()
    try:
        {}["key"]
    except KeyError as e:
        raise ValueError("second") from e


@job
def die(body):
    sys.stderr.write("the last thing it says\n")
    os.kill(os.getpid(), body)
    time.sleep(60)


@job
def steps(body):
    """Works in steps that can be interrupted; `swallow` takes no notice."""
    open(body["began"], "w").close()
    for _ in range(600):
        time.sleep(0.02)
        try:
            management.throw_exception_if_processing_interrupted()
        except Exception:
            pass
        except BaseException:
            if not body.get("swallow"):
                raise
            return "a result that nobody wants"


@job
def stubborn(body):
    """Never asks whether it was interrupted."""
    open(body["began"], "w").close()
    while not os.path.exists(body["end"]):
        time.sleep(0.01)
    return "a result that nobody wants"


@job
def interrupted(body):
    """Whether there is an interrupt that nobody has taken."""
    return management.flag.is_set()


@job
def native(body):
    """A call that heeds no signal but the one for killing, and with `keep_lock` no other thread either."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    library = ctypes.PyDLL(None) if body.get("keep_lock") else ctypes.CDLL(None)
    open(body["began"], "w").close()
    library.sleep(300)


@job
def spin(body):
    open(body["began"], "w").close()
    while True:
        pass


@job
def program(body):
    """Starts a program, in a session of its own if `detach`, and waits for it."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=body.get("detach", False))
    with open(body["began"] + ".new", "w") as f:
        f.write(str(process.pid))
    os.rename(body["began"] + ".new", body["began"])
    if not body.get("leave"):
        process.wait()


def pid(_):
    time.sleep(0.2)
    return os.getpid()


@job
def pool(body):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pids = sorted(set(pool.map(pid, range(4))))
        with open(body["began"] + ".new", "w") as f:
            f.write(" ".join(map(str, pids)))
        os.rename(body["began"] + ".new", body["began"])
        if body.get("stay"):
            time.sleep(1000)
    return pids


@job
def write(body):
    line = "x" * 99
    for i in range(body // 100):
        sys.stdout.write(line + "\n")
        if i % 100 == 0:
            sys.stderr.write(f"\r{i}")
    sys.stdout.write("äöü \N{SNOWMAN}\n")
    for i in range(60):
        sys.stderr.write(f"\r{i}%|##    | {i}/60 [00:01<00:02, 20.1it/s]")
    sys.stderr.write("\n")
    logging.warning("a warning")
    return "written"


@job
def close_streams(body):
    sys.stderr.close()
    os.close(1)
    os.close(2)
    sys.stderr.write("to nobody\n")
    sys.stdout.write("to nobody\n")
    sys.stdout.flush()
    return "still here"


@job
def kept(body):
    """Fills memory and lets go of it."""
    blocks = [bytes(1 << 20) for _ in range(body)]
    return len(blocks)


@job
def grow(body):
    global memory
    memory = bytearray(os.urandom(1) * body)
    return len(memory)


@job
def library(body):
    tiny = ctypes.CDLL(body or "libtiny.so")
    return tiny.version()
