"""`headway bench generate`: the same requests in every arm, ratios inside a round, and a trial."""

import json
import subprocess
import sys

import pytest

from benchmarks.generate import CHARACTERS, Sampled, figures_of, prompts_of
from benchmarks.generate_arms import length_of
from deploy.bench import ROOT


def test_lengths_are_the_same_wherever_they_are_asked():
    asked = [length_of([3, 5, prompt], index, 160) for prompt in range(40) for index in range(8)]
    again = [length_of((3, 5, prompt), index, 160) for prompt in range(40) for index in range(8)]
    assert asked == again
    assert min(asked) >= 1
    assert max(asked) == 160
    assert len(set(asked)) > 50


def test_no_prompt_comes_twice_and_all_can_be_read():
    texts = [prompt.text for version in range(3) for prompt in prompts_of(version, 50)]
    assert len(set(texts)) == 150
    assert set("".join(texts)) <= set(CHARACTERS)


def test_ratios_are_medians_of_those_of_each_round():
    rounds = [
        {"offline": Sampled(1.0, 100, 3.0), "loop": Sampled(2.0, 100, 4.0)},
        {"offline": Sampled(4.0, 100, 1.0), "loop": Sampled(4.0, 100, 1.0)},
        {"offline": Sampled(2.0, 200, 1.0), "loop": Sampled(2.5, 200, 2.0)},
    ]
    found = figures_of(rounds)
    assert found["of_offline"] == {"loop": 0.8}
    assert found["of_offline_cpu"] == {"loop": 0.75}
    assert found["tokens_per_second"] == {"offline": 100.0, "loop": 50.0}


def test_arms_that_sampled_different_numbers_are_not_compared():
    with pytest.raises(ValueError, match="different numbers of tokens"):
        figures_of([{"offline": Sampled(1.0, 100, 1.0), "loop": Sampled(2.0, 101, 1.0)}])


@pytest.mark.slow
@pytest.mark.vllm
def test_the_loop_is_measured_beside_the_engine_alone(tmp_path):
    file = tmp_path / "generate.json"
    command = [sys.executable, "-m", "benchmarks.generate", "--rounds", "1", "--groups", "4"]
    done = subprocess.run(
        [*command, "--learner-core", "0", "--output", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert set(found["of_offline"]) == {"loop", "contended"}
    (only,) = found["raw"]
    assert len({each["tokens"] for each in only.values()}) == 1
