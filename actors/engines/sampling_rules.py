"""Refusal of all by which vLLM would sample with other probabilities than a model's logits give.

The learner gives a token the probability that the model's logits give it at `actors.temperature`.
The model folder and other packages can ask vLLM for more than our requests, which is refused here.
"""

from importlib.metadata import entry_points

from actors.engines.model_folder import describe, generation_settings
from headway.errors import InputError

LOGITS_PROCESSORS = "vllm.logits_processors"
"""Entry points of other packages that vLLM applies to the logits of every request."""
OWN_SAMPLING = {
    "DiffusionGemmaForConditionalGeneration": "samples blocks of tokens by diffusion",
    "Moondream3ForCausalLM": "never samples one of its tokens",
}
"""Architectures whose code in vLLM samples with other probabilities than their logits give."""


def check_sampling(model_path: str) -> None:
    """Raise InputError if vLLM would sample a model by other probabilities than the learner's."""
    if installed := sorted(entry_points(group=LOGITS_PROCESSORS), key=lambda entry: entry.name):
        packages = ", ".join(
            f"{entry.name} of {entry.dist.name}" if entry.dist else entry.name
            for entry in installed
        )
        raise InputError(
            f"logits processors are installed that vLLM would apply to every request ({packages}, "
            f"in the entry points {LOGITS_PROCESSORS}): the learner does not know the "
            "probabilities that they make; uninstall them"
        )
    description = describe(model_path)
    for name in description.get("architectures") or ():
        if name in OWN_SAMPLING:
            raise InputError(
                f"model {model_path!r} is a {name}, which in vLLM {OWN_SAMPLING[name]}; the "
                "learner gives every token the probability of its logit"
            )
    if description.get("speculators_config") is not None:
        raise InputError(
            f"config.json of {model_path!r} has speculators_config, by which vLLM serves another "
            "model; give the folder of that model, its verifier"
        )
    if suppressed := generation_settings(model_path).get("suppress_tokens"):
        raise InputError(
            f"generation_config.json of {model_path!r} has suppress_tokens = {suppressed}, which "
            "vLLM never samples, and to which the learner gives the probability of their logits; "
            "remove it there"
        )
