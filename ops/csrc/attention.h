// Attention by tiles: what a caller says of it, and the products that it is made of. See attention.cpp.
#ifndef ZEROFN_ATTENTION_H
#define ZEROFN_ATTENTION_H

#include "vectors.h"

// A tensor [batch, heads, tokens, width], its last dimension contiguous; strides in elements.
typedef struct {
    void *data;
    zf_i64 batch, head, row;
} zf_rows;

typedef struct {
    zf_rows q, k, v, out, grad_out, grad_q, grad_k, grad_v; // gradients come zeroed
    void *lse, *grad_lse; // [batch, heads, num_q], float32, or float64 beside float64; grad_lse may be NULL
    zf_i64 batch, heads, groups, num_q, num_k, width, value_width;
    // Blocks of queries, and which keys each looks at: `index` [batch, heads, blocks, per_block] names blocks of keys;
    // otherwise `runs` [.., 3] of keys: first, how many, and a row of `bits`, or -1 where all queries look at all of
    // them. `starts` [layout_heads, blocks + 1]: where a block's begin. `bits` [.., 64]: for each key the queries.
    zf_i64 block_q, block_k, layout_heads, per_block, most_runs;
    const zf_i32 *starts, *runs;
    const zf_u64 *bits;
    const zf_i64 *index;
    const zf_i32 *spans; // [span_rows, num_q, 2] or NULL: each query's first key, and the one behind its last
    zf_i64 span_rows;
    const zf_u8 *there; // [there_rows, num_k] or NULL: 0 of a key that nobody looks at, such as padding
    zf_i64 there_rows;
    double scale, factor; // `factor`: of what dropout leaves
    zf_u64 seed;
    zf_u32 drop_below; // hashes below it are dropped
    zf_i32 number, causal;
} zf_attention;

namespace {

#if defined(__AVX512F__)
#define ZF_BYTES 64
const int TALL = 6, WIDE = 4; // rows and vectors of a tile of products: as many sums as there are registers
#elif defined(__AVX2__)
#define ZF_BYTES 32
const int TALL = 6, WIDE = 2;
#else
#define ZF_BYTES 16
const int TALL = 6, WIDE = 2;
#endif

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float v __attribute__((vector_size(ZF_BYTES)));
    typedef int32_t i __attribute__((vector_size(ZF_BYTES)));
    typedef uint32_t u __attribute__((vector_size(ZF_BYTES)));
    typedef int32_t integer;
};
template <>
struct Lanes<double> {
    typedef double v __attribute__((vector_size(ZF_BYTES)));
    typedef int64_t i __attribute__((vector_size(ZF_BYTES)));
    typedef uint64_t u __attribute__((vector_size(ZF_BYTES)));
    typedef int64_t integer;
};
template <class T>
constexpr int lanes = ZF_BYTES / (int)sizeof(T);
template <class T>
using Vector = typename Lanes<T>::v;
template <class T>
using Integers = typename Lanes<T>::i;

template <class T>
ZF_FN Vector<T> all(T x) {
    return x - Vector<T>{};
}
template <class T>
ZF_FN Vector<T> loaded(const T *x) {
    Vector<T> now;
    __builtin_memcpy(&now, x, sizeof(now));
    return now;
}
template <class T>
ZF_FN void stored(T *to, Vector<T> x) {
    __builtin_memcpy(to, &x, sizeof(x));
}

