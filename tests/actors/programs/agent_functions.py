"""Functions and coroutines that a user might name as an agent."""

import os


async def scores(task):
    return {"form": 0.5, "folder": float(os.path.isdir(task.folder))}


def says(task, *, text="7"):
    return text


def breaks(task):
    raise ZeroDivisionError(f"with {task.api_key}")


def gives_nan(task):
    return float("nan")


def takes_two(task, other):
    return None


class World:
    def reset(self, prompt):
        return []

    def step(self, message):
        return None
