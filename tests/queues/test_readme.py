"""The example of the package's page runs."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "queues" / "README.md"


def test_the_example_trains_its_group(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out == "['g00000001']\n1\n"
