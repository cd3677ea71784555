"""The kernels of `ragged_dot`, and of the gradient of its weights."""

from jaxtaxfree.ops.ragged_dot.common import Call
from jaxtaxfree.ops.ragged_dot.hopper import Hopper
from jaxtaxfree.ops.ragged_dot.portable import Portable, PortableWeights
from jaxtaxfree.ops.variant import Variant

VARIANTS: tuple[Variant[Call], ...] = (Hopper(), Portable())
VARIANTS_OF_WEIGHTS: tuple[Variant[Call], ...] = (Hopper(), PortableWeights())
