// Attention of a few new tokens over a long KV cache on a CPU, at the speed of memory. Called from attention/cpp.py, which
// has the legend and the contract. PyTorch's headers are left out on purpose: they would take ten times as long to compile.
//
// A task is one split of the slots of one KV head of one row. Its R = J x T query rows stay in the L1 cache while the
// split's K and V stream past once, in blocks. Splits have a fixed length, so that a row's result depends neither on its
// neighbours nor on the number of threads. In bf16, pairs of numbers are multiplied where the processor can; the weights of
// values are rounded for that. Elsewhere numbers are widened.

#include "vectors.h"

#include <atomic>
#include <thread>
#include <type_traits>
#include <vector>

#include "ahead.h"
#include "call.h"
#include "codes.h"

namespace {

constexpr int BLOCK = 32;    // slots whose scores are held at a time: two blocks of K and one of V fit into the L1 cache
constexpr int MAX_TILE = LANES == 16 ? 6 : 3;  // query rows whose sums, with four vectors each, fill the registers
constexpr int SPLIT = 512;   // slots of a task

// Scores of R query rows and four slots. R x 4 sums stay in registers, which GCC manages only if the loops are unrolled.
// Their vectors have eight numbers: the sum over a longer one takes as much time as its products save.
template <int R, typename X, typename T>
void score(const X* q, const T* const* k, int64_t dim, float scale, float* scores, Ahead ahead) {
    using V = Factors<X, Vec8>;
    Vec8 sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int s = 0; s < 4; ++s) sums[r][s] = Vec8{};
    }
    for (int64_t d = 0; d < dim; d += NUMBERS<V>) {
        ahead.step();
        V rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) rows[r] = hold<V>(q + r * dim + d);
#pragma GCC unroll 8
        for (int s = 0; s < 4; ++s) {
            const V x = hold<V>(k[s] + d);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][s] = plus_products(sums[r][s], rows[r], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const Quad quad = sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]) * scale;
        std::memcpy(scores + r * BLOCK, &quad, sizeof quad);
    }
}

// Of one slot: its weight in all lanes, and a vector of its values.
template <typename V, typename T>
struct Slots {
    static constexpr int COUNT = 1;
    static V weights(const float* p) { return broadcast<V>(p); }
    static V values(const T* const* v, int64_t d) { return hold<V>(v[0] + d); }
};

// Of two slots, in pairs.
template <typename V>
struct SlotPairs {
    typedef typename Bits<V>::Wide Pair;
    static constexpr int COUNT = 2;
    static Pair weights(const bfloat16* p) { return broadcast<Pair>(p); }
    static Pair values(const bfloat16* const* v, int64_t d) {
        return load_bits<V>(v[0] + d) | load_bits<V>(v[1] + d) << 16;
    }
};

// out = out * decay + p V for R query rows and C vectors of the head dim, which stay in registers.
template <typename V, int R, int C, typename X, typename T>
void add_values(float* out, int64_t dim, const X* p, const T* const* v, int64_t d, int count, const float* decay,
                Ahead ahead) {
    using At = std::conditional_t<std::is_same_v<X, bfloat16>, SlotPairs<V>, Slots<V, T>>;
    constexpr int N = sizeof(V) / sizeof(float);
    V sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = load<V>(out + r * dim + d + c * N) * decay[r];
    }
    for (int s = 0; s < count; s += At::COUNT) {
        ahead.step();
        decltype(At::weights(p)) weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) weights[r] = At::weights(p + r * BLOCK + s);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const auto x = At::values(v + s, d + c * N);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][c] = plus_products(sums[r][c], weights[r], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out + r * dim + d + c * N, sums[r][c]);
    }
}

// The results that a split leaves for the merge: (R) maxima, in whole vectors, (R, D) sums of p V and (R) sums of p. Where
// scores are asked for, also what they are made of: of each of its blocks (R, BLOCK) weights p, and the (R) maxima that
// these are relative to.
struct Partial {
    float *most, *out, *total, *blocks;
    Partial(float* at, int64_t query_rows, int64_t dim)
        : most(at), out(at + whole_vectors(query_rows)), total(out + query_rows * dim), blocks(total + query_rows) {}
    static int64_t size(int64_t query_rows, int64_t dim, bool scored) {
        const int64_t numbers = query_rows * (dim + 1 + (scored ? SPLIT / BLOCK * (BLOCK + 1) : 0));
        return (whole_vectors(query_rows) + numbers + 15) / 16 * 16;  // each begins with a cache line
    }
    float* block(int64_t i, int64_t query_rows) const { return blocks + i * query_rows * (BLOCK + 1); }
};

