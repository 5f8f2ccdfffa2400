"""Tile shapes of the fused LM-head kernels: fixed tables, chosen by measurement, never at run time.

Owns: which shape serves a call. A row's numbers depend on the shape, so it follows from the dtype
and the number of rows of the call alone, through the one constant FEW_ROWS. It is not the kernels.
"""

from dataclasses import dataclass

FEW_ROWS = 64  # calls of at most this many rows are bound by reading the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """One compiled shape of the product.

    Attributes:
        rows, ids, inner: of a tile; `inner` columns of hidden are multiplied at once.
        group: row tiles that share a sweep over the vocabulary, so that hidden stays in the cache.
        bulk: whether tiles are loaded by the tensor copy engine where strides allow it.
        persistent: whether a program takes several tiles.
        specialize: whether loads and products run in different warps.
    """

    rows: int
    ids: int
    inner: int
    warps: int
    stages: int
    group: int = 16
    bulk: bool = False
    persistent: bool = False
    specialize: bool = False


MANY_HALF = TileConfig(rows=128, ids=256, inner=64, warps=8, stages=4, bulk=True)
FEW_HALF = TileConfig(rows=64, ids=256, inner=64, warps=8, stages=4, bulk=True)
MANY_FLOAT = TileConfig(rows=64, ids=64, inner=32, warps=4, stages=3)
FEW_FLOAT = TileConfig(rows=16, ids=64, inner=64, warps=4, stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configs:
    """The shapes of one dtype."""

    many: TileConfig
    few: TileConfig

    def choose(self, num_rows: int) -> TileConfig:
        """The shape for a call of this many rows."""
        return self.few if num_rows <= FEW_ROWS else self.many


HALF = Configs(many=MANY_HALF, few=FEW_HALF)
FLOAT = Configs(many=MANY_FLOAT, few=FEW_FLOAT)


def configs_for(itemsize: int) -> Configs:
    """The table for products of 2-byte or of 4-byte numbers."""
    return HALF if itemsize == 2 else FLOAT
