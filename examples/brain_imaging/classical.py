"""Classical reconstructions by the package sigpy, and scores by scikit-image."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
from anatomy import InputError

# In 1,000 iterations sigpy's own choice for total variation, PDHG, comes as far as ADMM in 30.
METHODS = {
    "tv": ("TotalVariationRecon", {"solver": "ADMM", "rho": 0.05, "max_cg_iter": 5}),
    "wavelet": ("L1WaveletRecon", {}),
}
"""Name and arguments of each method in `sigpy.mri.app`."""
SCORES = ("psnr", "psnr_brain", "ssim", "ssim_brain")
PACKAGES = {"skimage": "scikit-image", "sigpy": "sigpy"}


def check_packages(method: str) -> None:
    """Checks that the packages of an evaluation are installed.

    Raises:
        InputError: one is missing.
    """
    for module, package in PACKAGES.items():
        wanted = module != "sigpy" or method in METHODS
        if wanted and importlib.util.find_spec(module) is None:
            raise InputError(f"evaluate needs the package {package}: pip install {package}")


def classical(
    method: str,
    spectrum: np.ndarray,
    maps: np.ndarray,
    mask: np.ndarray,
    strength: float,
    iterations: int,
) -> np.ndarray:
    """Returns an image that minimises |M F S x - y|^2 / 2 + strength |T x|_1.

    T are finite differences ("tv") or a wavelet transform ("wavelet").

    Args:
        method: one of `METHODS`.
        spectrum: y, complex64 [coil, kx, ky, kz], zero frequency in the middle.
        maps: complex64 [coil, x, y, z].
        mask: [ky, kz] or [kx, ky, kz].
        strength: the weight of the regularisation.
        iterations: iterations of sigpy's solver.
    """
    import sigpy.mri.app

    weights = np.broadcast_to(mask, spectrum.shape[1:]).astype(np.float32)
    name, arguments = METHODS[method]
    arguments = {"weights": weights, "max_iter": iterations, "show_pbar": False, **arguments}
    solver = getattr(sigpy.mri.app, name)(spectrum, maps, strength, **arguments)
    found: np.ndarray = solver.run()
    return found


def tuned(score: Callable[[float], float], start: float = 2e-3, factor: float = 2.0) -> float:
    """Returns the strength with the best score: neighbours differ by a factor, and are worse.

    Args:
        score: from a strength to a score, of which larger is better.
        start: the first strength to try.
        factor: the factor between neighbours.
    """
    scores = {0: score(start)}
    best = 0
    while not {best - 1, best + 1} <= scores.keys():
        for place in (best - 1, best + 1):
            if place not in scores:
                scores[place] = score(start * factor**place)
        best = max(scores, key=scores.__getitem__)
    return start * factor**best


def scores(found: np.ndarray, truth: np.ndarray) -> list[float]:
    """Returns PSNR [dB] and SSIM of magnitudes, each of the whole volume and within the brain.

    The data range is the largest magnitude of the truth. The brain is where the truth is not zero.

    Returns:
        the `SCORES`.
    """
    from skimage.metrics import structural_similarity

    found, truth = np.abs(found), np.abs(truth)
    brain, top = truth > 0, truth.max()
    square = (found - truth) ** 2
    _, similar = structural_similarity(found, truth, data_range=top, full=True)
    peaks = [10 * np.log10(top**2 / values.mean()) for values in (square, square[brain])]
    return [*map(float, peaks), float(similar.mean()), float(similar[brain].mean())]
