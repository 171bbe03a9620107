// Selection of what a draft step reads of a long cache, on a CPU: the slots with the largest scores, and a bound on the
// attention to pages of keys. Called from attention/cpp.py, which has the legend; attention/base.py has the contract.

#include "vectors.h"


namespace {

// How many of some numbers are at least `least`.
int64_t count_from(const int32_t* numbers, int64_t size, int32_t least) {
    IntVec counts = {};
    for (int64_t i = 0; i < size; i += LANES) {
        IntVec x;
        std::memcpy(&x, numbers + i, sizeof x);
        counts -= x >= least;
    }
    int64_t total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += counts[lane];
    return total;
}

// The slots of the `count` largest scores (>= 0) in [first, last), in their order; -1 where there are fewer. The threshold
// is found bit by bit, because the bits of such numbers are in the order of the numbers. Of equal scores the first ones win.
void largest(const float* scores, int64_t first, int64_t last, int64_t count, int64_t* slots, int32_t* bits) {
    const int64_t size = std::max<int64_t>(0, last - first), padded = whole_vectors(size);
    std::memcpy(bits, scores + first, size * sizeof(float));
    std::fill(bits + size, bits + padded, -1);
    int32_t threshold = 0;
    int64_t reached = count_from(bits, padded, 0);
    for (int bit = 30; bit >= 0 && reached > count; --bit) {
        const int64_t found = count_from(bits, padded, threshold | 1 << bit);
        if (found < count) continue;
        threshold |= 1 << bit;
        reached = found;
    }
    int64_t ties = count - reached;  // of those at the threshold, how many are taken
    for (int64_t i = 0; i < size; ++i) ties += bits[i] == threshold;
    int64_t taken = 0;
    for (int64_t i = 0; i < size; ++i) {
        if (bits[i] > threshold || (bits[i] == threshold && ties-- > 0)) slots[taken++] = first + i;
    }
    std::fill(slots + taken, slots + count, -1);
}

}  // namespace

extern "C" void select_largest(const float* scores, const int64_t* first, const int64_t* last, int64_t* slots, int64_t rows,
                               int64_t size, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        static thread_local Room room;
        auto* bits = reinterpret_cast<int32_t*>(room.of(whole_vectors(size)));
        const int64_t from = std::max<int64_t>(0, first[row]), to = std::min(last[row], size);
        largest(scores + row * size, from, to, count, slots + row * count, bits);
    }
}

extern "C" {

// Mirrored in attention/cpp.py. Strides are in elements.
struct Pages {
    const void *q, *least, *largest;  // (B, T, H, D); (B, K, P, D), contiguous
    float* shares;                    // (B, K, P), contiguous
    const int64_t *first, *last;      // (B): pages to consider
    const float* sinks;               // (H), and a soft cap of scores, as in call.h
    int64_t rows, new_tokens, kv_heads, group, dim, pages, threads, q_row, q_token, q_head;
    double softcap;
};
}

namespace {

// Bounds of one query on four pages: each feature contributes its product with the least or the largest key, whichever is
// more.
template <typename T>
Quad bounds(const float* q, const T* const* least, const T* const* most, int64_t dim) {
    Vec8 sums[4] = {};
    for (int64_t d = 0; d < dim; d += STEP) {
        const Vec8 x = load<Vec8>(q + d);
        for (int p = 0; p < 4; ++p) {
            const Vec8 low = x * load<Vec8>(least[p] + d), high = x * load<Vec8>(most[p] + d);
            sums[p] += low > high ? low : high;
        }
    }
    return sums_of(sums[0], sums[1], sums[2], sums[3]);
}

// Adds a query's softmax over `count` bounds, and its sink, to the shares.
void add_softmax(float* bounds, int64_t count, float sink, float* shares) {
    const float most = std::max(sink, *std::max_element(bounds, bounds + count));
    float total = sink > HIDDEN ? std::exp(sink - most) : 0;
    for_vectors(count, [&](int64_t i, auto load, auto store) { store(bounds + i, exp_vec(load(bounds + i) - most)); });
    for (int64_t i = 0; i < count; ++i) total += bounds[i];
    for (int64_t i = 0; i < count; ++i) shares[i] += bounds[i] / total;
}

template <typename T>
void share(const Pages& c, int64_t b, int64_t head, float* q, float* bound) {
    const float scale = 1.0f / std::sqrt(float(c.dim));
    const int64_t first = std::max<int64_t>(0, c.first[b]), count = c.last[b] - first, at = b * c.kv_heads + head;
    float* shares = c.shares + at * c.pages;
    std::fill(shares, shares + c.pages, 0.0f);
    if (count <= 0) return;
    const T* least = static_cast<const T*>(c.least) + (at * c.pages + first) * c.dim;
    const T* largest = static_cast<const T*>(c.largest) + (at * c.pages + first) * c.dim;
    for (int64_t r = 0; r < c.group * c.new_tokens; ++r) {
        const T* from = static_cast<const T*>(c.q) + b * c.q_row + (r % c.new_tokens) * c.q_token +
                        (head * c.group + r / c.new_tokens) * c.q_head;
        for (int64_t d = 0; d < c.dim; d += STEP) store(q + d, load<Vec8>(from + d) * scale);
        for (int64_t p = 0; p < count; p += 4) {
            const T *low[4], *high[4];
            for (int64_t i = 0; i < 4; ++i) {
                const int64_t offset = std::min(p + i, count - 1) * c.dim;
                low[i] = least + offset, high[i] = largest + offset;
            }
            const Quad four = bounds(q, low, high, c.dim);
            std::memcpy(bound + p, &four, sizeof four);
        }
        if (c.softcap > 0) cap_scores(bound, count, c.softcap);
        add_softmax(bound, count, c.sinks ? c.sinks[head * c.group + r / c.new_tokens] : HIDDEN, shares + first);
    }
}

template <typename T>
void all_shares(const Pages& c) {
#pragma omp parallel for num_threads(c.threads)
    for (int64_t task = 0; task < c.rows * c.kv_heads; ++task) {
        static thread_local Room room;
        float* q = room.of(c.dim + c.pages + 4);
        share<T>(c, task / c.kv_heads, task % c.kv_heads, q, q + c.dim);
    }
}

}  // namespace

extern "C" void page_shares_float32(const Pages* call) { all_shares<float>(*call); }
extern "C" void page_shares_bfloat16(const Pages* call) { all_shares<bfloat16>(*call); }
