"""Models of Mesh TensorFlow's own programs, each with the data and the optimiser of its training.

The functions that build the models are upstream's, unmodified. The toy model and MNIST are scripts
of a checkout of https://github.com/tensorflow/mesh, and the Transformer is a part of the installed
package.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.mesh_function import whole_tensor

# Modules that upstream's programs import, and that only their own drivers use.
STAND_INS = (
    "mnist_dataset",  # fetches MNIST
    "tensorflow_datasets",  # no dependency of this project
    "tensorflow_estimator",  # ended with TensorFlow 2.15
    "tensorflow_estimator.python",
    "tensorflow_estimator.python.estimator",
    "tensorflow_estimator.python.estimator.estimator",
    "tensorflow.python.tpu.tpu_config",  # moved to the estimator
    "tensorflow.python.tpu.tpu_estimator",
)
CHARACTERS = 128
"""Size of the vocabulary of the language model: ASCII."""


class MissingProgramError(Exception):
    """An error: an upstream program is not there. The message says where to get it."""


@dataclass(frozen=True)
class Model:
    """A model and its training.

    Attributes:
        inputs: shape and dtype of a batch's arrays by name, as `MeshFunction` takes them.
        loss: returns the loss, an mtf scalar, from the graph's mesh and the mtf inputs.
        optimizer: makes one of upstream's optimisers.
        batches: yields the arrays of a batch, whole, without end.
    """

    inputs: dict[str, Any]
    loss: Callable[..., Any]
    optimizer: Callable[[], Any]
    batches: Callable[[], Iterator[tuple[np.ndarray, ...]]]

    def step(self, graph_mesh: Any, *inputs: Any) -> Any:
        """Returns the loss of a batch, and updates the weights."""
        loss = self.loss(graph_mesh, *inputs)
        weights = graph_mesh.graph.trainable_variables
        gradients = mtf.gradients([loss], [weight.outputs[0] for weight in weights])
        self.optimizer().apply_grads(gradients, weights)
        return loss


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Puts empty modules in place of those that TensorFlow 2.21 lacks."""
    modules = {name: types.ModuleType(name) for name in STAND_INS if name not in sys.modules}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], last, module)
    estimator = sys.modules["tensorflow.compat.v1.estimator"]
    sys.modules.update(modules)
    try:
        with patch.object(tf, "estimator", estimator, create=True):
            yield
    finally:
        for name in modules:
            del sys.modules[name]


def program(upstream: Path | None, name: str) -> types.SimpleNamespace:
    """Returns the names that a script of upstream's examples defines, with its flags' defaults.

    Raises:
        MissingProgramError: `upstream` is None, or is not a checkout of Mesh TensorFlow.
    """
    if upstream is None or not (path := upstream / "examples" / f"{name}.py").is_file():
        raise MissingProgramError(
            f"--upstream must be a checkout of Mesh TensorFlow, with examples/{name}.py: "
            "git clone https://github.com/tensorflow/mesh"
        )
    values: dict[str, Any] = {}

    def define(flag: str, default: Any = None, *_: Any, **__: Any) -> None:
        values[flag] = default

    flags = tf.compat.v1.flags
    kinds = [kind for kind in dir(flags) if kind.startswith("DEFINE_")]
    with (
        standing_in(),
        patch.multiple(flags, **dict.fromkeys(kinds, define)),
    ):
        names = runpy.run_path(str(path), run_name=name)
    # The functions of a script share one dictionary of globals.
    function = next(x for x in names.values() if isinstance(x, types.FunctionType))
    function.__globals__["FLAGS"] = types.SimpleNamespace(**values)
    return types.SimpleNamespace(**function.__globals__)


