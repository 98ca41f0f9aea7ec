"""Tests of `make setup`: the lock file, and where torch comes from.

The real Makefile runs on a stand-in for Python, whose environments hold a `pip`, a `uv` and a
`python` that write their arguments down and fail as a test wants; one test takes the real ones and
a stand-in for the public index.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0+cpu"
FALLBACK = f"uv pip install --python .venv/bin/python --no-deps --torch-backend cpu {TORCH}"
UV = "pip install --quiet uv=="
REST = "uv pip install --quiet --python .venv/bin/python --no-deps -r deploy/locks/cpu.txt"
REST_BY_PIP = "pip install --quiet --no-deps --no-compile -r deploy/locks/cpu.txt"

PYTHON = """#!/bin/sh
mkdir -p .venv/bin
for name in pip uv python; do
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


def test_torch_comes_from_the_indexes_of_pip_where_they_have_it_and_the_rest_by_uv(checkout):
    finished, calls = setup(checkout, fails="^nothing")
    assert finished.returncode == 0, finished.stderr
    assert calls[0] == f"pip install --quiet --no-deps --no-compile {TORCH}"
    assert calls[1].startswith(UV)
    assert calls[2] == REST
    assert REST_BY_PIP not in calls


@pytest.mark.parametrize("fails", [f"^{UV}", r"^uv .* -r"], ids=["no uv", "uv's index lacks one"])
def test_pip_installs_the_rest_where_uv_cannot(checkout, fails):
    finished, calls = setup(checkout, fails)
    assert finished.returncode == 0, finished.stderr
    assert REST_BY_PIP in calls


def test_torch_comes_from_the_index_of_pytorch_where_pip_does_not_find_it(checkout):
    finished, calls = setup(checkout, fails=r"^pip .* torch==")
    assert finished.returncode == 0, finished.stderr
    assert calls[0].endswith(TORCH)
    assert calls[1].startswith(UV)
    assert calls[2] == FALLBACK
    assert REST in calls
    assert f"pip could not install {TORCH}" in finished.stdout


@pytest.mark.parametrize(
    ("fails", "last"),
    [
        (r"^uv|pip .* torch==", FALLBACK),
        (r"-r deploy/locks/cpu\.txt", REST_BY_PIP),
    ],
    ids=["torch", "rest"],
)
def test_a_setup_that_failed_is_tried_again(checkout, fails, last):
    finished, calls = setup(checkout, fails)
    assert finished.returncode != 0
    assert calls[-1] == last
    finished, calls = setup(checkout, fails="^nothing")
    assert finished.returncode == 0, finished.stderr
    assert REST in calls


class PublicIndex(SimpleHTTPRequestHandler):
    """A package index that is a folder, and a proxy that lets nobody through."""

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()

    def do_CONNECT(self):
        self.server.asked.append(self.path)
        self.send_error(403)

    def log_message(self, *_):
        pass


@contextmanager
def public_index(folder):
    """Serve an index on this machine."""
    handler = partial(PublicIndex, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_where_the_index_has_only_cuda_builds_uv_asks_pytorchs_own_index(checkout, tmp_path):
    """No configuration of pip is there; the wheel of uv comes from this machine's own indexes."""
    uv = re.search(r"^UV := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "wheels"]
    subprocess.run([*download, uv], cwd=tmp_path, check=True, timeout=300)
    [wheel] = (tmp_path / "wheels").glob("uv-*.whl")
    cuda = "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    for package, name in (("torch", cuda), ("uv", wheel.name)):
        folder = tmp_path / "index" / "simple" / package
        folder.mkdir(parents=True)
        shutil.copy(wheel, folder / name)
    with public_index(tmp_path / "index") as index:
        here = f"127.0.0.1:{index.server_port}"
        finished = subprocess.run(
            ["make", "setup", f"PYTHON={sys.executable}"],
            cwd=checkout,
            env={
                "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": f"http://{here}/simple/", "PIP_NO_CACHE_DIR": "1",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                "HTTPS_PROXY": f"http://{here}", "NO_PROXY": "127.0.0.1", "UV_HTTP_RETRIES": "0",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )  # fmt: skip
        asked = list(dict.fromkeys(index.asked))
    assert finished.returncode != 0
    assert f"No matching distribution found for {TORCH}" in finished.stderr
    assert asked[:3] == ["/simple/torch/", "/simple/uv/", f"/simple/uv/{wheel.name}"]
    assert asked[3:] == ["download.pytorch.org:443"], finished.stderr
    assert "https://download.pytorch.org/whl/cpu/torch/" in finished.stderr


def test_the_lock_pins_one_build_of_torch():
    lock = (ROOT / "deploy" / "locks" / "cpu.txt").read_text().splitlines()
    assert [line for line in lock if line.startswith("torch==")] == [TORCH]


def test_the_environment_for_gpus_is_made_anew_since_two_builds_of_vllm_have_one_name(checkout):
    finished = subprocess.run(
        ["make", "--dry-run", "setup-gpu"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    made, filled, *_ = finished.stdout.splitlines()
    assert made.endswith("-m venv --clear .venv")
    assert filled.endswith("-r deploy/locks/gpu.txt")
