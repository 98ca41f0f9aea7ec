"""The inputs of a run are loaded, checked and disjoint before anything is written."""

import json
import resource
import shutil
from functools import reduce

import pytest

from actors.engines.model_folder import describe
from deploy.config.loader import load_recipe
from deploy.preflight.inputs import check_code, load_inputs
from deploy.preflight.machine_checks import (
    DESCRIPTORS,
    DESCRIPTORS_OF_PEER,
    check_descriptors,
    check_machine,
)
from deploy.preflight.models import fingerprint_of_model, model_path, warm_start_origin
from deploy.storage.atomic_folder import ORIGIN_FILE
from headway.errors import InputError
from weight_sync.open_files import MOST

LETTERS = "0123456789+-=,abcdefghijklmnopqr"
"""Characters of `tiny_model`."""


def recipe(tmp_path, *overrides):
    return load_recipe("demo", [f"deploy.runs_dir={tmp_path}", *overrides])


def make_warm_start(config, model=None):
    """Write the folder of `headway sft`; without a model, only the files that show it exists."""
    config.warm_start.mkdir(parents=True)
    (config.warm_start / "config.json").write_text("{}")
    if model is not None:
        shutil.copytree(model, config.warm_start, dirs_exist_ok=True)
    (config.warm_start / ORIGIN_FILE).write_text(warm_start_origin(config))


def opened(tmp_path, model, *overrides):
    """Return the inputs of the demo with a warm start of a model."""
    config = recipe(tmp_path, *overrides)
    make_warm_start(config, model)
    return load_inputs(config)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a module of the user's, by its name."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"prompt": t, "answer": "1"}) + "\n" for t in texts))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("seed=1", "made with seed = 0, not 1. For this recipe, run `headway sft --replace`"),
        ("sft.steps=9", "made with sft.steps = 850, not 9"),
        ("model.tiny.layers=2", "made with model.tiny.layers = 3, not 2"),
        ("actors.chat_template=false", r'made with actors.chat_template = "?auto"?, not false'),
        ("actors.stop=['=']", "made with actors.stop = "),
    ],
)
def test_a_warm_start_of_other_settings_is_refused_with_what_differs(tmp_path, changed, message):
    config = recipe(tmp_path)
    make_warm_start(config)
    assert model_path(config) == str(config.warm_start)
    with pytest.raises(InputError, match=message):
        model_path(recipe(tmp_path, changed))


def test_a_warm_start_behind_a_link_is_read_where_other_nodes_have_it(tmp_path):
    shared, config = recipe(tmp_path / "shared"), recipe(tmp_path)
    make_warm_start(shared)
    config.warm_start.parent.parent.mkdir(parents=True, exist_ok=True)
    config.warm_start.parent.symlink_to(shared.warm_start.parent)
    assert model_path(config) == str(shared.warm_start)


def test_a_warm_start_that_another_name_has_is_pointed_at(tmp_path):
    make_warm_start(recipe(tmp_path))
    with pytest.raises(InputError, match=r'or set sft\.name = "demo", which was'):
        model_path(recipe(tmp_path, "name=other"))


@pytest.mark.parametrize("unrelated", ["steps=9", "learner.learning_rate=1e-5"])
def test_settings_that_a_warm_start_does_not_depend_on_may_change(tmp_path, unrelated):
    config = recipe(tmp_path)
    make_warm_start(config)
    assert model_path(recipe(tmp_path, unrelated)) == str(config.warm_start)


def test_cores_that_this_machine_does_not_have_are_named(tmp_path):
    judged = recipe(
        tmp_path, "actors.reward=['reward_model']", "actors.reward_model.cores=9998-9999"
    )
    with pytest.raises(InputError, match=r"actors\.reward_model\.cores = '9998-9999', but"):
        check_machine(judged)


def test_a_limit_of_open_files_is_raised_or_named(tmp_path, monkeypatch):
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path}"])
    needed, raised = DESCRIPTORS + 2 * DESCRIPTORS_OF_PEER, []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    infinite = resource.RLIM_INFINITY
    limits = [
        (needed, needed), (infinite, infinite), (MOST, infinite), (MOST + 1, infinite),
        (20, needed), (20, infinite), (needed, MOST + 1),
    ]  # fmt: skip
    for soft, hard in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        check_descriptors(config)
    assert raised == [(needed, needed), (MOST, infinite), (MOST, MOST + 1)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, needed - 1))
    with pytest.raises(InputError, match=f"open {needed - 1} files .* need {needed}, by actors.c"):
        load_inputs(config)


