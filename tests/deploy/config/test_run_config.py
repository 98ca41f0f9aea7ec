"""Recipes: what is composed, what is refused, and how the refusal reads."""

import re
from codecs import BOM_UTF8
from contextlib import nullcontext

import pytest

from deploy.config.loader import SHIPPED_RECIPES, load_recipe
from deploy.config.rules import check_against_objective
from headway.errors import InputError
from learner.config.traits import ESTIMATORS
from learner.objective.checks import check_objective


def refusal(recipe, *overrides):
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_overrides_change_typed_values_and_plain_strings():
    config = load_recipe(
        "demo", ["learner.learning_rate=2e-5", "name=other", "actors.cores=['3']", "steps=7"]
    )
    assert (config.learner.learning_rate, config.name, config.steps) == (2e-5, "other", 7)
    assert config.actors.cores == ("3",)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_parts_of_an_override_s_key_may_be_quoted_as_in_toml(quote):
    score = "mine.one:score"
    overrides = [
        f"actors.reward=['{score}']",
        f"actors.reward_options.{quote}{score}{quote}.port=8",
    ]
    assert load_recipe("demo", overrides).actors.reward_options == {score: {"port": 8}}


DISTILLED = "learner.distillation.teachers=["
REFUSED = [
    ("learner.lerning_rate=1", "learner.lerning_rate: unknown key; did you mean 'learning_rate'?"),
    ("learner.lr=1", "learner.lr: unknown key; did you mean 'learning_rate'?"),
    ("learning_rate=1", "learning_rate: unknown key; did you mean 'learner.learning_rate'?"),
    ("maxstaleness=1", "maxstaleness: unknown key; did you mean 'queues.max_staleness'?"),
    ("queue.max_staleness=2", "queue: unknown key; did you mean 'queues'?"),
    ("critic.gae=1", "critic: unknown key; did you mean 'learner.critic'?"),
    ("learner.max_staleness=1", "did you mean 'queues.max_staleness'?"),
    ("learner.max_stalness=1", "did you mean 'queues.max_staleness'?"),
    ("prompts.options={x=1}", "prompts.options: unknown key; did you mean 'source_options'?"),
    ("model.tiny.size=8", "did you mean 'hidden_size'?"),
    ("actors.overlong.buffr=4", "actors.overlong.buffr: unknown key; did you mean 'buffer'?"),
    ("actors.min_p=0.1", "actors.min_p: unknown key; not passed on, since the learner would not"),
    ("actors.kv_cache_dtype=x", "unknown key; set actors.vllm_options.kv_cache_dtype instead"),
    ("actors.max_num_seqs=4", "unknown key; set actors.max_concurrent_rollouts instead"),
    ("actors.n=8", "actors.n: unknown key; set prompts.group_size instead"),
    ("queues.zzz=1", "queues.zzz: unknown key; valid keys are max_staleness"),
    ("na\nme=1", "write one key=value, the key's parts not empty"),
    ('actors.""=1', "write one key=value, the key's parts not empty"),
    ("steps=many", 'steps = "many": must be a whole number'),
    ("steps=1.5", "steps = 1.5: must be a whole number"),
    ("heldout.sampled='true'", '"true": must be true or false, without quotes'),
    ("actors.reward=last_answer", 'a list, as in ["last_answer"]'),
    ("learner=3", "learner = 3: must be a section"),
    ("learner.loss_options=[]", "a table, as in { key = value }"),
    ("steps=0", "steps = 0: must be at least 1"),
    ("seed=-1", "seed = -1: must be at least 0"),
    ("seed=123456789012", "seed = 123456789012: must be at most 100000000"),
    ("learner.learning_rate=-1e-3", "-0.001: must be greater than 0"),
    ("learner.learning_rate=nan", "NaN: must be a finite number"),
    ("prompts.groups_per_batch=0", "groups_per_batch = 0: must be at least 1"),
    ("learner.betas=[2,3]", "learner.betas.0 = 2: must be less than 1"),
    ("learner.betas=[0.9]", "learner.betas has too few entries"),
    ("learner.loss=pppo", "unknown loss 'pppo': expected one of reinforce, ppo, grpo, dapo, cispo"),
    ("learner.loss=cipso", "did you mean 'cispo'?"),
    ("learner.advantage=grop", "did you mean 'grpo'?"),
    ("learner.correction=tiss", "did you mean 'tis'?"),
    ("actors.reward=['math_verfy']", "did you mean 'math_verify'?"),
    ("actors.engine=vlm", "must be 'vllm' or 'scripted'; did you mean 'vllm'?"),
    ("learner.loss=:x", '"module:function"'),
    ("actors.reward=['mine:']", '"module:function"'),
    ("learner.zero_stage=5", "learner.zero_stage = 5"),
    (f"name={'x' * 101}", "must be at most 100 characters"),
    ("name=a/b", 'name = "a/b": must be letters, digits, "."'),
    ("actors.cores=['first']", '"first": must be core numbers, as in "0" or "2-5,8"'),
    ("actors.max_concurrent_rollouts=4", "= 4 must be at least prompts.group_size = 8"),
    ("actors.max_model_len=160", "must exceed actors.max_new_tokens"),
    ("actors.overlong.buffer=999", "actors.overlong.buffer = 999 must be at most"),
    ("prompts.pass_rate_cap=0.9", "'lettered_chain_sum', which always draws new problems"),
    ("prompts.curriculum={}", "set prompts.curriculum.by to"),
    ("prompts.group_size=1", "prompts.group_size must be at least 2, not 1"),
    ("actors.top_p=0.9", "actors.top_p = 0.9"),
    ("actors.top_k=5", "use top_p = 1.0 and top_k = -1"),
    ("actors.temperature=0.001", "actors.temperature = 0.001"),
    ("actors.temperature=2.5", "actors.temperature = 2.5"),
    ("actors.reward=['reasoning_gym']", "of exact_match, last_answer"),
    ("actors.reward_model.combine=max", "must be 'min', 'mean' or 'uwo'"),
    ("weight_sync.on_drift=kill", "'alert', 'resend' or 'restart'"),
    ("heldout={samples=4}", "without heldout.sampled = true"),
    ("heldout.pinned=true", "actors.count = 1 leaves none for training"),
    ("queues.window=15", "queues.window = 15 must be at least prompts.groups_per_batch = 16"),
    ("queues.lease_seconds=1", "queues: lease_seconds = 1 must be at least twice"),
    ("learner.correction=tis", "would count it twice"),
    ("model.path=x", "give either path"),
    (DISTILLED + "{pth='t'}]", "teachers.0.pth: unknown key; did you mean 'path'?"),
    (DISTILLED + "'t']", 'learner.distillation.teachers.0 = "t": must be a section of keys'),
    (DISTILLED + "{path='t',weight=0}]", "teachers.0.weight = 0: must be greater than 0"),
    (DISTILLED + "]", "learner.distillation.teachers = []: must be at least 1 entries"),
    ("model.tiny.kv_heads=3", "heads (4) must be a multiple of kv_heads (3)"),
    ("steps", "--set 'steps': write key=value"),
    ("steps.deep=1", "'steps' is a value, not a section"),
]


