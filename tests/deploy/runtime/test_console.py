"""The log of a command: everything printed and logged, and the error that ends it."""

import io
import logging
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from deploy.errors import Interrupted
from deploy.runtime.console import Terminal, log_to
from deploy.runtime.safe_console import SafeConsole, print_whole
from headway.errors import InputError


def test_no_cell_of_a_table_of_figures_is_cut_in_a_narrow_terminal():
    printed, table = io.StringIO(), Table(*(f"figure {n}" for n in range(20)))
    table.add_row(*(f"0.{n:06d}" for n in range(20)))
    print_whole(SafeConsole(width=80, file=printed), table)
    assert all(f"0.{n:06d}" in printed.getvalue() for n in range(20))
    assert "…" not in printed.getvalue()


def test_lines_steps_warnings_and_the_error_are_in_the_log_but_only_lines_are_printed(tmp_path):
    printed = io.StringIO()
    terminal = Terminal(Console(file=printed, force_terminal=False))
    file = tmp_path / "driver.log"

    def command():
        terminal.say("starting 100% of Ray")
        with terminal.bar(3, "waiting"):
            for step in (1, 2, 3):
                terminal.advance(step, f"reward {step / 10}")
        logging.getLogger("elsewhere").warning("slow disk")
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"), log_to(file):
        command()
    terminal.say("after the end")
    lines = file.read_text().splitlines()
    logged = [line.split(" ", 2)[2] for line in lines[:5]]
    assert logged == [
        "INFO starting 100% of Ray",
        "INFO step 1/3 · reward 0.1",
        "INFO step 2/3 · reward 0.2",
        "INFO step 3/3 · reward 0.3",
        "WARNING slow disk",
    ]
    assert "ERROR ended by OSError" in lines[5]
    assert lines[-1] == "    OSError: no network"
    assert "step 2/3" not in printed.getvalue()
    assert "Traceback" not in printed.getvalue()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Interrupted("stopped by the user\ngo on with: headway resume mine"), None),
        (InputError("prompts.source = 'x': no such file"), None),
        (KeyboardInterrupt(), "stopped by the user"),
    ],
)
def test_the_log_of_what_the_user_caused_ends_with_the_message_and_not_with_a_traceback(
    error, message, tmp_path
):
    with pytest.raises(type(error)), log_to(tmp_path / "driver.log"):
        raise error
    text = (tmp_path / "driver.log").read_text()
    shown = str(message or error).replace("\n", "\n    ")
    assert text.endswith(f"ERROR {shown}\n")
    assert "Traceback" not in text


def test_a_second_command_goes_on_in_the_same_file(tmp_path):
    for text in ("first", "second"):
        with log_to(tmp_path / "driver.log"):
            Terminal(Console(file=io.StringIO())).say(text)
    texts = [line.rpartition(" ")[2] for line in (tmp_path / "driver.log").read_text().splitlines()]
    assert texts == ["first", "second"]


def test_a_disk_that_hangs_stops_nobody_and_gets_the_lines_later(tmp_path):
    printed = io.StringIO()
    os.mkfifo(tmp_path / "driver.log")
    with log_to(tmp_path / "driver.log"):
        Terminal(Console(file=printed)).say("text")
        assert "text" in printed.getvalue()
        reading = os.open(tmp_path / "driver.log", os.O_RDONLY)
    assert os.read(reading, 4096).endswith(b"INFO text\n")
    os.close(reading)


def test_a_full_disk_neither_ends_a_command_nor_clutters_its_output(capfd):
    with log_to(Path("/dev/full")):
        Terminal(Console(file=io.StringIO())).say("text")
    assert capfd.readouterr().err == ""
