// Attention of many new tokens over a KV cache on a CPU, at the speed of arithmetic. Called from attention/cpp.py.
//
// A task is some query rows of one KV head of one row of the batch. Vectors lie along the query rows: queries are
// transposed once, keys and values are broadcast without a copy, and scores need no sums across a vector. Blocks of slots
// stream past, with a running maximum and sum for each query row. A query row's result depends on nothing but itself. In
// bf16, pairs of numbers are multiplied where the processor can: pairs of features for scores, of slots for sums of values.

#include "vectors.h"

#include <atomic>
#include <type_traits>

#include "call.h"

namespace {

constexpr int Q = LANES / 4;            // vectors of query rows in a tile: 4 with AVX-512, 2 otherwise
// Numbers that a tile broadcasts. 6 x 2 sums fill 16 registers; 6 x 4 would fit the 32 of AVX-512, but is a little slower.
constexpr int I = LANES == 16 ? 4 : 6, REST = 4;  // 64 = 10 x 6 + 4: what is left over is a tile of its own
constexpr int64_t ROWS = 64, SLOTS = 64;  // of a task, and of a block

template <typename X>
constexpr int TOGETHER = NUMBERS<Factors<X>> / LANES;  // numbers in a lane: 1, or 2 in bf16

// out[i][q] += sum over k of a[k * a_k + i * a_i] * b[k][q], for `tile` numbers i and Q vectors of q. In bf16, what is
// multiplied is a pair of numbers.
template <int tile, typename X>
void multiply(const X* a, int64_t a_k, int64_t a_i, const X* b, int64_t count, float* out) {
    using V = Factors<X>;
    Vec sums[tile][Q];
#pragma GCC unroll 8
    for (int i = 0; i < tile; ++i) {
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) sums[i][q] = load(out + i * ROWS + q * LANES);
    }
    for (int64_t k = 0; k < count; ++k) {
        V x[Q];
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) x[q] = hold<V>(b + (k * ROWS + q * LANES) * TOGETHER<X>);
#pragma GCC unroll 8
        for (int i = 0; i < tile; ++i) {
            const V y = broadcast(a + k * a_k + i * a_i);
#pragma GCC unroll 8
            for (int q = 0; q < Q; ++q) sums[i][q] = plus_products(sums[i][q], y, x[q]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < tile; ++i) {
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) store(out + i * ROWS + q * LANES, sums[i][q]);
    }
}

// The same for any number of i, and for all query rows of a task. before(i) is called for each of them.
template <typename X, typename Function>
void multiply(const X* a, int64_t a_k, int64_t a_i, const X* b, int64_t count, float* out, int64_t size, Function before) {
    const auto rows = [=](auto tile, int64_t i) {
        for (int64_t q = 0; q < ROWS; q += Q * LANES)
            multiply<tile>(a + i * a_i, a_k, a_i, b + q * TOGETHER<X>, count, out + i * ROWS + q);
    };
    for (int64_t i = 0; i < size; ++i) {
        before(i);
        if (i % I || i + I > size) continue;
        rows(std::integral_constant<int, I>(), i);
    }
    int64_t i = size / I * I;
    for (; i + REST <= size; i += REST) rows(std::integral_constant<int, REST>(), i);
    for (; i < size; ++i) rows(std::integral_constant<int, 1>(), i);
}

// Of entries in T. X is what is multiplied: T, or fp32.
template <typename T, typename X>
class Prefill {
  public:
    explicit Prefill(const Call& call) : c(call), query_rows(c.group * c.new_tokens) {}

    void run() const {
        const int64_t parts = (query_rows + ROWS - 1) / ROWS, tasks = c.rows * c.kv_heads * parts;
        std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(c.threads)
        {
            static thread_local Room room;
            float* const out = room.of((2 * c.dim + SLOTS) * ROWS + 2 * SLOTS * c.dim);
            float* const p = out + c.dim * ROWS;
            X *const q = reinterpret_cast<X*>(p + SLOTS * ROWS), *const entries = q + c.dim * ROWS;
            for (int64_t task; (task = next.fetch_add(1)) < tasks;) {
                const int64_t head = task / parts, first = task % parts * ROWS;
                attend(head / c.kv_heads, head % c.kv_heads, first, q, out, p, entries);
            }
        }
    }