@pytest.mark.parametrize(("override", "expected"), REFUSED)
def test_bad_values_are_named_with_what_is_allowed(override, expected):
    text = refusal("demo", override)
    assert expected in text
    assert "Input should" not in text


def test_a_batch_of_one_rollout_teaches_reinforce_nothing_without_a_running_baseline():
    one = ["prompts.group_size=1", "prompts.groups_per_batch=1", "learner.advantage=reinforce"]
    assert 'at least 2, not 1; or set learner.advantage_options = { baseline = "ema" }' in refusal(
        "demo", *one
    )
    assert load_recipe("demo", [*one, 'learner.advantage_options={baseline="ema"}'])


def test_steps_are_rewarded_one_by_one_only_where_the_learner_tells_them_apart():
    steps = "actors.reward_model.each_step=true"
    assert "needs learner.process_rewards = true" in refusal("demo", steps)
    load_recipe("demo", [steps, "learner.process_rewards=true"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'x'\nsteps = \n", "is not TOML: Invalid value (at line 2"),
        ("[a]\nx=1\n\n[a]\n", "twice (at line 4"),
        ('name="x"\nsteps=1\n[prompts]\nsource="files"', "model: is required"),
        (
            'name="x"\nsteps=1\n[model]\npath="m"\n[prompts]\nsource="files"\n[reward_model]\n'
            "steps=3",
            "reward_model.pairs: is required",
        ),
    ],
)
def test_what_a_file_lacks_or_has_wrong_is_named(tmp_path, text, words):
    (recipe := tmp_path / "recipe.toml").write_text(text)
    assert words in refusal(str(recipe))


@pytest.mark.parametrize(
    ("stale", "allowed"),
    [
        (
            ["learner.loss=reinforce", "learner.loss_options={}"],
            ["learner.correction=tis", "queues.max_staleness=0", "queues.allow_uncorrected=true"],
        ),
        (["learner.epochs=2"], ["learner.correction=tis", "learner.recompute_proximal=false"]),
    ],
    ids=["without a ratio", "a ratio to the proximal policy alone"],
)
@pytest.mark.parametrize("bound", ["2", "auto"])
def test_staleness_without_correction_is_refused_with_the_settings_that_allow_it(
    stale, allowed, bound
):
    stale = [*stale, f"queues.max_staleness={bound}"]
    text = refusal("demo", *stale).replace('"', "").replace(" = ", "=")
    assert f"queues.max_staleness={bound} with" in text
    for setting in allowed:
        assert setting in text
        assert load_recipe("demo", [*stale, setting])


def test_every_problem_of_a_recipe_is_reported_at_once():
    text = refusal("demo", "steps=0", "queues.max_staleness=-1", "learner.epocs=1")
    named = [line.split(":")[0].split(" ")[2] for line in text.splitlines()[1:]]
    assert named == ["steps", "queues.max_staleness", "learner.epocs"]


def test_a_recipe_that_is_missing_or_a_folder_is_named(tmp_path):
    assert "neither a file nor one of demo" in refusal("nothing")
    assert "cannot be read" in refusal(str(tmp_path))


def test_a_recipe_of_another_system_may_have_its_byte_order_mark_and_line_ends(tmp_path):
    recipe = tmp_path / "mine.toml"
    shipped = (SHIPPED_RECIPES / "demo.toml").read_bytes()
    recipe.write_bytes(BOM_UTF8 + shipped.replace(b"\n", b"\r\n"))
    assert load_recipe(str(recipe)) == load_recipe("demo")


def test_fixed_length_defaults_to_the_longest_completion():
    assert load_recipe("demo").objective.fixed_length == 160
    assert load_recipe("demo", ["learner.fixed_length=7"]).objective.fixed_length == 7


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], None),
        (["queues.on_overdue=train"], None),
        (["queues.on_overdue=mask"], 2),
        (["queues.on_overdue=mask", "learner.max_token_lag=1"], 1),
        (["queues.on_overdue=mask", "learner.max_token_lag=9"], 2),
        (["learner.max_token_lag=9"], 9),
    ],
)
def test_where_stragglers_are_masked_no_token_above_the_bound_trains(overrides, limit):
    assert load_recipe("demo", overrides).objective.max_token_lag == limit


