"""The client of vLLM without its engine: what it says is written by a test, character by character.

`VllmEngine` and vLLM's app are the real ones.
"""

import asyncio
import re

from actors.engines.vllm import VllmEngine
from tests.actors.fakes import engine_spec
from tests.actors.gateway.agent_model import agent_config, agent_model


class StandIn:
    """vLLM's `AsyncLLM`, as far as `VllmEngine.outputs` and the serving app use it."""

    errored = False
    is_running = True
    is_stopped = False
    dead_error = None

    def __init__(self, folder):
        from vllm import AsyncEngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config = AsyncEngineArgs(
            model=str(folder), dtype="float32", max_model_len=1024, enforce_eager=True,
            served_model_name="policy",
        ).create_engine_config()  # fmt: skip
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.engine_core = self
        self.ends = {self.renderer.tokenizer.eos_token_id}
        """Tokens at which answers stop."""
        self.goes_on = asyncio.Event()
        """Cleared: answers stop after their first token."""
        self.reset()

    def reset(self):
        """Say hello, and forget what was asked."""
        self.says = lambda prompt: "hello"
        """Text of the next answer, by the text of its prompt."""
        self.version = 0
        self.prompts, self.salts, self.parameters, self.aborted = [], [], [], []
        self.error = None
        """Raised after the first token, if set."""
        self.goes_on.set()
        self.began = asyncio.Event()
        """Set when the second part of an answer is asked for: the first has arrived."""
        self._aborted = {}

    def check_admission(self, *arguments, **options):
        pass

    async def get_supported_tasks(self):
        return ("generate",)

    async def is_tracing_enabled(self):
        return False

    async def check_health(self):
        pass

    async def pause_scheduler_async(self, *, mode, clear_cache):
        pass

    async def resume_generation(self):
        pass

    async def abort(self, requests, internal=False):
        for request in [requests] if isinstance(requests, str) else requests:
            self.aborted.append(request)
            if request in self._aborted:
                self._aborted[request].set()

    def shutdown(self, timeout):
        pass

    async def generate(self, prompt, parameters, request_id):
        tokenizer = self.renderer.tokenizer
        ids = prompt["prompt_token_ids"]
        self.prompts.append(ids)
        self.salts.append(prompt["cache_salt"])
        self.parameters.append(parameters)
        abort = self._aborted[request_id] = asyncio.Event()
        said = self.spelled_ids(self.says(tokenizer.decode(ids)))
        ended = bool(said) and said[-1] in self.ends
        whole = [*said, *([] if ended else [tokenizer.eos_token_id])]
        said, whole = whole[:-1], whole[: parameters.max_tokens]
        spans = []
        step = parameters.stream_interval or 1
        cuts = [1, *range(1 + step, len(whole), step), len(whole)] if len(whole) > 1 else [1]
        before = 0
        try:
            for cut in cuts:
                if before:
                    self.began.set()
                waiting = asyncio.create_task(self.goes_on.wait()) if before else None
                stopping = asyncio.create_task(abort.wait())
                await asyncio.sleep(0)
                if waiting is not None:
                    await asyncio.wait({waiting, stopping}, return_when="FIRST_COMPLETED")
                    waiting.cancel()
                stopping.cancel()
                if before and self.error is not None:
                    raise self.error
                ended = abort.is_set()
                new = [] if ended else whole[before:cut]
                spans.append((self.version, before, before + len(new)))
                finish = "abort" if ended else None
                if not ended and cut == len(whole):
                    finish = "stop" if len(said) < parameters.max_tokens else "length"
                first = 0 if parameters.output_kind.name == "CUMULATIVE" else before
                yield self._output(request_id, ids, whole[first : before + len(new)], finish, spans)
                before = cut
                if finish:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    def spelled_ids(self, text):
        """Return ids of a text: its added tokens, and all else character by character."""
        tokenizer = self.renderer.tokenizer
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        parts = re.findall("|".join([*map(re.escape, added), r"[\s\S]"]), text)
        return [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]

    def _output(self, request_id, prompt_ids, ids, finish, spans):
        from vllm.logprobs import FlatLogprobs, Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        tokenizer = self.renderer.tokenizer
        flat = FlatLogprobs()
        for token in ids:
            flat.append({token: Logprob(-0.5, 1, tokenizer.decode([token]))})
        completion = CompletionOutput(
            index=0,
            text=tokenizer.decode(
                ids[:-1] if finish == "stop" else ids,
                skip_special_tokens=self.parameters[-1].skip_special_tokens,
            ),
            token_ids=ids,
            cumulative_logprob=None,
            logprobs=flat,
            finish_reason=finish,
            weight_versions=[WeightVersionSpan(str(v), a, b) for v, a, b in spans]
            if finish
            else None,
        )
        return RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=prompt_ids, prompt_logprobs=None,
            outputs=[completion], finished=finish is not None,
        )  # fmt: skip


def spelled(text):
    """Return the tokens of a text, characters one by one."""
    return re.findall(r"</?tool_call>|[\s\S]", text)


def stand_in_engine(folder, tokenizer=None) -> tuple[VllmEngine, StandIn]:
    """Return a started engine that has a stand-in for vLLM, and that."""
    if tokenizer is None:
        agent_model(folder)
    else:
        tokenizer.save_pretrained(folder)
        agent_config(tokenizer).save_pretrained(folder)
    engine = VllmEngine(engine_spec(folder, version=0), 1024)
    engine._engine = client = StandIn(folder)
    return engine, client
