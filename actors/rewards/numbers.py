r"""Reads numbers as people, programs and LaTeX write them; actors/README.md has the grammar.

    text ─▶ plain forms: "−½" ─▶ "-1/2", "\frac12" ─▶ "1/2", "1{,}000" ─▶ "1,000"
         ─▶ tokens: what has the grammar of a number, and what has digits without it: "1.2.3", "2x"

Every step takes time in proportion to the text.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple
from unicodedata import normalize

from headway.user_code import shown

LONGEST = 1000
"""Characters of a number, and the largest power of ten."""
SCALES = {"": 0, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
CHARACTERS = str.maketrans(
    "−–‐‑‒﹣－·⋅∙✕⁄∕／٪％﹪＋．٫，٬：＄’（）＝",
    "-------××××///%%%+..,,:$'()=",
    "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
)
FOREIGN = (
    (re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda match: "^" + match[0].translate(SUPERSCRIPTS)),
    (re.compile(r"(?<=\d) ?(?=[¼½¾⅐-⅞↉])"), lambda match: " "),
    (re.compile(r"[¼½¾⅐-⅞↉]"), lambda match: normalize("NFKC", match[0])),
    (re.compile(r"(?![0-9])\d"), lambda match: str(int(match[0]))),
)
NO_NUMBER = " 0π"
"""An expression with digits that is no number; "π" beside a number makes it such a one."""
LATEX = {
    r"\\\\": "\n",
    r"\\!": "",
    r"\\[,;: >()\[\]]": " ",
    r"\\([%$#&_{}])": r"\1",
    r" ?\\(?:times|cdot)(?![a-zA-Z]) ?": "×",
    r"\^ ?\{? ?\\circ ?\}?|\\degree(?![a-zA-Z])": "°",
    r"\\(?:[lg]eq?|[lg]t|neq?)(?![a-zA-Z])": "<",
    # commands that change no number
    r"\\(?:begin|end) ?\{[^{}]*+\}|\\(?:d?text(?:bf|it|rm|style)?|math(?:rm|bf|it|sf)|displaystyle|"
    r"boxed|[fm]box|operatorname|left|right|[bB]igg?[lr]?|q?quad|approx|simeq|equiv|to|implies|iff|"
    r"(?:Long)?[rR]ightarrow|therefore|because|blacksquare|square|checkmark|item)(?![a-zA-Z])": " ",
    r"(?<=\d) *(?=\\[dtc]?frac)": " ",
    r"\\[dtc]?frac *(?:\{ *([-+]?[\d.,]+) *\}|(\d)) *(?:\{ *([-+]?[\d.,]+) *\}|(\d))(?!\d)": (
        r"\1\2/\3\4"
    ),
}
PLAIN = {
    r"(?<=\d) ?(?:\*\*|\^) ?(?=[{(]?[-+]?\d)": "^",
    r"\^ *[{(] *([-+]?\d+) *[})]": r"^\1",
    r"(?<!\w)__?(?=[-+$\d])|(?<=\d)__?(?![\w{])": "",  # "__7__"
    r"- ?[({]([\d.,/]+)[)}]": r"-\1",
    r"(?<![\d)] )\b(?:minus|negative) +(?=[\d.$€£¥₹])": "-",
    r"((?:\A|[=(\[{$:<>≈]|\b(?:is|equals)) *[-+]) +(?=[\d.$€£¥₹])": r"\1",  # "is - 3"
}
"""Patterns and what takes the place of their matches, in this order."""
EXPRESSION = re.compile(
    r"(?:\\[a-zA-Z]+\*?(?: ?\[[^][{}\\]{0,99}\])?(?: ?\{[^{}]*+\})*|[√±∓∞π])(?: ?[-+]?[\d.]++)?"
    r"|(?<=[^\W\d])\([^()\n]*+\)"
)
"""Commands of LaTeX with what they apply to, calls, and signs that change a number."""

_GROUPED = (
    r"[1-9]\d{0,2}(?:(?:,\d{3})++|(?:'\d{3})++|(?:_\d{3})++|(?:[ ]\d{3}){1,30}+(?![ ]\d))(?!\d)"
    r"|[1-9]\d?(?:,\d\d)++\d(?!\d)"
)
_DECIMAL = rf"(?:[1-9]\d{{0,2}}(?:\.\d{{3}})++,\d++|(?:{_GROUPED}|\d++)(?:\.\d*+)?|\.\d++)"
_UNIT = r"(?:st|nd|rd|th|[mck]m|[mk]?g|lbs?|oz|ft|in|mi|ml|mph|min|hrs?|sec|ms)\b"
TOKEN = re.compile(
    rf"""(?<![\w.^])(?<!\^[-+])(?<![\^_]\{{)(?<!\d[,:'/])(?<!\}}\{{)(?:
    \d++(?:-\d++){{2,}}+|\d++(?:\ :\ |:)\d[\d:]*+
    |(?P<sign>(?<![\w)-])[-+])?(?:[$€£¥₹]\ ?)?(?:
        (?P<based>0[xX][\da-fA-F]++|0[bB][01]++|0[oO][0-7]++)
        |(?P<whole>{_GROUPED}|\d++)\ (?P<over>\d++)\ ?/\ ?(?P<under>\d++)
        |(?P<first>{_DECIMAL})(?:
            \ ?/\ ?(?P<second>[-+]?{_DECIMAL})
            |\^(?P<power>[-+]?\d++)
            |(?:[eE]|\ ?[×x*]\ ?10\^)(?P<exponent>[-+]?\d++)
        )?
    )(?:[ {{]{{1,4}}(?P<scale>thousand|million|billion|trillion)\b)?
    (?P<percent>[ {{]{{0,4}}(?:%|per\ ?cent\b))?(?!/\w\b)(?:{_UNIT})?
    (?!\w|\ ?[π^‰]|\ [eE][-+]?\d|[.,:'/°]\d|\(\d|[)}}\]]+\^)
    |\d(?:[\w^π]|[.,:'/(](?=[\wπ]))*+
    )""",
    re.VERBOSE,
)
EQUALS = re.compile(r"\A(?:(?!, |;|\n| and | or ).)*=")
"""What stands before the number of an answer, as in "x = 5" and "2 + 3 = 5"."""
BESIDE = re.compile(r"[^\W\d_]+\}?(?:\^?-?\d)?")
"""A word beside the number of an answer, such as its unit: "kg", "m^2"."""
NOT_BESIDE = re.compile(
    r"\b(?:[bcefijknopqruvwxyzBKMXYZπ]|pi|sqrt|root|log|ln|sin|cos|tan|half|squared|cubed|dozen|"
    r"hundred|pm|or|to|not|over|times|plus|mod)\b|\.\.|[^\w\s.,:;≈'\"()\[\]{}$€£¥₹*`&/°^#-]"
)
"""Words and signs beside a number that make it another one, or one of several."""


class Number(NamedTuple):
    """An exact number."""

    value: Fraction
    percent: bool = False
    """It is written as a percentage: 50% has the value 1/2."""

    def distance(self, gold: "Number") -> Fraction:
        """Return the distance; where only one is a percentage from 1 up, 50% is 50 too."""
        difference = abs(self.value - gold.value)
        if self.percent != gold.percent:
            share, plain = (self, gold) if self.percent else (gold, self)
            if abs(share.value) >= Fraction(1, 100):
                return min(difference, abs(100 * share.value - plain.value))
        return difference


def last_number(text: str) -> Number | None:
    """Return the last number of a text; None where it has none, or none that can be read."""
    for length in (4 * LONGEST, 100 * LONGEST):
        last = None
        for last in TOKEN.finditer(_plain(text[-length:])):  # noqa: B007
            pass
        if last is not None and (last.start() > LONGEST or length >= len(text)):
            return _number(last)
    return None


@lru_cache(maxsize=1024)
def read_number(answer: str) -> Number:
    r"""Return the number that an answer is, or ends with after "####", "\boxed" or "=".

    Units, currencies and words may stand beside it. Raises ValueError, which says what was found.
    """
    text = _plain(EQUALS.sub("", re.split(r"####|\\boxed", answer)[-1]))
    tokens = [*TOKEN.finditer(text)]
    beside = TOKEN.sub(" ", text)
    spoils = NOT_BESIDE.search(beside) or re.search(r"\d", BESIDE.sub("", beside))
    number = _number(tokens[0]) if len(tokens) == 1 and not spoils else None
    if number is not None:
        return number
    problem = "several numbers" if len(tokens) > 1 else "no number that it reads"
    raise ValueError(
        f"numeric_match finds {problem if tokens else 'no number'} in the answer {shown(answer)}; "
        "must be one number, written as in actors/README.md (Numbers)"
    )


def plain_characters(text: str) -> str:
    """Return a text with signs, digits and spaces of ASCII for those that mean the same."""
    if not text.isascii():
        for foreign, rewrite in FOREIGN:
            text = foreign.sub(rewrite, text)
        text = text.translate(CHARACTERS)
    return re.sub(r"[^\S\n ]", " ", text)


def _plain(text: str) -> str:
    text = plain_characters(text).replace("~", " ").replace("{,}", ",")
    for pattern, replacement in (LATEX | PLAIN if "\\" in text else PLAIN).items():
        text = re.sub(pattern, replacement, text)
    return EXPRESSION.sub(_without_number, text)


def _without_number(expression: re.Match[str]) -> str:
    if any(map(str.isdigit, expression[0])):
        return NO_NUMBER
    return expression[0] if expression[0].startswith("(") else "π"


def _number(token: re.Match[str]) -> Number | None:
    part = {name: text for name, text in token.groupdict().items() if text is not None}
    if len(token[0]) > LONGEST or not {"based", "whole", "first"} & part.keys():
        return None
    if "based" in part:
        value = Fraction(int(part["based"], 0))
    elif "whole" in part:
        over, under = int(part["over"]), int(part["under"])
        if over >= under:
            return None
        value = _decimal(part["whole"]) + Fraction(over, under)
    else:
        value = _decimal(part["first"])
        power = int(part.get("power", 1))
        exponent = int(part.get("exponent", 0)) + SCALES[part.get("scale", "")]
        divisor = _decimal(part.get("second", "1"))
        if max(len(part["first"]) * abs(power), abs(exponent)) > LONGEST:
            return None
        if not divisor or (not value and power < 0):
            return None
        value = value**power / divisor * Fraction(10) ** exponent
    if part.get("sign") == "-":
        value = -value
    return Number(value / 100, percent=True) if "percent" in part else Number(value)


def _decimal(text: str) -> Fraction:
    """Read digits with separators of thousands, and a comma for the point after such points."""
    if "." in text and text.rfind(",") > text.rfind("."):
        text = text.replace(".", "").replace(",", ".")
    return Fraction(re.sub("[ ,'_]", "", text))