  private:
    const Call& c;
    const int64_t query_rows;  // of a KV head: (T, J)

    void attend(int64_t b, int64_t head, int64_t first, X* q, float* out, float* p, X* room) const {
        const T* keys = static_cast<const T*>(c.k) + b * c.k_row + head * c.k_head;
        const T* values = static_cast<const T*>(c.v) + b * c.v_row + head * c.v_head;
        const int64_t rows = std::min(ROWS, query_rows - first);
        const int64_t before = c.seqlens[b] - c.new_tokens;  // slots of earlier tokens
        load_queries(b, head, first, rows, q);
        std::fill(out, out + c.dim * ROWS, 0.0f);
        Vec most[ROWS / LANES], total[ROWS / LANES];
        for (int i = 0; i < ROWS / LANES; ++i) most[i] = all(HIDDEN), total[i] = Vec{};
        for (int64_t r = 0; c.sinks && r < rows; ++r) {  // in the units of scores
            most[r / LANES][r % LANES] = c.sinks[head * c.group + (first + r) % c.group] / left();
            total[r / LANES][r % LANES] = 1;
        }
        const int64_t last = before + (first + rows - 1) / c.group;  // own slots of the last query row, of the first
        const int64_t start = std::max<int64_t>(0, before + first / c.group - c.window + 1);
        for (int64_t at = start; at <= last; at += SLOTS) {
            const int64_t count = std::min(SLOTS, last + 1 - at);
            int64_t stride = c.k_slot;
            const X* k = block(keys + at * stride, count, room, stride);
            std::fill(p, p + count * ROWS, 0.0f);
            multiply(k, TOGETHER<X>, stride, q, c.dim / TOGETHER<X>, p, count, [&](int64_t s) {
                // Keep memory busy during arithmetic.
                prefetch(values + (at + s) * c.v_slot);
                if (at + SLOTS + s <= last) prefetch(keys + (at + SLOTS + s) * c.k_slot);
            });
            if (c.softcap > 0) cap_scores(p, count * ROWS, c.softcap / left());
            if (at + count - 1 > before + first / c.group || at <= last - c.window) hide(before, first, at, count, p);
            const X* weights = weigh(p, count, most, total, out);
            stride = c.v_slot;
            if constexpr (std::is_same_v<X, bfloat16>) {
                pair_up(values + at * stride, count, room);
                multiply(room, 2 * c.dim, 2, weights, (count + 1) / 2, out, c.dim, [](int64_t) {});
            } else {
                const X* v = block(values + at * stride, count, room, stride);
                multiply(v, stride, 1, weights, count, out, c.dim, [](int64_t) {});
            }
        }
        for (int64_t r = 0; r < rows; ++r) {
            const float scale = 1 / total[r / LANES][r % LANES];  // every token sees itself: 0 is an error
            const int64_t token = b * c.new_tokens + (first + r) / c.group, h = head * c.group + (first + r) % c.group;
            T* to = static_cast<T*>(c.out) + (token * c.kv_heads * c.group + h) * c.dim;
            float row[LANES];
            for (int64_t d = 0; d < c.dim; d += LANES) {
                const int64_t size = std::min<int64_t>(LANES, c.dim - d);
                for (int64_t i = 0; i < size; ++i) row[i] = out[(d + i) * ROWS + r] * scale;
                store_first(to + d, load_first(row, size), size);
            }
        }
    }

