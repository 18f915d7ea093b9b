"""Columns of galaxy catalogues: all forms of files, whole and in parts, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import os

import h5py
import numpy as np
import pytest
from astropy.io import fits
from astropy.table import Table

from flowpm_dist.io import galaxy_files
from flowpm_dist.io.files import UnreadableError
from flowpm_dist.io.galaxy_files import read_columns

RNG = np.random.default_rng(1)
COUNT = 57
TABLE = {
    "RA": RNG.uniform(0, 360, COUNT),
    "DEC": RNG.uniform(-90, 90, COUNT).astype(np.float32),
    "Z": RNG.uniform(0.1, 1, COUNT),
    "ID": RNG.integers(0, 2**40, COUNT),
    "WEIGHT": RNG.uniform(0.5, 2, COUNT),
}
NAMES = ["RA", "DEC", "Z", "ID", "WEIGHT"]


def write_fits(path):
    first = fits.BinTableHDU.from_columns([fits.Column("OTHER", "D", array=np.zeros(3))])
    columns = [
        fits.Column("RA", "D", array=TABLE["RA"]),
        fits.Column("DEC", "E", array=TABLE["DEC"]),
        fits.Column("NAME", "8A", array=np.array(["galaxy"] * COUNT)),
        fits.Column("Z", "1D", array=TABLE["Z"]),
        fits.Column("ID", "K", array=TABLE["ID"]),
        fits.Column("WEIGHT", "D", array=TABLE["WEIGHT"]),
        fits.Column("COLOUR", "2E", array=np.ones((COUNT, 2))),
    ]
    table = fits.BinTableHDU.from_columns(columns)
    fits.HDUList([fits.PrimaryHDU(), first, table]).writeto(path, overwrite=True)


def write_astropy(path):
    Table(TABLE).write(path, format="hdf5", path="galaxies/table", overwrite=True)


def write_hdf5(path):
    with h5py.File(path, "w") as file:
        for name, values in TABLE.items():
            filters = {"compression": "gzip", "chunks": (10,)} if name == "Z" else {}
            file.create_dataset(name, data=values, **filters)


def write_text(path, separator=",", header="RA,DEC,Z,ID,WEIGHT"):
    rows = zip(*TABLE.values(), strict=True)
    lines = [separator.join(repr(value.item()) for value in row) for row in rows]
    lines[10:10] = ["", "# a comment"]
    path.write_text("\n".join([header, *lines]))


WRITERS = {
    "fits": write_fits,
    "hdf5": write_hdf5,
    "commas": write_text,
    "blanks": lambda path: write_text(path, "  ", "# made by hand\n# ra dec z id weight"),
    "units": lambda path: write_text(path, ",", '"RA" [deg], "DEC" [deg], Z, ID, WEIGHT'),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_and_its_parts(tmp_path, kind, monkeypatch):
    path = tmp_path / "galaxies"
    WRITERS[kind](path)
    whole = read_columns(path, NAMES)
    assert list(whole) == NAMES
    for name, values in whole.items():
        np.testing.assert_array_equal(values, TABLE[name].astype(np.float64), err_msg=name)
    for parts in (2, 3, 8, 100):
        pieces = [read_columns(path, ["Z", "RA"], part, parts) for part in range(parts)]
        assert max(len(piece["Z"]) for piece in pieces) < max(2, 2 * COUNT / parts)
        for name in ("Z", "RA"):
            joined = np.concatenate([piece[name] for piece in pieces])
            np.testing.assert_array_equal(joined, TABLE[name])
    monkeypatch.setattr(galaxy_files, "BLOCK", 97)
    np.testing.assert_array_equal(read_columns(path, ["Z"])["Z"], TABLE["Z"])


def test_a_table_in_hdf5(tmp_path):
    path = tmp_path / "galaxies.hdf5"
    write_astropy(path)
    found = read_columns(path, ["galaxies/table/ra", "galaxies/table/Z"], 1, 2)
    np.testing.assert_array_equal(found["galaxies/table/ra"], TABLE["RA"][28:])
    np.testing.assert_array_equal(found["galaxies/table/Z"], TABLE["Z"][28:])


def test_scaled_and_unsigned_columns_of_fits(tmp_path):
    path = tmp_path / "galaxies.fits"
    stored = np.arange(COUNT, dtype=np.int16)
    columns = [
        fits.Column("Z", "I", array=stored),
        fits.Column("N", "J", array=np.full(COUNT, 2**31 + 5, np.uint32), bzero=2**31),
    ]
    fits.BinTableHDU.from_columns(columns).writeto(path)
    fits.setval(path, "TSCAL1", value=0.01, ext=1)
    fits.setval(path, "TZERO1", value=0.5, ext=1)
    found = read_columns(path, ["Z", "N"], 1, 2)
    np.testing.assert_allclose(found["Z"], (stored * 0.01 + 0.5)[28:], rtol=1e-12)
    np.testing.assert_array_equal(found["N"], np.full(29, 2**31 + 5))


@pytest.mark.parametrize("scaled", [False, True])
def test_values_that_a_fits_file_does_not_have_are_named(tmp_path, scaled):
    """Columns of whole numbers have a number in their place."""
    path = tmp_path / "galaxies.fits"
    stored = np.arange(COUNT, dtype=np.int32)
    stored[40] = 9999
    columns = [fits.Column(name, "J", array=stored, null=9999) for name in ("RA", "N")]
    columns += [
        fits.Column("Z", "J", array=np.full(COUNT, 9999)),
        fits.Column("D", "D", array=stored),
    ]
    fits.BinTableHDU.from_columns(columns).writeto(path)
    if scaled:
        fits.setval(path, "TSCAL1", value=0.01, ext=1)
        fits.setval(path, "TZERO1", value=0.5, ext=1)
    for part, parts in ((0, 1), (1, 2)):
        with pytest.raises(
            UnreadableError, match=r"column RA has no value \(TNULL = 9999\) in row 40"
        ):
            read_columns(path, ["Z", "RA"], part, parts)
    assert read_columns(path, ["RA"], 0, 2)["RA"][1] == (0.51 if scaled else 1)
    assert read_columns(path, ["Z", "D"])["Z"][40] == 9999


def test_values_that_an_hdf5_file_does_not_have_are_named(tmp_path):
    """HDF5 would read zeros."""
    path = tmp_path / "galaxies.hdf5"
    layout = h5py.VirtualLayout((COUNT,), "f8")
    layout[:] = h5py.VirtualSource("part.hdf5", "RA", (COUNT,))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("RA", layout)
        file.create_dataset("Z", (COUNT,), "f8", chunks=(20,))[:20] = 1.0
    with pytest.raises(UnreadableError, match="column Z has 1 of 3 chunks: copy it again"):
        read_columns(path, ["Z"])
    with pytest.raises(UnreadableError, match="column RA has values in the file part.hdf5, which"):
        read_columns(path, ["RA"])
    with h5py.File(tmp_path / "part.hdf5", "w") as file:
        file["RA"] = TABLE["RA"]
    np.testing.assert_array_equal(read_columns(path, ["RA"])["RA"], TABLE["RA"])


@pytest.mark.parametrize("comma", [True, False])
def test_text_in_quotation_marks_is_one_column(tmp_path, comma):
    path, separator = tmp_path / "galaxies", "," if comma else "  "
    names = ["NAME", "RA", "DEC", "Z"]
    rows = [[f'"{name}"', "10", "20", "0.5"] for name in ("1,2", "NGC 224", "a # b", "plain")]
    rows.append(["plain", *rows[0][1:], "# a comment"])
    path.write_text("\n".join(separator.join(row) for row in (names, *rows)).replace(",#", " #"))
    for parts in (1, 3):
        found = [read_columns(path, ["RA", "Z"], part, parts) for part in range(parts)]
        np.testing.assert_array_equal(np.concatenate([each["RA"] for each in found]), [10] * 5)
        np.testing.assert_array_equal(np.concatenate([each["Z"] for each in found]), [0.5] * 5)


@pytest.mark.parametrize(
    "header, row",
    [
        ("NAME,A,RA,DEC,Z", "1,2,7,10,20,0.5"),
        ("NAME,A,RA,DEC,Z", '"1,2,7,10,20,0.5\n"1,7,10,20,0.5'),
        ("RA,DEC,Z,NAME", "1,2,7"),
        ("NAME RA DEC Z", "NGC 224 10 20 0.5"),
        ("# RA [deg] DEC [deg] Z", "10 20 0.5 1 2 3 4"),
    ],
)
def test_a_line_with_more_or_fewer_columns_is_quoted(tmp_path, header, row):
    path, names = tmp_path / "galaxies", header.lstrip("# ").replace(",", " ").split()
    good = ("," if "," in header else " ").join("1" * len(names))
    path.write_text(f"{header}\n{good}\n{row}\n{good}\n")
    with pytest.raises(UnreadableError, match=r"the line .* has \d columns, and the first line na"):
        read_columns(path, ["RA", "DEC", "Z"])


def test_files_that_end_early(tmp_path):
    path = tmp_path / "galaxies"
    for kind, message in {
        "fits": "is truncated: its table of 57 rows ends at byte",
        "hdf5": "cannot be read: .*truncated",
        "commas": "the line .* has no number in column WEIGHT",
    }.items():
        WRITERS[kind](path)
        size = path.stat().st_size
        os.truncate(path, size - 2900 if kind == "fits" else size - 25)
        with pytest.raises(UnreadableError, match=message):
            read_columns(path, NAMES)


def test_columns_that_are_missing_or_no_numbers(tmp_path):
    path = tmp_path / "galaxies"
    for kind, writer in WRITERS.items():
        writer(path)
        has = "it has .*(DEC|dec)"
        with pytest.raises(UnreadableError, match=f"{path} has no column 'REDSHIFT'; {has}"):
            read_columns(path, ["RA", "REDSHIFT"])
        if kind == "fits":
            for name in ("NAME", "COLOUR"):
                with pytest.raises(UnreadableError, match=f"column {name} has the format"):
                    read_columns(path, [name])


def test_data_sets_of_hdf5_that_are_no_columns(tmp_path):
    path = tmp_path / "galaxies.hdf5"
    with h5py.File(path, "w") as file:
        file["RA"], file["Z"], file["xyz"] = np.ones(4), np.ones(5), np.ones((4, 3))
        file["name"] = np.array([b"one", b"two"])
        file.create_dataset("promise", shape=(10**12,), dtype="f8", chunks=(2**20,))
        file["reference"] = np.array([file["RA"].ref] * 4, h5py.ref_dtype)
    for names, message in {
        ("RA", "Z"): "different numbers of rows: RA 4, Z 5",
        ("xyz",): r"column xyz has the shape \[4, 3\]",
        ("name",): "column name: dtype is .*S3.*; must be the dtype of real numbers",
        ("reference",): "must be the dtype of real numbers",
        ("promise",): "has 1000000000000 rows, but only 0 bytes of values",
        ("nowhere/RA",): "has no group or table 'nowhere'",
    }.items():
        with pytest.raises(UnreadableError, match=message):
            read_columns(path, names)


def test_what_is_no_catalogue(tmp_path):
    path = tmp_path / "galaxies"
    write_fits(path)
    packed = gzip.compress(path.read_bytes())
    numbers = b"1.0,2.0,3.0\n4.0,5.0,6.0\n"
    for contents, message in {
        packed: "is compressed by gzip: unpack it first",
        b"": "its first line does not name columns",
        numbers: "its first line does not name columns",
        b"\x00\x01\x02 picture": "is neither FITS nor HDF5",
        b"RA,Z\n1.0,\n": "the line '1.0,' has no number in column Z",
        b"RA,Z\n1.0,far\n": "the line '1.0,far' has no number in column Z",
        b"SIMPLE  =" + bytes(5000): "cannot be read|has no table",
    }.items():
        path.write_bytes(contents)
        with pytest.raises(UnreadableError, match=message):
            read_columns(path, ["RA", "Z"])
    for other in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UnreadableError, match="cannot be read"):
            read_columns(other, ["RA"])


def test_any_byte_of_a_header_may_be_wrong(tmp_path):
    """A file with a changed byte is read or named; nothing else is raised."""
    path = tmp_path / "galaxies"
    for kind, step in itertools.product(("fits", "hdf5"), (0, 1)):
        WRITERS[kind](path)
        whole = path.read_bytes()
        begin = whole.index(b"XTENSION", 4000) if kind == "fits" else 0
        for place in range(begin + step, begin + 1500, 37):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << (place % 7)
            path.write_bytes(damaged)
            try:
                read_columns(path, ["RA", "Z"])
            except UnreadableError as error:
                assert str(path) in str(error)
