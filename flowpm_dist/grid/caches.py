"""Caches of what the ranks of a mesh make together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from flowpm_dist.grid.box import Box

P = ParamSpec("P")
T = TypeVar("T")
Of = Callable[Concatenate[Box, P], T]


def cached_on_mesh(maxsize: int) -> Callable[[Of[P, T]], Of[P, T]]:
    """Like `functools.lru_cache`, with a cache on each mesh of ranks.

    What a mesh function needs is built by all of its ranks together, so they must also forget it
    together. In one cache for all meshes, what a rank does on its own would drive out what it
    shares on this rank alone, and the others would not build it again with it.

    Args:
        maxsize: of the function's results on each mesh.
    """

    def decorate(function: Of[P, T]) -> Of[P, T]:
        @functools.wraps(function)
        def cached(box: Box, *args: P.args, **kwargs: P.kwargs) -> T:
            kept = box.mesh.kept
            if function not in kept:
                kept[function] = functools.lru_cache(maxsize)(function)
            found: T = kept[function](box, *args, **kwargs)
            return found

        return cached

    return decorate
