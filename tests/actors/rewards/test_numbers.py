"""The grammar of `numeric_match`: what is read as which number, and what is no number."""

import re
import time
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest

from actors.rewards.numbers import last_number, read_number

READ = [
    ("7", 7), ("007", 7), ("+3", 3), ("-3", -3), ("- 3", -3), ("+ 3", 3), ("\u22123", -3),
    ("\u2212 3", -3), ("\u20133", -3), ("\u20103", -3), ("\u20113", -3), ("\ufe633", -3),
    ("\uff0d3", -3), ("minus 3", -3), ("negative 3", -3), ("-{3}", -3), ("-(3)", -3),
    (".5", "1/2"), ("-.5", "-1/2"), ("5.", 5), ("5.0", 5), ("3.14", "157/50"), ("0.1", "1/10"),
    # groups of digits
    ("3,500", 3500), ("1,234,567.89", "123456789/100"), ("1,00,000", 100000),
    ("12,34,567", 1234567), ("1.234,56", "123456/100"), ("1.234.567,8", "12345678/10"),
    ("1 000 000", 1000000), ("1\u2009000\u2009000", 1000000), ("1\u00a0000", 1000),
    ("1\u202f000,", 1000), ("1{,}000", 1000), ("1{,}234{,}567.5", "12345675/10"),
    ("1,\\!000", 1000), ("1\\,000", 1000), ("1~000", 1000), ("1_000_000", 1000000),
    ("1'000'000", 1000000), ("1\u2019000", 1000), ("-1,000", -1000),
    # fractions and mixed numbers
    ("1/2", "1/2"), ("1 / 2", "1/2"), ("-1/2", "-1/2"), ("1/-2", "-1/2"), ("14/2", 7),
    ("0.5/2", "1/4"), ("1,000/3", "1000/3"), ("3 1/2", "7/2"), ("-3 1/2", "-7/2"),
    ("3 1 / 2", "7/2"), ("\\frac{1}{2}", "1/2"), ("\\dfrac{1}{2}", "1/2"),
    ("\\tfrac{ 1 }{ 2 }", "1/2"), ("\\frac12", "1/2"), ("\\frac1{2}", "1/2"),
    ("\\frac{1}2", "1/2"), ("\\frac 1 2", "1/2"), ("-\\frac{1}{2}", "-1/2"),
    ("\\frac{-1}{2}", "-1/2"), ("3\\frac{1}{2}", "7/2"), ("3 \\frac12", "7/2"),
    ("-3\\frac12", "-7/2"), ("\u00bd", "1/2"), ("2\u00bd", "5/2"), ("2 \u00bd", "5/2"),
    ("-\u00be", "-3/4"), ("1\u20442", "1/2"), ("1\u22152", "1/2"), ("0/5", 0),
    # powers
    ("1e5", 100000), ("6.02e23", 602 * 10**21), ("6.02E+23", 602 * 10**21), ("5e-3", "1/200"),
    ("6.02 \u00d7 10^23", 602 * 10**21), ("6.02\u00d710^{23}", 602 * 10**21),
    ("6.02 \\times 10^{23}", 602 * 10**21), ("6.02 \\cdot 10^{23}", 602 * 10**21),
    ("6.02 x 10^23", 602 * 10**21), ("6.02*10^23", 602 * 10**21), ("6.02*10**23", 602 * 10**21),
    ("6.02 \u00b7 10\u00b2\u00b3", 602 * 10**21), ("1.5\u00d710^{-3}", "3/2000"),
    ("10^3", 1000), ("10**3", 1000), ("10 ** 3", 1000), ("10 ^ 3", 1000), ("10^{3}", 1000),
    ("10^{-2}", "1/100"), ("10\u00b3", 1000), ("10\u207b\u00b2", "1/100"), ("-2^2", -4),
    ("2^{10}", 1024), ("0x1F", 31), ("0b101", 5), ("0o17", 15), ("-0xff", -255),
    # percentages, money, units, words
    ("50%", "50%"), ("50 %", "50%"), ("50\\%", "50%"), ("50 \\%", "50%"), ("12.5%", "12.5%"),
    ("50 percent", "50%"), ("50\uff05", "50%"), ("-5%", "-5%"), ("1 1/2%", "1.5%"),
    ("$5", 5), ("\\$5", 5), ("$ 5", 5), ("-$5", -5), ("$-5", -5), ("\\$1,234.50", "2469/2"),
    ("\u20ac5", 5), ("5\u20ac", 5), ("5 \u20ac", 5), ("US$5", 5), ("5 kg", 5), ("5kg", 5),
    ("5km/h", 5), ("5 \\text{ percent}", "5%"),
    ("5 dollars", 5), ("5 m^2", 5), ("5 cm\u00b2", 5), ("5 cm2", 5), ("60 km/h", 60),
    ("5 m/s^2", 5), ("5 s^{-1}", 5), ("5\\text{ cm}", 5), ("5\\,\\mathrm{cm}^2", 5),
    ("45\u00b0", 45), ("45^\\circ", 45), ("45^{\\circ}", 45), ("20 \u00b0C", 20), ("3rd", 3),
    ("$5 million", 5 * 10**6), ("1.5 billion", 15 * 10**8), ("2 thousand", 2000),
    # around it
    ("$7$", 7), ("\\(7\\)", 7), ("\\[7\\]", 7), ("$$-7$$", -7), ("\\boxed{7}", 7), ("**7**", 7),
    ("`7`", 7), ("__7__", 7), ("_7_", 7), ("(7)", 7), ("\\left(7\\right)", 7), ("\\text{7}", 7),
    ("x = 7", 7), ("x=-7", -7), ("x = - 7", -7), ("The answer is 7.", 7), ("Answer: 7", 7),
    ("7\n", 7),
    ("#### 7", 7), ("48/2 = 24, and 48+24 = 72\n#### 72", 72), ("$5 + 2 = \\boxed{7}$.", 7),
    ("\\textbf{7}", 7), ("\\boxed{-\\frac{1}{2}}", "-1/2"),
    # digits of other scripts
    ("\uff17", 7), ("\uff11\uff12\uff0e\uff15", "25/2"), ("\u0663", 3), ("\u0661\u0662", 12),
    ("\u0663\u066b\u0665", "7/2"), ("\u0967\u0968", 12), ("\U0001d7d9", 1), ("\u200e7", 7),
]  # fmt: skip
"""Texts with their numbers, as answers and as completions."""
N = 40_000
NOT_READ = [
    "", " ", "seven", "one half", "inf", "-inf", "nan", "Infinity", "\u221e", "\\infty", "-\\infty",
    "+", "-", ".", "%", "x", "x7", "m^2", "\\pi", "\u03c0", "\u2160", "\u2460", "\u4e09",
    "3,5", "1,2,3", "1,23", "12,34", "1,0000", "0,500", "1,234,56", "1,000,00", "1 000,5",
    "1.234.567", "1.2.3", "v1.2.3", "192.168.0.1", "10:30", "10:30:15", "3:4", "3 : 4",
    "2024-05-01", "5/1/2024", "1/2/3", "01.05.2024", "555-123-4567", "5'11", "1/0", "0/0",
    "\\frac{1}{0}", "\\frac{x}{7}", "\\frac{1}{2}3", "3 5/2", "3 1/0", "\\frac{\\sqrt{3}}{2}",
    "2x", "7n", "3i", "5k", "5M", "7pm", "2e", "1e5.5", "1e999999999", "9" * 5000,
    "1." + "3" * 5000, "9^999999999", "2^3^2", "10^x", "10^{x}", "10^", "0^-1",
    "(-2)^2", "10^{3.5}", "e^{2}", "a_{12}", "5 e3", "5\u2030", "101_{2}", "1011_2", "1_00", "1F",
    "0xFG", "0x", "2\\pi", "2\u03c0", "2 \\pi", "\\sqrt{7}", "\u221a7", "2\\sqrt{3}",
    "2 \\sqrt{3}", "\\sqrt 7", "sqrt(7)", "\\log 8", "log(8)", "\\ln(8)", "\\pm 7", "\u00b17",
    "\\binom{5}{2}", "\\overline{7}", "f(7)", "\\lfloor 7.5 \\rfloor",
]  # fmt: skip
"""Texts that are no number, as answers and as completions."""
SEVERAL = [
    "3, 5", "3 and 5", "3 or 4", "10-7", "3\u20135", "10 to 20", "3+4", "3*4", "3 x 4", "3\u00d74",
    "x = 3, y = 4", "2024, May 5", "3 feet 4 inches", "+1 555 123 4567", "(555) 123-4567", "[3, 5]",
    "y = 2x + 3", "2(3+4)", "x = 3 and y = 4", "0.333...", "5 K", "-|5|", "0.(3)", "7 = 3 + 4",
    "5!", "> 5", "x \\ge 5", "\u2265 5", "[5, \u221e)", "5 squared", "half of 5",
    "sqrt 5", "2 x", "3 i", "5 dozen", "not 5", "{1, 2}", "|7|", "5?", "3...5", "2n + 1",
]  # fmt: skip
"""Answers that a number does not say, beside which a completion's last number may stand."""


