// The CPU's loops over elements. Compiled once for each instruction set, as plain C++ that compilers vectorise well;
// nothing of the C++ library is used, so the shared library needs libc and libm alone.
#include "kernels.h"

#define ZF_JOIN_(a, b) a##_##b
#define ZF_JOIN(a, b) ZF_JOIN_(a, b)
#define ZF_NAME(name) ZF_JOIN(name, ZF_ISA)
#define ZF_API extern "C" __attribute__((visibility("default")))
#define EACH _Pragma("GCC ivdep") for

namespace {

struct Fp32 {
    const float *x;
    float operator()(zf_i64 i) const { return x[i]; }
};
struct Bf16 {
    const zf_u16 *x;
    float operator()(zf_i64 i) const { return zf_from_bf16(x[i]); }
};
struct Fp16 {
    const zf_u16 *x;
    float operator()(zf_i64 i) const { return zf_from_fp16(x[i]); }
};

struct Whole {
    float *p;
    float get(zf_i64 i) const { return p[i]; }
    void set(zf_i64 i, float x) const { p[i] = x; }
};
struct Split {
    zf_u16 *hi;
    zf_i16 *lo;
    float get(zf_i64 i) const { return zf_float(zf_join(hi[i], lo[i])); }
    void set(zf_i64 i, float x) const {
        hi[i] = zf_split_hi(zf_bits(x));
        lo[i] = zf_split_lo(zf_bits(x));
    }
};

// A moment where a rule reads and writes it. `scratch`: the update of 8-bit blocks, which need the new largest first.
struct None {
    float get(zf_i64) const { return 0.0f; }
    void set(zf_i64, float, zf_u32) const {}
};
struct Floats {
    float *x;
    float get(zf_i64 i) const { return x[i]; }
    void set(zf_i64 i, float now, zf_u32) const { x[i] = now; }
};
struct Halves {
    zf_u16 *x;
    float get(zf_i64 i) const { return zf_from_bf16(x[i]); }
    void set(zf_i64 i, float now, zf_u32 random) const { x[i] = zf_to_bf16(now, random); }
};
template <int is_signed>
struct Codes {
    const zf_u8 *x;
    float *scratch;
    zf_u32 base;
    float get(zf_i64 i) const { return zf_value(x[i], base, is_signed); }
    void set(zf_i64 i, float now, zf_u32) const { scratch[i] = now; }
};

struct Adam {
    static float step(float p, float g, float *m, float *v, const zf_rates *r) { return zf_adam(p, g, m, v, r, 0); }
};
struct AdamTail {
    static float step(float p, float g, float *m, float *v, const zf_rates *r) { return zf_adam(p, g, m, v, r, 1); }
};
struct AdamLossy {
    static float step(float p, float g, float *m, float *v, const zf_rates *r) { return zf_adam_lossy(p, g, m, v, r); }
};
struct Lion {
    static float step(float p, float g, float *m, float *, const zf_rates *r) { return zf_lion(p, g, m, r); }
};
struct Sgd {
    static float step(float p, float g, float *, float *, const zf_rates *r) { return zf_sgd(p, g, r); }
};
struct Momentum {
    static float step(float p, float g, float *m, float *, const zf_rates *r) { return zf_sgd_momentum(p, g, m, r); }
};

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
    const zf_u32 seed = part.seed, first = part.first;
    const zf_i64 n = part.n;
    EACH (zf_i64 i = 0; i < n; ++i) {
        float m_now = m.get(i), v_now = v.get(i);
        p.set(i, Rule::step(p.get(i), g(i) * f0 * f1, &m_now, &v_now, &r));
        zf_u32 random = zf_hash(seed, first + (zf_u32)i);
        m.set(i, m_now, random & 0xFFFFu);
        v.set(i, v_now, random >> 16);
    }
}

template <class Rule, class P, class M, class V>
void with_gradient(P p, M m, V v, const Part &part) {
    const void *g = part.a->g;
    if (part.a->g_number == ZF_FP32) loop<Rule>(p, Fp32{(const float *)g + part.at}, m, v, part);
    if (part.a->g_number == ZF_BF16) loop<Rule>(p, Bf16{(const zf_u16 *)g + part.at}, m, v, part);
    if (part.a->g_number == ZF_FP16) loop<Rule>(p, Fp16{(const zf_u16 *)g + part.at}, m, v, part);
}

template <class Rule, class M, class V>
void with_master(M m, V v, const Part &part) {
    void *p = part.a->p, *lo = part.a->lo;
    if (lo)
        with_gradient<Rule>(Split{(zf_u16 *)p + part.at, (zf_i16 *)lo + part.at}, m, v, part);
    else
        with_gradient<Rule>(Whole{(float *)p + part.at}, m, v, part);
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
            Floats m = {(float *)a->moments[0] + at}, v = {(float *)a->moments[1] + at};
            k ? with_rule<AdamTail>(m, v, part) : with_rule<Adam>(m, v, part);
        }
    }
}

template <int is_signed>
void decode(float *x, const zf_u8 *codes, float scale, zf_i64 n) {
    zf_u32 base = zf_base(scale, is_signed);
    EACH (zf_i64 i = 0; i < n; ++i) x[i] = zf_value(codes[i], base, is_signed);
}

float scale_of(const float *x, zf_i64 n) {
    zf_u32 largest = 0;
    EACH (zf_i64 i = 0; i < n; ++i) {
        zf_u32 size = zf_bits(x[i]) & ZF_ABS;
        largest = size > largest ? size : largest;
    }
    return zf_scale(largest);
}

