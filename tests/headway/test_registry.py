"""Names, paths of user code, the decorator, and options, as every registry has them."""

import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, NoneType

import pytest

from headway.errors import InputError
from headway.options import check_options, parse_options
from headway.recipe_section import Section
from headway.registry import Entry, Registry
from headway.user_code import check_call


@dataclass(frozen=True)
class Traits:
    relative: bool = False


def plain(inputs, *, scale: float = 1.0, name):
    return inputs


@pytest.fixture
def rules():
    """Return entries of which none can be imported."""
    return Registry(
        "rule",
        "module:function",
        Traits,
        Entry("exact_match", "no_such_module:exact", Traits(relative=True)),
        Entry("tiny:TASK", "no_such_module:tiny", Traits()),
    )


@pytest.fixture
def decorated():
    return Registry("loss", "module:function", Traits, decorated=True)


@pytest.fixture(autouse=True)
def _users_module(monkeypatch):
    module = ModuleType("a_users_module")
    module.raw = Entry("raw", plain, Traits(relative=True))
    module.plain, module.CONSTANT = plain, 3
    monkeypatch.setitem(sys.modules, "a_users_module", module)


def test_what_is_known_of_an_entry_needs_no_import(rules):
    assert [*rules] == ["exact_match", "tiny:TASK"]
    assert rules["exact_match"].traits.relative
    with pytest.raises(InputError, match="'exact_match': cannot import no_such_module: there is"):
        _ = rules["exact_match"].function


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("exact_match", "exact_match"), ("tiny:sums", "tiny:TASK"),
        ("exact_match:x", None), ("module:name", None),
    ],
)  # fmt: skip
def test_an_argument_belongs_to_the_names_that_take_one_and_any_path_passes(rules, name, known):
    entry = rules.get(name)
    assert (entry and entry.name) == known
    assert rules.check(name) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("exat", "; did you mean 'exact_match'?"), ("qqq", ""), (":raw", ""), ("raw:", ""),
        ("tiny", "; did you mean 'tiny:TASK'?"), ("tiny:", "; did you mean 'tiny:TASK'?"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_all_names_and_the_nearest(rules, name, hint):
    assert rules.get(name) is None
    expected = f'expected one of exact_match, tiny:TASK, or a path "module:function"{hint}'
    with pytest.raises(InputError, match=re.escape(f"unknown rule {name!r}: {expected}")):
        rules.check(name)
    message = f"a.rule = {name!r}: unknown rule: {expected}"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        rules.load(name, setting="a.rule")


def test_a_path_finds_user_code_with_the_traits_of_its_decorator_or_the_default_ones(
    rules, decorated
):
    entry = rules["a_users_module:plain"]
    assert (entry.function, entry.traits) == (plain, Traits())
    for registry in (rules, decorated):
        assert registry["a_users_module:raw"].traits.relative
    assert decorated["a_users_module:raw"](5, name="x") == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a_users_module:absent", "a_users_module has no 'absent', only raw, plain, CONSTANT$"),
        ("a_users_module:rav", "a_users_module has no 'rav', only .*; did you mean 'raw'"),
        ("no_such_module:raw", "cannot import no_such_module: there is none in /.*installed$"),
        ("tinny:raw", "there is none in .*; did you mean 'tiny'"),
        ("a_users_module:CONSTANT", "is a int, not a function$"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(rules, path, message):
    with pytest.raises(InputError, match=f"^cannot load rule '{path}'.*{message}"):
        rules.load(path)
    with pytest.raises(InputError, match=f"^a.rule = '{path}'.*{message}"):
        rules.load(path, setting="a.rule")


def test_user_code_needs_the_decorator_where_its_traits_must_be_known(decorated):
    message = "'a_users_module:plain' is a function, not a registered loss; put the decorator on it"
    with pytest.raises(InputError, match=message):
        decorated.load("a_users_module:plain")
    other = Registry("tool", "module:function", NoneType, decorated=True)
    with pytest.raises(InputError, match="is a Entry, not a registered tool"):
        other.load("a_users_module:raw")


def test_a_decorator_registers_each_name_once(decorated):
    entry = decorated.register("push", "pull", relative=True)(plain)
    assert decorated["push"] is decorated["pull"] is entry
    assert (entry.name, entry.function, entry.traits.relative) == ("push", plain, True)
    for name in ("push", "pull"):
        with pytest.raises(InputError, match=f"loss '{name}' is already registered"):
            decorated.register(name)(plain)
    decorated.forget(["push", "never"])
    assert [*decorated] == ["pull"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scal": 1.0}, "s: 'plain' has no option scal; its options: name, scale; did you mean"),
        ({"scale": 1.0}, "s: 'plain' requires the option name$"),
        ({"scale": "1", "name": 2}, "s.scale = '1' of 'plain': Input should be a valid number"),
        (3, "s = 3 must be a table of options of 'plain'"),
        ({"scale": 2, "name": object()}, None),
    ],
)
def test_a_table_of_options_fits_the_function(options, message):
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check_options(plain, "inputs", setting="s", name="plain", options=options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, r"s takes \(\), but is called with \(a, b\): too many positional"),
        (lambda a, b, c: None, r"s takes \(a, b, c\), but is called with \(a, b\): missing a"),
        (lambda a, b, *, c: None, "s requires the option c"),
        (lambda a, b, *rest, **others: None, None),
        (max, None),
    ],
)
def test_user_code_takes_what_it_is_called_with(function, message):
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check_call(function, "a", "b", subject="s", options={})


class Judge(Section):
    url: str
    tries: int = 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ulr": "x"}, "^s has no option ulr; its options: tries, url; did you mean 'url'"),
        ({}, "^s requires the option url; its options: url, tries$"),
        ({"url": "x", "tries": "many"}, "^s: tries = 'many': Input should be a valid integer"),
    ],
)
def test_options_of_a_plug_in_fit_its_model(options, message):
    with pytest.raises(InputError, match=message):
        parse_options(Judge, "s", options)
    assert parse_options(Judge, "s", {"url": "x"}).tries == 1
