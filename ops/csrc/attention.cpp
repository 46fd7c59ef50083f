// Attention of queries to the keys that a layout names, forward and backward, by tiles of 64 queries and 64 keys: what
// nobody looks at costs nothing, and no square of scores is kept (Dao et al., FlashAttention, arXiv:2205.14135).
//
// Scores are [keys, queries], so that a query's greatest score, its sum and its mask are arithmetic of whole vectors, and
// no product needs a key or value to be moved: they are read one number at a time, beside vectors of queries. Each sum
// has one order, whatever the instruction set and the number of threads.
#include "attention_keys.h"

#include <math.h>
#include <stdlib.h>

namespace {

const double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

// --- numbers in memory ---------------------------------------------------------------------------

struct Bf16 {
    zf_u16 bits;
};
ZF_FN double number(double x) { return x; }
ZF_FN float number(float x) { return x; }
ZF_FN float number(Bf16 x) {
    zf_u32 bits = (zf_u32)x.bits << 16;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
}
ZF_FN void put_number(double *to, double x) { *to = x; }
ZF_FN void put_number(float *to, float x) { *to = x; }
ZF_FN void put_number(Bf16 *to, float x) { // ties to even, as torch casts
    zf_u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7FC0 : (zf_u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// Memory of one call, in lines of 64 bytes; the first round only counts them.
struct Scratch {
    char *base = nullptr, *whole = nullptr;
    zf_i64 size = 0;
    template <class T>
    T *take(zf_i64 num) {
        T *found = base == nullptr ? nullptr : (T *)(base + size);
        size += rounded(num * (zf_i64)sizeof(T), 64);
        return found;
    }
    void make() {
        whole = (char *)malloc((size_t)size + 64);
        base = (char *)(((uintptr_t)whole + 63) & ~(uintptr_t)63);
        size = 0;
    }
    ~Scratch() { free(whole); }
};

// --- dropout -------------------------------------------------------------------------------------

ZF_FN zf_u32 mixed(zf_u32 x) { // the finaliser of MurmurHash3 (Appleby)
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

// What each weight is multiplied by: 0, or `factor`; by seed, row, head, query and key alone.
template <class T>
void factors(const zf_attention *a, const Place &p, zf_i64 first, zf_i64 num, T *to) {
    zf_u32 row[QUERIES];
    const zf_u32 start = mixed((zf_u32)a->seed + 0x9E3779B9u * (zf_u32)(p.batch * a->heads + p.head));
    for (zf_i64 r = 0; r < p.n; ++r)
        row[r] = mixed(start ^ ((zf_u32)(a->seed >> 32) + 0x85EBCA77u * (zf_u32)(p.first + r)));
    for (zf_i64 k = 0; k < num; ++k)
        for (zf_i64 r = 0; r < p.n; ++r)
            to[k * p.n + r] = mixed(row[r] + 0x9E3779B9u * (zf_u32)(first + k)) < a->drop_below ? (T)0 : (T)a->factor;
}

// --- rows in and out -----------------------------------------------------------------------------

template <class N>
N *at(const zf_rows &x, zf_i64 batch, zf_i64 head, zf_i64 row) {
    return (N *)x.data + batch * x.batch + head * x.head + row * x.row;
}

// to [width, n] = x [rows, width] * by, padded with zeros
template <class N, class T>
void turned(const N *x, zf_i64 row, const Place &p, zf_i64 width, T by, T *to) {
    for (zf_i64 d = 0; d < width; ++d, to += p.n) {
        for (zf_i64 r = 0; r < p.rows; ++r) to[r] = number(x[r * row + d]) * by;
        for (zf_i64 r = p.rows; r < p.n; ++r) to[r] = 0;
    }
}
// to [rows, padded] = x [rows, width] * by
template <class N, class T>
void copied(const N *x, zf_i64 row, zf_i64 rows, zf_i64 width, zf_i64 padded, T by, T *to) {
    for (zf_i64 r = 0; r < rows; ++r, x += row, to += padded) {
        for (zf_i64 d = 0; d < width; ++d) to[d] = number(x[d]) * by;
        for (zf_i64 d = width; d < padded; ++d) to[d] = 0;
    }
}

// Keys or values as products read them: where they lie, if rows follow one another, and else a copy.
template <class N, class T>
struct Reader {
    T *copy;
    zf_i64 width;
    Matrix<T> operator()(const N *x, zf_i64 row, zf_i64 num) const {
        copied(x, row, num, width, width, (T)1, copy);
        return {copy, width, 1};
    }
};
template <class T>
struct Reader<T, T> {
    T *copy;
    zf_i64 width;
    Matrix<T> operator()(const T *x, zf_i64 row, zf_i64 num) const {
        if (row == width) return {x, row, 1};
        copied(x, row, num, width, width, (T)1, copy);
        return {copy, width, 1};
    }
};
template <class T>
ZF_FN Matrix<T> transposed(Matrix<T> x) {
    return {x.data, x.step, x.row};
}

// --- forward -------------------------------------------------------------------------------------

// The weights of a chunk in place of its scores [num, n], relative to the greatest so far, which each query's `top`
// becomes; `sum`, and what is in `out` [width, n], are relative to it, too.
template <class T>
void weigh(T *scores, zf_i64 num, const Place &p, T *top, T *sum, T *out, zf_i64 width) {
    const int n = lanes<T>;
    for (zf_i64 at = 0; at < p.n; at += n) {
        const Vector<T> before = loaded(top + at);
        Vector<T> greatest = before;
        for (zf_i64 k = 0; k < num; ++k) {
            const Vector<T> x = loaded(scores + k * p.n + at);
            greatest = x > greatest ? x : greatest;
        }
        stored(top + at, greatest);
        const Vector<T> base = greatest == all((T)-INFINITY) ? Vector<T>{} : greatest; // no key so far
        Vector<T> total = {};
        for (zf_i64 k = 0; k < num; ++k) {
            const Vector<T> x = exp2(loaded(scores + k * p.n + at) - base);
            total += x;
            stored(scores + k * p.n + at, x);
        }
        bool grew = false;
        for (int i = 0; i < n; ++i) grew |= greatest[i] > before[i];
        if (!grew) {
            stored(sum + at, loaded(sum + at) + total);
            continue;
        }
        const Vector<T> less = exp2(before - base);
        stored(sum + at, fma(loaded(sum + at), less, total));
        for (zf_i64 e = 0; e < width; ++e) stored(out + e * p.n + at, loaded(out + e * p.n + at) * less);
    }
}

template <class N, class T>
void forward(const zf_attention *a, zf_i64 first, zf_i64 last) {
    Scratch memory;
    Run *runs = nullptr;
    T *queries = nullptr, *scores = nullptr, *out = nullptr, *kept = nullptr, *k_copy = nullptr, *v_copy = nullptr;
    for (int round = 0; round < 2; ++round) {
        if (round == 1) memory.make();
        runs = memory.take<Run>(a->most_runs);
        queries = memory.take<T>(a->width * QUERIES), scores = memory.take<T>(KEYS * QUERIES);
        out = memory.take<T>(a->value_width * QUERIES), kept = memory.take<T>(KEYS * QUERIES);
        k_copy = memory.take<T>(KEYS * a->width), v_copy = memory.take<T>(KEYS * a->value_width);
    }
    const Reader<N, T> keys{k_copy, a->width}, values{v_copy, a->value_width};
    const zf_i64 tiles = num_blocks(a) * tiles_of_block(a);
    Span<T> span;
    for (zf_i64 item = first; item < last; ++item) {
        const zf_i64 pair = item / tiles;
        const Place p = place_of(a, pair / a->heads, pair % a->heads, item % tiles, lanes<T>);
        if (p.rows == 0) continue;
        T top[QUERIES], sum[QUERIES];
        for (zf_i64 r = 0; r < p.n; ++r) top[r] = (T)-INFINITY, sum[r] = 0;
        turned(at<N>(a->q, p.batch, p.head, p.first), a->q.row, p, a->width, (T)(a->scale * LOG2E), queries);
        for (zf_i64 i = 0; i < a->value_width * p.n; ++i) out[i] = 0;
        span.find(a, p);
        over_chunks(a, p, runs, runs_of(a, p, runs), span, [&](zf_i64 k, zf_i64 num, const Hidden<T> &by) {
            const Matrix<T> here = keys(at<N>(a->k, p.batch, p.group, k), a->k.row, num);
            product(num, p.n, a->width, here, queries, p.n, scores, p.n, false);
            hide(scores, p, k, num, by);
            weigh(scores, num, p, top, sum, out, a->value_width);
            if (a->drop_below) {
                factors(a, p, k, num, kept);
                for (zf_i64 i = 0; i < num * p.n; ++i) scores[i] *= kept[i];
            }
            const Matrix<T> given = values(at<N>(a->v, p.batch, p.group, k), a->v.row, num);
            product(a->value_width, p.n, num, transposed(given), scores, p.n, out, p.n, true);
        });
        for (zf_i64 r = 0; r < p.rows; ++r) {
            N *to = at<N>(a->out, p.batch, p.head, p.first + r);
            const T by = sum[r] == 0 ? (T)0 : (T)1 / sum[r]; // a row without a key
            for (zf_i64 e = 0; e < a->value_width; ++e) put_number(to + e, out[e * p.n + r] * by);
            ((T *)a->lse)[pair * a->num_q + p.first + r] = (T)(((double)top[r] + log2((double)sum[r])) * LN2);
        }
    }
}

// --- backward ------------------------------------------------------------------------------------

// scores -> weights, and gradients of weights -> of scores, both [num, n]
template <class T>
void differentiate(T *scores, T *grads, zf_i64 num, const Place &p, const T *lse, const T *delta, const T *kept) {
    const int n = lanes<T>;
    for (zf_i64 at = 0; at < p.n; at += n) {
        const Vector<T> base = loaded(lse + at), less = loaded(delta + at);
        for (zf_i64 k = 0; k < num; ++k) {
            const zf_i64 i = k * p.n + at;
            const Vector<T> weight = exp2(loaded(scores + i) - base);
            const Vector<T> factor = kept == nullptr ? all((T)1) : loaded(kept + i);
            stored(grads + i, weight * (loaded(grads + i) * factor - less));
            stored(scores + i, weight * factor);
        }
    }
}

// Where gradients of keys or values are summed: where they belong, or beside and then copied.
template <class T>
struct Sums {
    T *data;
    zf_i64 row;
    bool beside;
};
template <class N, class T>
Sums<T> sums_of(N *to, zf_i64 row, T *beside, zf_i64 size, zf_i64 padded) {
    if (beside == nullptr) return {(T *)to, row, false};
    for (zf_i64 i = 0; i < size * padded; ++i) beside[i] = 0;
    return {beside, padded, true};
}
template <class N, class T>
void put_sums(const Sums<T> &sums, N *to, zf_i64 row, zf_i64 size, zf_i64 width) {
    if (!sums.beside) return;
    for (zf_i64 j = 0; j < size; ++j)
        for (zf_i64 d = 0; d < width; ++d) put_number(to + j * row + d, sums.data[j * sums.row + d]);
}

template <class N, class T>
void backward(const zf_attention *a, zf_i64 first, zf_i64 last) {
    const zf_i64 wide = rounded(a->width, lanes<T>), wide_v = rounded(a->value_width, lanes<T>);
    const bool beside_k = sizeof(N) != sizeof(T) || wide != a->width;
    const bool beside_v = sizeof(N) != sizeof(T) || wide_v != a->value_width;
    Scratch memory;
    Run *runs = nullptr;
    T *queries = nullptr, *rows = nullptr, *grads = nullptr, *grad_rows = nullptr, *scores = nullptr, *back = nullptr;
    T *kept = nullptr, *of_q = nullptr, *of_k = nullptr, *of_v = nullptr, *k_copy = nullptr, *v_copy = nullptr;
    for (int round = 0; round < 2; ++round) {
        if (round == 1) memory.make();
        runs = memory.take<Run>(a->most_runs);
        queries = memory.take<T>(a->width * QUERIES), rows = memory.take<T>(wide * QUERIES);
        grads = memory.take<T>(a->value_width * QUERIES), grad_rows = memory.take<T>(wide_v * QUERIES);
        scores = memory.take<T>(KEYS * QUERIES), back = memory.take<T>(KEYS * QUERIES);
        kept = memory.take<T>(a->drop_below ? KEYS * QUERIES : 0), of_q = memory.take<T>(a->width * QUERIES);
        k_copy = memory.take<T>(KEYS * a->width), v_copy = memory.take<T>(KEYS * a->value_width);
        of_k = beside_k ? memory.take<T>(a->num_k * wide) : nullptr;
        of_v = beside_v ? memory.take<T>(a->num_k * wide_v) : nullptr;
    }
    const Reader<N, T> keys{k_copy, a->width}, values{v_copy, a->value_width};
    const zf_i64 tiles = num_blocks(a) * tiles_of_block(a), each = a->heads / a->groups;
    Span<T> span;
    for (zf_i64 item = first; item < last; ++item) {
        const zf_i64 batch = item / a->groups, group = item % a->groups;
        N *to_k = at<N>(a->grad_k, batch, group, 0), *to_v = at<N>(a->grad_v, batch, group, 0);
        const Sums<T> grad_k = sums_of(to_k, a->grad_k.row, of_k, a->num_k, wide);
        const Sums<T> grad_v = sums_of(to_v, a->grad_v.row, of_v, a->num_k, wide_v);
        for (zf_i64 at_tile = 0; at_tile < each * tiles; ++at_tile) {
            const Place p = place_of(a, batch, group * each + at_tile / tiles, at_tile % tiles, lanes<T>);
            if (p.rows == 0) continue;
            const N *q = at<N>(a->q, batch, p.head, p.first), *dout = at<N>(a->grad_out, batch, p.head, p.first);
            const N *out = at<N>(a->out, batch, p.head, p.first);
            const zf_i64 number_of_row = (batch * a->heads + p.head) * a->num_q + p.first;
            turned(q, a->q.row, p, a->width, (T)(a->scale * LOG2E), queries);
            copied(q, a->q.row, p.rows, a->width, wide, (T)a->scale, rows);
            turned(dout, a->grad_out.row, p, a->value_width, (T)1, grads);
            copied(dout, a->grad_out.row, p.rows, a->value_width, wide_v, (T)1, grad_rows);
            T lse[QUERIES], delta[QUERIES];
            for (zf_i64 r = 0; r < p.n; ++r) {
                lse[r] = (T)INFINITY, delta[r] = 0; // no weight for what fills up, nor for rows without a key
                if (r >= p.rows) continue;
                const T found = ((const T *)a->lse)[number_of_row + r];
                if (found != (T)-INFINITY) lse[r] = (T)((double)found * LOG2E);
                for (zf_i64 e = 0; e < a->value_width; ++e)
                    delta[r] = delta[r] + grads[e * p.n + r] * number(out[r * a->out.row + e]);
                if (a->grad_lse != nullptr) delta[r] -= ((const T *)a->grad_lse)[number_of_row + r];
            }
            for (zf_i64 i = 0; i < a->width * p.n; ++i) of_q[i] = 0;
            span.find(a, p);
            over_chunks(a, p, runs, runs_of(a, p, runs), span, [&](zf_i64 k, zf_i64 num, const Hidden<T> &by) {
                const Matrix<T> here = keys(at<N>(a->k, batch, group, k), a->k.row, num);
                const Matrix<T> given = values(at<N>(a->v, batch, group, k), a->v.row, num);
                product(num, p.n, a->width, here, queries, p.n, scores, p.n, false);
                hide(scores, p, k, num, by);
                product(num, p.n, a->value_width, given, grads, p.n, back, p.n, false);
                if (a->drop_below) factors(a, p, k, num, kept);
                differentiate(scores, back, num, p, lse, delta, a->drop_below ? kept : nullptr);
                const Matrix<T> weights{scores, p.n, 1}, slopes{back, p.n, 1};
                product(num, wide_v, p.rows, weights, grad_rows, wide_v, grad_v.data + k * grad_v.row,
                        grad_v.row, true);
                product(num, wide, p.rows, slopes, rows, wide, grad_k.data + k * grad_k.row, grad_k.row,
                        true);
                product(a->width, p.n, num, transposed(here), back, p.n, of_q, p.n, true);
            });
            for (zf_i64 r = 0; r < p.rows; ++r) {
                N *to = at<N>(a->grad_q, batch, p.head, p.first + r);
                for (zf_i64 d = 0; d < a->width; ++d) put_number(to + d, of_q[d * p.n + r] * (T)a->scale);
            }
        }
        put_sums(grad_k, to_k, a->grad_k.row, a->num_k, a->width);
        put_sums(grad_v, to_v, a->grad_v.row, a->num_k, a->value_width);
    }
}

#define ZF_EACH(function)                                                                                              \
    (a->number == ZF_FP64   ? function<double, double>(a, first, last)                                                 \
     : a->number == ZF_BF16 ? function<Bf16, float>(a, first, last)                                                    \
                            : function<float, float>(a, first, last))

} // namespace

// Tiles [first, last) of queries, of all heads of the first row of a batch, then of the next.
ZF_API void ZF_NAME(zf_attention_forward)(const zf_attention *a, zf_i64 first, zf_i64 last) { ZF_EACH(forward); }

// Heads [first, last) of keys, of all rows of a batch.
ZF_API void ZF_NAME(zf_attention_backward)(const zf_attention *a, zf_i64 first, zf_i64 last) { ZF_EACH(backward); }
