"""doctor: would up work here, and if not, what to do."""

import argparse
import json
from typing import Any

from comfy_multiproc import doctor
from comfy_multiproc.commands import common
from comfy_multiproc.console import Console
from comfy_multiproc.environment import project_root


def configure(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="say what this machine has of what is needed; exit code 1 if something is missing")
    common.source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    console.progress("Looking at this machine")
    findings = doctor.examine(project_root(), args.upstream, args.release)
    if args.json:
        console.say(json.dumps(doctor.to_json(findings), indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            console.say(f"{finding.verdict:5}  {finding.name:{width}}  {finding.detail}" + (f"\n       {finding.way_out}" if finding.way_out else ""))
    return 0 if all(finding.verdict != "fails" for finding in findings) else 1
