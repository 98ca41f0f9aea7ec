"""The tokens of one rollout whose agent asks as it likes: a tree of its turns.

    request ─▶ begin: the longest stored history that it begins with ─▶ its ids, and what follows
    answer ─▶ complete: the longest stored path of ids that the prompt begins with ─▶ grows there:
              at its end the segment grows on; elsewhere a further segment begins

Stored ids are the truth. A request whose messages begin with those of a stored turn and its reply
gets that turn's very ids and only the rest rendered; a history that was edited, forked, compressed,
or that the chat template rewrites, is rendered, and shares with the tree what ids it can. Sampled
tokens stand in the tree once, where they were sampled.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from actors.engines.protocol import Generation
from actors.gateway.messages import ChatMessage, read_message
from actors.gateway.template import ChatTemplate, Tools
from actors.rollout.transcript import Transcript
from queues.records import Segment, Turn

NOT_REPEATED = "not repeated"
"""Reason of answers of an earlier attempt that the agent did not ask for again."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request of an agent, between `begin` and `complete`."""

    ids: list[int]
    """The prompt."""
    extends: int = -1
    """The turn whose path, sampled tokens included, the prompt was made from; −1: rendered."""
    messages: Sequence[ChatMessage] = ()
    context: str = ""
    """Tools and options of the request, under which messages are compared."""
    text: str | None = None
    """The prompt as a text, where it was sent as one."""
    recorded: Turn | None = None
    """The answer that it is given, of an earlier attempt or one that no client has had whole."""


class SessionTokens(NamedTuple):
    """The tokens of a session as those of a `Rollout`; lists are empty without a turn."""

    token_ids: list[int]
    loss_mask: list[bool]
    behavior_logprobs: list[float]
    versions: list[int]
    prompt_length: int
    segments: list[Segment]
    turns: int
    left_out: dict[str, int]


@dataclass(slots=True)
class _Branch:
    """Tokens after the first `prefix` ones of the path of branch `parent`."""

    parent: int
    prefix: int
    tokens: Transcript = field(default_factory=Transcript)


class _End(NamedTuple):
    """The end of a turn: the first `length` tokens of the path of a branch."""

    branch: int
    length: int


