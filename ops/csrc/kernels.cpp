// The CPU's loops over elements. Compiled once for each instruction set; nothing of the C++ library is used, so the
// shared library needs libc and libm alone.
#include "vectors.h"

namespace {

struct Numbers { // a pair of vectors of fp32
    zf_f even, odd;
};
ZF_FN Numbers numbers(Pair bits) { return {zf_float(bits.even), zf_float(bits.odd)}; }
ZF_FN Pair bits(Numbers x) { return {zf_bits(x.even), zf_bits(x.odd)}; }

#define ZF_INLINE template <bool full, bool straight> __attribute__((always_inline))
#define ZF_NO_BLOCKS ZF_FN void open(zf_i64) {} ZF_FN void close(zf_i64) {} ZF_FN void finish(zf_i64) {}
#define ZF_SOON(...) template <bool far> __attribute__((always_inline)) void soon(zf_i64 i) const { __VA_ARGS__; }

// The draws of a part's elements at even places and at odd ones, those of element i at i / 2.
struct Draws {
    const zf_u32 *even, *odd;
    __attribute__((always_inline)) Pair get(zf_i64 i) const { return {raw(even + i / 2), raw(odd + i / 2)}; }
};

// Gradients, masters and moments: how a pair is read and written. All start at the part's first element.
struct Fp32 {
    static const bool is_fp32 = true;
    zf_u32 *x;
    ZF_INLINE Numbers get(zf_i64 i, zf_i64 left) const { return numbers(load<full, straight>(x + i, left)); }
    ZF_INLINE void set(zf_i64 i, Numbers now, zf_i64 left) const { store<full, straight>(x + i, bits(now), left); }
    ZF_SOON(::soon<far>(x + i))
};
struct Bf16 {
    const zf_u16 *x;
    ZF_INLINE Numbers get(zf_i64 i, zf_i64 left) const {
        if (!straight) return numbers(raised(load_words<full>(x + i, left)));
        Pair now = load<full, true>(x + i, left);
        return {zf_from_bf16(now.even), zf_from_bf16(now.odd)};
    }
    ZF_SOON(::soon<far>(x + i))
};
struct Fp16 {
    const zf_u16 *x;
    ZF_INLINE Numbers get(zf_i64 i, zf_i64 left) const {
        Pair now = load<full, straight>(x + i, left);
        return {zf_from_fp16(now.even), zf_from_fp16(now.odd)};
    }
    ZF_SOON(::soon<far>(x + i))
};
struct Split {
    zf_u16 *hi, *lo;
    ZF_INLINE Numbers get(zf_i64 i, zf_i64 left) const {
        Pair l = load<full, straight>((const zf_i16 *)lo + i, left);
        if (!straight) { // no shift for the upper halves at odd places
            Pair h = raised(load_words<full>(hi + i, left));
            return {zf_joined(h.even, l.even), zf_joined(h.odd, l.odd)};
        }
        Pair h = load<full, true>(hi + i, left);
        return {zf_join(h.even, l.even), zf_join(h.odd, l.odd)};
    }
    ZF_INLINE void set(zf_i64 i, Numbers now, zf_i64 left) const {
        if (!straight) return set_tame<full>(i, bits(now), left); // lossy moments have a tame gradient
        Pair x = {zf_splittable(now.even), zf_splittable(now.odd)};
        store<full, true>(hi + i, Pair{zf_split_hi(x.even), zf_split_hi(x.odd)}, left);
        store<full, true>(lo + i, Pair{zf_split_lo(x.even), zf_split_lo(x.odd)}, left);
    }
    template <bool full>
    __attribute__((always_inline)) void set_tame(zf_i64 i, Pair x, zf_i64 left) const {
        store_words<full>(hi + i, upper({zf_split_near(x.even), zf_split_near(x.odd)}), left);
        store<full>(lo + i, x, left);
    }
    ZF_SOON(::soon<far>(hi + i), ::soon<far>(lo + i))
};
struct None {
    static const bool is_fp32 = true, in_blocks = false, is_far = false;
    ZF_INLINE Numbers get(zf_i64, zf_i64) const { return Numbers(); }
    ZF_INLINE void set(zf_i64, Numbers, zf_i64) const {}
    ZF_SOON((void)i)
    ZF_NO_BLOCKS
};
struct Whole : Fp32 {
    static const bool in_blocks = false, is_far = false;
    ZF_NO_BLOCKS
};
struct Halves {
    static const bool is_fp32 = false, in_blocks = false, is_far = true;
    zf_u16 *x;
    Draws draws;
    ZF_INLINE Numbers get(zf_i64 i, zf_i64 left) const { return Bf16{x}.get<full, false>(i, left); }
    ZF_INLINE void set(zf_i64 i, Numbers now, zf_i64 left) const {
        Pair random = draws.get(i);
        store_words<full>(x + i, upper({zf_to_bf16(now.even, random.even), zf_to_bf16(now.odd, random.odd)}), left);
    }
    ZF_SOON(::soon<far>(x + i))
    ZF_NO_BLOCKS
};

template <int is_signed>
ZF_FN zf_w values(const zf_u8 *codes, zf_w base, zf_i64 left, bool full) {
    const zf_i8 *with_sign = (const zf_i8 *)codes;
    zf_w code = full ? load_words<true>(codes, left) : load_words<false>(codes, left);
    if (is_signed) code = full ? load_words<true>(with_sign, left) : load_words<false>(with_sign, left);
    return zf_value(code, base, is_signed);
}

// ZF_BLOCK upper halves, of which those that are not there are zero, and the largest sizes -> codes and a scale.
template <int is_signed>
ZF_FN void encode(const zf_u16 *upper_halves, zf_w largest, zf_u8 *codes, zf_u32 *scale) {
    *scale = zf_scale(largest_of(largest));
    zf_w base = zf_base(*scale, is_signed) - zf_w{};
    for (int i = 0; i < ZF_BLOCK; i += 2 * ZF_PAIR) {
        zf_w first = (zf_w)raw(upper_halves + i), second = (zf_w)raw(upper_halves + i + ZF_PAIR);
        put_bytes(codes + i, zf_code(first, base, is_signed), zf_code(second, base, is_signed));
    }
    if (*scale >= ZF_INF) __builtin_memset(codes, ZF_TOP(is_signed), ZF_BLOCK);
}

template <int is_signed>
ZF_FN void encode(const zf_u16 *upper_halves, zf_u8 *codes, zf_u32 *scale) {
    zf_w largest = {};
    for (int i = 0; i < ZF_BLOCK; i += ZF_PAIR)
        largest = larger(largest, zf_size((zf_w)raw(upper_halves + i), is_signed));
    encode<is_signed>(upper_halves, largest, codes, scale);
}

// New values, cut to upper halves, go to `scratch`; they are encoded when the largest of their block is known.
// `whole`: a part is of whole blocks, and each is encoded here, when the next one was computed: nothing waits for its
// largest then.
template <int is_signed, bool whole>
struct Codes {
    static const bool is_fp32 = false, in_blocks = whole, is_far = false;
    zf_u8 *codes;
    zf_u32 *scales;
    zf_u16 *scratch;
    Draws draws;
    zf_w base, largest, before;
    ZF_INLINE Numbers get(zf_i64 i, zf_i64 left) const {
        return numbers(raised(values<is_signed>(codes + i, base, left, full)));
    }
    ZF_INLINE void set(zf_i64 i, Numbers now, zf_i64 left) {
        Pair random = draws.get(i), next = {zf_to_step(now.even, random.even), zf_to_step(now.odd, random.odd)};
        store_words<full>(scratch + (whole ? i % (2 * ZF_BLOCK) : i), upper(next), left);
        largest = larger(largest, zf_size(upper(next), is_signed));
    }
    ZF_SOON(::soon<far>(codes + i))
    __attribute__((always_inline)) void open(zf_i64 at) {
        if (whole) base = zf_base(scales[at / ZF_BLOCK], is_signed) - zf_w{}, largest = zf_w{};
    }
    __attribute__((always_inline)) void close(zf_i64 at) {
        if (whole && at) finish(at);
        before = largest;
    }
    __attribute__((always_inline)) void finish(zf_i64 stop) {
        if (!whole) return;
        const zf_i64 at = stop - ZF_BLOCK;
        encode<is_signed>(scratch + at % (2 * ZF_BLOCK), before, codes + at, scales + at / ZF_BLOCK);
    }
};

// Elements [at, at + n) of the shard, in one run; with lossy moments in one unit.
struct Part {
    const zf_update_args *a;
    const zf_rates *rates;
    zf_i64 at, n;
};

typedef zf_f Step(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r);

template <Step *step, class P, class G, class M, class V>
void loop(P p, G g, M m, V v, const Part &part) {
    const zf_rates r = *part.rates;
    const float f0 = part.a->factors[0], f1 = part.a->factors[1], both = f0 * f1;
    const bool straight = M::is_fp32 && V::is_fp32;
    const zf_i64 size = M::in_blocks ? ZF_BLOCK : part.n;
    for (zf_i64 at = 0; at < part.n; at += size) {
        m.open(at), v.open(at);
        over(size, EACH {
            i += at;
            if (FULL && !straight) {
                p.template soon<M::is_far>(i), g.template soon<M::is_far>(i);
                m.template soon<M::is_far>(i), v.template soon<M::is_far>(i);
            }
            Numbers p_now = p.template get<FULL, straight>(i, left), g_now = g.template get<FULL, straight>(i, left);
            Numbers m_now = m.template get<FULL, straight>(i, left), v_now = v.template get<FULL, straight>(i, left);
            g_now.even = straight ? g_now.even * f0 * f1 : zf_tame(g_now.even * both);
            g_now.odd = straight ? g_now.odd * f0 * f1 : zf_tame(g_now.odd * both);
            p_now.even = step(p_now.even, g_now.even, &m_now.even, &v_now.even, &r);
            p_now.odd = step(p_now.odd, g_now.odd, &m_now.odd, &v_now.odd, &r);
            p.template set<FULL, straight>(i, p_now, left);
            m.template set<FULL, straight>(i, m_now, left);
            v.template set<FULL, straight>(i, v_now, left);
        });
        m.close(at), v.close(at);
    }
    m.finish(part.n), v.finish(part.n);
}

template <Step *step, class P, class M, class V>
void with_gradient(P p, M m, V v, const Part &part) {
    void *g = (void *)part.a->g;
    if (part.a->g_number == ZF_FP32) loop<step>(p, Fp32{(zf_u32 *)g + part.at}, m, v, part);
    if (part.a->g_number == ZF_BF16) loop<step>(p, Bf16{(const zf_u16 *)g + part.at}, m, v, part);
    if (part.a->g_number == ZF_FP16) loop<step>(p, Fp16{(const zf_u16 *)g + part.at}, m, v, part);
}

template <Step *step, class M, class V>
void with_master(M m, V v, const Part &part) {
    void *p = part.a->p, *lo = part.a->lo;
    if (lo)
        with_gradient<step>(Split{(zf_u16 *)p + part.at, (zf_u16 *)lo + part.at}, m, v, part);
    else
        with_gradient<step>(Fp32{(zf_u32 *)p + part.at}, m, v, part);
}

template <class M>
struct Fixed : M { // read, and not written
    ZF_INLINE void set(zf_i64, Numbers, zf_i64) const {}
    ZF_FN void close(zf_i64) {}
    ZF_FN void finish(zf_i64) {}
};

template <bool there, bool written, class M>
auto moment(M m) {
    if constexpr (!there) return None();
    else if constexpr (written) return m;
    else return Fixed<M>{m};
}

enum Kind { WHOLE, TAIL, LOSSY };

template <Kind kind, class M, class V>
void with_rule(M m, V v, const Part &part) {
#define RULE(name, num_moments, num_written, whole, tail, lossy)                                                       \
    if (part.a->rule == ZF_##name)                                                                                     \
        with_master<kind == WHOLE ? whole : kind == TAIL ? tail : lossy>(                                              \
            moment<(num_moments > 0), (num_written > 0)>(m), moment<(num_moments > 1), (num_written > 1)>(v), part);
    ZF_RULES(RULE)
#undef RULE
}

// fp32 moments, elements [first, last). The last size % 8 of a run are its tail.
void update_whole(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    for (const zf_run *run = a->runs; run < a->runs + a->num_runs; ++run) {
        zf_i64 tail = run->stop - (run->stop - run->start) % 8;
        zf_i64 cuts[3] = {run->start, tail, run->stop};
        for (int k = 0; k < 2; ++k) {
            zf_i64 at = cuts[k] > first ? cuts[k] : first, stop = cuts[k + 1] < last ? cuts[k + 1] : last;
            if (at >= stop) continue;
            Part part = {a, &run->rates, at, stop - at};
            Whole m = {{(zf_u32 *)a->moments[0] + at}}, v = {{(zf_u32 *)a->moments[1] + at}};
            k ? with_rule<TAIL>(m, v, part) : with_rule<WHOLE>(m, v, part);
        }
    }
}

// The draws of a key, those at even places and those at odd ones, twice: elements go past the end.
struct Table {
    zf_u32 even[ZF_UNIT + 2 * ZF_LANES], odd[ZF_UNIT + 2 * ZF_LANES];
    Table(zf_u64 key, int num_bits) {
        zf_u32 seed = zf_seed(key, ZF_DRAWS);
        zf_u place = {};
        for (zf_u32 lane = 0; lane < ZF_LANES; ++lane) place[lane] = 2 * lane;
        for (zf_u32 i = 0; i < ZF_UNIT + 2 * ZF_LANES; i += ZF_LANES) {
            put(even + i, zf_draw(seed, (place + 2 * i) % ZF_UNIT) >> (32 - num_bits));
            put(odd + i, zf_draw(seed, (place + 2 * i + 1) % ZF_UNIT) >> (32 - num_bits));
        }
    }
    Draws from(zf_u32 first) const {
        return first % 2 ? Draws{odd + first / 2, even + first / 2 + 1} : Draws{even + first / 2, odd + first / 2};
    }
};

// Lossy moments of elements that start at `at`. Bytes are offset by the element, so `moments` are as in zf_update_args.
struct Lossy {
    const zf_update_args *a;
    Table table;
    zf_u16 scratch[2][2 * ZF_BLOCK] __attribute__((aligned(64)));

    Lossy(const zf_update_args *a) : a(a), table(a->key, a->format == ZF_HALF ? 16 : 20) {}
    Draws draws(zf_i64 at, int of) const {
        zf_u32 seed = zf_seed(a->key, (zf_u64)(a->offset + at) / ZF_UNIT);
        return table.from((zf_u32)(at % ZF_UNIT) + (of ? seed >> 21 : seed % ZF_UNIT));
    }
    Halves half(zf_i64 at, int of) const { return {(zf_u16 *)a->moments[of] + at, draws(at, of)}; }
    // In the block at `block`, or in whole ones from it on.
    template <int of, bool whole>
    Codes<1 - of, whole> codes(zf_i64 at, zf_i64 block) {
        if (!a->moments[of]) return Codes<1 - of, whole>();
        zf_u32 *scales = (zf_u32 *)a->scales[of] + block / ZF_BLOCK;
        zf_w base = zf_base(*scales, 1 - of) - zf_w{};
        return {(zf_u8 *)a->moments[of] + at, scales, scratch[of] + (at - block), draws(at, of), base, zf_w{}, zf_w{}};
    }
    template <int of>
    void decode(zf_i64 at, zf_i64 n) { // into `scratch`, as `set` leaves it there
        if (!a->moments[of]) return;
        Codes<1 - of, false> from = codes<of, false>(at, at);
        __builtin_memset(scratch[of], 0, sizeof(scratch[of]));
        over(n, EACH {
            store_words<FULL>(scratch[of] + i, values<1 - of>(from.codes + i, from.base, left, FULL), left);
        });
    }
    template <int of>
    void encode(zf_i64 at, zf_i64 n) {
        if (!a->moments[of]) return;
        zf_u8 some[ZF_BLOCK];
        ::encode<1 - of>(scratch[of], some, (zf_u32 *)a->scales[of] + at / ZF_BLOCK);
        __builtin_memcpy((zf_u8 *)a->moments[of] + at, some, (zf_u64)n);
    }
    // Part of a block, or a block with several runs.
    void mixed(const zf_run *run, zf_i64 at, zf_i64 stop) {
        decode<0>(at, stop - at), decode<1>(at, stop - at);
        for (; run < a->runs + a->num_runs && run->start < stop; ++run) {
            zf_i64 from = run->start > at ? run->start : at, to = run->stop < stop ? run->stop : stop;
            Part part = {a, &run->rates, from, to - from};
            if (from < to) with_rule<LOSSY>(codes<0, false>(from, at), codes<1, false>(from, at), part);
        }
        encode<0>(at, stop - at), encode<1>(at, stop - at);
    }
};

// bf16 and 8-bit moments, elements [first, last): what one run has of a unit, in 8-bit form in whole blocks.
void update_lossy(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    Lossy lossy(a);
    const zf_run *run = a->runs, *end = a->runs + a->num_runs;
    const zf_i64 size = a->format == ZF_BLOCKS ? ZF_BLOCK : 1;
    for (zf_i64 at = first, next; at < last; at = next) {
        while (run < end && run->stop <= at) ++run;
        if (run == end) return;
        next = run->start - run->start % size;
        if (next > at) continue;
        next = at - at % ZF_UNIT + ZF_UNIT < last ? at - at % ZF_UNIT + ZF_UNIT : last;
        if (run->stop < next) next = run->stop;
        next -= (next - at) % size;
        if (run->start > at || next == at) {
            next = at + size < last ? at + size : last;
            lossy.mixed(run, at, next);
            continue;
        }
        Part part = {a, &run->rates, at, next - at};
        if (a->format == ZF_HALF)
            with_rule<LOSSY>(lossy.half(at, 0), lossy.half(at, 1), part);
        else
            with_rule<LOSSY>(lossy.codes<0, true>(at, at), lossy.codes<1, true>(at, at), part);
    }
}

} // namespace

// Elements [first, last) of the shard, both at a block or its end. Other calls at the same time have other elements.
ZF_API void ZF_NAME(zf_update)(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    a->format == ZF_WHOLE ? update_whole(a, first, last) : update_lossy(a, first, last);
}

ZF_API void ZF_NAME(zf_split)(const zf_u32 *p, zf_u16 *hi, zf_u16 *lo, zf_i64 n) {
    over(n, EACH { Split{hi, lo}.set<FULL, true>(i, numbers(load<FULL, true>(p + i, left)), left); });
}

ZF_API void ZF_NAME(zf_join)(zf_u16 *hi, zf_u16 *lo, zf_u32 *p, zf_i64 n) {
    over(n, EACH { store<FULL, true>(p + i, bits(Split{hi, lo}.get<FULL, true>(i, left)), left); });
}

ZF_API void ZF_NAME(zf_encode)(const zf_u32 *x, zf_u8 *codes, zf_u32 *scales, zf_i64 n, zf_i32 is_signed) {
    const zf_u nearest = ZF_ALL(ZF_NEAREST);
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_u16 scratch[ZF_BLOCK] = {};
        zf_u8 some[ZF_BLOCK];
        const zf_i64 size = n - at < ZF_BLOCK ? n - at : ZF_BLOCK;
        over(size, EACH {
            Numbers now = numbers(load<FULL>(x + at + i, left));
            now = {zf_float(zf_splittable(now.even)), zf_float(zf_splittable(now.odd))};
            Pair next = {zf_to_step(now.even, nearest), zf_to_step(now.odd, nearest)};
            store_words<FULL>(scratch + i, upper(next), left);
        });
        zf_u32 *scale = scales + at / ZF_BLOCK;
        is_signed ? encode<1>(scratch, some, scale) : encode<0>(scratch, some, scale);
        __builtin_memcpy(codes + at, some, (zf_u64)size);
    }
}

ZF_API void ZF_NAME(zf_decode)(const zf_u8 *codes, const zf_u32 *scales, zf_u32 *x, zf_i64 n, zf_i32 is_signed) {
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_w base = zf_base(scales[at / ZF_BLOCK], is_signed) - zf_w{};
        over(n - at < ZF_BLOCK ? n - at : ZF_BLOCK, EACH {
            const zf_u8 *from = codes + at + i;
            zf_w now = is_signed ? values<1>(from, base, left, FULL) : values<0>(from, base, left, FULL);
            store<FULL>(x + at + i, raised(now), left);
        });
    }
}
