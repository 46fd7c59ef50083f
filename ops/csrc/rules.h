/* Update rules, the arithmetic of one element, written once for the CPU and the GPU (see formats.h).
 *
 * Each is bit for bit what torch computes in fp32 on x86: adam and adamw its fused kernel, the others its loops of
 * elementwise operations. Its compiler joined some products with sums; where it did is written out as fma.
 */
#ifndef ZEROFN_RULES_H
#define ZEROFN_RULES_H

#include "formats.h"

/* The constants of a run, computed in double and rounded here, where torch rounds them. */
typedef struct {
    float rate;   /* negative; what the direction is multiplied by: Adam's -lr / (1 - b1^count), else -lr */
    float shrink; /* p is multiplied by it first: 1 - lr * decay of adamw and lion */
    float l2;     /* l2 * p is added to the gradient: the decay of adam and sgd */
    float b1, c1; /* c1 = 1 - b1; sgd's momentum is b1 */
    float b2, c2;
    float root;   /* sqrt(1 - b2^count) */
    float eps;
    float quick; /* 0.703952253 * rate * root */
    float near;  /* eps * root */
    zf_i32 nesterov;
} zf_rates;

ZF_FN zf_f zf_decayed(zf_f g, zf_f p, const zf_rates *r) { return r->l2 != 0.0f ? ZF_FMA(p, r->l2, g) : g; }

/* Kingma and Ba 2015, Algorithm 1, with L2; Loshchilov and Hutter 2019, Algorithm 2, where shrink says so. `tail`:
 * the last size % 8 elements of a tensor, which torch's vectors do not reach: v is rounded in another order. */
ZF_FN zf_f zf_adam_at(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r, int tail) {
    g = zf_decayed(g, p, r);
    p *= r->shrink;
    zf_f way = g - *m, square = r->c2 * g;
    *m = r->c1 < 0.5f ? ZF_FMA(r->c1, way, *m) : ZF_FMA(r->c1 - 1.0f, way, g);
    *v = tail ? ZF_FMA(*v, r->b2, square * g) : ZF_FMA(square, g, *v * r->b2);
    zf_f denominator = ZF_DIV(ZF_SQRT(*v), r->root) + r->eps;
    return p + ZF_DIV(r->rate * *m, denominator);
}
ZF_FN zf_f zf_adam(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) { return zf_adam_at(p, g, m, v, r, 0); }
ZF_FN zf_f zf_adam_tail(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) { return zf_adam_at(p, g, m, v, r, 1); }

/* The same where moments are stored in fewer bits. One over (the root of v + eps) is the inverse root of their sum's
 * square, v + eps^2 + 2 eps root, by one step of Newton from bits halved, with the constants of Moroz et al. 2018, 7e-4
 * off at most; bf16 keeps of v 2e-3, a code 6e-2. The root that eps is multiplied by is that of bits halved, 4e-2 off,
 * which moves the sum by 1e-2 at most, where v is about eps^2. (An eps below 1e-19 counts as none.) */
ZF_FN zf_f zf_adam_lossy(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) {
    g = zf_decayed(g, p, r);
    p *= r->shrink;
    *m = ZF_FMA(r->c1, g - *m, *m);
    *v = ZF_FMA(r->c2, g * g - *v, *v);
    zf_f root = zf_float((zf_bits(*v) >> 1) + 0x1FBD1DF5u);
    zf_f square = ZF_FMA(root, 2.0f * r->near, *v + r->near * r->near);
    zf_f y = zf_float(0x5F1FFFF9u - (zf_bits(square) >> 1));
    return ZF_FMA(*m * y * ZF_FMA(-(square * y), y, 2.38924456f), r->quick, p);
}

/* Chen et al. 2023, Algorithm 2. The sign of NaN is 0, as torch has it. */
ZF_FN zf_f zf_lion(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) {
    (void)v;
    zf_f way = ZF_FMA(g, r->c1, *m * r->b1);
    zf_f below = way < 0.0f ? ZF_ALL(-1.0f) : ZF_ALL(0.0f), sign = way > 0.0f ? ZF_ALL(1.0f) : below;
    p = ZF_FMA(sign, r->rate, p * r->shrink);
    *m = ZF_FMA(g, r->c2, *m * r->b2);
    return p;
}

ZF_FN zf_f zf_sgd(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) {
    (void)m, (void)v;
    return ZF_FMA(zf_decayed(g, p, r), r->rate, p);
}

ZF_FN zf_f zf_sgd_momentum(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) {
    (void)v;
    g = zf_decayed(g, p, r);
    *m = *m * r->b1 + g;
    return ZF_FMA(r->nesterov ? ZF_FMA(*m, r->b1, g) : *m, r->rate, p);
}

/* AdamW whose v does not change any more, in the place of m; g is the average of gradients (Tang et al. 2021, Algorithm 1).
 * An element whose v is zero stays as it is. */
ZF_FN zf_f zf_frozen_adamw(zf_f p, zf_f g, zf_f *m, zf_f *v, const zf_rates *r) {
    (void)v;
    zf_f way = ZF_DIV(g, ZF_DIV(ZF_SQRT(*m), r->root) + r->eps);
    way = *m > 0.0f ? way : ZF_ALL(0.0f);
    return ZF_FMA(way, r->rate, p * r->shrink);
}

/* All rules, each with the number of its moments, how many of them it writes, and three functions (p, g, m, v, constants)
 * -> p, which write m and v: the rule, the rule in a tail, the rule with moments in fewer bits. Loops over elements are
 * made from this list. A rule's number is its place here; ops/<name>.py says the same. */
#define ZF_RULES(RULE)                                                                                                 \
    RULE(ADAM, 2, 2, zf_adam, zf_adam_tail, zf_adam_lossy)                                                             \
    RULE(LION, 1, 1, zf_lion, zf_lion, zf_lion)                                                                        \
    RULE(SGD, 0, 0, zf_sgd, zf_sgd, zf_sgd)                                                                            \
    RULE(SGD_MOMENTUM, 1, 1, zf_sgd_momentum, zf_sgd_momentum, zf_sgd_momentum)                                        \
    RULE(FROZEN_ADAMW, 1, 0, zf_frozen_adamw, zf_frozen_adamw, zf_frozen_adamw)

#define ZF_RULE_NUMBER(name, num_moments, num_written, whole, tail, lossy) ZF_##name,
enum zf_rule { ZF_RULES(ZF_RULE_NUMBER) };

#endif
