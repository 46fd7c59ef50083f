// The CPU's loops over elements. Compiled once for each instruction set; nothing of the C++ library is used, so the
// shared library needs libc and libm alone.
#include "vectors.h"

#define ZF_JOIN_(a, b) a##_##b
#define ZF_JOIN(a, b) ZF_JOIN_(a, b)
#define ZF_NAME(name) ZF_JOIN(name, ZF_ISA)
#define ZF_API extern "C" __attribute__((visibility("default")))
#define EACH [&](auto full_, zf_i64 i, zf_i64 left) __attribute__((always_inline))
#define FULL decltype(full_)::value

namespace {

struct Numbers { // a pair of vectors of fp32
    zf_f even, odd;
};
ZF_FN Numbers numbers(Pair bits) { return {zf_float(bits.even), zf_float(bits.odd)}; }
ZF_FN Pair bits(Numbers x) { return {zf_bits(x.even), zf_bits(x.odd)}; }

// Gradients, masters and moments: how a pair is read and written. All start at the part's first element.
struct Fp32 {
    static const bool is_fp32 = true;
    zf_u32 *x;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64 i, zf_i64 left) const { return numbers(load<full, straight>(x + i, left)); }
    template <bool full, bool straight>
    __attribute__((always_inline)) void set(zf_i64 i, Numbers now, zf_i64 left, Pair = Pair()) const { store<full, straight>(x + i, bits(now), left); }
};
struct Bf16 {
    const zf_u16 *x;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64 i, zf_i64 left) const {
        Pair now = load<full, straight>(x + i, left);
        return {zf_from_bf16(now.even), zf_from_bf16(now.odd)};
    }
};
struct Fp16 {
    const zf_u16 *x;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64 i, zf_i64 left) const {
        Pair now = load<full, straight>(x + i, left);
        return {zf_from_fp16(now.even), zf_from_fp16(now.odd)};
    }
};
struct Split {
    zf_u16 *hi, *lo;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64 i, zf_i64 left) const {
        Pair h = load<full, straight>(hi + i, left), l = load<full, straight>((const zf_i16 *)lo + i, left);
        return {zf_join(h.even, l.even), zf_join(h.odd, l.odd)};
    }
    template <bool full, bool straight>
    __attribute__((always_inline)) void set(zf_i64 i, Numbers now, zf_i64 left) const {
        Pair x = {zf_splittable(now.even), zf_splittable(now.odd)};
        store<full, straight>(hi + i, Pair{zf_split_hi(x.even), zf_split_hi(x.odd)}, left);
        store<full, straight>(lo + i, Pair{zf_split_lo(x.even), zf_split_lo(x.odd)}, left);
    }
};
struct None {
    static const bool is_fp32 = true;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64, zf_i64) const { return Numbers(); }
    template <bool full, bool straight>
    __attribute__((always_inline)) void set(zf_i64, Numbers, zf_i64, Pair) const {}
};
template <int which>
struct Halves {
    static const bool is_fp32 = false;
    zf_u16 *x;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64 i, zf_i64 left) const { return Bf16{x}.get<full, false>(i, left); }
    template <bool full, bool straight>
    __attribute__((always_inline)) void set(zf_i64 i, Numbers now, zf_i64 left, Pair random) const {
        Pair r = which ? Pair{random.even >> 16, random.odd >> 16} : Pair{random.even & 0xFFFFu, random.odd & 0xFFFFu};
        store<full>(x + i, Pair{zf_to_bf16(now.even, r.even), zf_to_bf16(now.odd, r.odd)}, left);
    }
};
// The new values go to `scratch`; they are encoded when the largest of their block is known. `whole`: one run has all
// of the block, and pairs lie there as they are.
template <int is_signed, bool whole>
struct Codes {
    static const bool is_fp32 = false;
    const zf_u8 *x;
    zf_u32 *scratch, base;
    template <bool full, bool straight>
    __attribute__((always_inline)) Numbers get(zf_i64 i, zf_i64 left) const {
        Pair now = load<full, straight>(x + i, left);
        return {zf_value(now.even, base, is_signed), zf_value(now.odd, base, is_signed)};
    }
    template <bool full, bool straight>
    __attribute__((always_inline)) void set(zf_i64 i, Numbers now, zf_i64 left, Pair) const { store<full, whole>(scratch + i, bits(now), left); }
};