def test_the_window_holds_what_engines_and_learner_work_on_and_a_quarter_of_a_batch_more():
    assert load_recipe("demo").flow.window == 16 + 16 + 4
    assert load_recipe("demo", ["actors.max_concurrent_rollouts=8"]).flow.window == 16 + 16 + 4
    assert load_recipe("demo", ["actors.max_concurrent_rollouts=256"]).flow.window == 16 + 32 + 4
    assert load_recipe("demo", ["queues.window=20"]).flow.window == 20


def test_a_greedy_baseline_has_room_beside_its_group():
    given = ["actors.greedy_baseline=true", "actors.max_concurrent_rollouts=256"]
    config = load_recipe("demo", given)
    assert config.rollouts_per_group == 9
    assert config.flow.window == 16 + 256 // 9 + 4


BASELINE = ("actors.greedy_baseline=true", "actors.max_concurrent_rollouts=8")
RAFT = ("learner.advantage=reinforce", "learner.loss=raft", 'learner.loss_options={keep="best"}')
LONE = "prompts.group_size=1"
MINIBATCHES = ("learner.minibatches=17", "learner.correction=tis")
CUT = ("actors.top_p=0.9", "queues.max_staleness=0")
ALONE = (DISTILLED + "{path='t'}]", "learner.distillation.policy_loss=0")
PROXIMAL = "learner.recompute_proximal=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (BASELINE, "prompts.group_size = 8, and one more for actors.greedy_baseline"),
        ((LONE, "learner.advantage=rloo"), "advantage = 'rloo' compares the rollouts of a group"),
        (MINIBATCHES, "minibatches = 17 must be at most prompts.groups_per_batch = 16"),
        ((LONE, *RAFT), "learner.loss = 'raft' compares the rollouts of a group"),
        (CUT, "which learner.loss compares with"),
        ((*CUT, "learner.loss=reinforce", "learner.correction=tis"), "learner.correction compares"),
        ((*CUT, "learner.loss=reinforce", 'learner.kl={form="ratio_k1"}'), "learner.kl compares"),
        ((*CUT, *ALONE, "learner.distillation.top_k=0"), "learner.distillation compares with"),
        ((*CUT, "learner.loss=reinforce"), "and learner.loss = 'reinforce' is of the whole one"),
        ((*CUT, "learner.loss=ppo", PROXIMAL), "and learner.loss = 'ppo' is of the whole one"),
        ((*CUT, "learner.loss=grpo", PROXIMAL, "actors.top_k=5"), "loss = 'grpo' is of the whole"),
        ((*CUT, "learner.loss=ppo", PROXIMAL), "or the loss raft or dpo, which take rollouts of"),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides, message):
    assert message in refusal("demo", *overrides)


