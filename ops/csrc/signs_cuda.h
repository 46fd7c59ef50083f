/* The GPU's kernel of signs that are mixed; a part of cuda.cu. See `zf_sign_mix_args`. */
#ifndef ZEROFN_SIGNS_CUDA_H
#define ZEROFN_SIGNS_CUDA_H

#include "wire_cuda.h"

// Plus or minus a scale, as a sign decodes; `scale`: its bits.
ZF_GPU float signed_as(float x, zf_u32 scale) {
    const bool same = scale == 0u || scale > ZF_INF || !(x < 0.0f);
    return zf_float(same ? scale : scale | ~ZF_ABS);
}

struct SignRows { // how rows lie, see zf_sign_rows
    zf_i64 bytes, blocks, block;
    const zf_i64 *gaps;
    zf_i64 num_gaps;
};
ZF_GPU zf_i64 codes_at(const SignRows &how, zf_i64 b) {
    return b / how.blocks * how.bytes + b % how.blocks * (how.block / 8);
}
ZF_GPU zf_i64 scale_at(const SignRows &how, zf_i64 b) {
    return b / how.blocks * how.bytes + how.blocks * (how.block / 8) + 2 * (b % how.blocks);
}

// Elements [at, at + 8) of block b, of rows.
ZF_GPU void sign_values(const zf_u8 *rows, const SignRows &how, zf_i64 b, zf_i64 at, float *x) {
    const zf_i64 size = how.block / 8, plane = at / size;
    const zf_u32 scale = (zf_u32)*(const zf_u16 *)(rows + scale_at(how, b)) << 16;
    const Eight now = load(rows + codes_at(how, b), 1, at % size, 8);
    EACH(k) x[k] = zf_float((byte_of(now, k) >> plane << 31) | scale);
}

struct Mixed { // what zf_sign_mix is told, and a block: the scale of what was before, and how many elements count
    SignRows how;
    const void *added, *before, *left;
    zf_i64 number, num_added, came;
    float by, of_signs, of_rest;
    zf_i64 b, filled;
    zf_u32 known;
};

// The elements of [at, at + 8) in block b that are in no gap, a bit each.
ZF_GPU zf_u32 outside(const SignRows &how, zf_i64 b, zf_i64 at) {
    zf_u32 found = 0xFFu;
    for (zf_i64 gap = 0; gap < how.num_gaps; ++gap)
        EACH(k) {
            const zf_i64 i = b * how.block + at + k;
            if (how.gaps[2 * gap] <= i && i < how.gaps[2 * gap + 1]) found &= ~(1u << k);
        }
    return found;
}

ZF_GPU zf_i64 filled_of(const SignRows &how, zf_i64 b) {
    zf_i64 left = how.block;
    for (zf_i64 gap = 0; gap < how.num_gaps; ++gap) {
        const zf_i64 start = most(how.gaps[2 * gap], b * how.block);
        left -= most(0, least(how.gaps[2 * gap + 1], (b + 1) * how.block) - start);
    }
    return left;
}

// Eight elements of 4 bytes; `store` would do it with the whole warp, of which some threads may have no part.
ZF_GPU void store_alone(void *all, zf_i64 at, const Eight &e) {
    zf_u32 *const x = (zf_u32 *)all + at;
    if (one_access(x, 4)) {
        ((uint4 *)x)[0] = make_uint4(e.word[0], e.word[1], e.word[2], e.word[3]);
        ((uint4 *)x)[1] = make_uint4(e.word[4], e.word[5], e.word[6], e.word[7]);
    } else
        EACH(k) x[k] = e.word[k];
}

// By what magnitudes are multiplied before they are added up.
ZF_GPU float share_of(const Mixed &of) {
    const zf_i64 block = of.how.block;
    return of.filled == block || !of.filled ? 1.0f : (float)((double)block / (double)of.filled);
}

ZF_GPU void before_at(const Mixed &of, zf_i64 at, float *x) {
    if (of.came)
        sign_values((const zf_u8 *)of.before, of.how, of.b, at, x);
    else
        numbers(load(of.before, 4, of.b * of.how.block + at, 8), ZF_FP32, x);
}

