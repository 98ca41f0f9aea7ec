"""The dtype of an engine where the recipe leaves it to the model folder."""

import json
import subprocess
import sys

import pytest

from actors.engines.model_folder import served_dtype
from headway.errors import InputError

ASK = """
import ctypes
from weight_sync.vllm.plugin import register
register()
allowed = ctypes.c_uint64()
ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(allowed))  # arch_prctl(ARCH_GET_XCOMP_PERM)
print(bool(allowed.value & 1 << 18))
"""


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),  # as older versions of transformers wrote it
        ({}, "auto"),
    ],
)
def test_the_folder_says_what_its_weights_are(tmp_path, description, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **description}))
    assert served_dtype(str(tmp_path), "auto") == expected


def test_a_folder_without_a_description_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read"):
        served_dtype(str(tmp_path), "auto")


@pytest.mark.vllm
def test_a_process_of_vllm_may_use_the_tiles_that_its_machine_has():
    """Without the kernel's leave attention in bfloat16 ends it by an illegal instruction."""
    import torch

    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this machine has no tiles")
    asked = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=120
    )
    assert asked.stdout.split()[-1] == "True"
