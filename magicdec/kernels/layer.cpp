// The operators between a layer's matmuls and its attention, each in one pass over its input; and a forward pass of few
// rows through all layers. Called from models/operators.py and models/passes.py.
// Sums and norms are computed in fp32; in bf16 each operator's result is rounded, as PyTorch does; a SiLU and its product
// are one operator.

#include "matmul.h"

#include <deque>

#include "call.h"

extern "C" {

// Mirrored in operators.py. A token's queries are rotated in place; its rotated keys and its values are written to its slot.
struct Rotation {
    void* qkv;                      // (B, T, H + 2 K, D), contiguous
    const float *cos, *sin;         // (B, T, D / 2), contiguous
    const void *q_norm, *k_norm;    // (D); null: none
    void *k, *v;                    // (B, K, S, D); null: nothing is stored
    const int64_t* slots;           // (B, T), contiguous
    int64_t rows, new_tokens, heads, kv_heads, dim, k_row, k_head, k_slot, v_row, v_head, v_slot, threads;
    double epsilon;
};

// Mirrored in passes.py, like the next two. Matrices are (outputs, inputs), in one type; null: none.
struct Weights {
    const void *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias, *mlp_norm, *gate_up, *down;
};

// A layer's cache.
struct Entries {
    void *k, *v;               // (B, K, S, D)
    void* queries;             // (B, T, H, D): gets those of the new tokens, rotated; null: nobody wants them
    const int32_t* positions;  // this and codes as in call.h
    const Codes* codes;
    int64_t window;
    const int64_t* indices;  // these as in call.h, too
    float* scores;
    const bool* counted;
    int64_t num_indices;
};

// A forward pass: M = rows x new_tokens.
struct Pass {
    const Weights* weights;
    const Entries* entries;
    void *x, *out;         // (M, E): embeddings, which are overwritten, and the last layer's output, normalised
    void* total;           // (M, E), or null: the residual stream behind the last layer, before the norm
    const void* norm;      // (E)
    const int32_t* seqlens;
    const int64_t* cache_rows;  // as in call.h, for the rotation too
    Rotation rotation;     // but for qkv, the norms, and k and v
    int64_t layers, size, features, capacity;  // L, E, F, S
};

}

