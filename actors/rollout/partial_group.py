"""The finished and interrupted rollouts of a group, for another worker to continue them."""

from queues.records import Lease, Rollout, RolloutGroup
from queues.schema import decode, encode


class PartialGroup:
    """The rollouts of one lease so far; raises SchemaError if those in the lease cannot be read."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        rollouts = [] if lease.saved is None else decode(lease.saved).rollouts
        self._rollouts = {rollout.sample_index: rollout for rollout in rollouts}
        self._saved = self._tokens

    @property
    def changed(self) -> bool:
        """True if there are tokens that no call of `encode` has returned."""
        return self._tokens > self._saved

    @property
    def due(self) -> bool:
        """True if at least half of all tokens are new: the total written stays below twice that."""
        return self.changed and self._tokens >= 2 * self._saved

    @property
    def _tokens(self) -> int:
        return sum(sum(rollout.loss_mask) for rollout in self._rollouts.values())

    def get(self, index: int) -> Rollout | None:
        """Return the rollout with this index in the group, as far as there is one."""
        return self._rollouts.get(index)

    def keep(self, rollout: Rollout) -> None:
        """Keep a rollout, finished or interrupted, unless nothing of it was sampled."""
        if any(rollout.loss_mask):
            self._rollouts[rollout.sample_index] = rollout

    def encode(self) -> bytes:
        """Return all rollouts, encoded for `WorkQueue.save`."""
        self._saved = self._tokens
        return encode(
            RolloutGroup(
                group_id=self._lease.group_id,
                prompt_id=self._lease.prompt.prompt_id,
                attempt=self._lease.attempt,
                rollouts=[self._rollouts[index] for index in sorted(self._rollouts)],
            )
        )
