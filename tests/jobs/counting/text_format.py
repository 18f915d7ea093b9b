"""A format of particles that is not the package's: a line for each particle."""

import numpy as np


def write_part(folder, number, parts, block, header):
    with (folder / f"{number}.txt").open("w") as file:
        for ids, positions, velocities in block.particles(header):
            np.savetxt(file, np.column_stack([ids, positions, velocities]), fmt="%.9g")
    return np.array([block.count], np.int64)


def finish(folder, parts, header):
    total = sum(int(part[0]) for part in parts)
    (folder / "about.txt").write_text(f"{total} particles at a = {header.a}\n")
