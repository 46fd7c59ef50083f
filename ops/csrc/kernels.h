/* The C interface of the library. Every function exists once for each instruction set, its name ending in it. */
#ifndef ZEROFN_KERNELS_H
#define ZEROFN_KERNELS_H

#include "rules.h"

#define ZF_VERSION 8 /* of this interface; ops/cpu.py asks for the same */

enum zf_number { ZF_FP32, ZF_BF16, ZF_FP16, ZF_FP64 };
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

#endif
