// What ranks send as signs, and what signs leave out: see `zf_sign_mix_args`. Compiled as kernels.cpp is.
#include "wire_vectors.h"

#define ZF_METHOD __attribute__((always_inline))

namespace {

const zf_u32 MINUS = 0x80000000u;

// Where a block of rows lies: its codes, and its scale.
struct Place {
    zf_i64 codes, scale; // bytes
    Place(const zf_sign_rows &rows, zf_i64 b) {
        const zf_i64 row = b / rows.blocks, k = b % rows.blocks, size = rows.block / 8;
        codes = row * rows.bytes + k * size;
        scale = row * rows.bytes + rows.blocks * size + 2 * k;
    }
};
ZF_FN zf_u32 scale_at(const zf_u8 *rows, zf_i64 at) { // its bits
    zf_u16 half;
    __builtin_memcpy(&half, rows + at, 2);
    return (zf_u32)half << 16;
}

// Elements that are negative, as -1 of 32 bits; all of a block whose codes are zero, none.
ZF_FN zf_u negative(zf_f x, bool none) { return none ? zf_u{} : (zf_u)(x < zf_f{}); }
ZF_FN bool has_none(zf_u32 scale) { return scale == 0u || scale > ZF_INF; }
ZF_FN zf_f of_scale(zf_u negative, zf_u32 scale) { return zf_float((negative & MINUS) | scale); }

// The vectors of a block, plane by plane: body(plane, i, element). `whole`: of 2,048 elements.
template <bool whole, class Body>
ZF_FN void each_vector(zf_i64 block, const Body &body) {
    const zf_i64 size = whole ? ZF_UNIT / 8 : block / 8;
    for (zf_i64 plane = 0; plane < 8; ++plane)
        for (zf_i64 i = 0; i < size; i += ZF_LANES) body((zf_u32)plane, i, plane * size + i);
}

// The gaps that a block has a part of. Blocks are asked for in order.
struct Gaps {
    const zf_sign_rows &rows;
    zf_i64 next, start, stop; // of the block