namespace {

inline Vec rounded(Vec x, const float*) { return x; }

inline Vec rounded(Vec x, const bfloat16*) {
    bfloat16 narrow[LANES];
    store(narrow, x);
    return load(narrow);
}

// Scales `size` numbers to a mean square of 1, times their weights, as T would hold them.
template <typename T, typename In, typename Out>
void normalize(const In* x, const T* weight, Out* out, int64_t size, float epsilon) {
    Vec squares = {};
    for_vectors(size, [&](int64_t i, auto load, auto) {
        const Vec v = load(x + i);
        squares += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + epsilon);
    for_vectors(size, [&](int64_t i, auto load, auto store) {
        store(out + i, rounded(load(x + i) * scale * load(weight + i), weight));
    });
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

// SiLU of the gate times the other half.
inline Vec gated(Vec x, Vec up) {
    const Vec e = exp_vec(x < 0 ? x : -x);  // e^-|x|
    return x * (x < 0 ? e : all(1.0f)) / (1.0f + e) * up;
}

template <typename T>
void gate(const T* gate_up, T* out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 14)
    for (int64_t r = 0; r < rows; ++r) {
        const T *gate = gate_up + 2 * r * size, *up = gate + size;
        for_vectors(size, [&](int64_t i, auto load, auto store) {
            store(out + r * size + i, gated(load(gate + i), load(up + i)));
        });
    }
}

template <typename T>
void rotate_token(const Rotation& c, int64_t token, const int64_t* cache_rows = nullptr) {
    const int64_t all_heads = c.heads + 2 * c.kv_heads, half = c.dim / 2, of = token / c.new_tokens;
    const int64_t row = cache_rows ? cache_rows[of] : of;
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

template <typename T>
void rotate(const Rotation& c) {
    const int64_t tokens = c.rows * c.new_tokens;
#pragma omp parallel for num_threads(c.threads) if (tokens * (c.heads + 2 * c.kv_heads) * c.dim > 1 << 14)
    for (int64_t token = 0; token < tokens; ++token) rotate_token<T>(c, token);
}

// x + y, normalised, as a matmul reads it. Every thread computes all rows for itself, which takes less time than waiting
// for others; the sums are stored by one thread each.
template <typename X, typename T>
const X* sums_normed(const T* x, const T* y, const T* weight, T* sum, int64_t rows, int64_t size, double epsilon) {
    static thread_local Room room;
    X* const normed = reinterpret_cast<X*>(room.of(rows * size));
    const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t r = 0; r < rows; ++r) {
        X* const row = normed + r * size;
        for_vectors(size, [&](int64_t i, auto load, auto store) {
            const Vec total = load(x + r * size + i) + load(y + r * size + i);
            store(row + i, rounded(total, x));
            if (r % threads == me) store(sum + r * size + i, total);
        });
        normalize(row, weight, row, size, float(epsilon));
    }
    return normed;
}

// All layers, by threads that start once. What a thread can do for itself, or leave to all, needs no barrier.
template <typename T, typename W>
class Forward {
  public:
    explicit Forward(const Pass& pass) : p(pass), turn(pass.rotation) {
        static thread_local Room rooms[6];
        T** const buffers[] = {&x, &qkv, &heads, &added, &sums, &features};
        const int64_t sizes[] = {0, N, inner, p.size, p.size, p.features};
        for (int i = 0; i < 6; ++i) *buffers[i] = reinterpret_cast<T*>(rooms[i].of(M * sizes[i]));
        x = static_cast<T*>(p.x);
        turn.qkv = qkv;
    }

    void run() {
        std::deque<Step> steps;
        for (int64_t i = 0; i < p.layers; ++i) steps.emplace_back(*this);
        std::fill_n(added, M * p.size, T{});
#pragma omp parallel num_threads(turn.threads)
        {
            for (int64_t i = 0; i < p.layers; ++i) {
                before(p.weights[i], p.entries[i], steps[i]);
                steps[i].attending->share();
#pragma omp barrier
                after(p.weights[i], steps[i]);
            }
            const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
            T* const total = p.total ? static_cast<T*>(p.total) : sums;
            const X* normed = sums_normed<X>(x, added, static_cast<const T*>(p.norm), total, M, p.size, turn.epsilon);
            for (int64_t r = me; r < M; r += threads) {
                T* const to = static_cast<T*>(p.out) + r * p.size;
                for_vectors(p.size, [&](int64_t i, auto load, auto store) { store(to + i, load(normed + r * p.size + i)); });
            }
        }
    }

  private:
    using X = Factor<T, W>;

    // A layer's matmuls and attention, as far as threads have come with them.
    struct Step {
        Matmul qkv, output, gate_up, down;
        Call call{};
        std::unique_ptr<Attending> attending;
        explicit Step(const Forward& f)
            : qkv(f.M, f.N, f.p.size), output(f.M, f.p.size, f.inner),
              gate_up(f.M, (f.p.features + GATES - 1) / GATES * TASK, f.p.size), down(f.M, f.p.size, f.p.features) {}
    };

    static constexpr int GATES = TASK / 2;  // half of a task's outputs, and what these gate is the other half
    const Pass& p;
    Rotation turn;
    const int64_t M = turn.rows * turn.new_tokens, inner = turn.heads * turn.dim, N = inner + 2 * turn.kv_heads * turn.dim;
    T *x, *qkv, *heads, *added, *sums, *features;

    // Queries, keys and values of the norm of x + added, and attention made ready.
    void before(const Weights& w, const Entries& entries, Step& step) {
        const X* normed = sums_normed<X>(x, added, as<T>(w.attention_norm), sums, M, p.size, turn.epsilon);
        multiply<T, W>(step.qkv, normed, as<W>(w.qkv), as<T>(w.qkv_bias), qkv, N);
#pragma omp master
        {
            turn.q_norm = w.q_norm, turn.k_norm = w.k_norm, turn.k = entries.k, turn.v = entries.v;
            const int64_t D = turn.dim, H = turn.heads, all = H + 2 * turn.kv_heads, T_new = turn.new_tokens;
            step.call = {qkv, entries.k, entries.v, heads, p.seqlens, entries.indices, entries.counted,
                         entries.positions, entries.scores, entries.codes, p.cache_rows,
                         turn.rows, T_new, turn.kv_heads, H / turn.kv_heads, D, p.capacity, entries.num_indices,
                         entries.window, turn.threads,
                         T_new * all * D, all * D, D, turn.k_row, turn.k_head, turn.k_slot,
                         turn.v_row, turn.v_head, turn.v_slot};
            step.attending = attending(step.call, as<T>(nullptr));
        }
#pragma omp barrier
#pragma omp for
        for (int64_t token = 0; token < M; ++token) {
            rotate_token<T>(turn, token, p.cache_rows);
            if (!entries.queries) continue;
            std::memcpy(static_cast<T*>(entries.queries) + token * inner, qkv + token * N, inner * sizeof(T));
        }
    }

    // Attention's projected output added to the residual stream, and the MLP of its norm.
    void after(const Weights& w, Step& step) {
        static thread_local Room room;
        const X* in = factors<W>(heads, M * inner, room);
        multiply<T, W>(step.output, in, as<W>(w.output), as<T>(w.output_bias), added, p.size);
#pragma omp barrier
        const X* normed = sums_normed<X>(sums, added, as<T>(w.mlp_norm), x, M, p.size, turn.epsilon);
        const int64_t F = p.features, E = p.size;
        const W* const gate_up = as<W>(w.gate_up);
        T* const to = features;
        step.gate_up.template take<W>(
            normed,
            [=](int64_t task, int i) {
                return gate_up + (std::min(task * GATES + i % GATES, F - 1) + (i < GATES ? 0 : F)) * E;
            },
            [=](int64_t task, int64_t m, int64_t rows, const float* out) {
                const int64_t n = task * GATES, count = std::min<int64_t>(GATES, F - n);
                for (int64_t r = 0; r < rows; ++r, out += TASK)
                    for_vectors(count, [&](int64_t i, auto load, auto store) {
                        store(to + (m + r) * F + n + i, gated(rounded(load(out + i), to), rounded(load(out + GATES + i), to)));
                    });
            });
#pragma omp barrier
        multiply<T, W>(step.down, factors<W>(features, M * F, room), as<W>(w.down), nullptr, added, E);
#pragma omp barrier
    }

    template <typename To>
    static const To* as(const void* from) {
        return static_cast<const To*>(from);
    }
};

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

extern "C" void forward_float32_float32(const Pass* pass) { Forward<float, float>(*pass).run(); }
extern "C" void forward_float32_bfloat16(const Pass* pass) { Forward<float, bfloat16>(*pass).run(); }
extern "C" void forward_bfloat16_bfloat16(const Pass* pass) { Forward<bfloat16, bfloat16>(*pass).run(); }