class Session:
    """The turns of one rollout; those of an earlier attempt are answered again, not sampled.

    Requests may overlap. Nothing is stored before a request is complete.
    """

    def __init__(self, template: ChatTemplate, turns: Sequence[Turn] = ()) -> None:
        self._template = template
        self._branches: list[_Branch] = []
        self._ends: dict[int, _End] = {}
        """By number of the turn."""
        self._histories: dict[bytes, tuple[int, Sequence[ChatMessage]]] = {}
        """Turns and their messages, the reply included, by a digest of these."""
        self._malformed: dict[tuple[bytes, str | None], ChatMessage] = {}
        """Replies with malformed calls, by a digest of what is before them and their outline."""
        self._texts: dict[str, int] = {}
        """Turns by the texts that prompts may begin with to go on from them."""
        self._undecoded: list[int] = []
        """Turns whose decoded text is not among these yet."""
        self._left_out: Counter[str] = Counter()
        self._recorded = {turn.number: turn for turn in sorted(turns, key=lambda t: t.number)}
        """Answers of earlier attempts that were not yet asked for again, and lost ones."""
        self._prompts = _prompts(self._recorded)
        self._next = max(self._recorded, default=-1) + 1
        self.reply = ""
        """Text of the last answer."""
        self.cache_salt: str | None = None
        """Salt of the first answer that was sampled here, and so of later requests."""

    @property
    def turns(self) -> int:
        """Number of completed turns."""
        return len(self._ends)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens in completed turns."""
        return sum(branch.tokens.sampled for branch in self._branches)

    def begin(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return the request of a chat; raise PromptRefused as `ChatTemplate.prompt`."""
        asked, options = [read_message(message) for message in messages], options or {}
        context = json.dumps([tools or None, options], sort_keys=True)
        for n, message in enumerate(asked[1:] if self._malformed else (), 1):
            if message.calls:  # perhaps with arguments that the client has mended
                key = _digests(context, asked[:n])[-1], message.outline
                asked[n] = self._malformed.get(key, message)
        digests = _digests(context, asked)
        for n, message in enumerate(asked if self._prompts else ()):
            if message.role == "assistant" and digests[n] not in self._histories:
                before = Request(ids=[], messages=asked[:n], context=context)
                before = self._rendered(before, digests[:n], tools, options)
                if not self._was_said(before, message):
                    self._repeat(before, message)
        request = Request(ids=[], messages=asked, context=context)
        return self._rendered(request, digests, tools, options)

    def _rendered(
        self,
        request: Request,
        digests: Sequence[bytes],
        tools: Tools | None,
        options: Mapping[str, Any],
    ) -> Request:
        """Give a request its ids; `digests` are of the histories that its messages begin with."""
        asked = request.messages
        for known, digest in reversed([*enumerate(digests, 1)]):
            number, history = self._histories.get(digest, (-1, ()))
            if not history:
                continue
            kept = [replace(m, calls=a.calls) for m, a in zip(history, asked, strict=False)]
            path, whole = self.path(number), [*kept, *asked[known:]]  # with the ids of calls
            if known == len(asked):  # the policy is to go on with its own message
                request.ids = path[:-1] if self._template.ends(path[-1]) else path
                whole[-1] = replace(asked[-1], reasoning=whole[-1].reasoning)
            else:
                tail = self._template.following(whole, known, tools, options, path[-1])
                if tail is None:
                    continue
                request.ids = path + tail
            self._prompts.pop(number, None)  # the client has the answer that was thought lost
            request.extends, request.messages = number, whole
            return request
        request.ids = self._template.prompt(asked, tools, options)
        return request

    def begin_text(self, prompt: str | Sequence[int]) -> Request:
        """Return the request of a text or of ids, which go on from a turn where they begin so."""
        for number, ids in [*self._prompts.items()]:
            turn = self._recorded[number]
            path = [*ids, *turn.token_ids]
            begun = self._template.text(path) if isinstance(prompt, str) else path
            if prompt[: len(begun)] == begun:
                self._complete(Request(ids=ids), self._give(number), "")
        if not isinstance(prompt, str):
            return Request(ids=[*prompt])
        while self._undecoded:
            number = self._undecoded.pop()
            self._texts[self._template.text(self.path(number))] = number
        begun = max((text for text in self._texts if prompt.startswith(text)), key=len, default="")
        if not begun:
            return Request(ids=self._template.text_prompt(prompt), text=prompt)
        number = self._texts[begun]
        path = self.path(number)
        tail = self._template.text_after(prompt[len(begun) :], path[-1])
        if not tail and self._template.ends(path[-1]):
            path.pop()
        return Request(ids=path + tail, text=prompt, extends=number)

    def recorded(self, request: Request) -> Turn | None:
        """Return an answer for the same ids that is to be given again; each is given once."""
        for number, ids in self._prompts.items():
            if ids == request.ids:
                request.recorded = self._give(number)
                return request.recorded
        return None

    def complete(
        self, request: Request, generation: Generation, reply: Mapping[str, Any] | str
    ) -> Turn:
        """Store the answer to a request and return its turn, a recorded one as it was recorded.

        `reply` is the assistant's message as it was parsed, or the text of a completion.
        """
        turn = request.recorded
        if turn is None:
            turn = self._new_turn(request.ids, generation)
            self.cache_salt = self.cache_salt or generation.cache_salt
        return self._complete(request, turn, reply)

    def lose(self, request: Request, turn: Turn) -> None:
        """Give the answer to a request, which its client has not had whole, to the next like it."""
        self._recorded[turn.number], self._prompts[turn.number] = turn, request.ids

    def leave_out(self, reason: str, tokens: int) -> None:
        """Count tokens that were sampled and are in no turn."""
        self._left_out[reason] += tokens

    def path(self, number: int) -> list[int]:
        """Return the ids of the prompt and the answer of a completed turn."""
        return self._path(*self._ends[number])

    def tokens(self) -> SessionTokens:
        """Return all tokens, those of each segment together, as a rollout has them."""
        flat, segments = Transcript(), list[Segment]()
        for branch in self._branches:
            segments.append(Segment(len(flat.token_ids), branch.parent, branch.prefix))
            flat.token_ids += branch.tokens.token_ids
            flat.loss_mask += branch.tokens.loss_mask
            flat.behavior_logprobs += branch.tokens.behavior_logprobs
            flat.versions += branch.tokens.versions
        unasked = [turn for number, turn in self._recorded.items() if number not in self._ends]
        left_out = self._left_out + Counter(
            {NOT_REPEATED: sum(len(turn.token_ids) for turn in unasked)}
        )
        return SessionTokens(
            flat.token_ids, flat.loss_mask, flat.behavior_logprobs, flat.versions,
            prompt_length=[*flat.loss_mask, True].index(True),
            segments=segments[1:], turns=self.turns, left_out=dict(left_out),
        )  # fmt: skip

    def _give(self, number: int) -> Turn:
        del self._prompts[number]
        return self._recorded[number]

    def _was_said(self, request: Request, reply: ChatMessage) -> bool:
        """Return True if a completed turn has so answered the same ids, asked with other tools."""
        return any(
            history[-1].compared == reply.compared
            and len(history) == len(request.messages) + 1
            and self.path(number)[: len(request.ids)] == request.ids
            for number, history in self._histories.values()
        )

    def _repeat(self, request: Request, reply: ChatMessage) -> None:
        """Take a recorded answer as given where an agent that went on has its message."""
        names = [call["function"]["name"] for call in reply.calls]
        content = "".join(reply.content.split())

        def is_reply(text: str) -> bool:
            text = "".join(text.split())
            same = all(name in text for name in names) if names else text.endswith(content)
            return bool(names or content) and content in text and same

        for number, ids in self._prompts.items():
            sampled = [i for i in self._recorded[number].token_ids if not self._template.ends(i)]
            texts = (self._template.text(sampled), self._template.plain(sampled))
            if ids == request.ids and any(map(is_reply, texts)):
                self._complete(request, self._give(number), reply.fields())
                return

    def _complete(self, request: Request, turn: Turn, reply: Mapping[str, Any] | str) -> Turn:
        self._recorded.pop(turn.number, None)
        if turn.number not in self._ends:
            self._store(request.ids, turn)
        self._remember(request, turn.number, reply)
        return turn

    def _new_turn(self, ids: Sequence[int], generation: Generation) -> Turn:
        branch, shared = self._shared(ids)
        number, self._next = self._next, self._next + 1
        ends = [(end, turn) for turn, end in self._ends.items() if end >= (branch, shared)]
        parent = min(ends)[1] if shared else -1
        return Turn(
            number=number,
            parent=parent,
            shared=shared,
            injected=[*ids[shared:]],
            token_ids=[*generation.token_ids],
            behavior_logprobs=[*generation.logprobs],
            versions=[*generation.versions],
            finish_reason=generation.finish_reason,
            cache_salt=generation.cache_salt,
        )

    def _store(self, ids: list[int], turn: Turn) -> None:
        """Put a turn into the tree, where most of its prompt is."""
        index, shared = self._shared(ids)
        if not self._branches or shared < self._length(index):
            self._branches.append(_Branch(index, shared))
            index = len(self._branches) - 1
        branch = self._branches[index]
        branch.tokens.inject(ids[shared:])
        branch.tokens.sample(turn.token_ids, turn.behavior_logprobs, turn.versions)
        self._ends[turn.number] = _End(index, self._length(index))

    def _remember(self, request: Request, number: int, reply: Mapping[str, Any] | str) -> None:
        """Know a turn by what the client will send of it."""
        self._undecoded.append(number)
        if isinstance(reply, str) and not request.messages:
            self.reply = reply
            if reply and request.text is not None:
                self._texts[request.text + reply] = number
            return
        message = {"content": reply} if isinstance(reply, str) else reply
        answer = read_message({**message, "role": "assistant"})
        self.reply, before = answer.content, [*request.messages]
        if before and before[-1].role == "assistant":  # which the policy went on with
            begun = before.pop()
            answer = replace(
                begun,
                content=begun.content + answer.content,
                reasoning=begun.reasoning + answer.reasoning,
                calls=begun.calls + answer.calls,
            )
        history = [*before, answer]
        *others, digest = _digests(request.context, history)
        self._histories[digest] = number, history
        if answer.malformed and others:
            self._malformed[others[-1], answer.outline] = answer

    def _shared(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return the branch whose path begins most like `ids`, and how many tokens they share."""
        shared = list[int]()
        for branch in self._branches:
            length = shared[branch.parent] if shared else 0
            if length >= branch.prefix:
                length = branch.prefix + _common(branch.tokens.token_ids, ids[branch.prefix :])
            shared.append(length)
        longest = max(shared, default=0)
        return (shared.index(longest) if shared else 0), longest

    def _length(self, branch: int) -> int:
        return self._branches[branch].prefix + len(self._branches[branch].tokens.token_ids)

    def _path(self, branch: int, length: int) -> list[int]:
        """Return the first tokens of the path of a branch."""
        at = self._branches[branch]
        before = self._path(at.parent, min(at.prefix, length)) if at.prefix else []
        return before + at.tokens.token_ids[: max(0, length - at.prefix)]


def _digests(context: str, messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return a digest of the history that ends with each message."""
    digest, digests = hashlib.sha256(context.encode()), list[bytes]()
    for message in messages:
        compared = message.compared.encode()
        digest.update(b"%d:%b" % (len(compared), compared))
        digests.append(digest.digest())
    return digests


def _prompts(turns: Mapping[int, Turn]) -> dict[int, list[int]]:
    """Return the ids of the prompts of turns by their numbers, ascending.

    Turns whose parents are missing have none: of turns that end together not all may be saved.
    """
    prompts, paths = dict[int, list[int]](), {-1: list[int]()}
    for number, turn in turns.items():
        if turn.parent not in paths:
            continue
        prompts[number] = [*paths[turn.parent][: turn.shared], *turn.injected]
        paths[number] = [*prompts[number], *turn.token_ids]
    return prompts


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
