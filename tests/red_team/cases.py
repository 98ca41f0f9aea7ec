"""Hostile completions, with the outcomes that each may have.

An outcome is "0", "1" or "part" (a score between), or "failed" (the rollout fails); a run never
ends, nothing runs outside the sandbox, no secret is read, and the next answer is scored as ever.
"""

from typing import Any, NamedTuple

MARK = "/tmp/headway-red-team-mark"
"""File that code in a text tries to make."""
SECRET = "RED_TEAM_SECRET"
"""Name of a secret variable of the environment."""
NOT_RIGHT = frozenset({"0", "part"})
"""No text below is a right answer; a few tasks of reasoning-gym pay a hundredth for any answer."""
ZERO = frozenset({"0"})


class Completion(NamedTuple):
    """A hostile completion, for one reward."""

    kind: str
    name: str
    reward: str
    text: str
    allowed: frozenset[str] = NOT_RIGHT
    options: dict[str, Any] = {}  # noqa: RUF012
    task: str = ""
    """Of reasoning-gym."""
    answer: str = "7"
    metadata: dict[str, Any] = {}  # noqa: RUF012

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.reward, self.task, self.name)))


EVALUATED = (
    "countdown", "puzzle24", "string_insertion", "spiral_matrix", "binary_matrix", "n_queens",
    "simple_integration", "intermediate_integration", "polynomial_multiplication",
)  # fmt: skip
"""Tasks of reasoning-gym 0.1.25 whose verifiers call `eval` or `parse_expr` on the answer."""
SHELL = f"touch {MARK}; echo ${SECRET} >> {MARK}"
CODE = {
    "shell": f"__import__('os').system({SHELL!r})",
    "shell through builtins": f"abs.__self__.__import__('os').system({SHELL!r})",
    "shell through lambdify": f'lambdify((), \'__import__("os").system("touch {MARK}")\')()',
    "secret": f"open({MARK!r}, 'w').write(__import__('os').environ.get({SECRET!r}, ''))",
    "secret of the parent": (
        f"open({MARK!r}, 'wb').write(open('/proc/%d/environ' % __import__('os').getppid(), 'rb')"
        ".read())"
    ),
    "socket": "__import__('socket').create_connection(('127.0.0.1', 22))",
    # Signal 0 kills nobody, where a barrier is down; the file shows that it was.
    "signal to the parent": (
        f"(__import__('os').kill(__import__('os').getppid(), 0), open({MARK!r}, 'w'))"
    ),
    "signal to all": f"(__import__('os').kill(-1, 0), open({MARK!r}, 'w'))",
    "fork": "[__import__('os').fork() for _ in range(9)]",
    "end the process": "__import__('os')._exit(0)",
    "rewrite the verifier": (
        "[setattr(c, 'score_answer', lambda *a, **k: 1.0) for c in object.__subclasses__() "
        "if hasattr(c, 'score_answer')]"
    ),
    "rewrite every module": (
        "[setattr(v, 'score_answer', lambda *a, **k: 1.0) for m in "
        "list(__import__('sys').modules.values()) for v in list(vars(m).values()) "
        "if isinstance(v, type) and hasattr(v, 'score_answer')]"
    ),
    "write the score": (
        "[__import__('os').write(n, b'ready\\n{\"score\": 1.0, \"spent\": false}\\n') "
        "for n in range(3, 9)]"
    ),
    "class walk": "().__class__.__base__.__subclasses__()",
    "format string": "'{0.__class__.__init__.__globals__}'.format(abs)",
    "sleep": "__import__('time').sleep(3600)",
    "lambda": "(lambda: (yield))()",
    "walrus": "(x := __import__('os'))",
    "decorated name": "\u212f\u0076\u0061\u006c('1')",
    "nested eval": "eval(compile('1', 'x', 'eval'))",
    "sympify": f'sympify(\'__import__("os").system("touch {MARK}")\')',
}
SLOW = {
    "tower of powers": "$2^{3^{4^{5^{6}}}}$",
    "python tower": "9**9**9**9",
    "factorial": "$100000000!$",
    "factorial of a factorial": "$((20!)!)!$",
    "large product": "$\\prod_{n=1}^{10^9} n$",
    "large sum": "$\\sum_{n=1}^{10^{12}} \\sin(n)$",
    "binomial": "$\\binom{10^9}{5 \\cdot 10^8}$",
    "nested fractions": "$" + "\\frac{1}{" * 3000 + "2" + "}" * 3000 + "$",
    "nested roots": "$" + "\\sqrt{" * 3000 + "2" + "}" * 3000 + "$",
    "nested parentheses": "$" + "(" * 5000 + "1" + ")" * 5000 + "$",
    "open parentheses": "(" * 200_000,
    "long number": "9" * 200_000,
    "many expressions": "$x$ " * 20_000,
    "deep set": "$" + "\\{" * 2000 + "1" + "\\}" * 2000 + "$",
    "large matrix": "$\\begin{pmatrix}" + "1 & " * 5000 + "1\\end{pmatrix}^{100}$",
    "polynomial power": "$(x+y+z+1)^{2000}$",
    "integral": "$\\int_0^1 \\sin(x^{x^{x^x}}) e^{\\tan(x^x)} dx$",
    "unbalanced boxes": "\\boxed{" * 20_000,
    "dollars": "$" * 50_000,
    "percent": "%" * 50_000,
    "exponent": "1e999999999",
    "not a number": "nan",
    "zero division": "$\\frac{1}{0}$",
}