    explicit Gaps(const zf_sign_rows &rows) : rows(rows), next(0), start(0), stop(0) {}
    // Return how many elements of a block are in no gap.
    zf_i64 filled(zf_i64 b) {
        start = b * rows.block, stop = start + rows.block;
        while (next < rows.num_gaps && rows.gaps[2 * next + 1] <= start) ++next;
        zf_i64 left = rows.block;
        each([&](zf_i64 from, zf_i64 to) { left -= to - from; });
        return left;
    }
    template <class Body>
    ZF_METHOD void each(const Body &body) const {
        for (zf_i64 k = next; k < rows.num_gaps && rows.gaps[2 * k] < stop; ++k) {
            const zf_i64 from = rows.gaps[2 * k], to = rows.gaps[2 * k + 1];
            body((from > start ? from : start) - start, (to < stop ? to : stop) - start);
        }
    }
    void clear(zf_u32 *block) const {
        each([&](zf_i64 from, zf_i64 to) { __builtin_memset(block + from, 0, (zf_u64)(to - from) * 4); });
    }
};

// The bits of the scale of a block, of which `filled` elements count.
zf_u32 scale_of(const zf_u32 *x, zf_i64 block, zf_i64 filled) {
    if (filled == block || !filled) return zf_wire_mean(sum_of<Fp32>(x, block), block);
    zf_u32 more[ZF_UNIT] __attribute__((aligned(64)));
    const float by = (float)((double)block / (double)filled);
    for (zf_i64 i = 0; i < block; i += ZF_LANES) put(more + i, zf_bits(zf_float(raw(x + i)) * by));
    return zf_wire_mean(sum_of<Fp32>(more, block), block);
}

// Elements of a block -> their codes; body(element, the element, it as it arrives).
template <class Body>
ZF_FN void encode(const zf_u32 *x, zf_u32 scale, zf_u8 *codes, zf_i64 block, const Body &body) {
    const zf_i64 size = block / 8;
    const bool none = has_none(scale);
    for (zf_i64 i = 0; i < size; i += AT_ONCE) {
        const int count = (int)((size - i < AT_ONCE ? size - i : AT_ONCE) / ZF_LANES);
        zf_u now[4] = {};
        for (int k = 0; k < count; ++k)
            for (zf_u32 plane = 0; plane < 8; ++plane) {
                const zf_i64 at = plane * size + i + k * ZF_LANES;
                const zf_f element = zf_float(raw(x + at));
                const zf_u below = negative(element, none);
                now[k] |= (below & 1u) << plane;
                body(at, element, of_scale(below, scale));
            }
        zf_u8 bytes[AT_ONCE];
        put_low_bytes(bytes, now);
        __builtin_memcpy(codes + i, bytes, (zf_u64)count * ZF_LANES);
    }
}

ZF_FN void put_scale(zf_u8 *rows, zf_i64 at, zf_u32 scale) {
    const zf_u16 half = (zf_u16)(scale >> 16);
    __builtin_memcpy(rows + at, &half, 2);
}

// What is added: numbers, or the sum of rows. `open`: a block, from element `at` of all.
template <class Number>
struct Numbers {
    const typename Number::stored *all, *here;
    Numbers(const zf_sign_mix_args &a) : all((const typename Number::stored *)a.added), here(nullptr) {}
    ZF_METHOD void open(zf_i64 b, zf_i64 block) { here = all + b * block; }
    ZF_METHOD zf_f get(zf_u32, zf_i64, zf_i64 at) const {
        soon<true>(here + at);
        return Number::get(here + at);
    }
};
struct Sum {
    const zf_sign_mix_args &a;
    Place place;
    Sum(const zf_sign_mix_args &a) : a(a), place(a.rows, 0) {}
    ZF_METHOD void open(zf_i64 b, zf_i64) { place = Place(a.rows, b); }
    ZF_METHOD zf_f get(zf_u32 plane, zf_i64 i, zf_i64) const {
        const zf_u8 *row = (const zf_u8 *)a.added;
        zf_f total = one(row, plane, i);
        for (zf_i64 k = 1; k < a.num_added; ++k) total += one(row += a.rows.bytes, plane, i);
        return total;
    }
    ZF_METHOD zf_f one(const zf_u8 *row, zf_u32 plane, zf_i64 i) const {
        return of_scale(widened(row + place.codes + i) >> plane << 31, scale_at(row, place.scale));
    }
};

// What was the result before: numbers, or signs as they came. `open` looks for its scale.
struct Kept {
    const zf_u32 *all, *here;
    zf_u32 scale;
    Kept(const zf_sign_mix_args &a) : all((const zf_u32 *)a.before), here(nullptr), scale(0u) {}
    ZF_METHOD void open(zf_i64 b, zf_i64 block, zf_i64 filled) {
        here = all + b * block;
        scale = scale_of(here, block, filled);
    }
    ZF_METHOD zf_f get(zf_u32, zf_i64, zf_i64 at) const { return zf_float(raw(here + at)); }
    ZF_METHOD zf_f sign(zf_f x) const { return of_scale(negative(x, has_none(scale)), scale); }
};
struct Came {
    const zf_sign_mix_args &a;
    const zf_u8 *codes;
    zf_u32 scale;
    Came(const zf_sign_mix_args &a) : a(a), codes(nullptr), scale(0u) {}
    ZF_METHOD void open(zf_i64 b, zf_i64, zf_i64) {
        const Place place(a.rows, b);
        codes = (const zf_u8 *)a.before + place.codes;
        scale = scale_at((const zf_u8 *)a.before, place.scale);
    }
    ZF_METHOD zf_f get(zf_u32 plane, zf_i64 i, zf_i64) const { return of_scale(widened(codes + i) >> plane << 31, scale); }
    ZF_METHOD zf_f sign(zf_f x) const { return x; }
};

template <bool whole, class Added, class Before>
ZF_FN void mix_all(const zf_sign_mix_args &a, zf_i64 first, zf_i64 last) {
    const zf_i64 block = a.rows.block;
    const float by = a.by, of_signs = a.of_signs, of_rest = a.of_rest;
    zf_u32 x[ZF_UNIT] __attribute__((aligned(64)));
    Added added(a);
    Before before(a);
    Gaps gaps(a.rows);
    for (zf_i64 b = first; b < last; ++b) {
        const zf_i64 filled = gaps.filled(b);
        const zf_u32 *left = a.left + b * block;
        zf_u32 *rest = a.rest + b * block;
        added.open(b, block), before.open(b, block, filled);
        each_vector<whole>(block, [&](zf_u32 plane, zf_i64 i, zf_i64 at) __attribute__((always_inline)) {
            soon<true>(left + at);
            const zf_f was = before.get(plane, i, at), sign = before.sign(was);
            const zf_f kept = sign * of_signs + (was - sign) * of_rest + zf_float(raw(left + at));
            put(x + at, zf_bits(added.get(plane, i, at) * by + kept));
        });
        if (filled < block) gaps.clear(x);
        const Place place(a.rows, b);
        const zf_u32 scale = scale_of(x, block, filled);
        encode(x, scale, a.sent + place.codes, block, [&](zf_i64 at, zf_f now, zf_f sign)
               __attribute__((always_inline)) { put(rest + at, zf_bits(now - sign)); });
        put_scale(a.sent, place.scale, scale);
        if (filled < block) gaps.clear(rest);
    }
}

template <class Added, class Before>
void mix(const zf_sign_mix_args &a, zf_i64 first, zf_i64 last) {
    a.rows.block == ZF_UNIT ? mix_all<true, Added, Before>(a, first, last) : mix_all<false, Added, Before>(a, first, last);
}

} // namespace

