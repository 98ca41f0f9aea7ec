"""Makes the helpers of this folder importable under pytest's importlib mode; a broken launcher."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def change_launcher(monkeypatch, tmp_path):
    """Return a function that replaces a text of the sandbox's launcher."""
    from actors.sandbox import sandbox

    def change(old, new):
        text = sandbox.LAUNCHER.read_text()
        assert text.count(old) == 1
        (tmp_path / "launcher.py").write_text(text.replace(old, new))
        for name in ("linux.py", "system_calls.py"):
            shutil.copy(sandbox.LAUNCHER.with_name(name), tmp_path)
        monkeypatch.setattr(sandbox, "LAUNCHER", tmp_path / "launcher.py")

    return change
