/* How ranks send numbers in 8, 4 or 1 bits: blocks of 128 to 2,048 elements, each with one scale, a bfloat16.
 *
 * int8    codes -127 to 127, times the scale.
 * int4    codes -7 to 7, times the scale; stored plus 8, and two in a byte: the lower half of byte i is element i of
 *         the block, the upper half is element i + block / 2.
 * fp8     float8 e4m3, times the scale, which is a power of two.
 * sign    1 where an element is negative: it stands for plus or minus the scale. Bit k of byte i is element
 *         i + k * block / 8.
 *
 * The scale of integers is (the largest magnitude) / 127 or / 7, rounded to bfloat16. That is off by 2^-9 at most, so the
 * largest element still has the top code, a product of code and scale is exact in fp32, and encoding what was decoded
 * gives the same codes and scale. A block that is too small for a scale is of zeros. One with a NaN, an inf or a scale
 * above ZF_TOP_SCALE, whose products with codes would go beyond the largest number, is of NaN.
 *
 * The scale of signs is the mean magnitude, rounded to bfloat16. It is added up in fp32: elements i, i + 256, i + 512, ..
 * in this order, then these 256 sums by halves, i and i + 128 first. A scale has 8 bits and a block at most 2,048
 * elements, so the sum of a decoded block is exact, and encoding it gives the same codes and scale. A block whose sum is
 * no finite number is of NaN.
 *
 * Codes are the nearest ones, or drawn, but for signs: an element between two codes becomes either, with probabilities
 * that make it right on average. Then the scale of integers is rounded up, so that no element is beyond the top code.
 * Block `b` of a unit takes the draws of formats.h as 2,048 elements of an optimizer do: from place
 * zf_seed(key, b) % 2048 on.
 */
#ifndef ZEROFN_WIRE_H
#define ZEROFN_WIRE_H

#include "formats.h"

enum zf_wire { ZF_INT8, ZF_INT4, ZF_FP8, ZF_SIGN };

#define ZF_LEAST_SCALE 0x0D800000u /* 2^-100: no product of a scale and a code is a denormal number */
#define ZF_TOP_CODE(format) ((format) == ZF_INT8 ? 127.0f : 7.0f)
#define ZF_TOP_SCALE(format)                                                                                           \
    ((format) == ZF_INT8 ? 0x7B800000u : (format) == ZF_INT4 ? 0x7D800000u : 0x7B000000u) /* 2^120, 2^124, 2^119 */
#define ZF_PLANES(format) ((format) == ZF_SIGN ? 8 : (format) == ZF_INT4 ? 2 : 1) /* elements in a byte */
#define ZF_SUMS 256 /* by which the magnitudes of a block are added up */
#define ZF_MAGIC 12582912.0f /* 1.5 * 2^23: a sum with it rounds to an integer, which its lowest bits are */

ZF_FN zf_u32 zf_bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    zf_u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
#endif
}
ZF_FN float zf_float_of(zf_u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
#endif
}

/* A scale that is rounded to nearest, ties to even; none below the least. */
ZF_FN zf_u32 zf_wire_rounded(zf_u32 scale) {
    return scale < ZF_LEAST_SCALE ? 0u : (scale + 0x7FFFu + (scale >> 16 & 1u)) & 0xFFFF0000u;
}

/* The least scale with top <= most * scale; none below the least of all. The quotient may have been rounded down to a
 * bfloat16; the product is exact. */
ZF_FN zf_u32 zf_wire_raised(zf_u32 scale, zf_u32 top, float most) {
    if (scale < ZF_LEAST_SCALE) return 0u;
    scale = (scale + 0xFFFFu) & 0xFFFF0000u;
    return zf_float_of(scale) * most < zf_float_of(top) ? scale + 0x10000u : scale;
}

/* The bits of the largest magnitude of a block -> the bits of its scale, the lower half of which is zero. `drawn`: for
 * codes that are. */
