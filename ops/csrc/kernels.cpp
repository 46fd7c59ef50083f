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

struct Adam {
    static float step(float p, float g, float *m, float *v, const zf_rates *r) { return zf_adam(p, g, m, v, r, 0); }
};
struct AdamTail {
    static float step(float p, float g, float *m, float *v, const zf_rates *r) { return zf_adam(p, g, m, v, r, 1); }
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

template <class Rule, class P, class G>
void loop(P p, G g, float *m, float *v, const zf_update_args *a, const zf_rates *rates, zf_i64 n) {
    const zf_rates r = *rates;
    const float f0 = a->factors[0], f1 = a->factors[1];
    EACH (zf_i64 i = 0; i < n; ++i) {
        p.set(i, Rule::step(p.get(i), g(i) * f0 * f1, m + i, v + i, &r));
    }
}

template <class Rule, class P>
void with_gradient(P p, float *m, float *v, const zf_update_args *a, const zf_rates *r, zf_i64 at, zf_i64 n) {
    const zf_u16 *half = (const zf_u16 *)a->g + at;
    if (a->g_number == ZF_FP32) loop<Rule>(p, Fp32{(const float *)a->g + at}, m, v, a, r, n);
    if (a->g_number == ZF_BF16) loop<Rule>(p, Bf16{half}, m, v, a, r, n);
    if (a->g_number == ZF_FP16) loop<Rule>(p, Fp16{half}, m, v, a, r, n);
}

template <class Rule>
void with_master(float *m, float *v, const zf_update_args *a, const zf_rates *r, zf_i64 at, zf_i64 n) {
    if (a->is_split)
        with_gradient<Rule>(Split{(zf_u16 *)a->p + at, (zf_i16 *)a->lo + at}, m, v, a, r, at, n);
    else
        with_gradient<Rule>(Whole{(float *)a->p + at}, m, v, a, r, at, n);
}

// Elements [at, stop) of one run, no more than a block; m and v are theirs.
void step(float *m, float *v, const zf_update_args *a, const zf_run *run, zf_i64 at, zf_i64 stop) {
    const zf_rates *r = &run->rates;
    if (a->rule == ZF_LION) return with_master<Lion>(m, v, a, r, at, stop - at);
    if (a->rule == ZF_SGD) return with_master<Sgd>(m, v, a, r, at, stop - at);
    if (a->rule == ZF_SGD_MOMENTUM) return with_master<Momentum>(m, v, a, r, at, stop - at);
    zf_i64 tail = run->stop - (run->stop - run->start) % 8;
    zf_i64 body = tail < at ? at : tail < stop ? tail : stop;
    with_master<Adam>(m, v, a, r, at, body - at);
    if (body < stop) with_master<AdamTail>(m + (body - at), v + (body - at), a, r, body, stop - body);
}

void hash_block(zf_u32 *random, zf_u64 key, zf_i64 block) {
    zf_u32 seed = zf_seed(key, (zf_u64)block);
    EACH (zf_u32 i = 0; i < ZF_BLOCK; ++i) random[i] = zf_hash(seed, i);
}

template <int is_signed>
void decode(float *x, const zf_u8 *codes, float scale, zf_i64 n) {
    EACH (zf_i64 i = 0; i < n; ++i) x[i] = scale * zf_value(codes[i], is_signed);
}

// `random` shifted right by `shift`; NULL rounds to nearest.
template <int is_signed>
float encode(zf_u8 *codes, const float *x, const zf_u32 *random, int shift, zf_i64 n) {
    zf_u32 largest = 0;
    EACH (zf_i64 i = 0; i < n; ++i) {
        zf_u32 size = zf_bits(x[i]) & ZF_ABS;
        largest = size > largest ? size : largest;
    }
    float scale = zf_scale(largest), inverse = zf_inverse(scale);
    if (random)
        EACH (zf_i64 i = 0; i < n; ++i) {
            codes[i] = zf_code(x[i], inverse, random[i] >> shift & 0xFFFFu, is_signed);
        }
    else
        EACH (zf_i64 i = 0; i < n; ++i) codes[i] = zf_code(x[i], inverse, 0x8000u, is_signed);
    return scale;
}

// One moment over one block of the piece: fp32 is worked on where it lies, the others in a buffer.
struct Moment {
    const zf_update_args *a;
    int which, format; // 0: m, 1: v
    float buffer[ZF_BLOCK] __attribute__((aligned(64)));

