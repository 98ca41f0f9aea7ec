"""A whole run that meets every hostile case at once trains to its end, and tells no secret."""

import http.client
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest

from tests.deploy.conftest import HEADWAY, RECIPE
from tests.red_team import hostile_user
from tests.red_team.hostile_user import COROUTINES, ENVIRONMENT, KINDS, REWARD
from tests.red_team.servers import ANSWERS, KEY, connect, get, hostile_server

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(1800)]

METRICS_TOKEN = "mt-5f0e11d2c3"
SECRETS = {
    hostile_user.SECRET: "ab12cd34ef56",
    "JUDGE_KEY": KEY,
    "HEADWAY_METRICS_TOKEN": METRICS_TOKEN,
    "DATABASE": "postgres://me:hunter2hunter@db/x",
}
"""Variables of the environment of a run; "DATABASE" has a password."""
PARTS = ("ab12cd34ef56", "7e1c'", "90ab", METRICS_TOKEN, "hunter2hunter")
"""Texts that show one of them."""
JUDGE = [f"judge: {name}" for name in ANSWERS if name != "text"]
STEPS, GROUPS = 12, 4
LOG_MIB = 40
"""Most that all logs of the run may have together."""


class Hostile:
    """A run that has ended, with what it and its ports showed meanwhile."""

    def __init__(self, headway):
        self.folder = headway.run_folder("hostile")
        self.headway = headway
        self.seen = Counter()
        self.open = None
        """A connection with half a request."""

    def arguments(self, port):
        judge = (
            f"{{url='http://127.0.0.1:{port}/v1', model='m', key_variable='JUDGE_KEY', seconds=4,"
            " attempts=1, instruction='kind={answer};'}"
        )
        kinds = [name.removeprefix("judge: ") for name in JUDGE]
        model = self.headway.folder / "runs" / "small-sft" / "model"
        recipe = self.headway.folder / "no-warm-start.toml"
        recipe.write_text(re.sub(r"(?s)\[sft\].*?\n(?=\[)", "", RECIPE.read_text()))
        settings = (
            f"model={{path='{model}'}}", "name=hostile", f"steps={STEPS}",
            f"prompts.groups_per_batch={GROUPS}", "prompts.source=hostile_user:Source",
            f"prompts.source_options.judge={json.dumps(kinds)}", "heldout.every=100",
            "actors.environment=hostile_user:Environment", "actors.max_turns=2",
            "actors.reward=['llm_judge', 'hostile_user:score']",
            "actors.heldout_reward=['tags']",
            f"actors.reward_options.llm_judge={judge}", "actors.reward_timeout_seconds=15",
            "actors.reward_memory_gib=1", "actors.environment_timeout_seconds=15",
            "actors.scripted_options={median_length = 8, length_sigma = 0.3}",
            "actors.max_concurrent_rollouts=16", "queues.max_attempts=1", "queues.retry_seconds=0",
            "deploy.max_failed_groups=100000", "deploy.metrics_token=true",
            "deploy.metrics_port=0",
        )  # fmt: skip
        parts = [part for setting in settings for part in ("--set", setting)]
        return [HEADWAY, "run", recipe, *parts]

    def play(self):
        shutil.copy(hostile_user.__file__, self.headway.folder)
        log = self.headway.folder / "hostile.log"
        with (
            hostile_server(kind_of, fails=2) as (port, self.keys),
            log.open("w") as output,
            subprocess.Popen(
                self.arguments(port), cwd=self.headway.folder, stdout=output,
                stderr=subprocess.STDOUT, env={**self.headway.environment, **SECRETS},
            ) as process,
        ):  # fmt: skip
            try:
                while process.poll() is None:
                    self.look(log)
                    time.sleep(0.5)
            finally:
                process.terminate()
        self.code, self.output = process.returncode, log.read_text()
        return self

    @cached_property
    def rollouts(self):
        return self.headway.rollouts("hostile")

    def look(self, log):
        """Ask the run's own port, with a token, without, and as no client should."""
        address = re.search(r"http://127\.0\.0\.1:(\d+)/targets", log.read_text())
        if address is None:
            return
        port = int(address[1])
        for path, token in (
            ("/healthz", None), ("/readyz", None), ("/metrics", None),
            ("/metrics", METRICS_TOKEN), ("/targets", METRICS_TOKEN), ("/metrics", "wrong"),
        ):  # fmt: skip
            status = None
            with suppress(OSError, http.client.HTTPException):
                status, _ = get(port, path, token and f"Bearer {token}")
            self.seen[path, token, status] += 1
        with suppress(OSError):
            if self.open is not None:
                self.open.close()  # half-way
            self.open = connect(port)
            self.open.sendall(b"GET /metrics HTTP/1.1\r\nA: ")