def test_rollouts_of_any_policy_may_be_sampled_from_the_most_probable_tokens():
    chosen = ["learner.loss=raft", "learner.advantage=best_of_n", "learner.correction=none"]
    config = load_recipe("demo", ["actors.top_p=0.9", "actors.top_k=5", *chosen])
    assert (config.actors.top_p, config.actors.top_k) == (0.9, 5)


def test_distillation_alone_asks_nothing_of_rewards_and_of_who_sampled():
    free = ["learner.loss=reinforce", "prompts.group_size=1", "queues.max_staleness=4"]
    config = load_recipe("demo", ["actors.top_p=0.9", *free, *ALONE])
    assert config.learner.policy_weight == 0


DROPS = ["queues.filter_tied", "learner.drop_tied"]


@pytest.mark.parametrize("setting", DROPS)
@pytest.mark.parametrize("name", ["remax", "reinforce", "reinforce_pp", "gae", "gdpo"])
def test_tied_groups_are_never_left_out_where_they_hold_a_signal(setting, name):
    chosen = [f"learner.advantage={name}", "actors.greedy_baseline=true"]
    chosen += ["learner.critic={}"] if name == "gae" else []
    text = refusal("demo", f"{setting}=true", *chosen)
    assert f"{setting} = true with learner.advantage = '{name}', which compares" in text
    assert f"set {setting} = false" in text
    assert load_recipe("demo", chosen).learner.advantage == name


@pytest.mark.parametrize("setting", DROPS)
@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (['learner.kl={placement="reward"}'], 'learner.kl.placement = "reward", by which'),
        (["learner.process_rewards=true"], "learner.process_rewards = true, by which turns"),
        ([ALONE[0]], "[learner.distillation], whose teachers tell of every rollout"),
        (["learner.positive_nll=0.1"], "learner.positive_nll = 0.1, by which all that pass are"),
        (
            ["learner.advantage=best_of_n", "learner.advantage_options={min_reward=0.5}"],
            "which takes rollouts whose reward reaches min_reward",
        ),
    ],
)
def test_tied_groups_are_never_left_out_where_a_setting_gives_them_a_signal(
    setting, chosen, reason
):
    assert f"{setting} = true with " in (text := refusal("demo", f"{setting}=true", *chosen))
    assert reason in text
    load_recipe("demo", chosen)


