/* How numbers are stored, written once for the CPU and the GPU: C, C++ and NVRTC can include this file.
 *
 * All arithmetic is IEEE fp32 with every fma written out, so every machine gives the same bits; compile with
 * -ffp-contract=off (NVRTC: --fmad=false) and never with fast-math.
 *
 * A zf_f is an fp32 and a zf_u its bits, or 32 bits that hold a shorter number; a zf_w is 16 bits, those of two zf_u in
 * as much room. On the CPU they are vectors, one element a lane (vectors.h, which comes first and says ZF_VECTORS);
 * everywhere else scalars.
 *
 * split   fp32 bits = (hi << 16) + lo: hi is the bfloat16 nearest to the number, lo what is left, int16. Exact for
 *         every pattern but NaN, which is kept as hi = 0x7FC0, lo = 0.
 * blocks  8 bits an element, for 256 one scale: the power of two next to the largest. A code is bits 20 to 27 of the
 *         fp32, less a base: 3 bits of mantissa, 8 codes an octave, the top code is the scale. Of signed numbers code 0
 *         is zero; of unsigned ones it is the smallest, 2^-31.9 of the scale, and zero counts as that.
 * draws   random bits for m and for v, from (key, element): 2,048 stratified ones a key, which a unit of as many
 *         elements goes through from places of its own.
 */
#ifndef ZEROFN_FORMATS_H
#define ZEROFN_FORMATS_H

#if defined(__CUDACC_RTC__)
typedef unsigned char zf_u8;
typedef signed char zf_i8;
typedef unsigned short zf_u16;
typedef short zf_i16;
typedef int zf_i32;
typedef unsigned int zf_u32;
typedef long long zf_i64;
typedef unsigned long long zf_u64;
#else
#include <stdint.h>
typedef uint8_t zf_u8;
typedef int8_t zf_i8;
typedef uint16_t zf_u16;
typedef int16_t zf_i16;
typedef int32_t zf_i32;
typedef uint32_t zf_u32;
typedef int64_t zf_i64;
typedef uint64_t zf_u64;
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ZF_FN static __host__ __device__ __forceinline__
#else
#define ZF_FN static inline __attribute__((always_inline))
#endif

