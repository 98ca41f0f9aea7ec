"""Updates with teachers: the policy moves towards them, alone or beside rewards."""

from dataclasses import replace

import pytest
import torch
from rollouts import VOCABULARY, PlainEngine, TinyPolicy, columns_of, only, random_groups

from learner.config.learner import LearnerConfig
from learner.diagnostics.batch_report import BatchReport
from learner.engine.protocol import Forward
from learner.update import Updater


def whole(policy, token_ids, position_ids):
    """Return log-probabilities of every word in the place of each token, [N, V]."""
    scores = policy.head(policy.states(token_ids, position_ids)[:-1]).log_softmax(-1)
    follows = (position_ids[1:] > 0)[:, None]
    return torch.cat([torch.zeros_like(scores[:1]), torch.where(follows, scores, 0.0)])


class WordEngine(PlainEngine):
    """Scores other words in the place of each token, as `Policy` does."""

    def forward(self, token_ids, position_ids, wanted=None, others=None):
        out = super().forward(token_ids, position_ids, wanted)
        if others is None:
            return out
        scores = whole(self.policy, token_ids, position_ids).gather(-1, others)
        return Forward(*out[:2], others=only(wanted[:, None], (scores,))[0])


class PlainTeacher:
    """A frozen `TinyPolicy` of weights of its own, as `reference.Teacher`."""

    def __init__(self, top_k, seed=1):
        self.policy, self._top_k = TinyPolicy(), top_k
        self.columns = ("teacher_logprobs", "teacher_words")[: 2 if top_k else 1]
        self.told = min(top_k, VOCABULARY) or 1
        self.scored = 0
        make = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.policy.parameters():
                weight += 0.7 * torch.randn(weight.shape, generator=make)

    @torch.no_grad()
    def scores(self, token_ids, position_ids, wanted):
        self.scored += int(wanted.sum())
        if not self._top_k:
            return self.policy(token_ids, position_ids)[0].view(1, -1, 1)
        top = whole(self.policy, token_ids, position_ids).topk(self.told)
        return torch.stack([top.values, top.indices.double()])


def updater(top_k=4, teachers=1, rate=0.3, prompts=((), ()), **settings):
    own = [PlainTeacher(top_k, seed) for seed in range(1, teachers + 1)]
    distillation = settings.pop("distillation", {})
    named = [{"path": f"t{n}", "prompts": prompts[n]} for n in range(teachers)]
    config = LearnerConfig(
        distillation={"teachers": named, "top_k": top_k, **distillation}, **settings
    )
    return Updater(WordEngine(rate), config, teachers=own)


def on_policy(engine, seed):
    """Return random groups whose tokens have the log-probabilities of the present policy."""

    def scored(one):
        return replace(one, behavior_logprobs=engine.policy(*columns_of(one))[0].tolist())

    return [
        replace(group, rollouts=[scored(one) for one in group.rollouts])
        for group in random_groups(seed=seed)
    ]


ALONE = {"policy_loss": 0.0}


@pytest.mark.parametrize(
    ("top_k", "settings"),
    [
        (0, ALONE),
        (4, ALONE),
        (4, ALONE | {"divergence": "forward_kl"}),
        (50, ALONE | {"divergence": "jsd", "beta": 0.3, "coefficient": 4.0}),
        (4, {"policy_loss": 0.2}),
    ],
)
@pytest.mark.parametrize("teachers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_policy_moves_towards_its_teachers(top_k, settings, teachers):
    learner = updater(top_k, teachers, rate=1.0, distillation=settings)
    reports = []
    for version in range(16):
        groups = on_policy(learner._engine, seed=version % 3)
        reports.append(learner.update(groups, version))
        assert BatchReport.from_dict(reports[-1].to_dict()) == reports[-1]
    before, after = (
        sum(report.teacher_divergence[f"t{n}"] for n in range(teachers))
        for report in (reports[0], reports[-1])
    )
    assert before > 0.05
    assert after < before * (0.6 if teachers == 1 else 0.9)


def gradient(groups, **settings):
    learner = updater(**settings)
    report = learner.update(groups, 0)
    return learner._engine.gradient, report


def test_its_gradient_is_added_to_that_of_the_rewards_by_weight():
    groups = random_groups()
    plain = WordEngine(0.3)
    Updater(plain, LearnerConfig()).update(groups, 0)
    alone, report = gradient(groups, distillation=ALONE)
    assert report.policy_loss == 0
    assert report.loss == pytest.approx(report.teacher_divergence["t0"], rel=1e-6)
    both, combined = gradient(groups, distillation={"policy_loss": 0.5, "coefficient": 2.0})
    torch.testing.assert_close(both, 0.5 * plain.gradient + 2 * alone)
    assert combined.teacher_divergence == report.teacher_divergence
    kl = {"coefficient": 0.5, "form": "k3"}
    for name in ("teachers", "whole"):
        changed = {"teachers": 2} if name == "teachers" else {"top_k": VOCABULARY}
        other, _ = gradient(groups, distillation=ALONE, **changed)
        assert not torch.allclose(other, alone)
    assert LearnerConfig(kl=kl, distillation={"teachers": [{"path": "t"}]}).uses_reference


def test_words_beyond_the_vocabulary_change_nothing_and_microbatches_neither():
    groups = random_groups()
    expected, _ = gradient(groups, top_k=VOCABULARY, distillation=ALONE)
    for settings in ({"top_k": 10_000}, {"top_k": VOCABULARY, "microbatch_tokens": 16}):
        found, _ = gradient(groups, distillation=ALONE, **settings)
        torch.testing.assert_close(found, expected)


def test_each_prompt_has_the_teachers_that_name_it():
    groups = random_groups(count=3)
    prompts = (("test/0/g0", "test/0/g1"), ("test/0/g1",))
    learner = updater(teachers=2, prompts=prompts, distillation=ALONE)
    learner.update(groups, 0)
    first, second = (sum(len(r.token_ids) - 2 for r in group.rollouts) for group in groups[:2])
    assert [teacher.scored for teacher in learner._teachers] == [first + second, second]
    parts = []
    for number, taught in ((0, [0]), (0, [1]), (1, [1])):
        names = [("none",), ("none",)]
        names[number] = tuple(f"test/0/g{index}" for index in taught)
        one = updater(teachers=2, prompts=names, distillation=ALONE)
        one.update(groups, 0)
        parts.append(one._engine.gradient)
    expected = parts[0] + (parts[1] + parts[2]) / 2
    torch.testing.assert_close(learner._engine.gradient, expected)


def test_a_batch_that_no_teacher_teaches_has_no_divergence():
    _, report = gradient(random_groups(), prompts=(("other",),), distillation=ALONE)
    assert report.teacher_divergence == {"t0": None}
    assert report.loss == 0