def test_held_out_problems_of_another_source_are_never_trained(tmp_path, tiny_model):
    write_lines(tmp_path / "train.jsonl", [f"p{i}" for i in range(20)])
    write_lines(tmp_path / "test.jsonl", [f"p{i}" for i in range(0, 20, 4)])
    inputs = opened(
        tmp_path,
        tiny_model,
        "prompts.source=files",
        f"prompts.source_options={{path='{tmp_path / 'train.jsonl'}'}}",
        "heldout.source=files",
        f"heldout.source_options={{path='{tmp_path / 'test.jsonl'}'}}",
        "heldout.size=5",
        "heldout.final_size=5",
    )
    problems = {prompt.text for prompt in inputs.prompts.problems}
    assert problems == {"p0", "p4", "p8", "p12", "p16"}
    drawn = {prompt.text for prompt in inputs.prompts.source.next(60)}
    assert drawn == {f"p{i}" for i in range(20)} - problems


OWN_SOURCE = """
from queues.records import Prompt

class Source:
    def __init__(self, *, options, seed, split, heldout_size):
        self.form, self.sign, self.drawn = options["form"], "+-"[split == "train"], 0

    def next(self, count):
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [
            Prompt(prompt_id=self.form.format(n), text=f"{n}{self.sign}1=", answer="1")
            for n in numbers
        ]

    def cursor(self):
        return str(self.drawn)

    def restore(self, cursor):
        self.drawn = int(cursor)
"""


def test_held_out_problems_of_one_id_are_refused(tmp_path, tiny_model, own):
    own("own_source", OWN_SOURCE)
    chosen = ["prompts.source=own_source:Source", "prompts.source_options={form='p'}"]
    message = "held-out problems: 'own_source:Source' gives the prompt_id 'p' to 4 of them"
    with pytest.raises(InputError, match=message):
        opened(tmp_path, tiny_model, *chosen, "heldout.size=3", "heldout.final_size=4")


@pytest.mark.parametrize(("beginning", "refused"), [("own/0/", False), ("math:", True)])
def test_a_teacher_of_prompts_that_the_source_lacks_is_refused(
    tmp_path, tiny_model, own, beginning, refused
):
    own("own_source", OWN_SOURCE)
    chosen = ["prompts.source=own_source:Source", "prompts.source_options={form='own/0/{}'}"]
    teacher = f"{{path='{tiny_model}', prompts=['{beginning}']}}"
    chosen.append(f"learner.distillation={{teachers=[{teacher}]}}")
    if not refused:
        opened(tmp_path, tiny_model, *chosen)
        return
    with pytest.raises(InputError, match=r"begin with 'math:', and no id does; .* 'own/0/0'"):
        opened(tmp_path, tiny_model, *chosen)


@pytest.mark.parametrize(
    ("form", "cap", "refused"),
    [("own-{}", "0.9", True), ("own-{}", None, False), ("own/0/{}", "0.9", False)],
)
def test_prompts_that_may_be_retired_can_be_known_again(
    tmp_path, tiny_model, own, form, cap, refused
):
    own("own_source", OWN_SOURCE)
    chosen = ["prompts.source=own_source:Source", f"prompts.source_options={{form='{form}'}}"]
    chosen += [] if cap is None else [f"prompts.pass_rate_cap={cap}"]
    if not refused:
        assert len(opened(tmp_path, tiny_model, *chosen).prompts.source.next(3)) == 3
        return
    with pytest.raises(ValueError, match="prompt_id 'own-0' must be of the form") as caught:
        opened(tmp_path, tiny_model, *chosen)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("first", "late", "reward", "message"),
    [
        (
            "reasoning_gym:chain_sum",
            'source="files", options={path="late.jsonl"}',
            "reasoning_gym",
            r"prompt '1:late/.* is not one; give another reward",
        ),
        (
            "lettered_chain_sum",
            'source="broken_source:Source", options={form="late/0/{}"}',
            "last_answer",
            "division by zero",
        ),
    ],
    ids=["without what the reward needs", "raises"],
)
def test_a_part_of_a_mixture_that_comes_late_is_checked_at_once(
    tmp_path, tiny_model, own, monkeypatch, first, late, reward, message
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "late.jsonl", ["1+0="])
    begin = "    def next(self, count):"
    own("broken_source", OWN_SOURCE.replace(begin, f"{begin}\n        1 / 0"))
    parts = (
        f'[{{source="{first}", weight=[[0, 1.0], [1000, 0.0]]}}, '
        f"{{{late}, weight=[[0, 0.0], [1000, 1.0]]}}]"
    )
    mixed = ["prompts.source=mixture", f"prompts.source_options={{parts={parts}}}"]
    mixed += ["heldout.source=lettered_chain_sum", f"actors.reward=['{reward}']"]
    with pytest.raises(InputError, match=message):
        opened(tmp_path, tiny_model, *mixed)


