// The CPU's vectors: what formats.h computes with, and loads and stores that change the width of numbers.
#ifndef ZEROFN_VECTORS_H
#define ZEROFN_VECTORS_H

#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && !defined(ZF_EIGHT_LANES)
#define ZF_LANES 16
#else
#define ZF_LANES 8 // two registers, or four, where the machine has narrower ones
#endif

typedef float zf_f __attribute__((vector_size(4 * ZF_LANES)));
typedef uint32_t zf_u __attribute__((vector_size(4 * ZF_LANES)));
typedef int32_t zf_i __attribute__((vector_size(4 * ZF_LANES)));

#define ZF_VECTORS
#define ZF_FN static inline __attribute__((always_inline))
#define ZF_DIV(a, b) ((a) / (b))

ZF_FN zf_f ZF_ALL(float x) { return x - zf_f{}; }
ZF_FN zf_u ZF_ALL(uint32_t x) { return x - zf_u{}; }
ZF_FN zf_u zf_bits(zf_f x) { return (zf_u)x; }
ZF_FN zf_f zf_float(zf_u bits) { return (zf_f)bits; }

#if ZF_LANES == 16
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) { return (zf_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
ZF_FN zf_f ZF_SQRT(zf_f a) { return (zf_f)_mm512_sqrt_ps((__m512)a); }
ZF_FN zf_u zf_widen(const uint16_t *x) { return (zf_u)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)); }
ZF_FN zf_u zf_widen(const uint8_t *x) { return (zf_u)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)); }
ZF_FN void zf_narrow(uint16_t *to, zf_u x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x));
}
ZF_FN void zf_narrow(uint8_t *to, zf_u x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)x)); }
#elif defined(__AVX2__)
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) { return (zf_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
ZF_FN zf_f ZF_SQRT(zf_f a) { return (zf_f)_mm256_sqrt_ps((__m256)a); }
ZF_FN zf_u zf_widen(const uint16_t *x) { return (zf_u)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)); }
ZF_FN zf_u zf_widen(const uint8_t *x) { return (zf_u)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)); }
ZF_FN __m128i zf_halves(zf_u x) { // numbers below 2^16
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}
ZF_FN void zf_narrow(uint16_t *to, zf_u x) { _mm_storeu_si128((__m128i *)to, zf_halves(x)); }
ZF_FN void zf_narrow(uint8_t *to, zf_u x) {
    __m128i half = zf_halves(x);
    _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(half, half));
}
#else
#define EACH_LANE for (int k = 0; k < ZF_LANES; ++k)
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) {
    EACH_LANE c[k] = __builtin_fmaf(a[k], b[k], c[k]);
    return c;
}
ZF_FN zf_f ZF_SQRT(zf_f a) {
    EACH_LANE a[k] = __builtin_sqrtf(a[k]);
    return a;
}
template <class T>
ZF_FN zf_u zf_widen(const T *from) {
    zf_u x;
    EACH_LANE x[k] = from[k];
    return x;
}
template <class T>
ZF_FN void zf_narrow(T *to, zf_u x) {
    EACH_LANE to[k] = (T)x[k];
}
#endif
ZF_FN zf_f ZF_FMA(zf_f a, float b, zf_f c) { return ZF_FMA(a, ZF_ALL(b), c); }
ZF_FN zf_f ZF_FMA(float a, zf_f b, zf_f c) { return ZF_FMA(ZF_ALL(a), b, c); }
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, float c) { return ZF_FMA(a, b, ZF_ALL(c)); }
ZF_FN zf_f ZF_FMA(zf_f a, float b, float c) { return ZF_FMA(a, ZF_ALL(b), ZF_ALL(c)); }

ZF_FN zf_u zf_widen(const uint32_t *x) {
    zf_u now;
    __builtin_memcpy(&now, x, sizeof(now));
    return now;
}
ZF_FN void zf_narrow(uint32_t *to, zf_u x) { __builtin_memcpy(to, &x, sizeof(x)); }

// `left` elements where they are fewer than lanes; the other lanes are zero, and are not stored.
template <bool full, class T>
ZF_FN zf_u load(const T *x, int64_t left) {
    if (full) return zf_widen(x);
    T some[ZF_LANES] = {};
    __builtin_memcpy(some, x, (uint64_t)left * sizeof(T));
    return zf_widen(some);
}
template <bool full, class T>
ZF_FN void store(T *to, zf_u x, int64_t left) {
    if (full) return zf_narrow(to, x);
    T some[ZF_LANES];
    zf_narrow(some, x);
    __builtin_memcpy(to, some, (uint64_t)left * sizeof(T));
}

// for (at = 0; at < n; at += lanes): body(full, at, left), full vectors first.
template <bool full>
struct Full {
    static const bool value = full;
};
template <class Body>
ZF_FN void over(int64_t n, const Body &body) {
    int64_t at = 0;
    for (; at + ZF_LANES <= n; at += ZF_LANES) body(Full<true>(), at, (int64_t)ZF_LANES);
    if (at < n) body(Full<false>(), at, n - at);
}

#include "kernels.h"
#endif
