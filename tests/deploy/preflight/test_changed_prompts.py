"""Prompts or held-out problems that changed between two sessions of a run: refused, or stated."""

import asyncio
import json

import pytest

from deploy.config.loader import load_recipe
from deploy.driver.evaluations import queue_all
from deploy.preflight.inputs import load_inputs
from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from tests.deploy.preflight.test_inputs import make_warm_start, write_lines
from tests.deploy.trained import create

DRAWN = 14
NEW_EPOCH = 'prompts.on_change="new_epoch"'


class Begun:
    """A run whose only session queued its evaluations and some prompts, and was killed."""

    def __init__(self, folder, tiny_model, *, own_heldout=True):
        self.train, self.test = folder / "train.jsonl", folder / "test.jsonl"
        write_lines(self.train, [f"p{i}" for i in range(20)])
        write_lines(self.test, [f"p{i}" for i in range(0, 20, 4)])
        heldout = "heldout.source=files", f"heldout.source_options={{path='{self.test}'}}"
        self.recipe = [
            f"deploy.runs_dir={folder}",
            "prompts.source=files",
            f"prompts.source_options={{path='{self.train}'}}",
            *(() if own_heldout else heldout),
            "heldout.size=3",
            "heldout.final_size=5",
        ]
        make_warm_start(self.config(), tiny_model)
        self.directory = create(self.config())
        opened = load_inputs(self.config()).prompts
        self.problems = opened.problems
        asyncio.run(self.issue(opened))

    def config(self, *settings):
        return load_recipe("demo", [*self.recipe, *settings])

    def broker(self, session=None):
        spec = RunSpec(groups_per_batch=2, group_size=2, steps=100)
        return Broker(self.directory.path, config=QueuesConfig(), spec=spec, session=session)

    async def issue(self, opened):
        broker = self.broker()
        await queue_all(broker, opened.evaluations, opened.problems)
        self.issued = opened.source.next(DRAWN)
        await broker.issue(self.issued, cursor=opened.source.cursor())
        await broker.close()

    def resume(self, *settings):
        return load_inputs(self.config(*settings), resumed=self.directory)


@pytest.fixture(params=[True, False], ids=["held out of the table", "held out of another"])
def begun(request, tmp_path, tiny_model):
    return Begun(tmp_path, tiny_model, own_heldout=request.param)


def test_prompts_that_are_the_same_go_on_where_they_were(begun):
    inputs = begun.resume()
    rest = 15 - DRAWN
    epoch = {prompt.prompt_id for prompt in (*begun.issued, *inputs.prompts.source.next(rest))}
    assert len(epoch) == 15
    assert inputs.prompts.problems == begun.problems


def test_a_prompt_file_that_changed_is_refused_before_anything_starts(begun):
    ledger = begun.directory.ledger.read_bytes()
    write_lines(begun.train, [f"p{i}" for i in range(21)])
    with pytest.raises(ValueError, match=r"p\w*\.on_change=\"new_epoch\"") as caught:
        begun.resume()
    assert caught.value.exit_code == 2
    assert begun.directory.ledger.read_bytes() == ledger


def test_what_changed_is_named(tmp_path, tiny_model):
    begun = Begun(tmp_path, tiny_model, own_heldout=False)
    before = begun.train.read_bytes()
    write_lines(begun.train, [f"p{i}" for i in range(21)])
    with pytest.raises(ValueError, match=r"train.jsonl: 20 prompts, \w+ before, 21 prompts"):
        begun.resume()
    begun.train.write_bytes(before)
    write_lines(begun.test, [f"p{i}" for i in range(1, 20, 4)])
    with pytest.raises(
        ValueError, match=r"heldout.source = 'files': the held-out problems are not"
    ):
        begun.resume()


