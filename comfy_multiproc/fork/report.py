"""What `series check` says about one tree, for a person and for a program."""

from dataclasses import dataclass
from typing import Any

from .plan import Plan, describe


@dataclass(frozen=True)
class CheckReport:
    """Which hooks of which patch found their place."""

    plan: Plan

    @property
    def version(self) -> str:
        return self.plan.version

    @property
    def ok(self) -> bool:
        return self.plan.ok

    def counts(self) -> dict[str, dict[str, int]]:
        """Patch -> how many of its hooks are ok, absent (the release lacks the mechanism) and in error."""
        counts = {patch.name: {"ok": 0, "absent": 0, "error": 0} for patch in self.plan.patches}
        for result in self.plan.results:
            counts[result.patch][result.status] += 1
        for patch in self.plan.taken.values():
            counts[patch]["error"] += 1
        return counts

    def reasons(self) -> list[str]:
        """One line for everything that does not fit."""
        taken = [f"patch {patch} adds {path}, which ComfyUI {self.version} already has" for path, patch in self.plan.taken.items()]
        return [describe(self.version, result) for result in self.plan.errors] + taken

    def table(self) -> str:
        """A line per patch, then the reasons."""
        counts = self.counts()
        width = max(len(name) for name in counts)
        lines = [f"ComfyUI {self.version}", f"  {'patch':<{width}}  hooks  absent  verdict"]
        for patch in self.plan.patches:
            row = counts[patch.name]
            total = row["ok"] + row["error"]
            verdict = "does not fit" if row["error"] else "not in this release" if row["absent"] and not total else "fits"
            lines.append(f"  {patch.name:<{width}}  {row['ok']:>2}/{total:<2}  {row['absent'] or '-':>6}  {verdict}")
        return "\n".join(lines + [f"  {reason}" for reason in self.reasons()])

    def to_json(self) -> dict[str, Any]:
        """The same with a record per hook."""
        hooks = [
            {
                "patch": result.patch, "file": result.insert.anchor.file, "scope": result.insert.anchor.scope, "anchor": str(result.insert.anchor),
                "status": result.status, "line": result.line, "message": result.message,
            }
            for result in self.plan.results
        ]
        return {"version": self.version, "ok": self.ok, "patches": self.counts(), "hooks": hooks, "reasons": self.reasons()}