def _completions() -> list[Completion]:
    first, *others = EVALUATED
    cases = [Completion("code", name, "reasoning_gym", f"<answer>{text}</answer>", task=first)
             for name, text in CODE.items()]  # fmt: skip
    cases += [
        Completion("code", name, "reasoning_gym", f"<answer>{CODE[name]}</answer>", task=task)
        for task in others
        for name in ("shell", "shell through builtins", "secret", "rewrite every module")
    ]
    cases += [
        Completion("code", name, "math_verify", text, ZERO)
        for name, code in CODE.items()
        for text in (f"$\\boxed{{{code}}}$",)
        if name in ("shell", "secret", "rewrite the verifier", "sympify", "class walk")
    ]
    cases += [Completion("slow", name, "math_verify", text, ZERO) for name, text in SLOW.items()]
    powers = {"tower": "9**9**9**9", "shift": "1<<10**10", "factorial": "factorial(10**9)",
              "long": "1+" * 50_000 + "1", "deep": "(" * 5000 + "1" + ")" * 5000,
              "negative power": "2**-10**10", "text": "'a'*10**10",
              "list": "[1]*10**10"}  # fmt: skip
    cases += [
        Completion("slow", name, "reasoning_gym", f"<answer>{text}</answer>", task=task)
        for name, text in powers.items()
        for task in ("countdown", "n_queens")
    ]
    cases += [
        Completion("slow", name, "regex", text, ZERO, options={"pattern": pattern})
        for name, pattern, text in (
            ("nested quantifiers", "(a+)+b", "a" * 60),
            ("alternatives", "(a|aa)+$", "a" * 200 + "!"),
            ("back reference", r"(.*)(.*)(.*)\1\2\3x", "a" * 2000),
            ("a pattern of the answer", "(?P<answer>(x+x+)+y)", "x" * 60),
        )
    ]
    schema = {"type": "object", "properties": {"s": {"pattern": "^(a+)+$"}}, "required": ["s"]}
    cases += [
        Completion("slow", name, "json_schema", text, ZERO, options={"schema": given})
        for name, given, text in (
            ("pattern", schema, '{"s": "' + "a" * 60 + '!"}'),
            ("deep", schema, "[" * 200_000),
            ("deep object", schema, '{"s":' * 50_000 + "1" + "}" * 50_000),
            ("unique items", {"type": "array", "uniqueItems": True, "maxItems": 1},
             "[" + ",".join(f'{{"a": [{n}]}}' for n in range(20_000)) + "]"),
            ("multiple of", {"multipleOf": 0.1, "maximum": 0}, "1e308"),
            ("long number", {"type": "integer", "maximum": 0}, "9" * 100_000),
            ("lone surrogate", {"type": "object"}, '"\\ud800"'),
        )
    ]  # fmt: skip
    cases += [
        Completion("slow", "long", "similarity", "ab" * 2_000_000, NOT_RIGHT, answer="ba" * 50_000),
        Completion("text", "NUL", "math_verify", "\0$8$\0", ZERO),
        Completion("text", "right to left", "math_verify", "\u202e$8$\u202c", ZERO),
        Completion("text", "escape codes", "regex", "\x1b[2J", ZERO, options={"pattern": "7"}),
        Completion("text", "empty", "math_verify", "", ZERO),
        Completion("text", "replacement", "numeric_match", "\ufffd" * 1000, ZERO),
        Completion("text", "digits of other scripts", "numeric_match", "٨" * 5000, ZERO),
        Completion("text", "digits", "numeric_match", "8" * 5000, ZERO),
        Completion("text", "exponent", "numeric_match", "1e999", ZERO),
        Completion("text", "division", "numeric_match", "1/" + "0" * 900, ZERO),
        Completion("text", "open tags", "tags", "<think>" * 20_000, ZERO),
        Completion("text", "equals", "last_answer", "=" * 50_000, ZERO),
    ]
    cases += [
        Completion("program", name, "code", program, ZERO, metadata={"tests": TESTS})
        for name, program in PROGRAMS.items()
    ]
    return cases


TESTS = ["assert add(1, 2) == 3"]
PROGRAMS = {
    "shell": f"import os\nos.system({SHELL!r})\ndef add(a, b): return 0",
    "forged answer": "print('[3]')",
    "lone surrogate": "print('\\ud800')",
    "deep syntax": "(" * 10_000,
}

COMPLETIONS = _completions()