#ifndef ZF_VECTORS
typedef float zf_f;
typedef zf_u32 zf_u, zf_w;
#define ZF_ALL(x) (x)
#define ZF_LESS(a, b) ((a) > (b) ? (a) - (b) : 0u) /* zf_w */
#define ZF_LEAST(a, b) ((a) < (b) ? (a) : (b)) /* zf_f; b where a is NaN */
#if defined(__CUDA_ARCH__)
#define ZF_FMA(a, b, c) __fmaf_rn(a, b, c)
#define ZF_SQRT(a) __fsqrt_rn(a)
#define ZF_DIV(a, b) __fdiv_rn(a, b)
ZF_FN zf_u zf_bits(zf_f x) { return __float_as_uint(x); }
ZF_FN zf_f zf_float(zf_u bits) { return __uint_as_float(bits); }
#else
#define ZF_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define ZF_SQRT(a) __builtin_sqrtf(a)
#define ZF_DIV(a, b) ((a) / (b))
ZF_FN zf_u zf_bits(zf_f x) {
    zf_u bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
ZF_FN zf_f zf_float(zf_u bits) {
    zf_f x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
#endif
#endif

#define ZF_ABS 0x7FFFFFFFu
#define ZF_INF 0x7F800000u
#define ZF_NAN 0x7FC00000u

/* --- bfloat16, float16, split ---------------------------------------------------------------------------------- */

ZF_FN zf_f zf_from_bf16(zf_u x) { return zf_float(x << 16); }

/* A float16's exponent is 112 less than an fp32's; the product is exact, for denormals too. */
ZF_FN zf_f zf_from_fp16(zf_u x) {
    zf_u bits = (x & 0x7FFFu) << 13, wide = zf_bits(zf_float(bits) * 0x1p112f);
    wide = bits >= 0x0F800000u ? bits | ZF_INF : wide;
    return zf_float(wide | (x & 0x8000u) << 16);
}

/* Ties to even, as torch casts; a NaN becomes the quiet one. */
ZF_FN zf_u zf_near_bf16(zf_f x) {
    zf_u bits = zf_bits(x), nearest = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return x != x ? ZF_ALL(ZF_NAN >> 16) : nearest;
}

/* The sum rounds: an fp32 of its exponent has no room for the 13 bits below a float16's last, or those below 2^-24. */
ZF_FN zf_u zf_near_fp16(zf_f x) {
    zf_u bits = zf_bits(x), size = bits & ZF_ABS, power = size & ZF_INF;
    power = power < 0x38800000u ? ZF_ALL(0x38800000u) : power; /* 2^-14, the least normal one */
    zf_f room = zf_float(power + 0x06800000u);                 /* 2^13 times it */
    zf_u digits = ((power - 0x38800000u) >> 13) + (zf_bits(zf_float(size) + room) - zf_bits(room));
    digits = size >= 0x477FF000u ? ZF_ALL(0x7C00u) : digits; /* 65520, halfway to what would come after the largest */
    digits = size > ZF_INF ? ZF_ALL(0x7E00u) : digits;
    return (bits >> 16 & 0x8000u) | digits;
}

/* A gradient beside lossy moments: a NaN counts as inf, so that none has other bits than the NaN that arithmetic makes
 * and a moment's random bits, added to it, cannot make a number of it. */
ZF_FN zf_f zf_tame(zf_f g) { return ZF_LEAST(g, zf_float(ZF_ALL(ZF_INF))); }

/* What zf_split_hi and zf_split_lo cut: there is one NaN. */
ZF_FN zf_u zf_splittable(zf_f x) { return x != x ? ZF_ALL(ZF_NAN) : zf_bits(x); }

ZF_FN zf_u zf_split_near(zf_u bits) { return bits + 0x8000u; } /* its upper half is hi */

ZF_FN zf_u zf_split_hi(zf_u bits) { return zf_split_near(bits) >> 16; }

ZF_FN zf_u zf_split_lo(zf_u bits) { return bits & 0xFFFFu; }

/* `lo` with its sign extended to 32 bits; `upper` is hi << 16. */
ZF_FN zf_f zf_joined(zf_u upper, zf_u lo) { return zf_float(upper + lo); }

ZF_FN zf_f zf_join(zf_u hi, zf_u lo) { return zf_joined(hi << 16, lo); }

/* The upper half is the number in bfloat16, rounded up with probability (what is cut off) / 2^16 for `random` uniform
 * in [0, 2^16); 0x8000 rounds to nearest. inf stays inf, and NaN as arithmetic gives it NaN. */
ZF_FN zf_u zf_to_bf16(zf_f x, zf_u random) { return zf_bits(x) + random; }

/* --- random bits ----------------------------------------------------------------------------------------------- */

#define ZF_BLOCK 256 /* elements with one scale */
#define ZF_UNIT 2048 /* elements with one seed; shards start at a multiple */

/* Unit `unit` (element / 2048) under `key`: the finalizer of splitmix64 (Steele, Lea and Flood 2014). Its element i
 * takes draw (i + the lowest 11 bits) % 2048 for m and draw (i + the highest 11) % 2048 for v. */
ZF_FN zf_u32 zf_seed(zf_u64 key, zf_u64 unit) {
    zf_u64 x = key * 0x9E3779B97F4A7C15u + unit * 0xD1B54A32D192ED03u + 0x2545F4914F6CDD1Du;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (zf_u32)(x >> 32);
}

#define ZF_DRAWS (~(zf_u64)0) /* zf_draw's key is the seed of this unit */

/* Draw `i` in [0, 2048) under `key`, 32 bits. The highest 11 are the place of i in a permutation, the same for all
 * keys: all 2048 have each value once, so an element, whose place in them is random, rounds without bias, and so do
 * many elements at once, more evenly than independent draws. The lower ones are random: a Weyl step, then multiply and
 * xor-shift. */
ZF_FN zf_u zf_draw(zf_u32 key, zf_u i) {
    zf_u x = key + i * 0x9E3779B9u, place = i * 0x3A5u & 0x7FFu;
    place = (place ^ place >> 6) * 0x5CBu & 0x7FFu;
    place = (place ^ place >> 5) * 0x2E3u & 0x7FFu;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    return place << 21 | (x ^ x >> 15) >> 11;
}

/* --- 8-bit blocks ---------------------------------------------------------------------------------------------- */

#define ZF_STEP 0x00100000u /* the bits of an fp32 from one code to the next */
#define ZF_SMALLEST 0x10800000u /* the smallest scale, 2^-94 */
#define ZF_TOP(is_signed) ((is_signed) ? 127u : 255u)
#define ZF_NEAREST 0x80000u /* what zf_step takes in place of 20 random bits */

/* The upper half is the number with 3 bits of mantissa, and 4 bits that do not count: rounded stochastically by
 * `random`, 20 bits, linear between neighbours and so unbiased above the smallest value; ZF_NEAREST rounds to nearest.
 * What was decoded stays with any. */
ZF_FN zf_u zf_to_step(zf_f x, zf_u random) { return zf_bits(x) + random; }

/* The scale of a block from the largest size of what zf_to_step gave, its upper half: the next power of two, so that
 * encoding and decoding are sums of integers and exact both ways. All zero -> 0. No other is below 2^-94, so that no
 * code stands for a denormal number. Where it is NaN or inf (or the largest is above 2^127) all codes of the block are
 * to be ZF_TOP. */
ZF_FN zf_u32 zf_scale(zf_u32 upper_half) {
    zf_u32 largest = (upper_half & 0x7FF0u) << 16, power = (largest + 0x007FFFFFu) & ZF_INF;
    if (largest > 0x7F000000u) return largest > ZF_INF ? ZF_NAN : ZF_INF;
    return largest == 0u ? 0u : power < ZF_SMALLEST ? ZF_SMALLEST : power;
}

/* The upper half of the bits of code 0; code c stands for the fp32 of base + 16 c in its upper half. */
ZF_FN zf_u16 zf_base(zf_u32 scale, int is_signed) {
    return (zf_u16)(((scale < ZF_SMALLEST ? ZF_SMALLEST : scale) - ZF_TOP(is_signed) * ZF_STEP) >> 16);
}

/* The size of an upper half that zf_to_step gave. An unsigned number has no sign, but a NaN may: it counts. */
ZF_FN zf_w zf_size(zf_w x, int is_signed) { return is_signed ? x & 0x7FFFu : x; }

/* The code of such an upper half in a block of finite scale. */
ZF_FN zf_w zf_code(zf_w x, zf_w base, int is_signed) {
    zf_w code = ZF_LESS(zf_size(x, is_signed), base) >> 4;
    return is_signed ? code | (x >> 8 & 0x80u) : code;
}

/* The upper half of what a code stands for; the lower one is zero. A signed code comes with its sign extended. */
ZF_FN zf_w zf_value(zf_w code, zf_w base, int is_signed) {
    zf_w x = code << 4 & 0x87F0u;
    if (!is_signed) return (code << 4) + base;
    return (x & 0x7FF0u) != 0u ? x + base : x;
}

#endif
