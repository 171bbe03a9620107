// y = x W^T for few rows of x, at the speed of memory: W (N, K) is read in its own layout, once for each part of x: up to
// 8 R rows, or more where K is small.
//
// A tile is some rows of x times C rows of W: their products are added up in vectors along K, which stay in registers,
// and each vector is summed at the end. So an output adds its products in an order that depends on K alone: a row's
// result is the same bit for bit, however many rows and threads there are. In bf16, pairs are multiplied where the
// processor can. Elsewhere, and by activations in fp32, bf16 weights are widened as they are read, or once for all tiles
// where there are many. Of many rows, a part that fits into the L2 cache is done at a time.
#pragma once

#include "ahead.h"
#include "vectors.h"

#include <omp.h>

#include <atomic>
#include <type_traits>

namespace {

constexpr int R = LANES == 16 ? 6 : 3;  // rows of x in a tile, at most
constexpr int C = 4;  // rows of W in a tile: 3 x 4 sums fill 16 registers, 6 x 4 the 32 of AVX-512
constexpr int TASK = 32;      // rows of W that a thread takes at a time
constexpr int64_t CACHED = 1 << 16;  // numbers of x

// The type in which a matmul reads x and multiplies: fp32, unless the processor multiplies numbers in bf16.
template <typename T, typename W>
using Factor = std::conditional_t<BF16_PRODUCTS && std::is_same_v<T, bfloat16> && std::is_same_v<W, bfloat16>, bfloat16, float>;

template <int rows, typename X, typename W>
void tile(const X* x, const W* const* w, int64_t K, float* y, int64_t stride, Ahead ahead) {
    using V = Factors<X>;
    constexpr int SIZE = NUMBERS<V>;
    Vec sums[rows][C];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = Vec{};
    }
    int64_t k = 0;
    for (; k + SIZE <= K; k += SIZE) {
        ahead.step();
        V a[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) a[r] = hold<V>(x + r * K + k);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const V b = hold<V>(w[c] + k);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sums[r][c] = plus_products(sums[r][c], a[r], b);
        }
    }
    if (k < K) {
        for (int r = 0; r < rows; ++r) {
            const V a = load_first<V>(x + r * K + k, K - k);
            for (int c = 0; c < C; ++c) sums[r][c] = plus_products(sums[r][c], a, load_first<V>(w[c] + k, K - k));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        const Quad quad = sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        std::memcpy(y + r * stride, &quad, sizeof quad);
    }
}

// The tile of `size` rows, r or fewer.
template <int r, typename X, typename W>
void tile_of(int64_t size, const X* x, const W* const* w, int64_t K, float* y, int64_t stride, Ahead ahead) {
    if (size == r) return tile<r>(x, w, K, y, stride, ahead);
    if constexpr (r > 1) tile_of<r - 1>(size, x, w, K, y, stride, ahead);
}

// All rows of x, in tiles that are as even as can be. Each fetches a part of what is read next.
template <typename X, typename W>
void tiles(const X* x, int64_t rows, const W* const* w, int64_t K, float* y, int64_t stride, Stream next) {
    const int64_t count = (rows + R - 1) / R, lines = (next.lines + count - 1) / count;
    for (int64_t i = 0, r = 0; i < count; ++i) {
        const int64_t size = (rows - r) / (count - i);
        const Ahead ahead = next.take(lines, std::max<int64_t>(1, K / NUMBERS<Factors<X>>));
        tile_of<R>(size, x + r * K, w, K, y + r * stride, stride, ahead);
        r += size;
    }
}

// Stores numbers in fp32. Returns where.
inline const float* widen(const bfloat16* from, int64_t count, float* to) {
    for_vectors(count, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i)); });
    return to;
}

// A matmul that threads share: tasks of TASK rows of W, for all M rows of x or, where there are many, for a part of them.
struct Matmul {
    const int64_t M, K, part, parts, tasks;
    std::atomic<int64_t> next{0};

    Matmul(int64_t M, int64_t N, int64_t K)
        : M(M), K(K), part(std::max<int64_t>(8 * R, CACHED / K / R * R)), parts((M + part - 1) / part),
          tasks((N + TASK - 1) / TASK) {}

    // Takes tasks until none is left; each thread of a parallel region calls it. `weights(task, i)` is the row of W that
    // makes output i of a task; C of them are contiguous. `done(task, m, rows, out)` gets (rows, TASK) numbers of the
    // rows of x from m on.
    template <typename W, typename X, typename Weights, typename Done>
    void take(const X* x, Weights weights, Done done) {
        static thread_local Room of_weights, of_results;
        const int64_t threads = omp_get_num_threads();
        float *const wide = of_weights.of(std::is_same_v<W, X> ? 0 : C * K), *const out = of_results.of(TASK * part);
        for (int64_t taken; (taken = next.fetch_add(1)) < tasks * parts;) {
            const int64_t task = taken % tasks, m = taken / tasks * part, rows = std::min(part, M - m);
            for (int i = 0; i < TASK; i += C) {
                const W* from[C];
                for (int c = 0; c < C; ++c) from[c] = weights(task, i + c);
                // Of the next task that this thread will probably take, or of this one.
                const W* const next_rows = i + C < TASK ? weights(task, i + C) : weights(task + threads, 0);
                const Stream next{reinterpret_cast<const char*>(next_rows), int64_t(C * K * sizeof(W) + 63) / 64};
                if constexpr (!std::is_same_v<W, X>) {
                    if (rows > 2 * R) {
                        const float* widened[C];
                        for (int c = 0; c < C; ++c) widened[c] = widen(from[c], K, wide + c * K);
                        tiles(x + m * K, rows, widened, K, out + i, TASK, next);
                        continue;
                    }
                }
                tiles(x + m * K, rows, from, K, out + i, TASK, next);
            }
            done(task, m, rows, out);
        }
    }
};

// x as a matmul by weights W reads it: in place, or widened into `room`.
template <typename W, typename T>
const Factor<T, W>* factors(const T* x, int64_t count, Room& room) {
    if constexpr (std::is_same_v<Factor<T, W>, T>) return x;
    else return widen(x, count, room.of(count));
}

// The threads' parts of y = x W^T + b.
template <typename T, typename W>
void multiply(Matmul& matmul, const Factor<T, W>* x, const W* w, const T* bias, T* y, int64_t N) {
    const int64_t K = matmul.K;
    matmul.take<W>(
        x, [=](int64_t task, int i) { return w + std::min(task * TASK + i, N - 1) * K; },
        [=](int64_t task, int64_t m, int64_t rows, const float* out) {
            const int64_t n = task * TASK, count = std::min<int64_t>(TASK, N - n);
            for (int64_t r = 0; r < rows; ++r) {
                T* to = y + (m + r) * N + n;
                for_vectors(count, [&](int64_t i, auto load, auto store) {
                    store(to + i, bias ? load(out + r * TASK + i) + load(bias + n + i) : load(out + r * TASK + i));
                });
            }
        });
}

}  // namespace