@pytest.mark.parametrize("setting", DROPS)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "batch_norm", "maxrl", "best_of_n"])
def test_tied_groups_may_be_left_out_where_a_group_alone_is_compared(setting, name):
    config = load_recipe("demo", [f"{setting}=true", f"learner.advantage={name}"])
    assert config.flow.filter_tied or config.learner.drop_tied


@pytest.mark.parametrize("setting", DROPS)
@pytest.mark.parametrize("relative", [True, False])
def test_the_rule_holds_for_a_registered_advantage_too(
    request, monkeypatch, tmp_path, setting, relative
):
    name = f"own_{setting.partition('.')[2]}_{relative}"
    (tmp_path / f"{name}.py").write_text(
        "from learner import advantage\n"
        f"@advantage('{name}', relative={relative})\n"
        "def own(batch):\n    return batch.rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: ESTIMATORS.forget([name]))
    config = load_recipe("demo", [f"{setting}=true", f"learner.advantage={name}:own"])
    if relative:
        check_against_objective(config, check_objective(config.objective))
        return
    with pytest.raises(ValueError, match=f"{setting} = true with learner.advantage = '{name}:own'"):
        check_against_objective(config, check_objective(config.objective))


def test_a_critic_is_not_trained_alone_to_the_end():
    text = refusal("vapo", "steps=5")
    assert "learner.critic.pretrain_batches = 5 must be below steps = 5" in text
    assert load_recipe("vapo", ["steps=6"]).steps == 6


@pytest.mark.parametrize("setting", ["reward", "heldout_reward"])
def test_reward_models_are_asked_for_wherever_a_reward_needs_them(setting, tmp_path):
    recipe = tmp_path / "recipe.toml"
    text = (SHIPPED_RECIPES / "demo.toml").read_text()
    before, _, after = text.partition("[reward_model]")
    recipe.write_text(before + "[prompts]" + after.partition("[prompts]")[2])
    judged = f"actors.{setting}=['reward_model']"
    message = refusal(str(recipe), judged)
    assert 'the reward "reward_model" needs reward models: name model folders' in message
    assert load_recipe(str(recipe), [judged, "actors.reward_model.paths=['x']"])
    assert load_recipe("demo", [judged])


def test_a_pass_rate_cap_is_for_sources_that_come_back_to_their_prompts():
    files = ["prompts.source=files", "prompts.source_options.path=x", "prompts.pass_rate_cap=0.9"]
    assert load_recipe("demo", files).prompts.pass_rate_cap == 0.9
    gym = ["prompts.source=reasoning_gym:chain_sum", 'actors.reward=["reasoning_gym"]']
    assert "has no effect" in refusal("demo", *gym, "prompts.pass_rate_cap=0.9")


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], True),
        (["deploy.checkpoint_dir=/shared/checkpoints"], False),
        (["deploy.backup_dir=/shared/backup"], False),
        (["deploy.node.gpus=32"], False),
        (["learner.ranks=8"], False),
    ],
)
def test_a_learner_of_several_nodes_names_a_folder_that_they_share(tmp_path, overrides, refused):
    shipped = (SHIPPED_RECIPES / "gsm8k_qwen32b_8nodes.toml").read_text()
    lines = [line for line in shipped.splitlines() if not line.startswith("checkpoint_dir")]
    (recipe := tmp_path / "recipe.toml").write_text("\n".join(lines))
    message = (
        "learner.ranks = 32 with learner.gpus = 1 take 32 GPUs, more than deploy.node.gpus = 8, and"
        " every rank writes its part of a checkpoint: set deploy.checkpoint_dir"
    )
    with pytest.raises(InputError, match=re.escape(message)) if refused else nullcontext():
        load_recipe(str(recipe), overrides)
