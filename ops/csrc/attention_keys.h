// Which keys a tile of queries looks at: runs of a layout or of an index, each query's span, keys that are not there,
// and the masks of all of them.
#ifndef ZEROFN_ATTENTION_KEYS_H
#define ZEROFN_ATTENTION_KEYS_H

#include "attention.h"

#include <math.h>

namespace {

const zf_i64 QUERIES = 64, KEYS = 64; // of a tile; a word of `bits` has a bit for each query

ZF_FN zf_i64 rounded(zf_i64 x, zf_i64 to) { return (x + to - 1) / to * to; }
ZF_FN zf_i64 least(zf_i64 a, zf_i64 b) { return a < b ? a : b; }
ZF_FN zf_i64 most(zf_i64 a, zf_i64 b) { return a > b ? a : b; }

struct Run {
    zf_i64 first, num;
    const zf_u64 *bits; // a word for each key; NULL where all queries look at all keys
};

// A tile of queries: `rows` of them, padded to `n`, a multiple of a vector.
struct Place {
    zf_i64 batch, head, group, block, first, rows, n;
};

zf_i64 tiles_of_block(const zf_attention *a) { return (a->block_q + QUERIES - 1) / QUERIES; }
zf_i64 num_blocks(const zf_attention *a) { return (a->num_q + a->block_q - 1) / a->block_q; }

Place place_of(const zf_attention *a, zf_i64 batch, zf_i64 head, zf_i64 tile, zf_i64 vector) {
    const zf_i64 each = tiles_of_block(a), block = tile / each, first = block * a->block_q + tile % each * QUERIES;
    const zf_i64 end = least(least((block + 1) * a->block_q, first + QUERIES), a->num_q), rows = most(end - first, 0);
    return {batch, head, head / (a->heads / a->groups), block, first, rows, rounded(rows, vector)};
}

// The runs of a tile's block, in order, and how many.
zf_i64 runs_of(const zf_attention *a, const Place &p, Run *runs) {
    zf_i64 num = 0;
    if (a->index == nullptr) {
        const zf_i64 head = a->layout_heads == 1 ? 0 : p.head;
        const zf_i32 *start = a->starts + head * (num_blocks(a) + 1) + p.block;
        for (zf_i64 i = start[0]; i < start[1]; ++i) {
            const zf_i32 *run = a->runs + 3 * i;
            runs[num++] = {run[0], run[1], run[2] < 0 ? nullptr : a->bits + KEYS * run[2]};
        }
        return num;
    }
    const zf_i64 *named = a->index + ((p.batch * a->heads + p.head) * num_blocks(a) + p.block) * a->per_block;
    for (zf_i64 i = 0; i < a->per_block; ++i) { // sorted as they come; few, or in order already
        if (named[i] < 0) continue;
        zf_i64 at = num++;
        for (; at > 0 && runs[at - 1].first > named[i]; --at) runs[at] = runs[at - 1];
        runs[at] = {named[i], 1, nullptr};
    }
    zf_i64 kept = 0;
    for (zf_i64 i = 0; i < num; ++i) { // neighbours become one run; a block that is named again counts once
        const zf_i64 first = runs[i].first * a->block_k, end = least(first + a->block_k, a->num_k);
        if (kept > 0 && first <= runs[kept - 1].first + runs[kept - 1].num)
            runs[kept - 1].num = end - runs[kept - 1].first;
        else
            runs[kept++] = {first, end - first, nullptr};
    }
    return kept;
}

// Each query's first key, and the one behind its last; the least and the greatest of both. Queries that only fill up
// the last vector are as the last one is.
template <class T>
struct Span {
    typedef typename Lanes<T>::integer integer;
    integer from[QUERIES] __attribute__((aligned(64))), to[QUERIES] __attribute__((aligned(64)));
    zf_i64 least_from, most_from, least_to, most_to;
    void find(const zf_attention *a, const Place &p) {
        least_from = least_to = a->num_k, most_from = most_to = 0;
        const zf_i32 *given = a->spans;
        if (given != nullptr) given += 2 * ((a->span_rows == 1 ? 0 : p.batch) * a->num_q + p.first);
        for (zf_i64 r = 0; r < p.n; ++r) {
            const zf_i64 row = least(r, p.rows - 1);
            zf_i64 low = given == nullptr ? 0 : most(given[2 * row], 0);
            zf_i64 high = given == nullptr ? a->num_k : least(given[2 * row + 1], a->num_k);
            if (a->causal) high = least(high, p.first + row + 1);
            if (low >= high) low = high = 0;
            from[r] = (integer)low, to[r] = (integer)high;
            if (low == high) { // no key: the others' spans need masks
                most_from = a->num_k, least_to = 0;
                continue;
            }
            least_from = least(least_from, low), most_from = most(most_from, low);
            least_to = least(least_to, high), most_to = most(most_to, high);
        }
    }
};

// What hides keys of a chunk: NULL is nothing.
template <class T>
struct Hidden {
    const zf_u64 *bits;
    const Span<T> *span;
    const zf_u8 *there;
};

// body(first key, how many, what hides some of them)
template <class T, class Body>
ZF_FN void over_chunks(const zf_attention *a, const Place &p, const Run *runs, zf_i64 num, const Span<T> &span,
                       const Body &body) {
    const zf_u8 *of_row = a->there == nullptr ? nullptr : a->there + (a->there_rows == 1 ? 0 : p.batch) * a->num_k;
    for (zf_i64 i = 0; i < num; ++i) {
        const zf_i64 end = least(runs[i].first + runs[i].num, span.most_to);
        for (zf_i64 at = most(runs[i].first, span.least_from); at < end;) {
            const zf_i64 now = least(KEYS, end - at);
            const bool ends = at < span.most_from || at + now > span.least_to;
            zf_i64 found = of_row == nullptr ? now : 0;
            if (of_row != nullptr)
                for (zf_i64 k = 0; k < now; ++k) found += of_row[at + k] != 0;
            if (found > 0)
                body(at, now, Hidden<T>{runs[i].bits == nullptr ? nullptr : runs[i].bits + (at - runs[i].first),
                                        ends ? &span : nullptr, found == now ? nullptr : of_row + at});
            at += now;
        }
    }
}

template <class T>
void hide(T *scores, const Place &p, zf_i64 first, zf_i64 num, const Hidden<T> &by) {
    if (by.bits == nullptr && by.span == nullptr && by.there == nullptr) return;
    const int n = lanes<T>;
    typename Lanes<T>::u of_lane;
    for (int i = 0; i < n; ++i) of_lane[i] = 1u << i;
    const Vector<T> hidden = all((T)-INFINITY);
    for (zf_i64 k = 0; k < num; ++k)
        for (zf_i64 at = 0; at < p.n; at += n) {
            Vector<T> x = by.there != nullptr && !by.there[k] ? hidden : loaded(scores + k * p.n + at);
            if (by.bits != nullptr) {
                const typename Lanes<T>::u word = (typename Lanes<T>::u)(Integers<T>{} + (typename Lanes<T>::integer)(by.bits[k] >> at));
                x = (word & of_lane) != 0 ? x : hidden;
            }
            if (by.span != nullptr) {
                Integers<T> from, to;
                __builtin_memcpy(&from, by.span->from + at, sizeof(from));
                __builtin_memcpy(&to, by.span->to + at, sizeof(to));
                const Integers<T> key = Integers<T>{} + (typename Lanes<T>::integer)(first + k);
                x = key >= from ? x : hidden;
                x = key < to ? x : hidden;
            }
            stored(scores + k * p.n + at, x);
        }
}

} // namespace
#endif
