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
#elif defined(__AVX2__)
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) { return (zf_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
ZF_FN zf_f ZF_SQRT(zf_f a) { return (zf_f)_mm256_sqrt_ps((__m256)a); }
#else
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) {
    for (int k = 0; k < ZF_LANES; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
    return c;
}
ZF_FN zf_f ZF_SQRT(zf_f a) {
    for (int k = 0; k < ZF_LANES; ++k) a[k] = __builtin_sqrtf(a[k]);
    return a;
}
#endif
ZF_FN zf_f ZF_FMA(zf_f a, float b, zf_f c) { return ZF_FMA(a, ZF_ALL(b), c); }
ZF_FN zf_f ZF_FMA(float a, zf_f b, zf_f c) { return ZF_FMA(ZF_ALL(a), b, c); }
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, float c) { return ZF_FMA(a, b, ZF_ALL(c)); }
ZF_FN zf_f ZF_FMA(zf_f a, float b, float c) { return ZF_FMA(a, ZF_ALL(b), ZF_ALL(c)); }

// Work goes in pairs of vectors: the elements at even places and those at odd ones. 16-bit numbers come so from
// memory by a shift and a mask, with no lane crossed. Where most are fp32, which would have to be taken apart for it,
// the pair is `straight`: one vector after the other.
#define ZF_PAIR (2 * ZF_LANES)
struct Pair {
    zf_u even, odd;
};

#if ZF_LANES == 16
#define ZF_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ZF_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define ZF_FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZF_SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define ZF_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ZF_ODD 1, 3, 5, 7, 9, 11, 13, 15
#define ZF_FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define ZF_SECOND 4, 12, 5, 13, 6, 14, 7, 15
#endif

ZF_FN zf_u raw(const void *x) {
    zf_u now;
    __builtin_memcpy(&now, x, sizeof(now));
    return now;
}
ZF_FN void put(void *to, zf_u x) { __builtin_memcpy(to, &x, sizeof(x)); }

ZF_FN Pair pair_of(const uint32_t *x) {
    zf_u first = raw(x), second = raw(x + ZF_LANES);
    return {__builtin_shufflevector(first, second, ZF_EVEN), __builtin_shufflevector(first, second, ZF_ODD)};
}
ZF_FN void put_pair(uint32_t *to, Pair x) {
    put(to, __builtin_shufflevector(x.even, x.odd, ZF_FIRST));
    put(to + ZF_LANES, __builtin_shufflevector(x.even, x.odd, ZF_SECOND));
}

ZF_FN Pair pair_of(const uint16_t *x) {
    zf_u both = raw(x);
    return {both & 0xFFFFu, both >> 16};
}
ZF_FN Pair pair_of(const int16_t *x) { // signs extended
    zf_i both = (zf_i)raw(x);
    return {(zf_u)((zf_i)((zf_u)both << 16) >> 16), (zf_u)(both >> 16)};
}
ZF_FN void put_pair(uint16_t *to, Pair x) { put(to, x.even | x.odd << 16); } // both below 2^16

ZF_FN zf_u widened(const uint32_t *x) { return raw(x); }

// Bytes are widened to 16 bits first. GCC's own way of changing the width of vectors takes several steps.
#if ZF_LANES == 16
#define ZF_LOAD256(x) _mm256_loadu_si256((const __m256i *)(x))
ZF_FN zf_u shorts_of(const uint8_t *x) { return (zf_u)_mm512_cvtepu8_epi16(ZF_LOAD256(x)); }
ZF_FN void put_bytes(uint8_t *to, zf_u x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi16_epi8((__m512i)x)); }
ZF_FN zf_u widened(const uint16_t *x) { return (zf_u)_mm512_cvtepu16_epi32(ZF_LOAD256(x)); }
ZF_FN zf_u widened(const int16_t *x) { return (zf_u)_mm512_cvtepi16_epi32(ZF_LOAD256(x)); }
ZF_FN void put_shorts(uint16_t *to, zf_u x, zf_u y) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x));
    _mm256_storeu_si256((__m256i *)to + 1, _mm512_cvtepi32_epi16((__m512i)y));
}
#elif defined(__AVX2__)
#define ZF_LOAD128(x) _mm_loadu_si128((const __m128i *)(x))
ZF_FN zf_u shorts_of(const uint8_t *x) { return (zf_u)_mm256_cvtepu8_epi16(ZF_LOAD128(x)); }
ZF_FN void put_bytes(uint8_t *to, zf_u x) {
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)x, (__m256i)x), 0xD8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(both));
}
ZF_FN zf_u widened(const uint16_t *x) { return (zf_u)_mm256_cvtepu16_epi32(ZF_LOAD128(x)); }
ZF_FN zf_u widened(const int16_t *x) { return (zf_u)_mm256_cvtepi16_epi32(ZF_LOAD128(x)); }
ZF_FN void put_shorts(uint16_t *to, zf_u x, zf_u y) { // packed by halves of vectors, so quarters 0, 2, 1, 3
    put(to, (zf_u)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)y), 0xD8));
}
#else
typedef uint8_t zf_bytes __attribute__((vector_size(ZF_PAIR)));
typedef uint16_t zf_shorts __attribute__((vector_size(2 * ZF_PAIR)));
ZF_FN zf_u shorts_of(const uint8_t *x) {
    zf_bytes now;
    __builtin_memcpy(&now, x, sizeof(now));
    return (zf_u)__builtin_convertvector(now, zf_shorts);
}
ZF_FN void put_bytes(uint8_t *to, zf_u x) {
    zf_bytes now = __builtin_convertvector((zf_shorts)x, zf_bytes);
    __builtin_memcpy(to, &now, sizeof(now));
}
template <class T>
ZF_FN zf_u widened(const T *x) {
    zf_i now;
    for (int k = 0; k < ZF_LANES; ++k) now[k] = x[k];
    return (zf_u)now;
}
ZF_FN void put_shorts(uint16_t *to, zf_u x, zf_u y) {
    for (int k = 0; k < ZF_LANES; ++k) to[k] = (uint16_t)x[k], to[k + ZF_LANES] = (uint16_t)y[k];
}
#endif

