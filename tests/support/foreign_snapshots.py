"""Snapshots as other codes write them, made with numpy and h5py by the formats' definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

A, BOX, H = 0.25, 50.0, 0.7
"""Scale factor, side of the box [Mpc/h] and h of all of them."""
MPC, KPC, KMS, MASS = 3.085678e24, 3.085678e21, 1e5, 1.989e43
"""A megaparsec, a kiloparsec, km/s and 1e10 solar masses in cgs units, as Gadget writes them."""
UNITS = {"UnitLength_in_cm": MPC, "UnitVelocity_in_cm_per_s": KMS, "UnitMass_in_g": MASS}
PARTS = (3, 0, 7, 1, 0, 2, 5, 1, 1, 4, 0, 6, 0)
"""Particles in each of 13 files, some of which are empty."""
Particles = dict[str, np.ndarray]


def particles(count: int, real: str = "f4", ids: str = "u4", seed: int = 0) -> Particles:
    """Random particles: positions in the box, velocities, masses above 0, ids up to the largest."""
    rng, most = np.random.default_rng([seed, count]), np.iinfo(np.dtype(ids)).max
    return {
        "position": rng.uniform(0, BOX, (count, 3)).astype(real),
        "velocity": rng.normal(scale=300, size=(count, 3)).astype(real),
        "mass": rng.uniform(1, 9, count).astype(real),
        "id": (most - rng.permutation(count).astype(np.uint64)).astype(ids),
    }


def split(all_of: Mapping[int, Particles], counts: Sequence[int]) -> list[dict[int, Particles]]:
    """The particles of each file, of which the first `counts[i]` of each type are in file i."""
    ends = np.cumsum([0, *counts])
    return [
        {
            kind: {name: values[low:high] for name, values in each.items()}
            for kind, each in all_of.items()
            if len(each["id"][low:high])
        }
        for low, high in zip(ends[:-1], ends[1:], strict=True)
    ]


def totals(parts: Sequence[Mapping[int, Particles]], types: int = 6) -> np.ndarray:
    counts = [[len(part[k]["id"]) if k in part else 0 for k in range(types)] for part in parts]
    return np.sum(counts, axis=0)


def gadget_binary(
    stem: Path,
    parts: Sequence[Mapping[int, Particles]],
    *,
    order: str = "<",
    named: bool = False,
    table: Mapping[int, float] | None = None,
    high: int = 0,
    **changed: object,
) -> Path:
    """Files of Gadget-1, or of Gadget-2 with `named` blocks; `stem.0` and so on if several.

    Args:
        table: the mass of types that have no masses of their own.
        high: the high words of the numbers of all particles.
    """
    masses = table or {}
    everything = totals(parts)
    for number, part in enumerate(parts):
        here = totals([part])
        header = {
            "npart": here.astype("u4"),
            "mass": np.array([masses.get(kind, 0.0) for kind in range(6)]),
            "time": A, "redshift": 1 / A - 1, "sfr": 0, "feedback": 0,
            "total": everything.astype("u4"), "cooling": 0, "files": len(parts), "box": BOX,
            "omega": 0.3, "lambda": 0.7, "h": H, "age": 0, "metals": 0,
            "high": np.full(6, high, "u4"), **changed,
        }  # fmt: skip
        raw = b"".join(
            np.asarray(value)
            .astype(order + {"f": "f8", "i": "i4", "u": "u4"}[np.asarray(value).dtype.kind])
            .tobytes()
            for value in header.values()
        )
        blocks = {"HEAD": raw.ljust(256, b"\0")}
        for label, name in {"POS ": "position", "VEL ": "velocity", "ID  ": "id"}.items():
            blocks[label] = b"".join(_raw(part[k][name], order) for k in sorted(part))
        own = [_raw(part[k]["mass"], order) for k in sorted(part) if k not in masses]
        blocks |= {"MASS": b"".join(own)} if own else {}
        blocks["U   "] = b"1234" * 3
        path = stem if len(parts) == 1 else stem.with_name(f"{stem.name}.{number}")
        with path.open("wb") as file:
            for label, values in blocks.items() if part else [("HEAD", blocks["HEAD"])]:
                if named:
                    file.write(_record(label.encode() + _int(len(values) + 8, order), order))
                file.write(_record(values, order))
    return stem


def _int(number: int, order: str) -> bytes:
    return np.array(number % 2**32, f"{order}u4").tobytes()


def _raw(values: np.ndarray, order: str) -> bytes:
    return values.astype(values.dtype.newbyteorder(order)).tobytes()


def _record(values: bytes, order: str) -> bytes:
    return _int(len(values), order) + values + _int(len(values), order)


def gadget_hdf5(
    stem: Path,
    parts: Sequence[Mapping[int, Particles]],
    *,
    table: Mapping[int, float] | None = None,
    storage: Mapping[str, object] | None = None,
    **changed: object,
) -> Path:
    """Files of Gadget-4 or AREPO, `stem.0.hdf5` and so on, or `stem.hdf5`."""
    masses = table or {}
    names = {"position": "Coordinates", "velocity": "Velocities", "mass": "Masses",
             "id": "ParticleIDs"}  # fmt: skip
    header = {
        "NumPart_Total": totals(parts).astype("u4"), "NumPart_Total_HighWord": np.zeros(6, "u4"),
        "MassTable": [masses.get(kind, 0.0) for kind in range(6)], "Time": A,
        "Redshift": 1 / A - 1, "BoxSize": BOX, "NumFilesPerSnapshot": len(parts), "Omega0": 0.3,
        "OmegaLambda": 0.7, "OmegaBaryon": 0.05, "HubbleParam": H, **UNITS, **changed,
    }  # fmt: skip
    for number, part in enumerate(parts):
        path = stem.with_name(f"{stem.name}{f'.{number}' * (len(parts) > 1)}.hdf5")
        with h5py.File(path, "w") as file:
            here = {"NumPart_ThisFile": totals([part]).astype("i4")}
            file.create_group("Header").attrs.update({**header, **here})
            for kind, each in part.items():
                for name, values in each.items():
                    if name != "mass" or kind not in masses:
                        where = f"PartType{kind}/{names[name]}"
                        file.create_dataset(where, data=values, **(storage or {}))
    return stem.with_name(f"{stem.name}.hdf5") if len(parts) == 1 else stem


def swift(
    stem: Path,
    parts: Sequence[Mapping[int, Particles]],
    *,
    length: float = 3.08567758149e24,
    h: float | None = H,
    about: Mapping[str, Mapping[str, float]] | None = None,
    **changed: object,
) -> Path:
    """Files of SWIFT, whose particles are written as they are given.

    Args:
        length: the unit of length [cm]; that of velocities is 1 km/s, that of mass 1e10 suns.
        h: in the group Cosmology; None without that group.
        about: attributes of data sets, by quantity.
    """
    names = {"position": "Coordinates", "velocity": "Velocities", "id": "ParticleIDs"}
    header = {
        "NumPart_Total": totals(parts, 7).astype("u4"), "NumPart_Total_HighWord": np.zeros(7, "u4"),
        "Time": [0.013], "Redshift": [1 / A - 1], "BoxSize": np.full(3, 999.0),
        "NumFilesPerSnapshot": [len(parts)], "Scale-factor": [A], **changed,
    }  # fmt: skip
    for number, part in enumerate(parts):
        path = stem.with_name(f"{stem.name}{f'.{number}' * (len(parts) > 1)}.hdf5")
        with h5py.File(path, "w") as file:
            here = {"NumPart_ThisFile": totals([part], 7)}
            file.create_group("Header").attrs.update({**header, **here})
            units = {
                "Unit length in cgs (U_L)": [length], "Unit time in cgs (U_t)": [length / KMS],
                "Unit mass in cgs (U_M)": [1.98841e43],
            }  # fmt: skip
            file.create_group("Units").attrs.update(units)
            if h is not None:
                cosmology = {"h": [h], "Omega_m": [0.3], "Omega_b": [0.05], "w_0": [-1.0]}
                file.create_group("Cosmology").attrs.update({**cosmology, "Cosmological run": [1]})
            for kind, each in part.items():
                own = {"mass": "DynamicalMasses" if kind == 5 else "Masses"}
                for name, values in each.items():
                    data = file.create_dataset(
                        f"PartType{kind}/{(names | own)[name]}", data=values, chunks=True,
                        fletcher32=True, compression="gzip",
                    )  # fmt: skip
                    data.attrs.update((about or {}).get(name, {}))
    return stem.with_name(f"{stem.name}.hdf5") if len(parts) == 1 else stem


def big(
    folder: Path, all_of: Mapping[int, Particles], files: Mapping[str, int], **changed: object
) -> Path:
    """A folder of MP-Gadget, whose blocks are divided into numbers of files, by quantity."""
    names = {"position": "Position", "velocity": "Velocity", "mass": "Mass", "id": "ID"}
    count = totals([all_of])
    header = {"TotNumPart": count, "Time": A, "BoxSize": BOX, "Omega0": 0.3, "HubbleParam": H,
              "MassTable": np.zeros(6), **UNITS, **changed}  # fmt: skip
    (folder / "Header").mkdir(parents=True)
    lines = []
    for name, value in header.items():
        values = np.atleast_1d(np.asarray(value))
        kind = values.dtype.str
        lines.append(f"{name} {kind} {len(values)} {values.tobytes().hex().upper()} #HUMANE [ ]\n")
    (folder / "Header" / "attr-v2").write_text("".join(lines))
    for kind, each in all_of.items():
        for name, values in each.items():
            block = folder / str(kind) / names[name]
            block.mkdir(parents=True)
            pieces = np.array_split(values, files[name])
            text = [f"DTYPE: {values.dtype.str}", f"NMEMB: {values[:1].size}"]
            text.append(f"NFILE: {len(pieces)}")
            for number, piece in enumerate(pieces):
                (block / f"{number:06X}").write_bytes(piece.tobytes())
                text.append(f"{number:06X}: {len(piece)} : 0 : 0")
            (block / "header").write_text("\n".join([*text, ""]))
    return folder


def music(path: Path, noise: np.ndarray, order: str = "<") -> Path:
    """White noise [x, y, z] as MUSIC's `wnoise_XXXX.bin`, from a machine of a byte order."""
    with path.open("wb") as file:
        file.write(np.array(noise.shape, f"{order}u4").tobytes())
        for plane in noise:
            file.write(plane.tobytes())
    return path


