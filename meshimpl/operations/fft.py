"""Distributed 3-D FFTs of real and of complex fields and their inverses, with adjoints.

A real field [..., x, y, z] has x split over one mesh axis (`row`) and y over another (`col`). It
becomes a spectrum [..., kz, ky, kx, pair] with ky split over `row`, kz over `col`, and kx whole.
Real and imaginary part are in the last dimension. z is transformed first, then y, then x; between
them one all-to-all along `col` and one along `row`. With one column (slabs) z and y are transformed
at once and only the rows exchange; with one row y and x are, and only the columns do.

kz runs over the nz // 2 + 1 modes that a real field needs, padded with zero modes to a multiple of
the columns; ky likewise to a multiple of the rows. The inverse ignores the padding. A complex field
[..., x, y, z, pair] goes the same way and needs all nz modes.

The forward transform is not normalised, the inverse divides by the number of cells. The spectrum's
order is the reverse of the field's because x is transformed last, and a transform wants its axis
contiguous: one local transposition fewer each way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl.collectives import Communicator
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl
from meshimpl.operations.local import on_blocks

PAIR = mtf.Dimension("pair", 2)


@dataclass(frozen=True)
class Transfer:
    """An exchange after which another dimension is whole on each rank.

    `Transfer("b x y [kz] -> b x kz [y]", col)` takes blocks [b, x, y / col, kz] to
    [b, x, kz / col, y]. On a group of one rank it is the local transposition.

    Attributes:
        moves: the dimensions of a block before and after, in order. Brackets mark the one that is
            whole: the group splits it, and joins the other.
        group: the ranks among which it moves.
        half: whether messages are float16, see `Communicator.alltoall`.
    """

    moves: str
    group: Communicator
    half: bool = False

    @property
    def reverse(self) -> Transfer:
        """The inverse transfer."""
        before, after = self.moves.split(" -> ")
        return Transfer(f"{after} -> {before}", self.group, self.half)

    def __call__(
        self,
        block: tf.Tensor,
        *,
        pad_to: int | None = None,
        crop_to: int | None = None,
        conjugate: bool = False,
    ) -> tf.Tensor:
        """Returns the block after the transfer.

        Args:
            block: any dtype that an alltoall carries.
            pad_to: length to which the dimension that is whole before is padded with zeros; a
                multiple of the number of ranks, as that dimension must be if this is None.
            crop_to: length of what is kept of the dimension that is whole afterwards.
            conjugate: whether to return the complex conjugate.
        """
        message = _compiled(_pack, self.moves, self.group.size, pad_to, conjugate)(block)
        if self.group.size == 1:  # only the shape changes, but XLA would copy
            return _unpack(self.moves, crop_to, message)
        arrived = self.group.alltoall(message, half=self.half)
        return _compiled(_unpack, self.moves, crop_to)(arrived)


@functools.cache
def _compiled(function: Callable[..., tf.Tensor], *static: Any) -> Callable[..., tf.Tensor]:
    """Returns `function` with its first arguments fixed, compiled by XLA where there is a GPU.

    TensorFlow has tiled transpositions there for at most three axes, neighbours that stay together
    being one; most of those here have four (its transpose_functor_gpu.cu.cc).
    """
    fixed = functools.partial(function, *static)
    if not _has_gpu():
        return fixed
    return tf.function(fixed, jit_compile=True, autograph=False)


def _has_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))


def _whole(side: str) -> tuple[list[str], int]:
    """Returns the names of one side of `Transfer.moves`, and the place of the whole dimension."""
    names = side.split()
    (place,) = (i for i, name in enumerate(names) if name.startswith("["))
    return [name.strip("[]") for name in names], place


def _pack(
    moves: str, ranks: int, pad_to: int | None, conjugate: bool, block: tf.Tensor
) -> tf.Tensor:
    """Returns the message to each rank, [rank, *the dimensions afterwards]."""
    if conjugate:
        block = tf.math.conj(block)
    before, after = moves.split(" -> ")
    (source, split), (target, _) = _whole(before), _whole(after)
    sizes = block.shape.as_list()
    if pad_to is not None and pad_to != sizes[split]:
        missing = pad_to - sizes[split]
        block = tf.pad(block, [[0, missing * (i == split)] for i in range(len(sizes))])
        sizes[split] = pad_to
    sizes[split : split + 1] = ranks, sizes[split] // ranks
    apart = [*source[:split], "rank", *source[split:]]
    return _transpose(tf.reshape(block, sizes), apart, ["rank", *target])


def _unpack(moves: str, crop_to: int | None, message: tf.Tensor) -> tf.Tensor:
    """Returns the block from the messages of all ranks, [rank, *the dimensions afterwards]."""
    target, joined = _whole(moves.split(" -> ")[1])
    ranks, *result = message.shape.as_list()
    result[joined] *= ranks
    arrived = [*target[:joined], "rank", *target[joined:]]
    block = tf.reshape(_transpose(message, ["rank", *target], arrived), result)
    if crop_to is None or crop_to == result[joined]:
        return block
    result[joined] = crop_to
    return tf.slice(block, [0] * len(result), result)


def _transpose(x: tf.Tensor, before: list[str], after: list[str]) -> tf.Tensor:
    """`tf.transpose` by names, without touching the data when only axes of size 1 move."""
    order = [before.index(name) for name in after]
    sizes = x.shape.as_list()
    moved = [axis for axis in order if sizes[axis] != 1]
    if moved == sorted(moved):
        return tf.reshape(x, [sizes[axis] for axis in order])
    return tf.transpose(x, order)


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts


@dataclass(frozen=True)
class Pencils:
    """The two layouts of one grid and the transform between them, on local blocks.

    Attributes:
        grid: (nx, ny, nz).
        row, col: the lines of ranks over which x and y, later ky and kz, are split.
        half: whether messages are float16, see `Communicator.alltoall`.
        real: whether the field is real.
        ordered: whether the spectrum has the order of the field, [kx, ky, kz]. One rank can make a
            real field's so, and needs no transposition then.
    """

    grid: tuple[int, int, int]
    row: Communicator
    col: Communicator
    half: bool = False
    real: bool = True
    ordered: bool = False

    @property
    def _kz(self) -> int:
        """The modes along z that are not padding."""
        return self.grid[2] // 2 + 1 if self.real else self.grid[2]

    @property
    def modes(self) -> tuple[int, int, int]:
        """The padded (kz, ky, kx) of the whole spectrum."""
        nx, ny, _ = self.grid
        return _padded(self._kz, self.col.size), _padded(ny, self.row.size), nx

    @property
    def block(self) -> tuple[int, int, int]:
        """The cells (x, y, z) of this rank's block."""
        nx, ny, nz = self.grid
        return nx // self.row.size, ny // self.col.size, nz

    @property
    def spectral_block(self) -> tuple[int, int, int]:
        """The modes (kz, ky, kx) of this rank's block; (kx, ky, kz) if it is `ordered`."""
        kz, ky, kx = self.modes
        block = kz // self.col.size, ky // self.row.size, kx
        return block[::-1] if self.ordered else block

    def in_order(self) -> Pencils:
        """Returns the same transform with an `ordered` spectrum, if that is faster here.

        It is so for real fields on one rank. On a GPU it has not been measured.
        """
        alone = self.row.size == self.col.size == 1
        return replace(self, ordered=alone and self.real and not _has_gpu())

    @property
    def _z_to_y(self) -> Transfer:
        return Transfer("b x y [kz] -> b x kz [y]", self.col, self.half)

    @property
    def _y_to_x(self) -> Transfer:
        return Transfer("b x kz [ky] -> b kz ky [x]", self.row, self.half)

    @property
    def _z_to_yx(self) -> Transfer:
        """The transfer for one row, where y and x are transformed at once."""
        return Transfer("b x y [kz] -> b kz [y] x", self.col, self.half)

    @property
    def _zy_to_x(self) -> Transfer:
        """The transfer for one column, where z and y are transformed at once."""
        return Transfer("b x [ky] kz -> b kz ky [x]", self.row, self.half)

    def forward(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the complex spectrum [b, kz/col, ky/row, kx] of a field [b, x/row, y/col, z]."""
        if self.ordered:
            return tf.signal.rfft3d(x)
        kz, ky, _ = self.modes
        along_z = tf.signal.rfft if self.real else tf.signal.fft
        along_yz = tf.signal.rfft2d if self.real else tf.signal.fft2d
        if self.row.size == 1:
            # [b, x, y/col, kz] -> [b, kz/col, y, x]
            return tf.signal.fft2d(self._z_to_yx(along_z(x), pad_to=kz))
        if self.col.size == 1:
            # [b, x/row, ky, kz] -> [b, kz, ky/row, x]
            return tf.signal.fft(self._zy_to_x(along_yz(x), pad_to=ky))
        # [b, x/row, y/col, kz] -> [b, x/row, kz/col, y]
        lines = self._z_to_y(along_z(x), pad_to=kz)
        # [b, x/row, kz/col, ky] -> [b, kz/col, ky/row, x]
        return tf.signal.fft(self._y_to_x(tf.signal.fft(lines), pad_to=ky))

    @property
    def conjugate_scale(self) -> float | None:
        """The number c for which `inverse` is faster from c conj(spectrum); None if it is not.

        On a GPU TensorFlow scales the result of an inverse transform in a pass of its own. A filter
        that conjugates and scales, and a transposition that conjugates, need none for x and y.
        """
        nx, ny, _ = self.grid
        return 1 / (nx * ny) if self.row.size == 1 and _has_gpu() else None

    def inverse(self, spectrum: tf.Tensor, *, conjugated: bool = False) -> tf.Tensor:
        """Returns the block [b, x/row, y/col, z] of a spectrum's field, over the number of cells.

        Args:
            spectrum: complex [b, kz/col, ky/row, kx], or `ordered`.
            conjugated: whether it is the conjugate of the field's spectrum times `conjugate_scale`.
        """
        (_, ny, nz), kz = self.grid, self._kz
        if self.ordered:
            return tf.signal.irfft3d(spectrum, fft_length=self.grid)
        if self.row.size == 1:
            # [b, kz/col, y, x] -> [b, x, y/col, kz]
            planes = tf.signal.fft2d(spectrum) if conjugated else tf.signal.ifft2d(spectrum)
            modes = self._z_to_yx.reverse(planes, crop_to=kz, conjugate=conjugated)
        else:
            # [b, kz/col, ky/row, x] -> [b, x/row, kz/col, ky]
            lines = self._y_to_x.reverse(tf.signal.ifft(spectrum), crop_to=ny)
            # [b, x/row, kz/col, y] -> [b, x/row, y/col, kz]; with one column this is faster than
            # irfft2d, whose transform along y is strided
            modes = self._z_to_y.reverse(tf.signal.ifft(lines), crop_to=kz)
        return tf.signal.irfft(modes, fft_length=[nz]) if self.real else tf.signal.ifft(modes)

    def multiplicity(self) -> np.ndarray:
        """Returns 2 for modes that also stand for their conjugates, and 1 for others.

        The array broadcasts to a spectral block.
        """
        nz, kz = self.grid[2], self.modes[0] // self.col.size
        index = self.col.index * kz + np.arange(kz)
        alone = (index == 0) | (2 * index == nz) | (not self.real)
        along_z = np.where(alone, 1.0, 2.0)
        return along_z if self.ordered else along_z[:, np.newaxis, np.newaxis]

    def mode_numbers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the signed integer wavenumbers (along x, y, z) of this rank's spectrum.

        Returns:
            int64 arrays of shapes [1, 1, kx], [1, ky, 1], [kz, 1, 1], which broadcast to a spectral
            block; [kx, 1, 1], [1, ky, 1], [1, 1, kz] if it is `ordered`. The Nyquist mode is -N/2,
            but N/2 along z if the field is real. Padded modes hold no power; their numbers continue
            the sequence.
        """
        nx, ny, nz = self.grid
        kz, ky = self.modes[0] // self.col.size, self.modes[1] // self.row.size
        along_z, along_y = (np.arange(size) for size in self.modes[:2])
        along_y[:ny] = _signed(ny)
        if not self.real:
            along_z[:nz] = _signed(nz)
        own_y = along_y[self.row.index * ky :][:ky]
        own_z = along_z[self.col.index * kz :][:kz]
        x, y, z = _signed(nx)[:, None, None], own_y[None, :, None], own_z[None, None, :]
        return (x, y, z) if self.ordered else (x.T, y.T, z.T)


def _signed(size: int) -> np.ndarray:
    return np.fft.fftfreq(size, 1 / size).round().astype(np.int64)


def _parts(shape: Any) -> tuple[list[Any], list[Any], bool]:
    """Returns the leading dimensions of a field, its x, y, z, and whether it is real."""
    real = shape.dims[-1:] != [PAIR]
    dims = shape.dims if real else shape.dims[:-1]
    return dims[:-3], dims[-3:], real


def pencils(shape: Any, impl: HvdSimdMeshImpl) -> Pencils:
    """Returns the transform of a shape that ends in x, y, z, or in x, y, z, pair, under a layout.

    Raises:
        ValueError: if z is split, the spectral dimensions are not split as the transform leaves
            them, or a block would be uneven.
    """
    _, (x, y, z), real = _parts(shape)
    row, col, alone = (impl.ranks_over(dim) for dim in (x, y, z))
    if alone.size > 1:
        raise ValueError(f"the FFT needs the dimension {z.name} whole on each rank")
    for dim, group in ((x, row), (y, col)):
        if dim.size % group.size:
            raise ValueError(
                f"dimension {dim.name}={dim.size} does not divide by its {group.size} ranks"
            )
    result = Pencils((x.size, y.size, z.size), row, col, real=real)
    axes = [*map(impl.tensor_dimension_to_mesh_axis, (y, x)), None]
    spectral = _spectral_dims((x, y, z), result)
    for dim, ranks, axis in zip(spectral, (col, row, alone), axes, strict=True):
        if impl.ranks_over(dim) != ranks:
            where = "stay whole" if axis is None else f"be split over {impl.shape[axis].name}"
            raise ValueError(f"the layout must let the spectral dimension {dim.name} {where}")
    return result


def _spectral_dims(xyz: Any, plan: Pencils) -> list[Any]:
    modes = zip(reversed(xyz), plan.modes, strict=True)
    dims = [mtf.Dimension("k" + dim.name, size) for dim, size in modes]
    return dims[::-1] if plan.ordered else dims


def spectral_shape(shape: Any, impl: HvdSimdMeshImpl, *, in_order: bool = False) -> Any:
    """Returns the shape [..., kz, ky, kx, pair] of a field's spectrum.

    Args:
        shape: [..., x, y, z] of a real field, or [..., x, y, z, pair] of a complex one.
        impl: the layout.
        in_order: whether it is [..., kx, ky, kz, pair] where that is faster, see
            `Pencils.in_order`.
    """
    leading, xyz, _ = _parts(shape)
    plan = pencils(shape, impl)
    dims = _spectral_dims(xyz, plan.in_order() if in_order else plan)
    return mtf.Shape([*leading, *dims, PAIR])


def transform_between(field: Any, spectrum: Any, impl: HvdSimdMeshImpl) -> Pencils:
    """Returns the transform between fields and spectra of two shapes."""
    last, _ = spectrum.dims[-2:]
    _, (_, _, z), _ = _parts(field)
    return replace(pencils(field, impl), ordered=last.name == f"k{z.name}")


def _transform(x: Any, shape: Any, *, inverse: bool, adjoint: bool = False) -> Any:
    """Returns the spectrum or the field of a tensor, or the adjoint of the other, of a shape.

    The adjoint of the forward transform F is N F^-1 / M, and the adjoint of F^-1 is M F / N. Here N
    is the number of cells, and M the multiplicity of a mode: 2 if it also stands for its conjugate,
    as modes of real fields do. It takes two all-to-alls on pencils, one on slabs, and none on one
    rank.
    """

    def lower(impl: HvdSimdMeshImpl, block: tf.Tensor) -> tf.Tensor:
        plan = transform_between(*((shape, x.shape) if inverse else (x.shape, shape)), impl)
        complex_dtype = tf.complex64 if x.dtype == tf.float32 else tf.complex128

        def weighted(spectrum: tf.Tensor) -> tf.Tensor:
            if not adjoint:
                return spectrum
            m = plan.multiplicity()[..., np.newaxis]
            cells = math.prod(plan.grid)
            return spectrum * fence(tf.constant(cells / m if inverse else m / cells, x.dtype))

        if inverse:
            spectrum = weighted(tf.reshape(block, [-1, *plan.spectral_block, 2]))
            field = plan.inverse(tf.bitcast(spectrum, complex_dtype))
            return field if plan.real else tf.bitcast(field, x.dtype)
        if plan.real:
            field = tf.reshape(block, [-1, *plan.block])
        else:
            field = tf.bitcast(tf.reshape(block, [-1, *plan.block, 2]), complex_dtype)
        spectrum = plan.forward(field)
        return weighted(tf.bitcast(spectrum, x.dtype))

    def gradient(_: list[Any], cotangents: list[Any]) -> list[Any]:
        (dy,) = cotangents
        return [_transform(dy, x.shape, inverse=not inverse, adjoint=not adjoint)]

    name = f"{'i' * inverse}{'r' * _parts(shape if inverse else x.shape)[2]}fft3d"
    return on_blocks(lower, [x], [(shape, x.dtype)], adjoint=gradient, name=name)[0]


def _spectrum(x: Any, name: str, real: bool, *, in_order: bool = False) -> Any:
    _check_dtype(x)
    if _parts(x.shape)[2] != real:
        kind, other = ("real", "fft3d") if real else ("complex", "rfft3d")
        ending = "x, y, z" if real else "x, y, z, pair"
        raise ValueError(
            f"{name} takes a {kind} field [..., {ending}], got {x.shape}; is it one for {other}?"
        )
    shape = spectral_shape(x.shape, x.mesh.impl, in_order=in_order)
    return _transform(x, shape, inverse=False)


def _field(spectrum: Any, shape: Any, name: str) -> Any:
    _check_dtype(spectrum)
    expected, ordered = (
        spectral_shape(shape, spectrum.mesh.impl, in_order=choice) for choice in (False, True)
    )
    if spectrum.shape not in (expected, ordered):
        raise ValueError(f"{name}: expected a spectrum of {expected}, got {spectrum.shape}")
    return _transform(spectrum, shape, inverse=True)


def _check_dtype(x: Any) -> None:
    if x.dtype not in (tf.float32, tf.float64):
        raise ValueError(f"the FFT takes float32 or float64, got {x.dtype.name}")


def rfft3d(x: Any, *, in_order: bool = False) -> Any:
    """Returns the spectrum of a real field, not normalised.

    Args:
        x: mtf tensor [..., x, y, z] of a mesh function, float32 or float64; z is not split.
        in_order: whether the spectrum may be [..., kX, kY, kZ, pair]. It is so on one rank without
            a GPU, where it takes no transposition.

    Returns:
        mtf tensor [..., kZ, kY, kX, pair] or, see `in_order`, [..., kX, kY, kZ, pair], where X, Y,
        Z are the names of the dimensions. The layout must split kY like X and kZ like Y.

    Raises:
        ValueError: if the dtype or the shape is another one, or the layout does not fit.
    """
    return _spectrum(x, "rfft3d", real=True, in_order=in_order)


def irfft3d(spectrum: Any, shape: Any) -> Any:
    """Returns the real field of a spectrum, divided by the number of cells.

    Args:
        spectrum: mtf tensor as returned by `rfft3d`. At kz = 0 and kz = nz / 2, only its Hermitian
            part is used.
        shape: the `mtf.Shape` [..., x, y, z] of the field.

    Raises:
        ValueError: if such a field has another spectral shape.
    """
    return _field(spectrum, shape, "irfft3d")


def fft3d(x: Any) -> Any:
    """Returns the spectrum of a complex field, not normalised.

    Args:
        x: mtf tensor [..., x, y, z, pair] of a mesh function, float32 or float64, with real and
            imaginary parts in the dimension `PAIR`; z is not split.

    Returns:
        mtf tensor [..., kZ, kY, kX, pair], as from `rfft3d`, with all modes along z.

    Raises:
        ValueError: if the dtype or the shape is another one, or the layout does not fit.
    """
    return _spectrum(x, "fft3d", real=False)


def ifft3d(spectrum: Any, shape: Any) -> Any:
    """Returns the complex field of a spectrum, divided by the number of cells.

    Args:
        spectrum: mtf tensor as returned by `fft3d`.
        shape: the `mtf.Shape` [..., x, y, z, pair] of the field.

    Raises:
        ValueError: if such a field has another spectral shape.
    """
    return _field(spectrum, shape, "ifft3d")