struct Adam {
    ZF_FN zf_f step(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) { return zf_adam(p, g, m, v, r, 0); }
};
struct AdamTail {
    ZF_FN zf_f step(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) { return zf_adam(p, g, m, v, r, 1); }
};
struct AdamLossy {
    ZF_FN zf_f step(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) { return zf_adam_lossy(p, g, m, v, r); }
};
struct Lion {
    ZF_FN zf_f step(zf_f p, zf_f g, zf_f *m, zf_f *, const zf_rates *r) { return zf_lion(p, g, m, r); }
};
struct Sgd {
    ZF_FN zf_f step(zf_f p, zf_f g, zf_f *, zf_f *, const zf_rates *r) { return zf_sgd(p, g, r); }
};
struct Momentum {
    ZF_FN zf_f step(zf_f p, zf_f g, zf_f *m, zf_f *, const zf_rates *r) { return zf_sgd_momentum(p, g, m, r); }
};

ZF_FN Pair places(zf_u32 first) {
    Pair x = {};
    for (zf_u32 lane = 0; lane < ZF_LANES; ++lane) {
        x.even[lane] = first + 2 * lane;
        x.odd[lane] = first + 2 * lane + 1;
    }
    return x;
}
ZF_FN Pair hash(zf_u32 seed, Pair place, zf_i64 i) {
    return {zf_hash(seed, place.even + (zf_u32)i), zf_hash(seed, place.odd + (zf_u32)i)};
}

// Elements [at, at + n) of the piece, in one run; with lossy moments in one unit of the hash, from element `first` on.
struct Part {
    const zf_update_args *a;
    const zf_rates *rates;
    zf_i64 at, n;
    zf_u32 seed, first;
};

template <class Rule, class P, class G, class M, class V>
void loop(P p, G g, M m, V v, const Part &part) {
    const zf_rates r = *part.rates;
    const float f0 = part.a->factors[0], f1 = part.a->factors[1];
    const bool straight = M::is_fp32 && V::is_fp32;
    const Pair place = places(part.first);
    over(part.n, EACH {
        Numbers p_now = p.template get<FULL, straight>(i, left), g_now = g.template get<FULL, straight>(i, left);
        Numbers m_now = m.template get<FULL, straight>(i, left), v_now = v.template get<FULL, straight>(i, left);
        p_now.even = Rule::step(p_now.even, g_now.even * f0 * f1, &m_now.even, &v_now.even, &r);
        p_now.odd = Rule::step(p_now.odd, g_now.odd * f0 * f1, &m_now.odd, &v_now.odd, &r);
        p.template set<FULL, straight>(i, p_now, left);
        Pair random = hash(part.seed, place, i);
        m.template set<FULL, straight>(i, m_now, left, random);
        v.template set<FULL, straight>(i, v_now, left, random);
    });
}

template <class Rule, class P, class M, class V>
void with_gradient(P p, M m, V v, const Part &part) {
    void *g = (void *)part.a->g;
    if (part.a->g_number == ZF_FP32) loop<Rule>(p, Fp32{(zf_u32 *)g + part.at}, m, v, part);
    if (part.a->g_number == ZF_BF16) loop<Rule>(p, Bf16{(const zf_u16 *)g + part.at}, m, v, part);
    if (part.a->g_number == ZF_FP16) loop<Rule>(p, Fp16{(const zf_u16 *)g + part.at}, m, v, part);
}

template <class Rule, class M, class V>
void with_master(M m, V v, const Part &part) {
    void *p = part.a->p, *lo = part.a->lo;
    if (lo)
        with_gradient<Rule>(Split{(zf_u16 *)p + part.at, (zf_u16 *)lo + part.at}, m, v, part);
    else
        with_gradient<Rule>(Fp32{(zf_u32 *)p + part.at}, m, v, part);
}

template <class Adam_, class M, class V>
void with_rule(M m, V v, const Part &part) {
    zf_i32 rule = part.a->rule;
    if (rule == ZF_ADAM) with_master<Adam_>(m, v, part);
    if (rule == ZF_LION) with_master<Lion>(m, None(), part);
    if (rule == ZF_SGD_MOMENTUM) with_master<Momentum>(m, None(), part);
    if (rule == ZF_SGD) with_master<Sgd>(None(), None(), part);
}