def grafic(path: Path, noise: np.ndarray, marker: str = "<u4") -> Path:
    """White noise [x, y, z] in GRAFIC's format, with the opposite sign."""
    order = marker[0]

    def record(raw: bytes) -> bytes:
        length = np.array(len(raw), marker).tobytes()
        return length + raw + length

    with path.open("wb") as file:
        file.write(record(np.array([*noise.shape, 42], f"{order}i4").tobytes()))
        for z in range(noise.shape[2]):
            file.write(
                record((-noise[:, :, z]).T.astype(noise.dtype.newbyteorder(order)).tobytes())
            )
    return path


def check(
    found: Any,
    written: Mapping[int, Particles],
    *,
    length: float = 1.0,
    speed: float = 1.0,
    mass: float = 1.0,
    table: Mapping[int, float] | None = None,
    exact: bool = True,
) -> None:
    """Compares what is read with what was written, in one range and in ranges of 13 particles.

    Args:
        length, speed, mass: what the values in the files are multiplied by to be in our units.
        exact: whether nothing is rounded, as every unit is ours.
    """
    assert found.counts == {kind: len(each["id"]) for kind, each in sorted(written.items())}
    for kind, each in written.items():
        count, own = len(each["id"]), each
        read = found.read(kind, 0, count)
        factors = {"position": length, "velocity": speed, "mass": mass}
        for name, factor in factors.items():
            values = own[name]
            if name == "mass" and table and kind in table:
                values = np.full(count, table[kind])
            assert read[name].dtype == values.dtype.newbyteorder("=")
            limit = 0 if exact and factor == 1 else 1.01 * np.finfo(values.dtype).eps
            np.testing.assert_allclose(read[name], values.astype("f8") * factor, rtol=limit)
        np.testing.assert_array_equal(read["id"], own["id"].astype("u8"))
        assert read["id"].dtype == np.uint64
        for name, whole in read.items():
            ranges = [(b, min(b + 13, count)) for b in range(0, count, 13)]
            pieces = [found.read(kind, b, e, [name])[name] for b, e in ranges]
            np.testing.assert_array_equal(np.concatenate(pieces), whole)
            none = found.read(kind, 2, 2, [name])[name]
            assert none.shape == (0, *whole.shape[1:]) and none.dtype == whole.dtype
