"""The command `doctor`: what this machine has of what a run needs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.arguments import RunsDir
from deploy.runtime.safe_console import echo
from headway.errors import HeadwayError


def doctor(
    *,
    runs_dir: RunsDir = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the page as JSON.")] = False,
) -> None:
    """Check whether a run can start on this machine, and print what mends what it lacks.

    Nothing is written. A warning ends no run; if something failed, the exit code is 1.
    """
    from deploy.preflight.doctor import examine

    findings = examine(runs_dir)
    failed = [subject for subject, finding in findings.items() if finding.status == "failed"]
    if as_json:
        checks = [{"check": subject, **asdict(finding)} for subject, finding in findings.items()]
        echo(json.dumps({"ok": not failed, "checks": checks}, indent=2))
    else:
        for subject, finding in findings.items():
            needed = finding.needed and f"; needed: {finding.needed}"
            echo(f"{finding.status:8} {subject:12} {finding.found}{needed}")
            if finding.mend:
                echo(f"{'':21} try: {finding.mend}")
    if failed:
        raise HeadwayError(f"no run can start here: {', '.join(failed)} failed")
