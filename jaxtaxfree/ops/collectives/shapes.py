"""The shapes at which the collectives are tested, tuned and timed, and tiny ones for machines without a GPU."""

from jaxtaxfree.ops.shapes import CollectiveShape

SHAPES = (
    CollectiveShape(name="2 B", nbytes=2),
    CollectiveShape(name="2 KB", nbytes=2 << 10),
    CollectiveShape(name="16 KB", nbytes=16 << 10),
    CollectiveShape(name="64 KB", nbytes=64 << 10),
    CollectiveShape(name="256 KB", nbytes=256 << 10),
    CollectiveShape(name="1 MB", nbytes=1 << 20),
    CollectiveShape(name="2 MB", nbytes=2 << 20),
    CollectiveShape(name="4 MB", nbytes=4 << 20),
)

TINY_SHAPES = (CollectiveShape(name="tiny/2 B", nbytes=2), CollectiveShape(name="tiny/6 KB", nbytes=6 << 10))
