"""One run of Tunix's GRPOLearner on a recipe of Headway, in a process of its own.

    python -m benchmarks.loop.tunix_worker RECIPE.json

As TRL's, in JAX, with Tunix's own sampler, on the cores of this process. The whole batch is one
microbatch, since Tunix averages the means of several. Its GRPO has the gradient of CISPO here: of
one optimizer step for each batch, all ratios are 1. Its sampler leaves out the end token, which is
therefore not trained.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.processes import run_main
from benchmarks.loop.peer_run import PeerRun, peer_run
from headway.errors import InputError

RENAMED = {"embed_tokens": "embedder", "self_attn": "attn", "norm": "final_norm"}
"""Tunix's names of modules of transformers."""


def load(path: str, mesh: Any) -> Any:
    """Return Tunix's model with the weights of a folder; raises `InputError` for other models."""
    from jax import numpy as jnp
    from transformers import AutoConfig
    from tunix.models.qwen3 import model, params

    given = AutoConfig.from_pretrained(path)
    if given.model_type != "qwen3":
        raise InputError(f"{path} is of type {given.model_type}: Tunix is only given qwen3 here")
    config = model.ModelConfig(
        num_layers=given.num_hidden_layers,
        vocab_size=given.vocab_size,
        embed_dim=given.hidden_size,
        hidden_dim=given.intermediate_size,
        num_heads=given.num_attention_heads,
        head_dim=given.head_dim,
        num_kv_heads=given.num_key_value_heads,
        rope_theta=given.rope_parameters["rope_theta"],
        norm_eps=given.rms_norm_eps,
        use_tied_embedding=given.tie_word_embeddings,
    )
    # Tunix 0.1.7 reads no rope_theta of a Qwen3, and always takes 1e6
    model.apply_rope = partial(model.apply_rope, rope_theta=config.rope_theta)
    return params.create_model_from_safe_tensors(path, config, mesh, jnp.float32)


def copy_weights(model: Any, into: torch.nn.Module) -> torch.nn.Module:
    """Copy the weights of Tunix's model into that of transformers, and return it."""
    from flax import nnx

    weights = nnx.state(model, nnx.Param).to_pure_dict()
    for name, parameter in into.named_parameters():
        node = weights
        for part in name.removeprefix("model.").removesuffix(".weight").split("."):
            node = node[int(part) if part.isdigit() else RENAMED.get(part, part)]
        (array,) = map(np.asarray, node.values())
        if "embed_tokens" not in name:
            array = array.reshape(parameter.shape[::-1]).T
        parameter.data = torch.tensor(array)
    return into


def make_cluster(run: PeerRun) -> Any:
    """Return the models of a run; `completions` has the tokens last sampled, without the end."""
    import jax
    import optax
    from tunix import ClusterConfig, RLCluster, RLTrainingConfig, Role, RolloutConfig

    class Cluster(RLCluster):
        def generate(self, *args: Any, **options: Any) -> Any:
            output = super().generate(*args, **options)
            self.completions = output.tokens
            return output

    config, learner, new_tokens = run.config, run.config.learner, run.config.actors.max_new_tokens
    longest = max(len(run.tokenizer.encode(prompt.text)) for prompt in run.prompts)
    mesh = jax.sharding.Mesh([jax.devices()], ("fsdp", "tp"))
    factors = jax.numpy.array([run.rate_factor(step) for step in range(config.steps)])
    rates, decay = learner.learning_rate * factors, learner.weight_decay
    adam = optax.adamw(lambda step: rates[step], *learner.betas, weight_decay=decay)
    optimizer = optax.chain(optax.clip_by_global_norm(learner.gradient_clipping), adam)
    settings = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        training_config=RLTrainingConfig(
            eval_every_n_steps=config.steps, max_steps=config.steps, actor_optimizer=optimizer
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=new_tokens,
            max_prompt_length=longest,
            kv_cache_size=longest + new_tokens,
            temperature=config.actors.temperature,
        ),
    )
    tokenizer = AutoTokenizer.from_pretrained(run.model, bos_token=None)  # Tunix would begin by it
    return Cluster(actor=load(run.model, mesh), tokenizer=tokenizer, cluster_config=settings)


def train(run: PeerRun) -> None:
    """Train the recipe with Tunix to its end, each batch sampled with a seed of its own."""
    import jax
    from tunix import GRPOConfig, GRPOLearner

    prompts, longest = run.config.prompts, run.config.actors.max_new_tokens
    cluster = make_cluster(run)
    saved = AutoModelForCausalLM.from_pretrained(run.model, dtype="float32")

    def end_step() -> None:
        run.end(lambda: copy_weights(cluster.actor_trainer.model, saved))

    def batches() -> Iterator[dict[str, Any]]:
        size, key = prompts.groups_per_batch, jax.random.key(run.config.seed)
        for step in range(run.config.steps):
            if step:
                end_step()
            run.begin()
            cluster.cluster_config.rollout_config.seed = jax.random.fold_in(key, step)
            batch = run.prompts[step * size : (step + 1) * size]
            texts, answers = zip(*((prompt.text, prompt.answer) for prompt in batch), strict=True)
            yield {"prompts": np.array(texts), "answer": np.array(answers)}

    def reward(prompts: list[str], answer: list[str], **more: Any) -> list[float]:
        end = [run.tokenizer.eos_token_id]
        rows = [(ids.tolist() + end)[:longest] for ids in cluster.completions]
        return run.rewards(prompts, rows, answer)

    stated = GRPOConfig(num_generations=prompts.group_size, beta=0.0, loss_agg_mode="token-mean")
    run.state(vars(stated), ("google-tunix", "jax", "flax", "optax"))
    GRPOLearner(rl_cluster=cluster, algo_config=stated, reward_fns=reward).train(batches())
    end_step()


def main() -> None:
    (recipe,) = sys.argv[1:]
    with peer_run("tunix", recipe) as run:
        train(run)


if __name__ == "__main__":
    run_main(main)
