"""Registries of functions that a recipe names; user code is named by a path "module:function".

Built-in functions register themselves when their package is imported.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from headway.errors import InputError
from headway.nearest_name import nearest

Result = TypeVar("Result")
Traits = TypeVar("Traits")


@dataclass(frozen=True)
class Registered(Generic[Result, Traits]):
    """A function that a recipe may name."""

    name: str
    function: Callable[..., Result]
    traits: Traits
    """Its properties and needs; see `learner.config.traits`."""

    def __call__(self, *inputs: Any, **options: Any) -> Result:
        """Call the function."""
        return self.function(*inputs, **options)


Entry = TypeVar("Entry", bound=Registered[Any, Any])


class Registry(Generic[Entry]):
    """Functions of one kind by name."""

    def __init__(self, kind: str, entry_type: type[Entry], traits: Mapping[str, Any]) -> None:
        """Make an empty registry; `traits` are those of the built-in functions, by name."""
        self._kind = kind
        self._entry_type = entry_type
        self._traits = traits
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def built_in(self, *names: str) -> Callable[[Callable[..., Any]], Entry]:
        """Return a decorator that registers a function with the traits of its first name."""
        return self.decorator(*names, traits=self._traits[names[0]])

    def decorator(self, *names: str, traits: Any) -> Callable[[Callable[..., Any]], Entry]:
        """Return a decorator that registers a function under some names.

        Raises:
            InputError: A name is taken.
        """

        def register(function: Callable[..., Any]) -> Entry:
            entry = self._entry_type(names[0], function, traits)
            for name in names:
                if name in self._entries:
                    raise InputError(f"{self._kind} {name!r} is already registered")
                self._entries[name] = entry
            return entry

        return register

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name, or of a path "module:function" to a decorated function.

        Raises:
            InputError: There is none; names the nearest.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return self._load(name)
        raise InputError(unknown_name(self._kind, name, self))

    def _load(self, path: str) -> Entry:
        name, _, attribute = path.partition(":")
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a module of the user's raises what it likes
            raise InputError(f"cannot load {self._kind} {path!r}: {error!r}") from error
        if not hasattr(module, attribute):
            hint = nearest(attribute, vars(module))
            problem = f"{name} has no {attribute!r}{hint}"
            raise InputError(f"cannot load {self._kind} {path!r}: {problem}")
        entry = getattr(module, attribute)
        if not isinstance(entry, self._entry_type):
            raise InputError(
                f"{path!r} is a {type(entry).__name__}, not a registered {self._kind}; "
                "put the decorator on it"
            )
        return entry


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message about a name that is neither known nor a path; names the nearest."""
    names = [*known]
    return (
        f"unknown {kind} {name!r}: expected one of {', '.join(names)}, "
        f'or a path "module:function"{nearest(name, names)}'
    )


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that its functions register themselves."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def options_of(function: Callable[..., Any]) -> list[str]:
    """Return the options of a registered function: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]


def refuse_unknown_options(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise InputError if an option is not among those known."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        allowed = ", ".join(sorted(known)) or "none"
        raise InputError(
            f"{what} has no option {', '.join(unknown)}; its options: {allowed}"
            f"{nearest(unknown[0], known)}"
        )


def refuse_wrong_options(
    setting: str, name: str, function: Callable[..., Any], options: object
) -> None:
    """Check the options of a recipe's table against a function's keyword-only parameters.

    `setting` names the table. A parameter without a type accepts any value.

    Raises:
        InputError: An option is unknown, missing, or has another type.
    """
    if not isinstance(options, Mapping):
        raise InputError(f"{setting} = {options!r} must be a table of options of {name!r}")
    known = options_of(function)
    refuse_unknown_options(f"{setting}: {name!r}", options, known)
    types, parameters = get_type_hints(function), inspect.signature(function).parameters
    for key in known:
        if key not in options:
            if parameters[key].default is inspect.Parameter.empty:
                raise InputError(f"{setting} lacks {key}, which {name!r} requires")
            continue
        try:
            TypeAdapter(types.get(key, Any)).validate_python(options[key], strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InputError(f"{setting}.{key} = {options[key]!r} of {name!r}: {reason}") from None
