"""Takes every stored figure again, and writes the pages that show them.

    make figures                      # hours, on a quiet machine; an interrupted one goes on
    make figures ONLY=chaos,agents    # of these alone
    make pages                        # the pages alone, from what is stored

`figures.toml` lists them, `results/figures.json` what each was taken of. One is taken again where
its commands, or the code that trains or predicts its runs, have changed since; changes of
benchmarks alone are not noticed. Of a page, the blocks between `<!-- figures: NAME -->` and
`<!-- end of figures -->` are written; the rest is written by hand.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from os.path import relpath
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.harness.figure_blocks import made, record_block, summaries_block
from benchmarks.harness.processes import raise_failure, run_main
from benchmarks.harness.record import (
    PREDICTING,
    RESULTS,
    ROOT,
    Record,
    code_checksum,
    environment,
    store,
)
from benchmarks.harness.study import Study
from deploy.cli.bench import BENCHMARKS
from deploy.runtime import machine
from deploy.runtime.console import Terminal
from headway.errors import InputError
from headway.nearest_name import nearest

INDEX = RESULTS / "figures.json"
WORK = ROOT / "runs" / "figures"
"""Folder of runs, logs and unfinished studies."""
PICTURES = (".png", ".svg")
"""Endings of what a benchmark writes beside its record, and shows on its page."""
BUSY = 1.0
"""Load average above which a machine is not quiet."""
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


class Figure(BaseModel):
    """A stored figure, as `figures.toml` describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minutes: int
    """Time that it takes on two cores."""
    predicts: bool = False
    """Its record has predictions, so that it is as old as the code that makes them."""
    bench: str = ""
    """A benchmark with its options; its record is stored."""
    commands: Sequence[str] = ()
    """Commands of ordinary runs, whose summaries are stored."""
    folder: str = "."
    """Where they run."""
    seeds: int = 1
    """Number of seeds: the commands run with {seed} = 0, 1, 2, …"""
    files: Mapping[str, str] = {}
    """Where the summaries are stored, by the names of the runs."""
    curve: str = ""
    """A picture of the held-out scores."""

    def command_lines(self) -> list[str]:
        """Return the commands that take it, for the seed SEED."""
        benches = [f"headway bench {self.bench}"] if self.bench else []
        return benches + [command.format(seed="SEED") for command in self.commands]

    def summaries(self) -> dict[str, Path]:
        """Return the files of the summaries by the names of the runs."""
        return {
            run.format(seed=seed): ROOT / file.format(seed=seed)
            for seed in range(self.seeds)
            for run, file in self.files.items()
        }

    def training_code(self, *further: Path) -> str:
        """Return the checksum of what trains its runs, of its own folder, and of further ones."""
        own = [] if self.folder == "." else [ROOT / self.folder]
        return code_checksum(*own, *further)

    def code(self) -> str:
        """Return the checksum of all that its record depends on but the benchmark."""
        return self.training_code(*([PREDICTING] if self.predicts else []))

    def study(self) -> Study[Any]:
        """Return the benchmark."""
        module = BENCHMARKS[self.bench.partition(" ")[0]]
        study: Study[Any] = import_module(f"benchmarks.{module}").STUDY
        return study


def read_figures() -> dict[str, Figure]:
    """Return every figure by its name, in the order in which they are taken."""
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Figure(**described) for name, described in listed.items()}


def read_index() -> dict[str, Record]:
    """Return what each stored figure was taken of: commands, time, commit, code, machine."""
    index: dict[str, Record] = json.loads(INDEX.read_text()) if INDEX.exists() else {}
    return index


def chosen(figures: Mapping[str, Figure], only: str, index: Mapping[str, Record]) -> list[str]:
    """Return the names of the figures that are to be taken; raises InputError for unknown ones."""
    names = [name for name in only.split(",") if name]
    for name in names:
        if name not in figures:
            raise InputError(
                f"ONLY={only}: no figure {name!r}; there are {', '.join(figures)}"
                f"{nearest(name, figures)}"
            )
    taken = {name: (facts.get("code"), facts.get("commands")) for name, facts in index.items()}
    return [
        name
        for name, figure in figures.items()
        if name in (names or figures) and taken.get(name) != (figure.code(), figure.command_lines())
    ]


def take(name: str, figure: Figure) -> None:
    """Take one figure and store its files; raises as `raise_failure`."""
    work, log = WORK / name, WORK / f"{name}.log"
    WORK.mkdir(parents=True, exist_ok=True)
    if figure.bench:
        _take_bench(name, figure, work, log)
    else:
        _take_runs(figure, work, log)


