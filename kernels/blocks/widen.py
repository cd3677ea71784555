"""Numbers of 8 bits as numbers of 16: two at a time, because a conversion of each takes twice as many instructions.

Values are exact, and NaN stays NaN.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@triton.constexpr_function
def assembly(source, dest):
    """Results: the low and the high byte of the operand, 16 bits that are two numbers of type `source`, as `dest`."""
    # Of int8 the byte is put behind the upper one of 128 (bf16, whose lower bits then count 1, and the highest 128) or
    # of 1024 (f16, which has room for all 8 bits).
    lines = {
        ("int8", "bf16"): """
        prmt.b32 x, x, 0x43434343, 0x4140;
        and.b32 y, x, 0x43804380;
        and.b32 x, x, 0x437f437f;
        sub.bf16x2 x, x, y;""",
        ("int8", "fp16"): """
        prmt.b32 x, x, 0x64646464, 0x4140;
        xor.b32 x, x, 0x00800080;
        mov.b32 y, 0x64806480;
        sub.f16x2 x, x, y;""",
        ("fp8e4nv", "fp16"): "cvt.rn.f16x2.e4m3x2 x, $2;",
        ("fp8e5", "fp16"): "prmt.b32 x, x, 0, 0x1404;",
    }
    through_half = """
        mov.b32 {low, high}, x;
        cvt.f32.f16 a, low;
        cvt.f32.f16 b, high;
        cvt.rn.bf16x2.f32 x, b, a;"""
    for each in ("fp8e4nv", "fp8e5"):
        lines[each, "bf16"] = lines[each, "fp16"] + through_half
    return f"""
    {{ // two {source.name} as {dest.name}
        .reg .b32 x, y;
        .reg .b16 low, high;
        .reg .f32 a, b;
        cvt.u32.u16 x, $2;
        {lines[source.name, dest.name]}
        mov.b32 {{$0, $1}}, x;
    }}"""


@triton.constexpr_function
def both(dest):
    return dest, dest


@triton.constexpr_function
def is_wider(dtype, other):
    return dtype.primitive_bitwidth > other.primitive_bitwidth


@gluon.jit
def words(pairs, SOURCE: gl.constexpr, DEST: gl.constexpr):
    """What [N, K / 2] words have in their low and in their high bytes, of type SOURCE: two of [N, K / 2], of DEST."""
    return gl.inline_asm_elementwise(assembly(SOURCE, DEST), "=h,=h,h", [pairs], dtype=both(DEST), is_pure=True, pack=1)


@gluon.jit
def pairs(memory):
    """Shared memory [N, K] of numbers of 8 bits as [N, K / 2] of words, each of two that follow each other along K."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(memory.layout.swizzle_byte_width, 16)
    return memory.reinterpret(gl.int16, [memory.shape[0], memory.shape[1] // 2], PAIRS)


@gluon.jit
def block(pairs, SOURCE: gl.constexpr, DEST: gl.constexpr, SUMS: gl.constexpr):
    """What lies in `pairs`, of type SOURCE, as DEST, as the tensor cores take it from registers.

    Args:
      SUMS: the layout of the product.
    """
    COLUMNS: gl.constexpr = pairs.shape[0]
    # Two bytes that follow each other along K are those of a thread.
    loaded = pairs.load(gl.DotOperandLayout(0, SUMS, 1))
    fence_async_shared()  # between these reads and what TMA, which takes another path, writes here next
    low, high = words(loaded, SOURCE, DEST)
    both = gl.join(low, high).reshape([COLUMNS, 2 * pairs.shape[1]])
    return gl.convert_layout(both, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
