// Attention over entries in 4 or 8 bits, as attention/codes.py stores them: products of whole numbers.
//
// A group of keys has a scale and a least value for each feature, a group of a value's features for each slot. Queries
// are multiplied by the scales of the keys, weights by those of the values, and both are rounded to 8 bits relative to the
// largest of a block. Codes are whole numbers from 0 on; what they are in the middle of their range is added apart, in
// fp32, so that rounding concerns the distance from it alone.
#pragma once

#include <limits>

#include "call.h"
#include "vectors.h"

namespace {

constexpr int TILE = 16;  // slots whose codes lie together: of keys (C / 4, TILE, 4), of values (TILE / 4, C, 4)
constexpr int CODED_BLOCK = 128;  // slots whose weights are rounded together: with fewer, rounding takes longer than products
constexpr float LEAST = 1e-36f;  // numbers up to this count as 0 where they are rounded: 127 / a smaller one may be infinite

typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef int8_t Rounded __attribute__((vector_size(LANES)));

// Adds to each lane the products of its four bytes and of the four numbers at `factors`.
inline IntVec plus_dots(IntVec sums, Bytes bytes, const int8_t* factors) {
#if defined(__AVX512VNNI__) && LANES == 16
    int32_t four;
    std::memcpy(&four, factors, sizeof four);
    return reinterpret_cast<IntVec>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(bytes), _mm512_set1_epi32(four)));
#else
    const auto wide = reinterpret_cast<IntVec>(bytes);
    for (int i = 0; i < 4; ++i) sums += (wide >> 8 * i & 255) * factors[i];
    return sums;
#endif
}

// The codes in the upper and the lower halves of bytes.
inline Bytes upper(Bytes codes) { return codes >> 4; }
inline Bytes lower(Bytes codes) { return codes & 15; }

inline Bytes load_codes(const uint8_t* from) {
    Bytes codes;
    std::memcpy(&codes, from, sizeof codes);
    return codes;
}

// Numbers rounded to 8 bits relative to the largest of them: x is about factor * rounded.
struct Scaled {
    float factor;
    Vec sums;  // of the rounded numbers
};

inline Scaled rounded_to_bytes(const float* x, int64_t size, int8_t* to) {
    Vec most = {}, sums = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec one = load(x + i), other = -one;
        most = one > most ? one : most;
        most = other > most ? other : most;
    }
    const float largest = max_of(most), inverse = largest > LEAST ? 127 / largest : 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec shifted = load(x + i) * inverse + 12582912.0f;  // 1.5 * 2^23: what is left of the fraction is rounded off
        const Rounded bytes = __builtin_convertvector(reinterpret_cast<IntVec>(shifted) - 0x4b400000, Rounded);
        std::memcpy(to + i, &bytes, sizeof bytes);
        sums += shifted - 12582912.0f;
    }
    return {largest * (1.0f / 127), sums};
}

// The codes of one KV head of one row, and what its query rows and weights become for them.
class Coded {
  public:
    Coded(const Call& call, int64_t head, int64_t query_rows, float* room)
        : c(*call.codes), dim(call.dim), size(dim * c.bits / 8), groups(dim / c.feature_group), rows(query_rows),
          middle(c.bits == 4 ? 8 : 128), k(c.k + head * c.slots * size), v(c.v + head * c.slots * size),
          k_scales(half(c.k_scales) + head * (c.slots / c.token_group) * 2 * dim),
          v_scales(half(c.v_scales) + head * c.slots * groups * 2), wide(room),
          scores(wide + std::max<int64_t>(dim, CODED_BLOCK)), q_factor(scores + rows * CODED_BLOCK),
          q_base(q_factor + rows), p_factor(q_base + rows), p_base(p_factor + rows * groups),
          q(reinterpret_cast<int8_t*>(p_base + rows * groups)), p(q + rows * dim) {}

    // The room that this takes, in numbers.
    static int64_t room(const Call& call, int64_t query_rows) {
        if (!call.codes) return 0;
        const int64_t groups = call.dim / call.codes->feature_group;
        const int64_t in_bytes = query_rows * (call.dim + CODED_BLOCK * groups);
        return std::max<int64_t>(call.dim, CODED_BLOCK) + query_rows * (CODED_BLOCK + 2 + 2 * groups) + in_bytes / 4;
    }

    // Prepares the query rows for the keys of a tile from `at` on.
    void take_queries(int64_t at, const float* queries) {
        if (at / c.token_group == group) return;
        group = at / c.token_group;
        const float16* const scales = k_scales + group * 2 * dim;
        for (int64_t r = 0; r < rows; ++r) {
            Vec base = {};
            for (int64_t d = 0; d < dim; d += LANES) {
                const Vec scale = load(scales + d), x = load(queries + r * dim + d);
                store(wide + d, x * scale);
                base += x * (load(scales + dim + d) + middle * scale);
            }
            const Scaled scaled = rounded_to_bytes(wide, dim, q + r * dim);
            const bool finite = scaled.factor < std::numeric_limits<float>::infinity();
            q_factor[r] = scaled.factor;
            q_base[r] = finite ? sum_of(base - middle * scaled.factor * scaled.sums) : NAN;
        }
    }