    float *open(zf_i64 at, zf_i64 n) {
        if (format == ZF_WHOLE) return (float *)a->moments[which] + at;
        if (format == ZF_HALF) {
            const zf_u16 *from = (const zf_u16 *)a->moments[which] + at;
            EACH (zf_i64 i = 0; i < n; ++i) buffer[i] = zf_from_bf16(from[i]);
        } else {
            const zf_u8 *codes = (const zf_u8 *)a->moments[which] + at;
            float scale = a->scales[which][at / ZF_BLOCK];
            which ? decode<0>(buffer, codes, scale, n) : decode<1>(buffer, codes, scale, n);
        }
        return buffer;
    }

    // Of a block at `at` only [start, stop) was in runs.
    void close(zf_i64 at, zf_i64 n, zf_i64 start, zf_i64 stop, const zf_u32 *random) {
        int shift = which ? 16 : 0;
        if (format == ZF_HALF) {
            zf_u16 *to = (zf_u16 *)a->moments[which] + at;
            EACH (zf_i64 i = start - at; i < stop - at; ++i) {
                to[i] = zf_to_bf16(buffer[i], random[i] >> shift & 0xFFFFu);
            }
        } else if (format == ZF_BLOCKS) {
            zf_u8 *codes = (zf_u8 *)a->moments[which] + at;
            a->scales[which][at / ZF_BLOCK] = which ? encode<0>(codes, buffer, random, shift, n)
                                                    : encode<1>(codes, buffer, random, shift, n);
        }
    }
};

} // namespace

// Elements [first, last) of the piece; `first` is at a block. What other calls do at the same time lies elsewhere.
ZF_API void ZF_NAME(zf_update)(const zf_update_args *a, zf_i64 first, zf_i64 last) {
    Moment m, v;
    zf_u32 random[ZF_BLOCK] __attribute__((aligned(64)));
    m.a = v.a = a;
    m.which = 0, v.which = 1;
    m.format = a->moment[0], v.format = a->moment[1];
    const zf_run *run = a->runs, *end = a->runs + a->num_runs;
    for (zf_i64 at = first; at < last; at += ZF_BLOCK) {
        zf_i64 block_end = at + ZF_BLOCK < last ? at + ZF_BLOCK : last;
        while (run < end && run->stop <= at) ++run;
        if (run == end) return;
        if (run->start >= block_end) continue;
        float *mp = m.open(at, block_end - at), *vp = v.open(at, block_end - at);
        if (m.format | v.format) hash_block(random, a->key, (a->offset + at) / ZF_BLOCK);
        for (const zf_run *one = run; one < end && one->start < block_end; ++one) {
            zf_i64 start = one->start > at ? one->start : at, stop = one->stop < block_end ? one->stop : block_end;
            if (start < stop) step(mp + (start - at), vp + (start - at), a, one, start, stop);
            if (start < stop && m.format == ZF_HALF) m.close(at, block_end - at, start, stop, random);
            if (start < stop && v.format == ZF_HALF) v.close(at, block_end - at, start, stop, random);
        }
        if (m.format == ZF_BLOCKS) m.close(at, block_end - at, at, block_end, random);
        if (v.format == ZF_BLOCKS) v.close(at, block_end - at, at, block_end, random);
    }
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
        scales[at / ZF_BLOCK] = is_signed ? encode<1>(codes + at, x + at, nullptr, 0, size)
                                          : encode<0>(codes + at, x + at, nullptr, 0, size);
    }
}

ZF_API void ZF_NAME(zf_decode)(const zf_u8 *codes, const float *scales, float *x, zf_i64 n, zf_i32 is_signed) {
    for (zf_i64 at = 0; at < n; at += ZF_BLOCK) {
        zf_i64 size = n - at < ZF_BLOCK ? n - at : ZF_BLOCK;
        float scale = scales[at / ZF_BLOCK];
        is_signed ? decode<1>(x + at, codes + at, scale, size) : decode<0>(x + at, codes + at, scale, size);
    }
}
