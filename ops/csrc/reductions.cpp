// What is read only: the 2-norm with the largest magnitude, and the checksum. Compiled as kernels.cpp is.
#include "kernels.h"

#define ZF_JOIN_(a, b) a##_##b
#define ZF_JOIN(a, b) ZF_JOIN_(a, b)
#define ZF_NAME(name) ZF_JOIN(name, ZF_ISA)
#define ZF_API extern "C" __attribute__((visibility("default")))

namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef zf_u32 Bits __attribute__((vector_size(32)));
typedef zf_u32 Words __attribute__((vector_size(64)));

const zf_i64 STRIPE = 256; // bytes, 64 words

float number(const void *x, zf_i32 kind, zf_i64 i) {
    if (kind == ZF_FP32) return ((const float *)x)[i];
    return kind == ZF_BF16 ? zf_from_bf16(((const zf_u16 *)x)[i]) : zf_from_fp16(((const zf_u16 *)x)[i]);
}

// torch's order of sums (on x86): eight lanes, then the lanes in turn, then the rest, of which the first four are
// squared and then added, as are the lanes, and the others are one fma each.
template <int kind>
void norm2_and_extreme(const void *x, zf_i64 n, float *result) {
    Floats sums = {0};
    Bits largest = {0};
    zf_i64 whole = n - n % 8;
    for (zf_i64 i = 0; i < whole; i += 8) {
        Floats now;
        for (int k = 0; k < 8; ++k) now[k] = number(x, kind, i + k);
        sums += now * now;
        Bits size = (Bits)now & ZF_ABS;
        largest = size > largest ? size : largest;
    }
    float sum = sums[0];
    zf_u32 top = largest[0];
    for (int k = 1; k < 8; ++k) {
        sum += sums[k];
        top = largest[k] > top ? largest[k] : top;
    }
    for (zf_i64 i = whole; i < n; ++i) {
        float now = number(x, kind, i);
        sum = n - whole >= 4 && i < whole + 4 ? sum + now * now : ZF_FMA(now, now, sum);
        top = (zf_bits(now) & ZF_ABS) > top ? zf_bits(now) & ZF_ABS : top;
    }
    result[0] = ZF_SQRT(sum);
    result[1] = zf_float(top);
}

// One stripe of 64 words. A word is changed by where it stands and then stirred, one to one, so that neither a changed
// word nor two that changed places leave the sum as it was (but by chance, once in 2^32).
inline void add_stripe(Words *sums, const void *from, zf_u32 place) {
    for (int k = 0; k < 4; ++k) {
        Words now;
        __builtin_memcpy(&now, (const char *)from + 64 * k, 64);
        now ^= place * 0x9E3779B1u;
        now ^= now >> 16;
        now *= 0x7FEB352Du;
        sums[k] += now ^ now >> 15;
    }
}

} // namespace

// result: the 2-norm and max |x|, where a NaN counts as more than inf.
ZF_API void ZF_NAME(zf_norm2_and_extreme)(const void *x, zf_i32 kind, zf_i64 n, float *result) {
    if (kind == ZF_FP32) norm2_and_extreme<ZF_FP32>(x, n, result);
    if (kind == ZF_BF16) norm2_and_extreme<ZF_BF16>(x, n, result);
    if (kind == ZF_FP16) norm2_and_extreme<ZF_FP16>(x, n, result);
}

// 64 sums of 32 bits, word i of the memory in sum i % 64, stirred together with the length. Zeros fill the last stripe.
// The same on every little-endian machine.
ZF_API zf_u64 ZF_NAME(zf_checksum)(const void *from, zf_i64 num_bytes) {
    Words sums[4] = {};
    zf_i64 whole = num_bytes / STRIPE;
    for (zf_i64 i = 0; i < whole; ++i) add_stripe(sums, (const char *)from + i * STRIPE, (zf_u32)i + 1);
    if (num_bytes % STRIPE) {
        char rest[STRIPE] = {0};
        __builtin_memcpy(rest, (const char *)from + whole * STRIPE, (zf_u64)(num_bytes % STRIPE));
        add_stripe(sums, rest, (zf_u32)whole + 1);
    }
    zf_u64 all = (zf_u64)num_bytes;
    for (int k = 0; k < 64; ++k) {
        all = (all ^ sums[k / 16][k % 16]) * 0x9E3779B97F4A7C15u;
        all ^= all >> 32;
    }
    return all;
}
