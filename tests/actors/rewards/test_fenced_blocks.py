"""Which block of a completion is the program or the JSON document."""

import time

import pytest

from actors.rewards.fenced_blocks import read_block

PYTHON = [
    ("no fence", "print(1)\n", None),
    ("plain", "```python\nX\n```", "X\n"),
    *(
        (info, f"Here:\n```{info}\nX\n```\nDone.", "X\n")
        for info in (
            "", "py", "python3", "Python", "PYTHON", "Py", "python3.11", " python ", "python\t",
            'python title="x"', "{.python}", "{.python .numberLines}", "{python}", "python,ignore",
            "python:main.py", "python{1,3}", "{#main .python}", "Python 3", "python3 -u",
        )
    ),
    ("tildes", "~~~python\nX\n~~~", "X\n"),
    ("CRLF", "Here:\r\n```python\r\nX\r\nY\r\n```\r\n", "X\nY\n"),
    ("longer closing", "```python\nX\n`````\n", "X\n"),
    ("shorter closing", "````python\nX\n```\nY\n````\n", "X\n```\nY\n"),
    ("other character", "```python\nX\n~~~\nY\n```", "X\n~~~\nY\n"),
    ("closing with info", "```python\nX\n```text\nY\n```", "X\n```text\nY\n"),
    ("fence in a string", "```python\nX = '''\n    ```\n'''\n```", "X = '''\n    ```\n'''\n"),
    ("backticks in a line", "```python\nX = '```'\n```", "X = '```'\n"),
    ("indented", "   ```python\n   X\n     Y\n   ```", "X\n  Y\n"),
    ("in a list", "1. Run:\n\n   ```python\n   X\n   ```\n2. Done.", "X\n"),
    ("in a list, deeper", "- Run:\n    ```python\n    X\n    ```", "X\n"),
    ("in a quote", "> ```python\n> X\n> ```", "X\n"),
    ("tabs", "```python\nif X:\n\tY\n```", "if X:\n\tY\n"),
    ("empty lines", "```python\n\nX\n\n\nY\n```", "\nX\n\n\nY\n"),
    ("after a colon", "Program: ```python\nX\n```", "X\n"),
    ("after a tag", "<answer>```python\nX\n```</answer>", "X\n"),
    ("closed on its line", "```python\nX```\nDone.", "X\n"),
    ("bash before", "```bash\nls\n```\nThen:\n```python\nX\n```", "X\n"),
    ("JSON before", "```json\n{}\n```\n```py\nX\n```", "X\n"),
    ("no language before", "```\nls\n```\n```python\nX\n```", "X\n"),
    ("output after", "```python\nX\n```\nOutput:\n```\n1\n```", "X\n"),
    ("text after", "```python\nX\n```\n```text\n1\n```", "X\n"),
    ("JavaScript after", "```python\nX\n```\n```javascript\nY\n```", "X\n"),
    ("two programs", "```python\nX\n```\nBetter:\n```python3\nY\n```", "Y\n"),
    ("two without language", "```\nX\n```\n```\nY\n```", "Y\n"),
    ("not closed", "Here:\n```python\nX\n", "X\n"),
    ("not closed, cut", "```python\nX\n```\n```python\nY = (", "Y = ("),
    ("output not closed", "```python\nX\n```\n```\n1", "X\n"),
    ("other languages only", "```bash\nls\n```", None),
    ("inline", "Use ```python X``` here", None),
    ("prose between", "```python\nX\n```\nSee `X` and ``Y``.\n", "X\n"),
    ("a page around", "````markdown\n# Run\n```python\nX\n```\n````", "X\n"),
    ("a page around, cut short", "```md\n```python\nX\n```\nDone.\n```", "X\n"),
    ("white space after", "```python  \nX\n```  \nDone.", "X\n"),
    ("output with a name", "```python\nX\n```\n```output\n1\n```\n```\n2\n```", "X\n"),
    ("empty", "```python\n```", ""),
    ("thought before", "<think>\n```python\nX\n```\n</think>\n```python\nY\n```", "Y\n"),
]  # fmt: skip


@pytest.mark.reported("fenced_blocks")
@pytest.mark.parametrize(
    ("completion", "expected"), [row[1:] for row in PYTHON], ids=[row[0] for row in PYTHON]
)
def test_the_block_of_the_wanted_language_counts(completion, expected):
    assert read_block(completion, "python", "py") == (completion if expected is None else expected)


@pytest.mark.parametrize("info", ["json", "JSON", "Json", "jsonc", "json5", "", "{.json}"])
def test_a_language_has_several_names(info):
    completion = f"```python\nX\n```\n```{info}\n{{}}\n```\n```bash\nls\n```"
    assert read_block(completion, "json", "jsonc") == "{}\n"


@pytest.mark.parametrize(
    "text",
    ["`" * 200_000, "```\n" * 50_000, "- " * 100_000, ">" * 200_000, "~~~a\n```b\n" * 20_000,
     "a: " * 60_000, "<a" * 100_000, "1. " * 60_000, " " * 200_000, "\n" * 200_000,
     "a" * 200_000, "x ```" * 40_000, "a " * 100_000 + "`"],
)  # fmt: skip
def test_a_hostile_text_is_read_in_time(text):
    begun = time.process_time()
    read_block(text, "python")
    assert time.process_time() - begun < 5.0
