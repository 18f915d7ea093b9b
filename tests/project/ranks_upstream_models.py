"""Mesh TensorFlow's own models have the same losses on any mesh, in any layout."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE

from meshimpl import MeshFunction, ProcessMesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import whole_tensor

FOLDER = Path(__file__).parents[2] / "examples" / "upstream"
CHECKOUT = os.environ.get("MESH_TENSORFLOW")
"""A checkout of upstream's repository, whose scripts no package holds."""
STEPS = 3
pytestmark = [pytest.mark.timeout(120), pytest.mark.ranks(2, 4)]
LAYOUTS = {
    "transformer": (
        "batch:row",
        "heads:row;d_ff:row;vocab:row",
        "batch:row;heads:col;d_ff:col;vocab:col",
    ),
    "toy": ("batch:row", "hidden_odd:row", "batch:row;hidden_odd:col"),
    "mnist": ("batch:row", "row_blocks:row", "row_blocks:row;col_blocks:col"),
}
# float32, but for the toy model; convolutions add up more numbers.
TOLERANCE = {"transformer": 2e-6, "toy": 1e-12, "mnist": 2e-5}


@pytest.fixture(scope="module")
def models() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("models")
    finally:
        sys.path.remove(str(FOLDER))


def losses(models: ModuleType, name: str, mesh: ProcessMesh, layout: str) -> list[float]:
    if name == "transformer":
        model = models.transformer(batch=4, length=8, width=8, heads=4, blocks=1)
    elif name == "toy":
        model = models.toy(Path(str(CHECKOUT)), "float64")
    else:
        model = models.mnist(Path(str(CHECKOUT)), batch=4)
    tf.random.set_seed(1)
    function = MeshFunction(model.step, mesh, layout, model.inputs)
    found = [float(function(*batch)) for batch, _ in zip(model.batches(), range(STEPS))]  # noqa: B905
    tf.random.set_seed(None)
    return found


# On 4 ranks both parts of a layout are split.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if SIZE == 2 else []) for name in LAYOUTS]
)
def test_losses_are_the_same_in_every_layout(
    mesh: ProcessMesh, models: ModuleType, name: str
) -> None:
    if name != "transformer" and CHECKOUT is None:
        pytest.skip("MESH_TENSORFLOW names no checkout of tensorflow/mesh")
    # Where nothing is split, each rank does what one rank alone would do.
    expected = losses(models, name, mesh, "")
    assert np.ptp(expected) > 1e-3  # it has learned something, or met other data
    for layout in LAYOUTS[name]:
        if ("col" in mesh.names) == ("col" in layout):
            found = losses(models, name, mesh, layout)
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE[name], err_msg=layout)


def test_a_model_that_imports_its_data_itself(mesh: ProcessMesh) -> None:
    """As upstream's scripts do; the tensor must be whole."""
    whole = np.arange(32.0).reshape(8, 4)

    def build(graph_mesh, x):
        shape = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("io", 4)])
        return mtf.import_tf_tensor(graph_mesh, whole_tensor(x) * 2, shape)

    inputs = {"x": ([("images", 8), ("pixels", 4)], tf.float64)}
    function = MeshFunction(build, mesh, "batch:row", inputs)
    np.testing.assert_array_equal(function.gather(function(whole)), 2 * whole)
    if mesh.axis_size("row") > 1:
        split = MeshFunction(build, mesh, "images:row", inputs)
        with pytest.raises(Exception, match="images is split over row"):
            split(whole)