template <int is_signed>
float encode(zf_u8 *codes, const float *x, zf_i64 n) {
    float scale = scale_of(x, n);
    zf_u32 base = zf_base(scale, is_signed);
    bool finite = zf_bits(scale) < ZF_INF;
    EACH (zf_i64 i = 0; i < n; ++i) codes[i] = zf_code(x[i], base, ZF_NEAREST, is_signed);
    for (zf_i64 i = 0; i < n && !finite; ++i) codes[i] = ZF_TOP(is_signed);
    return scale;
}

// The moments of one 8-bit block, which are encoded when all the new values are known.
struct Block {
    zf_u8 *codes[2];
    float *scales[2], scratch[2][ZF_BLOCK] __attribute__((aligned(64)));
    zf_i64 n;
    int num;

    Block(const zf_update_args *a, zf_i64 at, zf_i64 stop) : n(stop - at), num(a->rule == ZF_ADAM ? 2 : 1) {
        for (int k = 0; k < num; ++k) {
            codes[k] = (zf_u8 *)a->moments[k] + at;
            scales[k] = a->scales[k] + at / ZF_BLOCK;
        }
    }
    void keep(zf_i64 start, zf_i64 stop) { // what is in no run
        decode<1>(scratch[0] + start, codes[0] + start, *scales[0], stop - start);
        if (num > 1) decode<0>(scratch[1] + start, codes[1] + start, *scales[1], stop - start);
    }
    template <int k>
    Codes<1 - k> moment(zf_i64 at) {
        if (k >= num) return {nullptr, nullptr, 0};
        return {codes[k] + at, scratch[k] + at, zf_base(*scales[k], 1 - k)};
    }
    template <int num_moments>
    void close(zf_u32 seed, zf_u32 first) {
        float scale[2] = {scale_of(scratch[0], n), num_moments > 1 ? scale_of(scratch[1], n) : 0.0f};
        zf_u32 m_base = zf_base(scale[0], 1), v_base = zf_base(scale[1], 0);
        zf_u8 *m = codes[0], *v = codes[1];
        EACH (zf_i64 i = 0; i < n; ++i) {
            zf_u32 random = zf_hash(seed, first + (zf_u32)i);
            m[i] = zf_code(scratch[0][i], m_base, random & 0xFFFFFu, 1);
            if (num_moments > 1) v[i] = zf_code(scratch[1][i], v_base, random >> 12, 0);
        }
        for (int k = 0; k < num_moments; ++k) {
            *scales[k] = scale[k];
            for (zf_i64 i = 0; i < n && zf_bits(scale[k]) >= ZF_INF; ++i) codes[k][i] = ZF_TOP(1 - k);
        }
    }
};

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
        zf_i64 done = at;
        for (const zf_run *one = run; one < end && one->start < next; ++one) {
            zf_i64 start = one->start > at ? one->start : at, stop = one->stop < next ? one->stop : next;
            if (start >= stop) continue;
            Part part = {a, &one->rates, start, stop - start, seed, within + (zf_u32)(start - at)};
            if (a->format == ZF_HALF) {
                Halves m = {(zf_u16 *)a->moments[0] + start}, v = {(zf_u16 *)a->moments[1] + start};
                with_rule<AdamLossy>(m, v, part);
                continue;
            }
            block.keep(done - at, start - at);
            with_rule<AdamLossy>(block.moment<0>(start - at), block.moment<1>(start - at), part);
            done = stop;
        }
        if (a->format == ZF_HALF) continue;
        block.keep(done - at, next - at);
        block.num > 1 ? block.close<2>(seed, within) : block.close<1>(seed, within);
    }
}

} // namespace

// Elements [first, last) of the piece, both at a block or its end. Other calls at the same time have other elements.
ZF_API void ZF_NAME(zf_update)(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    a->format == ZF_WHOLE ? update_whole(a, first, last) : update_lossy(a, first, last);
}

ZF_API void ZF_NAME(zf_split)(const zf_u32 *p, zf_u16 *hi, zf_i16 *lo, zf_i64 n) {
    EACH (zf_i64 i = 0; i < n; ++i) {
        hi[i] = zf_split_hi(p[i]);
        lo[i] = zf_split_lo(p[i]);
    }
}

ZF_API void ZF_NAME(zf_join)(const zf_u16 *hi, const zf_i16 *lo, zf_u32 *p, zf_i64 n) {
    EACH (zf_i64 i = 0; i < n; ++i) p[i] = zf_join(hi[i], lo[i]);
}

ZF_API void ZF_NAME(zf_encode)(const float *x, zf_u8 *codes, float *scales, zf_i64 n, zf_i32 is_signed) {
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_i64 size = n - at < ZF_BLOCK ? n - at : ZF_BLOCK;
        scales[at / ZF_BLOCK] = is_signed ? encode<1>(codes + at, x + at, size)
                                          : encode<0>(codes + at, x + at, size);
    }
}

ZF_API void ZF_NAME(zf_decode)(const zf_u8 *codes, const float *scales, float *x, zf_i64 n, zf_i32 is_signed) {
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_i64 size = n - at < ZF_BLOCK ? n - at : ZF_BLOCK;
        float scale = scales[at / ZF_BLOCK];
        is_signed ? decode<1>(x + at, codes + at, scale, size) : decode<0>(x + at, codes + at, scale, size);
    }
}
