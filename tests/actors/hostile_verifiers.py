"""Verifiers that execute what they read, to test the process that they run in."""

STATE = {"right": 1.0}


def evaluates(prompt, completion=None, answer=None, metadata=None):
    """Return a verifier that evaluates the completion; `completion` here is the answer."""
    return lambda text: float(eval(text) or 0.0)


def executes(prompt, completion=None, answer=None, metadata=None):
    def verify(text):
        exec(text, globals())
        return STATE["right"]

    return verify


def compares(prompt, completion=None, answer=None, metadata=None):
    return lambda text: STATE["right"] if text == "right" else 0.0


def imports_late(prompt, completion=None, answer=None, metadata=None):
    def verify(text):
        import colorsys

        return colorsys.rgb_to_hsv(0.0, 0.0, 1.0)[2]

    return verify


def fails_before(prompt, completion=None, answer=None, metadata=None):
    raise ValueError("no answer")
