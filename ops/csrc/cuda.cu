// The GPU's loops over elements. ops/cuda.py hands this to NVRTC with its headers, so no header of CUDA is included.
//
// A warp takes 256 elements at a time, a block of 8-bit codes, and a thread of it 8 in a row: 16 bytes an access where
// memory is aligned to that, single elements elsewhere and at the end. What differs between rules and formats is asked
// once for 8 elements, by all threads alike: memory is what such a kernel waits for, and one kernel is soon compiled.
// What changes from step to step is read on the device, so that no launch waits for a number. Kernels take pointers,
// 64-bit integers and doubles alone.
#include "kernels.h"

#define ZF_KERNEL extern "C" __global__ void __launch_bounds__(256)
#define ZF_GPU static __device__ __forceinline__
#define EACH(k) _Pragma("unroll") for (int k = 0; k < 8; ++k)
#define ALL_LANES 0xFFFFFFFFu

ZF_GPU int lane_of() { return (int)(threadIdx.x % 32); }
ZF_GPU zf_i64 warp_of() { return ((zf_i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; }
ZF_GPU zf_i64 num_warps() { return (zf_i64)gridDim.x * blockDim.x / 32; }
ZF_GPU zf_i64 least(zf_i64 a, zf_i64 b) { return a < b ? a : b; }
ZF_GPU zf_i64 most(zf_i64 a, zf_i64 b) { return a > b ? a : b; }
ZF_GPU int width_of(zf_i64 number) { return number == ZF_FP32 ? 4 : 2; }

ZF_GPU zf_u32 largest_of_warp(zf_u32 x) {
    for (int step = 16; step; step /= 2) {
        zf_u32 other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

ZF_GPU double sum_of_warp(double x) { // in one order, whatever the device
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The first of a list whose `stop` is past `at`.
template <class T>
ZF_GPU zf_i64 first_past(const T *list, zf_i64 num, zf_i64 at) {
    zf_i64 low = 0;
    while (low < num) {
        zf_i64 middle = (low + num) / 2;
        if (list[middle].stop > at)
            num = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* --- eight elements of 1, 2 or 4 bytes, as they lie in memory --------------------------------------------------- */

struct Eight {
    zf_u32 word[8];
};

ZF_GPU zf_u32 half_of(const Eight &e, int k) { return e.word[k / 2] >> 16 * (k % 2) & 0xFFFFu; }
ZF_GPU zf_u32 byte_of(const Eight &e, int k) { return e.word[k / 4] >> 8 * (k % 4) & 0xFFu; }
ZF_GPU void set_half(Eight &e, int k, zf_u32 x) { e.word[k / 2] ^= (half_of(e, k) ^ x) << 16 * (k % 2); }
ZF_GPU void set_byte(Eight &e, int k, zf_u32 x) { e.word[k / 4] ^= (byte_of(e, k) ^ x) << 8 * (k % 4); }
ZF_GPU bool one_access(const void *x, int width) { return (zf_u64)x % (width == 1 ? 8 : 16) == 0; }

// Elements [at, at + n), 8 of them at most; n may be negative. The others are zero.
ZF_GPU Eight load(const void *all, int width, zf_i64 at, zf_i64 n) {
    Eight e = {};
    const void *x = (const char *)all + at * width;
    if (n >= 8 && one_access(x, width)) {
        if (width == 1) {
            uint2 now = *(const uint2 *)x;
            e.word[0] = now.x, e.word[1] = now.y;
            return e;
        }
        uint4 now = *(const uint4 *)x;
        e.word[0] = now.x, e.word[1] = now.y, e.word[2] = now.z, e.word[3] = now.w;
        if (width == 2) return e;
        now = ((const uint4 *)x)[1];
        e.word[4] = now.x, e.word[5] = now.y, e.word[6] = now.z, e.word[7] = now.w;
        return e;
    }
    EACH(k) {
        if (k >= n) continue;
        if (width == 4) e.word[k] = ((const zf_u32 *)x)[k];
        if (width == 2) set_half(e, k, ((const zf_u16 *)x)[k]);
        if (width == 1) set_byte(e, k, ((const zf_u8 *)x)[k]);
    }
    return e;
}

// A warp's 8 elements of 4 bytes are stored by pairs of threads: both write 16 bytes of one's 32, then of the other's,
// so that memory gets its 32 at a time.
ZF_GPU void store_in_pairs(void *all, zf_i64 at, const Eight &e) {
    const bool odd = lane_of() % 2;
    uint4 *const x = (uint4 *)((char *)all + (at - 8 * odd) * 4) + odd;
    zf_u32 mine[4], other[4]; // of the even thread's elements, and of the odd one's
    for (int k = 0; k < 4; ++k) {
        const zf_u32 got = __shfl_xor_sync(ALL_LANES, odd ? e.word[k] : e.word[k + 4], 1);
        mine[k] = odd ? got : e.word[k], other[k] = odd ? e.word[k + 4] : got;
    }
    x[0] = make_uint4(mine[0], mine[1], mine[2], mine[3]);
    x[2] = make_uint4(other[0], other[1], other[2], other[3]);
}

ZF_GPU void store(void *all, int width, zf_i64 at, zf_i64 n, const Eight &e) {
    void *x = (char *)all + at * width;
    if (width == 4 && n + 8 * lane_of() >= ZF_BLOCK && one_access(all, width)) return store_in_pairs(all, at, e);
    if (n >= 8 && one_access(x, width)) {
        if (width == 1)
            *(uint2 *)x = make_uint2(e.word[0], e.word[1]);
        else
            *(uint4 *)x = make_uint4(e.word[0], e.word[1], e.word[2], e.word[3]);
        if (width == 4) ((uint4 *)x)[1] = make_uint4(e.word[4], e.word[5], e.word[6], e.word[7]);
        return;
    }
    EACH(k) {
        if (k >= n) continue;
        if (width == 4) ((zf_u32 *)x)[k] = e.word[k];
        if (width == 2) ((zf_u16 *)x)[k] = (zf_u16)half_of(e, k);
        if (width == 1) ((zf_u8 *)x)[k] = (zf_u8)byte_of(e, k);
    }
}

ZF_GPU void numbers(const Eight &e, zf_i64 number, float *x) {
    if (number == ZF_FP32) EACH(k) x[k] = zf_float(e.word[k]);
    if (number == ZF_BF16) EACH(k) x[k] = zf_from_bf16(half_of(e, k));
    if (number == ZF_FP16) EACH(k) x[k] = zf_from_fp16(half_of(e, k));
}

ZF_GPU float joined(const Eight &hi, const Eight &lo, int k) { return zf_join(half_of(hi, k), (zf_i16)half_of(lo, k)); }

ZF_GPU void values(const Eight &codes, zf_u32 scale, int is_signed, float *x) {
    zf_w base = zf_base(scale, is_signed);
    EACH(k) {
        const zf_u32 code = is_signed ? (zf_u32)(zf_i8)byte_of(codes, k) : byte_of(codes, k);
        x[k] = zf_float(zf_value(code, base, is_signed) << 16);
    }
}

// The codes of this thread's part of the warp's block, and the scale of all of it; both to be stored.
ZF_GPU Eight codes_of(const float *x, int is_signed, const zf_u32 *random, zf_u32 *scale) {
    Eight codes = {};
    zf_w next[8], largest = 0;
    EACH(k) {
        next[k] = zf_to_step(zf_float(zf_splittable(x[k])), random[k]) >> 16;
        largest = zf_size(next[k], is_signed) > largest ? zf_size(next[k], is_signed) : largest;
    }
    *scale = zf_scale(largest_of_warp(largest));
    zf_w base = zf_base(*scale, is_signed);
    EACH(k) set_byte(codes, k, *scale < ZF_INF ? zf_code(next[k], base, is_signed) : ZF_TOP(is_signed));
    return codes;
}

/* --- update rules ----------------------------------------------------------------------------------------------- */

struct Constants { // of a run, as they are known beforehand
    zf_i64 start, stop;
    double rate, decay;
};
static_assert(sizeof(Constants) == 32 && sizeof(zf_run) == 64, "ops/cuda.py allocates them");

// ops/arguments.py's `rates_of`, in double. `pow` is off by an ulp or two of double, and the host's by less than one,
// so a constant, rounded to float, differs from the host's once in many million counts.
ZF_KERNEL zf_runs(const Constants *in, zf_run *out, zf_i64 num, zf_i64 rule, zf_i64 decoupled, double b1, double b2,
                  double eps, zf_i64 nesterov, const zf_i64 *count, const double *lr) {
    for (zf_i64 i = warp_of() * 32 + lane_of(); i < num; i += num_warps() * 32) {
        double rate = lr ? *lr * in[i].rate : in[i].rate, root = 1.0;
        zf_rates r = {};
        r.shrink = (float)(decoupled ? 1.0 - rate * in[i].decay : 1.0);
        r.l2 = (float)(decoupled ? 0.0 : in[i].decay);
        if (rule == ZF_ADAM) {
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
    if (rule == ZF_ADAM && inside == 0xFFu && tail == 8) { // nothing is asked between elements: their steps overlap
        if (lossy)
            EACH(k) p[k] = zf_adam_lossy(p[k], g[k], m + k, v + k, &r);
        else
            EACH(k) p[k] = zf_adam(p[k], g[k], m + k, v + k, &r, 0);
        return;
    }
#define INSIDE EACH(k) if (inside >> k & 1u) p[k] =
    if (rule == ZF_ADAM && !lossy) INSIDE zf_adam(p[k], g[k], m + k, v + k, &r, k >= tail);
    if (rule == ZF_ADAM && lossy) INSIDE zf_adam_lossy(p[k], g[k], m + k, v + k, &r);
    if (rule == ZF_LION) INSIDE zf_lion(p[k], g[k], m + k, &r);
    if (rule == ZF_SGD) INSIDE zf_sgd(p[k], g[k], &r);
    if (rule == ZF_SGD_MOMENTUM) INSIDE zf_sgd_momentum(p[k], g[k], m + k, &r);
#undef INSIDE
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
        write(of_m, m_now, inside, seed, (zf_u32)draws), write(of_v, v_now, inside, seed, (zf_u32)draws);
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

// Ties to even, as torch casts; a NaN becomes the quiet one.
ZF_GPU zf_u32 bf16_of(float x) {
    const zf_u32 bits = zf_bits(x);
    return (bits & ZF_ABS) > ZF_INF ? (ZF_NAN >> 16) : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

// The sum rounds: a float of its exponent has no room for the 13 bits below a float16's last, or those below 2^-24.
ZF_GPU zf_u32 fp16_of(float x) {
    const zf_u32 bits = zf_bits(x), sign = bits >> 16 & 0x8000u, size = bits & ZF_ABS;
    if (size > ZF_INF) return sign | 0x7E00u;
    if (size >= 0x477FF000u) return sign | 0x7C00u; // 65520, halfway between the largest and what would come after it
    const zf_u32 power = (size & ZF_INF) < 0x38800000u ? 0x38800000u : size & ZF_INF; // 2^-14, the least normal one
    const float room = zf_float(power + 0x06800000u);                                // 2^13 times it
    const zf_u32 digits = zf_bits(zf_float(size) + room) - zf_bits(room);
    return sign | ((power - 0x38800000u >> 13) + digits);
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
        if (to_number == ZF_BF16) EACH(k) set_half(now, k, bf16_of(x[k]));
        if (to_number == ZF_FP16) EACH(k) set_half(now, k, fp16_of(x[k]));
        store(to, width_of(to_number), at, size - at, now);
    }
}
