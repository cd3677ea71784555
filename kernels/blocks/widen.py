"""Numbers of 8 bits as numbers of 16, two at a time, because a conversion of each takes twice as many instructions; or
of 32.

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
def assembly_of_f32(source):
    """Results: the low bytes of two words, which are the halves of the operand, and their high bytes, as f32.

    They are numbers of type `source`. Of int8 a byte, 128 higher, counts ones behind an f32 of 2**23: a conversion
    takes four times as long as other instructions.
    """
    if source.name == "int8":
        lines = "xor.b32 x, $4, 0x80808080;\n" + "".join(
            f"""
        prmt.b32 y, x, 0x4b000000, 0x744{byte};
        mov.b32 a, y;
        sub.f32 ${result}, a, 0f4B000080;"""
            for result, byte in enumerate((0, 2, 1, 3))
        )
    else:
        lines = "mov.b32 {first, second}, $4;\n" + "".join(
            f"""
        cvt.rn.f16x2.e4m3x2 x, {word};
        mov.b32 {{low, high}}, x;
        cvt.f32.f16 ${result}, low;
        cvt.f32.f16 ${result + 2}, high;"""
            for result, word in enumerate(("first", "second"))
        )
    return f"""
    {{ // two {source.name} as fp32 (of each of two words)
        .reg .b32 x, y;
        .reg .b16 first, second, low, high;
        .reg .f32 a;
        {lines}
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
def words_of_f32(pairs, SOURCE: gl.constexpr):
    """The same as f32, of int8 or float8_e4m3fn."""
    return gl.inline_asm_elementwise(
        assembly_of_f32(SOURCE), "=f,=f,=f,=f,r", [pairs], dtype=both(gl.float32), is_pure=True, pack=2
    )


@triton.constexpr_function
def halved(shape):
    return [*shape[:-1], shape[-1] // 2]


@gluon.jit
def pairs(memory):
    """Shared memory [..., K] of numbers of 8 bits as [..., K / 2] of words, each of two neighbours along K."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(memory.layout.swizzle_byte_width, 16, rank=memory.rank)
    return memory.reinterpret(gl.int16, halved(memory.shape), PAIRS)


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
