"""What several commands do: choose an upstream tree, build the fork of it."""

import argparse
from pathlib import Path

from comfy_multiproc.console import Console
from comfy_multiproc.environment import project_root
from comfy_multiproc.fork import tree, upstream
from comfy_multiproc.fork.errors import expanded
from comfy_multiproc.fork.upstream import DEFAULT_RELEASE, Source


def source_arguments(parser: argparse.ArgumentParser) -> None:
    """--upstream and --release."""
    parser.add_argument("--upstream", type=Path, metavar="PATH", help="a ComfyUI checkout to start from; it is not changed")
    parser.add_argument("--release", metavar="V", help=f"the ComfyUI release to start from (default: {DEFAULT_RELEASE})")


def build_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that says which fork to build, and where."""
    source_arguments(parser)
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to build the fork (default: build/ComfyUI-<version> in the project)")
    parser.add_argument("--force", action="store_true", help="build anew over what is there")


def find_source(args: argparse.Namespace, console: Console) -> Source:
    """The upstream tree that the arguments choose."""
    return upstream.find(args.upstream, args.release, force=getattr(args, "force", False), progress=console.progress)


def build_fork(args: argparse.Namespace, source: Source, console: Console) -> tree.Built:
    """The fork that the arguments ask for; built unless it is there already."""
    target = expanded(args.dir) if args.dir else project_root() / "build" / f"ComfyUI-{source.version}"
    return tree.build(source, target, force=args.force, progress=console.progress)


def sources(args: argparse.Namespace, console: Console) -> list[Source]:
    """The trees of `series check [PATH] [--release V]...`; the default release when none is named."""
    found = []
    if args.path is not None:
        found.append(upstream.checkout(args.path, clean=False))
    releases = args.release or ([] if found else [None])
    return found + [upstream.find(None, release, progress=console.progress) for release in releases]
