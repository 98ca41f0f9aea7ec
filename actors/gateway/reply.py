"""The assistant's message in what the policy said, as the client of an API gets it."""

from typing import Any


class ReplyReader:
    """Reads text and tool calls by the parser of a vLLM `OnlineRenderer`, as its APIs do.

    An answer that is streamed is parsed piece by piece, others as a whole: parsers may differ.
    """

    def __init__(self, request: Any, renderer: Any = None) -> None:
        """Make a reader of a request; without a renderer the answer is a text."""
        self._request, self._of_chat, self._parser = request, renderer is not None, None
        if renderer is not None and renderer.parser is not None:
            self._parser = renderer.parser(
                renderer.renderer.get_tokenizer(),
                request.tools,
                chat_template_kwargs=renderer.effective_chat_template_kwargs(request),
                model_config=renderer.model_config,
            )
        self._text = self._reasoning = ""
        self._calls: dict[int, dict[str, str]] = {}
        """Name and arguments of tool calls by their index."""

    def add(self, output: Any, *, streams: bool) -> None:
        """Take an output of vLLM: the tokens since the last one, or all of them."""
        completion = output.outputs[0]
        if self._parser is None:
            self._text = self._text + completion.text if streams else completion.text
        elif streams:
            self._add_delta(output, completion)
        elif output.finished:
            self._parser.set_prompt_token_ids(output.prompt_token_ids)
            reasoning, text, calls = self._parser.parse(
                completion.text,
                self._request,
                enable_auto_tools=True,
                model_output_token_ids=completion.token_ids,
            )
            self._text, self._reasoning = text or "", reasoning or ""
            for index, call in enumerate(calls or ()):
                self._calls[index] = {"name": call.name, "arguments": call.arguments}

    def _add_delta(self, output: Any, completion: Any) -> None:
        assert self._parser is not None
        delta = self._parser.parse_delta(
            delta_text=completion.text,
            delta_token_ids=list(completion.token_ids),
            request=self._request,
            prompt_token_ids=output.prompt_token_ids,
            finished=completion.finish_reason is not None,
        )
        if delta is None:
            return
        self._text += delta.content or ""
        self._reasoning += delta.reasoning or ""
        for call in delta.tool_calls or ():
            known = self._calls.setdefault(call.index, {"name": "", "arguments": ""})
            if call.function is not None:
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""

    def reply(self) -> dict[str, Any] | str:
        """Return the message in OpenAI's form, or the text of a completion."""
        if not self._of_chat:
            return self._text
        calls = [self._calls[index] for index in sorted(self._calls)]
        if getattr(self._request, "parallel_tool_calls", True) is False:
            calls = calls[:1]  # as vLLM answers it
        named = [{"id": "", "type": "function", "function": call} for call in calls]
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if self._reasoning:
            message["reasoning"] = self._reasoning
        return {**message, "tool_calls": named} if named else message
