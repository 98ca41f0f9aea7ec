"""vLLM's own serving app on an engine of ours, which gives it exact prompts and notes what it says.

    POST ─▶ vLLM's API ─▶ preprocess_chat ─▶ Recorder.generate ─▶ vLLM's API ─▶ text, tool calls
                          Session.begin      VllmEngine.outputs
                          (ids of a prompt)  Session.complete, on_turn

vLLM parses requests, writes answers in the form of each API, and finds the tool calls in them. It
renders no prompt, and chooses no parameter of sampling.
"""

import itertools
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from actors.config import ActorsConfig
from actors.engines.protocol import SamplingParameters
from actors.engines.vllm import VllmEngine
from actors.engines.vllm_output import same_log
from actors.engines.vllm_sampled import Sampled
from actors.errors import EngineDied, EngineStale, PromptRefused, RolloutFailed
from actors.gateway.http_server import FAILED
from actors.gateway.open_session import CALL, STOPPED, Call
from actors.gateway.reply import ReplyReader
from actors.gateway.requests import FREE, MODEL, Refused
from headway.errors import HeadwayError, InputError
from queues.records import FinishReason, Turn

TOOL_PARSERS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
)
"""Texts that a chat template writes around tool calls, and vLLM's parsers of these; the first."""
STREAM_INTERVAL = 16
"""Tokens in one part of a streamed answer, but for the first."""

log = logging.getLogger(__name__)


async def serving_app(
    engine: VllmEngine, config: ActorsConfig, sampling: SamplingParameters
) -> Any:
    """Return vLLM's app on a started engine; raises InputError for a parser that vLLM lacks.

    Every answer is sampled with `sampling`, but for its length and the temperature of its session.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    client = engine.client
    given = ["--model", MODEL, "--served-model-name", MODEL]
    given += ["--disable-fastapi-docs", "--disable-log-stats"]
    gateway, thoughts = config.gateway, config.gateway.reasoning_parser
    parser = tool_parser_of(client.renderer.tokenizer.chat_template, gateway.tool_parser)
    if parser is not None:
        given += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if thoughts is not None:
        given += ["--structured-outputs-config", json.dumps({"reasoning_parser": thoughts})]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    recorder = Recorder(engine, sampling)
    try:
        validate_parsed_serve_args(arguments)
        tasks = await client.get_supported_tasks()
        with same_log():
            app = build_app(arguments, tasks, client.model_config)
        await init_app_state(recorder, app.state, arguments, tasks)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"vLLM cannot serve actors.gateway with tool_parser {parser!r} and reasoning_parser "
            f"{thoughts!r}: {error}"
        ) from error
    renderer = app.state.online_renderer
    give_prompts(renderer, client.model_config.max_model_len)
    return app


def tool_parser_of(template: str | None, asked: str | None) -> str | None:
    """Return the name of the tool parser, which "auto" finds by what a chat template writes."""
    if asked != "auto":
        return asked
    text = str(template or "")
    return next((parser for written, parser in TOOL_PARSERS if written in text), None)


def give_prompts(renderer: Any, max_model_len: int) -> None:
    """Let an `OnlineRenderer` of vLLM take the ids of every prompt from the session that asks."""
    from vllm.exceptions import VLLMValidationError
    from vllm.inputs import tokens_input

    preprocess = renderer.preprocess_chat

    async def begun(call: Call, begin: Any, *arguments: Any) -> list[int]:
        call.begin()
        try:
            call.request = begin(*arguments)
            ids = list(call.request.ids)
            if len(ids) >= max_model_len:
                raise call.opened.beyond(
                    400,
                    f"the prompt has {len(ids)} tokens, must have fewer than {max_model_len} "
                    "(maximum context length)",
                    is_final=False,  # the agent may compress its history
                )
            if call.path not in FREE:
                await call.opened.admit(call, max_model_len - len(ids))
        except (PromptRefused, InputError) as error:
            raise VLLMValidationError(str(error), parameter="messages") from error
        except Refused as refused:
            call.refusal = refused
            raise VLLMValidationError(str(refused)) from None
        return ids

    async def preprocess_chat(
        request: Any, messages: list[Any], *others: Any, **options: Any
    ) -> Any:
        call, tools = CALL.get(), options.get("tool_dicts")
        written = request.build_chat_params(None, "auto").chat_template_kwargs
        given = template_options(written)
        ids = await begun(call, call.opened.session.begin, messages, tools, given)
        call.reader = ReplyReader(request, renderer)
        request.kv_transfer_params = {"prompt_token_ids": ids}
        return await preprocess(request, messages, *others, **options)

    async def render_completion(request: Any, **_options: Any) -> Any:
        call = CALL.get()
        ids = await begun(call, call.opened.session.begin_text, request.prompt)
        renderer.renderer.validate_token_ids(ids, parameter="prompt")
        call.reader = ReplyReader(request)
        return [tokens_input(ids)]

    renderer.preprocess_chat, renderer.render_completion = preprocess_chat, render_completion


def template_options(written: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a client for the chat template, without those that vLLM adds."""
    added = {"tools", "tokenize", "add_generation_prompt", "continue_final_message", "documents"}
    return {k: v for k, v in written.items() if k not in added and v is not None}


class Interrupted(HeadwayError):
    """The engine was interrupted before an answer was whole."""


