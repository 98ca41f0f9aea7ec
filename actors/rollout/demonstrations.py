"""Demonstrations and judged texts to token ids, as a rollout has them.

A demonstration is a rollout that was not sampled: the ids of its prompt, the tokens that the policy
is to say, and, in a conversation, the ids that a rollout appends between its turns. Only the
policy's tokens are in the loss.

A completion is text that the policy says, and stands in the ids as it is. Messages of an assistant
are written by the chat template, each as the last one of the conversation so far: their text is
what stands between the generation prompt and the end of the turn (prefix rendering). A turn stays
as it was said, as in a rollout, where templates would later take thoughts out of it.
"""

from collections.abc import Sequence

from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import Renderer
from actors.rollout.stops import Stops
from actors.rollout.text_encoding import encode
from headway.errors import InputError

Tokens = tuple[list[int], list[bool]]
"""Token ids, and True for those that the policy says."""


class DemonstrationRenderer:
    """Renders demonstrations for one model, with the renderer and stops of its rollouts.

    `end_ids` are the tokens that engines stop at by themselves, `eos` is the one of them that ends
    a message where nothing else does.
    """

    def __init__(
        self, renderer: Renderer, stops: Stops, *, end_ids: Sequence[int], eos: int
    ) -> None:
        self._renderer = renderer
        ids = (*stops.ids, *end_ids, *renderer.turn_end_ids)
        self._stops = Stops(renderer, stops.strings, ids)
        try:
            written = encode(renderer.tokenizer, renderer.turn_end())
        except (InputError, PromptRefused):  # of use for pairs all the same
            written = []
        length = self._stops.find(written)
        self._end = [eos] if length is None else written[:length]
        """Tokens that end a message: what the template writes up to a stop, or else eos."""

    def pair(self, messages: Sequence[Message], completion: str) -> Tokens:
        """Return a prompt and its completion; raise PromptRefused as `Renderer.prompt`."""
        prompt, reply = self._renderer.prompt(messages), self._ended(completion)
        return [*prompt, *reply], [False] * len(prompt) + [True] * len(reply)

    def conversation(self, messages: Sequence[Message], turns: Sequence[Message]) -> Tokens:
        """Return a conversation; `messages` begin it, `turns` go on with the first of the policy.

        Raises InputError as `Renderer.continuation`, and PromptRefused where the template does not
        write a message of the assistant after its generation prompt and before the end of the turn.
        """
        renderer = self._renderer
        ids = renderer.prompt(messages)
        mask = [False] * len(ids)
        history, others = [*messages], list[Message]()
        for turn in turns:
            if turn.role == "assistant":
                if len(history) > len(messages):
                    ids += renderer.continuation(others, ids[-1])
                reply = self._ended(_written_reply(renderer, history, turn))
                mask += [False] * (len(ids) - len(mask)) + [True] * len(reply)
                ids += reply
                others = []
            else:
                others.append(turn)
            history.append(turn)
        return ids, mask

    def _ended(self, text: str) -> list[int]:
        """Return the ids of what the policy says, up to its end."""
        ids = self._renderer.following(text)
        length = self._stops.find(ids)
        if length is None:
            return [*ids, *self._end]
        if length < len(ids):
            raise PromptRefused(
                f"{text[:80]!r} has a stop before its end, where a rollout would end; leave it out "
                "there, or change actors.stop"
            )
        return ids


def _written_reply(renderer: Renderer, history: Sequence[Message], turn: Message) -> str:
    """Return what the policy says in a message of the assistant after `history`."""
    if not renderer.templated:
        return turn.content
    before = renderer.written(history, reply=True)
    whole = renderer.written([*history, turn], reply=False)
    end = renderer.turn_end() if whole.startswith(before) else None
    if end is None or not whole.endswith(end) or len(whole) < len(before) + len(end):
        raise PromptRefused(
            f"the chat template does not write {turn.content[:80]!r} after the assistant's "
            f"generation prompt, but {whole[-200:]!r}, so what the policy says in it cannot be "
            "told apart exactly; give demonstrations as prompt and completion"
        )
    return whole[len(before) : len(whole) - len(end)]


def judged(renderer: Renderer, messages: Sequence[Message], completion: str) -> list[int]:
    """Return the ids of a prompt and its completion, closed, as a reward model reads them.

    They begin with those of the prompt in a rollout, unless the template writes the answer
    otherwise. A message of the assistant that ends the prompt is the beginning of the completion.
    """
    *before, begun = messages
    if begun.role == "assistant":
        messages = before
        completion = begun.content + completion.removeprefix(begun.content)
    answer = Message("assistant", completion)
    prompt = renderer.prompt(messages)
    if not renderer.templated:
        ids = renderer.encoded(lambda written: written[0].content, [answer], follows=True)
        return [*prompt, *ids, renderer.tokenizer.eos_token_id]

    def whole(written: Sequence[Message]) -> str:
        return renderer.written(written, reply=False)

    def closing(written: Sequence[Message]) -> str:
        return whole(written).removeprefix(renderer.written(written[:-1], reply=True))

    conversation = [*messages, answer]
    if closing(conversation) == whole(conversation):
        return renderer.encoded(whole, conversation)
    return [*prompt, *renderer.encoded(closing, conversation, follows=True)]