// Elements [at, at + 8) of the block.
ZF_GPU void mixed(const Mixed &of, zf_i64 at, float *x) {
    const zf_i64 place = of.b * of.how.block + at;
    float was[8], left[8], one[8];
    if (of.number == ZF_ROWS) {
        sign_values((const zf_u8 *)of.added, of.how, of.b, at, x);
        for (zf_i64 r = 1; r < of.num_added; ++r) {
            sign_values((const zf_u8 *)of.added + r * of.how.bytes, of.how, of.b, at, one);
            EACH(k) x[k] += one[k];
        }
    } else
        numbers(load(of.added, width_of(of.number), place, 8), of.number, x);
    before_at(of, at, was);
    numbers(load(of.left, 4, place, 8), ZF_FP32, left);
    const zf_u32 there = of.filled == of.how.block ? 0xFFu : outside(of.how, of.b, at);
    EACH(k) {
        const float sign = of.came ? was[k] : signed_as(was[k], of.known);
        const float kept = sign * of.of_signs + (was[k] - sign) * of.of_rest + left[k];
        x[k] = there >> k & 1u ? x[k] * of.by + kept : 0.0f;
    }
}

// A warp a block, which is mixed twice. `finite`: NULL or a finite check; where it is zero, what is left stays.
ZF_KERNEL zf_sign_mix(const void *added, zf_i64 number, zf_i64 num_added, const void *before, zf_i64 came,
                      const void *left, void *rest, zf_u8 *sent, const zf_u8 *finite, zf_i64 num, zf_i64 bytes,
                      zf_i64 blocks, zf_i64 block, const zf_i64 *gaps, zf_i64 num_gaps, double by, double of_signs,
                      double of_rest) {
    const bool stays = finite && !*finite;
    const zf_i64 size = block / 8;
    Mixed of = {{bytes, blocks, block, gaps, num_gaps}, added, before, left, number, num_added, came, (float)by,
                (float)of_signs, (float)of_rest, 0, 0, 0u};
    for (of.b = warp_of(); of.b < num; of.b += num_warps()) {
        of.filled = filled_of(of.how, of.b);
        const float share = share_of(of);
        float known[8] = {}, sums[8] = {}, x[8];
        for (zf_i64 i = 8 * lane_of(); i < block && !came; i += ZF_SUMS) {
            before_at(of, i, x);
            EACH(k) known[k] += zf_float(zf_bits(x[k] * share) & ZF_ABS);
        }
        of.known = came ? 0u : mean_of_warp(known, block);
        for (zf_i64 i = 8 * lane_of(); i < block; i += ZF_SUMS) {
            mixed(of, i, x);
            EACH(k) sums[k] += zf_float(zf_bits(x[k] * share) & ZF_ABS);
        }
        const zf_u32 scale = mean_of_warp(sums, block);
        const bool none = scale == 0u || scale > ZF_INF;
        for (zf_i64 i = 8 * lane_of(); i < size; i += 256) {
            zf_u32 codes[8] = {};
            for (zf_i64 plane = 0; plane < 8; ++plane) {
                const zf_i64 at = plane * size + i;
                const zf_u32 there = of.filled == block ? 0xFFu : outside(of.how, of.b, at);
                Eight lost = {};
                mixed(of, at, x);
                EACH(k) codes[k] |= (zf_u32)(!none && x[k] < 0.0f) << plane;
                EACH(k) lost.word[k] = there >> k & 1u ? zf_bits(x[k] - signed_as(x[k], scale)) : 0u;
                if (stays) lost = load(left, 4, of.b * block + at, 8);
                store_alone(rest, of.b * block + at, lost);
            }
            Eight found = {};
            EACH(k) set_byte(found, k, codes[k]);
            store(sent + codes_at(of.how, of.b), 1, i, 8, found);
        }
        if (lane_of() == 0) *(zf_u16 *)(sent + scale_at(of.how, of.b)) = (zf_u16)(scale >> 16);
    }
}

#endif
