"""Run every benchmark and write the tables.

    python -m benchmarks [NAME ...] [--out docs/benchmarks.md]

Each module of this folder with a `main` is one benchmark; it runs in a process of its own. Without names all run. What the
benchmarks that are not named had written stays.
"""

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT = 1800    # seconds for one benchmark


def benchmarks() -> dict[str, str]:
    """Name and first line of the docstring of each."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name != "__main__.py" and any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or path.stem).splitlines()[0]
    return found


def machine() -> str:
    """What the numbers were measured on."""
    try:
        model = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0]
    except (OSError, IndexError):
        model = platform.machine()
    load = f", load {os.getloadavg()[0]:.1f} before the run" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} cores ({model}), {platform.system()} {platform.release()}, Python {platform.python_version()}{load}"


def run(name: str) -> str:
    """What the benchmark has written: tables as they are, anything else as text. Raises RuntimeError."""
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py")], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))})
    text = done.stdout.strip()
    if not text:
        raise RuntimeError(f"{name} has written nothing and ended with {done.returncode}")
    return text if text.startswith("|") else f"```\n{text}\n```"


def sections(path: Path) -> dict[str, str]:
    """The sections of an earlier run, by name."""
    if not path.exists():
        return {}
    parts = re.split(r"^## `(\w+)`\n", path.read_text(encoding="utf-8"), flags=re.M)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    known = benchmarks()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all if none is given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    written = {name: text for name, text in sections(args.out).items() if name in known}
    failed = False
    for name in args.names or known:
        sys.stderr.write(f"{name}: {known[name]}\n")
        place = machine()
        try:
            written[name] = f"{known[name]}\n\nMeasured on {place}.\n\n{run(name)}"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = True
            sys.stderr.write(f"{error}\n")
    args.out.parent.mkdir(exist_ok=True)
    body = "\n\n".join(f"## `{name}`\n\n{written[name]}" for name in sorted(written))
    args.out.write_text(f"# Benchmarks\n\nWritten by `python -m benchmarks`; `benchmarks/README.md` says what is measured and how.\n\n{body}\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
