"""A reward that is right or wrong by parity, so that half of the groups of two hold no signal."""


def score(prompt: str, completion: str, answer: str, metadata: object) -> float:
    return float(sum(map(ord, completion)) % 2)
