"""A submission is tried again while a failure may pass, and reaches the cluster once."""

import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from deploy.cluster.jobs import PAUSES_SECONDS, Jobs, is_passing
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from headway.errors import InputError

COMMAND = "headway run demo"
EXISTS = (
    "Traceback (most recent call last):\n  File 'job_manager.py'\n"
    "ValueError: Job with submission_id x already exists."
)
LATER = (503, "the dashboard starts")


class Dashboard(ThreadingHTTPServer):
    """Ray's job server, as far as a submission asks it; `troubles` answer first, one a request.

    A trouble is a status and a text, or "reset" before or "lost" after the request has its effect.
    """

    def __init__(self, port, troubles):
        self.troubles, self.submitted = list(troubles), []
        super().__init__(("127.0.0.1", port), Answers)


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def answer(self, status, text):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def serve(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        server = self.server
        trouble = server.troubles.pop(0) if server.troubles else None
        if trouble == "reset":
            raise ConnectionResetError
        if isinstance(trouble, tuple):
            return self.answer(*trouble)
        status, text = self.effect(body)
        if trouble == "lost":
            raise ConnectionResetError
        return self.answer(status, text)

    def effect(self, body):
        submitted = self.server.submitted
        if self.path == "/api/version":
            return 200, json.dumps({"ray_version": "2.60.0", "version": "4"})
        if self.path == "/api/jobs/":
            job = json.loads(body)
            if any(job["submission_id"] == other["submission_id"] for other in submitted):
                return 400, EXISTS
            submitted.append(job)
            return 200, json.dumps({"job_id": "1", "submission_id": job["submission_id"]})
        if self.path.startswith("/api/jobs/"):
            [job] = submitted
            details = {"type": "SUBMISSION", "status": "PENDING", "entrypoint": job["entrypoint"]}
            return 200, json.dumps(details)
        return 200, ""  # the package of the working folder is there, or is taken

    do_GET = do_POST = do_PUT = serve  # noqa: N815


@contextmanager
def dashboard(*troubles, port=0):
    server = Dashboard(port, troubles)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def submit(address, sleep):
    config = load_recipe("demo", ["name=mine"])
    return Jobs(address, sleep).submit(config, COMMAND, [], None)


def url(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize(
    "troubles",
    [
        ["reset"],  # asked for its version
        [LATER, LATER],
        [(502, "bad gateway")],
        [None, None, "reset"],  # asked for the package
        [None, None, None, "reset"],  # given the job
        [None, None, None, "lost"],
        [None, None, None, (500, "No available agent to submit job, please try again later.")],
        [None, None, None, "lost", "reset", "lost"],
    ],
)
def test_what_passes_is_tried_again_and_the_job_is_there_once(troubles):
    pauses = []
    with dashboard(*troubles) as server:
        job = submit(url(server), pauses.append)
        assert [other["submission_id"] for other in server.submitted] == [job]
    assert pauses == list(PAUSES_SECONDS[: len(pauses)])
    assert pauses


def test_a_dashboard_that_is_not_up_yet_is_waited_for(caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pauses = []
    with ExitStack() as servers:

        def sleep(seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                servers.enter_context(dashboard(port=port))

        assert submit(f"http://127.0.0.1:{port}", sleep).startswith("mine-")
    assert pauses == [0.5, 1.0, 2.0]
    assert [record.message[-12:] for record in caplog.records][:3] == ["trying again"] * 3


@pytest.mark.parametrize(
    ("troubles", "message"),
    [
        ([(404, "no such page")], "no cluster takes jobs there: .*404"),
        ([(401, "no token")], "no cluster takes jobs there: Authentication required"),
        ([(403, "another token")], "no cluster takes jobs there: Authentication failed"),
        ([None, None, None, (400, "Traceback (most recent call last):\n  …\nValueError: no")],
         "refuses the job: ValueError: no"),
        ([None, None, None, (400, EXISTS)], "refuses the job: .*already exists"),
    ],
)  # fmt: skip
def test_what_is_final_is_said_at_once(troubles, message):
    pauses = []
    with dashboard(*troubles) as server, pytest.raises(InputError, match=message):
        submit(url(server), pauses.append)
    assert pauses == []


def test_an_address_without_a_cluster_is_refused_in_the_end():
    pauses = []
    with pytest.raises(InputError, match="no cluster takes jobs there: Failed to connect"):
        submit("http://127.0.0.1:9", pauses.append)
    assert pauses == list(PAUSES_SECONDS)


def test_a_cluster_that_is_lost_while_it_is_given_the_job_may_have_it():
    with (
        dashboard(None, None, *["reset"] * 99) as server,
        pytest.raises(RunFailed, match=r"does not answer .*the job may go on: headway attach mine"),
    ):
        submit(url(server), lambda _: None)


def test_a_cluster_that_accepts_and_never_answers_is_not_waited_for():
    pauses = []
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(InputError, match=r"no cluster takes jobs there: no answer in 0.05 s"),
    ):
        Jobs(f"http://127.0.0.1:{silent.getsockname()[1]}", pauses.append, answer_seconds=0.05)
    assert pauses == list(PAUSES_SECONDS)


UNTRUSTED = ConnectionError("Failed to connect to Ray")  # whose cause Ray's client does not name
UNTRUSTED.__context__ = requests.exceptions.SSLError()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (requests.exceptions.ReadTimeout(), True),
        (requests.exceptions.ChunkedEncodingError(), True),
        (RuntimeError("Request failed with status code 429: slow down"), True),
        (RuntimeError("Request failed with status code 404: status code 503"), False),
        (RuntimeError("Ray version 1.0 is running on the cluster."), False),
        (requests.exceptions.InvalidURL(), False),
        (requests.exceptions.SSLError(), False),
        (requests.exceptions.JSONDecodeError("", "", 0), False),
        (FileNotFoundError(), False),
        (ValueError(), False),
        (UNTRUSTED, False),
    ],
)
def test_only_what_another_attempt_may_mend_passes(error, passes):
    assert is_passing(error) is passes
