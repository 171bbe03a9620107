// What lies between a layer's matmuls and its attention, each in one pass over its input. Called from cpu.py.
// Sums and norms are computed in fp32; in bf16 a residual sum is rounded before it is normalised, as PyTorch does.

#include "vectors.h"

namespace {

// Scales `size` numbers to a mean square of 1, times their weights.
template <typename T, typename Out>
void normalize(const T* x, const T* weight, Out* out, int64_t size, float epsilon) {
    Vec squares = {};
    for_vectors(size, [&](int64_t i, auto load, auto) {
        const Vec v = load(x + i);
        squares += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + epsilon);
    for_vectors(size, [&](int64_t i, auto load, auto store) { store(out + i, load(x + i) * scale * load(weight + i)); });
}

template <typename T>
void add_norm(const T* x, const T* y, const T* weight, T* sum, T* normed, int64_t rows, int64_t size, double epsilon,
              int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 14)
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = r * size;
        for_vectors(size, [&](int64_t i, auto load, auto store) { store(sum + at + i, load(x + at + i) + load(y + at + i)); });
        normalize(sum + at, weight, normed + at, size, float(epsilon));
    }
}

template <typename T>
void gate(const T* gate_up, T* out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 14)
    for (int64_t r = 0; r < rows; ++r) {
        const T *gate = gate_up + 2 * r * size, *up = gate + size;
        for_vectors(size, [&](int64_t i, auto load, auto store) {
            const Vec x = load(gate + i), e = exp_vec(x < 0 ? x : -x);  // e^-|x|
            store(out + r * size + i, x * (x < 0 ? e : all(1.0f)) / (1.0f + e) * load(up + i));
        });
    }
}

}  // namespace

extern "C" {

// Mirrored in cpu.py. A token's queries are rotated where they lie; its keys, rotated, and its values go to its slot.
struct Rotation {
    void* qkv;                      // (B, T, H + 2 K, D), contiguous
    const float *cos, *sin;         // (B, T, D / 2), contiguous
    const void *q_norm, *k_norm;    // (D); null: none
    void *k, *v;                    // (B, K, S, D); null: nothing is stored
    const int64_t* slots;           // (B, T), contiguous
    int64_t rows, new_tokens, heads, kv_heads, dim, k_row, k_head, k_slot, v_row, v_head, v_slot, threads;
    double epsilon;
};

}

namespace {

template <typename T>
void rotate(const Rotation& c) {
    const int64_t all_heads = c.heads + 2 * c.kv_heads, half = c.dim / 2;
#pragma omp parallel for num_threads(c.threads) if (c.rows * c.new_tokens * all_heads * c.dim > 1 << 14)
    for (int64_t token = 0; token < c.rows * c.new_tokens; ++token) {
        const int64_t row = token / c.new_tokens;
        const float *cos = c.cos + token * half, *sin = c.sin + token * half;
        T* x = static_cast<T*>(c.qkv) + token * all_heads * c.dim;
        for (int64_t h = 0; h < all_heads; ++h, x += c.dim) {
            const int64_t kv = h - c.heads, v_head = kv - c.kv_heads;
            if (v_head >= 0) {
                T* to = static_cast<T*>(c.v) + row * c.v_row + v_head * c.v_head + (c.v ? c.slots[token] * c.v_slot : 0);
                if (c.v) std::memcpy(to, x, c.dim * sizeof(T));
                continue;
            }
            if (kv >= 0 && !c.k) continue;
            const void* norm = kv < 0 ? c.q_norm : c.k_norm;
            if (norm) normalize(x, static_cast<const T*>(norm), x, c.dim, float(c.epsilon));
            T* to = kv < 0 ? x : static_cast<T*>(c.k) + row * c.k_row + kv * c.k_head + c.slots[token] * c.k_slot;
            for_vectors(half, [&](int64_t i, auto load, auto store) {
                const Vec first = load(x + i), second = load(x + half + i), a = load(cos + i), b = load(sin + i);
                store(to + i, first * a - second * b);
                store(to + half + i, second * a + first * b);
            });
        }
    }
}

}  // namespace

#define LAYER(NAME, T)                                                                                                 \
    extern "C" void add_norm_##NAME(const T* x, const T* y, const T* weight, T* sum, T* normed, int64_t rows,          \
                                    int64_t size, double epsilon, int64_t threads) {                                   \
        add_norm(x, y, weight, sum, normed, rows, size, epsilon, threads);                                             \
    }                                                                                                                  \
    extern "C" void gate_##NAME(const T* gate_up, T* out, int64_t rows, int64_t size, int64_t threads) {               \
        gate(gate_up, out, rows, size, threads);                                                                       \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(const Rotation* call) { rotate<T>(*call); }
LAYER(float32, float)
LAYER(bfloat16, bfloat16)