// Of entries in T. X is what is multiplied: T, or fp32.
template <typename T, typename X>
class Kernel : public Attending {
  public:
    explicit Kernel(const Call& call)
        : c(call), query_rows(c.group * c.new_tokens), heads(c.rows * c.kv_heads), done(heads) {
        static thread_local Room of_partials;
        for (int64_t b = 0; b < c.rows; ++b) {
            const int64_t row = cache_row(b);
            max_splits = std::max(max_splits, (last(row) - first(row) + SPLIT - 1) / SPLIT);
        }
        size = Partial::size(query_rows, c.dim, c.scores);
        // Weights stay in the cache if the next head overwrites them.
        room = c.scores ? std::min(heads, c.threads) : heads;
        all_partials = of_partials.of(room * max_splits * size);
    }

    void share() override {
        static thread_local Room of_work;
        // Codes are never multiplied by weights in bf16: there are never both.
        const int64_t rest = Coded::room(c, query_rows) + (std::is_same_v<X, float> ? 0 : query_rows * BLOCK);
        float* const wide = of_work.of((query_rows + BLOCK) * c.dim + query_rows * BLOCK + whole_vectors(query_rows) + rest);
        X* const q = reinterpret_cast<X*>(wide + BLOCK * c.dim);
        float *const scores = wide + (query_rows + BLOCK) * c.dim, *const decay = scores + query_rows * BLOCK;
        for (int64_t task; (task = next.fetch_add(1)) < heads * max_splits;) {
            const int64_t head = task / max_splits, split = task % max_splits;
            const int64_t b = head / c.kv_heads, kv = head % c.kv_heads;
            float* partials = all_partials + head % room * max_splits * size;
            // Tasks begin in order: the thread that still needs this room is at work.
            while (head >= room && done[head - room] <= max_splits) std::this_thread::yield();
            attend(b, kv, split, Partial(partials + split * size, query_rows, c.dim), q, scores, decay, wide);
            // The thread that ends a head's last split merges them: threads wait for each other only once.
            if (done[head].fetch_add(1) + 1 < max_splits) continue;
            merge(b, kv, partials, size);
            done[head] = max_splits + 1;
        }
    }

  private:
    const Call& c;
    const int64_t query_rows, heads;
    int64_t max_splits = 1, size, room;
    float* all_partials;
    std::vector<std::atomic<int64_t>> done;
    std::atomic<int64_t> next{0};

    int64_t cache_row(int64_t b) const { return c.cache_rows ? c.cache_rows[b] : b; }

    // The slots that any of a row's new tokens may see, or their places among the indices. Rows are those of the cache.
    int64_t last(int64_t b) const { return c.indices ? c.num_indices : c.seqlens[b]; }
    int64_t first(int64_t b) const {
        if (c.indices || c.positions) return 0;
        const int64_t seen = std::max<int64_t>(0, c.seqlens[b] - c.new_tokens + 1 - c.window);
        return c.codes ? seen / TILE * TILE : seen;
    }

