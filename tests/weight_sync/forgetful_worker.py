"""The part of vLLM's worker that exchanges weights, with a fault that tests switch on."""

from weight_sync.vllm.plugin import PreparesWeights
from weight_sync.vllm.shadow import PACKED


class KeepsItsHead(PreparesWeights):
    """A worker whose head may keep the packed weights of the version before."""

    keeps = False

    def keep_head(self, keeps: bool) -> bool:
        self.keeps = keeps
        return True

    def exchange_weights(self, version: int) -> bool:
        head = self.weight_transfer_engine.model.lm_head
        packed = head.__dict__.get(PACKED)
        done = super().exchange_weights(version)
        if self.keeps:
            assert packed is not None
            head.__dict__[PACKED] = packed
        return done