def number(text):
    """Return the value of a row as `Number` holds it."""
    percent = str(text).endswith("%")
    return (Fraction(str(text).removesuffix("%")) / (100 if percent else 1), percent)


@pytest.mark.parametrize(("text", "expected"), READ)
def test_a_number_is_read_exactly(text, expected):
    assert read_number(text) == last_number(text) == number(expected)


@pytest.mark.parametrize("text", NOT_READ)
def test_what_the_grammar_does_not_have_is_no_number(text):
    assert last_number(text) is None
    with pytest.raises(ValueError, match="in the answer"):
        read_number(text)


def test_the_table_of_the_readme_says_what_is_read():
    page = (Path(__file__).parents[3] / "actors/README.md").read_text().split("## Numbers\n")[1]
    rows = [line.split("|")[1:4] for line in page.split("\n## ")[0].split("\n") if "| " in line]
    assert len(rows) == 13
    for read, _, not_read in rows:
        for text in re.findall("`([^`]+)`", read):
            assert read_number(text) == last_number(text), text
        for text in re.findall("`([^`]+)`", not_read):
            assert last_number(text) is None, text


@pytest.mark.parametrize("text", SEVERAL)
def test_an_answer_is_one_number_alone(text):
    with pytest.raises(ValueError, match="in the answer"):
        read_number(text)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("First 3, then 4, so 12.", 12), ("It costs $1,234.50.", "2469/2"), ("10-7", 7),
        ("10 - 7", 7), ("10 - 7 = 3", 3), ("so x is 3 1/2.", "7/2"), ("So: 50%!", "50%"),
        ("it is -3", -3), ("it is - 3", -3), ("x = \u22123", -3), ("Answer \u2013 5", 5),
        ("Steps:\n- 3 apples\n- 5 pears", 5), ("3--5", 5), ("9 in 10^3 cases", 1000),
        ("\\boxed{\\frac{3}{4}}", "3/4"), ("**Answer: \\(\\frac{3}{4}\\)**", "3/4"),
        ("the area is 5 m^2", 5), ("7 (seven)", 7), ("7, that is x7", 7), ("Is it 7?", 7),
        ("7!", 7), ("from 1.2.3 to 7", 7), ("f(3) = 7", 7), ("x^2 = 7", 7), ("A1: 7", 7),
        ("x \\approx 7.5", "15/2"), ("\\begin{aligned} x &= 7 \\\\ y &= 8 \\end{aligned}", 8),
        ("7 $\\blacksquare$", 7), ("1. First\n2. Second\nAnswer: 7", 7), ("| 7 | 8 |", 8),
        ("2024: 7", 7), ("Option 1: 3/4", "3/4"), ("5 or 3 1/2 m", "7/2"), ("3, 5", 5),
        ("<answer>7</answer>", 7), ("$3\\frac{1}{2}$ hours", "7/2"), ("total=7kg", 7),
        ("7" + " and x7" * 2000, 7), ("x" * 3990 + " 7 5/8 miles", "61/8"),
        ("1" + " 000" * 20, 10**60),
    ],
)  # fmt: skip
def test_the_last_number_of_a_completion_is_taken_whole(completion, expected):
    assert last_number(completion) == number(expected)


