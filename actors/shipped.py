"""The prompt sources, environments, tools and rewards that ship with Headway, by name."""

from dataclasses import dataclass, replace
from types import NoneType

from headway.registry import Entry, Registry

GYM = "reasoning_gym"
"""Library whose reward scores the problems of its own source alone."""


@dataclass(frozen=True, slots=True)
class SourceTraits:
    """Properties of a prompt source."""

    endless: bool = False
    """It always draws new problems, and never comes back to one."""
    library: str | None = ""
    """Library whose problems it has; "": perhaps those of any, None: of none."""


@dataclass(frozen=True, slots=True)
class EnvironmentTraits:
    """Properties of an environment."""

    agent: bool = False
    """It asks the policy through the gateway; its function returns an `Agent`. User code that is a
    function, and no class, is an agent too."""


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """Properties of a reward."""

    needs_answer: bool = False
    """It compares with the prompt's answer."""
    reads_answer: bool = False
    """It fails for an answer that it cannot read, whatever the completion, so that all answers of
    a table can be tried before a run."""
    inline: bool = False
    """Its time is proportional to the text: it cannot hang, and needs no process."""
    verifier: bool = False
    """It reads completions with more than plain string work, in the sandbox: a function of prompt,
    answer and metadata that returns a function of the completion."""
    library: str | None = None
    """Library whose problems alone it scores; None: those of any source."""
    of_group: bool = False
    """It scores all completions of a group at once, which it compares."""


_ENDLESS = SourceTraits(endless=True, library=None)
_GYM = SourceTraits(endless=True, library=GYM)
SOURCES = Registry(
    "prompt source",
    "module:Class",
    SourceTraits,
    Entry("files", "actors.sources.files:file_source", SourceTraits(library=None)),
    Entry("datasets:NAME", "actors.sources.hub_dataset:dataset_source", SourceTraits()),
    Entry("mixture", "actors.sources.mixture:Mixture", SourceTraits()),
    Entry("lettered_chain_sum", "actors.sources.lettered_chain_sum:LetteredChainSum", _ENDLESS),
    Entry("tiny:TASK", "actors.sources.tiny_task:TinyTask", SourceTraits()),
    Entry("reasoning_gym:TASK", "actors.sources.reasoning_gym:ReasoningGymSource", _GYM),
    Entry("verifiers:ID", "actors.sources.verifiers_source:verifiers_source", SourceTraits()),
)

_PLAIN, _AGENT = EnvironmentTraits(), EnvironmentTraits(agent=True)
ENVIRONMENTS = Registry(
    "environment",
    "module:Class",
    EnvironmentTraits,
    Entry("single_turn", "actors.environments.single_turn:SingleTurn", _PLAIN),
    Entry("tools", "actors.environments.tools:load_tools", _PLAIN),
    Entry("program:COMMAND", "actors.programs.program:load_program", _AGENT),
    Entry("remote", "actors.remote.remote_agent:load_remote", _AGENT),
    Entry("verifiers:ID", "actors.programs.verifiers_taskset:load_taskset", _AGENT),
)
"""Classes are built with actors.environment_options as keywords; functions load the others."""

TOOLS = Registry(
    "tool",
    "module:function",
    NoneType,
    Entry("calculator", "actors.environments.calculator:calculator"),
    Entry("python", "actors.environments.tools:python"),
)

_TEXT = RewardTraits(inline=True)
_ANSWER = RewardTraits(needs_answer=True, inline=True)
_VERIFIER = RewardTraits(verifier=True)
_ANSWER_VERIFIER = RewardTraits(needs_answer=True, verifier=True)

REWARDS = Registry(
    "reward",
    "module:function",
    RewardTraits,
    Entry("exact_match", "actors.rewards.answers:exact_match", _ANSWER),
    Entry("last_answer", "actors.rewards.answers:last_answer", _ANSWER),
    Entry(
        "numeric_match", "actors.rewards.answers:numeric_match", replace(_ANSWER, reads_answer=True)
    ),
    Entry("tags", "actors.rewards.patterns:tags", _TEXT),
    Entry("regex", "actors.rewards.patterns:regex", _VERIFIER),
    Entry("json_schema", "actors.rewards.patterns:json_schema", _VERIFIER),
    Entry("similarity", "actors.rewards.answers:similarity", _ANSWER_VERIFIER),
    Entry(
        "math_verify",
        "actors.rewards.libraries:math_verify",
        replace(_ANSWER_VERIFIER, reads_answer=True),
    ),
    Entry(GYM, "actors.rewards.libraries:reasoning_gym", RewardTraits(verifier=True, library=GYM)),
    Entry("code", "actors.rewards.code:code", RewardTraits()),
    Entry("reward_model", "actors.rewards.learned:LearnedReward", RewardTraits()),
    Entry("llm_judge", "actors.rewards.llm_judge:LlmJudge", RewardTraits()),
    Entry(
        "pairwise_judge",
        "actors.rewards.pairwise_judge:PairwiseJudge",
        RewardTraits(of_group=True),
    ),
)
"""Functions are called with prompt, completion, answer and metadata, except verifiers; those of a
group with the list of its completions instead."""
