"""From rollout groups to minibatches of packed rows."""
