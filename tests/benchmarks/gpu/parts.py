"""Parts that end well, hang and fail, for the tests of the process that runs them."""

import time


def ends(name, device, rounds):
    print("a log of a library")
    yield {"a": 1, "b": 1}
    yield {"b": rounds}


def hangs(name, device, rounds):
    yield {"a": 1}
    time.sleep(600)


def fails(name, device, rounds):
    yield {"a": 1}
    raise SystemExit("no such device")