    // The scores (rows, CODED_BLOCK) of a block, which become weights.
    float* of_block() const { return scores; }

    // Writes the scores of R query rows from `r` on and a tile of slots from `at` on, the block's `s`-th slot.
    template <int R>
    void score(int64_t at, int64_t s, int64_t r) const {
        if (c.bits == 4) score<R, 4>(k + at * size, s, r);
        else score<R, 8>(k + at * size, s, r);
    }

    // Prepares the weights of a block of `count` slots from `at` on.
    void take_weights(int64_t at, int64_t count) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t g = 0; g < groups; ++g) {
                Vec base = {};
                for (int64_t s = 0; s < count; s += LANES) {
                    const float16* const scales = v_scales + ((at + s) / TILE * groups + g) * 2 * TILE + s % TILE;
                    const Vec scale = load(scales), x = load(scores + r * CODED_BLOCK + s);
                    store(wide + s, x * scale);
                    base += x * (load(scales + TILE) + middle * scale);
                }
                const int64_t i = r * groups + g;
                const Scaled scaled = rounded_to_bytes(wide, count, p + i * CODED_BLOCK);
                p_factor[i] = scaled.factor;
                p_base[i] = sum_of(base - middle * scaled.factor * scaled.sums);
            }
        }
    }

    // out = out * decay + p V for R query rows from `r` on.
    template <int R>
    void add_values(int64_t at, int64_t count, int64_t r, float* out, const float* decay) const {
        if (c.bits == 4) add_values<R, 4>(v + at * size, count, r, out, decay);
        else add_values<R, 8>(v + at * size, count, r, out, decay);
    }

  private:
    const Codes& c;
    const int64_t dim, size, groups, rows;
    const float middle;
    const uint8_t *k, *v;
    const float16 *k_scales, *v_scales;
    float *wide, *scores, *q_factor, *q_base, *p_factor, *p_base;
    int8_t *q, *p;
    int64_t group = -1;

    static const float16* half(const void* from) { return static_cast<const float16*>(from); }

    template <int R, int BITS>
    void score(const uint8_t* tile, int64_t s, int64_t r) const {
        for (int part = 0; part < TILE; part += LANES) {
            IntVec first[R] = {}, second[R] = {};  // of 4 bits: halves of the features
            for (int64_t i = 0; i < size; i += 4) {
                const uint8_t* const from = tile + i * TILE + part * 4;
                __builtin_prefetch(from + 4 * TILE * size);
                const Bytes codes = load_codes(from);
#pragma GCC unroll 8
                for (int n = 0; n < R; ++n) {
                    const int8_t* const row = q + (r + n) * dim + i;
                    if constexpr (BITS == 8) first[n] = plus_dots(first[n], codes, row);
                    else first[n] = plus_dots(first[n], upper(codes), row), second[n] = plus_dots(second[n], lower(codes), row + size);
                }
            }
#pragma GCC unroll 8
            for (int n = 0; n < R; ++n) {
                const Vec sums = __builtin_convertvector(first[n] + second[n], Vec);
                store(scores + (r + n) * CODED_BLOCK + s + part, sums * q_factor[r + n] + q_base[r + n]);
            }
        }
    }

    template <int R, int BITS>
    void add_values(const uint8_t* tiles, int64_t count, int64_t r, float* out, const float* decay) const {
        for (int64_t d = 0; d < size; d += LANES) {
            IntVec first[R] = {}, second[R] = {};
            const int64_t in_first = d / c.feature_group, in_second = BITS == 8 ? 0 : (size + d) / c.feature_group;
            for (int64_t s = 0; s < count; s += 4) {
                const uint8_t* const from = tiles + s * size + d * 4;
                __builtin_prefetch(from + 4 * TILE * size);
                const Bytes codes = load_codes(from);
#pragma GCC unroll 8
                for (int n = 0; n < R; ++n) {
                    const int8_t* const row = p + (r + n) * groups * CODED_BLOCK + s;
                    if constexpr (BITS == 8) first[n] = plus_dots(first[n], codes, row + in_first * CODED_BLOCK);
                    else first[n] = plus_dots(first[n], upper(codes), row + in_first * CODED_BLOCK),
                         second[n] = plus_dots(second[n], lower(codes), row + in_second * CODED_BLOCK);
                }
            }
#pragma GCC unroll 8
            for (int n = 0; n < R; ++n) {
                add(out + n * dim + d, first[n], (r + n) * groups + in_first, decay[n]);
                if constexpr (BITS == 4) add(out + n * dim + size + d, second[n], (r + n) * groups + in_second, decay[n]);
            }
        }
    }

    void add(float* out, IntVec sums, int64_t i, float decay) const {
        store(out, load(out) * decay + __builtin_convertvector(sums, Vec) * p_factor[i] + p_base[i]);
    }
};

}  // namespace
