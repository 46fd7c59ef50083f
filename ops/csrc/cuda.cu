// The GPU's loops over elements. ops/cuda.py hands this to NVRTC with its headers, so no header of CUDA is included.
//
// A warp takes 256 elements at a time, a block of 8-bit codes, and a thread of it 8 in a row: 16 bytes an access where
// memory is aligned to that, single elements elsewhere and at the end. What differs between rules is asked once for 8
// elements, by all threads alike: memory is what such a kernel waits for, and few kernels are soon compiled.
// What changes from step to step is read on the device, so that no launch waits for a number. Kernels take pointers,
// 64-bit integers and doubles alone.
#include "eights.h"

/* --- update rules ----------------------------------------------------------------------------------------------- */

struct Constants { // of a run, as they are known beforehand
    zf_i64 start, stop;
    double rate, decay;
};
static_assert(sizeof(Constants) == 32 && sizeof(zf_run) == 64, "ops/cuda.py allocates them");

// ops/kernel_args.py's `rates_of`, in double. `pow` is off by an ulp or two of double, and the host's by less than one,
// so a constant, rounded to float, differs from the host's once in many million counts.
ZF_KERNEL zf_runs(const Constants *in, zf_run *out, zf_i64 num, zf_i64 corrected, zf_i64 decoupled, double b1,
                  double b2, double eps, zf_i64 nesterov, const zf_i64 *count, const double *lr) {
    for (zf_i64 i = warp_of() * 32 + lane_of(); i < num; i += num_warps() * 32) {
        double rate = lr ? *lr * in[i].rate : in[i].rate, root = 1.0;
        zf_rates r = {};
        r.shrink = (float)(decoupled ? 1.0 - rate * in[i].decay : 1.0);
        r.l2 = (float)(decoupled ? 0.0 : in[i].decay);
        if (corrected) {
            root = sqrt(1.0 - pow(b2, (double)*count));
            rate = rate / (1.0 - pow(b1, (double)*count));
        }
        r.rate = (float)-rate;
        r.b1 = (float)b1, r.c1 = (float)(1.0 - b1);
        r.b2 = (float)b2, r.c2 = (float)(1.0 - b2);
        r.root = (float)root, r.eps = (float)eps, r.near = (float)(eps * root);
        r.quick = (float)(0.703952253 * -rate * root), r.nesterov = (zf_i32)nesterov;
        out[i].start = in[i].start, out[i].stop = in[i].stop, out[i].rates = r;
    }
}

// The elements of `inside`, a bit each; those from `tail` on are the tail of their run.
ZF_GPU void steps(zf_i64 rule, bool lossy, zf_u32 inside, int tail, const zf_rates *run, float *p, const float *g,
                  float *m, float *v) {
    const zf_rates r = *run;
    const bool all = inside == 0xFFu && tail == 8; // nothing is asked between elements then: their steps overlap
#define STEP(f) f(p[k], g[k], m + k, v + k, &r)
#define RULE(name, num_moments, num_written, whole_, tail_, lossy_)                                                    \
    if (rule == ZF_##name) {                                                                                           \
        if (all && lossy)                                                                                              \
            EACH(k) p[k] = STEP(lossy_);                                                                               \
        else if (all)                                                                                                  \
            EACH(k) p[k] = STEP(whole_);                                                                               \
        else                                                                                                           \
            EACH(k) if (inside >> k & 1u) p[k] = lossy ? STEP(lossy_) : k >= tail ? STEP(tail_) : STEP(whole_);        \
    }
    ZF_RULES(RULE)
#undef RULE
#undef STEP
}

