"""Cases of models, prompts, user code and folders that are refused before Ray starts."""

from tests.deploy.broken import (
    FILES,
    MINE,
    SFT,
    Case,
    code,
    description,
    existing_run,
    model,
    registered,
    rows,
    run_going_on,
    sets,
    source,
    tokenizer,
    transformers_model,
)  # fmt: skip

PAIRS = "reward_model.pairs=pairs.jsonl"
JUDGED = "actors.reward=['reward_model']"
SCORED, WORLD = "actors.reward=['mine:score']", "actors.environment=mine:World"
LOSS, ADVANTAGE = "learner.loss=mine:loss", "learner.advantage=mine:mine"
OWN_LOSS = "policy_loss_function(owns_is=True)"


def prompted(name, row, *words):
    """Return a case of a prompt file with a row, or with several."""
    given = row if isinstance(row, list) else [row]
    return sets(name, FILES, *words, prepare=rows("data.jsonl", *given))


def coded(name, settings, text, *words):
    """Return a case of a module of the user's."""
    return sets(name, settings, *words, prepare=code(text))


def modelled(name, change, *words):
    """Return a case of a change of the model folder."""
    return Case(name, list(words), prepare=model(change))


def sourced(name, parts, *words):
    """Return a case of a prompt source of the user's."""
    return sets(name, MINE, *words, prepare=source(**parts))


def demonstrated(name, row, *words):
    """Return a case of a demonstration that `headway sft` refuses."""
    prepare = rows("pairs.jsonl", row)
    return Case(name, list(words), command="sft", recipe=SFT, prepare=prepare)


def paired(name, row, *words):
    """Return a case of a preference pair that `headway reward-model` refuses."""
    return sets(name, PAIRS, *words, command="reward-model", prepare=rows("pairs.jsonl", row))


