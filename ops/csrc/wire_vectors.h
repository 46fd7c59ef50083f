// What wire.cpp and signs.cpp share: numbers as they lie in memory, and sums of magnitudes.
#ifndef ZEROFN_WIRE_VECTORS_H
#define ZEROFN_WIRE_VECTORS_H

#include "vectors.h"
#include "wire.h"

namespace {

const zf_i64 AT_ONCE = 4 * ZF_LANES; // elements; half a block is a multiple

struct Fp32 {
    typedef zf_u32 stored;
    ZF_FN zf_f get(const stored *x) { return zf_float(raw(x)); }
    ZF_FN Pair stored_of(zf_f first, zf_f second) { return {zf_bits(first), zf_bits(second)}; }
};
struct Bf16 {
    typedef zf_u16 stored;
    ZF_FN zf_f get(const stored *x) { return zf_from_bf16(widened(x)); }
    ZF_FN Pair stored_of(zf_f first, zf_f second) { return {zf_near_bf16(first), zf_near_bf16(second)}; }
};
struct Fp16 {
    typedef zf_u16 stored;
    ZF_FN zf_f get(const stored *x) { return zf_from_fp16(widened(x)); }
    ZF_FN Pair stored_of(zf_f first, zf_f second) { return {zf_near_fp16(first), zf_near_fp16(second)}; }
};

// The sum of the magnitudes of a block's elements, in the order that wire.h says. A group of sums stays in registers
// while memory is read in order: as many as there are, or half of the registers.
template <class Number>
ZF_FN float sum_of(const typename Number::stored *x, zf_i64 block) {
    const int count = ZF_SUMS / ZF_LANES, group = ZF_LANES == 16 ? 16 : 8;
    zf_f sums[count] = {};
    for (int k = 0; block < ZF_SUMS && k < block / ZF_LANES; ++k)
        sums[k] = zf_float(zf_bits(Number::get(x + k * ZF_LANES)) & ZF_ABS);
    for (int first = 0; block >= ZF_SUMS && first < count; first += group) {
        zf_f now[group] = {};
        for (zf_i64 i = first * ZF_LANES; i < block; i += ZF_SUMS) {
#pragma GCC unroll 16
            for (int k = 0; k < group; ++k) {
                soon<true>(x + i + k * ZF_LANES);
                now[k] += zf_float(zf_bits(Number::get(x + i + k * ZF_LANES)) & ZF_ABS);
            }
        }
        for (int k = 0; k < group; ++k) sums[first + k] = now[k];
    }
    for (int half = count / 2; half; half /= 2)
        for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    zf_f last = sums[0];
    for (int half = ZF_LANES / 2; half; half /= 2)
        for (int k = 0; k < half; ++k) last[k] += last[k + half];
    return last[0];
}

} // namespace

#endif
