"""The reward `llm_judge`: marks, attempts and the budget, against a server of a few lines."""

import asyncio
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from actors.assembly import build_rewards
from actors.config import ActorsConfig
from actors.errors import RewardFailed, RewardModelLost
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import load_rewards
from headway.errors import InputError
from queues.records import Prompt
from tests.waiting import until

PROMPT = Prompt(prompt_id="p/0/1", text="What is 3+4?", answer="7")


@contextmanager
def server(*answers, reply_to=None):
    """Answers in turn: a text as a reply, a number as a status, None by hanging up.

    A pair is a reply and why it ended. `reply_to`, if given, makes an answer of the text asked.
    """
    waiting, asked = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            text = body["messages"][0]["content"]
            answer = reply_to(text) if reply_to else waiting.pop(0)
            if answer is None:
                self.close_connection = True
                return
            refused = f"bad key {self.headers.get('Authorization')}"
            status, content = (answer, refused) if isinstance(answer, int) else (200, answer)
            reply, ended = content if isinstance(content, tuple) else (content, "stop")
            choice = {"message": {"content": reply}, "finish_reason": ended}
            payload = json.dumps({"choices": [choice]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *arguments):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    listening.socket.listen(128)  # with the default of 5, callers at once are cut off under load
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1", asked
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join(10)


def judge(url, count=1, completion="It is 7.", **options):
    """Return the outcomes of several scores, taken one after the other."""
    options = {"url": url, "model": "m", "backoff_seconds": 0.001, **options}
    rewards = load_rewards(["llm_judge"], options={"llm_judge": options})

    async def go():
        return [await rewards.score(PROMPT, completion) for _ in range(count)]

    return [score.total for score in asyncio.run(go())]


def test_the_mark_is_a_share_of_the_largest_and_the_judge_sees_all():
    with server("8", "Mark: 2.5 of 5") as (url, asked):
        assert judge(url) == [0.8]
        assert judge(url, largest=5.0, completion="{answer}") == [0.5]
    path, key, body = asked[0]
    assert (path, key) == ("/v1/chat/completions", None)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 16)
    [message] = body["messages"]
    for text in ("What is 3+4?", "It is 7.", "Reference:\n7"):
        assert text in message["content"]
    assert "Answer:\n{answer}" in asked[1][2]["messages"][0]["content"]


CUT = ("<think> Okay, there are 3 ", "length")


@pytest.mark.parametrize(
    "reply",
    ["7", " 7.0\n", "Score: 7.", "**7**", "7/10", "7 / 10.", "7 out of 10", "7 (out of 10)"],
)
def test_one_number_is_the_mark_however_the_largest_is_told(reply):
    with server(reply) as (url, _):
        assert judge(url) == [0.7]


@pytest.mark.parametrize(
    "reply",
    [
        "-3", "- 3", "−3", "minus 3", "3 or 4", "7, no: 7", "3-4", "7/7", "7/100", "3/5", "70%",
        "5,5", ".5", "1e1", "five out of 10", "five/10", "3 of the facts", "v2", "11/10", "",
    ],
)  # fmt: skip
def test_a_reply_that_could_mean_another_mark_fails_the_rollout(reply):
    with server(reply) as (url, _), pytest.raises(RewardFailed, match="gave no one mark"):
        judge(url, attempts=1)


def test_the_largest_mark_is_the_one_that_was_set():
    with server("3/5", "3/10") as (url, asked):
        assert judge(url, largest=5.0) == [0.6]
        with pytest.raises(RewardFailed, match="no one mark from 0 to 5: '3/10'"):
            judge(url, largest=5.0, attempts=1)
    assert "from 0, useless, to 5, perfect" in asked[0][2]["messages"][0]["content"]


def test_a_pattern_that_finds_several_marks_must_find_the_same():
    pattern = r"Mark: (\d+)"
    with server("Of 3 facts 2 are right. Mark: 4", "Mark: 4. Mark: 4", "Mark: 4. Mark: 5") as (
        url,
        _,
    ):
        assert judge(url, count=2, pattern=pattern) == [0.4, 0.4]
        with pytest.raises(RewardFailed, match="gave no one mark"):
            judge(url, pattern=pattern, attempts=1)


def test_a_reply_that_was_cut_off_is_asked_for_again_and_never_read():
    with server(CUT, "7", CUT, CUT) as (url, asked):
        assert judge(url) == [0.7]
        with pytest.raises(
            RewardFailed, match=r"was cut off after max_tokens = 16, .*<think> Okay"
        ):
            judge(url, attempts=2)
    assert len(asked) == 4


def test_the_request_has_the_fields_of_the_body():
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    with server("7") as (url, asked):
        judge(url, body=quiet)
    assert quiet.items() <= asked[0][2].items()
    assert asked[0][2]["model"] == "m"


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with server("5") as (url, asked):
        judge(url, key_variable="JUDGE_KEY")
    assert asked[0][1] == "Bearer secret"


