"""A server that answers HTTP requests as a hostile one would, by the name of a behaviour.

`ANSWERS` has every behaviour with what a judge makes of it: "mark", "failed" (the rollout fails) or
"lost" (as a server that is down: asked again).
"""

import base64
import gzip
import json
import re
import socket
import socketserver
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress

KEY = "jk-7e1c'\"\\90ab"
"""Key of the judge, with characters that are escaped in many ways."""
HANG_SECONDS = 30.0
SLOW = ("hang", "dribbled", "gigabytes", "continue")
"""Beginnings of the names of behaviours that take a client its whole deadline."""
GIGABYTE = 1 << 30


def http(body, *headers, status="200 OK", length=True):
    """Return an answer as bytes."""
    body = body if isinstance(body, bytes) else body.encode(errors="surrogatepass")
    size = [f"Content-Length: {len(body)}"] if length else []
    lines = [f"HTTP/1.1 {status}", *size, "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


def says(reply, **choice):
    """Return an answer in which the model says a text."""
    message = {"message": {"content": reply}, "finish_reason": "stop", **choice}
    return http(json.dumps({"choices": [message]}))


def _dribble(sock, whole):
    """Send an answer byte after byte, for ever."""
    for byte in whole:
        sock.sendall(bytes([byte]))
        time.sleep(0.2)
    time.sleep(HANG_SECONDS)


def _flood(sock, block):
    sent = 0
    while sent < 4 * GIGABYTE:
        sock.sendall(block)
        sent += len(block)


def _hang(sock, _):
    sock.settimeout(HANG_SECONDS)
    with suppress(OSError):
        sock.recv(1)


def sends(make):
    """Return a behaviour that sends `make(authorization)`."""
    return lambda sock, authorization: sock.sendall(make(authorization))


BODY = b"x" * (1 << 20)
BOMB = gzip.compress(b"\0" * (64 << 20))
ANSWERS = {
    "mark": (sends(lambda key: says("7")), "mark"),
    "error that repeats the key": (
        sends(lambda key: http(f"bad {key}", status="401 Unauthorized")), "failed"),
    "key in JSON": (
        sends(lambda key: http(json.dumps({"error": key}), status="403 Forbidden")), "failed"),
    "key in base64": (
        sends(lambda key: http(base64.b64encode(KEY.encode()), status="400 Bad Request")),
        "failed"),
    "key in a reply": (sends(lambda key: says(f"your key is {key}, and 3 or 4")), "failed"),
    "key in a cut reply": (
        sends(lambda key: says(f"{'x' * 190} {key}", finish_reason="length")), "failed"),
    "key in a header": (sends(lambda key: http("{}", f"X-Echo: {key}")), "failed"),
    "redirection with the key": (
        sends(lambda key: http("", f"Location: http://127.0.0.1:1/?key={KEY}",
                               status="307 Temporary Redirect")), "failed"),
    "redirection to a file": (
        sends(lambda key: http("", "Location: file:///etc/passwd", status="302 Found")), "failed"),
    "error of the server": (
        sends(lambda key: http("no", status="500 Internal Server Error")), "lost"),
    "come back never": (
        sends(lambda key: http("", "Retry-After: inf", status="429 Too Many Requests")), "lost"),
    "come back at no time": (
        sends(lambda key: http("", "Retry-After: nan", status="503 Service Unavailable")), "lost"),
    "come back earlier": (
        sends(lambda key: http("", "Retry-After: -1e9", status="503 Service Unavailable")),
        "lost"),
    "hang": (_hang, "lost"),
    "dribbled headers": (lambda sock, key: _dribble(sock, says("7")), "lost"),
    "dribbled body": (
        lambda sock, key: (sock.sendall(http("", length=False)), _dribble(sock, BODY)), "lost"),
    "gigabytes": (
        lambda sock, key: (sock.sendall(http("", length=False)), _flood(sock, BODY)), "failed"),
    "gigabytes of headers": (
        lambda sock, key: (sock.sendall(b"HTTP/1.1 200 OK\r\n"), _flood(sock, b"A: b\r\n" * 9999)),
        "lost"),
    "gigabytes of chunks": (
        lambda sock, key: (
            sock.sendall(http("", "Transfer-Encoding: chunked", length=False)),
            _flood(sock, b"100000\r\n" + BODY + b"\r\n")),
        "failed"),
    "compressed zeros": (
        sends(lambda key: http(BOMB, "Content-Encoding: gzip")), "failed"),
    "another compression": (
        sends(lambda key: http("???", "Content-Encoding: zstd")), "failed"),
    "no HTTP": (sends(lambda key: b"220 smtp.example.org ESMTP\r\n"), "lost"),
    "NUL bytes": (sends(lambda key: b"\0" * 4096), "lost"),
    "early end": (sends(lambda key: says("7")[:-5]), "lost"),
    "nothing": (lambda sock, key: None, "lost"),
    "wrong length": (
        sends(lambda key: says("7").replace(b"Content-Length: ", b"Content-Length: -")), "lost"),
    "broken chunks": (
        sends(lambda key: http("zz\r\n", "Transfer-Encoding: chunked", length=False)), "lost"),
    "continue for ever": (
        lambda sock, key: [sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n") or time.sleep(0.01)
                           for _ in range(10_000)], "lost"),
    "no JSON": (sends(lambda key: http("<html>")), "failed"),
    "deep JSON": (sends(lambda key: http("[" * 500_000)), "failed"),
    "long number": (sends(lambda key: http('{"choices": ' + "9" * 100_000 + "}")), "failed"),
    "other JSON": (sends(lambda key: http('{"choices": {"0": []}}')), "failed"),
    "list as a reply": (sends(lambda key: says(["7"])), "failed"),
    "no UTF-8": (sends(lambda key: http(b"\xff\xfe{}")), "failed"),
    "lone surrogate": (sends(lambda key: says("\ud800 7 8")), "failed"),
    "escape codes": (sends(lambda key: says("\x1b]0;owned\x07\x1b[2J")), "failed"),
    "markup": (sends(lambda key: says("[red]<script>alert()</script>[/]")), "failed"),
    "no number": (sends(lambda key: says("nan")), "failed"),
    "infinite mark": (sends(lambda key: says("1" + "0" * 400)), "failed"),
    "negative mark": (sends(lambda key: says("-7")), "failed"),
    "long reply": (sends(lambda key: says("7 " * 1_000_000)), "failed"),
    "another encoding": (
        sends(lambda key: http('{"choices": []}', "Content-Type: text/html; charset=utf-99")),
        "failed"),
    "no content": (sends(lambda key: http("", status="204 No Content")), "failed"),
}  # fmt: skip


@contextmanager
def hostile_server(behaviour_of, fails=None):
    """Serve on a free port; yield the port and what clients have sent as `Authorization`.

    `behaviour_of` names the behaviour for a request's text. As a server that is down, it answers
    `fails` requests, if given, and others get a mark.
    """
    keys, counts = set(), Counter()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.settimeout(10.0)
            with suppress(OSError):
                text = _read(self.request)
                if not text:
                    return  # the client gave up before it asked
                header = re.search(rb"(?im)^authorization: *(.*?)\r$", text)
                authorization = header[1].decode("latin-1") if header else ""
                keys.add(authorization)
                name = behaviour_of(text.decode("latin-1"))
                counts[name] += 1
                if fails is not None and ANSWERS[name][1] == "lost" and counts[name] > fails:
                    name = "mark"
                ANSWERS[name][0](self.request, authorization)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 64

        def handle_error(self, *_):
            pass

    with Server(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        yield listening.server_address[1], keys
        listening.shutdown()


def _read(sock):
    """Read a request, with its body, or what there is of it if its client gives up."""
    text, missing = b"", 1
    while missing > 0 and (block := sock.recv(1 << 16)):
        text += block
        head, end, body = text.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        missing = int(length[1] if length else 0) - len(body) if end else 1
    return text


def connect(port):
    """Return a connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=10.0)


def get(port, path, authorization=None):
    """Return status and text of the answer to a request of a port of this machine."""
    headers = {} if authorization is None else {"Authorization": authorization}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