INPUTS = [
    sets("no model folder", "model.path=./nothing", "'./nothing'", "no such folder"),
    sets("no model folder either", "model.path=nothing", "'nothing'", '"organisation/name"'),
    sets("no hub name either", "model.path=no/such-model", "'no/such-model'", "no folder here"),
    sets("model is a file", "model.path=recipe.toml", "is a file"),
    modelled("no config.json", lambda m: (m / "config.json").unlink(), "has no config.json"),
    modelled(
        "broken config.json",
        lambda m: (m / "config.json").write_text("{,"),
        "config.json cannot be read",
        "line 1",
    ),
    modelled(
        "no weights", lambda m: (m / "model.safetensors").unlink(), "has no model.safetensors file"
    ),
    modelled(
        "broken weights",
        lambda m: (m / "model.safetensors").write_text("version https://git-lfs"),
        "model.safetensors cannot be read",
    ),
    modelled(
        "no tokenizer",
        lambda m: [p.unlink() for p in m.glob("tokenizer*")],
        "has no tokenizer",
        "tokenizer.json",
    ),
    sets(
        "tokens that vLLM never samples",
        "actors.engine=vllm",
        "generation_config.json",
        "suppress_tokens = [5]",
        "remove it",
        prepare=model(
            lambda m: (m / "generation_config.json").write_text('{"suppress_tokens": [5]}')
        ),
    ),
    Case("no eos", ["no end-of-sequence token", "eos_token"], prepare=tokenizer(eos_token=None)),
    Case("vocabulary", ["token ids up to 34", "30 rows"], prepare=description(vocab_size=30)),
    Case(
        "encoder",
        ["BertForMaskedLM", "ForCausalLM"],
        prepare=transformers_model(
            "Bert", num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        ),
    ),
    Case(
        "no room in context",
        ["max_new_tokens = 24", "16 tokens"],
        prepare=description(max_position_embeddings=16),
    ),
    sets("no prompt file", FILES, "'data.jsonl'", "cannot be read"),
    prompted("empty prompt file", ["", ""], "data.jsonl: no prompts"),
    prompted("row with empty prompt", {"prompt": ""}, "data.jsonl:1", "prompt is ''"),
    prompted("prompt without answer", {"prompt": "a"}, "last_answer", "has none"),
    prompted("long prompt", {"prompt": "a" * 300, "answer": "1"}, "300 tokens", "from 1 to 255"),
    prompted("foreign character", {"prompt": "a€", "answer": "1"}, "no token for '€'"),
    sets("option of a source", "prompts.source_options={terms=3}", "takes no options"),
    coded("module exits", SCORED, "import sys; sys.exit(3)", "cannot import mine", "SystemExit"),
    coded(
        "reward arguments",
        SCORED,
        "def score(text): pass",
        "called with (prompt, completion, answer, metadata)",
    ),
    coded("environment import", WORLD, "nonsense", "cannot import mine", "NameError"),
    coded(
        "environment arguments",
        WORLD,
        "class World:\n  def __init__(self, x): 0\n  def reset(self): 0\n  def step(self): 0",
        "called with ()",
    ),
    coded("loss import", LOSS, "nonsense", "cannot load loss", "NameError"),
    sets(
        "loss raises",
        LOSS,
        "'mine:loss'",
        "raised KeyError('lost')",
        prepare=registered(OWN_LOSS, "def loss(inputs): raise KeyError('lost')"),
    ),
    sets(
        "loss is no loss",
        LOSS,
        "returned 3, must be a TokenLoss",
        prepare=registered(OWN_LOSS, "def loss(inputs): return 3"),
    ),
    sets("cores of the learner", "learner.cores=98-99", "learner.cores = '98-99'", "cores are"),
    sets(
        "advantage needs a baseline",
        ADVANTAGE,
        "needs baseline_rewards",
        "actors.greedy_baseline = true",
        prepare=registered(
            "advantage(needs={'baseline_rewards'})", "def mine(batch): return batch.rewards"
        ),
    ),
    sets(
        "advantage compares a group of one",
        [ADVANTAGE, "prompts.group_size=1"],
        "compares the rollouts of a group",
        "group_size must be at least 2",
        prepare=registered("advantage(relative=True)", "def mine(batch): return batch.rewards"),
    ),
    sets(
        "top-p with a ratio of the user's",
        [
            LOSS,
            "learner.minibatches=2",
            "learner.correction=none",
            "actors.top_p=0.9",
            "queues.allow_uncorrected=true",
        ],
        "actors.top_p = 0.9",
        "renormalise",
        prepare=registered(
            "policy_loss_function(owns_is=True, anchor='behavior')",
            "def loss(inputs): return TokenLoss(-inputs.current, {})",
        ),
    ),
    sets("option of a loss", "learner.loss_options={cap=3}", "has no option cap", "cap_high"),
    sourced("source constructor", {"init": "raise KeyError('gone')"}, "KeyError('gone')"),
    sourced(
        "source raises", {"gives": "raise KeyError('gone')"}, "next(2) raised KeyError('gone')"
    ),
    sourced("source gives text", {"gives": "return ['a', 'b']"}, "must give queues.records.Prompt"),
    sourced(
        "metadata not JSON",
        {"gives": "return [Prompt(prompt_id='a', text='a', answer='1', metadata={'x': {1}})]"},
        "metadata",
        "not JSON",
    ),
    sets("no such core", "actors.cores=['4096']", "'4096'", "this machine's cores"),
    sets("no such address", "deploy.ray_address=here", '"here"', '"host:port"'),
    sets("nobody at the address", "deploy.ray_address=127.0.0.1:9", "no cluster answers", "local"),
    sets("runs_dir is a file", "deploy.runs_dir=recipe.toml", "is a file, not a folder"),
    sets(
        "runs_dir cannot be made",
        "deploy.runs_dir=/proc/nothing",
        "/proc/nothing",
        "cannot be written",
    ),
    sets(
        "disk too small",
        ["steps=99999999", "learner.checkpoint_every=99999999", "actors.max_new_tokens=200"],
        "free",
        "checkpoint(s) of",
        "deploy.runs_dir",
    ),
    Case("name taken", ["a run named 'bad' exists", "--replace"], prepare=existing_run),
    Case("name in use", ["a run named 'bad' is going on"], prepare=run_going_on),
    Case("no warm start", ["run `headway sft`"], recipe=SFT),
    Case("no [sft]", ["has no [sft] section"], command="sft"),
    Case("demonstrations missing", ["'pairs.jsonl' cannot be read"], command="sft", recipe=SFT),
    demonstrated(
        "demonstrations too long",
        {"prompt": "a=", "completion": "1" * 40},
        "43 tokens",
        "at most 32",
    ),
    demonstrated(
        "demonstrations foreign",
        {"prompt": "a=", "completion": "€"},
        "'€'",
        "model.tiny.characters",
    ),
    Case("no [reward_model]", ["has no [reward_model] section"], command="reward-model"),
    sets(
        "pairs missing",
        PAIRS,
        "reward_model.pairs = 'pairs.jsonl' cannot be read",
        command="reward-model",
    ),
    paired(
        "pairs too long",
        {"prompt": "a=", "chosen": "1" * 300, "rejected": "2"},
        "reward_model.pairs",
        "303 tokens, must have at most 256",
    ),
    paired("pairs foreign", {"prompt": "a=", "chosen": "€", "rejected": "2"}, "no token for '€'"),
    paired(
        "nothing left of the pairs",
        {"prompt": "a=", "chosen": "1", "rejected": "2"},
        "prompts in a row were held out; lower reward_model.heldout_pairs = 256",
    ),
    sets(
        "no backbone",
        ["reward_model.pairs=lettered_chain_sum", "reward_model.path=./nothing"],
        "reward_model.path = './nothing'",
        command="reward-model",
    ),
    sets(
        "reward models not made",
        [JUDGED, "reward_model.pairs=lettered_chain_sum"],
        "bad-rm, which does not exist yet",
        "run `headway reward-model`",
    ),
    sets(
        "no reward model folder",
        [JUDGED, "actors.reward_model.paths=['./judge']"],
        "actors.reward_model.paths = './judge'",
    ),
    sets(
        "reward model is a language model",
        [JUDGED, "actors.reward_model.paths=['model']"],
        "is a Qwen3ForCausalLM with 2 labels",
        "num_labels = 1",
    ),
]
