"""The output of workers is kept under the names of their roles, of every restart and session."""

import os

import pytest

from deploy.cluster.worker_logs import collect_ray_logs, collect_worker_logs, logs_of, newest_lines
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from headway import clean_text


@pytest.fixture
def ray_logs(tmp_path):
    folder = tmp_path / "session" / "logs"
    folder.mkdir(parents=True)
    (folder / "raylet.out").write_text("not of a worker\n")
    return folder


def write(folder, pid, text, *, at=1.0, suffix="out"):
    file = folder / f"worker-{'0' * 56}-01000000-{pid}.{suffix}"
    file.write_text(text)
    os.utime(file, (at, at))


def actor(name, text):
    return f":job_id:01000000\n:actor_name:RolloutActor\n:actor_name:{name}\n{text}"


def test_output_is_named_after_the_actor_and_lines_of_ray_are_left_out(ray_logs, tmp_path):
    write(ray_logs, 7, actor("actor-0", "loads\nserves\n"))
    write(ray_logs, 7, actor("actor-0", "a warning\n"), suffix="err")
    write(ray_logs, 8, actor("learner-1", "steps\n"))
    write(ray_logs, 9, ":job_id:01000000\n:task_name:ask\nsomething\n")
    write(ray_logs, 10, actor("broker", ""))
    collect_worker_logs(ray_logs, tmp_path)
    kept = {file.name: file.read_text() for file in tmp_path.glob("*.*")}
    when = "until 1970-01-01 00:00:01 UTC"
    assert kept == {
        "actor-0.out": f"--- pid 7, {when}\nloads\nserves\n",
        "actor-0.err": f"--- pid 7, {when}\na warning\n",
        "learner-1.out": f"--- pid 8, {when}\nsteps\n",
        "worker.out": f"--- pid 9, {when}\nsomething\n",
    }


def test_restarts_and_later_sessions_follow_in_the_same_file(ray_logs, tmp_path):
    write(ray_logs, 30, actor("actor-0", "second\n"), at=2.0)
    write(ray_logs, 40, actor("actor-0", "first\n"), at=1.0)
    collect_worker_logs(ray_logs, tmp_path)
    collect_worker_logs(ray_logs, tmp_path)
    lines = (tmp_path / "actor-0.out").read_text().splitlines()
    assert lines[1::2] == ["first", "second"] * 2


def test_output_that_cannot_be_written_decides_about_no_run(ray_logs, tmp_path, caplog):
    write(ray_logs, 7, actor("actor-0", "loads\n"))
    (ray_logs / "raylet.err").write_text("lost\n")
    for name in ("actor-0.out", "ray-raylet.err"):
        (tmp_path / name).mkdir()  # a file of this name cannot be written
    collect_worker_logs(ray_logs, tmp_path)
    collect_ray_logs(ray_logs, tmp_path)
    assert caplog.text.count("the output of processes is not all in") == 2


def test_secrets_and_control_characters_are_left_out_of_all_logs(ray_logs, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKER_TOKEN", "wt-5a6b7c8d")
    clean_text.register(["WORKER_TOKEN"])
    (ray_logs / "raylet.err").write_text("env: wt-5a6b7c8d\x1b[31m\n")
    write(ray_logs, 7, actor("actor-0", "env: wt-5a6b7c8d\x1b[31m\n"))
    collect_ray_logs(ray_logs, tmp_path)
    collect_worker_logs(ray_logs, tmp_path)
    for name in ("ray-raylet.err", "actor-0.out"):
        assert (tmp_path / name).read_text().splitlines()[-1] == "env: [WORKER_TOKEN]\\x1b[31m"


@pytest.mark.parametrize("name", ["../../etc/passwd", "\u00e4\x1b[2J" * 200])
def test_what_user_code_prints_as_the_name_of_an_actor_is_a_plain_file_name(
    ray_logs, tmp_path, name
):
    write(ray_logs, 7, actor(name, "text\n"))
    collect_worker_logs(ray_logs, tmp_path)
    [file] = tmp_path.glob("*.out")
    assert file.name.isascii()
    assert file.read_text().endswith("\ntext\n")


@pytest.mark.parametrize(("status", "count"), [("running", 2), ("done", 1)])
def test_the_logs_of_a_run_that_was_killed_are_found_with_ray(ray_logs, tmp_path, status, count):
    write(ray_logs, 7, actor("actor-0", "loads\n"))
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    (run.logs / "driver.log").write_text("starting Ray\n")
    append_rows(run.path / "sessions.jsonl", [{"ray_logs": str(ray_logs)}])
    run.write_summary({"status": status})
    files = logs_of(run)
    assert [name for name, _ in files] == ["driver.log", "actor-0.out"][:count]
    assert newest_lines(files[0][1], 5) == "starting Ray"


def test_the_newest_lines_are_shown(tmp_path):
    file = tmp_path / "long.out"
    file.write_bytes(b"".join(b"line %d\n" % number for number in range(10**5)) + b"\xff half")
    assert newest_lines(file, 3) == "line 99998\nline 99999\n\ufffd half"
