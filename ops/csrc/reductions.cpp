// What is read only: the 2-norm with the largest magnitude, and the checksum. Compiled as kernels.cpp is.
#define ZF_EIGHT_LANES // torch's sums have eight
#include "vectors.h"

namespace {

const zf_i64 STRIPE = 256; // bytes, 64 words, 8 vectors

struct Fp32 {
    typedef zf_u32 stored;
    ZF_FN zf_f number(zf_u x) { return zf_float(x); }
};
struct Bf16 {
    typedef zf_u16 stored;
    ZF_FN zf_f number(zf_u x) { return zf_from_bf16(x); }
};
struct Fp16 {
    typedef zf_u16 stored;
    ZF_FN zf_f number(zf_u x) { return zf_from_fp16(x); }
};

// torch's order of sums (on x86): eight lanes, then the lanes in turn, then the rest, of which the first four are
// squared and then added, as are the lanes, and the others are one fma each.
template <class Kind>
void norm2_and_extreme(const void *from, zf_i64 n, float *result) {
    const typename Kind::stored *x = (const typename Kind::stored *)from;
    zf_f sums = {};
    zf_u largest = {};
    zf_i64 whole = n - n % ZF_LANES;
    for (zf_i64 i = 0; i < whole; i += ZF_LANES) {
        zf_f now = Kind::number(widened(x + i));
        zf_u size = zf_bits(now) & ZF_ABS;
        largest = size > largest ? size : largest;
        sums += now * now;
    }
    typename Kind::stored some[ZF_LANES] = {};
    __builtin_memcpy(some, x + whole, (zf_u64)(n - whole) * sizeof(*x));
    zf_f rest = Kind::number(widened(some));
    zf_u size = zf_bits(rest) & ZF_ABS;
    largest = size > largest ? size : largest;
    float sum = sums[0];
    zf_u32 top = largest[0];
    for (int k = 1; k < ZF_LANES; ++k) {
        sum += sums[k];
        top = largest[k] > top ? largest[k] : top;
    }
    for (int k = 0; k < n - whole; ++k)
        sum = n - whole >= 4 && k < 4 ? sum + rest[k] * rest[k] : __builtin_fmaf(rest[k], rest[k], sum);
    result[0] = __builtin_sqrtf(sum);
    __builtin_memcpy(result + 1, &top, 4);
}

// One stripe of 64 words. A word is changed by where it stands and then stirred, one to one, so that neither a changed
// word nor two that changed places leave the sum as it was (but by chance, once in 2^32).
ZF_FN void add_stripe(zf_u *sums, const void *from, zf_u32 place) {
    for (int k = 0; k < 8; ++k) {
        zf_u now = raw((const zf_u32 *)from + 8 * k);
        now ^= place * 0x9E3779B1u;
        now ^= now >> 16;
        now *= 0x7FEB352Du;
        sums[k] += now ^ now >> 15;
    }
}

} // namespace

// result: the 2-norm and max |x|, where a NaN counts as more than inf.
ZF_API void ZF_NAME(zf_norm2_and_extreme)(const void *x, zf_i32 kind, zf_i64 n, float *result) {
    if (kind == ZF_FP32) norm2_and_extreme<Fp32>(x, n, result);
    if (kind == ZF_BF16) norm2_and_extreme<Bf16>(x, n, result);
    if (kind == ZF_FP16) norm2_and_extreme<Fp16>(x, n, result);
}

// 64 sums of 32 bits, word i of the memory in sum i % 64, stirred together with the length. Zeros fill the last stripe.
// The same on every little-endian machine.
ZF_API zf_u64 ZF_NAME(zf_checksum)(const void *from, zf_i64 num_bytes) {
    zf_u sums[8] = {};
    zf_i64 whole = num_bytes / STRIPE;
    for (zf_i64 i = 0; i < whole; ++i) add_stripe(sums, (const char *)from + i * STRIPE, (zf_u32)i + 1);
    if (num_bytes % STRIPE) {
        char rest[STRIPE] = {0};
        __builtin_memcpy(rest, (const char *)from + whole * STRIPE, (zf_u64)(num_bytes % STRIPE));
        add_stripe(sums, rest, (zf_u32)whole + 1);
    }
    zf_u64 all = (zf_u64)num_bytes;
    for (int k = 0; k < 64; ++k) {
        all = (all ^ sums[k / 8][k % 8]) * 0x9E3779B97F4A7C15u;
        all ^= all >> 32;
    }
    return all;
}
