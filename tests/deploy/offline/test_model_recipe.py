"""`headway init --model`: a recipe that fits a model and the machine, or one message."""

import copy
import json
import re
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.cli.recipes import NAMES
from deploy.config import devices
from deploy.config.loader import load_recipe
from deploy.offline import model_recipe
from deploy.offline.model_recipe import recipe_for
from deploy.planner.byte_counts import GIB
from deploy.preflight import memory_check
from deploy.preflight.machine_checks import check_gpus
from headway.errors import InputError
from tests.actors.characters import TEMPLATE, character_tokenizer
from tests.actors.real_tokenizers import real_tokenizer
from tests.deploy.conftest import Headway, call_main

SHAPES = Path(__file__).parents[1] / "planner" / "shapes"
TINY = {
    "model_type": "llama", "vocab_size": 40_000, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    "eos_token_id": None,
}  # fmt: skip
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKS = ASKS.replace("{% endif %}", "{{ enable_thinking }}{% endif %}")


def written(folder, tokenizer=None, **settings):
    """Write a model folder without weights; return it."""
    folder.mkdir(exist_ok=True)
    (tokenizer or real_tokenizer("qwen3")).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**TINY, **settings}))
    return folder


def with_end(eos, template=None):
    tokenizer = copy.deepcopy(real_tokenizer("qwen3"))
    tokenizer.eos_token = eos
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes this a machine with so many GPUs of 79 GiB, and host memory."""

    def set_machine(gpus, host=1000, card=79.0):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        monkeypatch.setattr(devices, "distribution", lambda name: None)
        monkeypatch.setattr(memory_check, "memory_of_gpu", lambda: card * GIB)
        memory = SimpleNamespace(total=host * GIB, available=host * GIB)
        monkeypatch.setattr(memory_check.psutil, "virtual_memory", lambda: memory)

    return set_machine


@pytest.mark.parametrize(
    ("tokenizer", "stop", "template"),
    [
        (real_tokenizer("qwen3"), [], True),
        (real_tokenizer("llama3"), [], True),
        (real_tokenizer("gemma"), [], True),
        (with_end("<|endoftext|>"), ["<|im_end|>"], True),
        (with_end("<|endoftext|>", CHATML + ASKS), ["<|im_end|>"], True),
        (with_end("<|im_end|>", CHATML.replace("im_end", "fin") + ASKS), ["<|fin|>"], True),
        (with_end("<|im_end|>", CHATML.replace("<|im_end|>", "") + ASKS), [], True),
        (with_end("<|im_end|>", "{{ messages[0].content }}"), [], True),
        (character_tokenizer(), [], "auto"),
        (character_tokenizer(TEMPLATE), [], True),
    ],
)
def test_the_recipe_stops_where_the_chat_template_ends_messages(
    tmp_path, tokenizer, stop, template
):
    text, notes = recipe_for(str(written(tmp_path / "m", tokenizer)))
    actors = tomllib.loads(text)["actors"]
    assert (actors["stop"], actors["chat_template"]) == (stop, template)
    assert notes == [f"{tmp_path / 'm'} has no *.safetensors yet, which a run needs"]
    assert tokenizer.eos_token in re.search(r"the model ends at (.*)", text)[1]


@pytest.mark.parametrize(
    ("tokenizer", "settings", "expected"),
    [
        (with_end("<|im_end|>", CHATML + THINKS), {}, {"chat_template_options": {
            "enable_thinking": False}}),
        (None, {}, {"max_model_len": 512, "max_new_tokens": 256}),
        (None, {"max_position_embeddings": 200}, {"max_model_len": 200, "max_new_tokens": 100}),
    ],
)  # fmt: skip
def test_thoughts_and_context_of_the_model_are_in_the_recipe(
    tmp_path, tokenizer, settings, expected
):
    actors = tomllib.loads(recipe_for(str(written(tmp_path / "m", tokenizer, **settings)))[0])
    assert expected.items() <= actors["actors"].items()


@pytest.mark.parametrize(
    ("gpus", "shape", "expected"),
    [
        (0, "qwen2.5-0.5b", {"learner.gpus": 0, "learner.lora": None, "learner.dtype": "bfloat16"}),
        (1, "qwen2.5-0.5b", {"learner.gpus": 0.5, "actors.gpus": 0.5, "learner.lora": None}),
        pytest.param(1, "qwen2.5-7b", {"learner.gpus": 0.5, "learner.lora.rank": 32,
                                       "learner.learning_rate": 1e-5}, marks=pytest.mark.slow),
        pytest.param(8, "qwen2.5-7b", {
            "learner.ranks": 4, "actors.count": 4, "learner.lora": None,
            "learner.learning_rate": 1e-6, "learner.offload_optimizer": False,
        }, marks=pytest.mark.slow),
        pytest.param(8, "qwen2.5-32b", {"learner.lora.rank": 32}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_recipe_fits_the_machine(tmp_path, machine, gpus, shape, expected):
    machine(gpus)
    shutil.copytree(SHAPES / shape, tmp_path / "m")
    real_tokenizer("qwen3").save_pretrained(tmp_path / "m")
    text, _ = recipe_for(str(tmp_path / "m"))
    (tmp_path / "recipe.toml").write_text(text)
    config = devices.for_this_machine(load_recipe(str(tmp_path / "recipe.toml")))
    for key, value in expected.items():
        found = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key
    assert config.actors.dtype == config.learner.dtype
    assert memory_check.predict_memory(config).lacks == ()
    check_gpus(config, gpus)


@pytest.mark.parametrize(("gpus", "host", "lacks"), [(0, 2, "the node has 2.0"), (1, 999, "GPU")])
def test_a_model_that_does_not_fit_is_refused_with_figures(tmp_path, machine, gpus, host, lacks):
    machine(gpus, host, card=0.5)
    result = call_main(["init", "task", "--model", written(tmp_path / "m")], tmp_path)
    assert result.returncode == 2
    assert re.search(r"5,\d+,\d+ weights, does not fit into the memory", result.stderr)
    for form in ("whole: ", "with an adapter: "):
        assert re.search(rf"\n{form}.*{lacks}.*needs \d+", result.stderr)
    assert not (tmp_path / "task").exists()


def removed(folder, name):
    (folder / name).unlink()


def renamed(folder, name):
    (folder / "model.safetensors").rename(folder / name)


def described(folder, **settings):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "--model = '{0}': there is no such folder"),
        (lambda m: removed(m, "config.json"), "'{0}' has no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda m: removed(m, "tokenizer.json"), "'{0}' has no tokenizer"),
        (lambda m: renamed(m, "m.gguf"), "weights in m.gguf, and no *.safetensors"),
        (lambda m: renamed(m, "pytorch_model.bin"), "weights in pytorch_model.bin, and no"),
        (lambda m: (m / "model.safetensors").write_text("{"), "cannot be read as safetensors"),
        (lambda m: (m / "adapter_config.json").write_text("{}"), "is an adapter (it has"),
        (lambda m: described(m, architectures=["BertForMaskedLM"]), "is a BertForMaskedLM, which"),
        (lambda m: described(m, is_encoder_decoder=True), "does not predict the next token"),
        (lambda m: described(m, architectures=["Qwen3ForSequenceClassification"]), "is a Qwen3For"),
        (lambda m: described(m, quantization_config={"quant_method": "gptq"}), "config.json: gptq"),
        (lambda m: (m / "config.json").write_text("[]"), "config.json holds a list"),
        (lambda m: described(m, vocab_size=8), "and the model an embedding of 8 rows"),
        (lambda m: described(m, model_type="of_tomorrow"), "of_tomorrow"),
        (lambda m: described(m, model_type="own", auto_map={"AutoConfig": "o.Own"}), "custom code"),
        (lambda m: described(m, num_attention_heads="2"), "expected int, got str"),
        (lambda m: (m / INDEX).write_text("{}"), f"{INDEX} has no map of weights"),
        (lambda m: (m / GENERATION).write_text("{"), f"{GENERATION} of '{{0}}'"),
        (lambda m: (m / GENERATION).write_text("[]"), f"{GENERATION} of '{{0}}'"),
        (lambda m: (m / GENERATION).write_text('{"eos_token_id": "</s>"}'), "must be ids of token"),
    ],
)
def test_a_folder_that_is_no_model_to_train_is_refused_and_nothing_written(
    tmp_path, tiny_model, damage, message
):
    folder = tmp_path / "m"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    result = call_main(["init", "task", "--model", "m"], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message.format(folder if folder.exists() else "m") in " ".join(result.stderr.split())
    assert not (tmp_path / "task").exists()


def test_a_hub_name_without_a_network_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"^model 'no/such' is no folder here, and from the hub"):
        recipe_for("no/such")


def test_every_line_of_the_recipe_has_a_reason_and_it_is_valid_strictly(tmp_path, tiny_model):
    result = call_main(["init", "task", "--model", tiny_model], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "headway sft" not in result.stdout
    task = tmp_path / "task"
    assert sorted(path.name for path in task.iterdir()) == sorted(NAMES)
    lines = (task / NAMES[0]).read_text().splitlines()
    pairs = pairwise(lines)
    assert [line for above, line in pairs if above[:1] != "#" and line.count("# ") != 1] == []
    for options in ((), ("--strict",)):
        result = call_main(["validate", NAMES[0], *options], task)
        assert result.returncode == 0, result.stderr
    again = call_main(["init", "task", "--model", tiny_model], tmp_path)
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def test_the_prompt_is_a_question_where_the_model_reads_one(tmp_path):
    asked = tomllib.loads(recipe_for(str(written(tmp_path / "m")))[0])["prompts"]["source_options"]
    assert asked == {"question": model_recipe.QUESTION}
    short = written(tmp_path / "n", character_tokenizer())
    assert tomllib.loads(recipe_for(str(short))[0])["prompts"]["source_options"] == {}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_the_recipe_of_a_tiny_model_trains(tmp_path, tiny_model):
    headway = Headway(tmp_path)
    assert headway.call("init", "--model", tiny_model).returncode == 0
    settings = ("actors.engine=scripted", "steps=2", "heldout.size=4")
    result = headway("run", NAMES[0], *(part for value in settings for part in ("--set", value)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())["version"] == 2
