"""Tests of `make setup`: the lock file, and where torch comes from.

The real Makefile runs on a stand-in for Python, whose environments hold a `pip` and a `uv` that
write their arguments down and fail as a test wants.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0+cpu"
FALLBACK = f"uv pip install --python .venv/bin/python --no-deps --torch-backend cpu {TORCH}"
REST = "pip install --quiet --no-deps -r deploy/locks/cpu.txt"

PYTHON = """#!/bin/sh
mkdir -p .venv/bin
for name in pip uv; do
    cat > .venv/bin/$name << 'END'
#!/bin/sh
echo "$(basename $0) $*" >> calls
if echo "$(basename $0) $*" | grep -q -E -e "$FAILS"; then exit 1; fi
END
    chmod +x .venv/bin/$name
done
"""


@pytest.fixture
def checkout(tmp_path):
    """Provide a folder with the Makefile, a lock of two packages and a stand-in for Python."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    lock = tmp_path / "deploy" / "locks" / "cpu.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"numpy==2.3.5\n{TORCH}\n")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(checkout, fails):
    """Run `make setup` where calls that match `fails` fail; give its end and the calls."""
    (checkout / "calls").unlink(missing_ok=True)
    finished = subprocess.run(
        ["make", "setup", "PYTHON=./python"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], "FAILS": fails},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    calls = (checkout / "calls").read_text().splitlines()
    assert (finished.returncode == 0) == (checkout / ".venv" / ".installed").exists()
    return finished, calls


def test_torch_comes_from_the_indexes_of_pip_where_they_have_it(checkout):
    finished, calls = setup(checkout, fails="^uv")
    assert finished.returncode == 0, finished.stderr
    assert calls[:2] == [f"pip install --quiet --no-deps {TORCH}", REST]
    assert not any("uv" in call for call in calls)


def test_torch_comes_from_the_index_of_pytorch_where_pip_does_not_find_it(checkout):
    finished, calls = setup(checkout, fails=r"^pip .*--no-deps torch==")
    assert finished.returncode == 0, finished.stderr
    assert calls[0].endswith(TORCH)
    assert calls[1].startswith("pip install --quiet uv==")
    assert calls[2:4] == [FALLBACK, REST]
    assert f"pip could not install {TORCH}" in finished.stdout


@pytest.mark.parametrize(
    ("fails", "last"),
    [
        (r"^uv|--no-deps torch==", FALLBACK),
        (r"-r deploy/locks/cpu\.txt", REST),
    ],
    ids=["torch", "rest"],
)
def test_a_setup_that_failed_is_tried_again(checkout, fails, last):
    finished, calls = setup(checkout, fails)
    assert finished.returncode != 0
    assert calls[-1] == last
    finished, calls = setup(checkout, fails="^uv")
    assert finished.returncode == 0, finished.stderr
    assert REST in calls


def test_the_lock_pins_one_build_of_torch():
    lock = (ROOT / "deploy" / "locks" / "cpu.txt").read_text().splitlines()
    assert [line for line in lock if line.startswith("torch==")] == [TORCH]
