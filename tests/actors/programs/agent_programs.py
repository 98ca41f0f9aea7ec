"""Programs and functions that stand for agents: they end in every way that one can."""

import json
import os
import signal
import subprocess
import sys
import time


def writes(text):
    with open(os.environ["HEADWAY_RESULT"], "wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def tells():
    """Write what it was given, as a result."""
    with open(os.environ["HEADWAY_TASK"]) as file:
        task = json.load(file)
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
             "HEADWAY_MODEL", "SECRET_TOKEN", "GIVEN_TOKEN")  # fmt: skip
    variables = {name: os.environ.get(name) for name in names}
    here = os.getcwd() == os.path.realpath(os.environ["HEADWAY_FOLDER"])
    found = {"task": task, "variables": variables, "here": here, "files": os.listdir(".")}
    writes(json.dumps(found))


def leaves_children():
    """Start children in its own group and in a session of its own, and write their numbers."""
    loops = [sys.executable, "-c", "import time\nwhile True: time.sleep(1)"]
    children = [subprocess.Popen(loops, start_new_session=apart) for apart in (False, True)]
    writes(" ".join(str(child.pid) for child in children))


def sleeps():
    with open(sys.argv[2], "w") as file:
        file.write(str(os.getpid()))
    leaves_children()
    time.sleep(600)


WAYS = {
    "tells": tells,
    "leaves_children": leaves_children,
    "sleeps": sleeps,
    "nothing": lambda: None,
    "fails": lambda: sys.exit("the key is " + os.environ["OPENAI_API_KEY"]),
    "raises": lambda: 1 / 0,
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "prints": lambda: [print("x" * 1000) for _ in range(5000)],
    "prints_little": lambda: print("x" * 1000, file=sys.stderr),
    "writes": lambda: writes(sys.argv[2]),
    "writes_bytes": lambda: writes(b"\xff\xfe"),
    "writes_much": lambda: writes("x" * (2 << 20)),
    "makes_pipe": lambda: os.mkfifo(os.environ["HEADWAY_RESULT"]),
    "is_preloaded": lambda: writes(json.dumps({"reward": float("colorsys" in sys.modules)})),
    "takes_memory": lambda: (bytearray(300 << 20), time.sleep(600)),
    "takes_memory_slowly": lambda: (
        [subprocess.Popen([sys.executable, "-c", "import time; x = b'1' * (40 << 20); "
                           "time.sleep(600)"]) for _ in range(4)],
        time.sleep(600),
    ),
    "forks": lambda: ([subprocess.Popen(["sleep", "600"]) for _ in range(12)], time.sleep(600)),
}  # fmt: skip


if __name__ == "__main__":
    WAYS[sys.argv[1]]()