// fp32 moments, elements [first, last). The last size % 8 of a run are its tail.
void update_whole(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    for (const zf_run *run = a->runs; run < a->runs + a->num_runs; ++run) {
        zf_i64 tail = run->stop - (run->stop - run->start) % 8;
        zf_i64 cuts[3] = {run->start, tail, run->stop};
        for (int k = 0; k < 2; ++k) {
            zf_i64 at = cuts[k] > first ? cuts[k] : first, stop = cuts[k + 1] < last ? cuts[k + 1] : last;
            if (at >= stop) continue;
            Part part = {a, &run->rates, at, stop - at, 0, 0};
            Fp32 m = {(zf_u32 *)a->moments[0] + at}, v = {(zf_u32 *)a->moments[1] + at};
            k ? with_rule<AdamTail>(m, v, part) : with_rule<Adam>(m, v, part);
        }
    }
}

template <int is_signed>
void decode(zf_u32 *x, const zf_u8 *codes, zf_u32 scale, zf_i64 n) {
    Codes<is_signed, false> from = {codes, nullptr, zf_base(scale, is_signed)};
    over(n, EACH { store<FULL>(x + i, bits(from.template get<FULL, false>(i, left)), left); });
}

zf_u32 scale_of(const zf_u32 *x, zf_i64 n) {
    zf_u largest = {};
    over(n, EACH {
        Pair now = load<FULL, true>(x + i, left);
        zf_u even = now.even & ZF_ABS, odd = now.odd & ZF_ABS, larger = even > odd ? even : odd;
        largest = larger > largest ? larger : largest;
    });
    zf_u32 top = 0;
    for (int lane = 0; lane < ZF_LANES; ++lane) top = largest[lane] > top ? largest[lane] : top;
    return zf_scale(top);
}

ZF_FN Pair codes_of(Numbers x, zf_u32 base, Pair random, int is_signed) {
    return {zf_code(x.even, base, random.even, is_signed), zf_code(x.odd, base, random.odd, is_signed)};
}

void spoil(zf_u8 *codes, zf_u32 scale, int is_signed, zf_i64 n) {
    for (zf_i64 i = 0; i < n && scale >= ZF_INF; ++i) codes[i] = ZF_TOP(is_signed);
}

template <int is_signed>
zf_u32 encode(zf_u8 *codes, const zf_u32 *x, zf_i64 n) {
    zf_u32 scale = scale_of(x, n), base = zf_base(scale, is_signed);
    over(n, EACH {
        Pair nearest = {ZF_ALL(ZF_NEAREST), ZF_ALL(ZF_NEAREST)};
        store<FULL>(codes + i, codes_of(numbers(load<FULL>(x + i, left)), base, nearest, is_signed), left);
    });
    spoil(codes, scale, is_signed, n);
    return scale;
}

// The moments of one 8-bit block, which are encoded when all the new values are known.
struct Block {
    zf_u32 scratch[2][ZF_BLOCK] __attribute__((aligned(64)));
    zf_u8 *codes[2];
    zf_u32 *scales[2];
    zf_i64 n;
    int num;

    Block(const zf_update_args *a, zf_i64 at, zf_i64 stop) : n(stop - at), num(a->rule == ZF_ADAM ? 2 : 1) {
        for (int k = 0; k < num; ++k) {
            codes[k] = (zf_u8 *)a->moments[k] + at;
            scales[k] = (zf_u32 *)a->scales[k] + at / ZF_BLOCK;
        }
    }
    void keep(zf_i64 start, zf_i64 stop) { // what is in no run
        if (start == stop) return;
        decode<1>(scratch[0] + start, codes[0] + start, *scales[0], stop - start);
        if (num > 1) decode<0>(scratch[1] + start, codes[1] + start, *scales[1], stop - start);
    }
    template <int k, bool whole>
    Codes<1 - k, whole> moment(zf_i64 at) {
        if (k >= num) return {nullptr, nullptr, 0};
        return {codes[k] + at, scratch[k] + at, zf_base(*scales[k], 1 - k)};
    }
    template <bool two, bool whole>
    void close(zf_u32 seed, zf_u32 first) {
        zf_u32 m_scale = scale_of(scratch[0], n), v_scale = two ? scale_of(scratch[1], n) : 0;
        zf_u32 m_base = zf_base(m_scale, 1), v_base = zf_base(v_scale, 0);
        zf_u8 *m = codes[0], *v = codes[1];
        Pair place = places(first);
        over(n, EACH {
            Pair r = hash(seed, place, i), low = {r.even & 0xFFFFFu, r.odd & 0xFFFFFu}, high = {r.even >> 12, r.odd >> 12};
            Numbers now = numbers(load<FULL, whole>(scratch[0] + i, left));
            store<FULL>(m + i, codes_of(now, m_base, low, 1), left);
            if (!two) return;
            now = numbers(load<FULL, whole>(scratch[1] + i, left));
            store<FULL>(v + i, codes_of(now, v_base, high, 0), left);
        });
        *scales[0] = m_scale;
        spoil(m, m_scale, 1, n);
        if (!two) return;
        *scales[1] = v_scale;
        spoil(v, v_scale, 0, n);
    }
};

