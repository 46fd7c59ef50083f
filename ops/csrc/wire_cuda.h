/* The GPU's kernels of wire.h; a part of cuda.cu. */
#ifndef ZEROFN_WIRE_CUDA_H
#define ZEROFN_WIRE_CUDA_H

#include "eights.h"
#include "wire.h"

ZF_GPU zf_u32 code_of(float y, zf_i64 format) { return format == ZF_FP8 ? zf_wire_fp8(y) : zf_wire_integer(y); }

// A warp a block. Where a scale is NaN, all codes are zero.
ZF_KERNEL zf_wire_encode(const void *from, zf_i64 number, void *codes, zf_u16 *scales, zf_i64 num, zf_i64 block,
                         zf_i64 format) {
    const zf_i64 size = format == ZF_INT4 ? block / 2 : block;
    for (zf_i64 b = warp_of(); b < num; b += num_warps()) {
        zf_u32 top = 0;
        for (zf_i64 i = 8 * lane_of(); i < block; i += 256) {
            float x[8];
            numbers(load(from, width_of(number), b * block + i, 8), number, x);
            EACH(k) top = (zf_bits(x[k]) & ZF_ABS) > top ? zf_bits(x[k]) & ZF_ABS : top;
        }
        const zf_u32 scale = zf_wire_scale(largest_of_warp(top), (int)format);
        const float inverse = zf_wire_inverse(scale);
        for (zf_i64 i = 8 * lane_of(); i < size; i += 256) {
            float x[8], y[8];
            Eight found = {};
            numbers(load(from, width_of(number), b * block + i, 8), number, x);
            if (format == ZF_INT4) numbers(load(from, width_of(number), b * block + size + i, 8), number, y);
            EACH(k) {
                zf_u32 code = code_of(x[k] * inverse, format);
                if (format == ZF_INT4) code = ((code + 8u) & 0xFu) | (code_of(y[k] * inverse, format) + 8u) << 4;
                set_byte(found, k, scale > ZF_INF ? 0u : code & 0xFFu);
            }
            store(codes, 1, b * size + i, 8, found);
        }
        if (lane_of() == 0) scales[b] = (zf_u16)(scale >> 16);
    }
}

// Elements [at, at + 8), all of one half of a block.
ZF_GPU void decoded(const void *codes, const zf_u16 *scales, zf_i64 at, zf_i64 block, zf_i64 format, float *x) {
    const zf_i64 b = at / block, i = at % block, half = block / 2;
    const float scale = zf_from_bf16(scales[b]);
    const bool upper = format == ZF_INT4 && i >= half;
    const Eight now = load(codes, 1, format == ZF_INT4 ? b * half + (upper ? i - half : i) : at, 8);
    EACH(k) {
        const zf_u32 code = byte_of(now, k);
        if (format == ZF_INT8) x[k] = (float)(zf_i8)code * scale;
        if (format == ZF_INT4) x[k] = (float)((int)(upper ? code >> 4 : code & 0xFu) - 8) * scale;
        if (format == ZF_FP8) x[k] = zf_wire_of_fp8(code) * scale;
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