def test_a_missing_model_folder_is_named_and_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "plain.toml"
    path.write_text('name = "x"\nsteps = 1\n[model]\npath = "~/m"\n[prompts]\nsource = "mine:S"\n')
    config = load_recipe(str(path))
    with pytest.raises(InputError, match=r"model.path = '~/m': there is no such folder"):
        model_path(config)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert model_path(config) == str(tmp_path / "m")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("prompts.source=tinny:twice", "prompts.source = 'tinny:twice': .*mean 'tiny'"),
        ("prompts.source=tiny:twise", "prompts.source = 'tiny:twise': .*mean 'twice'"),
        ("heldout.source=tiny:twise", "heldout.source = 'tiny:twise': .*mean 'twice'"),
        (
            "sft.demonstrations=letered_chain_sum",
            "sft.demonstrations = .*mean 'lettered_chain_sum'",
        ),
        ("sft.options.worked_shar=1", "sft.demonstrations = .*mean 'worked_share'"),
        ("reward_model.pairs=tiny:twise", "reward_model.pairs = .*mean 'twice'"),
        ("actors.environment_options.x=1", "actors.environment = .* has no option x"),
        ("actors.gpus=1", "learner.gpus is not set beside actors.gpus = 1"),
        ("learner.gpus=0.5", "actors.gpus is not set beside learner.gpus = 0.5"),
        (
            "learner.distillation.teachers=[{path='./none'}]",
            r"learner\.distillation\.teachers\.0\.path = './none': there is no such folder",
        ),
        ("sft.heldout='none.jsonl'", r"sft\.heldout = 'none\.jsonl' cannot be read"),
        ("heldout.judge={model='m'}", r"heldout\.judge requires the option url"),
        ("pairs={judge={model='m'}, principles=['x']}", r"pairs\.judge requires the option url"),
        ("pairs={rewards=['code']}", r'actors\.reward = "code" runs programs'),
    ],
)
def test_what_a_recipe_names_is_checked_under_its_own_key(setting, named):
    with pytest.raises(InputError, match=f"^{named}"):
        check_code(load_recipe("demo", [setting]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["actors.reward=['mine_strict:scor']"], "actors.reward .*did you mean 'score'\\?"),
        (["actors.reward=['absent:score']"], "actors.reward .*cannot import absent"),
        (["deploy.trackers=['mlflow']"], r"deploy.trackers .*pip install .headway-rl\[mlflow\]"),
        (
            [
                "actors.reward=['mine_strict:score']",
                'actors.reward_options={"mine_strict:score"={scal=2}}',
            ],
            "actors.reward .*no option scal; its options: scale; did you mean 'scale'",
        ),
        (
            ["prompts.source=files", "prompts.source_options.path=rows.jsonl"],
            r"(?s)prompts.source .*rows.jsonl:1: prompt is 5",
        ),
    ],
)
def test_code_and_files_that_a_recipe_names_are_checked_without_a_model(
    tmp_path, own, monkeypatch, settings, words
):
    signature = "def score(prompt, completion, answer, metadata, *, scale=1.0)"
    own("mine_strict", f"{signature}:\n    return scale\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": 5}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        check_code(load_recipe("demo", settings))


def test_a_source_that_raises_is_named_without_a_model(own):
    own(
        "mine_raises",
        "class Source:\n"
        "    def __init__(self, **settings): pass\n"
        "    def next(self, count): raise OSError('no rows')\n"
        "    def cursor(self): return ''\n"
        "    def restore(self, cursor): pass\n",
    )
    config = load_recipe("demo", ["prompts.source=mine_raises:Source", "heldout.source=tiny:twice"])
    with pytest.raises(InputError, match=r"prompts.source: next\(16\) raised OSError"):
        check_code(config)


LEAVING = """
class Source:
    def __init__(self, *, options, seed, split="train", heldout_size=0):
        print("s" * 1_000_000)
        raise SystemExit(0)
"""


def test_a_source_that_would_end_the_command_is_refused_and_prints_little(tmp_path, own, capsys):
    own("leaving", LEAVING)
    config = recipe(tmp_path, "prompts.source=leaving:Source", "heldout.source=lettered_chain_sum")
    with pytest.raises(InputError, match="SystemExit"):
        check_code(config)
    assert len(capsys.readouterr().out) < 70_000