def _take_bench(name: str, figure: Figure, work: Path, log: Path) -> None:
    """Run a benchmark; store its record, pictures and page under the name of the figure.

    It goes on with runs that it has left unfinished, if code and options are still the same.
    """
    study, started = figure.study(), work.with_suffix(".started")
    start = f"{figure.training_code()} {figure.bench}"
    if not (study.continued and started.exists() and started.read_text() == start):
        shutil.rmtree(work, ignore_errors=True)
    started.write_text(start)
    record = work / (study.file.format(name=study.name) if study.in_folder else "record.json")
    out = relpath(work if study.in_folder else record, ROOT / figure.folder)
    _run(f"headway bench {figure.bench} --out {out}", ROOT / figure.folder, log)
    shutil.copy(record, RESULTS / f"{name}.json")
    for file in record.parent.glob(f"{record.stem}*"):
        target = RESULTS / file.name.replace(record.stem, name, 1)
        if file.suffix == ".md":
            target.write_text(file.read_text().replace(f"]({record.stem}", f"]({name}"))
        elif file.suffix in PICTURES:
            shutil.copy(file, target)


def _take_runs(figure: Figure, work: Path, log: Path) -> None:
    """Run the commands with each seed; store the summaries, and draw their curve."""
    runs = f"--set deploy.runs_dir={relpath(work, ROOT / figure.folder)}"
    for seed in range(figure.seeds):
        for command in figure.commands:
            line = command.format(seed=seed)
            with_folder = f"{line} {runs}" if line.startswith("headway") else line
            _run(with_folder, ROOT / figure.folder, log)
    for run, file in figure.summaries().items():
        shutil.copy(work / run / "summary.json", file)
    if figure.curve:
        script = ROOT / "examples" / "curves.py"
        files = map(str, (script, ROOT / figure.curve, *figure.summaries().values()))
        _run(f"python {shlex.join(files)}", ROOT, log)


def _run(command: str, folder: Path, log: Path) -> None:
    """Run a command, its output in a log; raises as `raise_failure`."""
    Terminal().say(f"  {command}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as output:
        code = subprocess.run(
            shlex.split(command), cwd=folder, env={**os.environ, "PATH": path}, stdout=output,
            stderr=subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip
    *_, last = log.read_text().splitlines() or [""]
    if code != 1 or not last.startswith("stored in "):  # only an aim was missed
        raise_failure(command, code, log)


def take_all(only: str) -> None:
    """Take the figures that are older than the code, one after the other; write the pages."""
    figures = read_figures()
    names = chosen(figures, only, read_index())
    if names and (load := os.getloadavg()[0]) > BUSY:
        Terminal().say(f"this machine has a load of {load:.1f}: its figures are not to be quoted")
    left = sum(figures[name].minutes for name in names)
    for number, name in enumerate(names, start=1):
        Terminal().say(f"{number}/{len(names)} {name}: about {left} min left")
        figure, facts = figures[name], environment()
        facts |= {"code": figure.code(), "commands": figure.command_lines()}
        take(name, figure)
        del facts["command"]
        store({**read_index(), name: facts}, INDEX)
        left -= figure.minutes
        write_pages()
    Terminal().say(
        f"{len(figures) - len(names)} of {len(figures)} figures are up to date or not asked for"
    )


def pages() -> list[Path]:
    """Return the pages that show figures."""
    listed = machine.git(ROOT, "ls-files", "*.md") or ""
    return [path for line in listed.splitlines() if BLOCK.search((path := ROOT / line).read_text())]


def filled(text: str) -> str:
    """Return the text of a page with its blocks as they follow from the stored figures.

    A block whose figure is not stored yet stays as it is; raises InputError for an unknown one.
    """
    figures, index = read_figures(), read_index()

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in figures:
            raise InputError(f"a page shows {name!r}, and there are {', '.join(figures)}")
        if name not in index:
            return match[0]
        return f"{begin}\n{describe(name, figures[name], index[name])}\n\n{end}"

    return BLOCK.sub(block, text)


def describe(name: str, figure: Figure, taken: Record) -> str:
    """Return a stored figure as Markdown: how it was taken, and its table."""
    if figure.bench:
        record = json.loads((RESULTS / f"{name}.json").read_text())
        shown = record_block(figure.study(), record)
    else:
        shown = summaries_block(
            [json.loads(file.read_text()) for file in figure.summaries().values()]
        )
    return f"{made(taken, figure.folder, figure.seeds)}\n\n{shown}"


def write_pages() -> None:
    """Write the blocks of all pages."""
    for page in pages():
        page.write_text(filled(page.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="names, separated by commas")
    parser.add_argument("--pages", action="store_true", help="write the pages alone")
    options = parser.parse_args()
    if not options.pages:
        take_all(options.only)
    write_pages()


if __name__ == "__main__":
    run_main(main)