    void attend(int64_t row, int64_t head, int64_t split, Partial to, X* q, float* scores, float* decay,
                float* wide) const {
        const int64_t b = cache_row(row);
        std::fill(to.out, to.out + query_rows * c.dim, 0.0f);
        std::fill(to.most, to.most + whole_vectors(query_rows), HIDDEN);
        std::fill(to.total, to.total + query_rows, 0.0f);
        const int64_t start = first(b) + split * SPLIT, end = std::min<int64_t>(start + SPLIT, last(b));
        if (start >= end) return;
        load_queries(row, head, q);
        const T* k = static_cast<const T*>(c.k) + b * c.k_row + head * c.k_head;
        const T* v = static_cast<const T*>(c.v) + b * c.v_row + head * c.v_head;
        const int64_t* indices = c.indices ? c.indices + (b * c.kv_heads + head) * c.num_indices : nullptr;
        const int64_t exact = c.codes ? c.codes->first_exact[b] : start;
        if (start < exact) attend_coded(b, head, start, std::min(end, exact), to, q, decay);
        X* const narrow = reinterpret_cast<X*>(decay + whole_vectors(query_rows));
        const float scale = std::is_same_v<X, float> ? 1.0f : 1.0f / std::sqrt(float(c.dim));
        int64_t slots[BLOCK];
        const T *k_at[BLOCK], *v_at[BLOCK];
        for (int64_t at = std::max(start, exact), count; at < end; at += count) {
            if (c.scores) scores = to.block((at - start) / BLOCK, query_rows);
            const bool in_order = !indices && c.k_slot == c.dim && c.v_slot == c.dim;
            count = std::min<int64_t>(BLOCK, end - at);
            const int padded = int(count + 3) / 4 * 4;
            for (int s = 0; s < padded; ++s) {
                slots[s] = s >= count ? -1 : indices ? indices[at + s] : at + s;
                const int64_t from = slots[s] >= 0 ? slots[s] : indices ? 0 : at;  // scored, then hidden
                k_at[s] = k + from * c.k_slot;
                v_at[s] = v + from * c.v_slot;
            }
            // Of this block's V and the next block's K, scores fetch the first half, weights a fifth, and sums the rest.
            const int64_t v_lines = in_order ? lines(count * c.dim) : 0;
            const int64_t k_lines = in_order && at + BLOCK < end ? lines(BLOCK * c.dim) : 0;
            Stream values = stream(v_at[0], v_lines), keys = stream(k_at[0] + BLOCK * c.dim, k_lines);
            const auto fetch = [&](int64_t some, int64_t steps) { return (values.lines ? values : keys).take(some, steps); };
            const int64_t scored = (v_lines + k_lines) / 2 / (padded / 4 * num_tiles());
            for (int s = 0; s < padded; s += 4) {
                for (int i = s; !in_order && i < s + 4; ++i) prefetch(v_at[i]);
                with(k_at + s, 4, wide, [&](auto* k_in) {
                    tiles([&](auto R, int64_t r) {
                        score<R>(q + r * c.dim, k_in, c.dim, scale, scores + r * BLOCK + s,
                                 fetch(scored, c.dim / NUMBERS<Factors<X, Vec8>>));
                    });
                });
            }
            for (int64_t r = 0; c.softcap > 0 && r < query_rows; ++r) cap_scores(scores + r * BLOCK, padded, c.softcap);
            if (indices || c.positions || count < padded || !all_seen(b, at, count)) hide(b, head, slots, padded, scores);
            const Ahead ahead = fetch((v_lines + k_lines) / 5, query_rows);
            const X* p = weigh(scores, padded, to, decay, narrow, ahead);
            if (c.scores) std::copy_n(to.most, query_rows, scores + query_rows * BLOCK);
            const int64_t summed = (values.lines + keys.lines) / (num_tiles() * std::max<int64_t>(1, c.dim / (4 * LANES)));
            with(v_at, padded, wide, [&](auto* v_in) {
                tiles([&](auto R, int64_t r) {
                    float* out = to.out + r * c.dim;
                    const X* weights = p + r * BLOCK;
                    const int64_t steps = padded / (std::is_same_v<X, float> ? 1 : 2);
                    int64_t d = 0;
                    for (; d + 4 * LANES <= c.dim; d += 4 * LANES)
                        add_values<Vec, R, 4>(out, c.dim, weights, v_in, d, padded, decay + r, fetch(summed, steps));
                    for (; d + 4 * STEP <= c.dim; d += 4 * STEP)
                        add_values<Vec8, R, 4>(out, c.dim, weights, v_in, d, padded, decay + r, fetch(summed, steps));
                    for (; d < c.dim; d += STEP)
                        add_values<Vec8, R, 1>(out, c.dim, weights, v_in, d, padded, decay + r, fetch(summed, steps));
                });
            });
        }
    }

    static int64_t lines(int64_t entries) { return (entries * int64_t(sizeof(T)) + 63) / 64; }
    static Stream stream(const T* from, int64_t lines) { return {reinterpret_cast<const char*>(from), lines}; }

    // The same of slots that are read as codes. `start` is that of a tile. `end` may lie within one where a row rests:
    // `weigh` gives what is behind it no weight.
    void attend_coded(int64_t b, int64_t head, int64_t start, int64_t end, Partial to, const X* q, float* decay) const {
        if constexpr (std::is_same_v<X, float>) {
            Coded codes(c, b * c.kv_heads + head, query_rows, decay + whole_vectors(query_rows));
            int64_t slots[CODED_BLOCK];
            for (int64_t at = start, count; at < end; at += count) {
                count = std::min<int64_t>(CODED_BLOCK, end - at);
                for (int64_t s = 0; s < count; s += TILE) {
                    codes.take_queries(at + s, q);
                    tiles([&](auto R, int64_t r) { codes.template score<R>(at + s, s, r); });
                }
                for (int64_t s = 0; s < count; ++s) slots[s] = at + s;
                for (int64_t r = 0; c.softcap > 0 && r < query_rows; ++r)
                    cap_scores(codes.of_block() + r * CODED_BLOCK, count, c.softcap);
                if (!all_seen(b, at, count)) hide<CODED_BLOCK>(b, head, slots, int(count), codes.of_block());
                weigh<CODED_BLOCK>(codes.of_block(), int(count), to, decay, nullptr, Ahead());
                codes.take_weights(at, count);
                tiles([&](auto R, int64_t r) { codes.template add_values<R>(at, count, r, to.out + r * c.dim, decay + r); });
            }
        }
    }

