"""The kernels of `all_gather_matmul`. The cheapest one that does not refuse a call takes it."""

from jaxtaxfree.ops import product
from jaxtaxfree.ops.all_gather_matmul.few import Few
from jaxtaxfree.ops.all_gather_matmul.hopper import Hopper
from jaxtaxfree.ops.all_gather_matmul.hopper_few import HopperFew
from jaxtaxfree.ops.all_gather_matmul.portable import Portable
from jaxtaxfree.ops.variant import Variant

VARIANTS: tuple[Variant[product.Call], ...] = (Hopper(), HopperFew(), Few(), Portable())