ZF_GPU zf_i64 num_written(zf_i64 rule) { // of its moments
#define RULE(name, num_moments, num_written, whole, tail, lossy)                                                       \
    if (rule == ZF_##name) return num_written;
    ZF_RULES(RULE)
#undef RULE
    return 0;
}

// A moment of 8 elements: loaded, and stored when its new values are known. `is_signed`: m.
struct Moment {
    void *x; // NULL: the rule has none
    zf_u32 *scales;
    zf_i64 format;
    int is_signed;
    zf_i64 at, n;
    Eight raw;
    zf_u32 scale;
};

ZF_GPU Moment moment(void *x, zf_u32 *scales, zf_i64 format, int is_signed, zf_i64 at, zf_i64 n) {
    Moment s = {x, scales, format, is_signed, at, n, {}, 0};
    if (!x) return s;
    s.raw = load(x, format == ZF_WHOLE ? 4 : format == ZF_HALF ? 2 : 1, at, n);
    if (format == ZF_BLOCKS) s.scale = scales[at / ZF_BLOCK];
    return s;
}

ZF_GPU void read(const Moment &s, float *x) {
    if (s.format == ZF_WHOLE) numbers(s.raw, ZF_FP32, x);
    if (s.format == ZF_HALF) numbers(s.raw, ZF_BF16, x);
    if (s.format == ZF_BLOCKS) values(s.raw, s.scale, s.is_signed, x);
}

ZF_GPU void write(Moment &s, const float *x, zf_u32 inside, zf_u32 seed, zf_u32 draws) {
    if (!s.x) return;
    zf_u32 random[8];
    const zf_u32 first = (zf_u32)(s.at % ZF_UNIT) + (s.is_signed ? seed % ZF_UNIT : seed >> 21);
    EACH(k) random[k] = zf_draw(draws, (first + (zf_u32)k) % ZF_UNIT) >> (s.format == ZF_HALF ? 16 : 12);
    if (s.format == ZF_WHOLE) {
        EACH(k) s.raw.word[k] = zf_bits(x[k]);
        store(s.x, 4, s.at, s.n, s.raw);
    }
    if (s.format == ZF_HALF) {
        EACH(k) if (inside >> k & 1u)
            set_half(s.raw, k, zf_to_bf16(zf_float(zf_splittable(x[k])), random[k]) >> 16);
        store(s.x, 2, s.at, s.n, s.raw);
    }
    if (s.format == ZF_BLOCKS) {
        Eight codes = codes_of(x, s.is_signed, random, &s.scale);
        store(s.x, 1, s.at, s.n, codes);
        if (lane_of() == 0) s.scales[s.at / ZF_BLOCK] = s.scale;
    }
}

// `lo`, `m`, `v`, their scales, `factor` and `finite` may be NULL. Elements of no run stay as they are, blocks that no
// run enters too. `runs`: none empty, in order, apart. A kernel for each format of moments, which asks nothing about it.
template <zf_i64 format>
ZF_GPU void updated(zf_i64 rule, zf_i64 g_number, void *p, void *lo, const void *g, void *m, zf_u32 *m_scales, void *v,
                    zf_u32 *v_scales, const zf_i64 *count, const float *factor, const zf_u8 *finite, zf_i64 offset,
                    zf_i64 size, const zf_run *runs, zf_i64 num_runs) {
    if (finite && !*finite) return;
    const float f = factor ? *factor : 1.0f;
    const zf_u64 key = (zf_u64)*count, draws = zf_seed(key, ZF_DRAWS);
    for (zf_i64 first = warp_of() * ZF_BLOCK; first < size; first += num_warps() * ZF_BLOCK) {
        zf_i64 run = first_past(runs, num_runs, first);
        if (run == num_runs || runs[run].start >= first + ZF_BLOCK) continue; // the whole warp
        const zf_i64 at = first + 8 * lane_of(), rest = size - at, n = least(rest, 8);
        Eight hi = load(p, lo ? 2 : 4, at, rest), low = {};
        if (lo) low = load(lo, 2, at, rest);
        const Eight gradient = load(g, width_of(g_number), at, rest);
        Moment of_m = moment(m, m_scales, format, 1, at, rest), of_v = moment(v, v_scales, format, 0, at, rest);

        float p_now[8], g_now[8], m_now[8] = {}, v_now[8] = {};
        zf_u32 inside = 0;
        if (lo)
            EACH(k) p_now[k] = joined(hi, low, k);
        else
            numbers(hi, ZF_FP32, p_now);
        numbers(gradient, g_number, g_now);
        EACH(k) g_now[k] = format == ZF_WHOLE ? g_now[k] * f : zf_tame(g_now[k] * f);
        read(of_m, m_now), read(of_v, v_now);
        for (; run < num_runs && runs[run].start < at + n; ++run) {
            const zf_i64 start = most(runs[run].start - at, 0), stop = least(runs[run].stop - at, n);
            if (start >= stop) continue;
            const zf_i64 tail = runs[run].stop - (runs[run].stop - runs[run].start) % 8 - at;
            const zf_u32 here = (1u << stop) - (1u << start);
            steps(rule, format != ZF_WHOLE, here, (int)least(tail, 8), &runs[run].rates, p_now, g_now, m_now, v_now);
            inside |= here;
        }
        if (lo) {
            EACH(k) if (inside >> k & 1u) {
                set_half(hi, k, zf_split_hi(zf_splittable(p_now[k])));
                set_half(low, k, zf_split_lo(zf_splittable(p_now[k])));
            }
            store(lo, 2, at, rest, low);
        } else
            EACH(k) hi.word[k] = zf_bits(p_now[k]);
        store(p, lo ? 2 : 4, at, rest, hi);
        const zf_u32 seed = zf_seed(key, (zf_u64)(offset + first) / ZF_UNIT);
        if (num_written(rule) > 0) write(of_m, m_now, inside, seed, (zf_u32)draws);
        if (num_written(rule) > 1) write(of_v, v_now, inside, seed, (zf_u32)draws);
    }
}

#define UPDATE(name, format)                                                                                           \
    ZF_KERNEL name(zf_i64 rule, zf_i64 g_number, void *p, void *lo, const void *g, void *m, zf_u32 *m_scales, void *v, \
                   zf_u32 *v_scales, const zf_i64 *count, const float *factor, const zf_u8 *finite, zf_i64 offset,     \
                   zf_i64 size, const zf_run *runs, zf_i64 num_runs) {                                                 \
        updated<format>(rule, g_number, p, lo, g, m, m_scales, v, v_scales, count, factor, finite, offset, size, runs, \
                        num_runs);                                                                                     \
    }
UPDATE(zf_update_whole, ZF_WHOLE)
UPDATE(zf_update_half, ZF_HALF)
UPDATE(zf_update_blocks, ZF_BLOCKS)

/* --- norms ------------------------------------------------------------------------------------------------------ */

struct Piece { // elements [start, end) of a part: chunks up to `stop` (not included), from the `stop` of the one before
    zf_i64 start, end, stop;
};

#define LOADS 4 // under way at once

// A warp sums the squares of a chunk: eight in float, then in double. Of g * factor, which may be NULL.
ZF_KERNEL zf_chunks(const void *g, zf_i64 number, const float *factor, const Piece *parts, zf_i64 num_parts,
                    zf_i64 chunk, double *sums, zf_u32 *largest) {
    const float f = factor ? *factor : 1.0f;
    const zf_i64 num_chunks = num_parts ? parts[num_parts - 1].stop : 0;
    for (zf_i64 c = warp_of(); c < num_chunks; c += num_warps()) {
        const zf_i64 part = first_past(parts, num_parts, c);
        const zf_i64 first = parts[part].start + (c - (part ? parts[part - 1].stop : 0)) * chunk;
        const zf_i64 end = least(first + chunk, parts[part].end);
        double sum = 0.0;
        zf_u32 top = 0;
        for (zf_i64 at = first + 8 * lane_of(); at < end; at += LOADS * ZF_BLOCK) {
            Eight raw[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                raw[i] = load(g, width_of(number), at + i * ZF_BLOCK, end - at - i * ZF_BLOCK);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                float x[8], squares = 0.0f;
                numbers(raw[i], number, x);
                EACH(k) { // where f is inf, what is not there stays zero
                    const float now = at + i * ZF_BLOCK + k < end ? x[k] * f : 0.0f;
                    const zf_u32 magnitude = zf_bits(now) & ZF_ABS;
                    squares = ZF_FMA(now, now, squares);
                    top = magnitude > top ? magnitude : top;
                }
                sum += squares;
            }
        }
        sum = sum_of_warp(sum), top = largest_of_warp(top);
        if (lane_of() == 0) sums[c] = sum, largest[c] = top;
    }
}

// A warp a part. results: the 2-norm of each, then the largest magnitude of each; NaN counts as more than inf.
ZF_KERNEL zf_norms(const Piece *parts, zf_i64 num_parts, const double *sums, const zf_u32 *largest, float *results) {
    for (zf_i64 part = warp_of(); part < num_parts; part += num_warps()) {
        double sum = 0.0;
        zf_u32 top = 0;
#pragma unroll 8
        for (zf_i64 c = (part ? parts[part - 1].stop : 0) + lane_of(); c < parts[part].stop; c += 32) {
            sum += sums[c];
            top = largest[c] > top ? largest[c] : top;
        }
        sum = sum_of_warp(sum), top = largest_of_warp(top);
        if (lane_of() == 0) results[part] = (float)sqrt(sum), results[num_parts + part] = zf_float(top);
    }
}

/* --- formats ---------------------------------------------------------------------------------------------------- */

#define EACH_EIGHT(at, size)                                                                                           \
    for (zf_i64 at = (warp_of() * 32 + lane_of()) * 8; at < (size); at += num_warps() * ZF_BLOCK)

// lo: NULL where only the upper half is wanted.
ZF_KERNEL zf_split(const void *p, void *hi, void *lo, zf_i64 size) {
    EACH_EIGHT(at, size) {
        const Eight now = load(p, 4, at, size - at);
        Eight high = {}, low = {};
        EACH(k) set_half(high, k, zf_split_hi(zf_splittable(zf_float(now.word[k]))));
        EACH(k) set_half(low, k, zf_split_lo(zf_splittable(zf_float(now.word[k]))));
        store(hi, 2, at, size - at, high);
        if (lo) store(lo, 2, at, size - at, low);
    }
}

ZF_KERNEL zf_joined(const void *hi, const void *lo, void *p, zf_i64 size) {
    EACH_EIGHT(at, size) {
        const Eight high = load(hi, 2, at, size - at), low = load(lo, 2, at, size - at);
        Eight now;
        EACH(k) now.word[k] = zf_bits(joined(high, low, k));
        store(p, 4, at, size - at, now);
    }
}

ZF_KERNEL zf_encode(const void *from, void *codes, zf_u32 *scales, zf_i64 size, zf_i64 is_signed) {
    zf_u32 nearest[8];
    EACH(k) nearest[k] = ZF_NEAREST;
    for (zf_i64 first = warp_of() * ZF_BLOCK; first < size; first += num_warps() * ZF_BLOCK) {
        const zf_i64 at = first + 8 * lane_of();
        float x[8];
        zf_u32 scale;
        numbers(load(from, 4, at, size - at), ZF_FP32, x);
        const Eight found = codes_of(x, (int)is_signed, nearest, &scale);
        store(codes, 1, at, size - at, found);
        if (lane_of() == 0) scales[first / ZF_BLOCK] = scale;
    }
}

ZF_KERNEL zf_decode(const void *codes, const zf_u32 *scales, void *to, zf_i64 size, zf_i64 is_signed) {
    EACH_EIGHT(at, size) {
        float x[8];
        Eight now;
        values(load(codes, 1, at, size - at), scales[at / ZF_BLOCK], (int)is_signed, x);
        EACH(k) now.word[k] = zf_bits(x[k]);
        store(to, 4, at, size - at, now);
    }
}

// fp32, bf16 or fp16 -> fp32, times `factor` (or NULL) -> rounded to fp32, bf16 or fp16.
ZF_KERNEL zf_cast(const void *from, zf_i64 number, const float *factor, void *to, zf_i64 to_number, zf_i64 size) {
    const float f = factor ? *factor : 1.0f;
    EACH_EIGHT(at, size) {
        float x[8];
        Eight now = {};
        numbers(load(from, width_of(number), at, size - at), number, x);
        EACH(k) x[k] *= f;
        if (to_number == ZF_FP32) EACH(k) now.word[k] = zf_bits(x[k]);
        if (to_number == ZF_BF16) EACH(k) set_half(now, k, zf_near_bf16(x[k]));
        if (to_number == ZF_FP16) EACH(k) set_half(now, k, zf_near_fp16(x[k]));
        store(to, width_of(to_number), at, size - at, now);
    }
}

/* --- float8 products -------------------------------------------------------------------------------------------- */

// e5m2 of a gradient, e4m3 of other numbers, ties to even. Of numbers below the least normal one the sum rounds: a float
// of its exponent has no room for what is below their last bit.
ZF_GPU zf_u32 float8_of(float x, bool grad) {
    const int digits = grad ? 2 : 3, drop = 23 - digits, bias = grad ? 15 : 7;
    const zf_u32 bits = zf_bits(x), sign = bits >> 24 & 0x80u, size = bits & ZF_ABS;
    if (size > ZF_INF) return sign | 0x7Fu;
    if (size < (zf_u32)(128 - bias) << 23) {
        const float room = zf_float((zf_u32)(151 - bias - digits) << 23);
        return sign | (zf_bits(zf_float(size) + room) - zf_bits(room));
    }
    const zf_u32 nearest = size + ((1u << (drop - 1)) - 1u) + (size >> drop & 1u);
    return sign | ((nearest >> drop) - ((zf_u32)(127 - bias) << digits));
}

// ops/fp8_products.py's `fp8_scale`, of the largest magnitude.
ZF_KERNEL zf_fp8_scale(const float *top, zf_i64 grad, float *scale) {
    if (warp_of() || lane_of()) return;
    const zf_i32 bits = (zf_i32)zf_bits(*top) + 0x1FFFFF - ((grad ? 15 : 8) << 23), least_one = 27 << 23;
    const float power = zf_float((zf_u32)(bits > least_one ? bits : least_one) & ZF_INF);
    *scale = power + (*top - *top);
}

// Numbers [rows, columns], or codes where there is no scale -> their codes, and the same turned [columns, padded] with
// zeros behind; either may be NULL. A scale is a power of two, so its inverse is exact. A thread takes 8 rows of 8
// columns, a warp 32 rows of 64: it reads 128 bytes of bfloat16 in a row, and writes 64 and, turned, 32.
ZF_KERNEL zf_fp8(const void *x, zf_i64 number, const float *scale, zf_i64 grad, zf_i64 rows, zf_i64 columns,
                 void *codes, void *turned, zf_i64 padded) {
    const float inverse = scale ? 1.0f / *scale : 0.0f;
    const zf_i64 wide = (columns + 63) / 64, high = ((turned ? padded : rows) + 31) / 32;
    for (zf_i64 tile = warp_of(); tile < wide * high; tile += num_warps()) {
        const zf_i64 row = tile / wide * 32 + lane_of() / 8 * 8, column = tile % wide * 64 + lane_of() % 8 * 8;
        const zf_i64 n = columns - column;
        Eight found[8];
        EACH(i) {
            found[i] = {};
            if (row + i >= rows || n <= 0) continue;
            const zf_i64 at = (row + i) * columns + column;
            found[i] = load(x, scale ? width_of(number) : 1, at, n);
            if (scale) {
                float y[8];
                numbers(found[i], number, y);
                EACH(k) set_byte(found[i], k, float8_of(y[k] * inverse, grad));
            }
            if (codes) store(codes, 1, at, n, found[i]);
        }
        if (!turned) continue;
        EACH(k) {
            if (k >= n) continue;
            Eight down = {};
            EACH(i) set_byte(down, i, byte_of(found[i], k));
            store(turned, 1, (column + k) * padded + row, padded - row, down);
        }
    }
}

#include "signs_cuda.h"