BLOCKING = """
import threading

from queues.records import Prompt

def wait(where):
    if where == "WHERE":
        while True:
            try:
                threading.Event().wait()
            except Exception:
                pass  # as code that tries everything again

wait("import")

class Source:
    def __init__(self, *, split="train", **settings):
        self.split = split
        if split == "train":
            wait("init")
    def next(self, count):
        if self.split == "train":
            wait("next")
        return [Prompt(prompt_id=f"mine/0/{n}", text=str(n), answer="1") for n in range(count)]
    def cursor(self):
        wait("cursor")
        return ""
    def restore(self, cursor): pass

def score(prompt, completion, answer, metadata):
    return 0.0
"""


@pytest.mark.parametrize("where", ["import", "init", "next", "cursor"])
def test_code_of_the_recipe_that_never_answers_is_refused_with_its_line(tmp_path, own, where):
    own(f"blocking_{where}", BLOCKING.replace("WHERE", where))
    blocking, line = f"blocking_{where}:", rf"blocking_{where}\.py\", line \d+, in wait"
    config = recipe(
        tmp_path, f"prompts.source={blocking}Source", f"heldout.source={blocking}Source",
        f'actors.reward=["{blocking}score"]', "deploy.watchdog_seconds=0.2",
    )  # fmt: skip
    with pytest.raises(InputError, match=rf"(?s)within 0.6 s, 3 times .* waits here:.*{line}"):
        check_code(config)


def test_the_model_of_a_critic_is_looked_for_and_not_fetched(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    described, read = {"organisation/name": {"num_labels": 1}}, describe
    for module in ("deploy.preflight.models", "actors.engines.model_folder"):
        monkeypatch.setattr(f"{module}.describe", lambda path: described.get(path) or read(path))
    adapted = ["learner.advantage=gae", "learner.loss=ppo", "learner.critic.lora.rank=2"]
    config = recipe(tmp_path, *adapted, "learner.critic.path=organisation/name")
    make_warm_start(config, tiny_model)
    load_inputs(config)
    with pytest.raises(InputError, match=r"learner\.critic\.path = './wrong': there is no such"):
        load_inputs(recipe(tmp_path, *adapted, "learner.critic.path=./wrong"))


@pytest.mark.parametrize("setting", ["learner.critic.path", "learner.kl.reference"])
def test_every_model_that_the_learner_loads_is_looked_for_and_must_not_be_quantised(
    tmp_path, tiny_model, setting, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ["learner.advantage=gae", "learner.loss=ppo", "learner.critic.coefficient=0.2"]
    config = recipe(tmp_path, *settings, f"{setting}=~")
    assert reduce(getattr, setting.split("."), config) == str(tmp_path)
    make_warm_start(config, tiny_model)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(InputError, match=r"has quantised weights \(quantization_config .*: awq"):
        load_inputs(config)
    with pytest.raises(InputError, match=rf"{setting} = './wrong': there is no such folder"):
        load_inputs(recipe(tmp_path, *settings, f"{setting}=./wrong"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"characters": LETTERS[:-1]}, "another vocabulary .* 1 differ .'r' is 34 and missing"),
        ({"characters": LETTERS[::-1]}, "another vocabulary .* 32 differ"),
        ({"context": 100}, "reads sequences of 100 tokens, .* set actors.max_model_len = 100"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "quantised weights"),
        ({"config": {"vocab_size": 20}}, "has 20 rows of embeddings, and .* may sample 35 tokens"),
        ({"config": {"vocab_size": 40}}, None),
        ({"layers": 1, "hidden_size": 16, "config": {}}, None),
        (None, r"teachers\.0\.path = '/.*/teacher': there is no such folder"),
    ],
)
def test_a_teacher_must_read_what_the_policy_samples(
    tmp_path, tiny_model, build_model, monkeypatch, changed, message
):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "teacher"
    if changed is not None:
        changes = {"characters": LETTERS, "context": 256, **changed}
        described = changes.pop("config", {})
        build_model(folder=folder, **changes)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | described))
    teacher = "learner.distillation.teachers=[{path='~/teacher'}]"
    if message is None:
        inputs = opened(tmp_path, tiny_model, teacher)
        assert inputs.teachers == (str(folder),)
        assert inputs.models["teacher 0"] == fingerprint_of_model(str(folder))
    else:
        with pytest.raises(InputError, match=message):
            opened(tmp_path, tiny_model, teacher)


def test_a_warm_start_of_another_adapter_is_refused_for_a_new_run(tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    config = recipe(tmp_path, f"sft.lora.path={tmp_path}", "sft.optimizer=adamw")
    make_warm_start(config)
    model_path(config, is_new=True)
    weights.write_bytes(b"second")
    model_path(config)
    with pytest.raises(InputError, match=r"was made with another .*adapter_model\.safetensors"):
        model_path(config, is_new=True)