def _in_turn(*arrays: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    number = 0
    while True:
        rows = np.arange(number, number + size) % len(arrays[0])
        yield tuple(array[rows] for array in arrays)
        number += size


def toy(upstream: Path | None, dtype: str = "float32") -> Model:
    """Returns upstream's toy_model_tpu.py: dense layers that learn to return their input."""
    script = program(upstream, "toy_model_tpu")
    flags = script.FLAGS
    flags.master_dtype = flags.slice_dtype = flags.activation_dtype = dtype
    images = np.random.default_rng(1).uniform(size=[10000, flags.io_size]).astype(dtype)
    return Model(
        {"images": ([("images", flags.batch_size), ("pixels", flags.io_size)], dtype)},
        lambda mesh, images: script.toy_model(whole_tensor(images), mesh)[1],
        functools.partial(mtf.optimize.SgdOptimizer, 1.0),
        functools.partial(_in_turn, images, size=flags.batch_size),
    )


def mnist(upstream: Path | None, batch: int = 200) -> Model:
    """Returns upstream's mnist.py, on scikit-learn's 1,797 digits, enlarged to 28 x 28 pixels."""
    from sklearn.datasets import load_digits

    script = program(upstream, "mnist")
    size = script.FLAGS.batch_size = batch
    digits = load_digits()
    images = np.kron(digits.images, np.ones([4, 4]))[:, 2:30, 2:30].reshape(-1, 784) / 16
    return Model(
        {
            "images": ([("images", size), ("pixels", 784)], tf.float32),
            "labels": ([("images", size)], tf.int32),
        },
        lambda mesh, x, y: script.mnist_model(whole_tensor(x), whole_tensor(y), mesh)[1],
        # Its default rates follow TensorFlow's global step, which a mesh function does not have.
        functools.partial(mtf.optimize.AdafactorOptimizer, learning_rate=0.003, decay_rate=0.9),
        functools.partial(_in_turn, images.astype(np.float32), digits.target, size=size),
    )


def characters() -> np.ndarray:
    """Returns the text of Python's own help topics as ASCII codes, int32 [character]."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def sequences(batch: int, length: int) -> Iterator[tuple[np.ndarray]]:
    """Yields batches of pieces of the text, int32 [batch, length]."""
    text, random = characters(), np.random.default_rng(1)
    while True:
        begins = random.integers(len(text) - length, size=batch)
        yield (text[begins[:, None] + np.arange(length)],)


def transformer(
    batch: int = 32,
    length: int = 64,
    width: int = 64,
    heads: int = 4,
    blocks: int = 2,
    dropout: float = 0.1,
    dtype: str = "float32",
) -> Model:
    """Returns upstream's Transformer as a language model of characters.

    Args:
        batch, length: sequences of a batch, and their characters.
        width: size of `d_model`; the hidden layers `d_ff` are four times as wide.
        heads, blocks: heads of an attention, and blocks of attention and dense layers.
        dropout: rate of dropout in each block.
        dtype: dtype of the weights and of what is computed with them.
    """
    with standing_in():
        from mesh_tensorflow.transformer import transformer as upstream
        from mesh_tensorflow.transformer import transformer_layers as layers

    drop = functools.partial(upstream.sublayer_dropout, dropout_rate=dropout)
    stack = functools.partial(
        upstream.LayerStack,
        sublayers_initial=[drop],
        sublayers_per_layer=[
            upstream.sublayer_rms_norm,
            upstream.sublayer_call_layer,
            drop,
            upstream.sublayer_residual,
        ],
        sublayers_final=[upstream.sublayer_rms_norm, drop],
    )
    attention = {"num_heads": heads, "key_value_size": width // heads}
    model = upstream.Unitransformer(
        upstream.make_layer_stack(
            layers=[
                [layers.SelfAttention, attention],
                [layers.DenseReluDense, {"hidden_size": 4 * width}],
            ],
            layer_stack_cls=stack,
            num_layers=blocks,
        ),
        d_model=width,
        input_vocab_size=CHARACTERS,
        output_vocab_size=CHARACTERS,
        autoregressive=True,
        max_length=length,
    )
    kinds = mtf.VariableDType(*[tf.as_dtype(dtype)] * 3)

    def loss(mesh: Any, targets: Any) -> Any:
        del mesh
        inputs = upstream.autoregressive_inputs(targets)
        return model.call_simple(inputs, targets, compute_loss=True, variable_dtype=kinds)[1]

    return Model(
        {"targets": ([("batch", batch), ("length", length)], tf.int32)},
        loss,
        functools.partial(mtf.optimize.AdamWeightDecayOptimizer, 1e-3),
        functools.partial(sequences, batch, length),
    )


MODELS: dict[str, Sequence[str]] = {
    "toy": ("batch", "io", "hidden_odd"),
    "mnist": ("batch", "row_blocks", "col_blocks", "hidden1", "hidden2", "filters1", "filters2"),
    "transformer": ("batch", "length", "d_model", "heads", "d_ff", "vocab"),
}
"""The models, and the dimensions that a layout may split."""


def named(name: str, upstream: Path | None) -> Model:
    """Returns a model of `MODELS`."""
    if name == "transformer":
        return transformer()
    return {"toy": toy, "mnist": mnist}[name](upstream)
