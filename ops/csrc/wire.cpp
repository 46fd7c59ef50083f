// What ranks send, in blocks with a scale: encoded, decoded, and the sum of several. Compiled as kernels.cpp is.
#include "wire_vectors.h"

namespace {

// The draws of a key, twice: a block goes past the end.
struct Draws {
    zf_u64 key;
    zf_u32 of[2 * ZF_UNIT] __attribute__((aligned(64)));
    explicit Draws(zf_u64 key) : key(key) {
        const zf_u32 seed = zf_seed(key, ZF_DRAWS);
        zf_u lanes = {};
        for (zf_u32 lane = 0; lane < ZF_LANES; ++lane) lanes[lane] = lane;
        for (zf_u32 i = 0; i < 2 * ZF_UNIT; i += ZF_LANES) put(of + i, zf_draw(seed, (lanes + i) % ZF_UNIT));
    }
    const zf_u32 *from(zf_i64 block) const { return of + zf_seed(key, (zf_u64)block) % ZF_UNIT; }
};

// `draws`: where those of the elements from y on begin; NULL for the nearest codes.
template <int format, bool drawn>
ZF_FN zf_u code_of(zf_f y, const zf_u32 *draws) {
    if (drawn) return format == ZF_FP8 ? zf_wire_drawn_fp8(y, raw(draws)) : zf_wire_drawn_integer(y, raw(draws));
    return format == ZF_FP8 ? zf_wire_fp8(y) : zf_wire_integer(y);
}
template <int format>
ZF_FN zf_f value_of(zf_u code) { // int8: its sign extended; int4: plus 8
    if (format == ZF_FP8) return zf_wire_of_fp8(code);
    if (format == ZF_SIGN) return zf_float(code << 31 | 0x3F800000u);
    return __builtin_convertvector((zf_i)code - (format == ZF_INT4 ? 8 : 0), zf_f);
}
template <int format>
ZF_FN zf_u codes_at(const zf_u8 *codes) {
    return format == ZF_INT8 ? widened((const zf_i8 *)codes) : widened(codes);
}

template <int format>
ZF_FN zf_i64 bytes_of(zf_i64 block) {
    return block / ZF_PLANES(format);
}

// The bits of the largest magnitude of a block's elements.
template <class Number>
ZF_FN zf_u32 top_of(const typename Number::stored *x, zf_i64 block) {
    zf_i largest[4] = {};
    for (zf_i64 i = 0; i < block; i += AT_ONCE)
        for (int k = 0; k < 4; ++k) {
            soon<true, 8192>(x + i + k * ZF_LANES);
            zf_i size = (zf_i)(zf_bits(Number::get(x + i + k * ZF_LANES)) & ZF_ABS);
            largest[k] = size > largest[k] ? size : largest[k];
        }
    zf_i first = largest[0] > largest[1] ? largest[0] : largest[1];
    zf_i second = largest[2] > largest[3] ? largest[2] : largest[3];
    return largest_of(first > second ? first : second);
}

// The bits of a block's scale.
template <int format, class Number, bool drawn>
ZF_FN zf_u32 scale_of(const typename Number::stored *x, zf_i64 block) {
    if (format == ZF_SIGN) return zf_wire_mean(sum_of<Number>(x, block), block);
    return zf_wire_scale(top_of<Number>(x, block), format, drawn);
}

// The signs of a block of `8 * size` elements, a bit each.
template <class Number>
ZF_FN void encode_signs(const typename Number::stored *x, zf_u8 *codes, zf_i64 size) {
    for (zf_i64 i = 0; i < size; i += AT_ONCE) {
        const int count = (int)((size - i < AT_ONCE ? size - i : AT_ONCE) / ZF_LANES);
        zf_u now[4] = {};
        for (int k = 0; k < count; ++k)
            for (int plane = 0; plane < 8; ++plane)
                now[k] |= ((zf_u)(Number::get(x + plane * size + i + k * ZF_LANES) < zf_f{}) & 1u) << plane;
        zf_u8 bytes[AT_ONCE];
        put_low_bytes(bytes, now);
        __builtin_memcpy(codes + i, bytes, (zf_u64)count * ZF_LANES);
    }
}

// A block's elements -> its codes, for a scale.
template <int format, class Number, bool drawn>
ZF_FN void encode(const typename Number::stored *x, zf_u8 *codes, zf_u32 scale, zf_i64 block, const zf_u32 *draws,
                  bool far) {
    const float inverse = zf_wire_inverse(scale);
    const zf_i64 half = block / 2, size = bytes_of<format>(block);
    if (scale > ZF_INF || (format == ZF_SIGN && scale == 0u)) {
        __builtin_memset(codes, 0, (zf_u64)size);
        return;
    }
    if (format == ZF_SIGN) {
        encode_signs<Number>(x, codes, size);
        return;
    }
    for (zf_i64 i = 0; i < size; i += AT_ONCE) {
        zf_u now[4];
        for (int k = 0; k < 4; ++k) {
            const zf_i64 at = i + k * ZF_LANES;
            now[k] = code_of<format, drawn>(Number::get(x + at) * inverse, draws + at);
            if (format == ZF_INT4) {
                const zf_f upper = Number::get(x + half + at) * inverse;
                now[k] = ((now[k] + 8u) & 0xFu) | (code_of<format, drawn>(upper, draws + half + at) + 8u) << 4;
            }
        }
        put_low_bytes(codes + i, now, far);
    }
}

// Elements of a block from `at` on, a vector of them -> their values.
template <int format>
ZF_FN zf_f value_at(const zf_u8 *codes, zf_i64 at, zf_i64 block, zf_u16 scale) {
    const float by = zf_float_of((zf_u32)scale << 16);
    if (format == ZF_SIGN) {
        const zf_i64 plane = at / (block / 8);
        return value_of<format>(codes_at<format>(codes + at - plane * (block / 8)) >> (zf_u32)plane) * by;
    }
    if (format != ZF_INT4) return value_of<format>(codes_at<format>(codes + at)) * by;
    const zf_i64 half = block / 2;
    const zf_u both = codes_at<format>(codes + (at < half ? at : at - half));
    return value_of<format>(at < half ? both & 0xFu : both >> 4) * by;
}

// The next block's scale is looked for before a block is encoded: memory is read on while it is divided.
template <int format, class Number, bool drawn>
void encode_each(const void *from, zf_u8 *codes, zf_u16 *scales, zf_i64 first, zf_i64 last, zf_i64 block,
                 const Draws *draws, zf_i64 place, bool far) {
    const typename Number::stored *x = (const typename Number::stored *)from;
    zf_u32 next = first < last ? scale_of<format, Number, drawn>(x + first * block, block) : 0u;
    for (zf_i64 b = first; b < last; ++b) {
        const zf_u32 scale = next;
        if (b + 1 < last) next = scale_of<format, Number, drawn>(x + (b + 1) * block, block);
        encode<format, Number, drawn>(x + b * block, codes + b * bytes_of<format>(block), scale, block,
                                      drawn ? draws->from(place + b) : nullptr, far);
        scales[b] = (zf_u16)(scale >> 16);
    }
    finish_far(far);
}

template <int format, class Number>
void encode_all(const void *from, zf_u8 *codes, zf_u16 *scales, zf_i64 first, zf_i64 last, zf_i64 block,
                const zf_u64 *key, zf_i64 place, bool far) {
    if (!key || format == ZF_SIGN) // signs have no codes between which to draw
        return encode_each<format, Number, false>(from, codes, scales, first, last, block, nullptr, place, far);
    const Draws draws(*key);
    encode_each<format, Number, format != ZF_SIGN>(from, codes, scales, first, last, block, &draws, place, far);
}

template <int format, class Number>
void decode_all(const zf_u8 *codes, const zf_u16 *scales, void *to, zf_i64 first, zf_i64 last, zf_i64 block,
                bool far) {
    typename Number::stored *x = (typename Number::stored *)to;
    for (zf_i64 b = first; b < last; ++b)
        for (zf_i64 i = 0; i < block; i += 2 * ZF_LANES) {
            const zf_u8 *of = codes + b * bytes_of<format>(block);
            zf_f now = value_at<format>(of, i, block, scales[b]);
            zf_f next = value_at<format>(of, i + ZF_LANES, block, scales[b]);
            put_straight(x + b * block + i, Number::stored_of(now, next), far);
        }
    finish_far(far);
}

template <int format>
void sum_all(const zf_u8 *const *codes, const zf_u16 *const *scales, zf_i64 num, zf_u32 *out, zf_i64 first,
             zf_i64 last, zf_i64 block, bool far) {
    for (zf_i64 b = first; b < last; ++b)
        for (zf_i64 i = 0; i < block; i += ZF_LANES) {
            const zf_i64 at = b * bytes_of<format>(block);
            zf_f total = value_at<format>(codes[0] + at, i, block, scales[0][b]);
            for (zf_i64 k = 1; k < num; ++k) total += value_at<format>(codes[k] + at, i, block, scales[k][b]);
            put(out + b * block + i, zf_bits(total), far);
        }
    finish_far(far);
}

// The nearest bf16 as torch's vectors have it: their NaN has all bits.
ZF_FN zf_u as_torch(zf_f x) { return x != x ? ZF_ALL(0xFFFFu) : zf_near_bf16(x); }

#define ZF_EACH_FORMAT(call)                                                                                           \
    format == ZF_INT8   ? call(ZF_INT8)                                                                                \
    : format == ZF_INT4 ? call(ZF_INT4)                                                                                \
    : format == ZF_FP8  ? call(ZF_FP8)                                                                                 \
                        : call(ZF_SIGN)
#define ZF_EACH_NUMBER(function, format, ...)                                                                          \
    (number == ZF_FP32   ? function<format, Fp32>(__VA_ARGS__)                                                         \
     : number == ZF_BF16 ? function<format, Bf16>(__VA_ARGS__)                                                         \
                         : function<format, Fp16>(__VA_ARGS__))

} // namespace