@pytest.mark.parametrize("changed", ["train", "test", "both"])
def test_a_new_epoch_repeats_nothing_and_trains_no_held_out_problem_of_either(begun, changed):
    if changed != "test":
        write_lines(begun.train, [f"p{i}" for i in reversed(range(40))])
    if changed != "train":
        write_lines(begun.test, [f"p{i}" for i in range(1, 20, 4)])
    inputs = begun.resume(NEW_EPOCH)
    assert inputs.prompts.problems == begun.problems
    assert {problem.text for problem in inputs.prompts.problems} == {p.text for p in begun.problems}
    with_heldout_file = "heldout.source=files" in begun.recipe
    now = {f"p{i}" for i in range(40 if changed != "test" else 20)}
    now -= {problem.text for problem in begun.problems}
    if with_heldout_file and changed != "train":
        now -= {f"p{i}" for i in range(1, 20, 4)}
    texts = [prompt.text for prompt in inputs.prompts.source.next(2 * len(now))]
    assert not set(texts) & {problem.text for problem in begun.problems}
    assert set(texts) <= now
    if changed != "test":
        ids = {prompt.prompt_id for prompt in begun.issued}
        assert not ids & {prompt.prompt_id for prompt in inputs.prompts.source.next(60)}


def test_after_a_new_epoch_began_the_run_goes_on_without_the_setting(begun):
    write_lines(begun.train, [f"p{i}" for i in range(21)])

    async def issue():
        inputs = begun.resume(NEW_EPOCH)
        spec = RunSpec(groups_per_batch=2, group_size=2, steps=100)
        broker = Broker(begun.directory.path, config=QueuesConfig(), spec=spec)
        inputs.prompts.source.next(3)
        await broker.issue([], cursor=inputs.prompts.source.cursor(), last=True)
        await broker.close()
        return [prompt.prompt_id for prompt in inputs.prompts.source.next(2)]

    following = asyncio.run(issue())
    own = "heldout.source=files" not in begun.recipe  # so its held-out problems are others now
    inputs = begun.resume(*([NEW_EPOCH] if own else []))
    assert [prompt.prompt_id for prompt in inputs.prompts.source.next(2)] == following


def test_a_run_that_issued_nothing_takes_the_present_prompts(tmp_path, tiny_model):
    begun = Begun(tmp_path, tiny_model)
    begun.directory.ledger.unlink()
    write_lines(begun.train, [f"p{i}" for i in range(40, 60)])
    assert len(begun.resume().prompts.problems) == 5


def test_a_new_run_takes_no_warm_start_of_other_examples_or_held_out_problems(tmp_path, tiny_model):
    for name in ("train", "test", "sft"):
        write_lines(tmp_path / f"{name}.jsonl", [f"p{i}" for i in range(20)])
    config = load_recipe(
        "demo",
        [
            f"deploy.runs_dir={tmp_path}",
            f"sft.demonstrations={tmp_path}/sft.jsonl",
            "sft.options={}",
            "heldout.source=files",
            f"heldout.source_options={{path='{tmp_path}/test.jsonl'}}",
            "heldout.size=5",
            "heldout.final_size=5",
        ],
    )
    make_warm_start(config, tiny_model)
    load_inputs(config)
    for name in ("sft", "test"):
        file = tmp_path / f"{name}.jsonl"
        before = file.read_bytes()
        write_lines(file, [f"p{i}" for i in range(1, 20)])
        message = rf"was made with another .*{name}.jsonl \(\d+ bytes.*`headway sft --replace`"
        with pytest.raises(ValueError, match=message):
            load_inputs(config)
        file.write_bytes(before)
    (tmp_path / "sft.jsonl").unlink()  # nothing needs it any more
    load_inputs(config)


def test_a_model_that_changed_between_two_sessions_is_refused(tmp_path, tiny_model):
    begun = Begun(tmp_path, tiny_model, own_heldout=False)
    row = {"version": 0, "recipe": {}, "models": dict(begun.resume().models)}
    asyncio.run(begun.broker(session=json.dumps(row)).close())
    begun.resume()
    weights = begun.config().warm_start / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"the model of \w+ is not that of its last session"):
        begun.resume()
