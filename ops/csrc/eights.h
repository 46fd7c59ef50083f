/* What the GPU's kernels are made of: a warp, and eight elements of a thread, as they lie in memory and as numbers. */
#ifndef ZEROFN_EIGHTS_H
#define ZEROFN_EIGHTS_H

#include "kernels.h"

#define ZF_KERNEL extern "C" __global__ void __launch_bounds__(256)
#define ZF_GPU static __device__ __forceinline__
#define EACH(k) _Pragma("unroll") for (int k = 0; k < 8; ++k)
#define ALL_LANES 0xFFFFFFFFu

ZF_GPU int lane_of() { return (int)(threadIdx.x % 32); }
ZF_GPU zf_i64 warp_of() { return ((zf_i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; }
ZF_GPU zf_i64 num_warps() { return (zf_i64)gridDim.x * blockDim.x / 32; }
ZF_GPU zf_i64 least(zf_i64 a, zf_i64 b) { return a < b ? a : b; }
ZF_GPU zf_i64 most(zf_i64 a, zf_i64 b) { return a > b ? a : b; }
ZF_GPU int width_of(zf_i64 number) { return number == ZF_FP32 ? 4 : 2; }

ZF_GPU zf_u32 largest_of_warp(zf_u32 x) {
    for (int step = 16; step; step /= 2) {
        zf_u32 other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

ZF_GPU double sum_of_warp(double x) { // in one order, whatever the device
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The first of a list whose `stop` is past `at`.
template <class T>
ZF_GPU zf_i64 first_past(const T *list, zf_i64 num, zf_i64 at) {
    zf_i64 low = 0;
    while (low < num) {
        zf_i64 middle = (low + num) / 2;
        if (list[middle].stop > at)
            num = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* --- eight elements of 1, 2 or 4 bytes, as they lie in memory --------------------------------------------------- */

struct Eight {
    zf_u32 word[8];
};

ZF_GPU zf_u32 half_of(const Eight &e, int k) { return e.word[k / 2] >> 16 * (k % 2) & 0xFFFFu; }
ZF_GPU zf_u32 byte_of(const Eight &e, int k) { return e.word[k / 4] >> 8 * (k % 4) & 0xFFu; }
ZF_GPU void set_half(Eight &e, int k, zf_u32 x) { e.word[k / 2] ^= (half_of(e, k) ^ x) << 16 * (k % 2); }
ZF_GPU void set_byte(Eight &e, int k, zf_u32 x) { e.word[k / 4] ^= (byte_of(e, k) ^ x) << 8 * (k % 4); }
ZF_GPU bool one_access(const void *x, int width) { return (zf_u64)x % (width == 1 ? 8 : 16) == 0; }

// Elements [at, at + n), 8 of them at most; n may be negative. The others are zero.
ZF_GPU Eight load(const void *all, int width, zf_i64 at, zf_i64 n) {
    Eight e = {};
    const void *x = (const char *)all + at * width;
    if (n >= 8 && one_access(x, width)) {
        if (width == 1) {
            uint2 now = *(const uint2 *)x;
            e.word[0] = now.x, e.word[1] = now.y;
            return e;
        }
        uint4 now = *(const uint4 *)x;
        e.word[0] = now.x, e.word[1] = now.y, e.word[2] = now.z, e.word[3] = now.w;
        if (width == 2) return e;
        now = ((const uint4 *)x)[1];
        e.word[4] = now.x, e.word[5] = now.y, e.word[6] = now.z, e.word[7] = now.w;
        return e;
    }
    EACH(k) {
        if (k >= n) continue;
        if (width == 4) e.word[k] = ((const zf_u32 *)x)[k];
        if (width == 2) set_half(e, k, ((const zf_u16 *)x)[k]);
        if (width == 1) set_byte(e, k, ((const zf_u8 *)x)[k]);
    }
    return e;
}

// A warp's 8 elements of 4 bytes are stored by pairs of threads: both write 16 bytes of one's 32, then of the other's,
// so that memory gets its 32 at a time.
ZF_GPU void store_in_pairs(void *all, zf_i64 at, const Eight &e) {
    const bool odd = lane_of() % 2;
    uint4 *const x = (uint4 *)((char *)all + (at - 8 * odd) * 4) + odd;
    zf_u32 mine[4], other[4]; // of the even thread's elements, and of the odd one's
    for (int k = 0; k < 4; ++k) {
        const zf_u32 got = __shfl_xor_sync(ALL_LANES, odd ? e.word[k] : e.word[k + 4], 1);
        mine[k] = odd ? got : e.word[k], other[k] = odd ? e.word[k + 4] : got;
    }
    x[0] = make_uint4(mine[0], mine[1], mine[2], mine[3]);
    x[2] = make_uint4(other[0], other[1], other[2], other[3]);
}

// `n` counts from this thread's first element to the end of what its warp stores, so that for elements of 4 bytes all of
// a warp's threads decide alike whether they store in pairs. A call with another `n` has narrower elements.
ZF_GPU void store(void *all, int width, zf_i64 at, zf_i64 n, const Eight &e) {
    void *x = (char *)all + at * width;
    if (width == 4 && n + 8 * lane_of() >= ZF_BLOCK && one_access(all, width)) return store_in_pairs(all, at, e);
    if (n >= 8 && one_access(x, width)) {
        if (width == 1)
            *(uint2 *)x = make_uint2(e.word[0], e.word[1]);
        else
            *(uint4 *)x = make_uint4(e.word[0], e.word[1], e.word[2], e.word[3]);
        if (width == 4) ((uint4 *)x)[1] = make_uint4(e.word[4], e.word[5], e.word[6], e.word[7]);
        return;
    }
    EACH(k) {
        if (k >= n) continue;
        if (width == 4) ((zf_u32 *)x)[k] = e.word[k];
        if (width == 2) ((zf_u16 *)x)[k] = (zf_u16)half_of(e, k);
        if (width == 1) ((zf_u8 *)x)[k] = (zf_u8)byte_of(e, k);
    }
}

ZF_GPU void numbers(const Eight &e, zf_i64 number, float *x) {
    if (number == ZF_FP32) EACH(k) x[k] = zf_float(e.word[k]);
    if (number == ZF_BF16) EACH(k) x[k] = zf_from_bf16(half_of(e, k));
    if (number == ZF_FP16) EACH(k) x[k] = zf_from_fp16(half_of(e, k));
}

ZF_GPU float joined(const Eight &hi, const Eight &lo, int k) { return zf_join(half_of(hi, k), (zf_i16)half_of(lo, k)); }

ZF_GPU void values(const Eight &codes, zf_u32 scale, int is_signed, float *x) {
    zf_w base = zf_base(scale, is_signed);
    EACH(k) {
        const zf_u32 code = is_signed ? (zf_u32)(zf_i8)byte_of(codes, k) : byte_of(codes, k);
        x[k] = zf_float(zf_value(code, base, is_signed) << 16);
    }
}

// The codes of this thread's part of the warp's block, and the scale of all of it; both to be stored.
ZF_GPU Eight codes_of(const float *x, int is_signed, const zf_u32 *random, zf_u32 *scale) {
    Eight codes = {};
    zf_w next[8], largest = 0;
    EACH(k) {
        next[k] = zf_to_step(zf_float(zf_splittable(x[k])), random[k]) >> 16;
        largest = zf_size(next[k], is_signed) > largest ? zf_size(next[k], is_signed) : largest;
    }
    *scale = zf_scale(largest_of_warp(largest));
    zf_w base = zf_base(*scale, is_signed);
    EACH(k) set_byte(codes, k, *scale < ZF_INF ? zf_code(next[k], base, is_signed) : ZF_TOP(is_signed));
    return codes;
}

#endif