// Blocks [first, last) of numbers of a kind, zf_number. `key`: of the draws, of which block b takes those of `place` + b;
// NULL for the nearest codes. `far`: whether outputs are to be written past the caches.
ZF_API void ZF_NAME(zf_wire_encode)(const void *x, zf_u8 *codes, zf_u16 *scales, zf_i64 first, zf_i64 last,
                                    zf_i64 block, zf_i32 format, zf_i32 number, zf_i32 far, const zf_u64 *key,
                                    zf_i64 place) {
    const bool past = far && can_be_far(codes);
#define ENCODE(format) ZF_EACH_NUMBER(encode_all, format, x, codes, scales, first, last, block, key, place, past)
    ZF_EACH_FORMAT(ENCODE);
}

ZF_API void ZF_NAME(zf_wire_decode)(const zf_u8 *codes, const zf_u16 *scales, void *x, zf_i64 first, zf_i64 last,
                                    zf_i64 block, zf_i32 format, zf_i32 number, zf_i32 far) {
    const bool past = far && can_be_far(x);
#define DECODE(format) ZF_EACH_NUMBER(decode_all, format, codes, scales, x, first, last, block, past)
    ZF_EACH_FORMAT(DECODE);
}

// The sum of what `num` ranks have sent, in their order: fp32.
ZF_API void ZF_NAME(zf_wire_sum)(const zf_u8 *const *codes, const zf_u16 *const *scales, zf_i64 num, zf_u32 *out,
                                 zf_i64 first, zf_i64 last, zf_i64 block, zf_i32 format, zf_i32 far) {
    const bool past = far && can_be_far(out);
#define SUM(format) sum_all<format>(codes, scales, num, out, first, last, block, past)
    ZF_EACH_FORMAT(SUM);
}

