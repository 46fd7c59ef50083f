// The CPU's vectors: what formats.h computes with, and loads and stores that change the width of numbers.
#ifndef ZEROFN_VECTORS_H
#define ZEROFN_VECTORS_H

#include <stdint.h>
#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized" // GCC 12 finds it in its own intrinsics
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__AVX512F__) && !defined(ZF_EIGHT_LANES)
#define ZF_LANES 16
#else
#define ZF_LANES 8 // two registers, or four, where the machine has narrower ones
#endif

typedef float zf_f __attribute__((vector_size(4 * ZF_LANES)));
typedef uint32_t zf_u __attribute__((vector_size(4 * ZF_LANES)));
typedef int32_t zf_i __attribute__((vector_size(4 * ZF_LANES)));
typedef uint16_t zf_w __attribute__((vector_size(4 * ZF_LANES)));

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
ZF_FN zf_f ZF_LEAST(zf_f a, zf_f b) { return (zf_f)_mm512_min_ps((__m512)a, (__m512)b); }
ZF_FN zf_w ZF_LESS(zf_w a, zf_w b) { return (zf_w)_mm512_subs_epu16((__m512i)a, (__m512i)b); }
ZF_FN zf_w larger(zf_w a, zf_w b) { return (zf_w)_mm512_max_epu16((__m512i)a, (__m512i)b); }
ZF_FN zf_w merged(zf_u even, zf_u odd) {
    return (zf_w)_mm512_mask_blend_epi16(0x55555555, (__m512i)odd, (__m512i)even);
}
#elif defined(__AVX2__)
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) { return (zf_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
ZF_FN zf_f ZF_SQRT(zf_f a) { return (zf_f)_mm256_sqrt_ps((__m256)a); }
ZF_FN zf_f ZF_LEAST(zf_f a, zf_f b) { return (zf_f)_mm256_min_ps((__m256)a, (__m256)b); }
ZF_FN zf_w ZF_LESS(zf_w a, zf_w b) { return (zf_w)_mm256_subs_epu16((__m256i)a, (__m256i)b); }
ZF_FN zf_w larger(zf_w a, zf_w b) { return (zf_w)_mm256_max_epu16((__m256i)a, (__m256i)b); }
ZF_FN zf_w merged(zf_u even, zf_u odd) { return (zf_w)_mm256_blend_epi16((__m256i)odd, (__m256i)even, 0x55); }
#else
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, zf_f c) {
    for (int k = 0; k < ZF_LANES; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
    return c;
}
ZF_FN zf_f ZF_SQRT(zf_f a) {
    for (int k = 0; k < ZF_LANES; ++k) a[k] = __builtin_sqrtf(a[k]);
    return a;
}
ZF_FN zf_f ZF_LEAST(zf_f a, zf_f b) { return a < b ? a : b; }
ZF_FN zf_w ZF_LESS(zf_w a, zf_w b) { return a > b ? a - b : zf_w{}; }
ZF_FN zf_w larger(zf_w a, zf_w b) { return a > b ? a : b; }
ZF_FN zf_w merged(zf_u even, zf_u odd) { return (zf_w)((even & 0xFFFFu) | (odd & 0xFFFF0000u)); }
#endif
ZF_FN zf_f ZF_FMA(zf_f a, float b, zf_f c) { return ZF_FMA(a, ZF_ALL(b), c); }
ZF_FN zf_f ZF_FMA(float a, zf_f b, zf_f c) { return ZF_FMA(ZF_ALL(a), b, c); }
ZF_FN zf_f ZF_FMA(zf_f a, zf_f b, float c) { return ZF_FMA(a, b, ZF_ALL(c)); }
ZF_FN zf_f ZF_FMA(zf_f a, float b, float c) { return ZF_FMA(a, ZF_ALL(b), ZF_ALL(c)); }

ZF_FN uint32_t largest_of(zf_i x) { // none negative
#if ZF_LANES == 16
    return (uint32_t)_mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
#else
    int32_t top = 0;
    for (int k = 0; k < ZF_LANES; ++k) top = x[k] > top ? x[k] : top;
    return (uint32_t)top;
#endif
}
ZF_FN uint16_t largest_of(zf_w x) {
#if defined(__AVX2__)
#if ZF_LANES == 16
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
    __m256i half = (__m256i)x;
#endif
    __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return (uint16_t)~_mm_cvtsi128_si32(_mm_minpos_epu16(~eight));
#else
    uint16_t top = 0;
    for (int k = 0; k < 2 * ZF_LANES; ++k) top = x[k] > top ? x[k] : top;
    return top;
#endif
}

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

// Outputs that are larger than caches are written past them (`far`): a common store first reads from memory the line
// that it overwrites. The address must be a multiple of a vector's bytes (`can_be_far`). `finish_far` comes before
// another thread reads.
ZF_FN bool can_be_far(const void *to) { return (uintptr_t)to % sizeof(zf_u) == 0; }
ZF_FN void put(void *to, zf_u x, bool far) {
#if defined(__AVX2__)
#if ZF_LANES == 16
    if (far) return _mm512_stream_si512((__m512i *)to, (__m512i)x);
#else
    if (far) return _mm256_stream_si256((__m256i *)to, (__m256i)x);
#endif
#endif
    (void)far;
    put(to, x);
}
ZF_FN void finish_far(bool far) {
#if defined(__AVX2__)
    if (far) _mm_sfence();
#endif
    (void)far;
}

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
#if ZF_LANES == 16
    zf_u even = (zf_u)_mm512_madd_epi16((__m512i)both, _mm512_set1_epi32(1)); // products with 1 and 0
#elif defined(__AVX2__)
    zf_u even = (zf_u)_mm256_madd_epi16((__m256i)both, _mm256_set1_epi32(1));
#else
    zf_u even = (zf_u)((zf_i)((zf_u)both << 16) >> 16);
#endif
    return {even, (zf_u)(both >> 16)};
}
ZF_FN void put_pair(uint16_t *to, Pair x) { put(to, (zf_u)merged(x.even, x.odd << 16)); } // the lower halves

// The upper halves of a pair, and the pair that has them, its lower halves zero.
ZF_FN zf_w upper(Pair x) { return merged(x.even >> 16, x.odd); }
ZF_FN Pair raised(zf_w x) { return {(zf_u)x << 16, (zf_u)x & 0xFFFF0000u}; }

ZF_FN zf_u widened(const uint32_t *x) { return raw(x); }

// Bytes are widened to 16 bits, signed ones with their sign; two vectors of words are narrowed to one of bytes. GCC's
// own way of changing the width of vectors takes several steps.
ZF_FN zf_w words_of(const uint16_t *x) { return (zf_w)raw(x); }
#if ZF_LANES == 16
#define ZF_LOAD256(x) _mm256_loadu_si256((const __m256i *)(x))
ZF_FN zf_w words_of(const uint8_t *x) { return (zf_w)_mm512_cvtepu8_epi16(ZF_LOAD256(x)); }
ZF_FN zf_w words_of(const int8_t *x) { return (zf_w)_mm512_cvtepi8_epi16(ZF_LOAD256(x)); }
ZF_FN void put_bytes(uint8_t *to, zf_w x, zf_w y) { // packed by quarters of vectors
    __m512i packed = _mm512_packus_epi16((__m512i)x, (__m512i)y), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    put(to, (zf_u)_mm512_permutexvar_epi64(order, packed));
}
ZF_FN zf_u widened(const uint16_t *x) { return (zf_u)_mm512_cvtepu16_epi32(ZF_LOAD256(x)); }
ZF_FN zf_u widened(const uint8_t *x) { return (zf_u)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)); }
ZF_FN zf_u widened(const int8_t *x) { return (zf_u)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)); }
ZF_FN zf_u widened(const int16_t *x) { return (zf_u)_mm512_cvtepi16_epi32(ZF_LOAD256(x)); }
ZF_FN void put_shorts(uint16_t *to, zf_u x, zf_u y, bool far = false) {
    __m512i packed = _mm512_packus_epi32((__m512i)x, (__m512i)y), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    put(to, (zf_u)_mm512_permutexvar_epi64(order, packed), far);
}
ZF_FN void put_low_bytes(uint8_t *to, const zf_u *x, bool far = false) { // of four vectors, packed by their quarters
    __m512i part[4];
    for (int k = 0; k < 4; ++k) part[k] = (__m512i)(x[k] & 0xFFu);
    __m512i first = _mm512_packus_epi32(part[0], part[1]), second = _mm512_packus_epi32(part[2], part[3]);
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    put(to, (zf_u)_mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second)), far);
}
#elif defined(__AVX2__)
#define ZF_LOAD128(x) _mm_loadu_si128((const __m128i *)(x))
ZF_FN zf_w words_of(const uint8_t *x) { return (zf_w)_mm256_cvtepu8_epi16(ZF_LOAD128(x)); }
ZF_FN zf_w words_of(const int8_t *x) { return (zf_w)_mm256_cvtepi8_epi16(ZF_LOAD128(x)); }
ZF_FN void put_bytes(uint8_t *to, zf_w x, zf_w y) { // packed by halves of vectors, so quarters 0, 2, 1, 3
    put(to, (zf_u)_mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)x, (__m256i)y), 0xD8));
}
ZF_FN zf_u widened(const uint16_t *x) { return (zf_u)_mm256_cvtepu16_epi32(ZF_LOAD128(x)); }
ZF_FN zf_u widened(const uint8_t *x) { return (zf_u)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)); }
ZF_FN zf_u widened(const int8_t *x) { return (zf_u)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)); }
ZF_FN zf_u widened(const int16_t *x) { return (zf_u)_mm256_cvtepi16_epi32(ZF_LOAD128(x)); }
ZF_FN void put_shorts(uint16_t *to, zf_u x, zf_u y, bool far = false) {
    put(to, (zf_u)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)y), 0xD8), far);
}
ZF_FN void put_low_bytes(uint8_t *to, const zf_u *x, bool far = false) { // packed by halves of vectors
    __m256i part[4];
    for (int k = 0; k < 4; ++k) part[k] = (__m256i)(x[k] & 0xFFu);
    __m256i first = _mm256_packus_epi32(part[0], part[1]), second = _mm256_packus_epi32(part[2], part[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    put(to, (zf_u)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order), far);
}
#else
template <class T>
ZF_FN zf_w words_of(const T *x) {
    zf_w now;
    for (int k = 0; k < 2 * ZF_LANES; ++k) now[k] = (uint16_t)x[k];
    return now;
}
ZF_FN void put_bytes(uint8_t *to, zf_w x, zf_w y) {
    for (int k = 0; k < 2 * ZF_LANES; ++k) to[k] = (uint8_t)x[k], to[k + 2 * ZF_LANES] = (uint8_t)y[k];
}
template <class T>
ZF_FN zf_u widened(const T *x) {
    zf_i now;
    for (int k = 0; k < ZF_LANES; ++k) now[k] = x[k];
    return (zf_u)now;
}
ZF_FN void put_shorts(uint16_t *to, zf_u x, zf_u y, bool = false) {
    for (int k = 0; k < ZF_LANES; ++k) to[k] = (uint16_t)x[k], to[k + ZF_LANES] = (uint16_t)y[k];
}
ZF_FN void put_low_bytes(uint8_t *to, const zf_u *x, bool = false) {
    for (int k = 0; k < 4 * ZF_LANES; ++k) to[k] = (uint8_t)x[k / ZF_LANES][k % ZF_LANES];
}
#endif

// The same in straight order.
ZF_FN Pair straight_of(const uint32_t *x) { return {raw(x), raw(x + ZF_LANES)}; }
ZF_FN void put_straight(uint32_t *to, Pair x, bool far = false) {
    put(to, x.even, far);
    put(to + ZF_LANES, x.odd, far);
}
ZF_FN Pair straight_of(const uint16_t *x) { return {widened(x), widened(x + ZF_LANES)}; }
ZF_FN Pair straight_of(const int16_t *x) { return {widened(x), widened(x + ZF_LANES)}; }
ZF_FN void put_straight(uint16_t *to, Pair x, bool far = false) { put_shorts(to, x.even, x.odd, far); } // below 2^16

// What is read from here on next. Streams of 16 bits are asked for far ahead, into the second cache: the first one has
// places for too few lines that are on their way. Where arithmetic takes longer than memory, the first cache is better.
template <bool far, int bytes = far ? 2048 : 512>
ZF_FN void soon(const void *x) {
    far ? __builtin_prefetch((const char *)x + bytes, 0, 2) : __builtin_prefetch((const char *)x + bytes, 0, 3);
}

// `left` elements where they are fewer than a pair has; the others are zero, and are not stored.
template <bool full, bool straight = false, class T>
ZF_FN Pair load(const T *x, int64_t left) {
    T some[ZF_PAIR] = {};
    if (!full) __builtin_memcpy(some, x, (uint64_t)left * sizeof(T));
    return straight ? straight_of(full ? x : some) : pair_of(full ? x : some);
}
template <bool full, bool straight = false, class T>
ZF_FN void store(T *to, Pair x, int64_t left, bool far = false) { // `far`: straight ones
    T some[ZF_PAIR];
    straight ? put_straight(full ? to : some, x, full && far) : put_pair(full ? to : some, x);
    if (!full) __builtin_memcpy(to, some, (uint64_t)left * sizeof(T));
}

template <bool full, class T>
ZF_FN zf_w load_words(const T *x, int64_t left) {
    T some[ZF_PAIR] = {};
    if (!full) __builtin_memcpy(some, x, (uint64_t)left * sizeof(T));
    return words_of(full ? x : some);
}
template <bool full>
ZF_FN void store_words(uint16_t *to, zf_w x, int64_t left) {
    __builtin_memcpy(to, &x, full ? sizeof(x) : (uint64_t)left * 2);
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
// over(n, EACH { ... }): a body for elements from i on, `left` of them, a whole pair if FULL.
#define EACH [&](auto full_, int64_t i, int64_t left) __attribute__((always_inline))
#define FULL decltype(full_)::value

#include "kernels.h"

// A function of the library, for one instruction set.
#define ZF_JOIN_(a, b) a##_##b
#define ZF_JOIN(a, b) ZF_JOIN_(a, b)
#define ZF_NAME(name) ZF_JOIN(name, ZF_ISA)
#define ZF_API extern "C" __attribute__((visibility("default")))
#endif
