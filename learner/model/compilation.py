"""Compiling a model's blocks with torch.compile, and the trial of the machine's compiler."""

from typing import Any

import torch

from headway.errors import InputError, first_line


def start_compiler(device: torch.device) -> None:
    """Compile a small function for a device, so that what is missing is found before a model is.

    Raises:
        InputError: It cannot be compiled, for instance because there is no C++ compiler.
    """
    torch._dynamo.config.disable = False  # which `learner.engine.deepspeed` sets on CPUs
    try:
        torch.compile(lambda x: x.exp().sum())(torch.ones(64, device=device))
    except Exception as error:  # compilers raise anything
        raise InputError(
            f"learner.compile: nothing can be compiled for {device.type!r} here: "
            f"{first_line(error)}; install a C++ compiler and the headers of Python (Debian and "
            "Ubuntu: apt-get install g++ python3-dev), or set learner.compile = false"
        ) from error


def compile_blocks(model: Any) -> None:
    """Have each block of a transformers model compiled as it is first computed.

    Blocks of one kind share what is compiled, for rows of any length. Their attention over packed
    sequences stays as it is. `check_forward` compares the results with those of plain blocks.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            # Not the call, in which hooks would be compiled too.
            block.forward = torch.compile(block.forward, dynamic=True)
