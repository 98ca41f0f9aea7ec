"""Interpreter of plain expressions, and its place in libraries whose parsers execute text.

sympy's parser turns text into Python code and evaluates it, and reasoning-gym calls `eval` on some
answers. Here such code is never executed: its syntax tree is interpreted, and may have literals,
operators, lists and calls of mathematical functions by name; no attributes, subscripts, lambdas or
other names.
"""

import ast
import operator
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
"""Functions of the operators that an expression may have."""
_SEQUENCES: dict[type[ast.AST], type] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
_LITERALS = (int, float, complex, bool, type(None))
TAKE_TEXT = frozenset({"Symbol", "Integer", "Float", "Rational", "Function"})
"""Functions of sympy that take a text, which they do not evaluate."""
FUNCTIONS = """
Symbol Integer Float Rational Function
sqrt cbrt root real_root exp log ln sin cos tan cot sec csc sinc asin acos atan acot asec acsc atan2
sinh cosh tanh coth sech csch asinh acosh atanh acoth asech acsch Abs sign floor ceiling frac Max
Min Mod Pow Add Mul Eq Ne Lt Le Gt Ge Equality Unequality LessThan StrictLessThan GreaterThan
StrictGreaterThan And Or Not Xor factorial factorial2 subfactorial binomial gamma loggamma beta zeta
erf erfc erfi Ei li Li Si Ci Shi Chi LambertW gcd lcm re im conjugate arg Tuple Interval FiniteSet
Union Intersection Heaviside DiracDelta polylog expint uppergamma lowergamma fresnels fresnelc
elliptic_k elliptic_e elliptic_f besselj bessely besseli besselk Integral Derivative Sum Product
"""
CONSTANTS = "pi E I oo zoo nan EulerGamma GoldenRatio Catalan"
IMPORT = "from sympy import *"
"""The one text that sympy's parser executes besides expressions."""


class Refused(ValueError):
    """A text that is no plain expression."""


def evaluate(code: str | ast.AST, names: Mapping[str, Any] | None = None) -> Any:
    """Compute an expression, with the values that some names have; it is never executed.

    Raises Refused if it has something else than the module allows, and the errors of its operators.
    """
    if isinstance(code, str):
        try:
            code = ast.parse(code.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(f"no expression: {error}") from None
    return _value(code.body if isinstance(code, ast.Expression) else code, names or {})


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value) if isinstance(value, (*_LITERALS, str)):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            operands = _value(left, names), _value(right, names)
            if any(isinstance(value, (str, list, tuple, set)) for value in operands):
                raise Refused("an operator between other values than numbers")
            return OPERATORS[type(op)](*operands)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return _SEQUENCES[type(node)]([_value(item, names) for item in items])
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in names:
            return _call(name, arguments, keywords, names)
        case ast.Call(func=ast.Call(func=ast.Name(id="Function")) as function, args=arguments):
            return _value(function, names)(*(_value(argument, names) for argument in arguments))
    raise Refused(f"{type(node).__name__} in an expression")


def _call(
    name: str, arguments: list[ast.expr], keywords: list[ast.keyword], names: Mapping[str, Any]
) -> Any:
    values = [_value(argument, names) for argument in arguments]
    if name not in TAKE_TEXT and any(isinstance(value, str) for value in values):
        raise Refused(f"a text in the arguments of {name}")
    options = {k.arg: _value(k.value, names) for k in keywords if k.arg == "evaluate"}
    if len(options) < len(keywords):
        raise Refused(f"keywords in the arguments of {name}")
    return names[name](*values, **options)


def guard_sympy() -> None:
    """Let sympy's parser interpret expressions with `evaluate`, for good, where it is installed.

    It still reads text in its own way (`stringify_expr`); only what it would execute is replaced.
    """
    try:
        from sympy.parsing import sympy_parser
    except ImportError:
        return
    _stand_in_for_builtins(sympy_parser, _sympy_names)


def guard_eval(package: str) -> None:
    """Let the loaded modules of a package compute by `evaluate` what they would `eval`."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            _stand_in_for_builtins(module, dict)


def _stand_in_for_builtins(module: ModuleType, names: Callable[[], Mapping[str, Any]]) -> None:
    """Give a module globals that hide the builtins `eval`, `exec` and `compile`, its only seam.

    `exec` runs only the import of sympy's names, as `names`; `compile` leaves a syntax tree.
    """

    def interpret(code: str | ast.AST, _: Any = None, variables: Any = None) -> Any:
        return evaluate(code, {**names(), **_expressions(variables or {})})

    def import_names(code: str, namespace: dict[str, Any] | None = None, *_: Any) -> None:
        if code != IMPORT or namespace is None:
            raise Refused("no code is executed here")
        namespace.update(names())

    vars(module).update(eval=interpret, exec=import_names, compile=lambda tree, *_: tree)


@cache
def _sympy_names() -> Mapping[str, Any]:
    """Return the functions and constants of sympy that an expression may name."""
    import sympy

    names = {name: getattr(sympy, name) for name in (FUNCTIONS + CONSTANTS).split()}
    return {**names, "max": sympy.Max, "min": sympy.Min, "abs": abs, "True": True, "False": False}


def _expressions(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that stand for expressions and for functions without a definition."""
    if not variables:
        return {}
    from sympy import Basic
    from sympy.core.function import UndefinedFunction

    kinds = (Basic, UndefinedFunction)
    return {name: value for name, value in variables.items() if isinstance(value, kinds)}
