"""From rollout groups to minibatches and microbatches."""
