"""`headway rollouts --open`: ids, figures, log-probabilities by version, and pages as trees."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch

from deploy.config.loader import load_recipe
from deploy.offline.rollout_page import draw_rollout, find_rollout
from deploy.offline.rollout_scores import describe_advantage
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from learner.batch.batch import read_batch
from learner.engine import checkpoint
from learner.model.logprobs import LogprobOptions
from learner.model.policy import load_policy
from learner.objective.objective import Objective
from queues.records import FinishReason, Segment
from tests.deploy.conftest import call_main
from tests.deploy.html_tree import read_page
from tests.deploy.trained import create
from tests.queues.conftest import begin_work, make_broker, make_group, make_rollout, payload_of

RECIPE = Path(__file__).parents[1] / "recipe.toml"
SETTINGS = ("name=mine", "learner.logprob_chunk=4", "actors.temperature=0.7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, build_model):
    """Return a folder with a run: two groups were trained at versions 1 and 0, another is ready."""
    folder = tmp_path_factory.mktemp("runs")
    model = build_model(characters="0123456789+=<>&/bi", seed=3)
    config = load_recipe(str(RECIPE), SETTINGS)
    recipe = config.model_copy(
        update={"sft": None, "model": config.model.model_copy(update={"path": model, "tiny": None})}
    ).updated(deploy={"runs_dir": folder / "runs"})
    directory = create(recipe)
    asyncio.run(fill(directory, model, build_model))
    return folder


def rollout(index, text, sampled, tokenizer, **more):
    """Return a rollout of a text; `sampled` has the version of the characters at some places."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    values = {
        "token_ids": ids, "prompt_length": min(sampled, default=len(ids)),
        "loss_mask": [i in sampled for i in range(len(ids))],
        "versions": [sampled.get(i, -1) for i in range(len(ids))],
        "behavior_logprobs": [-0.25 if i in sampled else 0.0 for i in range(len(ids))],
    }  # fmt: skip
    return make_rollout(index, **values | more)


async def fill(directory, model, build_model):
    from actors.engines.model_folder import load_tokenizer

    tokenizer = load_tokenizer(model)
    broker = make_broker(directory.path, groups_per_batch=1, steps=9, max_staleness=2)
    for version, lease in enumerate(await begin_work(broker, 3, capacity=6)):
        mixed = {4: 0, 5: version, 7: version}
        rollouts = [
            rollout(0, "2+2=45<b>&4", mixed, tokenizer, reward=1.0,
                    finish_reason=FinishReason.LENGTH, left_out={"undelivered": 7}),
            rollout(1, "2+2=4&7=9<i", {4: version, 6: version, 10: version}, tokenizer, reward=0.0,
                    segments=[Segment(5, 0, 4), Segment(8, 1, 6)]),
        ]  # fmt: skip
        await broker.put("a", payload_of(lease, rollouts))
        if version == 2:
            break
        await broker.take(version, 5.0)
        await broker.ack(version, {"weights_checksum": ""})
        await broker.serving("a", version + 1)
        if version == 0:
            partial = checkpoint.prepare(directory.checkpoints, 1)
            shutil.copytree(
                build_model(characters="0123456789+=<>&/bi", seed=4), partial, dirs_exist_ok=True
            )
            saved = checkpoint.finish(
                directory.checkpoints,
                checkpoint.State(
                    version=1, saved_at=0.0, optimizer_steps=1, ranks=1, zero_stage=0,
                    dtype="float32", cursor=None,
                ),
            )  # fmt: skip
            await broker.commit_checkpoint(1, f"checkpoints/{saved.name}")
    await broker.close()


@pytest.fixture
def directory(folder):
    return RunDirectory(folder / "runs" / "mine")


def drawn(directory, wanted):
    return read_page(draw_rollout(directory, wanted).read_text())


def facts(page):
    [section] = page.all(id="facts")
    return dict(section.rows())


