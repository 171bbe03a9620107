// y = x W^T + b for few rows of x, at the speed of memory: W (N, K) is read once, as it lies. Called from cpu.py.
//
// A tile is some rows of x times C rows of W: their products are added up in vectors along K, which stay in registers,
// and each vector is summed at the end. So an output adds its products in an order that depends on K alone: a row's
// result is the same bit for bit, however many rows and threads there are. bf16 weights are widened as they are read, or
// once for all tiles where there are several. Of many rows, a part that fits into the L2 cache is done at a time.

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

inline void put(float* to, float x) { *to = x; }

inline void put(bfloat16* to, float x) { store_first(to, all(x), 1); }

template <typename T, typename W>
void linear(const T* x, const W* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int threads) {
    static thread_local Room room;
    const float* in = reinterpret_cast<const float*>(x);
    if constexpr (!std::is_same_v<T, float>) {
        float* const wide_x = room.of(M * K);
        for_vectors(M * K, [&](int64_t i, auto load, auto store) { store(wide_x + i, load(x + i)); });
        in = wide_x;
    }
    const int64_t part = std::max<int64_t>(8 * R, CACHED / K / R * R), parts = (M + part - 1) / part;
    const int64_t tasks = (N + TASK - 1) / TASK;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (M * N * K > 1 << 16)
    {
        static thread_local Room of_weights, of_results;
        float *const wide_w = of_weights.of(std::is_same_v<W, float> ? 0 : C * K), *const some = of_results.of(C * part);
        for (int64_t task; (task = next.fetch_add(1)) < tasks * parts;) {
            const int64_t m = task / tasks * part, rows = std::min(part, M - m);
            const int64_t first = task % tasks * TASK, end = std::min(N, first + TASK);
            for (int64_t n = first; n < end; n += C) {
                const W* from[C];
                for (int c = 0; c < C; ++c) from[c] = w + std::min(n + c, N - 1) * K;
                const char* next = reinterpret_cast<const char*>(w + (n + C) * K);
                const int64_t bytes = std::min<int64_t>(C, std::max<int64_t>(0, N - n - C)) * K * sizeof(W);
                const bool direct = std::is_same_v<T, float> && !bias && n + C <= N;
                float* out = direct ? reinterpret_cast<float*>(y) + m * N + n : some;
                const int64_t stride = direct ? N : C;
                if (std::is_same_v<W, float> || rows <= R) {
                    tiles(in + m * K, rows, from, K, out, stride, next, bytes);
                } else {
                    const float* widened[C];
                    for (int c = 0; c < C; ++c) {
                        float* to = wide_w + c * K;
                        for_vectors(K, [&](int64_t k, auto load, auto store) { store(to + k, load(from[c] + k)); });
                        widened[c] = to;
                    }
                    tiles(in + m * K, rows, widened, K, out, stride, next, bytes);
                }
                for (int64_t r = 0; r < rows && !direct; ++r)
                    for (int64_t c = 0; c < C && n + c < N; ++c)
                        put(y + (m + r) * N + n + c, out[r * C + c] + (bias ? load_first(bias + n + c, 1)[0] : 0.0f));
            }
        }
    }
}

}  // namespace

#define LINEAR(NAME, T, W)                                                                                            \
    extern "C" void NAME(const T* x, const W* w, const T* bias, T* y, int64_t M, int64_t N, int64_t K, int64_t threads) { \
        linear(x, w, bias, y, M, N, K, int(threads));                                                                 \
    }
LINEAR(linear_float32_float32, float, float)
LINEAR(linear_float32_bfloat16, float, bfloat16)
LINEAR(linear_bfloat16_bfloat16, bfloat16, bfloat16)
