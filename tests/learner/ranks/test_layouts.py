"""A checkpoint loads on other numbers of ranks and ZeRO stages."""

import pytest
import torch
from layouts import LAYOUTS, folder_of, load, save, state
from rank_processes import spawn

pytestmark = pytest.mark.deepspeed

STEP_TOLERANCE = {
    ("adamw", "float32"): 2e-6,
    ("adamw", "bfloat16"): 1e-3,
    ("muon", "float32"): 2e-3,
    ("muon", "bfloat16"): 1e-2,
}
"""What sums in another order change in weights by one step, at a learning rate of 1e-3. Muon
orthogonalises in few bits, and at stage 2 keeps its momentum in bfloat16."""


def check(source, target, *, optimizer, dtype, same_layout):
    """Compare what a layout loaded, and its next step, with the layout that saved it."""
    saved, loaded = state(source / "before"), state(target / "before")
    assert saved.keys() == loaded.keys()
    for name, values in saved.items():
        assert torch.equal(loaded[name].float(), values.float()), name
    trained, expected = state(target / "after"), state(source / "after")
    moved = [name for name in saved if not torch.equal(expected[name], saved[name])]
    assert len(moved) > len(saved) / 2
    for name in expected:
        if same_layout:
            assert torch.equal(trained[name], expected[name]), name
        elif name.endswith("/weight"):
            tolerance = STEP_TOLERANCE[optimizer, dtype]
            torch.testing.assert_close(trained[name], expected[name], rtol=0, atol=tolerance)


def test_a_checkpoint_of_two_ranks_loads_in_one_process_without_zero(model_path, tmp_path):
    saved, loaded = ("adamw", 2, "float32"), ("adamw", 0, "float32")
    spawn(2, save, model_path, str(tmp_path), [saved])
    source = folder_of(tmp_path, 2, saved)
    load(model_path, tmp_path, [(source.name, loaded)])
    target = source / f"in-{folder_of('', 1, loaded)}"
    check(source, target, optimizer="adamw", dtype="float32", same_layout=False)


@pytest.fixture(scope="module")
def everything(model_path, tmp_path_factory):
    """Provide the folder of every layout, saved, and loaded in all of its optimizer and dtype."""
    root = tmp_path_factory.mktemp("layouts")
    for ranks in (1, 2):
        spawn(ranks, save, model_path, str(root), LAYOUTS)
    for ranks in (1, 2):
        spawn(ranks, load, model_path, str(root), [
            (folder_of("", saved_by, source).name, target)
            for saved_by in (1, 2) for source in LAYOUTS for target in LAYOUTS
            if (source[0], source[2]) == (target[0], target[2])
        ])  # fmt: skip
    return root


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("saved_by", [1, 2])
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_checkpoint_loads_in_every_layout_and_goes_on_the_same(
    everything, source, saved_by, ranks
):
    folder = folder_of(everything, saved_by, source)
    optimizer, _, dtype = source
    for target in LAYOUTS:
        if (target[0], target[2]) == (optimizer, dtype):
            check(
                folder,
                folder / f"in-{folder_of('', ranks, target)}",
                optimizer=optimizer,
                dtype=dtype,
                same_layout=(ranks, target) == (saved_by, source),
            )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_checkpoint_loads_in_another_dtype_with_the_weights_it_has(
    model_path, tmp_path, dtype, other
):
    source = folder_of(tmp_path, 1, ("adamw", 1, dtype))
    save(model_path, tmp_path, [("adamw", 1, dtype)])
    load(model_path, tmp_path, [(source.name, ("adamw", 1, other))])
    target = source / f"in-{folder_of('', 1, ('adamw', 1, other))}"
    saved, loaded = state(source / "before"), state(target / "before")
    assert all(torch.equal(loaded[name], values) for name, values in saved.items())
