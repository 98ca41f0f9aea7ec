"""Parsers that would execute text: plain expressions keep their value, others are refused."""

import ast

import pytest
import sympy
from sympy.parsing import sympy_parser

from actors.sandbox.guarded_parsing import Refused, evaluate, guard_sympy

guard_sympy()
X, Y = sympy.symbols("x y")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1/2 + 3", sympy.Rational(7, 2)),
        ("2**3 - 4*x", 8 - 4 * X),
        ("sin(x)**2 + cos(x)**2", sympy.sin(X) ** 2 + sympy.cos(X) ** 2),
        ("sqrt(2)*pi + E", sympy.sqrt(2) * sympy.pi + sympy.E),
        ("5!", sympy.Integer(120)),
        ("x < 3", X < 3),
        ("Eq(x, 1)", sympy.Eq(X, 1)),
        ("max(1, 2) + abs(-3)", sympy.Integer(5)),
        ("f(x) + 1", sympy.Function("f")(X) + 1),
        ("1.5e3", sympy.Float(1500)),
        ("(1, 2)", (1, 2)),
        ("[x, y]", [X, Y]),
        ("x & y", sympy.And(X, Y)),
        ("-x", -X),
    ],
)
def test_plain_expressions_have_the_value_that_sympy_gave_them(text, expected):
    assert sympy.parse_expr(text) == expected


def test_sympify_takes_the_same_way_and_evaluation_can_be_left_out():
    assert sympy.sympify("x + 1") == X + 1
    assert str(sympy.parse_expr("1 + 1", evaluate=False)) == "1 + 1"
    assert sympy.parse_expr("C + x", local_dict={"C": sympy.Symbol("C")}) == sympy.Symbol("C") + X


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "abs.__self__", "x.__class__", "().__class__", "eval('1')",
        "open('/etc/passwd')", "exec('1')", "compile('1', '', 'eval')", "getattr(x, 'y')",
        "lambda: 1", "[x for x in (1,)]", "{1: 2}", "'a' * 9", "sin('x')", "sympify('1')",
        "S('1')", "lambdify(x, x)", "x[0]", "f'{x}'", "(y := 1)", "sqrt(evaluate=x, b=1)",
        "1 if x else 2", "print(1)", "*x", "x if", "Symbol", "globals()", "input()", "preview(x)",
    ],
)  # fmt: skip
def test_everything_else_is_refused_or_is_no_code(text):
    try:
        value = sympy.parse_expr(text)
    except (Refused, SyntaxError, TypeError, ValueError, AttributeError, KeyError):
        return
    assert isinstance(value, (sympy.Basic, type(sympy.Symbol))), value


def test_nothing_of_a_text_reaches_the_interpreter(monkeypatch):
    for name in ("eval", "exec", "compile"):
        assert name in vars(sympy_parser)
    monkeypatch.setattr("builtins.eval", lambda *_: pytest.fail("evaluated"))
    assert sympy.parse_expr("2*(3+4)") == 14


@pytest.mark.parametrize("text", ["[[1, 2], [3, 4]]", "['a', 'b']", "(1+2)*3", "-1.5", "3 == 3"])
def test_literals_and_arithmetic_are_evaluated_as_python_does(text):
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize("text", ["x", "abs(1)", "[].append(1)", "", "1 +", "(" * 10_000, "\0"])
def test_names_and_calls_are_refused(text):
    with pytest.raises(Refused):
        evaluate(text)


def test_a_syntax_tree_is_taken_too():
    assert evaluate(ast.parse("x + 1", mode="eval"), {"x": 2}) == 3
