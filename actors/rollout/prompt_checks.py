"""Checks that prompts fit a model's vocabulary and context, before an engine is started."""

import logging
from collections.abc import Iterable

from actors.config import ActorsConfig
from actors.engines.model_folder import context_length, end_ids, load_tokenizer, vocabulary_size
from actors.environments.load_environment import shipped_opening
from actors.environments.tools import ToolOptions
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import renderer_for
from actors.rollout.stops import load_stops
from actors.rollout.template_notes import check_replies, end_notes, marker_notes, prompt_notes
from headway.errors import InputError
from queues.records import Prompt

LOG = logging.getLogger("headway.prompts")


def check_fit(model_path: str, config: ActorsConfig, prompts: Iterable[Prompt]) -> None:
    """Load the tokenizer and render prompts with it, where a shipped environment begins with them.

    Raises InputError for a tokenizer that is missing or does not fit the model, a stop or an option
    of the chat template that it lacks, a prompt that is too long or has an unknown character, and
    a chat template that does not write replies of tools.
    Warns of what the chat template leaves out, and of markers that are never seen.
    """
    tokenizer = load_tokenizer(model_path)
    size = vocabulary_size(model_path)
    largest = max(tokenizer.get_vocab().values())
    if size is not None and largest >= size:
        raise InputError(
            f"the tokenizer of {model_path!r} has token ids up to {largest}, and the model an "
            f"embedding of {size} rows (vocab_size in config.json); they do not belong together"
        )
    context = config.max_model_len or context_length(model_path)
    if context <= config.max_new_tokens:
        raise InputError(
            f"actors.max_new_tokens = {config.max_new_tokens} must be below the context of "
            f"{model_path!r}, {context} tokens: the prompt needs space too"
        )
    renderer = renderer_for(tokenizer, config)
    stops = load_stops(renderer, config.stop)
    begin = shipped_opening(config)
    openings = [(prompt, begin(prompt)) for prompt in prompts] if begin else []
    for prompt, messages in openings:
        try:
            length = len(renderer.prompt(messages))
        except PromptRefused as error:
            raise InputError(f"prompt {prompt.prompt_id!r}: {error}") from None
        if not 1 <= length < context:
            limit = (
                "actors.max_model_len" if config.max_model_len else f"the context of {model_path!r}"
            )
            raise InputError(
                f"prompt {prompt.prompt_id!r} has {length} tokens, must have from 1 to "
                f"{context - 1}, one less than {limit}"
            )
    if config.environment == "tools":
        check_replies(renderer, ToolOptions(**config.environment_options).reply_role)
    ends = end_ids(model_path, tokenizer)
    for note in (*prompt_notes(renderer), *end_notes(renderer, stops, ends)):
        LOG.warning("the chat template of %s %s", model_path, note)
    for note in marker_notes(renderer, stops, config):
        LOG.warning("the marker %s", note)
