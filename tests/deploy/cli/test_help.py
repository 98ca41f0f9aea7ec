"""Help, completion, and what misspelt names are answered with."""

import re

import pytest
import typer

from deploy.cli.app import app
from deploy.cli.bench import BENCHMARKS, describe
from headway.errors import InputError
from tests.deploy.conftest import Headway, call_main

COMMANDS = sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_a_flag_has_no_type_in_the_help(command, capsys):
    app([*command, "--help"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "--help" in text
    assert "<bool>" not in text


def test_the_help_of_bench_has_one_line_for_each_benchmark(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    app(["bench", "--help"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    for name in BENCHMARKS:
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert len(line) <= 80
        assert len(line.split()) > 3


def test_without_a_checkout_the_help_of_bench_says_what_each_needs(tmp_path):
    assert describe(tmp_path).count("needs a checkout") == len(BENCHMARKS)


def complete(line, folder):
    command, position = Headway(folder), str(line.count(" "))
    command.environment |= {"_HEADWAY_COMPLETE": "complete_bash"}
    command.environment |= {"COMP_WORDS": line, "COMP_CWORD": position}
    return command().stdout.split()


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("headway insp", ["inspect"]),
        ("headway run dem", ["demo"]),
        ("headway validate demo --set learner.learning", ["learner.learning_rate"]),
        ("headway resume ", ["mine"]),
        ("headway bench sta", ["staleness"]),
    ],
)
def test_the_shell_completes_commands_recipes_keys_runs_and_benchmarks(line, completions, tmp_path):
    for name in ("mine", ".mine.replaced"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.toml").touch()
    (tmp_path / "queues").mkdir()  # a folder that a run would be refused for
    assert complete(line, tmp_path) == completions


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["bench", "asnyc"], "did you mean 'async'?"),
        (["presets", "gpro"], "did you mean 'grpo'?"),
        (["validate", "dmeo"], "did you mean 'demo'?"),
        (["validate", "demo", "--set", "preset=gpro"], "did you mean 'grpo'?"),
        (["vaildate", "demo"], "did you mean 'validate'?"),
        (["asnyc"], "no command 'asnyc'; `headway --help` lists them; did you mean 'bench async'?"),
        (["raport"], "did you mean 'report'?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_one_that_is_meant(arguments, hint):
    with pytest.raises(InputError, match=re.escape(hint)):
        app(arguments, standalone_mode=False)


def test_a_strict_validation_imports_what_a_recipe_names_and_needs_no_model(tmp_path):
    command = ["validate", "demo", "--set", "prompts.source=reasoning_gym:chain_sm"]
    assert call_main(command, tmp_path).returncode == 0
    refused = call_main([*command, "--strict"], tmp_path)
    assert (refused.returncode, "mean 'chain_sum'" in refused.stderr) == (2, True)
    assert call_main(["validate", "demo", "--strict"], tmp_path).returncode == 0