    void prefetch(const T* from) const {  // into the L2 cache
        for (int64_t d = 0; d < c.dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(from + d, 0, 2);
    }

    // What scores are multiplied by, and queries before, if they are in fp32.
    float scale() const { return 1.0f / std::sqrt(float(c.dim)); }

    // What scores are yet to be multiplied by.
    float left() const { return std::is_same_v<X, float> ? 1.0f : scale(); }

    // Query rows transposed: (D, ROWS), or pairs.
    void load_queries(int64_t b, int64_t head, int64_t first, int64_t rows, X* q) const {
        std::fill(q, q + c.dim * ROWS, X{});
        for (int64_t r = 0; r < rows; ++r) {
            const T* from = static_cast<const T*>(c.q) + b * c.q_row + (first + r) / c.group * c.q_token +
                            (head * c.group + (first + r) % c.group) * c.q_head;
            if constexpr (std::is_same_v<X, bfloat16>)
                for (int64_t d = 0; d < c.dim; ++d) q[(d / 2 * ROWS + r) * 2 + d % 2] = from[d];
            else
                for_vectors(c.dim, [&](int64_t d, auto load, auto) {
                    const Vec x = load(from + d) * scale();
                    for (int64_t i = 0; i < std::min<int64_t>(LANES, c.dim - d); ++i) q[(d + i) * ROWS + r] = x[i];
                });
        }
    }

    // Entries of some slots in X, and their stride.
    const X* block(const T* entries, int64_t count, X* wide, int64_t& stride) const {
        if constexpr (std::is_same_v<T, X>) return entries;
        else {
            for (int64_t s = 0; s < count; ++s)
                for_vectors(c.dim, [&](int64_t d, auto load, auto store) {
                    store(wide + s * c.dim + d, load(entries + s * stride + d));
                });
            stride = c.dim;
            return wide;
        }
    }

    // Entries of some slots, in pairs of slots; with zeros, if the last has none to go with it.
    void pair_up(const bfloat16* entries, int64_t count, bfloat16* to) const {
        for (int64_t s = 0; s < count; s += 2, to += 2 * c.dim)
            for (int64_t d = 0; d < c.dim; d += LANES) {
                const bfloat16* from = entries + s * c.v_slot + d;
                const Pairs second = s + 1 < count ? load_bits<Vec>(from + c.v_slot) : Pairs{};
                const Pairs pairs = load_bits<Vec>(from) | second << 16;
                std::memcpy(to + 2 * d, &pairs, sizeof pairs);
            }
    }

    // Each new token sees itself and what came before, within its window.
    void hide(int64_t before, int64_t first, int64_t at, int64_t count, float* p) const {
        for (int64_t r = 0; r < ROWS; ++r) {
            const int64_t own = before + (first + r) / c.group;
            for (int64_t s = 0; s < count; ++s)
                if (at + s > own || at + s <= own - c.window) p[s * ROWS + r] = HIDDEN;
        }
    }

    // Scores become weights relative to the greatest so far; what was summed before is made relative to it, too. Returns
    // the weights as they are multiplied, in the same place.
    const X* weigh(float* p, int64_t count, Vec* most, Vec* total, float* out) const {
        const float factor = left();
        const auto weight = [=](Vec x) { return exp_as<X>(std::is_same_v<X, float> ? x : x * factor); };
        X* const weights = reinterpret_cast<X*>(p);
        for (int i = 0; i < ROWS / LANES; ++i) {
            Vec highest = most[i], sum = {};
            for (int64_t s = 0; s < count; ++s) {
                const Vec x = load(p + s * ROWS + i * LANES);
                highest = x > highest ? x : highest;
            }
            const Vec base = highest > HIDDEN ? highest : Vec{}, decay = weight(most[i] - base);
            for (int64_t s = 0; s < count; s += TOGETHER<X>) {
                const Vec x = weight(load(p + s * ROWS + i * LANES) - base);
                sum += x;
                if constexpr (std::is_same_v<X, bfloat16>) {
                    const Vec y = s + 1 < count ? weight(load(p + (s + 1) * ROWS + i * LANES) - base) : Vec{};
                    sum += y;
                    const Pairs pairs = pairs_of(x, y);
                    std::memcpy(weights + s * ROWS + 2 * i * LANES, &pairs, sizeof pairs);
                } else {
                    store(weights + s * ROWS + i * LANES, x);
                }
            }
            most[i] = highest;
            total[i] = total[i] * decay + sum;
            for (int64_t d = 0; d < c.dim; ++d) store(out + d * ROWS + i * LANES, load(out + d * ROWS + i * LANES) * decay);
        }
        return weights;
    }
};

}  // namespace

extern "C" void prefill_float32(const Call* call) { Prefill<float, float>(*call).run(); }
extern "C" void prefill_bfloat16(const Call* call) {
#if BF16_PRODUCTS
    if (call->dim % LANES == 0) return Prefill<bfloat16, bfloat16>(*call).run();
#endif
    Prefill<bfloat16, float>(*call).run();
}