def test_an_id_or_the_beginning_of_only_one_finds_its_rollout(directory):
    recorded, found = find_rollout(directory, "g00000002/1")
    assert (recorded.group.group_id, found.sample_index, recorded.trained_version) == (
        "g00000002", 1, 1,
    )  # fmt: skip
    assert find_rollout(directory, "g00000003/0")[0].state == "ready"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("g0000000", "begins more than one id: g00000001, g00000002, g00000003; write one"),
        ("g00000002", "begins more than one id: g00000002/0, g00000002/1; write one"),
        ("g00000002/7", "has such an id; did you mean 'g00000002/"),
        ("g0000002", "has such an id; did you mean 'g00000002'"),
        ("x", "has such an id; `headway rollouts` prints them, as g00000003/1"),
    ],
)
def test_other_ids_are_answered_by_those_that_are_near(folder, wanted, message):
    refused = call_main(["rollouts", "mine", "--open", wanted], folder)
    assert refused.returncode == 2
    assert message in " ".join(refused.stderr.split())


def test_the_listing_prints_the_ids_that_open(folder, directory, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    listed = call_main(["rollouts", "mine"], folder)
    assert listed.returncode == 0, listed.stderr
    [_, wanted] = [
        line.split(" · ")[1] for line in listed.stdout.splitlines() if line.startswith("── version")
    ]
    printed = call_main(["rollouts", "mine", "--open", wanted], folder)
    assert printed.stdout == f"{directory.path / 'rollouts' / 'g00000002-1.html'}\n"
    assert Path(printed.stdout.strip()).exists()


def test_the_page_says_what_is_known_of_the_rollout(directory):
    shown = facts(drawn(directory, "g00000002/0"))
    expected = {
        "prompt": "sums/0/1", "state": "trained at version 1", "lag": "1", "versions": "0 to 1",
        "reward": "1 (in its group: 1, 0)", "reward, exact": "1", "ended by": "length",
        "turns": "1", "tokens": "3 sampled, 8 given", "left out, undelivered": "7 tokens",
        "advantage": "+0.7071 (grpo)", "seconds": "1.0",
        "played by": "engine-0, single_turn, attempt 1",
    }  # fmt: skip
    assert expected.items() <= shown.items()
    assert facts(drawn(directory, "g00000003/1"))["lag"] == "not trained"


def test_the_page_needs_nothing_from_elsewhere_and_shows_text_as_text(directory):
    page = drawn(directory, "g00000002/0")
    assert not page.all("script")
    assert not page.all("b")
    assert not page.all("link")
    links = [a.attributes["href"] for a in page.all("a")]
    assert all(link.startswith("#") for link in links)
    style = page.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "".join(text.text for text in page.all(kind="text")) == "2+2=45<b>&4"


def test_sampled_tokens_are_coloured_by_version_and_others_are_plain(directory):
    page = drawn(directory, "g00000002/0")
    [legend] = page.all(id="legend")
    assert [chip.text.strip("\xa0") for chip in legend.all("span")] == ["0", "1"]
    spans = [span for text in page.all(kind="text") for span in text.all("span")]
    assert [(span.text, span.attributes["class"]) for span in spans] == [
        ("4", "v0"), ("5", "v1"), ("b", "v1"),
    ]  # fmt: skip
    assert ".v0 {" in page.all("style")[0].text
    assert [text.text for text in page.all(kind="text")] == ["2+2=", "45", "<", "b", ">&4"]


def test_log_probabilities_are_compared_with_the_weights_that_sampled_each_token(
    directory, build_model, tmp_path
):
    page, config = drawn(directory, "g00000002/0"), directory.config()
    _, found = find_rollout(directory, "g00000002/0")
    ids = torch.tensor(found.token_ids)
    rows = {int(row[0]): row for row in page.all(id="tokens")[0].rows()[1:]}
    assert rows.keys() == {4, 5, 7}
    options = LogprobOptions(chunk=4, temperature=0.7)
    for at, row in rows.items():
        version = found.versions[at]
        path = str(directory.checkpoints / "v000001") if version else config.model.path
        policy = load_policy(path, options, dtype="float32", attention="eager")
        learner = float(policy.own(ids)[at - 1].detach())
        assert row[1:4] == [str(int(ids[at])), str(version), "-0.2500"]
        assert float(row[4]) == pytest.approx(learner, abs=1e-4)
        assert float(row[5]) == pytest.approx(-0.25 - learner, rel=0.06)
        [span] = [x for x in page.all("span") if f"#{at} ·" in x.attributes.get("title", "")]
        assert (
            f"version {version} · log-prob -0.2500 · learner {row[4]} · gap {row[5]}"
            in (span.attributes["title"])
        )
    assert facts(page)["log-prob gap, engine less learner"].endswith("of 3 tokens")


def test_tokens_of_a_version_without_weights_have_no_gap_and_the_page_says_why(directory):
    page = drawn(directory, "g00000003/0")
    [problem] = page.all(kind="problem")
    assert "version 2: " in problem.text
    assert "has no checkpoint of version 2; there are those of 1" in problem.text
    rows = {int(row[0]): row for row in page.all(id="tokens")[0].rows()[1:]}
    assert rows[5][4:] == rows[7][4:] == ["–", "–"]
    assert float(rows[4][4]) < 0


def test_forked_histories_are_nested_where_they_fork_and_scored_by_their_own_path(directory):
    page, config = drawn(directory, "g00000001/1"), directory.config()
    [root] = [s for s in page.all("section", "segment") if s.attributes["id"] == "s0"]
    [fork] = [s for s in root.children if s.attributes.get("id") == "s1"]
    [below] = [s for s in fork.children if s.attributes.get("id") == "s2"]
    assert [x.text for x in below.children if x.attributes.get("class", "").startswith("text")] == [
        "9<", "i"
    ]  # fmt: skip
    assert "after 6 tokens" in below.text
    assert [a.attributes["href"] for a in root.all("a")] == ["#s1", "#s2"]
    policy = load_policy(
        config.model.path, LogprobOptions(chunk=4, temperature=0.7), dtype="float32",
        attention="eager",
    )  # fmt: skip
    _, found = find_rollout(directory, "g00000001/1")
    path = [*range(4), 5, 6, 8, 9, 10]
    learner = policy.own(torch.tensor(found.token_ids)[path]).detach()
    rows = {int(row[0]): float(row[4]) for row in page.all(id="tokens")[0].rows()[1:]}
    assert rows[10] == pytest.approx(float(learner[-1]), abs=1e-4)
    assert rows[6] == pytest.approx(float(learner[4]), abs=1e-4)


def test_a_run_in_progress_can_be_opened(directory):
    async def main():
        broker = make_broker(directory.path, groups_per_batch=1, steps=9, max_staleness=2)
        try:
            return await asyncio.to_thread(drawn, directory, "g00000001/0")
        finally:
            await broker.close()

    assert facts(asyncio.run(main()))["state"] == "trained at version 0"


def group_of(*rewards, **more):
    sampled = [make_rollout(i, reward=reward, **more) for i, reward in enumerate(rewards)]
    return make_group(rollouts=sampled)


def config_of(*settings):
    return load_recipe(str(RECIPE), settings).objective


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "opo", "maxrl", "best_of_n"])
def test_advantages_within_a_group_are_those_that_the_learner_trains_with(name):
    config, group = config_of(f"learner.advantage={name}"), group_of(0.0, 1.0, 0.5)
    batch = Objective(config).with_advantages(read_batch([group, group_of(3.0, 9.0)]))
    for index in range(3):
        assert describe_advantage(config, group, index).startswith(
            f"{float(batch.advantages.values[index]):+.4g} ({name}"
        )
    assert ("left out of training" in describe_advantage(config, group, 0)) == (name == "best_of_n")


