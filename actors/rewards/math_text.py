r"""Finds the answer in a text about mathematics, and brings it to one spelling.

In that spelling words are `\text{…}`, degrees "°", and no command is only for the looks.
"""

import re
from zlib import crc32

from actors.rewards.answers import last_match
from actors.rewards.numbers import TOKEN, plain_characters

SIGNS = str.maketrans(
    {
        "×": r"\times ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ",
        "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ",
        "√": r"\sqrt", "∅": r"\emptyset ", "θ": r"\theta ", "≈": r"\approx ", "∴": " ",
        "€": "", "£": "",
    }
)  # fmt: skip
LABEL = re.compile(
    r"(?!.*(?:,|\b(?:and|or|not?)\b).*=)"
    r"(?:[^=\d]*(?:\\(?:text|angle|overline|triangle|max|min)(?![a-z])|"
    r"\[[A-Z]{3,}\])[^=\d]*|[PE]\([^()]*\)\s*|[A-Z]\^\{-1\}\s*|\\frac\s*\{d\w*\}\s*\{d\w\}\s*)(?==)"
)
"""What an answer names before its "=" and is no expression: words, an angle, a probability."""
_NAMES = "sqrt|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|theta|infty"
_BRACED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_BARE = rf"\\sqrt{_BRACED}|\\[a-z]+|\w"
REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\left\s*\.|\\right\s*\.|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"\\[dtc](frac|binom)(?![a-zA-Z])", r"\\\1"),
        (r"(?:\\leq?(?:slant)?(?![a-zA-Z])|<=)", r"\\le "),
        (r"(?:\\geq?(?:slant)?(?![a-zA-Z])|>=)", r"\\ge "),
        (r"\\neq?(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:displaystyle|textstyle|q?quad)(?![a-zA-Z])|\\[;:]|~", " "),
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"\\(?:mathbf|mathit|boldsymbol|vec)\s*\{\s*(\w)\s*\}", r"\1"),
        (r"\\(?:text|mathrm|operatorname)\s*\{\s*(a?r?c?(?:sin|cos|tan)|ln|log)\s*\}", r"\\\1 "),
        (r"\\lg(?![a-z])", r"\\log_{10} "),
        (
            r"[(\[]\s*\\begin\{array\}\{[lcr]*\}(.*?)\\end\{array\}\s*[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"\\(?:text|math)(?:rm|bf|it|sf|normal)?\s*\{|\\(?:mbox|operatorname)\s*\{", r"\\text{"),
        (r"\\text\{\s*([a-zA-Z])\s*\}(?=\s*[+\-^_=])|\\text\{\s*(-?[\d.,]+)\s*\}", r"\1\2"),
        (r"(?:(?<=,)|^)\s*\\text\{\s*\(?([A-J])\)?\s*\}(?=\s*(?:,|$))", r" \1"),
        (r"^\\text\{([^{}]*\d[^{}]*)\}$", r"\1"),
        (
            r"(?<![\d.])\d{1,3}(?:(?:\\,|\{,\}|\\ | )\d{3})+(?!\d)",
            lambda m: re.sub(r"\D", "", m[0]),
        ),
        (
            r"(?:^|[=+<-]|(?<!\\)\{)\s*\d{1,3}(?:,\d{3})+(?![\d,]|[^(\[]*(?:[)\]]|\\\}))",
            lambda m: m[0].replace(",", ""),
        ),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[, ]", " "),
        (
            r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\text\{\s*degrees?\s*\}|\s*\bdegrees?\b",
            "°",
        ),
        (r"°\s*(?:\\text\{\s*)?[CF]\b\s*\}?", "°"),
        (r"\\%|\\text\{\s*(?:percent|\\?%)\s*\}|\s*\bpercent\b", "%"),
        (r"(?<=\d)\^?\{?(?:\\text\{\s*)?(?:st|nd|rd|th)\b\}{0,2}", ""),
        (r"(\d)[eE]([+-]?\d+)(?![\w.])", r"\1\\cdot 10^{\2}"),
        (r"\*\*", "^"),
        (r"\^(-\d+(?:\.\d+)?)", r"^{\1}"),
        (r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (rf"\\(frac|binom)\s*({_BARE})", r"\\\1{\2}"),
        (rf"(\\(?:frac|binom){_BRACED})\s*({_BARE})", r"\1{\2}"),
        (rf"\^\s*(\\frac{_BRACED}{_BRACED})", r"^{\1}"),
        (r"\\log_(\w)", r"\\log_{\1}"),
        (r"(\d*)\.(\d*)\\(?:overline|dot|bar)\s*\{(\d+)\}", lambda m: _repeating(*m.groups())),
        (r"(\w|\(\w+\))!\s*(?=\^)", r"(\1!)"),
        (r"^([a-zA-Z])\^\{-1\}(?=\s*\(\w\)\s*=)", r"\1"),
        (rf"(?<![\\a-zA-Z])({_NAMES})(?![a-zA-Z])", r"\\\1 "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    )
]
"""Patterns and what stands for them, in this order."""
_ROWS = "aligned|align\\*?|gathered|split|cases|alignedat"
JUDGES = re.compile(
    r"(?i)(?:in)?(?:correct|valid|right|wrong|consistent|reasonable|verified|indeed|confirmed)\b"
    r"|(?:not|thus|therefore|also) |what|the same|(?:[^$]*?(?<![\\a-zA-Z])[a-zA-Z]{2,}){7}"
)
"""What follows "the answer is" and is none: a judgement, or a sentence."""
ANSWER = re.compile(
    r"(?i)\b(?:answers?|solutions?)\b(?:\s+(?:to|of|for)\b[^.:\n]{0,80}?)?"
    r"\s*(?:(?<!solution):|(?<!solution)=|(?:is|are|equals|will be|must be|would be)\b)[:\s]*"
    r"(?:(?:approximately|about|exactly|simply|just|equal to)\s+)?"
)
END = re.compile(
    r"\.(?=\s|$)|!(?=\s*$|\s+[A-Z])|\n|;\s|,?\s+(?:because|since|as|which|where|so|when|given|note)\b"
    r"|,?\s+\((?!mod)(?=[a-z]{2})|\s+[-–—]\s+(?=[A-Za-z])"
)
"""The end of an answer in a sentence: a full stop, a reason, a note."""
_INLINE = r"(?<!\\)\$(?![\s$])[^$\n]+?(?<!\s)\$(?!\d)|\\\((?:.+?)\\\)"
DISPLAY = re.compile(
    rf"\$\$(?:.+?)\$\$|\\\[(?:.+?)(?<!\\)\\\]|\\begin\{{({_ROWS})\}}.+?\\end\{{\1\}}"
    rf"|(?:{_INLINE})(?:(?:,|\s|and|or)*(?:{_INLINE}))*",
    re.DOTALL,
)


def spelled_plainly(text: str) -> str:
    """Return the one spelling of an expression."""
    text = _joined_rows(plain_characters(text).translate(SIGNS))
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    text = re.sub(r"^\s*(?:=|\\approx(?![a-z]))", "", text)
    if label := LABEL.match(text):
        name = "".join(label[0].split())  # a symbol of its own for each name
        text = f"l_{{{crc32(name.encode())}}}{text[label.end() :]}"
    return text.strip().rstrip(" .,:").lstrip(",: ")


def answer_in(text: str) -> str | None:
    """Return the expression that a text gives as its answer; None where it gives none.

    Of a completion with `<answer>` only that is read. The last box counts, else what follows "####"
    or "the answer is", else the last formula, else the last line, or its last number if it is a
    sentence. Boxes with only "and" or commas between them are one list.
    """
    text = text.rpartition("</think>")[2].rpartition("<answer>")[2].partition("</answer>")[0]
    text = re.sub(r"\$\s*\\(?:blacksquare|square)\s*\$|\\blacksquare", "", text)
    text = re.sub(r"(?<![\w)}])\*\*|\*\*(?![\w(\\-])|__|`", "", text)
    if (boxed := _last_boxes(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    for start in reversed([match.end() for match in ANSWER.finditer(text)]):
        if (answer := _sentence(text[start:])) and not JUDGES.match(answer):
            return answer
    if formulas := [match[0] for match in DISPLAY.finditer(text)]:
        return formulas[-1]
    return _of_last_line(text)


def _last_boxes(text: str) -> str | None:
    """Return the content of the last box, and of those that form a list with it."""
    boxes: list[str] = []
    begin = len(text)
    for match in reversed([*re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{", text)]):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0) * (text[end - 1] != "\\")
            end += 1
        between = re.sub(r"\$|\\[()]|\b[a-z]\s*=|\\text|[{}]", "", text[end:begin])
        if depth or (boxes and not re.fullmatch(r"\s*(?:,|\band\b|\bor\b)[\s,andor]*", between)):
            break
        boxes.insert(0, text[match.end() : end - 1])
        begin = match.start()
    if boxes or "\\boxed" in text:
        return ", ".join(boxes)
    return None


def _sentence(text: str) -> str:
    """Return the answer at the beginning of a text, without what follows it."""
    if display := DISPLAY.match(text):
        unit = re.match(r"\s*[a-zA-Z°%]+(?=[.,\s]|$)", text[display.end() :])
        follows = unit is not None and not END.match(text[display.end() :])
        return display[0] + (unit[0] if follows and unit and display[0][0] == "$" else "")
    end = END.search(text)
    return text[: end.start() if end else len(text)].strip()


def _of_last_line(text: str) -> str | None:
    line = text.strip().rpartition("\n")[2].rstrip(". ").replace(r"\$", "$")
    if not re.search(rf"(?<![\\a-zA-Z])(?!(?:{_NAMES})(?![a-zA-Z]))[a-zA-Z]{{2,}}", line):
        return line or None
    if "=" in line:
        return _sentence(line.rpartition("=")[2].strip())
    if "\\" in line:
        return None
    number = last_match(TOKEN, line)
    return number[0] if number else line


def _joined_rows(text: str) -> str:
    r"""Make one row of those of an environment: `x &= 1 \\ &= 2` is `x = 1 = 2`, others a list."""
    text = re.sub(rf"\\(?:begin|end)\{{(?:{_ROWS})\}}", " ", text)
    if "\\begin" in text:
        return text
    text = re.sub(r"\\\\(?:\s*\[[\w.]+\])?\s*(?:&\s*)?(?=[=<>]|\\[lg]e)", " ", text)
    if "&=" in text.replace(" ", "") or "\\\\" in text:
        text = text.replace("&", " ")
    return re.sub(r"\\\\(?![a-zA-Z])", ", ", text)


def _repeating(whole: str, digits: str, period: str) -> str:
    r"""Return 0.1\overline{6} as a fraction."""
    nines = (10 ** len(period) - 1) * 10 ** len(digits)
    number = int(f"{whole}{digits}{period}") - int(f"{whole}{digits}" or 0)
    return rf"\frac{{{number}}}{{{nines}}}"