def kind_of(request):
    """Return the behaviour that a request to the judge asks for by its prompt."""
    kind = re.search(r"kind=judge: (.*?);", request)
    return kind[1] if kind else "mark"


@pytest.fixture(scope="module")
def run(headway):
    return Hostile(headway).play()


def becomes(kind):
    """Return what becomes of a group, by its kind: "fine", a reason to fail, or None: either."""
    way, _, name = kind.partition(": ")
    if way == "judge":
        return "reward" if ANSWERS[name][1] == "failed" else "fine"
    return (REWARD if way == "reward" else ENVIRONMENT)[name][1]


class TestHostileRun:
    def test_it_trains_to_its_end(self, run):
        assert run.code == 0, run.output[-4000:]
        accounts = run.headway.accounting("hostile")
        assert accounts["balanced"]
        assert accounts["trained"] == STEPS * GROUPS
        summary = json.loads((run.folder / "summary.json").read_text())
        assert sum(summary["restarts"].values()) == 0

    def test_every_case_fails_alone_or_is_fine(self, run, outcomes):
        accounts = run.headway.accounting("hostile")
        trained = {row["prompt_id"] for row in run.rollouts}
        failed = {prompt["prompt_id"]: prompt for prompt in accounts["failed_prompts"]}
        wrong = {}
        for number, kind in enumerate([*KINDS, *JUDGE]):
            prompt = f"train/0/{number}"
            outcome = "fine" if prompt in trained else failed.get(prompt, {}).get("reason", "lost")
            outcomes["run", kind] = outcome
            if becomes(kind) not in (None, outcome) or outcome == "lost":
                wrong[kind] = outcome, failed.get(prompt, {}).get("error")
        assert not wrong
        assert all(f"prompt '{prompt}'" in row["error"] for prompt, row in failed.items())
        assert len(KINDS) + len(JUDGE) > 110
        assert {*COROUTINES} <= {*ENVIRONMENT}

    def test_no_file_and_no_output_has_a_secret(self, run):
        sessions = (run.folder / "sessions.jsonl").read_text().splitlines()
        ray_logs = Path(json.loads(sessions[-1])["ray_logs"])
        files = [*run.folder.rglob("*"), *ray_logs.rglob("*"), run.headway.folder / "hostile.log"]
        assert run.keys == {f"Bearer {KEY}"}
        for path in files:
            if path.is_file():
                content = path.read_bytes().decode("latin-1")
                assert [part for part in PARTS if part in content] == [], path

    def test_the_reward_saw_no_secret(self, run):
        prompt = f"train/0/{KINDS.index('reward: reads the secret')}"
        rows = [row for row in run.rollouts if row["prompt_id"] == prompt]
        assert {dict(row["reward_parts"])["hostile_user:score"] for row in rows} == {0.0}

    def test_logs_stay_small(self, run):
        logs = [path for path in run.folder.rglob("*") if path.parent.name == "logs"]
        assert sum(path.stat().st_size for path in logs) < LOG_MIB << 20
        assert (run.folder / "ledger.sqlite").stat().st_size < 4 << 20
        assert len(run.output) < 1 << 19

    def test_its_failed_prompts_are_not_queued_once_it_has_trained_all(self, run):
        refused = run.headway.call("requeue", "hostile")
        assert refused.returncode == 2
        assert f"has trained all of its {STEPS} batches" in refused.stderr

    def test_its_port_answered_who_has_the_token_and_kubelets(self, run):
        assert run.seen["/healthz", None, 200] > 3
        assert run.seen["/readyz", None, 503] > 0
        assert run.seen["/readyz", None, 200] > 3
        assert run.seen["/metrics", METRICS_TOKEN, 200] > 3
        assert run.seen["/targets", METRICS_TOKEN, 200] > 3
        assert {status for (path, token, status) in run.seen
                if path == "/metrics" and token != METRICS_TOKEN} <= {401, None}  # fmt: skip

    @pytest.mark.parametrize("command", [
        ("inspect", "hostile"), ("logs", "hostile"), ("logs", "hostile", "actor-0"),
        ("logs", "hostile", "driver"), ("rollouts", "hostile"), ("report", "hostile"), ("ls",),
    ], ids=" ".join)  # fmt: skip
    def test_what_commands_print_of_it_is_plain(self, run, command):
        shown = run.headway.call(*command)
        assert shown.returncode == 0, shown.stderr
        text = shown.stdout + shown.stderr
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
        assert [part for part in PARTS if part in text] == []

    def test_its_page_and_its_log_are_plain(self, run):
        page = (run.folder / "report.html").read_text()
        log = (run.folder / "logs" / "driver.log").read_text()
        for text in (page, log):
            assert [c for c in text if not c.isprintable() and c != "\n"] == []
        assert "<script" not in page
