"""Notes before a run, on what a chat template leaves out and on markers that are never seen."""

from collections.abc import Collection, Iterator
from contextlib import suppress

from actors.config import ActorsConfig
from actors.environments.protocol import Message
from actors.environments.tools import ToolOptions
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import POLICY, Renderer
from actors.rollout.stops import Stops
from actors.rollout.text_encoding import encode
from headway.errors import InputError

SYSTEM, QUESTION, REPLY = Message("system", "\ue001"), Message("user", "\ue002"), "\ue003"


def prompt_notes(renderer: Renderer) -> Iterator[str]:
    """Yield what the chat template leaves out of prompts.

    Raises InputError if it leaves out the user's message.
    """
    if not renderer.templated:
        return
    lacking = (renderer.generation_prompt or ("", ""))[1].strip()
    with suppress(PromptRefused):  # as are prompts with such messages
        plain, begun = (renderer.written([QUESTION], reply=reply) for reply in (False, True))
        if QUESTION.content not in plain:
            raise InputError(
                f"the chat template drops the text of messages, and writes {plain!r}; use one that "
                "reads it from `content`, which may not have to be a list"
            )
        if lacking and plain == begun:
            yield f"has no generation prompt: the policy's messages begin without {lacking!r}"
        if SYSTEM.content not in renderer.written([SYSTEM, QUESTION], reply=False):
            yield "drops the system message: the policy does not see it"


def check_replies(renderer: Renderer, role: str) -> None:
    """Raise InputError unless the chat template writes replies of tools, messages of a role."""
    if not renderer.templated:
        return
    try:
        text = renderer.written([QUESTION, POLICY, Message(role, REPLY)], reply=False)
        problem = "" if REPLY in text else f"the chat template drops messages of the role {role!r}"
    except PromptRefused as error:
        problem = str(error)
    if problem:
        other = "user" if role == "tool" else "tool"
        raise InputError(f'{problem}; set actors.environment_options.reply_role = "{other}"')


def end_notes(renderer: Renderer, stops: Stops, end_ids: Collection[int]) -> Iterator[str]:
    """Yield a note if messages end in the chat template where engines do not stop by themselves.

    `end_ids` are the end-of-sequence tokens of the model.
    """
    with suppress(InputError, PromptRefused):  # a template of use for single turns all the same
        end = renderer.turn_end()
        written = encode(renderer.tokenizer, end)
        stop = Stops(renderer, stops.strings, (*stops.ids, *end_ids)).find(written)
        text = f"ends messages with {end!r}, which is no end-of-sequence token of the model"
        if {*renderer.turn_end_ids} - {*end_ids, *stops.hidden}:
            yield f"{text}: rollouts stop there too, as with actors.stop, and warm starts teach it"
        elif written and stop is None:
            yield f"{text} nor one of actors.stop: name it there, or rollouts may not end"


def marker_notes(renderer: Renderer, stops: Stops, config: ActorsConfig) -> Iterator[str]:
    """Yield a note for every marker of a reward or of tools that is never in the policy's text."""
    prefilled = (renderer.generation_prompt or ("", ""))[0]
    shown = renderer.begun([])
    for marker in _markers(config):
        hidden = [text for text in renderer.hidden if text in marker]
        stop = [text for text in (*stops.strings, *stops.hidden.values()) if text in marker]
        try:
            encode(renderer.tokenizer, marker)
        except PromptRefused as error:
            yield f"{marker!r} is never seen: {error}"
            continue
        if hidden:
            yield f"{marker!r} is never seen: texts are without the special token {hidden[0]!r}"
        elif stop and not config.include_stop:
            yield (
                f"{marker!r} is never seen: messages end before the stop {stop[0]!r}; set "
                "actors.include_stop = true"
            )
        elif marker in prefilled and marker not in shown:
            yield f"{marker!r} is written by the chat template, and is not in the policy's text"


def _markers(config: ActorsConfig) -> list[str]:
    """Return the texts that the reward `tags` and the parsers of tool calls look for."""
    markers: list[str] = []
    if "tags" in (*config.reward, *(config.heldout_reward or ())):
        for name in config.reward_options.get("tags", {}).get("names", ("think", "answer")):
            markers += [f"<{name}>", f"</{name}>"]
    if config.environment == "tools":
        markers += ToolOptions(**config.environment_options).markers
    return markers
