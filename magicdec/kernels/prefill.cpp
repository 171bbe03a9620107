// Attention of many new tokens over a KV cache on a CPU, at the speed of arithmetic. Called from attention/cpp.py.
//
// A task is some query rows of one KV head of one row of the batch. Vectors lie along the query rows: queries are
// transposed once, keys and values are broadcast without a copy, and scores need no sums across a vector. Blocks of slots
// stream past, with a running maximum and sum for each query row. A query row's result depends on nothing but itself.

#include "vectors.h"

#include <atomic>
#include <limits>
#include <type_traits>

#include "call.h"

namespace {

constexpr int Q = LANES / 4;            // vectors of query rows in a tile: 4 with AVX-512, 2 otherwise
// Numbers that a tile broadcasts. 6 x 2 sums fill 16 registers; 6 x 4 would fit the 32 of AVX-512, but is a little slower.
constexpr int I = LANES == 16 ? 4 : 6, REST = 4;  // 64 = 10 x 6 + 4: what is left over is a tile of its own
constexpr int64_t ROWS = 64, SLOTS = 64;  // of a task, and of a block
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// out[i][q] += sum over k of a[k * a_k + i * a_i] * b[k][q], for `tile` numbers i and Q vectors of q.
template <int tile>
void multiply(const float* a, int64_t a_k, int64_t a_i, const float* b, int64_t count, float* out) {
    Vec sums[tile][Q];
#pragma GCC unroll 8
    for (int i = 0; i < tile; ++i) {
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) sums[i][q] = load(out + i * ROWS + q * LANES);
    }
    for (int64_t k = 0; k < count; ++k) {
        Vec x[Q];
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) x[q] = hold(b + k * ROWS + q * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < tile; ++i) {
            const Vec y = all(a[k * a_k + i * a_i]);
#pragma GCC unroll 8
            for (int q = 0; q < Q; ++q) sums[i][q] += y * x[q];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < tile; ++i) {
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) store(out + i * ROWS + q * LANES, sums[i][q]);
    }
}

// The same for any number of i, and for all query rows of a task. before(i) is called for each of them.
template <typename Function>
void multiply(const float* a, int64_t a_k, int64_t a_i, const float* b, int64_t count, float* out, int64_t size,
              Function before) {
    for (int64_t i = 0; i < size; ++i) {
        before(i);
        if (i % I || i + I > size) continue;
        for (int64_t q = 0; q < ROWS; q += Q * LANES) multiply<I>(a + i * a_i, a_k, a_i, b + q, count, out + i * ROWS + q);
    }
    int64_t i = size / I * I;
    for (; i + REST <= size; i += REST)
        for (int64_t q = 0; q < ROWS; q += Q * LANES) multiply<REST>(a + i * a_i, a_k, a_i, b + q, count, out + i * ROWS + q);
    for (; i < size; ++i)
        for (int64_t q = 0; q < ROWS; q += Q * LANES) multiply<1>(a + i * a_i, a_k, a_i, b + q, count, out + i * ROWS + q);
}

template <typename T>
class Prefill {
  public:
    explicit Prefill(const Call& call) : c(call), query_rows(c.group * c.new_tokens) {}

    void run() const {
        const int64_t parts = (query_rows + ROWS - 1) / ROWS, tasks = c.rows * c.kv_heads * parts;
        std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(c.threads)
        {
            static thread_local Room room;
            float *const q = room.of((2 * c.dim + SLOTS) * ROWS + 2 * SLOTS * c.dim), *const out = q + c.dim * ROWS;
            float *const p = out + c.dim * ROWS, *const wide = p + SLOTS * ROWS;
            for (int64_t task; (task = next.fetch_add(1)) < tasks;) {
                const int64_t head = task / parts, first = task % parts * ROWS;
                attend(head / c.kv_heads, head % c.kv_heads, first, q, out, p, wide);
            }
        }
    }

  private:
    const Call& c;
    const int64_t query_rows;  // of a KV head: (T, J)

