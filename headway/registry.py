"""Names that a setting may have: what ships with Headway, what a decorator adds, and user code.

Functions and classes that ship are listed as "module:attribute", so that reading the list imports
nothing heavy; user code is named by such a path itself.

Example:
    >>> RULES = Registry("rule", "module:function", Traits, Entry("plain", "rules.plain:plain"))
    >>> RULES.check("plian")
    InputError: unknown rule 'plian': expected one of plain, or a path "module:function"; did you …
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headway.errors import InputError
from headway.nearest_name import nearest
from headway.user_code import load_dotted

Traits = TypeVar("Traits")


@dataclass(frozen=True, slots=True)
class Entry(Generic[Traits]):
    """A function or class with a name."""

    name: str
    """As a user writes it; a part in capitals, as in "tiny:TASK", stands for an argument."""
    target: str | Callable[..., Any]
    """The function or class, or where it is: "module:attribute"."""
    traits: Traits = None  # type: ignore[assignment]
    """Its properties and needs, which are known before it is imported."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function or class, imported on use."""
        if isinstance(self.target, str):
            function: Callable[..., Any] = load_dotted(self.target, subject=repr(self.name))
            return function
        return self.target

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(*inputs, **options)


class Registry(Generic[Traits]):
    """Entries of one kind by name.

    `kind` says what is named and `form` what a path of user code looks like, such as
    "module:Class", both for messages. User code without the decorator `register` has the default
    values of `traits`; a `decorated` registry refuses it.
    """

    def __init__(
        self, kind: str, form: str, traits: type[Traits], *entries: Entry[Traits],
        decorated: bool = False,
    ) -> None:  # fmt: skip
        self._kind, self._form, self._traits, self._decorated = kind, form, traits, decorated
        self._entries = {entry.name: entry for entry in entries}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> Entry[Traits] | None:
        """Return the entry of a name, its argument included; None for a path of user code."""
        kind, _, argument = name.partition(":")
        for known, entry in self._entries.items():
            known_kind, takes_argument, _ = known.partition(":")
            if name == known or (argument and takes_argument and kind == known_kind):
                return entry
        return None

    def check(self, name: str, *, setting: str = "") -> str:
        """Return a name that is known or a path; nothing is imported.

        Raises:
            InputError: It is neither. The message names the key `setting`, if given, all entries
                and the nearest.
        """
        if name in self._entries or all(name.partition(":")):
            return name
        kind = f"unknown {self._kind}"
        problem = f"{setting} = {name!r}: {kind}" if setting else f"{kind} {name!r}"
        raise InputError(
            f'{problem}: expected one of {", ".join(self)}, or a path "{self._form}"'
            f"{nearest(name, self)}"
        )

    def load(self, name: str, *, setting: str = "") -> Entry[Traits]:
        """Return the entry of a name, or of the user code at a path.

        Raises:
            InputError: As `check`; or the user code cannot be imported, is no function, or lacks
                the decorator.
        """
        entry = self.get(self.check(name, setting=setting))
        if entry is not None:
            return entry
        subject = f"{setting} = {name!r}" if setting else f"cannot load {self._kind} {name!r}"
        kinds = [known.partition(":")[0] for known in self if ":" in known]
        loaded = load_dotted(name, subject=subject, kinds=kinds)
        if isinstance(loaded, Entry) and isinstance(loaded.traits, self._traits):
            return loaded
        if self._decorated:
            raise InputError(
                f"{subject} is a {type(loaded).__name__}, not a registered {self._kind}; "
                "put the decorator on it"
            )
        if not callable(loaded):
            expected = self._form.partition(":")[2].lower()
            raise InputError(f"{subject} is a {type(loaded).__name__}, not a {expected}")
        return Entry(name, loaded, self._traits())

    __getitem__ = load

    def forget(self, names: Iterable[str]) -> None:
        """Remove names, so that the module that registers them can be imported anew."""
        for name in names:
            self._entries.pop(name, None)

    def register(self, *names: str, **traits: Any) -> Callable[[Callable[..., Any]], Entry[Traits]]:
        """Return a decorator that makes an entry of a function, under one name or several.

        The keywords are fields of the traits. The decorator raises InputError for a taken name.
        """
        made = self._traits(**traits)

        def decorate(function: Callable[..., Any]) -> Entry[Traits]:
            entry = Entry(names[0], function, made)
            for name in names:
                if name in self._entries:
                    raise InputError(f"{self._kind} {name!r} is already registered")
                self._entries[name] = entry
            return entry

        return decorate
