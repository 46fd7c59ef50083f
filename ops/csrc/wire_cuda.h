/* The GPU's kernels of wire.h; a part of cuda.cu. */
#ifndef ZEROFN_WIRE_CUDA_H
#define ZEROFN_WIRE_CUDA_H

#include "eights.h"
#include "wire.h"

struct Draws { // from `place` on, of the draws of a key; or none
    bool drawn;
    zf_u32 seed, place;
};

// Of element `i` of a block, times the inverse of the scale.
ZF_GPU zf_u32 code_of(float y, zf_i64 format, const Draws &draws, zf_i64 i) {
    if (!draws.drawn) return format == ZF_FP8 ? zf_wire_fp8(y) : zf_wire_integer(y);
    const zf_u32 draw = zf_draw(draws.seed, (draws.place + (zf_u32)i) % ZF_UNIT);
    return format == ZF_FP8 ? zf_wire_drawn_fp8(y, draw) : zf_wire_drawn_integer(y, draw);
}

// The scale of signs, of the sums of magnitudes that each lane has; the same on all lanes.
ZF_GPU zf_u32 mean_of_warp(float *sums, zf_i64 block) {
    for (int step = 16; step; step /= 2)
        EACH(k) sums[k] += zf_float(__shfl_xor_sync(ALL_LANES, zf_bits(sums[k]), step));
    for (int half = 4; half; half /= 2)
        for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    return zf_wire_mean(sums[0], block);
}

// The scale of a warp's block, the same on all lanes.
ZF_GPU zf_u32 scale_of_warp(const void *from, zf_i64 number, zf_i64 first, zf_i64 block, zf_i64 format,
                          bool drawn) {
    zf_u32 top = 0;
    float sums[8] = {}, x[8];
    for (zf_i64 i = 8 * lane_of(); i < block; i += ZF_SUMS) {
        numbers(load(from, width_of(number), first + i, 8), number, x);
        EACH(k) top = (zf_bits(x[k]) & ZF_ABS) > top ? zf_bits(x[k]) & ZF_ABS : top;
        EACH(k) sums[k] += zf_float(zf_bits(x[k]) & ZF_ABS);
    }
    return format == ZF_SIGN ? mean_of_warp(sums, block) : zf_wire_scale(largest_of_warp(top), (int)format, drawn);
}

// The codes of a block's elements from its element `i` on, which is element `at` of all.
ZF_GPU void encoded(const void *from, zf_i64 number, zf_i64 at, float inverse, zf_i64 format, const Draws &draws,
                    zf_i64 i, zf_u32 *codes) {
    float x[8];
    numbers(load(from, width_of(number), at, 8), number, x);
    EACH(k) codes[k] = format == ZF_SIGN ? (zf_u32)(x[k] < 0.0f) : code_of(x[k] * inverse, format, draws, i + k);
}

// A warp a block. Where a scale is NaN, all codes are zero; of signs where it is zero, too. `key`, `place`:
// of the draws, if they are drawn; of block b those of place + b.
ZF_KERNEL zf_wire_encode(const void *from, zf_i64 number, void *codes, zf_u16 *scales, zf_i64 num, zf_i64 block,
                         zf_i64 format, zf_i64 drawn, zf_i64 key, zf_i64 place) {
    const zf_i64 planes = ZF_PLANES(format), size = block / planes;
    Draws draws = {drawn != 0, drawn ? zf_seed((zf_u64)key, ZF_DRAWS) : 0u, 0u};
    for (zf_i64 b = warp_of(); b < num; b += num_warps()) {
        const zf_u32 scale = scale_of_warp(from, number, b * block, block, format, draws.drawn);
        if (drawn) draws.place = zf_seed((zf_u64)key, (zf_u64)(place + b)) % ZF_UNIT;
        const float inverse = zf_wire_inverse(scale);
        const bool zero = scale > ZF_INF || (format == ZF_SIGN && scale == 0u);
        for (zf_i64 i = 8 * lane_of(); i < size; i += 256) {
            zf_u32 codes_here[8] = {}, now[8];
            for (zf_i64 plane = 0; plane < planes; ++plane) {
                const zf_i64 at = plane * size + i;
                encoded(from, number, b * block + at, inverse, format, draws, at, now);
                EACH(k) now[k] = format == ZF_INT4 ? (now[k] + 8u) & 0xFu : now[k];
                EACH(k) codes_here[k] |= now[k] << (8 / planes * plane);
            }
            Eight found = {};
            EACH(k) set_byte(found, k, zero ? 0u : codes_here[k] & 0xFFu);
            store(codes, 1, b * size + i, 8, found);
        }
        if (lane_of() == 0) scales[b] = (zf_u16)(scale >> 16);
    }
}

// Elements [at, at + 8): they lie in as many bytes, each with one of several elements.
ZF_GPU void decoded(const void *codes, const zf_u16 *scales, zf_i64 at, zf_i64 block, zf_i64 format, float *x) {
    const zf_i64 size = block / ZF_PLANES(format), b = at / block, i = at % block, plane = i / size;
    const float scale = zf_from_bf16(scales[b]);
    const Eight now = load(codes, 1, b * size + i % size, 8);
    EACH(k) {
        const zf_u32 code = byte_of(now, k);
        if (format == ZF_INT8) x[k] = (float)(zf_i8)code * scale;
        if (format == ZF_INT4) x[k] = (float)((int)(code >> 4 * plane & 0xFu) - 8) * scale;
        if (format == ZF_FP8) x[k] = zf_wire_of_fp8(code) * scale;
        if (format == ZF_SIGN) x[k] = zf_float(code >> plane << 31 | 0x3F800000u) * scale;
    }
}

ZF_KERNEL zf_wire_decode(const void *codes, const zf_u16 *scales, void *to, zf_i64 number, zf_i64 size, zf_i64 block,
                         zf_i64 format) {
    EACH_EIGHT(at, size) {
        float x[8];
        Eight now = {};
        decoded(codes, scales, at, block, format, x);
        if (number == ZF_FP32) EACH(k) now.word[k] = zf_bits(x[k]);
        if (number == ZF_BF16) EACH(k) set_half(now, k, zf_near_bf16(x[k]));
        if (number == ZF_FP16) EACH(k) set_half(now, k, zf_near_fp16(x[k]));
        store(to, width_of(number), at, size - at, now);
    }
}

// The sum of what `num` ranks have sent, in their order: fp32. `stride`: bytes from one rank's codes, and scales, to those
// of the next.
ZF_KERNEL zf_wire_sum(const void *codes, const void *scales, zf_i64 stride, zf_i64 num, void *to, zf_i64 size,
                      zf_i64 block, zf_i64 format) {
    EACH_EIGHT(at, size) {
        Eight now;
        float total[8], x[8];
        decoded(codes, (const zf_u16 *)scales, at, block, format, total);
        for (zf_i64 r = 1; r < num; ++r) {
            const char *of = (const char *)codes + r * stride, *by = (const char *)scales + r * stride;
            decoded(of, (const zf_u16 *)by, at, block, format, x);
            EACH(k) total[k] += x[k];
        }
        EACH(k) now.word[k] = zf_bits(total[k]);
        store(to, 4, at, size - at, now);
    }
}

#endif
