"""Maps of the sky as FITS: HEALPix tables of the full sky, images of flat fields with a WCS.

The axes of the box are those of equatorial coordinates. On the full sky z points north, and right
ascension runs from x to y. A flat field has its centre at right ascension and declination 0, x
points east and y north; pixels are those of the gnomonic projection (Calabretta and Greisen 2002,
astro-ph/0207413), which is the flat sky at small angles.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.parameters import PARAMETERS, Cosmology
from flowpm_dist.io.files import GENERATOR, WriteError, written_whole
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.options import in_unit
from meshimpl import launch

if TYPE_CHECKING:
    from astropy.io import fits

    from meshimpl.process_mesh import ProcessMesh

LONGEST_NAME = 8
"""Most letters of a keyword of FITS."""


@dataclass(frozen=True)
class Shells:
    """The edges of shells or slabs, for a table of a FITS file.

    Attributes:
        edges: comoving distances between which they lie [shell + 1] [Mpc/h].
        cosmology: the cosmology, for their redshifts.
    """

    edges: Sequence[float] | np.ndarray
    cosmology: Cosmology

    @property
    def redshifts(self) -> np.ndarray:
        """Redshifts of the edges [shell + 1] [1]."""
        return np.asarray(Distances(self.cosmology).redshift(np.asarray(self.edges)))

    def hdu(self, name: str) -> fits.BinTableHDU:
        """Returns the table: Z_MIN, Z_MAX [1], CHI_MIN, CHI_MAX [Mpc], a row for each shell."""
        from astropy.io import fits

        z, chi = self.redshifts, np.asarray(self.edges) / float(self.cosmology.h)
        columns = [
            fits.Column(f"{column}_{end}", "D", unit, array=values[part])
            for column, unit, values in (("Z", "", z), ("CHI", "Mpc", chi))
            for end, part in (("MIN", slice(None, -1)), ("MAX", slice(1, None)))
        ]
        return fits.BinTableHDU.from_columns(columns, name=f"{name}_EDGES".upper())


def write_fits_maps(
    path: str | Path,
    maps: Mapping[str, LabelledArray],
    *,
    field_of_view: float | None = None,
    shells: Mapping[str, Shells] | None = None,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    together: bool = False,
) -> None:
    """Writes maps, each array to an extension of its name.

    Args:
        path: the file; one that ends in .gz is compressed.
        maps: arrays by name: [map, pixel], in HEALPix's order of rings, or [map, y, x] or
            [map, x, y]; the names of their axes say which.
        field_of_view: the side of a flat field [deg]; None for the full sky.
        shells: by the name of an array, the edges of its maps, which get a table of their own.
        about: facts for the header of the file; keywords of at most 8 letters.
        overwrite: whether to replace a file that is there.
        together: whether all ranks call it. Rank 0 writes then, the others wait until the file is
            complete, and errors are raised on all of them. Otherwise one rank calls it.

    Raises:
        FileExistsError: there is a file or a link, and `overwrite` is False.
        ValueError: maps of the full sky with another number of pixels than HEALPix has.
        WriteError: the file cannot be written.
    """
    from astropy.io import fits

    path, ranks = Path(path), _all_ranks() if together else None
    writes = ranks is None or ranks.rank == 0
    problem = ""
    if writes and os.path.lexists(path) and not overwrite:
        problem = f"{path} exists: overwrite=True replaces it"
    _raise(problem, FileExistsError, ranks)
    parts = [fits.PrimaryHDU()]
    parts[0].header.update({"ORIGIN": GENERATOR, **(about or {})})
    for name, array in maps.items():
        if array.dimensions[-1] == "pixel":
            parts.append(_healpix(name, array))
        else:
            assert field_of_view is not None
            parts.append(_image(name, array, in_unit("field_of_view", field_of_view, "deg")))
        if name in (shells or {}):
            parts.append((shells or {})[name].hdu(name))
    if writes:
        try:
            with written_whole(path) as aside:
                opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
                with opened(aside, "wb") as file:
                    fits.HDUList(parts).writeto(file)
        except WriteError as error:
            problem = str(error)
    _raise(problem, WriteError, ranks)  # ranks that read the file next wait here


def _all_ranks() -> ProcessMesh | None:
    """Returns a mesh of all ranks; None for a single one."""
    from meshimpl.process_mesh import ProcessMesh

    size = launch.detect().size
    return ProcessMesh(f"row:{size}") if size > 1 else None


def _raise(problem: str, raises: type[Exception], ranks: ProcessMesh | None) -> None:
    """Raises an error if there is a problem, on all ranks if they are given."""
    if ranks is not None:
        ranks.raise_together(problem, raises)
    elif problem:
        raise raises(problem)


def cosmology_header(cosmology: Cosmology) -> dict[str, tuple[Any, str]]:
    """Returns the parameters of a cosmology as keywords of a header, with their meanings."""
    numbers = cosmology.numbers()
    known = [name for name in PARAMETERS if name in numbers and len(name) <= LONGEST_NAME]
    header = {n.upper(): (numbers[n], f"[{PARAMETERS[n].unit or '1'}] {n}") for n in known}
    header["RADIAT"] = bool(cosmology.radiation), "photons and neutrinos in the expansion"
    for number, share in enumerate(cosmology.m_nu_shares, 1):
        header[f"M_NU{number}"] = share * numbers["m_nu"], "[eV] mass of a neutrino"
    return header


def _healpix(name: str, array: LabelledArray) -> fits.BinTableHDU:
    """Returns the table of HEALPix maps, a column for each, as healpy.read_map takes it."""
    from astropy.io import fits

    maps, count = array.values, array.values.shape[-1]
    nside = round((count / 12) ** 0.5)
    if 12 * nside**2 != count:
        raise ValueError(f"{name} has {count} pixels: a full sky has 12 nside^2")
    code = "E" if maps.dtype == np.float32 else "D"
    columns = [
        fits.Column(f"{name}_{n + 1}".upper(), code, _unit(array), array=one)
        for n, one in enumerate(maps)
    ]
    table = fits.BinTableHDU.from_columns(columns, name=name.upper())
    table.header.update(
        {
            "PIXTYPE": ("HEALPIX", "HEALPix pixels"),
            "ORDERING": ("RING", "order of the pixels"),
            "COORDSYS": ("C", "equatorial: z of the box is north, x RA = 0"),
            "NSIDE": (nside, "resolution"),
            "FIRSTPIX": (0, "first pixel"),
            "LASTPIX": (count - 1, "last pixel"),
            "INDXSCHM": ("IMPLICIT", "rows are pixels"),
            "OBJECT": ("FULLSKY", "the full sky"),
            "MEANING": array.meaning,
        }
    )
    return table


def _unit(array: LabelledArray) -> str:
    """Returns the unit of an array in FITS, which has no text for numbers without one."""
    return "" if array.units == "1" else array.units


def _image(name: str, array: LabelledArray, field_of_view: float) -> fits.ImageHDU:
    """Returns the image [map, y, x] of flat maps, with the coordinates of its pixels."""
    from astropy.io import fits

    maps = array.values
    if array.dimensions[-1] == "y":
        maps = np.swapaxes(maps, -1, -2)
    image = fits.ImageHDU(np.ascontiguousarray(maps), name=name.upper())
    pixels = maps.shape[-1]
    for axis, kind in (("1", "RA---TAN"), ("2", "DEC--TAN")):
        image.header.update(
            {
                f"CTYPE{axis}": kind,
                f"CUNIT{axis}": "deg",
                # Radians, as angles of the flat sky, become the projection's plane.
                f"CDELT{axis}": field_of_view / pixels,
                f"CRPIX{axis}": 0.5 * (pixels + 1),
                f"CRVAL{axis}": 0.0,
            }
        )
    image.header.update({"CTYPE3": array.dimensions[0].upper(), "CRPIX3": 1.0, "CRVAL3": 1.0})
    image.header.update({"CDELT3": 1.0, "RADESYS": "ICRS"})
    image.header.update({"BUNIT": _unit(array), "MEANING": array.meaning, "FOV": field_of_view})
    return image
