"""Reads mathematical answers with the grammar of math-verify, and compares them with its rules.

What the library guesses is mended or refused here (`3 4` is 7 for it, `52_8` is 52, `5m` is 5, `no`
a product), and what it takes for equal is looked at again: any two equations are, to it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.function import AppliedUndef

from actors.rewards.math_text import answer_in, spelled_plainly
from actors.rewards.numbers import LONGEST

COMMANDS = """
frac sqrt pi infty cdot times div pm mp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh
ln log exp binom min max gcd lfloor rfloor lceil rceil lvert rvert begin end sum prod int lim to
alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi omega Delta Omega mathbb
emptyset setminus cup cap in le ge ne approx
"""
"""LaTeX commands that the library reads as what they mean."""
BETWEEN = "cdot|times|div|pm|mp|[lr]floor|[lr]ceil|[lr]vert|setminus|c[au]p|in|le|ge|ne|approx|to"
"""Commands before which a fraction ends."""
NORMAL = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
AS_WRITTEN = ConversionConfig(lowercase_symbols=False)
EXACT_UNITS = frozenset(["mm", "cm", "dm", "m", "km", "mg", "g", "kg", "ml", "am", "pm"])
"""Units that are compared; others may be spelled in many ways, and are left out."""
NO_UNIT = re.compile(
    r"\b(?:or|and|than|more|less|least|most|remainder|to|if|for|when|with|r)\b"
    r"|hundred|thousand|illion|dozen"
)
NAME = re.compile("(?i:yes|no|odd)|[IVX]{2,3}|[ALS]{3}")
"""Words of less than four letters, Roman numbers, and theorems as SAS; others are products."""
CHOICE = r"\(?[A-J]\)?"
_POWER = r"(?:\s*\^\s*\{?\d\}?)?"
UNIT = re.compile(
    rf"(.*[\d}})!a-zA-Z|])\s*(%|°|\\text\s*\{{[^{{}}]*\}}{_POWER})"
    rf"|(.*[\d}})])\s*((?:[mckd]m|[mk]g|ml|ft|km/h|mph|[ap]m|[AP]M){_POWER}"
    r"|\s(?:day|min|sec|hrs?|lbs?|oz|yd|mi|[a-zA-Z]{4,}[a-zA-Z /.]*))",
    re.DOTALL,
)
UNCLEAR = re.compile(
    r"[a-zA-Z]{4,}|[?@#;\"°%]|/\s*\w+\s*[\\a-zA-Z(]|\d\s+[\d.]|\d\s*[_']|\d\s[mshgl]\s*$|:.*:"
    r"|\d{4}-\d\d?-\d\d?$|\b0x|[ACP](?:_\{?\w+\}?\^|\(\w+,)"
)
"""Words, digits side by side, another base, and what may or may not be under a fraction bar."""


class Unreadable(ValueError):
    """A text that is no expression, or has more than one meaning."""


@dataclass(frozen=True)
class Answer:
    """An answer as it is compared: words, or an expression with its unit."""

    value: Any
    unit: str = ""


def read(text: str) -> Answer:
    """Read a whole text; raise Unreadable, or whatever the library raises."""
    if len(text) > LONGEST:
        raise Unreadable(f"it has {len(text)} characters, must be at most {LONGEST}")
    text = spelled_plainly(text)
    if (words := _words(text)) is not None:
        return Answer(words)
    text, unit = _without_unit(text)
    disjoint = re.search(r"\bor\b", text) and re.search(r"[<>]|\\[lg]e(?![a-z])", text)
    text = re.sub(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)", ",", text)
    if "\\pm" in text and "," not in text:
        text = ", ".join(re.sub(r"\\pm(?![a-z])", sign, text) for sign in "+-")
    plain = re.sub(rf"\\\\|\\(?:begin|end)\{{\w+\}}|\\(?:{BETWEEN})(?![a-zA-Z])", ",", text)
    plain = re.sub(r"\\[a-zA-Z]+", r"\\", plain)
    unknown = {*re.findall(r"\\([a-zA-Z]+)", text)} - {*COMMANDS.split()}
    if unknown or UNCLEAR.search(plain) or ("&" in text and "matrix" not in text):
        raise Unreadable(f"{text!r} is no single expression")
    expression = _parsed(text)
    if isinstance(expression, sympy.FiniteSet) and not re.search(r"[(\[{]|\\pm", text):
        if len(expression) <= text.count(","):
            raise Unreadable("it has an element twice")
        if not all(isinstance(part, (sympy.Expr, sympy.Eq)) for part in expression):
            if not disjoint:
                raise Unreadable("it has several conditions")
            expression = sympy.Union(*(part.as_set() for part in expression))
    return Answer(_checked(expression / 100 if unit == "%" else expression), unit)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    if re.fullmatch(r"[+-]?\d+", text):
        return sympy.Integer(text)
    return latex2sympy(text, normalization_config=NORMAL, conversion_config=AS_WRITTEN)


def _words(text: str) -> str | None:
    """Return an answer that is no mathematics; None for one that is."""
    plain = _spoken(text)
    if re.fullmatch(CHOICE, plain):
        return plain.strip("()").casefold()
    plain = plain.casefold()
    if re.fullmatch(r"\d+ ?_ ?\{? ?\d+ ?\}?", plain):  # digits in another base
        return re.sub(r"[{} ]", "", plain)
    if re.fullmatch(r"\d{1,2}:[0-5]\d(?: ?[ap]\.? ?m\.?)?", plain):
        return re.sub(r"[ .]", "", plain.lstrip("0"))
    if re.match(r"\([a-j]\) *[\d\\$]|[a-j][.)] ", plain):
        raise Unreadable("it is a choice and its value at once")
    if not re.fullmatch(r"[a-z]+(?:['-]?[a-z]+| )*", plain) or re.search(r"\b(?:and|or)\b", plain):
        return None
    if text.casefold() == plain and len(plain) < 4 and not NAME.fullmatch(text):  # as in xy
        return None
    if len(plain.split()) > 4:
        raise Unreadable("it is a sentence of more than 4 words")
    return plain


def _spoken(text: str) -> str:
    return " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split())


def _without_unit(text: str) -> tuple[str, str]:
    """Return what stands before a unit, and the unit; "" where there is none."""
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*°", r"(\\frac{\1\\pi}{180})", text)
    text = text.replace("°", "")
    match = UNIT.fullmatch(text)
    if match is None:
        return text, ""
    number, unit = (match[1], match[2]) if match[2] else (match[3], match[4])
    if NO_UNIT.search(unit.casefold()):
        raise Unreadable(f"{unit.strip()!r} is no unit")
    return number, re.sub(r"\\text|[\s.{}^]", "", unit.casefold())


def _checked(expression: Any) -> Any:
    """Return an expression with i as the imaginary unit and a chain of equations as one."""
    if not isinstance(expression, (sympy.Basic, sympy.MatrixBase)):
        raise Unreadable("it is a statement")
    if isinstance(expression, And) and all(isinstance(e, sympy.Eq) for e in expression.args):
        parts = expression._unsorted_args
        expression = sympy.Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)
    elif isinstance(expression, And) and isinstance(expression.args[0], (sympy.Gt, sympy.Ge)):
        expression = And(*(part.reversed for part in reversed(expression._unsorted_args)))
    if not isinstance(expression, sympy.Set) and expression.has(sympy.nan, sympy.zoo):
        raise Unreadable("it divides by zero")
    if isinstance(expression, sympy.Expr) and not expression.is_Atom:  # 6.02 · 10^23 is exact
        exact = {part: sympy.Rational(str(part)) for part in expression.atoms(sympy.Float)}
        expression = expression.xreplace(exact)
    imaginary = {name: sympy.I for name in expression.free_symbols if str(name) == "i"}
    return expression.xreplace(imaginary) if imaginary else expression


def gold_in(answer: str) -> str:
    """Return the expression of an answer: what a solution ends with, else the whole text."""
    solution = "boxed" in answer or "####" in answer
    return (solution and answer_in(answer)) or answer


def is_right(gold: Answer, completion: str) -> bool:
    """Return True where the answer that a completion gives is the right one."""
    text = answer_in(completion)
    if text is None:
        return False
    if isinstance(gold.value, str):
        spoken = _spoken(spelled_plainly(text))
        choice = re.match(rf"(?:(?i:option|choice) )?({CHOICE})(?![\w'=+^])", spoken)  # "(C) 12"
        if choice and re.fullmatch("[a-j]", gold.value):
            return choice[1].strip("()").casefold() == gold.value
        if spoken.casefold() == gold.value:
            return len(gold.value) > 1 or "text" in text
    return equal(gold, read(text))


def equal(gold: Answer, answer: Answer) -> bool:
    """Return True where two answers are the same, spelled differently or not."""
    if ":" in str(gold.value) and not isinstance(answer.value, str):  # a time, or a ratio
        return _equal(_parsed(gold.value), answer.value)
    if isinstance(gold.value, str) or isinstance(answer.value, str):
        return bool(gold.value == answer.value)
    if gold.unit != answer.unit and {gold.unit, answer.unit} <= EXACT_UNITS:
        return False
    if answer.unit == "%" and gold.unit != "%" and _equal(gold.value, 100 * answer.value):
        return True
    return _equal(gold.value, answer.value)


def _equal(gold: Any, answer: Any) -> bool:
    match gold, answer:
        case sympy.Eq(), sympy.Eq():
            return _proportional(gold, answer)
        case sympy.Eq(), _:
            return _is_name(gold.lhs) and _equal(gold.rhs, answer)
        case _, sympy.Eq():
            if _is_name(answer.rhs) and not answer.lhs.free_symbols:
                return _equal(gold, answer.lhs)
            named = _is_name(answer.lhs) or not answer.lhs.free_symbols or _is_asked(answer)
            return named and _equal(gold, answer.rhs)
    if gold == answer or _far_apart(gold, answer):
        return bool(gold == answer)
    return bool(verify([gold], [answer], timeout_seconds=None, allow_set_relation_comp=True))


def _proportional(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    if gold.lhs == answer.lhs:
        return _equal(gold.rhs, answer.rhs)
    return bool(sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs)).is_number)


def _is_asked(equation: sympy.Eq) -> bool:
    """Return True for the value of an expression without numbers, as in AB = 5 and a + b = 5."""
    lhs, rhs = equation.args
    if not isinstance(lhs, sympy.Expr) or rhs.free_symbols:
        return False
    return bool(lhs.atoms(sympy.Number) <= {-1} and lhs.as_coeff_Mul()[0] == 1)


def _is_name(side: Any) -> bool:
    return isinstance(side, (sympy.Symbol, AppliedUndef, sympy.Tuple, sympy.Interval))


def _far_apart(gold: Any, answer: Any) -> bool:
    """Compare numbers by their share, where the library looks at a number of decimals."""
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, answer)):
        return False
    gold, answer = sympy.N(gold, 30), sympy.N(answer, 30)
    return not (gold.is_finite and answer.is_finite and abs(gold - answer) <= 1e-5 * abs(gold))
