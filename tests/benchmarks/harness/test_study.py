"""The frame of a benchmark: options, parts of the record, conclusions, misses, errors."""

import json
from collections.abc import Sequence
from typing import Annotated

import pytest
import typer

from benchmarks.harness.study import Options, Study, name_of, number, several, text_table
from deploy.errors import RunFailed
from headway.errors import InputError


class ValueOptions(Options):
    """Options of a benchmark of values."""

    values: Annotated[Sequence[int], several(number(0), "To measure.")] = (1, 2)
    names: Annotated[Sequence[str], several(name_of(("none", "tis")), "Of corrections.")] = ()
    rate: Annotated[float, typer.Option(help="Of values.")] = 1.0


def study(measure, **changes):
    """Return a benchmark that concludes the largest of its values."""
    return Study(
        name="test",
        options=ValueOptions,
        measure=measure,
        **{"conclude": lambda record: {"largest": max(record["values"])}, **changes},
    )


def values(options):
    """Yield the values so far."""
    for count in range(1, len(options.values) + 1):
        yield {"values": options.values[:count]}


def run(study, file, *values):
    return study.run(ValueOptions(out=file, values=values or (1, 2)))


def test_the_record_holds_provenance_options_measurement_and_conclusions(tmp_path, capsys):
    shown = study(
        values,
        table=lambda record: f"largest {record['largest']}",
        figures=lambda record, folder: (folder / "test.png").touch(),
    )
    assert run(shown, tmp_path / "test.json", 3, 5) == 0
    record = json.loads((tmp_path / "test.json").read_text())
    assert (record["values"], record["largest"]) == ([3, 5], 5)
    assert record["arguments"] == {"values": [3, 5], "names": [], "rate": 1.0}
    assert {"command", "commit", "machine", "versions"} <= record.keys()
    assert capsys.readouterr().out == f"largest 5\nstored in {tmp_path / 'test.json'}, test.png\n"


def test_what_was_measured_before_a_failure_is_stored(tmp_path):
    def fails(options):
        yield {"values": [7]}
        raise RunFailed("the second failed")

    with pytest.raises(RunFailed):
        run(study(fails), tmp_path / "test.json")
    assert json.loads((tmp_path / "test.json").read_text())["largest"] == 7


def test_a_missed_aim_is_named_and_is_the_exit_code(tmp_path, capsys):
    missed = study(values, misses=lambda record: ["too small"] if record["largest"] < 3 else [])
    assert run(missed, tmp_path / "test.json") == 1
    assert "aim missed: too small" in capsys.readouterr().out
    assert run(missed, tmp_path / "test.json", 3) == 0


@pytest.mark.parametrize(
    ("error", "trained", "before", "stays"),
    [
        (InputError("no such module"), "", False, False),
        (InputError("no such module"), "{}\n", False, True),
        (InputError("no such module"), "", True, True),
        (RunFailed("it died"), "", False, True),
    ],
    ids=["nothing trained", "a batch trained", "there before", "failed, with its log"],
)
def test_a_folder_of_a_comparison_that_refuses_its_input_does_not_stay(
    tmp_path, error, trained, before, stays
):
    out = tmp_path / "runs" / "bench"
    if before:
        out.mkdir(parents=True)

    def refuses(options):
        (out / "eta0").mkdir()
        (out / "eta0" / "metrics.jsonl").write_text(trained)
        yield {"values": [1]}
        raise error

    with pytest.raises(type(error)):
        run(study(refuses, in_folder=True), out)
    assert [path.name for path in tmp_path.iterdir()] == (["runs"] if stays else [])


@pytest.mark.parametrize("continued", [True, False])
def test_a_folder_that_holds_something_is_continued_or_refused_with_what_to_do(tmp_path, continued):
    comparison = study(values, in_folder=True, continued=continued)
    assert run(comparison, tmp_path) == 0
    if continued:
        assert run(comparison, tmp_path) == 0
        return
    for out in (tmp_path, tmp_path / "test.json"):
        with pytest.raises(InputError, match=r"is not empty, .* name another folder, or delete it"):
            run(study(lambda options: pytest.fail("it was measured"), in_folder=True), out)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("no such thing"), 2, "headway: no such thing\n"),
        (RunFailed("it died"), 1, "headway: it died\n"),
        (KeyboardInterrupt(), 130, "headway: stopped by the user\n"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(
    tmp_path, monkeypatch, capsys, error, code, message
):
    def raises(options):
        raise error

    monkeypatch.setattr("sys.argv", ["test", "--out", str(tmp_path / "test.json")])
    with pytest.raises(SystemExit) as ended:
        study(raises).main()
    assert ended.value.code == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (several(number(0), "").parser, "2,0,00,02", (2, 0)),
        (several(name_of(("none", "tis")), "").parser, "tis,none,tis", ("tis", "none")),
        (several(number(0), "").parser, "", ()),
        (number(0, kind=float), "0.5", 0.5),
        (number(0), "1.5", "1.5 must be a whole number, at least 0"),
        (number(0), "-1", "-1 must be a whole number, at least 0"),
        (number(0, kind=float), "nan", "nan must be a number, at least 0"),
        (number(0, kind=float), "inf", "inf must be a number, at least 0"),
        (name_of(("none", "tis")), "tsi", "there are none, tis, and not tsi; did you mean 'tis'?"),
    ],
)
def test_values_of_a_list_count_once_and_a_bad_one_is_refused_with_what_is_allowed(
    parse, text, expected
):
    if not isinstance(expected, str):
        assert parse(text) == expected
        return
    with pytest.raises(typer.BadParameter) as refused:
        parse(text)
    assert refused.value.message == expected


def test_options_of_the_command_line_are_measured(tmp_path):
    seen = []

    def measure(options):
        seen.append((options.values, options.names))
        yield {"values": options.values}

    arguments = ["--values", "3", "--names", "tis", "--out", str(tmp_path / "test.json")]
    with pytest.raises(SystemExit) as ended:
        study(measure).typer_command()(arguments)
    assert (ended.value.code, seen) == (0, [((3,), ("tis",))])


def test_columns_of_a_table_are_aligned():
    assert text_table(["η", "samples/s"], [["0", "5"], ["16", "12.5"]], "title").splitlines() == [
        "title",
        "η   samples/s",
        "0           5",
        "16       12.5",
    ]


@pytest.mark.parametrize("in_folder", [False, True])
def test_two_at_once_do_not_write_to_one_place(tmp_path, in_folder):
    out = tmp_path / "new" / "figures"
    refused = study(values, in_folder=in_folder)
    seen = []

    def measure(options):
        with pytest.raises(InputError, match="another benchmark writes to"):
            run(refused, out)
        seen.append(sorted(path.name for path in out.parent.iterdir()))
        yield {"values": [1]}

    assert run(study(measure, in_folder=in_folder), out) == 0
    assert seen == [[".figures.lock", *(["figures"] if in_folder else [])]]
    assert [path.name for path in out.parent.iterdir()] == ["figures"]
