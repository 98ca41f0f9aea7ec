"""The frame of a benchmark: options, parts of the record, conclusions, misses, errors."""

import json

import pytest

from benchmarks.harness.study import Study, known_names, number, option, text_table
from deploy.errors import RunFailed
from headway.errors import InputError


def study(measure, **changes):
    """Return a benchmark that concludes the largest of its values."""
    return Study(
        name="test",
        about="Test.",
        options=(option("--values", [1, 2], "to measure"),),
        file="test.json",
        measure=measure,
        **{"conclude": lambda record: {"largest": max(record["values"])}, **changes},
    )


def values(options):
    """Yield the values so far."""
    for count in range(1, len(options.values) + 1):
        yield {"values": options.values[:count]}


def run(study, file, *arguments):
    return study.run(study.parse(["--out", str(file), *arguments]))


def test_the_record_holds_provenance_options_measurement_and_conclusions(tmp_path, capsys):
    shown = study(values, table=lambda record: f"largest {record['largest']}")
    assert run(shown, tmp_path / "test.json", "--values", "3", "5") == 0
    record = json.loads((tmp_path / "test.json").read_text())
    assert (record["values"], record["largest"]) == ([3, 5], 5)
    assert record["arguments"] == {"values": [3, 5]}
    assert {"command", "commit", "machine", "versions"} <= record.keys()
    assert capsys.readouterr().out == f"largest 5\nstored in {tmp_path / 'test.json'}\n"


def test_files_that_are_drawn_are_named(tmp_path, capsys):
    drawn = study(values, figures=lambda record, folder: (folder / "test.png").touch())
    assert run(drawn, tmp_path / "test.json") == 0
    assert capsys.readouterr().out.endswith(f"stored in {tmp_path / 'test.json'}, test.png\n")


def test_what_a_check_adds_to_the_options_is_not_stored(tmp_path):
    def check(options):
        options.plan = [object()]

    assert run(study(values, check=check), tmp_path / "test.json") == 0
    assert json.loads((tmp_path / "test.json").read_text())["arguments"] == {"values": [1, 2]}


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
    assert run(missed, tmp_path / "test.json", "--values", "3") == 0


@pytest.mark.parametrize(
    ("error", "trained", "stays"),
    [
        (InputError("no such module"), "", False),
        (InputError("no such module"), "{}\n", True),
        (RunFailed("it died"), "", True),
    ],
    ids=["nothing trained", "a batch trained", "failed, with its log"],
)
def test_a_folder_of_a_comparison_that_refuses_its_input_does_not_stay(
    tmp_path, error, trained, stays
):
    out = tmp_path / "runs" / "bench"

    def refuses(options):
        (out / "eta0").mkdir()
        (out / "eta0" / "metrics.jsonl").write_text(trained)
        yield {"values": [1]}
        raise error

    with pytest.raises(type(error)):
        run(study(refuses, in_folder=True), out)
    assert [path.name for path in tmp_path.iterdir()] == (["runs"] if stays else [])


def test_a_folder_that_was_there_before_stays_when_input_is_refused(tmp_path):
    def refuses(options):
        yield {"values": [1]}
        raise InputError("no such module")

    with pytest.raises(InputError):
        run(study(refuses, in_folder=True), tmp_path)
    assert tmp_path.exists()


@pytest.mark.parametrize("continued", [True, False])
def test_a_folder_that_holds_something_is_continued_or_refused_with_what_to_do(tmp_path, continued):
    comparison = study(values, in_folder=True, continued=continued)
    assert run(comparison, tmp_path) == 0
    if continued:
        assert run(comparison, tmp_path) == 0
        return
    with pytest.raises(InputError, match=r"is not empty, .* name another folder, or delete it"):
        run(study(_must_not_measure, in_folder=True), tmp_path)
    file = tmp_path / "test.json"
    with pytest.raises(InputError, match="is not empty"):
        run(study(_must_not_measure, in_folder=True), file)


def _must_not_measure(options):
    pytest.fail("it was measured")


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


def test_numbers_and_names_outside_what_is_allowed_are_refused():

    assert study(values).parse([]).values == [1, 2]
    assert number(int, 2)("2") == 2
    assert number(float, above=0, most=1)("1") == 1.0
    for parse, text in ((number(int, 2), "1"), (number(float, above=0), "nan")):
        with pytest.raises(Exception, match=f"{text} must be a"):
            parse(text)
    assert known_names("b,a,b", "--names", ("a", "b")) == ("b", "a")
    with pytest.raises(InputError, match="--names 'c': there are a, b, and not c"):
        known_names("c", "--names", ("a", "b"))


def test_columns_of_a_table_are_aligned():
    assert text_table(["η", "samples/s"], [["0", "5"], ["16", "12.5"]], "title").splitlines() == [
        "title",
        "η   samples/s",
        "0           5",
        "16       12.5",
    ]


def test_an_option_that_is_not_known_is_answered_with_the_one_that_is_meant(capsys):
    with pytest.raises(SystemExit) as ended:
        study(values).parse(["--vaules", "3"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --vaules 3; did you mean 'values'?" in capsys.readouterr().err


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


def test_a_benchmark_that_is_refused_leaves_nothing_that_it_has_made(tmp_path):
    def refuses(options):
        raise InputError("no cores")
        yield {}

    with pytest.raises(InputError, match="no cores"):
        run(study(refuses, in_folder=True), tmp_path / "new" / "folder")
    assert [*tmp_path.iterdir()] == []