def test_what_fails_in_passing_is_asked_again():
    with server(503, None, "no idea", "10") as (url, asked):
        assert judge(url) == [1.0]
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("answers", "error", "message", "calls"),
    [
        ([503] * 3, RewardModelLost, "answered 503", 3),
        ([None] * 3, RewardModelLost, "does not answer", 3),
        (["none"] * 3, RewardFailed, "gave no one mark from 0 to 10: 'none'", 3),
        (["11"] * 3, RewardFailed, "gave no one mark from 0 to 10: '11'", 3),
        ([401], RewardFailed, "answered 401", 1),
    ],
)
def test_a_judge_that_gives_no_mark_fails_the_rollout_and_says_why(answers, error, message, calls):
    """Not one that is away: that is held against no rollout."""
    with server(*answers) as (url, asked), pytest.raises(error, match=message) as caught:
        judge(url, attempts=3)
    assert type(caught.value) is error
    assert len(asked) == calls
    assert "reward 'llm_judge' of prompt 'p/0/1'" in str(caught.value)


def test_attempts_count_against_the_budget():
    with server("1", 500, "2", "3") as (url, asked):
        with pytest.raises(RewardFailed, match=r"all 3 calls of this actor are used up"):
            judge(url, count=3, max_calls=3)
        assert len(asked) == 3


@pytest.mark.parametrize("heldout", [None, ["llm_judge"]])
async def test_training_and_heldout_rollouts_share_one_budget(heldout):
    expected = {"llm_judge"} if heldout else {"tags", "llm_judge"}
    with server("7", "7") as (url, asked):
        config = ActorsConfig(
            engine="scripted",
            reward=["tags", "llm_judge"],
            heldout_reward=heldout,
            reward_options={"llm_judge": {"url": url, "model": "m", "max_calls": 2}},
        )
        training, evaluated, _ = build_rewards(config, pool=RewardPool(), reward_model_client=None)
        assert (await training.score(PROMPT, "7")).parts.keys() == {"tags", "llm_judge"}
        assert (await evaluated.score(PROMPT, "7")).parts.keys() == expected
        for rewards in (training, evaluated):
            with pytest.raises(RewardFailed, match="all 2 calls of this actor are used up"):
                await rewards.score(PROMPT, "7")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m"}, "requires the option url"),
        ({"url": "localhost:8000", "model": "m"}, "url = .* should match"),
        ({"url": "http://x/v1", "model": "m", "modle": 1}, "no option modle"),
        ({"url": "http://x/v1", "model": "m", "attempts": 0}, "attempts = 0"),
        ({"url": "http://x/v1", "model": "m", "pattern": "("}, "pattern = "),
        ({"url": "http://x/v1", "model": "m", "body": {"model": "n"}}, "may not have model"),
    ],
)
def test_options_that_cannot_be_used_are_an_input_error(options, message):
    with pytest.raises(InputError, match=message):
        load_rewards(["llm_judge"], options={"llm_judge": options})


@pytest.fixture(scope="module")
def vllm_server(build_model):
    """Address of a server of vLLM's own, whose model says digits, and their ids."""
    from actors.engines.model_folder import load_tokenizer

    folder = Path(build_model(characters="0123456789", context=1024, head_dim=32, seed=1))
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "judge", "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--enforce-eager", "--chat-template", str(template),
        "--max-model-len", "1024",
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
    )
    try:
        health = f"http://127.0.0.1:{port}/health"
        until(lambda: _answers(health) or process.poll() is not None, 300)
        assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
        digits = load_tokenizer(str(folder)).convert_tokens_to_ids([*"0123456789"])
        yield f"http://127.0.0.1:{port}/v1", digits
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        log.close()


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(420)
def test_a_server_of_vllm_marks_many_at_once(vllm_server):
    url, digits = vllm_server
    options = {"url": url, "model": "judge", "max_tokens": 4, "largest": 9.0,
               "body": {"stop_token_ids": digits, "include_stop_str_in_output": True},
               "seconds": 60.0, "temperature": 1.0, "attempts": 8}  # fmt: skip
    rewards = load_rewards(["llm_judge"], options={"llm_judge": options}, timeout=120.0)

    async def go():
        return await asyncio.gather(*(rewards.score(PROMPT, f"{i}") for i in range(64)))

    marks = [score.total for score in asyncio.run(go())]
    assert all(0 <= mark <= 1 for mark in marks)
    assert len(set(marks)) > 3
    assert all(mark * 9 == pytest.approx(round(mark * 9)) for mark in marks)
    with pytest.raises(RewardFailed, match="answered 404"):
        judge(url, model="another", seconds=60.0)