    void attend(int64_t b, int64_t head, int64_t first, float* q, float* out, float* p, float* wide) const {
        const T* keys = static_cast<const T*>(c.k) + b * c.k_row + head * c.k_head;
        const T* values = static_cast<const T*>(c.v) + b * c.v_row + head * c.v_head;
        const int64_t rows = std::min(ROWS, query_rows - first);
        const int64_t before = c.seqlens[b] - c.new_tokens;  // slots of earlier tokens
        load_queries(b, head, first, rows, q);
        std::fill(out, out + c.dim * ROWS, 0.0f);
        Vec most[ROWS / LANES], total[ROWS / LANES];
        for (int i = 0; i < ROWS / LANES; ++i) most[i] = all(HIDDEN), total[i] = Vec{};
        const int64_t last = before + (first + rows - 1) / c.group;  // own slots of the last query row, of the first
        const int64_t start = std::max<int64_t>(0, before + first / c.group - c.window + 1);
        for (int64_t at = start; at <= last; at += SLOTS) {
            const int64_t count = std::min(SLOTS, last + 1 - at);
            int64_t stride = c.k_slot;
            const float* k = block(keys, at, count, wide, stride);
            std::fill(p, p + count * ROWS, 0.0f);
            multiply(k, 1, stride, q, c.dim, p, count, [&](int64_t s) {  // keep memory busy during arithmetic
                prefetch(values + (at + s) * c.v_slot);
                if (at + SLOTS + s <= last) prefetch(keys + (at + SLOTS + s) * c.k_slot);
            });
            if (at + count - 1 > before + first / c.group || at <= last - c.window) hide(before, first, at, count, p);
            weigh(p, count, most, total, out);
            stride = c.v_slot;
            const float* v = block(values, at, count, wide + SLOTS * c.dim, stride);
            multiply(v, stride, 1, p, count, out, c.dim, [](int64_t) {});
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

    // Query rows, scaled and transposed: (D, ROWS).
    void load_queries(int64_t b, int64_t head, int64_t first, int64_t rows, float* q) const {
        const float scale = 1.0f / std::sqrt(float(c.dim));
        std::fill(q, q + c.dim * ROWS, 0.0f);
        for (int64_t r = 0; r < rows; ++r) {
            const T* from = static_cast<const T*>(c.q) + b * c.q_row + (first + r) / c.group * c.q_token +
                            (head * c.group + (first + r) % c.group) * c.q_head;
            for_vectors(c.dim, [&](int64_t d, auto load, auto) {
                const Vec x = load(from + d) * scale;
                for (int64_t i = 0; i < std::min<int64_t>(LANES, c.dim - d); ++i) q[(d + i) * ROWS + r] = x[i];
            });
        }
    }

    // Entries of some slots in fp32, and their stride.
    const float* block(const T* entries, int64_t at, int64_t count, float* wide, int64_t& stride) const {
        entries += at * stride;
        if constexpr (std::is_same_v<T, float>) return entries;
        for (int64_t s = 0; s < count; ++s)
            for_vectors(c.dim, [&](int64_t d, auto load, auto store) {
                store(wide + s * c.dim + d, load(entries + s * stride + d));
            });
        stride = c.dim;
        return wide;
    }

    // Each new token sees itself and what came before, within its window.
    void hide(int64_t before, int64_t first, int64_t at, int64_t count, float* p) const {
        for (int64_t r = 0; r < ROWS; ++r) {
            const int64_t own = before + (first + r) / c.group;
            for (int64_t s = 0; s < count; ++s)
                if (at + s > own || at + s <= own - c.window) p[s * ROWS + r] = HIDDEN;
        }
    }

    // Scores become weights relative to the greatest so far; what was summed before is made relative to it, too.
    void weigh(float* p, int64_t count, Vec* most, Vec* total, float* out) const {
        for (int i = 0; i < ROWS / LANES; ++i) {
            Vec highest = most[i], sum = {};
            for (int64_t s = 0; s < count; ++s) {
                const Vec x = load(p + s * ROWS + i * LANES);
                highest = x > highest ? x : highest;
            }
            const Vec base = highest > HIDDEN ? highest : Vec{}, decay = exp_vec(most[i] - base);
            for (int64_t s = 0; s < count; ++s) {
                const Vec x = exp_vec(load(p + s * ROWS + i * LANES) - base);
                store(p + s * ROWS + i * LANES, x);
                sum += x;
            }
            most[i] = highest;
            total[i] = total[i] * decay + sum;
            for (int64_t d = 0; d < c.dim; ++d) store(out + d * ROWS + i * LANES, load(out + d * ROWS + i * LANES) * decay);
        }
    }
};

}  // namespace

extern "C" void prefill_float32(const Call* call) { Prefill<float>(*call).run(); }
extern "C" void prefill_bfloat16(const Call* call) { Prefill<bfloat16>(*call).run(); }
