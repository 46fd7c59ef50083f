/* The C interface of the library. Every function exists once for each instruction set, its name ending in it. */
#ifndef ZEROFN_KERNELS_H
#define ZEROFN_KERNELS_H

#include "rules.h"

#define ZF_VERSION 11 /* of this interface; ops/native.py asks for the same */

enum zf_number { ZF_FP32, ZF_BF16, ZF_FP16, ZF_FP64, ZF_ROWS /* of signs, of which the sum is meant */ };
enum zf_moment { ZF_WHOLE, ZF_HALF, ZF_BLOCKS };

typedef struct {
    zf_i64 start, stop; /* elements of the shard */
    zf_rates rates;
} zf_run;

typedef struct {
    zf_i32 rule, g_number, format; /* zf_rule, zf_number, zf_moment of m and v */
    float factors[2];              /* the gradient is multiplied by one, then by the other */
    void *p, *lo;                  /* fp32 and NULL, or the two halves */
    const void *g;
    void *moments[2];
    float *scales[2];
    zf_u64 key;
    zf_i64 offset, size, num_runs; /* offset: of element 0 in its unit, for the hash */
    const zf_run *runs;            /* in order, apart */
} zf_update_args;

typedef struct { /* rows of signs: of each, the codes of its blocks, then their scales (wire.h) */
    zf_i64 bytes, blocks, block; /* of a row, to the next one; of a row; elements of a block */
    const zf_i64 *gaps;          /* elements [a, b), in order: they count in no scale, and arrive as zeros */
    zf_i64 num_gaps;
} zf_sign_rows;

/* Of each element: x = added * by + ((s * of_signs + (before - s) * of_rest) + left), where s is `before` as signs. x is
 * sent as signs, and `rest` becomes what these lack; it may be `left`. */
typedef struct {
    zf_sign_rows rows;
    zf_i32 added_number, before_came; /* zf_number; whether `before` are rows, else fp32 */
    const void *added;
    zf_i64 num_added; /* rows whose sum is added */
    const void *before;
    const zf_u32 *left;
    zf_u32 *rest;
    zf_u8 *sent; /* rows */
    float by, of_signs, of_rest;
} zf_sign_mix_args;

#endif
