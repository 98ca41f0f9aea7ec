"""The roles of the processes of a run, and the names of these processes."""

from enum import StrEnum
from typing import Self


class Role(StrEnum):
    """Kind of a process; its text stands in labels, records and names of processes."""

    DRIVER = "driver"
    BROKER = "broker"
    BROADCASTER = "broadcaster"
    LEARNER = "learner"
    ACTOR = "actor"
    REWARD_MODEL = "reward-model"

    @property
    def section(self) -> str:
        """Key of the role in recipes (`deploy.placement`) and in messages about resources."""
        return {Role.ACTOR: "actors", Role.REWARD_MODEL: "reward_model"}.get(self, self.value)


class ProcessName(str):
    """Name of a process: its role, and its number where the role has several, as "actor-3"."""

    role: Role
    number: int | None

    def __new__(cls, role: Role, number: int | None = None) -> Self:
        """Make the name of process `number`, counted from 0, of a role."""
        name = super().__new__(cls, role if number is None else f"{role}-{number}")
        name.role, name.number = role, number
        return name

    def __getnewargs__(self) -> tuple[Role, int | None]:  # type: ignore[override]
        return self.role, self.number

    @classmethod
    def parse(cls, text: str) -> "ProcessName | None":
        """Return the name that a text is, such as one of a metric; None if it names no process."""
        name, _, number = text.rpartition("-")
        role, digits = (name, number) if number.isdecimal() else (text, "")
        return cls(Role(role), int(digits) if digits else None) if role in [*Role] else None

    @property
    def engine_id(self) -> str:
        """Id under which an actor holds leases and takes weights."""
        return f"engine-{self.number}"


def role_of(text: str) -> Role | None:
    """Return the role of the process that a text names; None if it names none."""
    name = ProcessName.parse(text)
    return None if name is None else name.role