@pytest.mark.parametrize("name", ["batch_norm", "reinforce", "reinforce_pp"])
def test_an_advantage_over_the_whole_batch_is_not_told_of_a_group_alone(name):
    config = config_of(f"learner.advantage={name}")
    text = describe_advantage(config, group_of(0.0, 1.0), 0)
    assert text == f"not known: {name!r} needs the whole batch"


def test_an_advantage_over_earlier_batches_or_of_a_critic_is_not_told_either():
    running = config_of("learner.advantage=reinforce", 'learner.advantage_options.baseline="ema"')
    assert "needs the whole batch" in describe_advantage(running, group_of(0.0, 1.0), 0)
    critic = config_of("learner.advantage=gae", "learner.critic.learning_rate=1e-4")
    assert "needs scores of models" in describe_advantage(critic, group_of(0.0, 1.0), 0)


def test_a_rollout_alone_of_its_group_has_the_estimators_own_message():
    config = config_of("learner.advantage=rloo")
    assert describe_advantage(config, group_of(1.0), 0) == (
        "not known: leaving one out needs at least 2 rollouts a group, found a group of 1"
    )


def test_a_group_that_was_removed_from_the_journal_is_said_to_be(directory, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directory.path, copy)
    shutil.rmtree(copy / "journal")
    with pytest.raises(InputError, match="group g00000001 cannot be read any more"):
        find_rollout(RunDirectory(copy), "g00000001/0")