// Blocks [first, last), of all rows that are sent.
ZF_API void ZF_NAME(zf_sign_mix)(const zf_sign_mix_args *a, zf_i64 first, zf_i64 last) {
    if (a->added_number == ZF_ROWS) return mix<Sum, Kept>(*a, first, last);
#define MIX(Number)                                                                                                    \
    a->before_came ? mix<Numbers<Number>, Came>(*a, first, last) : mix<Numbers<Number>, Kept>(*a, first, last)
    a->added_number == ZF_FP32 ? MIX(Fp32) : a->added_number == ZF_BF16 ? MIX(Bf16) : MIX(Fp16);
}

// fp32 -> codes and scales.
ZF_API void ZF_NAME(zf_sign_encode)(const zf_u32 *x, zf_u8 *rows, const zf_sign_rows *how, zf_i64 first, zf_i64 last) {
    Gaps gaps(*how);
    for (zf_i64 b = first; b < last; ++b) {
        const Place place(*how, b);
        const zf_u32 scale = scale_of(x + b * how->block, how->block, gaps.filled(b));
        encode(x + b * how->block, scale, rows + place.codes, how->block, [](zf_i64, zf_f, zf_f) {});
        put_scale(rows, place.scale, scale);
    }
}

// Codes and scales -> fp32; gaps become zeros.
ZF_API void ZF_NAME(zf_sign_decode)(const zf_u8 *rows, const zf_sign_rows *how, zf_u32 *x, zf_i64 first, zf_i64 last) {
    Gaps gaps(*how);
    for (zf_i64 b = first; b < last; ++b) {
        const Place place(*how, b);
        const zf_u32 scale = scale_at(rows, place.scale);
        zf_u32 *to = x + b * how->block;
        each_vector<false>(how->block, [&](zf_u32 plane, zf_i64 i, zf_i64 at) __attribute__((always_inline)) {
            put(to + at, zf_bits(of_scale(widened(rows + place.codes + i) >> plane << 31, scale)));
        });
        if (gaps.filled(b) < how->block) gaps.clear(to);
    }
}

ZF_API void ZF_NAME(zf_update)(const zf_update_args *, zf_i64, zf_i64); // of kernels.cpp

// `zf_update` of whole blocks [first, last), with fp32 moments, whose gradient came as rows: each is decoded into `a->g`,
// which is fp32, and taken from there while it is in the cache.
ZF_API void ZF_NAME(zf_update_signs)(const zf_update_args *a, const zf_u8 *rows, const zf_sign_rows *how, zf_i64 first,
                                     zf_i64 last) {
    for (zf_i64 b = first; b < last; ++b) {
        ZF_NAME(zf_sign_decode)(rows, how, (zf_u32 *)a->g, b, b + 1);
        ZF_NAME(zf_update)(a, b * how->block, (b + 1) * how->block);
    }
}
