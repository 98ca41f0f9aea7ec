"""The peak memory of processes by the titles of their roles."""

import subprocess
import sys

import psutil

from deploy.runtime.peak_memory import peaks
from headway.roles import Role
from tests.waiting import until

HELD = "import time; held = bytearray(64 << 20); del held; print(flush=True); time.sleep(99)"


def test_peaks_are_summed_by_role_and_of_no_other_process():
    titles = ("ray::RolloutActor", "VLLM::EngineCore", "ray::BrokerActor")
    program = f"{sys.executable} -c '{HELD}'"
    script = "".join(f"(exec -a '{title}' {program}) & " for title in titles) + "wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            for _ in titles:
                process.stdout.readline()
            measured = until(lambda: peaks(psutil.Process()))
            assert measured.keys() == {Role.ACTOR}
            assert 2 * 64 * 2**20 < measured[Role.ACTOR] < 3 * 2**30
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
