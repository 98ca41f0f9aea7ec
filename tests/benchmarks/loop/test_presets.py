"""`headway bench presets`: what its runs share, and the models behind a learned reward."""

from dataclasses import replace

from benchmarks.loop import presets
from benchmarks.loop.presets import PresetOptions, plan, table


def test_presets_share_model_steps_scores_and_devices_and_reward_models_are_those_of_the_folder(
    tmp_path,
):
    options = PresetOptions(
        presets=("grpo", "ppo_rlhf"), steps=12, seeds=(3,), out=tmp_path / "out"
    )
    (arms,) = plan(options).arms
    base = plan(options).base
    for arm in arms:
        config = arm.config
        assert (config.model, config.steps, config.seed) == (base.model, 12, 3)
        assert (config.heldout, config.sft) == (base.heldout, None)
        assert (config.actors.cores, config.learner.cores) == (
            base.actors.cores, base.learner.cores,
        )  # fmt: skip
    grpo, ppo = (arm.config for arm in arms)
    assert grpo.actors.reward_model.paths == ()
    folder = tmp_path / "out" / "demo-rm"
    assert ppo.actors.reward_model.paths == (str(folder / "model-0"), str(folder / "model-1"))
    assert not (tmp_path / "out").exists()


def test_reward_models_are_trained_from_the_shared_warm_start_where_a_preset_asks_them(
    tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(presets, "make_model", lambda command, *more: made.append(command))
    warm_start = tmp_path / "elsewhere" / "demo-sft" / "model"
    warm_start.mkdir(parents=True)
    for names, commands in ((("grpo",), []), (("ppo_rlhf",), ["reward-model"])):
        comparison = plan(PresetOptions(presets=names, steps=12, out=tmp_path / names[0]))
        model = comparison.base.model.model_copy(update={"path": str(warm_start)})
        base = comparison.base.model_copy(update={"model": model})
        presets.make_reward_models(replace(comparison, base=base))
        assert made == commands
    assert (tmp_path / "ppo_rlhf" / "demo-sft" / "model").is_dir()


def test_the_best_score_is_first_and_what_failed_is_named():
    figures = {
        "kind": "", "seed": 0, "reward_mean": None, "optimizer_steps": 12,
        "tokens_per_rollout": 10.0, "lag_max": 1, "ess": 0.75, "samples_per_second": 5.0,
        "seconds": 2.0, "environment": None,
    }  # fmt: skip
    heldout = {"scored": 43, "failed": 7}
    arms = [
        {**figures, "name": name, "score": score, "heldout": heldout}
        for name, score in (("dapo", 0.5), ("grpo", 0.75))
    ]
    failed = [{"seed": 0, "name": "vapo", "why": "it died"}]
    record = {"steps": 12, "problems": 50, "arms": arms, "failed": failed, "commit": None}
    lines = table(record).splitlines()
    assert lines[2].split() == ["grpo", "0.750", "–", "10", "12", "1", "0.750", "5", "2"]
    assert lines[3].startswith("dapo")
    assert "held-out score, dapo, seed 0: 0.500 (43 of 50, 7 failed)" in lines
    assert "left out: seed 0, vapo: it died" in lines