    // Whether every new token sees all slots from `at` on.
    bool all_seen(int64_t b, int64_t at, int64_t count) const {
        return at >= last(b) - c.window && at + count <= last(b) - c.new_tokens + 1;
    }

    // Calls `function` with the entries of some slots, in fp32 if many tiles would convert them again.
    template <typename Function>
    void with(const T* const* entries, int count, float* wide, Function function) const {
        if constexpr (!std::is_same_v<T, X>) {
            if (query_rows > 2 * MAX_TILE) {
                const float* at[BLOCK];
                for (int s = 0; s < count; ++s) {
                    at[s] = wide + s * c.dim;
                    for (int64_t d = 0; d < c.dim; d += STEP) store(wide + s * c.dim + d, load<Vec8>(entries[s] + d));
                }
                return function(static_cast<const float* const*>(at));
            }
        }
        function(entries);
    }

    int64_t num_tiles() const { return (query_rows + MAX_TILE - 1) / MAX_TILE; }

    // Query rows in tiles, as even as can be.
    template <typename Function>
    void tiles(Function function) const {
        const int64_t count = num_tiles();
        for (int64_t i = 0, r = 0; i < count; ++i) {
            const int64_t size = (query_rows - r) / (count - i);
            tile<MAX_TILE>(size, r, function);
            r += size;
        }
    }

    template <int R, typename Function>
    static void tile(int64_t size, int64_t r, Function function) {
        if (size == R) return function(std::integral_constant<int, R>(), r);
        if constexpr (R > 1) tile<R - 1>(size, r, function);
    }

    void prefetch(const T* from) const {
        for (int64_t d = 0; d < c.dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(from + d);
    }

    // Query rows (J, T) of a KV head; scaled, if they are in fp32.
    void load_queries(int64_t b, int64_t head, X* q) const {
        [[maybe_unused]] const float scale = 1.0f / std::sqrt(float(c.dim));
        for (int64_t r = 0; r < query_rows; ++r) {
            const T* from = static_cast<const T*>(c.q) + b * c.q_row + (r % c.new_tokens) * c.q_token +
                            (head * c.group + r / c.new_tokens) * c.q_head;
            if constexpr (std::is_same_v<X, bfloat16>) std::memcpy(q + r * c.dim, from, c.dim * sizeof(X));
            else for (int64_t d = 0; d < c.dim; d += STEP) store(q + r * c.dim + d, load<Vec8>(from + d) * scale);
        }
    }

    // Each new token sees itself and what came before, within its window. Scores are (R, WIDTH).
    template <int WIDTH = BLOCK>
    void hide(int64_t b, int64_t head, const int64_t* slots, int count, float* scores) const {
        const int32_t* positions = c.positions ? c.positions + (b * c.kv_heads + head) * c.slots : nullptr;
        for (int64_t t = 0; t < c.new_tokens; ++t) {
            const int64_t own = c.seqlens[b] - c.new_tokens + t;
            for (int s = 0; s < count; ++s) {
                const int64_t slot = slots[s], position = positions && slot >= 0 ? positions[slot] : slot;
                if (slot >= 0 && slot <= own && position > own - c.window) continue;
                for (int64_t g = 0; g < c.group; ++g) scores[(g * c.new_tokens + t) * WIDTH + s] = HIDDEN;
            }
        }
    }

    // Scores become weights relative to the greatest so far; `decay` is what earlier ones must be multiplied by. Returns
    // the weights as they are multiplied: where the scores were, or in `narrow`.
    template <int WIDTH = BLOCK>
    const X* weigh(float* scores, int count, Partial& to, float* decay, X* narrow, Ahead ahead) const {
        for (int64_t r = 0; r < query_rows; ++r) {
            float* row = scores + r * WIDTH;
            std::fill(row + count, row + whole_vectors(count), HIDDEN);
            Vec most = all(to.most[r]);
            for (int s = 0; s < count; s += LANES) {
                const Vec x = load(row + s);
                most = x > most ? x : most;
            }
            decay[r] = to.most[r];
            to.most[r] = max_of(most);
        }
        for (int64_t r = 0; r < query_rows; r += LANES) {
            const Vec most = load(to.most + r);
            store(decay + r, exp_vec(load(decay + r) - (most == HIDDEN ? Vec{} : most)));
        }
        for (int64_t r = 0; r < query_rows; ++r) {
            float* row = scores + r * WIDTH;
            ahead.step();
            const float base = to.most[r] == HIDDEN ? 0.0f : to.most[r];
            Vec total = {};
            for (int s = 0; s < count; s += LANES) {
                const Vec p = exp_as<X>(load(row + s) - base);
                store(row + s, p);
                if constexpr (std::is_same_v<X, bfloat16>) store(narrow + r * WIDTH + s, p);
                total += p;
            }
            to.total[r] = to.total[r] * decay[r] + sum_of(total);
        }
        if constexpr (std::is_same_v<X, bfloat16>) return narrow;
        else return scores;
    }

    // The splits of a KV head, and the sink of each query head, by their log-sum-exp.
    void merge(int64_t row, int64_t head, float* partials, int64_t size) const {
        const int64_t b = cache_row(row);
        const int64_t splits = std::max<int64_t>(1, (last(b) - first(b) + SPLIT - 1) / SPLIT);
        std::vector<float> sums(c.dim), lse(whole_vectors(query_rows));
        for (int64_t r = 0; r < query_rows; ++r) {
            const int64_t token = row * c.new_tokens + r % c.new_tokens, h = head * c.group + r / c.new_tokens;
            const float sink = c.sinks ? c.sinks[h] : HIDDEN;
            float most = sink, total = 0;
            for (int64_t i = 0; i < splits; ++i) {
                most = std::max(most, Partial(partials + i * size, query_rows, c.dim).most[r]);
            }
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t i = 0; i < splits && most != HIDDEN; ++i) {
                const Partial part(partials + i * size, query_rows, c.dim);
                const float weight = std::exp(part.most[r] - most);
                total += weight * part.total[r];
                for (int64_t d = 0; d < c.dim; ++d) sums[d] += weight * part.out[r * c.dim + d];
            }
            if (sink > HIDDEN) total += std::exp(sink - most);
            const float scale = 1 / total;  // every token sees itself: a total of 0 is an error, and gives NaN
            T* out = static_cast<T*>(c.out) + (token * c.kv_heads * c.group + h) * c.dim;
            for (int64_t d = 0; d < c.dim; d += STEP) store(out + d, load<Vec8>(sums.data() + d) * scale);
            lse[r] = !c.counted || c.counted[token] ? most + std::log(total) : -HIDDEN;
        }
        if (c.scores) add_scores(b, head, partials, size, lse.data());
    }

