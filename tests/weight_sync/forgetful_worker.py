"""The part of vLLM's worker that exchanges weights, with faults that tests switch on."""

from weight_sync.vllm.plugin import PreparesWeights
from weight_sync.vllm.shadow import PACKED


class Forgetful(PreparesWeights):
    """A worker whose head may keep its packed weights, and whose positions may run backwards."""

    keeps = False

    def keep_head(self) -> bool:
        """Keep the head from now on, or no longer."""
        self.keeps = not self.keeps
        return True

    def reverse_positions(self) -> bool:
        """Reverse the table of rotary embeddings, or put it right again."""
        buffers = self.weight_transfer_engine.model.named_buffers()
        tables = [table for name, table in buffers if name.endswith("cos_sin_cache")]
        for table in tables:
            table.copy_(table.flip(0))
        return bool(tables)

    def exchange_weights(self, version: int) -> bool:
        head = self.weight_transfer_engine.model.lm_head
        packed = head.__dict__.get(PACKED)
        done = super().exchange_weights(version)
        if self.keeps:
            assert packed is not None
            head.__dict__[PACKED] = packed
        return done
