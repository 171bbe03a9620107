// Entries in 4 or 8 bits, as attention/codes.py stores them, decoded a block at a time into the L1 cache.
#pragma once

#include "call.h"
#include "vectors.h"

namespace {

// The codes of one KV head of one row.
class Coded {
  public:
    Coded(const Call& call, int64_t head)
        : c(*call.codes), dim(call.dim), size(dim * c.bits / 8), groups(dim / c.feature_group),
          k(c.k + head * c.slots * size), v(c.v + head * c.slots * size),
          k_scales(half(c.k_scales) + head * (c.slots / c.token_group) * 2 * dim),
          v_scales(half(c.v_scales) + head * c.slots * groups * 2) {}

    // The room that decoding takes, in numbers.
    static int64_t room(const Call& call, int64_t block) {
        return call.codes ? 2 * call.dim + block * (call.dim / call.codes->feature_group) * 2 + LANES : 0;
    }

    // Keys of `count` slots from `at` on. A group of tokens has a scale and a least value for each feature.
    void keys(int64_t at, int64_t count, float* to, float* room) const {
        const float *scale = room, *least = room + dim;
        for (int64_t s = 0, group = -1; s < count; ++s) {
            if ((at + s) / c.token_group != group) {
                group = (at + s) / c.token_group;
                widen(k_scales + group * 2 * dim, 2 * dim, room);
            }
            decode(k + (at + s) * size, to + s * dim, [=](int64_t d, Vec x) { return x * load(scale + d) + load(least + d); });
        }
    }

    // Values: a group of features has a scale and a least value in each slot.
    void values(int64_t at, int64_t count, float* to, float* room) const {
        widen(v_scales + at * groups * 2, count * groups * 2, room);
        for (int64_t s = 0; s < count; ++s) {
            const float* scales = room + s * groups * 2;
            int64_t group = 0, end = c.feature_group;  // features come in their order
            decode(v + (at + s) * size, to + s * dim, [&](int64_t d, Vec x) {
                if (d >= end) ++group, end += c.feature_group;
                return x * scales[2 * group] + scales[2 * group + 1];
            });
        }
    }

  private:
    const Codes& c;
    const int64_t dim, size, groups;
    const uint8_t *k, *v;
    const float16 *k_scales, *v_scales;

    static const float16* half(const void* from) { return static_cast<const float16*>(from); }

    static void widen(const float16* from, int64_t count, float* to) {
        for_vectors(count, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i)); });
    }

    // Of 4 bits, the first half of the features lies in the upper halves of bytes. Fetches what the next block decodes.
    template <typename Scaled>
    void decode(const uint8_t* from, float* to, Scaled scaled) const {
        __builtin_prefetch(from + 64 * size);
        if (c.bits == 8) return decode<0, 255>(from, 0, to, scaled);
        decode<4, 15>(from, 0, to, scaled);
        decode<0, 15>(from, size, to, scaled);
    }

    template <int SHIFT, int MASK, typename Scaled>
    void decode(const uint8_t* from, int64_t first, float* to, Scaled scaled) const {
        for (int64_t i = 0; i < size; i += LANES) {
            const IntVec codes = load_bytes(from + i) >> SHIFT & MASK;
            store(to + first + i, scaled(first + i, __builtin_convertvector(codes, Vec)));
        }
    }
};

}  // namespace