class Recorder:
    """An engine client for vLLM's app: another client, whose requests a `VllmEngine` admits."""

    def __init__(self, engine: VllmEngine, sampling: SamplingParameters) -> None:
        self._engine, self._sampling = engine, sampling
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.client, name)

    def generate(
        self, prompt: Any, parameters: Any, request_id: str, **_options: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request of the session that asks, whose prompt is known."""
        call, sampled = CALL.get(), Sampled(f"gateway-{next(self._numbers)}")
        call.outputs = self._noted(call, parameters, sampled)
        return call.outputs

    async def _noted(
        self, call: Call, parameters: Any, sampled: Sampled
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request, the last one once the turn is saved."""
        from vllm.exceptions import (
            GenerationError,
            RetryableRequestError,
            VLLMClientError,
            VLLMValidationError,
        )

        opened = call.opened
        call.begin()
        try:
            async with aclosing(self._outputs(call, parameters, sampled)) as outputs:
                async for output in outputs:
                    if output.finished:
                        reply, generation = call.reader.reply(), sampled.generation()
                        if generation.finish_reason is FinishReason.ERROR:
                            raise HeadwayError(
                                f"vLLM failed after {len(generation.token_ids)} tokens"
                            )
                        call.begin()
                        call.turn = opened.session.complete(call.request, generation, reply)
                        opened.completed(call)
                        await opened.save(call.turn)
                    yield output
        except InputError as error:
            raise VLLMValidationError(str(error)) from error
        except HeadwayError as error:
            own = isinstance(error, EngineDied | EngineStale)
            failure = error if own else RolloutFailed(f"request {sampled.request_id}: {error}")
            opened.stop(None if isinstance(error, Interrupted) else failure)
            call.refusal = Refused(503, STOPPED)
            raise RetryableRequestError(STOPPED) from error
        except VLLMClientError:
            raise
        except Exception as error:
            log.warning("request %s failed", sampled.request_id, exc_info=error)
            call.refusal = Refused(500, FAILED)
            raise GenerationError(FAILED) from error
        finally:
            if call.turn is None:
                reason = "interrupted" if opened.interrupted else "undelivered"
                opened.session.leave_out(reason, len(sampled.token_ids))

    async def _outputs(
        self, call: Call, parameters: Any, sampled: Sampled
    ) -> AsyncGenerator[Any, None]:
        """Yield what the policy samples, or the answer of an earlier attempt; the reader has it."""
        from vllm.sampling_params import RequestOutputKind

        opened, request, turn = call.opened, call.request, call.turn
        streams = parameters.output_kind is RequestOutputKind.DELTA
        sampled.whole = not streams
        if turn is not None:
            tokenizer = self._engine.client.renderer.tokenizer
            outputs = repeated(turn, request.ids, tokenizer, parameters, sampled)
        else:
            asked = self._asked(call, parameters, streams=streams)
            salt = opened.session.cache_salt
            outputs = self._engine.outputs(request.ids, asked, sampled, salt)
        with opened.waiting():
            async with aclosing(outputs):
                async for output in outputs:
                    if output.outputs[0].finish_reason == "abort":
                        break
                    call.reader.add(output, streams=streams)
                    if streams or output.finished:
                        yield output
        if sampled.finish_reason is FinishReason.ABORTED:
            raise Interrupted("the engine was interrupted")

    def _asked(self, call: Call, parameters: Any, *, streams: bool) -> Any:
        """Return the parameters of a request: the recipe's, in the form that its API wants."""
        from vllm.sampling_params import RequestOutputKind

        limits, recipe = call.opened.limits, self._sampling
        most = min(parameters.max_tokens, call.tokens)
        call.opened.release(call, most)
        temperature = recipe.temperature if limits.temperature is None else limits.temperature
        return self._engine.parameters(
            replace(recipe, max_new_tokens=most, temperature=temperature, seed=None),
            stop=[*recipe.stop, *(parameters.stop or ())],
            logprobs=max(0, parameters.logprobs or 0),
            detokenize=True,
            skip_special_tokens=parameters.skip_special_tokens,
            output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.CUMULATIVE,
            stream_interval=min(most, STREAM_INTERVAL) if streams else most,
        )


async def repeated(
    turn: Turn, prompt_ids: Sequence[int], tokenizer: Any, parameters: Any, sampled: Sampled
) -> AsyncGenerator[Any, None]:
    """Yield the answer of an earlier attempt as one output of vLLM."""
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    ids, logprobs = list(turn.token_ids), FlatLogprobs()
    for token, value in zip(ids, turn.behavior_logprobs, strict=True):
        logprobs.append({token: Logprob(value, decoded_token=tokenizer.decode([token]))})
    stopped = turn.finish_reason is FinishReason.STOP
    special = parameters.skip_special_tokens
    text = tokenizer.decode(ids, skip_special_tokens=special)
    if stopped and ids[-1] in tokenizer.all_special_ids:
        text = tokenizer.decode(ids[:-1], skip_special_tokens=special)
    for stop in (parameters.stop or ()) if stopped else ():
        text = text.partition(stop)[0]
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason="stop" if stopped else "length",
        weight_versions=[WeightVersionSpan(str(v), n, n + 1) for n, v in enumerate(turn.versions)],
    )
    output = RequestOutput(
        request_id=sampled.request_id, prompt=None, prompt_token_ids=list(prompt_ids),
        prompt_logprobs=None, outputs=[completion], finished=True,
    )  # fmt: skip
    sampled.cache_salt = turn.cache_salt
    sampled.add(output)
    yield output
