"""Tokens that vLLM has sampled for one request, with log-probabilities and versions."""

from dataclasses import dataclass, field
from typing import Any

from actors.engines.protocol import Generation
from headway.errors import HeadwayError
from queues.records import FinishReason

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


@dataclass(slots=True)
class Sampled:
    """Collects the outputs of one request."""

    request_id: str
    cache_salt: str = ""
    """Salt that the request was admitted with."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORTED
    """ABORTED until vLLM says otherwise."""
    whole: bool = False
    """True if each output has all tokens, False if those since the last one."""
    _spans: Any = ()

    def add(self, output: Any) -> None:
        """Take an output of vLLM."""
        completion = output.outputs[0]
        flat = completion.logprobs
        if self.whole:
            self.token_ids, self.logprobs = [], []
        self.token_ids += completion.token_ids
        # A token that is sampled comes before those that were asked for.
        self.logprobs += [flat.logprobs[start] for start in flat.start_indices]
        self._spans = completion.weight_versions or ()
        if output.finished:
            self.finish_reason = FINISH_REASONS.get(completion.finish_reason, FinishReason.ERROR)

    def generation(self) -> Generation:
        """Return the whole; raise HeadwayError unless every token has a version."""
        versions: list[int] = []
        for span in self._spans:
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != len(self.token_ids):
            raise HeadwayError(
                f"{self.request_id}: vLLM stamped {len(versions)} of {len(self.token_ids)} tokens"
            )
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=versions,
            finish_reason=self.finish_reason,
            cache_salt=self.cache_salt,
        )