    // The attention that each slot received from all query rows; from one whose log-sum-exp is infinite, none.
    void add_scores(int64_t b, int64_t head, float* partials, int64_t size, const float* lse) const {
        float* scores = c.scores + (b * c.kv_heads + head) * c.slots;
        std::fill(scores, scores + first(b), 0.0f);
        std::fill(scores + last(b), scores + c.slots, 0.0f);
        std::vector<float> shares(whole_vectors(query_rows));
        for (int64_t at = first(b); at < last(b); at += BLOCK) {
            const int64_t done = at - first(b);
            const Partial part(partials + done / SPLIT * size, query_rows, c.dim);
            const float* weights = part.block(done % SPLIT / BLOCK, query_rows);
            std::copy_n(weights + query_rows * BLOCK, query_rows, shares.data());
            for (int64_t r = 0; r < query_rows; r += LANES) {
                store(shares.data() + r, exp_vec(load(shares.data() + r) - load(lse + r)));
            }
            Vec sums[BLOCK / LANES] = {};
            for (int64_t r = 0; r < query_rows; ++r) {
                for (int i = 0; i < BLOCK / LANES; ++i) sums[i] += shares[r] * load(weights + r * BLOCK + i * LANES);
            }
            std::memcpy(scores + at, sums, sizeof(float) * std::min<int64_t>(BLOCK, last(b) - at));
        }
    }
};

}  // namespace

std::unique_ptr<Attending> attending(const Call& call, const float*) { return std::make_unique<Kernel<float, float>>(call); }

std::unique_ptr<Attending> attending(const Call& call, const bfloat16*) {
#if BF16_PRODUCTS
    if (!call.codes && call.dim % NUMBERS<Pairs8> == 0) return std::make_unique<Kernel<bfloat16, bfloat16>>(call);
#endif
    return std::make_unique<Kernel<bfloat16, float>>(call);
}

template <typename T>
void attend(const Call& call) {
    const auto work = attending(call, static_cast<const T*>(nullptr));
#pragma omp parallel num_threads(call.threads)
    work->share();
}

extern "C" void attend_float32(const Call* call) { attend<float>(*call); }
extern "C" void attend_bfloat16(const Call* call) { attend<bfloat16>(*call); }