#if ZF_BYTES == 64
ZF_FN Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
    return (Vector<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
ZF_FN Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
    return (Vector<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif ZF_BYTES == 32
ZF_FN Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
    return (Vector<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ZF_FN Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
    return (Vector<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
ZF_FN Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
    for (int k = 0; k < lanes<float>; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
    return c;
}
ZF_FN Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
    for (int k = 0; k < lanes<double>; ++k) c[k] = __builtin_fma(a[k], b[k], c[k]);
    return c;
}
#endif

// 2^x to about a bit, 0 where it would be no normal number, for x <= 127. 2^r of |r| <= 1/2 by a polynomial (of float:
// Moshier's, Cephes, exp2f; of double: the series), times a power that is made of bits.
ZF_FN Vector<float> exp2(Vector<float> x) {
    const Vector<float> moved = x + 12582912.0f, r = x - (moved - 12582912.0f);
    Vector<float> y = all(1.535336188319500e-4f);
    y = fma(y, r, all(1.339887440266574e-3f));
    y = fma(y, r, all(9.618437357674640e-3f));
    y = fma(y, r, all(5.550332471162809e-2f));
    y = fma(y, r, all(2.402264791363012e-1f));
    y = fma(y, r, all(6.931472028550421e-1f));
    y = fma(y, r, all(1.0f));
    const Lanes<float>::u power = ((Lanes<float>::u)moved << 23) + 0x3F800000u;
    return x < -126.0f ? Vector<float>{} : y * (Vector<float>)power;
}
ZF_FN Vector<double> exp2(Vector<double> x) {
    static const double series[] = {1.3691488853904128881e-12, 2.5678435993488205142e-11, 4.4455382718708114976e-10,
                                    7.0549116208011233299e-9,  1.0178086009239699728e-7,  1.3215486790144309488e-6,
                                    1.5252733804059840280e-5,  1.5403530393381609954e-4,  1.3333558146428443423e-3,
                                    9.6181291076284771620e-3,  5.5504108664821579953e-2,  2.4022650695910071233e-1,
                                    6.9314718055994530942e-1,  1.0};
    const Vector<double> moved = x + 0x1.8p52, r = x - (moved - 0x1.8p52);
    Vector<double> y = all(series[0]);
    for (int k = 1; k < 14; ++k) y = fma(y, r, all(series[k]));
    const Lanes<double>::u power = ((Lanes<double>::u)moved << 52) + 0x3FF0000000000000u;
    return x < -1022.0 ? Vector<double>{} : y * (Vector<double>)power;
}

// c [M, W vectors] = a [M, num] b [num, W vectors], or added to it, each sum in the order of `num`. `a` has its elements
// `row` and `step` apart.
template <class T, int M, int W>
static __attribute__((noinline)) void tile(const T *a, zf_i64 row, zf_i64 step, const T *b, zf_i64 b_row, T *c,
                                           zf_i64 c_row, zf_i64 num, bool add) {
    Vector<T> sum[M][W];
    const int n = lanes<T>;
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) sum[r][w] = add ? loaded(c + r * c_row + w * n) : Vector<T>{};
    for (; num > 0; --num, a += step, b += b_row) {
        Vector<T> now[W];
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) now[w] = loaded(b + w * n);
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
            const Vector<T> x = all(a[r * row]);
#pragma GCC unroll 16
            for (int w = 0; w < W; ++w) sum[r][w] = fma(x, now[w], sum[r][w]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) stored(c + r * c_row + w * n, sum[r][w]);
}

// A matrix whose elements are `row` and `step` apart.
template <class T>
struct Matrix {
    const T *data;
    zf_i64 row, step;
};

template <class T, int M, int W>
ZF_FN void column(zf_i64 rows, Matrix<T> a, const T *b, zf_i64 b_row, T *c, zf_i64 c_row, zf_i64 num, bool add) {
    const T *from = a.data;
    for (; rows >= M; rows -= M, from += M * a.row, c += M * c_row)
        tile<T, M, W>(from, a.row, a.step, b, b_row, c, c_row, num, add);
    if (rows >= 4) {
        tile<T, 4, W>(from, a.row, a.step, b, b_row, c, c_row, num, add);
        rows -= 4, from += 4 * a.row, c += 4 * c_row;
    }
    for (; rows > 0; --rows, from += a.row, c += c_row)
        tile<T, 1, W>(from, a.row, a.step, b, b_row, c, c_row, num, add);
}

// c [rows, columns] = a [rows, num] b [num, columns], or added to it. `columns`: a multiple of a vector.
template <class T>
void product(zf_i64 rows, zf_i64 columns, zf_i64 num, Matrix<T> a, const T *b, zf_i64 b_row, T *c, zf_i64 c_row,
             bool add) {
    const zf_i64 n = lanes<T>;
    zf_i64 at = 0;
    for (; at + WIDE * n <= columns; at += WIDE * n)
        column<T, TALL, WIDE>(rows, a, b + at, b_row, c + at, c_row, num, add);
    for (; at < columns; at += n) column<T, 2 * TALL, 1>(rows, a, b + at, b_row, c + at, c_row, num, add);
}

} // namespace
#endif