ZF_FN zf_u32 zf_wire_scale(zf_u32 top, int format, int drawn) {
    if (top >= ZF_INF) return ZF_NAN;
    zf_u32 scale;
    if (format == ZF_FP8) { /* the least power of two with top <= 448 * scale */
        zf_u32 power = (top + 0x001FFFFFu) & ZF_INF, least = ZF_LEAST_SCALE + 0x04000000u;
        scale = top == 0u ? 0u : (power > least ? power : least) - 0x04000000u;
    } else {
        const float most = ZF_TOP_CODE(format);
        scale = zf_bits_of(zf_float_of(top) / most);
        scale = drawn ? zf_wire_raised(scale, top, most) : zf_wire_rounded(scale);
    }
    return scale > ZF_TOP_SCALE(format) ? ZF_NAN : scale;
}

/* The sum of a block's magnitudes -> the bits of its scale. Sizes of blocks are powers of two: the product is exact. */
ZF_FN zf_u32 zf_wire_mean(float sum, zf_i64 block) {
    return zf_bits_of(sum) >= ZF_INF ? ZF_NAN : zf_wire_rounded(zf_bits_of(sum * (1.0f / (float)block)));
}

/* What elements are multiplied by to be encoded; 0 where every code is to be that of zero. */
ZF_FN float zf_wire_inverse(zf_u32 scale) {
    return scale == 0u || scale > ZF_INF ? 0.0f : 1.0f / zf_float_of(scale);
}

/* An element times the inverse -> the integer nearest to it, ties to even, as 32 bits. */
ZF_FN zf_u zf_wire_integer(zf_f y) { return zf_bits(y + ZF_MAGIC) - 0x4B400000u; }

/* An element times the inverse, at most 448 -> the nearest e4m3, ties to even. Below 2^-6, the least normal one, a sum
 * with a number of the right exponent rounds. */
ZF_FN zf_u zf_wire_fp8(zf_f y) {
    zf_u bits = zf_bits(y), size = bits & ZF_ABS, sign = bits >> 24 & 0x80u;
    zf_u normal = ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - 960u; /* 120 octaves of 8 codes */
    zf_u small = zf_bits(zf_float(size) + 16384.0f) - 0x46800000u;      /* a bit of 2^14 is 2^-9 */
    return sign | (size < 0x3C800000u ? small : normal);
}

/* A draw of formats.h -> a number between -1/2 and 1/2: one of 2^15, so that a sum with an integer rounds to it. */
ZF_FN zf_f zf_wire_dither(zf_u draw) { return zf_float((draw >> 17 << 8) + 0x3F800080u) - 1.5f; }

/* As above, for the integer below or above. Of an element at most an ulp above the top code it is the top code. */
ZF_FN zf_u zf_wire_drawn_integer(zf_f y, zf_u draw) { return zf_wire_integer(y + zf_wire_dither(draw)); }

/* As above, for the e4m3 below or above: 20 bits are cut off, or what is below 2^-9. */
ZF_FN zf_u zf_wire_drawn_fp8(zf_f y, zf_u draw) {
    zf_u bits = zf_bits(y), size = bits & ZF_ABS, sign = bits >> 24 & 0x80u;
    zf_u normal = ((size + (draw >> 12)) >> 20) - 960u;
    zf_f moved = zf_float(size) + zf_wire_dither(draw) * 0.001953125f; /* perhaps below zero */
    zf_u small = zf_bits(moved + 24576.0f) - 0x46C00000u;             /* a bit of 2^14 * 1.5 is 2^-9 */
    return sign | (size < 0x3C800000u ? small : normal);
}

/* What an e4m3 of 8 bits stands for. Of those without a leading one, half of what it would be is added with it. */
ZF_FN zf_f zf_wire_of_fp8(zf_u code) {
    zf_u size = code & 0x7Fu, bits = (size << 20) + 0x3C000000u; /* of 2^-7 and more */
    zf_u small = zf_bits((zf_float(bits) - 0.0078125f) * 2.0f);
    return zf_float((size < 8u ? small : bits) | (code & 0x80u) << 24);
}

#endif