ZF_FN Pair pair_of(const uint8_t *x) {
    zf_u both = shorts_of(x);
    return {both & 0xFFFFu, both >> 16};
}
ZF_FN void put_pair(uint8_t *to, Pair x) { put_bytes(to, x.even | x.odd << 16); }

// The same in straight order.
ZF_FN Pair straight_of(const uint32_t *x) { return {raw(x), raw(x + ZF_LANES)}; }
ZF_FN void put_straight(uint32_t *to, Pair x) {
    put(to, x.even);
    put(to + ZF_LANES, x.odd);
}
ZF_FN Pair straight_of(const uint16_t *x) { return {widened(x), widened(x + ZF_LANES)}; }
ZF_FN Pair straight_of(const int16_t *x) { return {widened(x), widened(x + ZF_LANES)}; }
ZF_FN void put_straight(uint16_t *to, Pair x) { put_shorts(to, x.even, x.odd); }
ZF_FN Pair straight_of(const uint8_t *x) { return pair_of(x); } // is not asked for
ZF_FN void put_straight(uint8_t *to, Pair x) { put_pair(to, x); }

// `left` elements where they are fewer than a pair has; the others are zero, and are not stored.
template <bool full, bool straight = false, class T>
ZF_FN Pair load(const T *x, int64_t left) {
    T some[ZF_PAIR] = {};
    if (!full) __builtin_memcpy(some, x, (uint64_t)left * sizeof(T));
    return straight ? straight_of(full ? x : some) : pair_of(full ? x : some);
}
template <bool full, bool straight = false, class T>
ZF_FN void store(T *to, Pair x, int64_t left) {
    T some[ZF_PAIR];
    straight ? put_straight(full ? to : some, x) : put_pair(full ? to : some, x);
    if (!full) __builtin_memcpy(to, some, (uint64_t)left * sizeof(T));
}

template <bool full>
struct Full {
    static const bool value = full;
};
// for (at = 0; at < n; at += ZF_PAIR): body(full, at, left), full pairs first.
template <class Body>
ZF_FN void over(int64_t n, const Body &body) {
    int64_t at = 0;
    for (; at + ZF_PAIR <= n; at += ZF_PAIR) body(Full<true>(), at, (int64_t)ZF_PAIR);
    if (at < n) body(Full<false>(), at, n - at);
}

#include "kernels.h"
#endif
