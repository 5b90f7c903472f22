"""series: look at the patch series, apply it, export it."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.fork import series, tree, upstream
from comfy_multiproc.fork.errors import ForkError, expanded


def configure(commands: Any) -> None:
    parser = commands.add_parser("series", help="the patch series: check, apply, export, show")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    check = actions.add_parser("check", help="find the place of every hook in a ComfyUI tree; nothing is written")
    check.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a ComfyUI tree")
    check.add_argument("--release", action="append", metavar="V", help="a release instead; may be given several times")
    check.add_argument("--json", action="store_true", help="for a program: a list with one report per tree")
    check.set_defaults(run=run_check)

    apply = actions.add_parser("apply", help="commit the series on a new branch of a git checkout")
    apply.add_argument("path", type=Path, metavar="PATH", help="a ComfyUI checkout without changes of its own")
    apply.add_argument("--force", action="store_true", help="replace the branch if it is there")
    apply.set_defaults(run=run_apply)

    export = actions.add_parser("export", help="write the series as git format-patch files")
    export.add_argument("path", nargs="?", type=Path, metavar="PATH", help="the ComfyUI tree that the patches are to apply to")
    export.add_argument("--release", metavar="V", help="a release instead")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for the files")
    export.add_argument("--author", metavar='"NAME <MAIL>"', help="author of the commits (default: as git is set up)")
    export.set_defaults(run=run_export)

    show = actions.add_parser("show", help="list the patches, or show one")
    show.add_argument("patch", nargs="?", metavar="PATCH", help="its name or the beginning of it, such as 11")
    show.set_defaults(run=run_show)


def run_check(args: argparse.Namespace, console: Console) -> int:
    reports = [tree.check(source.path) for source in common.sources(args, console)]
    if args.json:
        console.say(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        console.say("\n\n".join(report.table() for report in reports))
    broken = [report.version for report in reports if not report.ok]
    if broken:
        raise ForkError(f"the series does not fit ComfyUI {', '.join(broken)}: the table says which hook and what is nearest to its place")
    return 0


def run_apply(args: argparse.Namespace, console: Console) -> int:
    built = tree.apply(args.path, force=args.force, progress=console.progress)
    console.say(f"the series is on the branch multiproc of {built.path} (ComfyUI {built.version}), which is checked out: start ComfyUI there as always. "
                "Back: git checkout -; to remove it: git branch -D multiproc")
    return 0


def run_export(args: argparse.Namespace, console: Console) -> int:
    if args.author is not None and not re.fullmatch(r"[^<>\n]*[^<>\s] <[^<>\s]+>", args.author):
        raise ForkError(f"--author {args.author!r} is not of the form \"Name <mail>\"")
    source = upstream.find(args.path, args.release, progress=console.progress)
    for file in tree.export(source, expanded(args.out), author=args.author, progress=console.progress):
        console.say(str(file))
    return 0


def run_show(args: argparse.Namespace, console: Console) -> int:
    patches = series.load()
    if args.patch is None:
        width = max(len(patch.name) for patch in patches)
        console.say("\n".join(f"{patch.name:{width}}  {patch.subject}" for patch in patches))
        return 0
    found = [patch for patch in patches if patch.name.startswith(args.patch)]
    if len(found) != 1:
        names = ", ".join(patch.name for patch in found or patches)
        raise ForkError(f"{args.patch!r} names {'several patches' if found else 'no patch'}: choose from {names}")
    console.say(describe(found[0]))
    return 0


def describe(patch: series.Patch) -> str:
    """A patch: message, rows, tests, each insert, and the names of new files."""
    parts = [patch.message.rstrip()]
    if patch.rows:
        parts.append("rows of docs/rows.md: " + ", ".join(map(str, patch.rows)))
    if patch.tests:
        parts.append("\n    ".join(["tests that show it:", *patch.tests]))
    for insert in patch.inserts:
        anchor = insert.anchor
        when = f", from {insert.since}" * bool(insert.since) + f", before {insert.until}" * bool(insert.until)
        head = f"{anchor.file}, {anchor.scope or 'module level'}: {anchor}{when}"
        parts.append(head + "\n" + "\n".join(f"    + {line}".rstrip() for line in insert.code.splitlines()))
    new = [f"    + {path} ({len(data.splitlines())} lines)" for add in patch.adds for path, data in add.files()]
    if new:
        parts.append("\n".join(["new files", *new]))
    return "\n\n".join(parts)