// Elements [first, last) as the nearest bf16, ties to even.
ZF_API void ZF_NAME(zf_to_bf16)(const zf_u32 *x, zf_u16 *out, zf_i64 first, zf_i64 last, zf_i32 far) {
    const bool past = far && can_be_far(out + first);
    over(last - first, EACH {
        const zf_u32 *from = x + first + i;
        soon<true, 8192>(from), soon<true, 8192>(from + ZF_LANES); // nothing but memory takes time
        Pair now = load<FULL, true>(from, left);
        now = {as_torch(zf_float(now.even)), as_torch(zf_float(now.odd))};
        store<FULL, true>(out + first + i, now, left, past);
    });
    finish_far(past);
}

// Elements [first, last) of the sum of rows, in their order: fp32.
ZF_API void ZF_NAME(zf_sum_bf16)(const zf_u16 *const *rows, zf_i64 num_rows, zf_u32 *out, zf_i64 first, zf_i64 last,
                                 zf_i32 far) {
    const bool past = far && can_be_far(out + first);
    over(last - first, EACH {
        Pair now = load<FULL, true>(rows[0] + first + i, left);
        zf_f even = zf_from_bf16(now.even), odd = zf_from_bf16(now.odd);
        for (zf_i64 k = 1; k < num_rows; ++k) {
            now = load<FULL, true>(rows[k] + first + i, left);
            even += zf_from_bf16(now.even), odd += zf_from_bf16(now.odd);
        }
        store<FULL, true>(out + first + i, {zf_bits(even), zf_bits(odd)}, left, past);
    });
    finish_far(past);
}
