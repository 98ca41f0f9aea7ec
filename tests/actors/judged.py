"""A reward that asks a judge on this machine: the address is the answer of the prompt."""

import urllib.request


def score(prompt, completion, answer, metadata):
    with urllib.request.urlopen(answer, timeout=5 if "slow" not in answer else 0.5) as reply:
        return float(reply.read())
