"""The tool `calculator`: arithmetic on numbers of bounded size; it runs no code."""

import ast
import math

from actors.sandbox.guarded_parsing import OPERATORS

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**30
"""Bound of every intermediate result, positive or negative."""

BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
"""Operators of two numbers, besides powers."""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Raises ValueError for any other expression, and for a result that is not finite.

    Example:
        >>> [calculator(text) for text in ("37*82", "7/2", "6/2", "-2**2")]
        ['3034', '3.5', '3', '-4']
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.10g}"
    return str(int(value))


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        number = node.value
        if isinstance(number, int | float) and not isinstance(number, bool):
            return _bounded(number)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if isinstance(node.op, BINARY):
            return _bounded(OPERATORS[type(node.op)](left, right))
    raise ValueError("there are only numbers, + - * / // % ** and parentheses")


def _power(base: float, exponent: float) -> float:
    """Compute a power, bounding the exponent first: a huge power would take long to compute."""
    if abs(exponent) > 100 or (base < 0 and exponent != int(exponent)):
        raise ValueError(f"the exponent {exponent:g} of {base:g} is out of range")
    power: float = base**exponent
    return power


def _bounded(value: float) -> float:
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ValueError("the number is too large")
    return value
