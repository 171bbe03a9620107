// y = x W^T for few rows of x, at the speed of memory: W (N, K) is read once, as it lies.
//
// A tile is some rows of x times C rows of W: their products are added up in vectors along K, which stay in registers,
// and each vector is summed at the end. So an output adds its products in an order that depends on K alone: a row's
// result is the same bit for bit, however many rows and threads there are. bf16 weights are widened as they are read, or
// once for all tiles where there are several. Of many rows, a part that fits into the L2 cache is done at a time.
#pragma once

#include "vectors.h"

#include <atomic>
#include <type_traits>

namespace {

constexpr int R = 3;          // rows of x in a tile, at most
constexpr int C = LANES / 2;  // rows of W in a tile: 3 x 4 sums fill 16 registers, 3 x 8 those of AVX-512
constexpr int TASK = 32;      // rows of W that a thread takes at a time
constexpr int64_t CACHED = 1 << 16;  // numbers of x

template <int rows, typename W>
void tile(const float* x, const W* const* w, int64_t K, float* y, int64_t stride) {
    Vec sums[rows][C];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = Vec{};
    }
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        Vec a[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) a[r] = hold(x + r * K + k);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const Vec b = hold(w[c] + k);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sums[r][c] += a[r] * b;
        }
    }
    if (k < K) {
        for (int r = 0; r < rows; ++r) {
            const Vec a = load_first(x + r * K + k, K - k);
            for (int c = 0; c < C; ++c) sums[r][c] += a * load_first(w[c] + k, K - k);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c += 4) {
            const Quad quad = sums_of(sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3]);
            std::memcpy(y + r * stride + c, &quad, sizeof quad);
        }
    }
}

// All rows of x, in tiles that are as even as can be. Each fetches a part of what is read next: memory must not wait for
// arithmetic.
template <typename W>
void tiles(const float* x, int64_t rows, const W* const* w, int64_t K, float* y, int64_t stride, const char* next,
           int64_t next_bytes) {
    const int64_t count = (rows + R - 1) / R;
    for (int64_t i = 0, r = 0, fetched = 0; i < count; ++i) {
        const int64_t size = (rows - r) / (count - i);
        for (; fetched < next_bytes * (i + 1) / count; fetched += 64) __builtin_prefetch(next + fetched);
        if (size == 1) tile<1>(x + r * K, w, K, y + r * stride, stride);
        if (size == 2) tile<2>(x + r * K, w, K, y + r * stride, stride);
        if (size == 3) tile<3>(x + r * K, w, K, y + r * stride, stride);
        r += size;
    }
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
    template <typename W, typename Weights, typename Done>
    void take(const float* x, Weights weights, Done done) {
        static thread_local Room of_weights, of_results;
        float *const wide = of_weights.of(std::is_same_v<W, float> ? 0 : C * K), *const out = of_results.of(TASK * part);
        for (int64_t taken; (taken = next.fetch_add(1)) < tasks * parts;) {
            const int64_t task = taken % tasks, m = taken / tasks * part, rows = std::min(part, M - m);
            for (int i = 0; i < TASK; i += C) {
                const W* from[C];
                for (int c = 0; c < C; ++c) from[c] = weights(task, i + c);
                const char* ahead = reinterpret_cast<const char*>(from[C - 1] + K);
                if (std::is_same_v<W, float> || rows <= R) {
                    tiles(x + m * K, rows, from, K, out + i, TASK, ahead, C * K * sizeof(W));
                    continue;
                }
                const float* widened[C];
                for (int c = 0; c < C; ++c) {
                    float* to = wide + c * K;
                    for_vectors(K, [&](int64_t k, auto load, auto store) { store(to + k, load(from[c] + k)); });
                    widened[c] = to;
                }
                tiles(x + m * K, rows, widened, K, out + i, TASK, ahead, C * K * sizeof(W));
            }
            done(task, m, rows, out);
        }
    }
};

// Numbers in fp32: as they lie, or widened into `room`.
inline const float* in_float(const float* x, int64_t, Room&) { return x; }

inline const float* in_float(const bfloat16* x, int64_t count, Room& room) {
    float* wide = room.of(count);
    for_vectors(count, [&](int64_t i, auto load, auto store) { store(wide + i, load(x + i)); });
    return wide;
}

// The threads' parts of y = x W^T + b, from x in fp32.
template <typename T, typename W>
void multiply(Matmul& matmul, const float* x, const W* w, const T* bias, T* y, int64_t N) {
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