@pytest.mark.parametrize(
    ("gold", "completion", "equal"),
    [
        ("50%", "50%", True), ("50%", "1/2", True), ("50%", "0.5", True), ("50", "50%", True),
        ("50%", "50", True), ("1/2", "50%", True), ("0.5", "0.5%", False), ("50%", "5000%", False),
        ("50%", "49%", False), ("50", "0.5", False), ("50%", "50.5", False),
    ],
)  # fmt: skip
def test_a_percentage_is_its_share_and_the_number_before_the_sign(gold, completion, equal):
    assert (last_number(completion).distance(read_number(gold)) == 0) is equal


@pytest.mark.parametrize(
    "text",
    ["9" * N, "1 " * N, "123 " * N + "12", "123," * N + "x", "1/" * N, "1.234." * N, "1-" * N,
     "\\frac{1}{" * N, "\\a[" * N, "\\a " * N, "a(" * N, "a(" + "1" * N, "^" + " " * N, "=" * N,
     "= " * N + "-", "{" * N, "\\" * N, "1:" * N, "1e" * N, "\u00bd" * N, "\u00b2" * N,
     "\u0668" * N, "$" * N, "- " * N, "a" * N, "1'" * N, "1^" * N, "-(1" * N, " " * N,
     "1" + " " * N,
     "9^999 " * N, "1" * N + "\u03c0", "1." + "1" * N + "x", "and " * N],
    ids=lambda text: ascii(text[:9]),
)  # fmt: skip
def test_the_time_is_proportional_to_the_text(text):
    begun = time.process_time()
    with suppress(ValueError):
        read_number(text)
    assert time.process_time() - begun < 5.0