template <bool whole>
void update_block(const Part &part, Block &block, zf_i64 at) {
    with_rule<AdamLossy>(block.moment<0, whole>(at), block.moment<1, whole>(at), part);
}

template <bool whole>
void close_block(Block &block, zf_u32 seed, zf_u32 first) {
    block.num > 1 ? block.close<true, whole>(seed, first) : block.close<false, whole>(seed, first);
}

// bf16 and 8-bit moments, elements [first, last), one unit of the hash or one block of codes after the other.
void update_lossy(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    const zf_run *run = a->runs, *end = a->runs + a->num_runs;
    const zf_i64 size = a->format == ZF_BLOCKS ? ZF_BLOCK : ZF_UNIT;
    for (zf_i64 at = first, next; at < last; at = next) {
        next = at - at % size + size < last ? at - at % size + size : last;
        while (run < end && run->stop <= at) ++run;
        if (run == end) return;
        if (run->start >= next) continue;
        zf_u32 seed = zf_seed(a->key, (zf_u64)(a->offset + at) / ZF_UNIT), within = (zf_u32)(at % ZF_UNIT);
        Block block(a, at, next);
        const bool whole = run->start <= at && run->stop >= next && next - at == ZF_BLOCK;
        zf_i64 done = at;
        for (const zf_run *one = run; one < end && one->start < next; ++one) {
            zf_i64 start = one->start > at ? one->start : at, stop = one->stop < next ? one->stop : next;
            if (start >= stop) continue;
            Part part = {a, &one->rates, start, stop - start, seed, within + (zf_u32)(start - at)};
            if (a->format == ZF_HALF) {
                Halves<0> m = {(zf_u16 *)a->moments[0] + start};
                Halves<1> v = {(zf_u16 *)a->moments[1] + start};
                with_rule<AdamLossy>(m, v, part);
            } else {
                block.keep(done - at, start - at);
                whole ? update_block<true>(part, block, 0) : update_block<false>(part, block, start - at);
                done = stop;
            }
        }
        if (a->format == ZF_HALF) continue;
        block.keep(done - at, next - at);
        whole ? close_block<true>(block, seed, within) : close_block<false>(block, seed, within);
    }
}

} // namespace

// Elements [first, last) of the piece, both at a block or its end. Other calls at the same time have other elements.
ZF_API void ZF_NAME(zf_update)(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    a->format == ZF_WHOLE ? update_whole(a, first, last) : update_lossy(a, first, last);
}

ZF_API void ZF_NAME(zf_split)(const zf_u32 *p, zf_u16 *hi, zf_u16 *lo, zf_i64 n) {
    over(n, EACH { Split{hi, lo}.set<FULL, false>(i, numbers(load<FULL>(p + i, left)), left); });
}

ZF_API void ZF_NAME(zf_join)(zf_u16 *hi, zf_u16 *lo, zf_u32 *p, zf_i64 n) {
    over(n, EACH { store<FULL>(p + i, bits(Split{hi, lo}.get<FULL, false>(i, left)), left); });
}

ZF_API void ZF_NAME(zf_encode)(const zf_u32 *x, zf_u8 *codes, zf_u32 *scales, zf_i64 n, zf_i32 is_signed) {
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_i64 size = n - at < ZF_BLOCK ? n - at : ZF_BLOCK;
        scales[at / ZF_BLOCK] = is_signed ? encode<1>(codes + at, x + at, size) : encode<0>(codes + at, x + at, size);
    }
}

ZF_API void ZF_NAME(zf_decode)(const zf_u8 *codes, const zf_u32 *scales, zf_u32 *x, zf_i64 n, zf_i32 is_signed) {
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_i64 size = n - at < ZF_BLOCK ? n - at : ZF_BLOCK;
        zf_u32 scale = scales[at / ZF_BLOCK];
        is_signed ? decode<1>(x + at, codes + at, scale, size) : decode<0>(x + at, codes + at, scale, size);
    }
}
